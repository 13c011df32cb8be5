"""Every model family against transformers: logits of whole prompts, chunks and single tokens, and greedy ids."""

import pytest
import torch

from kernels.attention import HostLayout
from tests.doubles.tiny_model import VOCAB, save_tiny
from worker.config import WorkerConfig
from worker.kv_cache import KVCache
from worker.loader import open_checkpoint
from worker.model_loading import load_model
from worker.models import ARCHITECTURES
from worker.sequence import SamplingParams, Sequence, token_array
from worker.startup import build_engine

CPU = torch.device("cpu")
BLOCK = 4

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 1.5, 2.0, 3.0],
    "original_max_position_embeddings": 64,
}
LOCAL = "sliding_attention"
GLOBAL = "full_attention"

CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-in-late-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 24, "num_hidden_layers": 3,
         "layer_types": [LOCAL, LOCAL, GLOBAL],
         "rope_parameters": {
             GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
             LOCAL: {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-longrope-partial": (
        "Phi3",
        {"pad_token_id": 0, "num_attention_heads": 2, "original_max_position_embeddings": 64,
         "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
         "norm_topk_prob": True},
    ),
}  # fmt: skip


def test_every_architecture_has_a_case(tmp_path):
    covered = set()
    for name, (family, changes) in CASES.items():
        save_tiny(tmp_path / name, family, **changes)
        covered.add(open_checkpoint(tmp_path / name).config.architecture)
    assert covered == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(tmp_path, case):
    """A prompt in two chunks, a short chunk over them, then 64 tokens one by one: relative error below 1e-4."""
    family, changes = CASES[case]
    theirs = save_tiny(tmp_path, family, **changes)
    checkpoint = open_checkpoint(tmp_path)
    with torch.inference_mode():
        model, _ = load_model(WorkerConfig(model=tmp_path), checkpoint, 256, torch.float32, CPU)
        cache = KVCache(checkpoint.config, 64, BLOCK, torch.float32, CPU)
        torch.manual_seed(1)
        ids = torch.randint(3, VOCAB, (221,))
        expected = theirs(ids[None]).logits[0]
        table = torch.randperm(64)[None]
        done = 0
        for count in (50, 100, 7, *[1] * 64):
            positions = torch.arange(done, done + count)
            batch = HostLayout(
                slot_mapping=table[0, positions // BLOCK] * BLOCK + positions % BLOCK,
                block_tables=table,
                query_lens=(count,),
                context_lens=(done + count,),
                block_size=BLOCK,
                key_tile=BLOCK,
            )
            logits = model.logits(model(ids[done : done + count], positions, cache, batch))
            reference = expected[done : done + count]
            assert ((logits - reference).norm() / reference.norm()).item() < 1e-4, f"tokens from {done}"
            done += count


@pytest.mark.parametrize("case", CASES)
def test_greedy_ids_match_transformers(tmp_path, case):
    """Three prompts together in the engine, each as transformers continues it alone."""
    family, changes = CASES[case]
    theirs = save_tiny(tmp_path, family, **changes)
    engine, _ = build_engine(WorkerConfig(model=tmp_path, dtype="float32", kv_cache_memory_bytes=1 << 21))
    torch.manual_seed(2)
    # transformers changes LongRoPE's frequencies when a sequence outgrows the first context; we never do.
    lengths = (70, 80, 90) if "longrope" in case else (3, 40, 90)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in lengths]
    sequences = []
    for prompt in prompts:
        tokens = token_array()
        tokens.extend(prompt)
        sequences.append(Sequence("test", tokens, SamplingParams(temperature=0.0), 40))
        engine.add(sequences[-1])
    while engine.has_unfinished:
        engine.step()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert sequence.tokens.tolist() == expected[0].tolist()
