"""quire bench latency and throughput with a tiny model, in this process."""

import json

import pytest

from quire import cli
from tests.doubles.tiny_model import save_tiny
from tests.doubles.tiny_vocabulary import save_tokenizer


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def bench(tiny_model, tmp_path):
    """Runs a benchmark; gives its exit status and what it wrote."""

    def run(name, *flags):
        result = tmp_path / "result.json"
        small = ["--model", tiny_model, "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", 1 << 22]
        line = ["bench", name, *small, "--json", result, *flags]
        return cli.main(list(map(str, line))), json.loads(result.read_text()) if result.exists() else None

    return run


@pytest.mark.parametrize("overlap", ["--async-scheduling", "--no-async-scheduling"])
def test_latency_counts_every_step(bench, overlap, tmp_path, capsys):
    plot = tmp_path / "plot.html"
    status, found = bench(
        "latency", "--batch-size", 3, "--input-len", 10, "--output-len", 6, "--num-iters", 4, "--num-iters-warmup", 1,
        "--percentiles", "50,90", "--plot", plot, overlap,
    )  # fmt: skip
    assert status == 0
    assert (found["runs"], found["output_tokens"], found["interrupted"]) == (4, 4 * 3 * 6, False)
    for name in ("prefill_ms", "decode_step_ms", "e2e_ms"):
        assert set(found[name]) == {"mean", "p50", "p90", "max"}
    # What a run takes is its prefill and five steps for the tokens after the first.
    parts = found["prefill_ms"]["mean"] + 5 * found["decode_step_ms"]["mean"]
    assert found["e2e_ms"]["mean"] == pytest.approx(parts)
    assert "batch of 3, 10 tokens in, 6 out" in capsys.readouterr().out
    assert plot.read_text().count("<svg") == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input-len", 200, "--output-len", 100], "are 300 tokens, but the engine takes 256"),
        (["--batch-size", 9, "--max-num-seqs", 8], "--batch-size is 9, but a step has 8 sequences"),
        (["--batch-size", 64, "--num-gpu-blocks-override", 32], "needs 640 KV blocks of 16 tokens, but there are 32"),
        (["--quantization", "gptq"], "--quantization gptq is not supported"),
        (["--model", "/nowhere"], "no model '/nowhere'"),
        (["--plot", "plot.gif"], "--plot plot.gif: a name ends with"),
    ],
)
def test_what_cannot_be_timed_is_said(bench, flags, message, capsys):
    assert bench("latency", *flags) == (1, None)
    assert message in capsys.readouterr().err


def test_throughput_counts_all_tokens(bench, capsys):
    flags = ["--num-prompts", 10, "--input-len", 20, "--output-len", 8, "--seed", 3]
    status, found = bench("throughput", *flags)
    assert status == 0
    assert (found["completed"], found["failed"]) == (10, 0)
    assert (found["prompt_tokens"], found["output_tokens"]) == (200, 80)
    assert found["request_throughput"] * found["duration_s"] == pytest.approx(10)
    assert found["total_token_throughput"] * found["duration_s"] == pytest.approx(280)
    assert "output tokens/s" in capsys.readouterr().out


def test_throughput_of_a_dataset_names_what_the_engine_refuses(bench, tmp_path, capsys):
    dataset = tmp_path / "set.jsonl"
    lines = [{"prompt": "yes no", "max_tokens": 4}, {"prompt": [5] * 300, "max_tokens": 4}, {"prompt": [5, 6, 7]}]
    dataset.write_text("\n".join(map(json.dumps, lines)))
    status, found = bench("throughput", "--dataset", dataset, "--output-len", 4, "--ignore-eos")
    assert status == 1
    assert (found["completed"], found["failed"], found["output_tokens"]) == (2, 1, 8)
    (said,) = found["failures"]
    assert said.startswith(f"{dataset}:2: ")
    assert said in capsys.readouterr().out


def test_interrupted_benchmarks_tell_what_there_is(bench, monkeypatch, capsys):
    import quire.bench.latency
    from quire.offline.llm_engine import LLMEngine

    run_batch, step = quire.bench.latency.run_batch, LLMEngine.step
    runs = []

    def interrupted_run(*args):
        if len(runs) == 2:
            raise KeyboardInterrupt
        runs.append(run_batch(*args))

    def interrupted_step(engine):
        if engine.get_num_unfinished_requests() < 4:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(quire.bench.latency, "run_batch", interrupted_run)
    monkeypatch.setattr(LLMEngine, "step", interrupted_step)
    status, found = bench("latency", "--batch-size", 2, "--output-len", 3, "--num-iters-warmup", 0)
    assert (status, found["runs"], found["interrupted"]) == (130, 2, True)
    flags = ["--num-prompts", 6, "--input-len", 8, "--output-len", 4, "--range-ratio", 0.9]
    status, found = bench("throughput", *flags)
    assert (status, found["interrupted"]) == (130, True)
    assert found["unfinished"] == 6 - found["completed"] < 4
    assert capsys.readouterr().out.count("interrupted: what there is until then") == 2


@pytest.mark.slow
def test_startup_tells_what_each_phase_took(demo_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_API_KEY", "of-another-server")
    result = tmp_path / "result.json"
    small = ["--max-model-len", "256", "--max-num-batched-tokens", "64", "--load-format", "dummy"]
    line = ["bench", "startup", str(demo_model), "--num-warm-starts", "0", "--json", str(result), *small]
    assert cli.main(line) == 0
    (start,) = json.loads(result.read_text())["starts"]
    random_weights = start.pop("not counted: random weights")
    assert random_weights > 0
    to_ready, total = start.pop("total, to ready"), start.pop("total, to the first token")
    assert total == pytest.approx(to_ready + start.pop("first token"))
    assert sum(start.values()) == pytest.approx(to_ready)
    assert start["worker: warm-up"] > 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split() == ["seconds", "cold"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "7"], "--block-size is 7"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--api-key", "secret"], "leave out keys and TLS"),
        (["--model", "/nowhere"], "no model '/nowhere'"),
    ],
)
def test_a_start_that_cannot_be_is_refused_before(flags, message, capsys):
    assert cli.main(["bench", "startup", *flags]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert "cold start" not in shown


def test_a_start_that_fails_is_told_with_what_was_printed(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["bench", "startup", "--model", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "quire serve did not become ready; it printed:" in shown
    assert str(tmp_path) in shown
