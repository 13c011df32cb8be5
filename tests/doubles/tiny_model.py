"""A model folder small enough to make in a test: Llama's architecture, random weights, no tokenizer."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 128


def tiny_llama(**changes) -> LlamaForCausalLM:
    """A transformers model in float32, the same every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)  # larger than usual, so that no two logits are nearly equal
    return model


def save_tiny_llama(folder: Path, **changes) -> LlamaForCausalLM:
    """Writes the model as a Hugging Face folder and returns it."""
    model = tiny_llama(**changes)
    model.save_pretrained(folder)
    return model
