"""What a load sends: when, how long, with what in common; and requests from files."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.bench.arrivals import arrival_times
from quire.bench.dataset import DatasetError, read_dataset
from quire.bench.records import Record, Session, continued
from quire.bench.request_flags import add_request_arguments, sessions_of, with_arrivals
from quire.bench.workloads import WORKLOADS, Form, Shape, make_sessions, mixed_lengths


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_that_are_asked_for(burstiness: float) -> None:
    times = arrival_times(40_000, 20.0, burstiness, np.random.default_rng(3))
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    # Of a gamma distribution of shape k, the deviation is the mean over the root of k; of a Poisson process, the mean.
    assert gaps.std() == pytest.approx(gaps.mean() / burstiness**0.5, rel=0.05)
    assert times == arrival_times(40_000, 20.0, burstiness, np.random.default_rng(3))


def test_arrivals_are_of_sessions_in_order() -> None:
    sessions = make_sessions(Shape("sessions", 4, 4, turns=3), 8, "ids", 500, 0)
    assert [len(session.turns) for session in sessions] == [3, 3, 2]
    due = [session.due for session in with_arrivals(sessions, 10, 1.0, 0)]
    assert None not in due
    assert due == sorted(due, key=lambda time: time or 0.0)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("form", ["ids", "text", "messages"])
def test_workloads_are_the_same_again_by_their_seed(workload: str, form: Form) -> None:
    def made(seed: int) -> list[Session]:
        return make_sessions(Shape(workload, 20, 5, prefix_len=10), 7, form, 1000, seed)

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert sum(len(session.turns) for session in made(1)) == 7


def test_lengths_of_random_prompts() -> None:
    jobs = [session.turns[0] for session in make_sessions(Shape("random", 100, 50, 0.5), 400, "ids", 128, 0)]
    lengths = [len(job.prompt) for job in jobs]
    outputs = [job.max_tokens for job in jobs]
    assert (min(lengths) >= 50, max(lengths) <= 150, min(outputs) >= 25, max(outputs) <= 75) == (True,) * 4
    assert max(lengths) - min(lengths) > 80
    assert all(0 <= token_id < 128 for job in jobs for token_id in job.prompt if isinstance(token_id, int))
    words = make_sessions(Shape("random", 100, 50, 0.5), 400, "text", 128, 0)
    assert [len(str(session.turns[0].prompt).split()) for session in words] == lengths


def test_prefixes_are_shared_and_what_follows_is_not() -> None:
    shape = Shape("prefix", 8, 4, num_prefixes=3, prefix_len=32)
    prompts = [session.turns[0].prompt for session in make_sessions(shape, 60, "ids", 32000, 0)]
    assert len({str(prompt[:32]) for prompt in prompts}) == 3
    assert len({str(prompt[32:]) for prompt in prompts}) == 60
    chats: Any = [session.turns[0].prompt for session in make_sessions(shape, 9, "messages", 32000, 0)]
    assert {tuple(message["role"] for message in chat) for chat in chats} == {("system", "user")}


def test_mixed_lengths_are_those_of_the_fixed_workload() -> None:
    inputs, outputs = mixed_lengths(512, np.random.default_rng(0))
    assert (sum(inputs), sum(outputs)) == (174_402, 113_838)
    assert (inputs[:4], outputs[:4]) == ([249, 193, 417, 244], [116, 162, 508, 83])
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (4, 2048, 17, 1024)


def test_a_next_turn_has_all_before_it() -> None:
    answer = Record(0.0, text="fine", token_ids=[7, 8])
    assert continued("How are you?", answer, "And now?") == "How are you?fine And now?"
    assert continued([1, 2], answer, [3]) == [1, 2, 7, 8, 3]
    user = [{"role": "user", "content": "a"}]
    assert continued(user, answer, user) == [*user, {"role": "assistant", "content": "fine"}, *user]
    with pytest.raises(ValueError, match="token ids"):
        continued([1, 2], Record(0.0), [3])


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "set.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


CHAT = [{"role": "user", "content": "Hello"}]


def test_all_forms_of_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "The sea", "max_tokens": 3, "note": "not sent"},
        "",
        {"prompt": [5, 6], "expected": "x"},
        {"messages": CHAT, "max_completion_tokens": 4},
        {"custom_id": "1", "url": "/v1/chat/completions", "body": {"model": "m", "messages": CHAT, "seed": 1}},
        {"id": "s", "conversations": [
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "x" * 40}, {"from": "human", "value": "Really?"},
        ]},
        {"conversations": [{"from": "human", "value": "Why?"}]},
    )  # fmt: skip
    jobs = read_dataset(path)
    assert [job.prompt for job in jobs[:4]] == ["The sea", [5, 6], CHAT, CHAT]
    assert [job.max_tokens for job in jobs] == [3, 256, 4, 256, 10, 256]
    assert [dict(job.fields) for job in jobs] == [{}, {}, {}, {"seed": 1}, {}, {}]
    assert jobs[4].prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert jobs[1].source == f"{path}:3"
    assert {job.max_tokens for job in read_dataset(path, 9)} == {9}


def test_one_array_is_a_dataset_too(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=2))
    assert [job.prompt for job in read_dataset(tmp_path / "set.json")] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": ', r"Expecting value \(column 12\)"),
        ("3", "wanted an object, found 3"),
        ({"text": "a"}, "it has none of 'prompt'"),
        ({"prompt": ""}, "'prompt' must be"),
        ({"prompt": [1, -2]}, "'prompt' must be"),
        ({"prompt": ["a", "b"]}, "'prompt' must be"),
        ({"prompt": "a", "max_tokens": 0}, "'max_tokens' is 0"),
        ({"prompt": "a", "max_tokens": "9"}, "'max_tokens' is '9'"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\]' must be"),
        ({"messages": []}, "'messages' must be"),
        ({"body": 3}, "'body' must be"),
        ({"conversations": [{"from": "human"}]}, r"'conversations\[0\]' must have"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, r"'conversations\[0\]' must have"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "'conversations' has no turn from human"),
        ({"conversations": {}}, "'conversations' must be a list"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: Any, what: str) -> None:
    path = write(tmp_path, {"prompt": "a"}, "", line)
    with pytest.raises(DatasetError, match=f"{path}:3: {what}"):
        read_dataset(path)


def test_a_file_without_requests_or_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no requests"):
        read_dataset(write(tmp_path, ""))
    with pytest.raises(DatasetError, match="No such file"):
        read_dataset(tmp_path / "none.jsonl")
    (tmp_path / "broken.json").write_text('[{"prompt": "a"},\n nonsense]')
    with pytest.raises(DatasetError, match=r"broken.json:2: "):
        read_dataset(tmp_path / "broken.json")


def parsed(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser, sessions=True)
    return parser.parse_args(line)


def test_no_line_of_a_dataset_is_sent_twice(tmp_path: Path) -> None:
    path = str(write(tmp_path, {"prompt": "a"}, {"prompt": "b"}))
    assert len(sessions_of(parsed("--dataset", path), "text", 500)) == 2
    assert len(sessions_of(parsed("--dataset", path, "--num-prompts", "1"), "text", 500)) == 1
    with pytest.raises(DatasetError, match=r"--num-prompts is 3, but .* has 2 requests"):
        sessions_of(parsed("--dataset", path, "--num-prompts", "3"), "text", 500)


def test_prompts_that_an_endpoint_does_not_take_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": [5]})
    with pytest.raises(DatasetError, match=f"{path}:2: token ids cannot be sent as a chat"):
        sessions_of(parsed("--dataset", str(path)), "messages", 500)
    path = write(tmp_path, {"messages": CHAT})
    with pytest.raises(DatasetError, match=f"{path}:1: messages need --endpoint chat"):
        sessions_of(parsed("--dataset", str(path)), "text", 500)


def test_measured_requests_are_the_same_with_and_without_warm_ups() -> None:
    line = ("--num-prompts", "5", "--input-len", "4", "--workload", "sessions")
    assert sessions_of(parsed(*line), "ids", 500, 3)[3:] == sessions_of(parsed(*line), "ids", 500)
