"""The form of logs: clients' texts in them cannot pass for lines, or for anything else, of ours."""

import json
import logging
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protos.logs import JsonFormatter, LogFormatter, printable

FORGED = "1999-12-31 07:00:00,000 ERROR router forged"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO router .*")


def record(message, *args, exc_info=None):
    return logging.LogRecord("router", logging.INFO, "file.py", 1, message, args, exc_info)


@given(text=st.text(max_size=30))
@example(text=f"x\r{FORGED}")
@example(text=f"x\n{FORGED}")
@example(text="\x1b[2J\x07\x00\x7f\x85\u2028\u2029\u202e")
def test_a_record_is_one_printable_line(text):
    line = LogFormatter("router").format(record("it said %s", text))
    assert LINE.fullmatch(line)
    assert line.isprintable()
    assert not text.isprintable() or line.endswith(f"it said {text}")


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x1b[E"])
def test_the_text_of_an_exception_is_no_record(end):
    try:
        raise ValueError(f"no{end}{FORGED}")
    except ValueError as error:
        told = LogFormatter("router").format(record("it broke", exc_info=(type(error), error, error.__traceback__)))
    first, *others = told.splitlines()
    assert LINE.fullmatch(first)
    assert "forged" in told
    assert len(others) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_words_of_any_alphabet_stay_as_they_are():
    assert printable("Größe 大きさ 👍") == "Größe 大きさ 👍"
    assert printable("a\r\n\x1b") == r"a\r\n\x1b"


@given(text=st.text(max_size=30))
@example(text='x\n{"level": "ERROR"}')
def test_a_json_record_is_one_line_that_holds_all_of_the_text(text):
    line = JsonFormatter("router").format(record("it said %s", text))
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert told["message"] == f"it said {text}"
    assert (told["level"], told["process"], told["logger"]) == ("INFO", "router", "router")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", told["time"])
    assert "trace_id" not in told


def test_a_json_record_has_its_exception_and_its_trace():
    try:
        raise ValueError("no")
    except ValueError as error:
        failed = record("it broke", exc_info=(type(error), error, error.__traceback__))
    failed.trace_id = "4bf92f"
    told = json.loads(JsonFormatter("router").format(failed))
    assert told["exception"].splitlines()[-1] == "ValueError: no"
    assert told["trace_id"] == "4bf92f"
