"""Model folders small enough to make in a test: public architectures, random weights, no tokenizer."""

from pathlib import Path

import torch
import transformers

VOCAB = 128


def save_tiny(folder: Path, family: str = "Llama", **changes: object) -> transformers.PreTrainedModel:
    """Writes a Hugging Face folder and returns its model, in float32 and the same every time.

    Args:
        folder: made when missing.
        family: as transformers spells it in its class names, such as "Llama" or "Qwen3Moe".
        changes: to the configuration.
    """
    torch.manual_seed(0)
    settings = {
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
    }
    config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
    # Some releases leave soft caps out of their faster implementations.
    config._attn_implementation = "eager"
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)  # larger than usual, so that no two logits are nearly equal
    model.save_pretrained(folder)
    return model
