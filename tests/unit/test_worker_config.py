"""The worker's flags."""

from pathlib import Path

import pytest
import torch

from tests.doubles.tiny_model import save_tiny
from worker import setup
from worker.assembly import replays_graphs
from worker.config import ConfigError, parse_args
from worker.loader import open_checkpoint
from worker.setup import resolve_kv_cache_dtype

GOOD = ["--model", "/dev/null"]


def test_scheduling_is_first_come_first_served_without_bounds_unless_asked():
    config = parse_args(GOOD)
    assert config.scheduling_policy == "fcfs"
    assert (config.long_prefill_token_threshold, config.max_num_prefill_tokens_with_decodes) == (0, None)
    argv = [*GOOD, "--scheduling-policy", "priority", "--max-num-prefill-tokens-with-decodes", "256"]
    config = parse_args(argv)
    assert (config.scheduling_policy, config.max_num_prefill_tokens_with_decodes) == ("priority", 256)


@pytest.mark.parametrize(("device", "given", "bound"), [("cpu", [], 0), ("cuda", [], 1024), ("cuda", ["0"], 0)])
def test_prompts_beside_decodes_are_bounded_on_a_gpu(
    device: str, given: list[str], bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "resolve_device", lambda name, ranks: torch.device(device))
    monkeypatch.setattr(setup, "resolve_dtype", lambda name, device: torch.float32)
    save_tiny(tmp_path)
    flags = ["--max-num-prefill-tokens-with-decodes", *given] if given else []
    found = setup.resolve(parse_args(["--model", str(tmp_path), *flags]), open_checkpoint(tmp_path))
    assert found.max_num_prefill_tokens_with_decodes == bound


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--long-prefill-token-threshold", "-1"], "--long-prefill-token-threshold is -1"),
        (["--max-num-prefill-tokens-with-decodes", "-2"], "--max-num-prefill-tokens-with-decodes is -2"),
        (["--block-size", "12"], "power of two"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2 is not supported; use auto .* or fp8"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "raise the first or lower the second"),
    ],
)
def test_impossible_settings_are_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse_args([*GOOD, *argv])


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("auto", torch.bfloat16), ("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn)],
)
def test_the_cache_has_the_models_dtype_unless_told(flag, expected):
    assert parse_args(GOOD).kv_cache_dtype == "auto"
    name = parse_args([*GOOD, "--kv-cache-dtype", flag]).kv_cache_dtype
    assert resolve_kv_cache_dtype(name, torch.bfloat16, torch.device("cpu")) == expected


def test_a_gpu_without_float8_is_told_so(monkeypatch):
    monkeypatch.setattr("worker.setup.has_float8", lambda device: False)
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs a GPU"):
        resolve_kv_cache_dtype("fp8", torch.bfloat16, torch.device("cuda"))


def test_unknown_policies_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_args([*GOOD, "--scheduling-policy", "lottery"])
    assert "--scheduling-policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "device", "expected"),
    [
        ([], "cuda", True),
        ([], "cpu", False),
        (["--enforce-eager"], "cuda", False),
        (["--tensor-parallel-size", "2"], "cuda", False),
    ],
)
def test_steps_that_the_host_takes_part_in_are_not_captured(argv, device, expected):
    assert replays_graphs(parse_args([*GOOD, *argv]), torch.device(device)) is expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "127.0.0.1:9"),
        (["--host", "10.1.2.3"], "10.1.2.3:9"),
        (["--host", "0.0.0.0"], "box:9"),
        (["--host", "0.0.0.0", "--worker-id", "left"], "left"),
    ],
)
def test_workers_that_listen_everywhere_are_told_apart(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.config.gethostname", lambda: "box")
    assert parse_args([*GOOD, *argv]).identity(9) == expected
