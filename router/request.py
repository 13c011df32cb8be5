"""The router's record of a request: what was asked, what was generated so far, and what its client was not sent yet."""

import asyncio
import math
import sys
from array import array
from typing import TYPE_CHECKING, NamedTuple

from protos import inference_pb2, sampling_pb2
from router.constraints import Constraint
from router.detokenizer import Detokenizer
from router.errors import DeadlineExceeded, InternalError, InvalidArgument, RequestError, Unavailable
from router.recovery import Attempts
from router.request_trace import RequestTrace
from router.route import Route
from router.stop_strings import compile_stops
from router.token_bytes import TokenBytes
from router.token_logprobs import OutOfStep, TokenLogprobs

if TYPE_CHECKING:
    from router.worker_link import WorkerLink

# Of an output that is sent whole: decoding must not hold up the event loop.
_MOST_DECODED_AT_ONCE = 4096
# Of one Delta's tokens in memory, about, which is more than most take on the wire; and characters of its text, to which
# the last 4,096 tokens may be added. So it stays below the size that a message may have.
_PART_BYTES = 1 << 20
_PART_CHARS = 1 << 18
_STOP = sampling_pb2.FINISH_REASON_STOP
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH


class GenerateParams(NamedTuple):
    """A valid request with all defaults filled in, apart from its prompt.

    Attributes:
        constraint: what the output must be, if anything.
        min_tokens: before this many, neither a token nor a stop string ends the output.
        max_tokens: None: as many as the context has room for.
        eos_token_ids: the model's end-of-sequence tokens, unless the client wants to go past them.
        stop_token_ids: the client's.
        text, token_ids, token_bytes: whether Deltas carry them.
        logprobs, prompt_logprobs: alternatives to report for each output or prompt token; None: no report.
        priority: lower ones run first.
        tenant: on whose behalf it is.
        session_id: what it belongs to.
    """

    model: str
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...]
    constraint: Constraint
    bad_words: tuple[str, ...]
    min_tokens: int
    max_tokens: int | None
    stop: tuple[str, ...]
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    keep_stop: bool
    text: bool
    token_ids: bool
    final_only: bool
    token_bytes: bool
    logprobs: int | None
    prompt_logprobs: int | None
    cache_salt: bytes
    skip_reading_prefix_cache: bool
    priority: int
    tenant: str
    session_id: str


class Choice:
    """One of a request's continuations. Workers' messages come in by ``take`` and ``finish``."""

    __slots__ = (
        "_cached_tokens",
        "_decoded",
        "_detokenizer",
        "_ending_ids",
        "_finished",
        "_logprobs",
        "_most_unsent",
        "_part",
        "_seen",
        "_sent_finished",
        "_sent_ids",
        "_text",
        "_wakes",
        "_wants_tokens",
        "_watches_text",
        "attempts",
        "index",
        "link",
        "paused",
        "request",
        "running",
        "slot",
        "token_ids",
    )  # fmt: skip

    def __init__(self, request: "Request", index: int, token_bytes: TokenBytes) -> None:
        params = request.params
        self.request = request
        self.index = index
        # The worker that runs it, and the slot there.
        self.link: WorkerLink | None = None
        self.slot = -1
        # Whether that worker has begun to run it.
        self.running = False
        self.token_ids: list[int] = []
        # Its client is too far behind: no worker is to run it until that has caught up.
        self.paused = False
        # How often that went wrong.
        self.attempts = Attempts()
        self._cached_tokens: int | None = None
        stops = compile_stops(params.stop) if params.stop else None
        self._detokenizer = Detokenizer(token_bytes, stops, keep_stop=params.keep_stop, min_tokens=params.min_tokens)
        # A stop token ends the text before itself, unless the client wants to see it.
        self._ending_ids = params.eos_token_ids if params.keep_stop else params.eos_token_ids | params.stop_token_ids
        self._text: list[str] = []
        # Without stop strings, ids become text when it is sent, many at a time.
        self._watches_text = stops is not None
        self._decoded = 0
        # Whether there is something to send with each token.
        self._wakes = not params.final_only
        self._logprobs = TokenLogprobs()
        self._sent_ids = 0
        # Tokens that were taken to be sent, in whatever form, and how many more there may be.
        self._seen = 0
        self._most_unsent = request.max_unsent_bytes // _bytes_a_token(params)
        # Most tokens of one Delta. So many are sent even of an output that is to be sent at its end.
        self._part = max(1, min(_PART_BYTES, request.max_unsent_bytes) // _bytes_a_token(params))
        self._wants_tokens = params.token_ids or params.token_bytes or params.logprobs is not None
        self._finished: inference_pb2.Finished | None = None
        self._sent_finished = False

    @property
    def ended(self) -> bool:
        """Nothing more will be generated."""
        return self._finished is not None

    @property
    def caught_up(self) -> bool:
        """Whether all tokens were taken to be sent."""
        return self._seen == len(self.token_ids)

    @property
    def seed(self) -> int:
        """Choices of one request differ in their random numbers alone."""
        return (self.request.params.seed + self.index) % 2**64

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first worker had in its prefix cache."""
        return self._cached_tokens or 0

    def admit(self, cached_tokens: int) -> None:
        """A worker has begun to run it. What a later one finds in its cache is not what the client is to pay for."""
        self.running = True
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens
        self.request.begun.set()

    def usage(self) -> sampling_pb2.Usage:
        """Its cost so far, as if the first worker had done all of it."""
        return sampling_pb2.Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=len(self.token_ids),
            cached_tokens=self.cached_tokens,
        )

    def take(self, first_index: int, ids: list[int]) -> bool:
        """New tokens from the worker, the first of which is output number ``first_index``.

        Tokens that came before are dropped.

        Returns:
            Whether the worker must be told to end the sequence: a stop string ended the choice, or it is paused.

        Raises:
            OutOfStep: tokens are missing in between.
        """
        repeated = len(self.token_ids) - first_index
        if repeated:
            if repeated < 0:
                raise OutOfStep(f"tokens from {first_index} on came when {len(self.token_ids)} were expected")
            ids = ids[repeated:]
        if not ids:
            return False
        self.token_ids += ids
        if self._watches_text:
            self._decode()
            if self._detokenizer.stop_string is not None:
                self._end(_STOP)
                self.request.changed.set()
                return True
        elif len(self.token_ids) - self._decoded >= _MOST_DECODED_AT_ONCE:
            self._decode()
        unsent = len(self.token_ids) - self._seen
        if self._wakes or unsent >= self._part:
            self.request.changed.set()
        self.paused = unsent > self._most_unsent
        return self.paused

    def _decode(self) -> None:
        """Turns the ids that were not yet into text; those after a stop string are dropped."""
        params, start = self.request.params, self._decoded
        ids = self.token_ids[start:] if start else self.token_ids
        self._decoded = start + len(ids)
        if not ids or not (params.text or self._watches_text):
            return
        text, used = self._detokenizer.push(ids[:-1] if ids[-1] in self._ending_ids else ids)
        if self._detokenizer.stop_string is not None:
            del self.token_ids[start + used :]
        if text and params.text:
            self._text.append(text)

    def take_logprobs(self, first_index: int, logprobs: sampling_pb2.Logprobs) -> None:
        """Log-probabilities of output tokens, which must come before ``take`` of these tokens.

        Raises:
            OutOfStep: some are missing in between.
        """
        self._logprobs.add(first_index, logprobs)

    def finish(
        self, row: sampling_pb2.Usage, reason: int, stop_token_id: int | None, error: str, field: str = ""
    ) -> None:
        """The worker says that the sequence ended, and what it used.

        ``field`` is the request's that an ``error`` is to blame on; without one, the worker is.

        Raises:
            OutOfStep: it generated more tokens than came.
        """
        request = self.request
        if reason in (_STOP, _LENGTH):
            if row.completion_tokens != len(self.token_ids):
                raise OutOfStep(
                    f"the sequence ended after {row.completion_tokens} tokens, of which {len(self.token_ids)} came"
                )
            self.admit(row.cached_tokens)
            self._complete(reason, stop_token_id)
        elif reason == sampling_pb2.FINISH_REASON_DEADLINE:
            request.fail(DeadlineExceeded("the deadline passed while the model was generating"))
        elif reason == sampling_pb2.FINISH_REASON_CANCELLED:
            request.fail(Unavailable("the worker running this request gave it up; send it again"))
        elif field:
            request.fail(InvalidArgument(field, error))
        else:
            request.fail(InternalError(f"request {request.id}: the worker failed: {error or reason}"))

    def end_if_complete(self) -> bool:
        """Ends the choice if its last token was its end, of which its worker could not tell any more."""
        params, last = self.request.params, self.token_ids[-1] if self.token_ids else -1
        if last in params.eos_token_ids or last in params.stop_token_ids:
            self._complete(_STOP, last)
        elif len(self.token_ids) >= self.request.max_tokens:
            self._complete(_LENGTH, None)
        return self.ended

    def _complete(self, reason: int, stop_token_id: int | None) -> None:
        """All tokens are known: shows the rest of the text, in which a stop string may yet be found."""
        self._decode()
        text = self._detokenizer.flush(is_cut=reason == _LENGTH)
        if text and self.request.params.text:
            self._text.append(text)
        self._end(_STOP if self._detokenizer.stop_string is not None else reason, stop_token_id)
        self.request.changed.set()

    def _end(self, reason: int, stop_token_id: int | None = None) -> None:
        finished = inference_pb2.Finished(index=self.index, usage=self.usage())
        finished.reason = reason  # type: ignore[assignment]
        if self._detokenizer.stop_string is not None:
            finished.stop_string = self._detokenizer.stop_string
        elif stop_token_id is not None and stop_token_id not in self.request.params.eos_token_ids:
            finished.stop_token_id = stop_token_id
        self._finished = finished
        self.request.begun.set()

    def take_unsent(self) -> list[inference_pb2.GenerateEvent]:
        """What the client was not sent yet: one Delta, unless it is more than a message should hold.

        Counts as sent from then on.
        """
        unsent: list[inference_pb2.GenerateEvent] = []
        if self._sent_finished:
            return unsent
        if not self.ended:
            if not self._wakes and len(self.token_ids) - self._seen < self._part:
                return unsent
            self._decode()
        self._seen = len(self.token_ids)
        while self._text or (self._wants_tokens and len(self.token_ids) > self._sent_ids):
            delta = inference_pb2.Delta(index=self.index)
            if self._text:
                delta.text = self._take_text()
            if self._wants_tokens and len(self.token_ids) > self._sent_ids:
                self._add_tokens(delta)
            unsent.append(inference_pb2.GenerateEvent(delta=delta))
        if self._finished is not None:
            self._sent_finished = True
            unsent.append(inference_pb2.GenerateEvent(finished=self._finished))
        return unsent

    def _take_text(self) -> str:
        """The first part of the unsent text, which is all of it but when a client is far behind."""
        count = size = 0
        while count < len(self._text) and size < _PART_CHARS:
            size += len(self._text[count])
            count += 1
        text = "".join(self._text[:count])
        del self._text[:count]
        return text

    def _add_tokens(self, delta: inference_pb2.Delta) -> None:
        """Puts unsent tokens into a Delta, with all that is wanted of them."""
        params = self.request.params
        start = self._sent_ids
        end = min(len(self.token_ids), start + self._part)
        self._sent_ids = end
        delta.first_index = start
        ids = self.token_ids[start:end]
        delta.token_ids.extend(ids)
        if params.logprobs is not None:
            delta.logprobs.CopyFrom(self._logprobs.of(start, end))
            self._logprobs.forget(end)
        if params.token_bytes:
            shown = self.request.token_bytes.shown
            delta.token_bytes.extend(map(shown, ids))
            delta.top_token_bytes.extend(map(shown, delta.logprobs.top_token_ids))


class Request:
    """One Generate call.

    Args:
        request_id: unique among running requests.
        params: what was asked.
        deadline: in the loop's time; None: never.
        max_unsent_bytes: of each choice, about; when a stream's client is further behind, the choice is paused.
        trace: is told what becomes of it.
    """

    def __init__(
        self,
        request_id: str,
        params: GenerateParams,
        deadline: float | None,
        max_unsent_bytes: int = sys.maxsize,
        trace: RequestTrace | None = None,
    ) -> None:
        self.id = request_id
        self.trace = trace or RequestTrace()
        self.params = params
        self.deadline = deadline
        self.max_unsent_bytes = max_unsent_bytes
        # Packed ids; known once the prompt was tokenized.
        self.prompt = b""
        self.prompt_tokens = 0
        self.max_tokens = 0
        # The ids of each way to write a bad word.
        self.bad_word_ids: list[list[int]] = []
        self.choices: list[Choice] = []
        # When it first waited for a worker, in the loop's time, and how its first choice came to one.
        self.arrival: float | None = None
        self.route: Route | None = None
        # What the worker reports of the prompt's tokens, of which the first has no log-probability.
        self.prompt_logprobs = TokenLogprobs(first_index=1)
        self._sent_prompt_logprobs = False
        # Why the call fails, if it does.
        self.failure: RequestError | None = None
        # Set when there is something to send, or a failure.
        self.changed = asyncio.Event()
        # Set when a worker has begun to run it, or it has ended.
        self.begun = asyncio.Event()

    def begin(self, token_ids: list[int], max_tokens: int, token_bytes: TokenBytes) -> None:
        """The prompt is known: makes the choices."""
        self.prompt = pack_ids(token_ids)
        self.prompt_tokens = len(token_ids)
        self.max_tokens = max_tokens
        self.token_bytes = token_bytes
        self.choices = [Choice(self, index, token_bytes) for index in range(self.params.n)]

    @property
    def ended(self) -> bool:
        """All choices are complete, or the call fails."""
        return self.failure is not None or (bool(self.choices) and all(choice.ended for choice in self.choices))

    def fail(self, error: RequestError) -> None:
        """Ends the call with an error; the first one counts."""
        if self.failure is None:
            self.failure = error
            self.changed.set()
            self.begun.set()

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether all of them have come."""
        return self.prompt_logprobs.end >= self.prompt_tokens

    def take_unsent(self) -> list[inference_pb2.GenerateEvent]:
        """What the client was not sent yet of the prompt and of all choices. Counts as sent from then on."""
        unsent = []
        if self.params.prompt_logprobs is not None and not self._sent_prompt_logprobs:
            if not self.has_prompt_logprobs:
                return []  # it comes before the first Delta
            self._sent_prompt_logprobs = True
            unsent.append(inference_pb2.GenerateEvent(prompt_logprobs=self._prompt_report()))
        for choice in self.choices:
            unsent += choice.take_unsent()
        return unsent

    def _prompt_report(self) -> inference_pb2.PromptLogprobs:
        report = inference_pb2.PromptLogprobs(token_ids=unpack_ids(self.prompt))
        report.logprobs.CopyFrom(self.prompt_logprobs.of(1, self.prompt_tokens))
        report.logprobs.logprobs.insert(0, math.nan)
        if self.params.token_bytes:
            report.token_bytes.extend(map(self.token_bytes.shown, report.token_ids))
            report.top_token_bytes.extend(map(self.token_bytes.shown, report.logprobs.top_token_ids))
        return report

    def usage(self) -> sampling_pb2.Usage:
        """The cost of all choices so far."""
        total = sampling_pb2.Usage()
        for choice in self.choices:
            usage = choice.usage()
            total.prompt_tokens += usage.prompt_tokens
            total.completion_tokens += usage.completion_tokens
            total.cached_tokens += usage.cached_tokens
        return total


def _bytes_a_token(params: GenerateParams) -> int:
    """What an unsent token takes in memory, about: its id and text, and with log-probabilities its alternatives."""
    return 64 if params.logprobs is None else 128 + 64 * params.logprobs


def pack_ids(token_ids: list[int]) -> bytes:
    """Ids in the wire's form: little-endian, four bytes each. Each must be below 2**32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Undoes ``pack_ids``."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
