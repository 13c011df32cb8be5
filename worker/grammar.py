"""Compiles what an output must be into an automaton over the model's tokens, by means of llguidance.

A grammar is first tried out in a process that can be killed, then compiled on a thread: never on that of the engine or
of the event loop. Forced tokens are not asked for: among all ways to write a forced text in tokens, the model chooses,
and the request's other rules may too.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from worker.compile_thread import CompileThread
from worker.grammar_probe import LIMITS, STACK_BYTES, GrammarProbe, failure, fault
from worker.vocabulary import Vocabulary, VocabularyError

# Characters of a source, by its kind.
MAX_SOURCE_CHARS = {
    "json_schema": 128 * 1024, "json_object": 0, "regex": 16 * 1024, "grammar": 32 * 1024, "choices": 128 * 1024,
}  # fmt: skip
_CACHED_GRAMMARS = 128
_MAX_MESSAGE_CHARS = 400
# A space may follow a comma or a colon. More says nothing, and without a bound a model may write whitespace until its
# tokens are used up. Both separators are regular expressions.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarError(ValueError):
    """A constraint that cannot be followed; the message is for the client. ``field`` is its path in the request."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must be.

    Attributes:
        kind: json_schema, json_object, regex, grammar or choices, as in protos/sampling.proto.
        source: the field's text; of choices, a JSON list; of json_object, nothing.
    """

    kind: str
    source: str = ""

    @property
    def field(self) -> str:
        """Its path in the request."""
        return f"sampling.{self.kind}"


class Automaton:
    """How far one sequence has come in its grammar. Used by one thread at a time.

    Args:
        matcher: at the start of the grammar, and nobody else's.
        constraint: what it was made from.
        vocab_size: the model's tokens. Bit ``vocab_size`` of a mask says whether the output may end.
    """

    def __init__(self, matcher: LLMatcher, constraint: Constraint, vocab_size: int) -> None:
        self.matcher = matcher
        self.constraint = constraint
        self.vocab_size = vocab_size

    def accept(self, token_id: int) -> bool:
        """Takes the next token. False: it does not fit, and the automaton is of no use any more."""
        return self.matcher.consume_token(token_id)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes the output of an earlier attempt. Raises GrammarError when it does not fit."""
        if not self.matcher.consume_tokens(list(token_ids)):
            raise GrammarError(self.constraint.field, f"the output so far does not fit {self.constraint.kind}")

    @property
    def complete(self) -> bool:
        """Nothing can follow any more."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty while it can."""
        return failure(self.matcher)


class GrammarCompiler:
    """Makes automata, and keeps the grammars that were asked for last. Used by one thread, event loop or not.

    Args:
        vocabulary: the model's; or why there is none.
        vocab_size: the model's tokens.
    """

    def __init__(self, vocabulary: Vocabulary | VocabularyError, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._grammars: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()
        self._probe = GrammarProbe()
        self._thread = CompileThread(STACK_BYTES)
        self._tokenizer: LLTokenizer | None = None

    async def automaton(self, constraint: Constraint, output: Sequence[int] = ()) -> Automaton:
        """An automaton that has taken ``output`` already.

        Raises:
            GrammarError: the constraint is wrong or too large, there is no vocabulary, or ``output`` does not fit.
        """
        grammar = await asyncio.shield(asyncio.wrap_future(self._grammar(constraint)))
        # Not on the thread, where it would wait for others' grammars.
        return await asyncio.to_thread(self._start, grammar, constraint, output)

    def wait_for_automaton(self, constraint: Constraint) -> Automaton:
        """``automaton``, for callers that may be held up."""
        return self._start(self._grammar(constraint).result(), constraint, ())

    def close(self) -> None:
        """Ends the thread and the probe; nothing may be asked for after this."""
        self._thread.close()
        self._probe.close()

    def _start(self, grammar: LLMatcher, constraint: Constraint, output: Sequence[int]) -> Automaton:
        automaton = Automaton(grammar.deep_copy(), constraint, self._vocab_size)
        automaton.replay(output)
        return automaton

    def _grammar(self, constraint: Constraint) -> "Future[LLMatcher]":
        """The grammar, from the cache or in the making: whoever asks for the same meanwhile waits for the same."""
        grammars = self._grammars
        future = grammars.get(constraint)
        if future is None or _failed(future):
            for known in [known for known, made in grammars.items() if _failed(made)]:
                del grammars[known]
            future = grammars[constraint] = self._thread.submit(partial(self._compile, constraint))
            while len(grammars) > _CACHED_GRAMMARS:
                grammars.popitem(last=False)
        grammars.move_to_end(constraint)
        return future

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if not isinstance(self._vocabulary, Vocabulary):
            raise GrammarError(constraint.field, f"{constraint.kind} needs the model's vocabulary: {self._vocabulary}")
        source = grammar_source(constraint)
        wrong = self._probe.fault(source)
        if not wrong:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(cast(TokenizerWrapper, _Tokens(self._vocabulary, self._vocab_size)))
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
            wrong = fault(matcher)
        if wrong:
            raise GrammarError(constraint.field, f"{constraint.kind} cannot be followed: {wrong}")
        return matcher


def _failed(future: "Future[LLMatcher]") -> bool:
    return future.done() and future.exception() is not None


class _Tokens:
    """A vocabulary as llguidance reads it, with one more token: the end, which no model writes.

    Which tokens end a sequence is each request's own; the mask's bit of this token says whether one may come.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        known = vocabulary.tokens[:vocab_size]
        self.tokens = [*known, *[b""] * (vocab_size - len(known)), b"end"]
        self.special_token_ids = [*sorted(id_ for id_ in vocabulary.special if id_ < vocab_size), vocab_size]
        self.eos_token_id = vocab_size

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("nothing is encoded: no token is forced")


def grammar_source(constraint: Constraint) -> str:
    """The constraint as llguidance's grammar. Raises GrammarError when it is too long or cannot be read."""
    longest = MAX_SOURCE_CHARS[constraint.kind]
    if len(constraint.source) > longest:
        message = f"{constraint.kind} has {len(constraint.source)} characters; at most {longest}"
        raise GrammarError(constraint.field, message)
    body: dict[str, Any]
    match constraint.kind:
        case "json_schema":
            body = {"json_schema": _styled(_parse(constraint))}
        case "json_object":
            body = {"json_schema": _styled({"type": "object"})}
        case "regex":
            # \d and \w are ASCII, as in JSON schemas' patterns.
            body = {"lark_grammar": f"start: /{regex_to_lark(constraint.source, 'dw')}/"}
        case "choices":
            # One terminal, which becomes a regular expression: a rule would make the parser try each text by itself.
            texts = " | ".join(json.dumps(text) for text in _parse(constraint))
            body = {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
        case "grammar":
            body = {"lark_grammar": _lark(constraint)}
    main = '%llguidance {"no_forcing": true}\nstart: @body'
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, {"name": "body", **body}]})


def _parse(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(constraint.field, f"{constraint.kind} is not JSON: {error}") from error


def _styled(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with our way to write JSON, where it does not say its own."""
    return {"x-guidance": _JSON_STYLE, **schema}


def _lark(constraint: Constraint) -> str:
    if "::=" not in constraint.source:
        return constraint.source
    try:
        return any_to_lark(constraint.source)
    except Exception as error:  # the library raises nothing narrower
        reason = str(error)[:_MAX_MESSAGE_CHARS]
        raise GrammarError(constraint.field, f"grammar cannot be read as EBNF: {reason}") from error
