"""The engine that a caller steps: requests in, outputs out, one thread, no sockets.

It stands where router and worker stand when they are processes: it makes of a request what the router would submit, and
hands the router's record of it what the worker's engine computes.
"""

import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import router.config
import worker.config
from quire.models import resolve
from quire.offline.engine_args import EngineArgs
from quire.offline.field_errors import naming_fields, without_flags
from quire.offline.interrupts import after_this
from quire.offline.outputs import RequestOutput
from quire.offline.prompts import ChatPrompt, Prompt, put_prompt
from quire.offline.request_record import RequestRecord
from quire.offline.sampling_params import SamplingParams, is_whole
from router.errors import InvalidArgument
from router.prompt import encode_prompt, encode_words
from router.request import Choice, Request
from router.submission import submission
from router.tokenizer import Tokenizer
from router.tokenizer_loading import load_tokenizer
from router.validation import check_generate, check_tokens_left, resolve_max_tokens
from worker.engine import Engine, EngineLimits
from worker.grammar import GrammarCompiler, GrammarError
from worker.loader import open_checkpoint
from worker.sequence import Sequence
from worker.startup import build_engine
from worker.step_plan import StepOutput
from worker.vocabulary import Vocabulary, VocabularyError
from worker.wire import REASONS, blamed_field, constraint_of, logprobs_message, sequence_of, usage_of


def _close(engine: Engine, grammars: GrammarCompiler) -> None:
    engine.close()
    grammars.close()


class LLMEngine:
    """Runs requests, a step at a time. For one thread; made by ``from_engine_args``.

    Args:
        tokenizer: the model's.
        engine, limits: as ``build_engine`` made them.
        grammars: compiles what outputs must be.
    """

    def __init__(self, tokenizer: Tokenizer, engine: Engine, limits: EngineLimits, grammars: GrammarCompiler) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._limits = limits
        self._grammars = grammars
        self._bytes_with_special = tokenizer.token_bytes.with_special()
        self._requests: dict[str, RequestRecord] = {}
        self._choices: dict[Sequence, Choice] = {}
        # Requests with something to tell, in the order in which it came.
        self._touched: dict[str, RequestRecord] = {}
        self._unusable = ""
        # Ranks are processes, and so is what tries grammars out: they end with this object, or with the interpreter.
        self._closing = weakref.finalize(self, _close, engine, grammars)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Loads the model, fetching it first if need be.

        Raises:
            ValueError: an argument is wrong, or does not fit the model or the machine.
            ModelError, CheckpointError, UnsupportedModel: the model is not there, or cannot be run.
            RankFailed: a rank could not start.
        """
        engine_args.worker_config(Path())  # what will be refused is better said before a model is downloaded
        model = resolve(str(engine_args.model))
        config = engine_args.worker_config(model)
        template = engine_args.chat_template
        try:
            tokenizer = load_tokenizer(
                Path(engine_args.tokenizer or model), None if template is None else Path(template)
            )
            checkpoint = open_checkpoint(model)
            engine, limits = build_engine(config, checkpoint)
        except (router.config.ConfigError, worker.config.ConfigError) as error:
            raise ValueError(without_flags(str(error))) from error
        if limits.vocab_size < tokenizer.model_vocab_size:
            engine.close()
            raise ValueError(
                f"the model {limits.model} has {limits.vocab_size} tokens, its tokenizer {tokenizer.model_vocab_size}: "
                "they do not belong together"
            )
        vocabulary: Vocabulary | VocabularyError
        try:
            vocabulary = checkpoint.vocabulary()
        except VocabularyError as error:
            vocabulary = error  # requests without a grammar need none
        return cls(tokenizer, engine, limits, GrammarCompiler(vocabulary, limits.vocab_size))

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> None:
        """Queues a request, whose outputs come out of ``step``.

        Args:
            request_id: names it in outputs and ``abort_request``; unique among unfinished requests.
            prompt: a text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
            params: how it is sampled and when it ends.
            priority: lower ones run first; not 0 only with ``scheduling_policy="priority"``.

        Raises:
            ValueError: something in it is wrong, or does not fit the model; the message names the field.
            RuntimeError: the engine is closed or failed.
        """
        self.start(self.prepare(request_id, prompt, params, priority))

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> RequestRecord:
        """Checks and tokenizes a request, and starts nothing. Raises as ``add_request`` does."""
        arrival_time = time.monotonic()
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id is {request_id!r}; it must be a string that is not empty")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; it must be SamplingParams")
        if not is_whole(priority, -(2**31), 2**31):
            raise ValueError(f"priority is {priority!r}; it must be a whole number of 32 bits")
        message = params.to_request()
        message.priority = priority
        message.request_id = request_id
        text = put_prompt(message, prompt)
        tokenizer, limits = self._tokenizer, self._limits
        with naming_fields():
            checked = check_generate(message, tokenizer.eos_token_ids, limits.vocab_size, limits.takes_priorities)
            field, token_ids = encode_prompt(tokenizer, message, limits.max_model_len, limits.vocab_size)
            max_tokens = resolve_max_tokens(field, len(token_ids), checked.max_tokens, limits.max_model_len)
            bad_word_ids = encode_words(tokenizer, checked.bad_words)
            check_tokens_left(checked, bad_word_ids)
        request = Request(request_id, checked, deadline=None)
        request.bad_word_ids = bad_word_ids
        token_bytes = tokenizer.token_bytes if params.skip_special_tokens else self._bytes_with_special
        request.begin(token_ids, max_tokens, token_bytes)
        if isinstance(prompt, ChatPrompt):
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
        with naming_fields():
            sequences = [(self._sequence(choice), choice) for choice in request.choices]
        return RequestRecord(request, text, params, sequences, arrival_time)

    def _sequence(self, choice: Choice) -> Sequence:
        """The worker's sequence for a choice. Raises InvalidArgument when a grammar cannot be followed."""
        submit = submission(choice)
        seq = sequence_of(submit, self._limits)
        constraint = constraint_of(submit.sampling)
        if constraint is not None:
            try:
                seq.automaton = self._grammars.wait_for_automaton(constraint)
            except GrammarError as error:
                raise InvalidArgument(error.field, str(error)) from error
        return seq

    def start(self, record: RequestRecord) -> None:
        """Queues a prepared request. Raises as ``add_request`` does."""
        self._check_usable()
        if record.request_id in self._requests:
            raise ValueError(f"request_id is {record.request_id!r}, which an unfinished request has")
        self._requests[record.request_id] = record
        for seq, choice in record.sequences:
            self._choices[seq] = choice
            self._engine.add(seq)

    def step(self) -> list[RequestOutput]:
        """Runs one step over the unfinished requests.

        Returns:
            An output for each request that got tokens or ended, as its ``output_kind`` wants it; may be empty.

        Raises:
            RequestError: a request failed, and is over; the others go on with the next step.
            ValueError: the same, and a field of the request is to blame: others forbid all that its grammar asks for.
            RuntimeError: the engine is closed or failed, say because a rank was lost. It is of no more use.
        """
        self._check_usable()
        if not self._requests:
            return []
        with after_this():
            try:
                output = self._engine.step()
            except BaseException as error:
                self._unusable = f"failed in a step: {type(error).__name__}: {error}"
                raise
            now = time.monotonic()
            self._deliver(output, now)
        return self._tell(now)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """How many requests run or wait."""
        return len(self._requests)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests now, without an output, and frees their blocks. Other ids are ignored: they may have ended."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            record = self._requests.pop(name, None)
            self._touched.pop(name, None)
            for seq, _ in () if record is None else record.sequences:
                if self._choices.pop(seq, None) is not None:
                    self._engine.cancel(seq)

    def close(self) -> None:
        """Ends the engine and, with tensor parallelism, its processes. Happens by itself when the object goes."""
        self.abort_request(list(self._requests))
        self._unusable = self._unusable or "is closed"
        self._closing()

    def _deliver(self, output: StepOutput, now: float) -> None:
        """Hands a step's results to the requests' records, as the router's link to a worker does."""
        for seq in output.admitted:
            if (choice := self._find(seq)) is not None:
                choice.admit(seq.num_cached_tokens or 0)
                metrics = self._requests[choice.request.id].metrics
                metrics.first_scheduled_time = metrics.first_scheduled_time or now
        for seq, first_index, rows in output.prompt_logprobs:
            if (choice := self._find(seq)) is not None:
                choice.request.prompt_logprobs.add(first_index, logprobs_message(rows))
        for seq, first_index, rows in output.logprobs:
            if (choice := self._find(seq)) is not None:
                choice.take_logprobs(first_index, logprobs_message(rows))
        for seq, first_index, token_ids in output.tokens:
            if (choice := self._find(seq)) is not None and choice.take(first_index, token_ids):
                del self._choices[seq]
                self._engine.cancel(seq)  # a stop string, of which the engine knows nothing
        for seq in output.finished:
            if (choice := self._find(seq)) is not None and seq.finish_reason is not None:
                del self._choices[seq]
                usage, reason = usage_of(seq), REASONS[seq.finish_reason]
                choice.finish(usage, reason, seq.stop_token_id, seq.error, blamed_field(seq))

    def _find(self, seq: Sequence) -> Choice | None:
        """The choice that a sequence computes, unless nobody wants it any more. It now has something to tell."""
        choice = self._choices.get(seq)
        if choice is not None:
            self._touched[choice.request.id] = self._requests[choice.request.id]
        return choice

    def _tell(self, now: float) -> list[RequestOutput]:
        """The outputs of requests with something to tell. Raises RequestError when one failed; the others wait."""
        for request_id, record in self._touched.items():
            if record.request.failure is not None:
                self.abort_request(request_id)
                with naming_fields():
                    raise record.request.failure
        outputs = []
        for request_id, record in self._touched.items():
            output = record.next_output(now)
            if record.request.ended:
                del self._requests[request_id]
            if output is not None:
                outputs.append(output)
        self._touched.clear()
        return outputs

    def _check_usable(self) -> None:
        if self._unusable:
            raise RuntimeError(f"the engine {self._unusable}; make a new one")
