"""Model families: short files of plain torch modules built from shared layers."""

from worker.model_config import ModelConfig, UnsupportedModel
from worker.models.llama import LlamaForCausalLM

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {"LlamaForCausalLM": LlamaForCausalLM}


def build_model(config: ModelConfig, max_position: int) -> LlamaForCausalLM:
    """The family's module, its weights not filled yet, on torch's default device and dtype.

    Raises:
        UnsupportedModel: no family has this architecture.
    """
    family = ARCHITECTURES.get(config.architecture)
    if family is None:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return family(config, max_position)


__all__ = ["ARCHITECTURES", "ModelConfig", "UnsupportedModel", "build_model"]
