"""The worker's flags."""

import pytest
import torch

from worker.config import ConfigError, parse_args
from worker.model_config import ExpertsConfig, ModelConfig, RopeConfig
from worker.startup import replays_graphs

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
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "raise the first or lower the second"),
    ],
)
def test_impossible_settings_are_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse_args([*GOOD, *argv])


def test_unknown_policies_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_args([*GOOD, "--scheduling-policy", "lottery"])
    assert "--scheduling-policy" in capsys.readouterr().err


def model_with(experts: ExpertsConfig | None) -> ModelConfig:
    return ModelConfig(
        architecture="Test", vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2,
        num_kv_heads=2, head_dim=4, max_position=8, rms_norm_eps=1e-6, rope=RopeConfig(1e4), experts=experts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "experts", "device", "expected"),
    [
        ([], None, "cuda", True),
        ([], None, "cpu", False),
        ([], ExpertsConfig(4, 2, 8, True), "cuda", False),
        (["--enforce-eager"], None, "cuda", False),
        (["--tensor-parallel-size", "2"], None, "cuda", False),
    ],
)
def test_steps_that_the_host_takes_part_in_are_not_captured(argv, experts, device, expected):
    assert replays_graphs(parse_args([*GOOD, *argv]), model_with(experts), torch.device(device)) is expected
