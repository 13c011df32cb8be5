"""quire bench serve against worker (its engine a hash), router and gateway as processes; and against failing ones."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from quire import cli
from tests.doubles.processes import Stack, free_port, wait_until
from tests.integration.fake_inference import MODEL, Failure, FakeInference, running_stack

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 0.002


class ScriptedStack(Stack):
    """A stack whose worker needs no model's weights."""

    def start_worker(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.scripted_engine", str(self.worker_port), str(STEP_S)]
        self.processes["worker"] = subprocess.Popen(command, cwd=ROOT)


@pytest.fixture(scope="module")
def stack(demo_model):
    running = ScriptedStack(demo_model)
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def failing():
    """Gateway and router of few lines, which fail as told."""
    with running_stack(FakeInference()) as running:
        yield running


def server_flags(way, running):
    if isinstance(running, Stack):
        address, url = f"127.0.0.1:{running.router_port}", running.url
    else:
        address, url = running.router, running.url
    return ["--grpc", address] if way == "grpc" else ["--base-url", f"{url}/v1", "--endpoint", way]


def bench(*flags):
    return cli.main(["bench", "serve", *map(str, flags)])


@pytest.mark.parametrize("way", ["grpc", "completions", "chat"])
def test_a_load_is_measured_by_the_servers_own_counts(stack, way, tmp_path, capsys):
    result, plot = tmp_path / "result.json", tmp_path / "plot.html"
    status = bench(
        *server_flags(way, stack), "--num-prompts", 12, "--input-len", 20, "--output-len", 9, "--num-warmups", 2,
        "--max-concurrency", 4, "--percentiles", "50,95", "--goodput", "ttft:60000", "e2e:60000",
        "--json", result, "--plot", plot,
    )  # fmt: skip
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    found = json.loads(result.read_text(), parse_constant=pytest.fail)  # JSON knows no infinity
    assert (found["completed"], found["failed"], found["not_sent"], found["failures"]) == (12, 0, 0, {})
    assert found["settings"]["request_rate"] == "inf"
    assert found["output_tokens"] == 12 * 9
    if way == "chat":
        assert found["prompt_tokens"] >= 12 * 20  # words, and what the template adds
    else:
        assert found["prompt_tokens"] == 12 * 20
    assert 1 <= found["peak_concurrency"] <= 4
    assert found["request_goodput"] == found["request_throughput"] > 0
    assert found["total_token_throughput"] > found["output_throughput"] > 0
    for name in ("ttft", "tpot", "itl", "e2e"):
        assert set(found[f"{name}_ms"]) == {"mean", "p50", "p95", "max"}
        assert 0 < found[f"{name}_ms"]["mean"] <= found[f"{name}_ms"]["max"]
    assert [row["output_tokens"] for row in found["requests"]] == [9] * 12
    assert found["settings"]["model"] == "model"
    assert "output tokens/s" in shown.out
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("way", ["grpc", "completions", "chat"])
def test_turns_of_a_session_go_on_from_the_answer_before(stack, way, tmp_path):
    result = tmp_path / "result.json"
    status = bench(
        *server_flags(way, stack), "--workload", "sessions", "--num-prompts", 6, "--turns", 3, "--input-len", 16,
        "--output-len", 8, "--request-rate", 200, "--json", result,
    )  # fmt: skip
    assert status == 0
    rows = sorted(json.loads(result.read_text())["requests"], key=lambda row: row["prompt_tokens"])
    lengths = [row["prompt_tokens"] for row in rows]
    if way == "grpc":
        assert lengths == [16, 16, 40, 40, 64, 64]
    else:
        assert lengths[1] < lengths[2]
        assert lengths[3] < lengths[4]


def test_a_dataset_is_asked_as_it_is(stack, tmp_path):
    dataset, result = tmp_path / "set.jsonl", tmp_path / "result.json"
    asked = [
        {"prompt": [5, 6, 7], "max_tokens": 3},
        {"prompt": "The sea is", "max_tokens": 4},
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    ]
    dataset.write_text("\n".join(map(json.dumps, asked)))
    flags = ["--dataset", dataset, "--ignore-eos", "--json", result]
    assert bench(*server_flags("grpc", stack), *flags) == 0
    assert sorted(row["output_tokens"] for row in json.loads(result.read_text())["requests"]) == [3, 4, 5]


def test_a_line_that_cannot_be_sent_is_named_before_anything_is(tmp_path, capsys):
    dataset = tmp_path / "set.jsonl"
    dataset.write_text('{"prompt": "a"}\n{"body": {"messages": [{"role": "user", "content": "b"}], "tools": []}}\n')
    assert bench("--grpc", "127.0.0.1:1", "--dataset", dataset) == 1
    assert f"{dataset}:2: tools cannot be sent" in capsys.readouterr().err


@pytest.mark.parametrize(("way", "refused", "broken"), [
    ("grpc", "resource_exhausted", "unavailable"),
    ("completions", "http_429", "stream_error"),
    ("chat", "http_429", "stream_error"),
])  # fmt: skip
def test_failures_are_counted_by_kind_and_end_with_1(failing, way, refused, broken, tmp_path, capsys):
    result = tmp_path / "result.json"
    flags = [*server_flags(way, failing), "--model", MODEL, "--num-prompts", 5, "--input-len", 4, "--output-len", 6]
    failing.fake.reset()
    assert bench(*flags) == 0
    failing.fake.refusal = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert bench(*flags, "--json", result) == 1
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"], found["failures"]) == (0, 5, {refused: 5})
    assert found["ttft_ms"] is None
    assert "the queue is full" in capsys.readouterr().out
    failing.fake.reset()
    failing.fake.failure_after_tokens = (2, Failure(grpc.StatusCode.UNAVAILABLE, "the worker was lost"))
    assert bench(*flags, "--json", result) == 1
    assert json.loads(result.read_text())["failures"] == {broken: 5}
    assert "the worker was lost" in capsys.readouterr().out


def test_a_failing_warm_up_ends_it(failing, capsys):
    failing.fake.reset()
    failing.fake.refusal = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert bench(*server_flags("completions", failing), "--num-warmups", 1) == 1
    assert "--num-warmups failed: the queue is full" in capsys.readouterr().err
    assert len(failing.fake.requests) == 1


@pytest.mark.parametrize("way", ["grpc", "completions"])
def test_where_nobody_listens_it_says_so(way, capsys):
    port = free_port()
    server = ["--grpc", f"127.0.0.1:{port}"] if way == "grpc" else ["--base-url", f"http://127.0.0.1:{port}/v1"]
    assert bench(*server) == 1
    assert str(port) in capsys.readouterr().err
    assert (
        bench(*server, "--model", "m", "--num-prompts", 2) == 1
    )  # not asked for its models, it fails request by request
    assert "requests, failed" in capsys.readouterr().out


def test_ctrl_c_prints_what_there_is(failing, tmp_path):
    failing.fake.reset()
    failing.fake.delay_token = 0.05
    result = tmp_path / "result.json"
    command = [
        *(sys.executable, "-m", "quire", "bench", "serve", *server_flags("completions", failing)),
        *("--num-prompts", "400", "--input-len", "4", "--output-len", "4", "--max-concurrency", "3"),
        *("--json", str(result)),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: len(failing.fake.requests) > 6)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out.startswith("interrupted")
    found = json.loads(result.read_text())
    assert found["completed"] >= 3
    assert 1 <= found["failures"]["interrupted"] <= 3
    assert found["completed"] + found["failed"] + found["not_sent"] == 400
