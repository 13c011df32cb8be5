"""What a client notes of a request, and the figures that many of them come to. Times are ``time.monotonic`` seconds."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """A request to send.

    Attributes:
        prompt: token ids.
        max_tokens: the output has exactly as many.
        due: when to send it, in seconds after the start of its run; None: as soon as a stream is free.
    """

    prompt: list[int]
    max_tokens: int
    due: float | None = None


@dataclass
class Record:
    """A request that is through.

    Attributes:
        began: when it was sent, or was due to be.
        times: when each message with output came; each holds one token, or a few when the client was slow.
        token_ids: of the output, where the way it came tells them.
        text: of the output.
        tokens: of the output, as the server counted them.
        started: its place among the requests of its client, in the order in which they were sent.
    """

    began: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    started: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first message with output."""
        return self.times[0] - self.began


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of them lie; not a number when there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def rate(records: list[Record]) -> tuple[float, float]:
    """Output tokens and requests per second, from the first request's start to the last one's end."""
    seconds = max(record.times[-1] for record in records) - min(record.began for record in records)
    return sum(record.tokens for record in records) / seconds, len(records) / seconds


def describe(records: list[Record], first_wave: int) -> str:
    """One line: output tokens per second, and times to the first token and between messages, in milliseconds.

    ``first_wave``: requests of each client that all began at once, and wait for each other's prompts.
    """
    intervals = [later - earlier for r in records for earlier, later in zip(r.times, r.times[1:], strict=False)]
    ttft = [record.ttft for record in records]
    settled = [record.ttft for record in records if record.started >= first_wave]
    tokens, requests = rate(records)
    parts = [f"{tokens:.0f} output tokens/s", f"{requests:.2f} requests/s"]
    named = [("TTFT", ttft), ("after the first wave", settled if first_wave else []), ("ITL", intervals)]
    for name, values in named:
        if values:
            parts.append(f"{name} {quantile(values, 0.5) * 1e3:.2f} / {quantile(values, 0.99) * 1e3:.2f}")
    return ", ".join(parts)
