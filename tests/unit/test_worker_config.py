"""The worker's flags."""

import pytest
import torch

from worker.assembly import replays_graphs
from worker.config import ConfigError, parse_args
from worker.setup import resolve_kv_cache_dtype

GOOD = ["--model", "/dev/null"]


def test_scheduling_is_first_come_first_served_without_bounds_unless_asked():
    config = parse_args(GOOD)
    assert config.scheduling_policy == "fcfs"
    assert (config.long_prefill_token_threshold, config.max_num_prefill_tokens_with_decodes) == (0, 0)
    argv = [*GOOD, "--scheduling-policy", "priority", "--max-num-prefill-tokens-with-decodes", "256"]
    config = parse_args(argv)
    assert (config.scheduling_policy, config.max_num_prefill_tokens_with_decodes) == ("priority", 256)


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
