"""Schemas of tools that are not strict: what no grammar holds is left out, and nothing else."""

import json

import pytest
from llguidance import LLMatcher

from gateway.loose_schema import loose_schema


def fault(schema):
    """Why the worker's grammars do not take a schema."""
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


STRING = {"type": "string"}
NOT_HELD = [
    ({"type": "array", "uniqueItems": True, "items": STRING}, {"type": "array", "items": STRING}),
    ({"type": "string", "not": {"enum": ["a"]}}, STRING),
    ({"type": "string", "if": {"maxLength": 1}, "then": {"pattern": "a"}, "else": {"pattern": "b"}}, STRING),
    ({"type": "array", "contains": STRING, "minContains": 1, "maxContains": 2}, {"type": "array"}),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, {"type": "object"}),
    ({"type": "object", "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {}}}, {"type": "object"}),
    ({"type": "object", "dependencies": {"a": ["b"]}, "unevaluatedProperties": False}, {"type": "object"}),
    ({"type": "array", "unevaluatedItems": False}, {"type": "array"}),
    ({"type": "string", "format": "int64"}, STRING),
    ({"type": "string", "pattern": "(?=a)b"}, STRING),
    ({"type": "string", "pattern": r"(a)\1"}, STRING),
    ({"type": "object", "patternProperties": {"(?!x)": STRING}}, {"type": "object", "patternProperties": {}}),
    (
        {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}]},
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}]},
    ),
]


@pytest.mark.parametrize(("schema", "loose"), NOT_HELD)
def test_what_no_grammar_holds_is_left_out_wherever_it_stands(schema, loose):
    assert loose_schema(schema) == loose
    for nest in (
        lambda one: {"type": "object", "properties": {"not": one, "uniqueItems": STRING}},
        lambda one: {"type": "array", "items": one},
        lambda one: {"anyOf": [STRING, one]},
        lambda one: {"$defs": {"x": one}, "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}},
        lambda one: {"type": "object", "additionalProperties": one},
    ):
        assert fault(nest(schema)), "it is held by now: leave it in"
        assert loose_schema(nest(schema)) == nest(loose)
        assert not fault(nest(loose))


def test_all_else_stays():
    schema = {
        "type": "object",
        "description": "d",
        "properties": {
            "a": {"enum": [{"not": 1}], "default": {"uniqueItems": True}},
            "b": {"type": "string", "format": "date", "minLength": 1},
            "c": {"type": ["integer", "null"], "minimum": 1, "multipleOf": 2},
            "d": {"const": {"if": 1}},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert loose_schema(schema) == schema
    assert loose_schema({"type": 5, "properties": 3, "items": True}) == {"type": 5, "properties": 3, "items": True}
