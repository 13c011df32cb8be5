"""The figures that many requests come to, in one line. Times are ``time.monotonic`` seconds."""

from quire.bench.records import Record


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
    intervals = [interval for record in records for interval in record.intervals]
    ttft = [record.ttft for record in records]
    settled = [record.ttft for record in records if record.started >= first_wave]
    tokens, requests = rate(records)
    parts = [f"{tokens:.0f} output tokens/s", f"{requests:.2f} requests/s"]
    named = [("TTFT", ttft), ("after the first wave", settled if first_wave else []), ("ITL", intervals)]
    for name, values in named:
        if values:
            parts.append(f"{name} {quantile(values, 0.5) * 1e3:.2f} / {quantile(values, 0.99) * 1e3:.2f}")
    return ", ".join(parts)
