"""Log-probabilities in OpenAI's two shapes: one entry a token for chats, four parallel lists for completions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from protos import sampling_pb2


@dataclass(frozen=True)
class Alternative:
    """A token that might have come: its bytes and its log-probability."""

    token: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """One token of a text. The first token of a prompt has no log-probability and no alternatives."""

    token: bytes
    logprob: float | None
    alternatives: list[Alternative]


def tokens_of(
    logprobs: sampling_pb2.Logprobs, token_bytes: Iterator[bytes], top_token_bytes: Iterator[bytes]
) -> list[TokenLogprob]:
    """The tokens of a message of the wire. NaN says that a token has no log-probability, and then no alternatives."""
    tokens = []
    top_logprobs = iter(logprobs.top_logprobs)
    for value in logprobs.logprobs:
        known = value == value  # not NaN
        count = logprobs.top_count if known else 0
        alternatives = [Alternative(next(top_token_bytes), next(top_logprobs)) for _ in range(count)]
        tokens.append(TokenLogprob(next(token_bytes), value if known else None, alternatives))
    return tokens


def chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    content = [
        {
            **_entry(token.token, token.logprob),
            "top_logprobs": [_entry(other.token, other.logprob) for other in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


class LogprobShaper:
    """Shapes the tokens of one request's choices, piece by piece.

    Args:
        chat: the shape of chats, else that of completions, whose offsets count each choice's characters so far.
        num_choices: of the request.
    """

    def __init__(self, chat: bool, num_choices: int) -> None:
        self._chat = chat
        self._offsets = [0] * num_choices

    def shape(self, index: int, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """The ``logprobs`` of a choice's next tokens."""
        if self._chat:
            return chat_logprobs(tokens)
        shaped = completion_logprobs(tokens, self._offsets[index])
        self._offsets[index] += sum(map(len, shaped["tokens"]))
        return shaped


def completion_logprobs(tokens: list[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """The ``logprobs`` of a completion choice.

    Args:
        tokens: consecutive ones.
        text_offset: characters of the choice's text before the first of them.
    """
    texts = [token.token.decode("utf-8", "replace") for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": offsets,
    }


def _top(token: TokenLogprob) -> dict[str, float] | None:
    """The alternatives by their text, and the token itself, which need not be among the likeliest."""
    if token.logprob is None:
        return None
    top = {other.token.decode("utf-8", "replace"): other.logprob for other in reversed(token.alternatives)}
    # Two tokens may be written alike; the likelier one, which comes first, is kept.
    top = dict(reversed(top.items()))
    top.setdefault(token.token.decode("utf-8", "replace"), token.logprob)
    return top
