"""A model cut over several ranks, each a process, computes what it computes whole."""

import json
from pathlib import Path

import pytest
import torch

from tests.doubles.quantized_model import write_awq, write_fp8, write_packed
from tests.doubles.tiny_model import VOCAB, save_tiny
from worker.config import ConfigError, WorkerConfig
from worker.loader.checkpoint import CheckpointError
from worker.parallel.ranks import RankFailed
from worker.sequence import SamplingParams, Sequence, token_array
from worker.startup import build_engine

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 24}
CASES = {
    "llama-tied-4-ranks": ("Llama", {"tie_word_embeddings": True}, 4),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}, 2),
    # Nothing but the heads can be divided by 3, and the last rank has fewer tokens than the others.
    "llama-3-ranks": (
        "Llama",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 50,
            "vocab_size": 130,
        },
        3,
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}, 2),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, 2),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}, 2),
    "phi3": ("Phi3", {"pad_token_id": 0}, 2),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, 2),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 23, "head_dim": 16},
        2,
    ),
}


@pytest.fixture(autouse=True)
def _threads():
    """Ranks share the cores, and so does the leader, which is this process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def generate(monkeypatch):
    """Greedy output of three prompts, the logits it was chosen by, and the engine's limits."""
    logits: list[torch.Tensor] = []
    monkeypatch.setattr("worker.model_runner.sample", lambda rows, _: logits.append(rows.clone()) or rows.argmax(-1))

    def run(folder: Path, **settings):
        defaults = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 21, "max_num_batched_tokens": 64}
        settings = {**defaults, **settings}
        engine, limits = build_engine(WorkerConfig(model=folder, **settings))
        logits.clear()
        torch.manual_seed(2)
        sequences = []
        try:
            for length in (3, 90, 210):
                tokens = token_array()
                tokens.extend(torch.randint(3, VOCAB, (length,)).tolist())
                sequences.append(Sequence("test", tokens, SamplingParams(temperature=0.0), 16))
                engine.add(sequences[-1])
            while engine.has_unfinished:
                engine.step()
        finally:
            engine.close()
        return [seq.tokens.tolist() for seq in sequences], torch.cat(logits), limits, engine.scheduler.num_preemptions

    return run


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(tmp_path, generate, case):
    """Prompts in chunks, then together; the pool is so small that the newest is preempted and computed again."""
    family, changes, size = CASES[case]
    save_tiny(tmp_path, family, **changes)
    tokens, logits, limits, preemptions = generate(tmp_path)
    got_tokens, got_logits, got_limits, got_preemptions = generate(tmp_path, tensor_parallel_size=size)
    assert got_tokens == tokens
    assert ((got_logits - logits).norm() / logits.norm()).item() < 1e-5
    assert got_limits == limits, "routers must not see a difference"
    assert got_preemptions == preemptions > 0


QUANTIZED = {
    # Of down_proj's 96 inputs, the second rank's begin within a group of 32, and within the only one of a channel.
    "awq": ("Llama", {"attention_bias": True, "mlp_bias": True}, write_awq, {}),
    "packed-channels-fused": ("Phi3", {"pad_token_id": 0}, write_packed, {"group": None, "symmetric": False}),
    # Ranks round their own share of an activation: they agree to the last bit only where that is not divided.
    "fp8": ("Qwen3", {"head_dim": 16}, write_fp8, {"skip": ("o_proj", "down_proj")}),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_ranks_compute_what_one_process_computes_of_quantized_weights(tmp_path, generate, case):
    family, changes, write, settings = QUANTIZED[case]
    write(tmp_path, save_tiny(tmp_path, family, hidden_size=64, intermediate_size=96, **changes), **settings)
    tokens, logits, limits, _ = generate(tmp_path)
    got_tokens, got_logits, got_limits, _ = generate(tmp_path, tensor_parallel_size=2)
    assert got_tokens == tokens
    assert ((got_logits - logits).norm() / logits.norm()).item() < 1e-5
    assert got_limits == limits


def test_ranks_quantize_while_loading(tmp_path, generate):
    """The first token's logits; later ones depend on how activations that the ranks divide were rounded."""
    save_tiny(tmp_path, hidden_size=64, intermediate_size=96)
    plain = generate(tmp_path)[1][0]
    logits = generate(tmp_path, quantization="fp8")[1][0]
    got = generate(tmp_path, quantization="fp8", tensor_parallel_size=2)[1][0]
    assert ((logits - plain).norm() / plain.norm()).item() > 0.01
    assert ((got - logits).norm() / logits.norm()).item() < 0.1


def test_overlapped_steps_and_cached_prefixes(tmp_path, generate):
    """The next step's input is sampled while that step is planned already, and reaches the ranks on the device."""
    save_tiny(tmp_path)
    settings = {"num_gpu_blocks_override": 64, "async_scheduling": True}
    assert generate(tmp_path, **settings)[0] == generate(tmp_path, **settings, tensor_parallel_size=2)[0]


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_each_rank_holds_its_share_of_the_cache(tmp_path, generate, cache_dtype):
    """The same bytes a rank hold twice the blocks when each has half of the heads."""
    save_tiny(tmp_path)
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "kv_cache_dtype": cache_dtype}
    _, logits, limits, _ = generate(tmp_path, **settings)
    _, got_logits, got_limits, _ = generate(tmp_path, **settings, tensor_parallel_size=2)
    assert got_limits.num_blocks == 2 * limits.num_blocks
    # The first token's: in float8, ranks may round a key the other way, and what follows may differ by more.
    assert ((got_logits[0] - logits[0]).norm() / logits[0].norm()).item() < (1e-5 if cache_dtype == "auto" else 0.02)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU")
@pytest.mark.parametrize("case", ["llama-biases", "mixtral"])
def test_gpus_compute_what_one_gpu_computes(tmp_path, generate, case):
    family, changes, size = CASES[case]
    save_tiny(tmp_path, family, **changes)
    settings = {"device": "cuda", "num_gpu_blocks_override": 64}
    tokens, logits, *_ = generate(tmp_path, **settings)
    got_tokens, got_logits, *_ = generate(tmp_path, **settings, tensor_parallel_size=size)
    assert got_tokens == tokens
    assert ((got_logits - logits).norm() / logits.norm()).item() < 1e-4


def test_random_weights(tmp_path, generate):
    save_tiny(tmp_path, "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    (tmp_path / "model.safetensors").unlink()
    tokens = generate(tmp_path, load_format="dummy", tensor_parallel_size=2)[0]
    assert [len(ids) for ids in tokens] == [3 + 16, 90 + 16, 210 + 16]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size is 3, .*4 attention heads.*possible: 1, 2, 4"),
        ({"tensor_parallel_size": 8}, "--tensor-parallel-size is 8, .*possible: 1, 2, 4"),
        ({"tensor_parallel_size": 2, "num_gpu_blocks_override": 2}, "--num-gpu-blocks-override gives 2 KV blocks"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, settings, message):
    save_tiny(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_engine(WorkerConfig(model=tmp_path, device="cpu", dtype="float32", **settings))


def test_a_model_of_another_shape_is_refused_whatever_a_rank_holds_of_it(tmp_path):
    save_tiny(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 46}))
    with pytest.raises((CheckpointError, RankFailed), match=r"_proj.weight has shape \(\d+, \d+\), the model needs"):
        build_engine(WorkerConfig(model=tmp_path, device="cpu", dtype="float32", tensor_parallel_size=2))
