"""Constraints on their way to an automaton: what is compiled, what is refused, what is remembered."""

import asyncio
import json
import time

import numpy as np
import pytest

from tests.doubles.tiny_model import VOCAB
from tests.doubles.tiny_vocabulary import TOKENS, VOCABULARY, ids_of
from worker.grammar import Constraint, GrammarCompiler, GrammarError
from worker.grammar_probe import GrammarProbe
from worker.vocabulary import VocabularyError


@pytest.fixture
async def compiler():
    compiler = GrammarCompiler(VOCABULARY, VOCAB)
    yield compiler
    compiler.close()


def possible(automaton) -> set[str]:
    """What may come next, the end as None."""
    bits = np.unpackbits(np.frombuffer(automaton.matcher.compute_bitmask(), np.uint8), bitorder="little")
    return {None if id_ == VOCAB else TOKENS[id_] for id_ in np.flatnonzero(bits)}


@pytest.mark.parametrize(
    ("constraint", "fits", "does_not"),
    [
        (Constraint("regex", r"\d{3}-[a-z]+"), "123-ab", "12-ab"),
        (Constraint("regex", r"a/b\\"), "a/b\\", "a/b/"),
        (Constraint("choices", json.dumps(["yes", "no", 'say "x"\n'])), 'say "x"\n', "yet"),
        (Constraint("grammar", 'start: item ("," item)*\nitem: /[a-z]+/'), "a,bc", "a,,"),
        (Constraint("grammar", 'root ::= "<" [0-9]+ ">"'), "<42>", "<>"),
        (Constraint("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (Constraint("json_object"), "{}", "{1}"),
        (Constraint("json_schema", '{"enum": ["red", 7]}'), '"red"', "8"),
        (Constraint("json_schema", '{"type": "array", "items": {"type": "boolean"}, "minItems": 1}'), "[true]", "[]"),
    ],
)
async def test_every_kind_of_constraint(compiler, constraint, fits, does_not):
    automaton = await compiler.automaton(constraint)
    for token_id in ids_of(fits):
        assert not automaton.complete
        assert automaton.accept(token_id), automaton.failure
    assert None in possible(automaton)
    automaton = await compiler.automaton(constraint)
    assert not (all(map(automaton.accept, ids_of(does_not))) and None in possible(automaton))


async def test_all_ways_to_write_a_forced_text_are_possible(compiler):
    automaton = await compiler.automaton(Constraint("choices", '["yes"]'))
    assert possible(automaton) == {"y", "yes"}


async def test_no_token_that_is_not_text_is_possible(compiler):
    automaton = await compiler.automaton(Constraint("regex", r"(?s:.*)"))
    assert possible(automaton) == {None, *TOKENS[4:]}


@pytest.mark.parametrize(
    ("text", "spaced"),
    [("{", False), ('{"a"', False), ('{"a":', True), ('{"a": ', False), ('{"a":1', False), ('{"a":1,', True)],
)
async def test_the_only_whitespace_in_json_follows_a_comma_or_a_colon(compiler, text, spaced):
    following = possible(await compiler.automaton(Constraint("json_object"), ids_of(text)))
    assert (" " in following) == spaced
    assert "\n" not in following


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint("regex", "(["), "unclosed"),
        (Constraint("regex", "a" * 20_000), "at most"),
        (Constraint("grammar", "start: nowhere"), "nowhere"),
        (Constraint("grammar", 'root ::= "a'), "EBNF"),
        (Constraint("json_schema", '{"type": "colour"}'), "colour"),
        (Constraint("json_schema", '{"type": "array", "contains": {}}'), "contains"),
        (Constraint("json_schema", '{"$ref": "http://example.com/schema"}'), "example.com"),
        (Constraint("json_schema", "{"), "not JSON"),
        (Constraint("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "not JSON"),
        (Constraint("grammar", "start: start"), "no token"),
        (Constraint("regex", "\u00e9"), "no token"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(compiler, constraint, said):
    for _ in range(2):  # a fault is not remembered as if it were a grammar
        with pytest.raises(GrammarError, match=said) as caught:
            await compiler.automaton(constraint)
        assert caught.value.field == f"sampling.{constraint.kind}"
        assert constraint.kind in str(caught.value)
        assert len(str(caught.value)) < 600


async def test_without_a_vocabulary_everything_is_refused():
    compiler = GrammarCompiler(VocabularyError("/model has no tokenizer.json"), VOCAB)
    with pytest.raises(GrammarError, match=r"needs the model's vocabulary: /model has no tokenizer\.json"):
        await compiler.automaton(Constraint("json_object"))
    compiler.close()


async def test_a_deep_chain_of_rules_crashes_nothing(compiler):
    rules = "".join(f"a{index}:a{index + 1}\n" for index in range(2400))
    automaton = await compiler.automaton(Constraint("grammar", f'start:a0\n{rules}a2400:"ab"'))
    assert possible(automaton) == {"a", "ab"}


async def test_a_grammar_that_takes_too_long_is_given_up(compiler, monkeypatch):
    monkeypatch.setattr("worker.grammar_probe.PROBE_TIMEOUT_S", 2.0)
    endless = {"allOf": [{"type": "string", "pattern": f"[a-z]+{index}"} for index in range(2000)]}
    started = time.monotonic()
    slow = asyncio.create_task(compiler.automaton(Constraint("json_schema", json.dumps(endless))))
    with pytest.raises(GrammarError, match="takes longer than"):
        await slow
    assert time.monotonic() - started < 30
    assert await compiler.automaton(Constraint("regex", "a")), "the next one is compiled as ever"


def test_a_probe_that_dies_answers_and_comes_back():
    probe = GrammarProbe()
    assert probe.fault('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}') == ""
    probe._process.kill()
    assert "too large" in probe.fault('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}')
    assert probe.fault('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}') == ""
    probe.close()


async def test_grammars_are_remembered_and_forgotten(compiler, monkeypatch):
    monkeypatch.setattr("worker.grammar._CACHED_GRAMMARS", 2)
    probed = []
    fault = compiler._probe.fault

    def counting(source):
        probed.append(source)
        return fault(source)

    monkeypatch.setattr(compiler._probe, "fault", counting)
    await asyncio.gather(*(compiler.automaton(Constraint("regex", "a+")) for _ in range(4)))
    assert len(probed) == 1
    for source in ("b", "a+", "c", "a+"):
        await compiler.automaton(Constraint("regex", source))
    assert len(probed) == 3
    await compiler.automaton(Constraint("regex", "b"))
    assert len(probed) == 4


async def test_automata_of_one_grammar_are_apart(compiler):
    one = await compiler.automaton(Constraint("regex", "ab|12"))
    other = await compiler.automaton(Constraint("regex", "ab|12"))
    assert one.accept(ids_of("a")[0])
    assert possible(one) == {"b"}
    assert possible(other) == {"a", "ab", "1"}


async def test_replay_equals_the_straight_run(compiler):
    constraint = Constraint("json_schema", '{"type": "object", "additionalProperties": {"type": "integer"}}')
    output = ids_of('{"ab": 12, "c": -3}')
    straight = await compiler.automaton(constraint)
    for index, token_id in enumerate(output):
        replayed = await compiler.automaton(constraint, output[:index])
        assert possible(replayed) == possible(straight)
        assert straight.accept(token_id)
    assert straight.complete
    assert (await compiler.automaton(constraint, output)).complete


async def test_a_replay_that_does_not_fit_is_refused(compiler):
    with pytest.raises(GrammarError, match="output so far does not fit regex"):
        await compiler.automaton(Constraint("regex", "ab"), ids_of("b"))
