"""What a client sends, and what it notes of each request. Times are ``time.monotonic`` seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A text, token ids, or the messages of a chat.
Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """A request to send.

    Attributes:
        prompt: what is sent; in a later turn of a session, what comes after the answer before.
        max_tokens: the longest output.
        due: when to send it, in seconds after the start of its run; None: as soon as there is room.
        reads_cache: whether a cached prefix may be used. Where it is, sums come in another order.
        fields: more of an HTTP request's body.
        source: where it was read, for messages; empty: it was made up.
    """

    prompt: Prompt
    max_tokens: int
    due: float | None = None
    reads_cache: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Session:
    """Requests of which each continues the answer to the one before. Most have one only.

    Attributes:
        turns: at least one.
        due: of the first turn, as in ``Job``; later ones follow at once.
    """

    turns: tuple[Job, ...]
    due: float | None = None


@dataclass
class Record:
    """A request that was sent.

    Attributes:
        began: when it was sent, or was due to be.
        times: when each message with output came; each holds one token, or a few when the client was slow.
        token_ids: of the output, where the way it came tells them.
        text: of the output.
        tokens, prompt_tokens, cached_tokens: as the server counted them; 0 where it did not tell.
        started: its place among the requests of its client, in the order in which they were sent.
        ended: when the last of it came.
        error: the kind of its failure; empty: it is complete.
        detail: what was said of the failure.
    """

    began: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    started: int = 0
    ended: float = 0.0
    error: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first message with output."""
        return self.times[0] - self.began

    @property
    def intervals(self) -> list[float]:
        """Seconds between one message with output and the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class RequestFailed(Exception):
    """A request did not end as it should.

    Args:
        kind: by which failures are counted: few and short, say ``http_429``.
        message: what was said.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def continued(prompt: Prompt, record: Record, more: Prompt) -> Prompt:
    """A session's next prompt: the one before, its answer, and what comes next.

    Raises:
        ValueError: the prompts are not of one kind, or the answer's token ids are not known.
    """
    if isinstance(prompt, str) and isinstance(more, str):
        return f"{prompt}{record.text} {more}"
    if isinstance(prompt, list) and isinstance(more, list) and prompt and more:
        first, next_first = prompt[0], more[0]
        if isinstance(first, dict) and isinstance(next_first, dict):
            return [*prompt, {"role": "assistant", "content": record.text}, *more]
        if isinstance(first, int) and isinstance(next_first, int) and record.token_ids:
            return [*prompt, *record.token_ids, *more]
    raise ValueError("a session's turns are all texts, all messages, or all token ids with answers that tell theirs")
