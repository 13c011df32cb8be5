"""The settings with every default that depends on the model or the machine filled in: device, dtypes, lengths."""

from dataclasses import dataclass, replace

import torch

from kernels.float8 import has_float8
from worker.config import ConfigError, WorkerConfig
from worker.loader.checkpoint import Checkpoint
from worker.model_config import ModelConfig
from worker.quantization import choose_quantization

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True)
class Setup:
    """The settings, every default that depends on the model or the machine filled in."""

    config: WorkerConfig
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens_with_decodes: int

    def for_rank(self, rank: int) -> WorkerConfig:
        """The settings of one rank, from which it comes to the same setup."""
        return replace(
            self.config,
            device=f"cuda:{rank}" if self.device.type == "cuda" else "cpu",
            dtype=dtype_name(self.dtype),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tensor_parallel_size=1,
            speculative_config=None,  # the leader's alone
        )


def resolve(config: WorkerConfig, checkpoint: Checkpoint) -> Setup:
    """Fills in the defaults that depend on the model or the machine. Raises ConfigError when a setting fits neither."""
    quantized_config(config, checkpoint)  # a --quantization that does not fit is refused before anything is built
    device = resolve_device(config.device, config.tensor_parallel_size)
    longest = checkpoint.config.max_position
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(f"--max-model-len is {max_model_len}, but {checkpoint.name} knows {longest} positions")
    on_cpu = device.type == "cpu"
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    max_num_batched_tokens = max(config.max_num_batched_tokens or (512 if on_cpu else 8192), max_num_seqs)
    beside_decodes = config.max_num_prefill_tokens_with_decodes
    if beside_decodes is None:
        beside_decodes = 0 if on_cpu else 1024
    dtype = resolve_dtype(config.dtype, device)
    kv_cache_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
    return Setup(
        config=config, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_num_prefill_tokens_with_decodes=beside_decodes,
    )  # fmt: skip


def quantized_config(config: WorkerConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The checkpoint's configuration with what --quantization adds to it. Raises ConfigError when they do not fit."""
    model = checkpoint.config
    found = choose_quantization(config.quantization, model.quantization, checkpoint.name, model.experts is not None)
    return replace(model, quantization=found)


def resolve_device(name: str, ranks: int = 1) -> torch.device:
    """The device of a --device flag, of rank 0 when there are several. Raises ConfigError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    if device.type == "cuda" and ranks > 1:
        if ":" in name:
            raise ConfigError(f"--device {name} names one GPU, but every rank needs one of its own; use cuda")
        if ranks > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size is {ranks}, but torch sees {torch.cuda.device_count()} CUDA devices and every "
                "rank needs one of its own; lower it, or give --device cpu"
            )
        return torch.device("cuda:0")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a --dtype flag; auto is bfloat16 where the processor computes with it, else float32."""
    if name != "auto":
        return _DTYPES[name]
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def resolve_kv_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a --kv-cache-dtype flag, for a model of ``dtype``. Raises ConfigError when the GPU has no such."""
    if name == "auto":
        return dtype
    if device.type == "cuda" and not has_float8(device):
        raise ConfigError(f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or newer; use auto")
    return torch.float8_e4m3fn


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
