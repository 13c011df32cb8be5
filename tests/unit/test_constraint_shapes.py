"""Shape and size of constraints, as the router checks them."""

import pytest

from protos import sampling_pb2
from router.constraints import MAX_CHARS, MAX_CHOICES, check_constraint
from router.errors import InvalidArgument


def params(**fields) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**fields)


def choices(*texts: str) -> sampling_pb2.Choices:
    return sampling_pb2.Choices(texts=texts)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"json_object": True}, {"json_schema": "{}"}, {"regex": "a"}, {"grammar": "x" * MAX_CHARS["grammar"]},
        {"choices": choices(*"ab")},
    ],
)  # fmt: skip
def test_what_is_well_formed_is_passed_on(fields):
    assert params(**check_constraint(params(**fields, temperature=1))) == params(**fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"json_object": False}, "json_object"),
        ({"json_schema": ""}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": "[" * 50_000}, "json_schema"),
        ({"json_schema": " " * (MAX_CHARS["json_schema"] + 1)}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * (MAX_CHARS["regex"] + 1)}, "regex"),
        ({"grammar": "a" * (MAX_CHARS["grammar"] + 1)}, "grammar"),
        ({"choices": choices()}, "choices"),
        ({"choices": choices("a", "")}, "choices.texts[1]"),
        ({"choices": choices(*["a"] * (MAX_CHOICES + 1))}, "choices"),
        ({"choices": choices("a" * (MAX_CHARS["choices"] + 1))}, "choices"),
    ],
)
def test_what_is_not_is_refused_by_name(fields, field):
    with pytest.raises(InvalidArgument) as caught:
        check_constraint(params(**fields))
    assert caught.value.field == f"sampling.{field}"
    assert len(str(caught.value)) < 200
