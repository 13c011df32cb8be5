"""One sequence on the worker: its tokens, its blocks and how far it has been computed. Knows no tensors."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # ranks follow no grammar, and need not load what does
    from worker.grammar import Automaton
    from worker.speculation.acceptance import AcceptanceRate


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the defaults switch everything off. ``temperature`` 0 is greedy.

    Attributes:
        logit_bias: (token id, value added to its logit).
        allowed_token_ids: when not empty, all other tokens are impossible.
        bad_words: token sequences that the output may not contain.
        min_tokens: stop tokens are impossible before this many output tokens.
        logprobs, prompt_logprobs: alternatives to report for each output or prompt token; None reports nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def bans_tokens(self) -> bool:
        """Whether some tokens may be impossible at some index."""
        return self.min_tokens > 0 or bool(self.bad_words)

    @property
    def has_rules(self) -> bool:
        """Whether there is something to look at in each step."""
        return self.bans_tokens or self.prompt_logprobs is not None

    @property
    def needs_known_tokens(self) -> bool:
        """Whether the next token cannot be chosen before the host knows the last one."""
        return bool(self.bad_words) and any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, and the likeliest alternatives' ids and log-probabilities, likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """As in protos/sampling.proto."""

    STOP = auto()
    LENGTH = auto()
    CANCELLED = auto()
    DEADLINE = auto()
    ERROR = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt being continued.

    Token counts, from the start of the prompt:

        0 ......... num_computed ......... len(tokens) .. total_len
        |-- in the KV cache ---|-- known, not yet --|- sampled by a step
                                  computed             still running -|

    Attributes:
        tokens: prompt and output ids that the host knows.
        num_prompt_tokens: length of the prompt as submitted (output of an earlier attempt included).
        output_start: where the output begins in ``tokens``: after the prompt that the client sent.
        last_len: length of ``tokens`` at which ``max_tokens`` is reached.
        needs_known_tokens, has_rules: those of ``sampling``, which the scheduler asks in each step.
        num_emitted: how many of the prompt's last tokens are output of an earlier attempt.
        max_tokens: most output tokens, ``num_emitted`` included.
        cache_root: root of the block hash chain.
        deadline: monotonic seconds, or None.
        priority: its class; lower ones run first.
        skip_reading_prefix_cache: compute the whole prompt, even if a prefix of it is cached.
        turn: (priority, number of its arrival): the order in which sequences are served. Set by the scheduler.
        blocks: ids of the blocks that hold its keys and values, in order.
        block_names: hash-chain names of the leading full blocks of known tokens.
        num_committed: how many of ``blocks`` are known to the prefix cache, or were found there.
        num_computed: tokens whose keys and values are in the cache once all launched steps have run.
        num_pending: tokens sampled by launched steps whose ids the host does not know yet (0 or 1).
        num_cached_tokens: prompt tokens found in the prefix cache when it first ran.
        num_prompt_logprobs: prompt tokens whose log-probabilities were planned; the first one, which has none, counts.
        row: its place in the device's per-sequence buffers while it runs, else -1.
        automaton: what its output must be; it has taken all output tokens that the host knows, also while the sequence
            waits to be computed again.
        acceptance: of its drafts, once it had some.
        error: for the finish reason ERROR, what the request is to blame for.
    """

    request_id: str
    tokens: "array[int]"
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    num_emitted: int = 0
    cache_root: bytes = b""
    deadline: float | None = None
    automaton: "Automaton | None" = None
    priority: int = 0
    skip_reading_prefix_cache: bool = False

    status: SequenceStatus = SequenceStatus.WAITING
    num_prompt_tokens: int = field(init=False)
    output_start: int = field(init=False)
    last_len: int = field(init=False)
    needs_known_tokens: bool = field(init=False)
    has_rules: bool = field(init=False)
    blocks: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    num_computed: int = 0
    num_pending: int = 0
    num_cached_tokens: int | None = None
    num_prompt_logprobs: int = 1
    row: int = -1
    turn: tuple[int, int] = (0, 0)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    acceptance: "AcceptanceRate | None" = None
    error: str = ""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.output_start = self.num_prompt_tokens - self.num_emitted
        self.last_len = self.output_start + self.max_tokens
        self.needs_known_tokens = self.sampling.needs_known_tokens
        self.has_rules = self.sampling.has_rules

    @property
    def total_len(self) -> int:
        """Tokens, those still being sampled included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        """Known output tokens, those of earlier attempts included: the index of the next one."""
        return len(self.tokens) - self.output_start

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether a cached prefix may stand in for its prompt: not when the prompt's logits are wanted."""
        return self.sampling.prompt_logprobs is None and not self.skip_reading_prefix_cache

    def banned_tokens(self, drafts: "list[int] | tuple[()]" = ()) -> list[int]:
        """Token ids that must not come next, or after the drafts if they are accepted.

        Needs all tokens to be known if there are long bad words.
        """
        banned: list[int] = []
        if self.num_output + self.num_pending + len(drafts) < self.sampling.min_tokens:
            banned += self.stop_token_ids
        for word in self.sampling.bad_words:
            before = len(word) - 1
            start = len(self.tokens) + len(drafts) - before
            last = (*self.tokens[start:], *drafts)[-before:] if start >= self.output_start else ()
            if before == 0 or last == word[:-1]:
                banned.append(word[-1])
        return list(dict.fromkeys(banned))

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def packed_tokens(self, start: int, end: int) -> memoryview:
        """Token ids [start, end) as little-endian uint32."""
        return memoryview(self.tokens)[start:end].cast("B")


def token_array(packed: bytes | None = None) -> "array[int]":
    """An array of uint32 token ids, from little-endian bytes. Raises ValueError when the length is no multiple of 4."""
    tokens: array[int] = array("I")
    if packed:
        tokens.frombytes(packed)
    return tokens
