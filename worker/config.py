"""The worker's settings: flags with vLLM's names, parsed once into a frozen value. Knows no torch."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from typing import Any

from protos.api_keys import KeyFileError, own_key
from protos.logs import add_log_arguments
from protos.tls import ClientTls, ServerTls, TlsError, add_client_arguments, add_server_arguments
from protos.tracing import add_tracing_argument
from worker.speculation.config import SpeculativeConfig, parse_speculative_config

PROG = "quire worker"
SCHEDULING_POLICIES = ("fcfs", "priority")
QUANTIZATIONS = ("fp8", "awq")
_ALL_ADDRESSES = ("0.0.0.0", "::", "[::]")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")


class ConfigError(ValueError):
    """A setting is impossible or not supported; the message names the flag and says what to do."""


@dataclass(frozen=True)
class WorkerConfig:
    """All settings of one worker process. See ``add_arguments`` for their meaning."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 50061
    worker_id: str = ""
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    max_num_prefill_tokens_with_decodes: int | None = None
    scheduling_policy: str = "fcfs"
    block_size: int = 16
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    shared_prefix_attention: bool = True
    seed: int = 0
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    speculative_config: SpeculativeConfig | None = None
    register: str = ""
    advertise: str = ""
    shutdown_timeout: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None
    tls: ServerTls | None = None
    router_tls: ClientTls | None = None
    # Shown to the router of --register; empty: none.
    router_api_key: str = field(default="", repr=False)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "WorkerConfig":
        """Builds the settings from parsed flags. Raises ConfigError for what is impossible or not supported."""
        _refuse_unsupported(args)
        try:
            made: dict[str, Any] = {"router_api_key": own_key(os.environ)}
            made |= {"tls": ServerTls.from_args(args), "router_tls": ClientTls.from_args(args, "router")}
        except (KeyFileError, TlsError) as error:
            raise ConfigError(str(error)) from error
        values = made | {name: getattr(args, name) for name in cls.__dataclass_fields__ if name not in made}
        if args.speculative_config is not None:
            try:
                values["speculative_config"] = parse_speculative_config(args.speculative_config)
            except ValueError as error:
                raise ConfigError(f"--speculative-config: {error}") from error
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError when a value is out of range."""
        for name in (
            *("max_model_len", "tensor_parallel_size"),
            *("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} is {value}; it must be at least 1")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size is {self.block_size}; it must be a power of two")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization is {self.gpu_memory_utilization}; wanted above 0, at most 1")
        for name in ("long_prefill_token_threshold", "max_num_prefill_tokens_with_decodes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{_flag(name)} is {value}; it must be 0 (no limit) or more")
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_seqs is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below --max-num-seqs {self.max_num_seqs}: "
                "a step could not give each running sequence its token; raise the first or lower the second"
            )
        for name in ("register", "advertise"):
            value = getattr(self, name)
            if value and _host_and_port(value) is None:
                raise ConfigError(f"{_flag(name)} is {value!r}; it must be HOST:PORT, say 10.0.0.7:50061")
        if self.router_tls is not None and not self.register:
            raise ConfigError("--router-ssl-ca-certs is of calls to the router of --register; give both")
        if self.advertise and not self.register:
            raise ConfigError("--advertise says where --register tells a router to find this worker; give both")

    @property
    def advertised(self) -> tuple[str, int]:
        """Where routers are told to find this worker. No host: whence its calls come; port 0: where it listens."""
        named = _host_and_port(self.advertise)
        return named or ("" if self.host in _ALL_ADDRESSES else self.host, 0)

    def identity(self, port: int) -> str:
        """The name in logs and routing of the worker that listens on ``port``: one that listens on all addresses of its
        machine, or container, is named after that."""
        return self.worker_id or f"{gethostname() if self.host in _ALL_ADDRESSES else self.host}:{port}"


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) <= 65535 else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_unsupported(args: argparse.Namespace) -> None:
    """Settings that are understood but not built yet are refused, never ignored."""
    if args.quantization not in (None, *QUANTIZATIONS):
        raise ConfigError(
            f"--quantization {args.quantization} is not supported; use {' or '.join(QUANTIZATIONS)}, or leave it out: "
            "what a checkpoint says of itself is enough"
        )
    if args.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {args.kv_cache_dtype} is not supported; use auto (the model's dtype) or fp8 (E4M3)"
        )


def add_arguments(parser: argparse.ArgumentParser, *, listen: bool = True) -> None:
    """Adds the worker's flags. ``listen=False`` leaves out those that ``quire serve`` sets itself."""
    if listen:
        group = parser.add_argument_group("worker: address")
        group.add_argument("--model", type=Path, required=True, help="folder with safetensors, or a .gguf file")
        group.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
        group.add_argument("--port", type=int, default=50061, help="gRPC port; 0 takes a free one (default 50061)")
        group.add_argument(
            "--worker-id", default="", help="name in logs and routing (default: host:port, machine:port)"
        )
        group.add_argument(
            "--register", default="", metavar="HOST:PORT",
            help="router to announce this worker to; it must run with --enable-worker-registration",
        )  # fmt: skip
        group.add_argument(
            "--advertise", default="", metavar="HOST:PORT",
            help="where that router finds this worker (default: --host, or whence the announcement comes, and --port)",
        )  # fmt: skip
        group.add_argument(
            "--shutdown-timeout", type=float, default=30.0, metavar="S",
            help="seconds that running sequences get after SIGTERM (default %(default)s)",
        )  # fmt: skip
        add_log_arguments(group)
        add_tracing_argument(group)
        add_server_arguments(parser)
        add_client_arguments(parser, "router")
    group = parser.add_argument_group("worker: model")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto: cuda if present)")
    group.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32", "half", "float"),
        help="of weights and activations (default auto: bfloat16 where the processor has it, else float32)",
    )  # fmt: skip
    group.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"),
        help="auto reads the model's weights; dummy fills them at random, for benchmarks (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="most tokens of prompt and output together (default: the model's own limit)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="of random weights (default %(default)s)")
    group.add_argument(
        "-q", "--quantization", metavar="METHOD",
        help="fp8 quantizes the linear layers of an unquantized checkpoint while loading; fp8 and awq are refused for "
        "checkpoints quantized otherwise (default: as the checkpoint says)",
    )  # fmt: skip
    group.add_argument(
        "-tp", "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="processes that share a model, each with a GPU of its own, or a share of the cores (default %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("worker: scheduling")
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="most sequences in a step (default 64 on cpu, 256 on gpu)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N",
        help="most tokens in a step: long prompts are computed in chunks (default 512 on cpu, else 8192)",
    )  # fmt: skip
    group.add_argument(
        "--long-prefill-token-threshold", type=int, default=0, metavar="N",
        help="most prompt tokens of one sequence in a step, so that others pass a long one (default 0: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--max-num-prefill-tokens-with-decodes", type=int, metavar="N",
        help="most prompt tokens in a step in which others decode: bounds the time between their tokens while prompts "
        "are computed, at the cost of later first tokens; 0 is no limit (default 0 on cpu, else 1024)",
    )  # fmt: skip
    group.add_argument(
        "--scheduling-policy", default="fcfs", choices=SCHEDULING_POLICIES,
        help="fcfs: first come, first served; priority: by the requests' priority, lower first (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction,
        help="plan a step while the one before runs (default: on except on cpu)",
    )  # fmt: skip
    group.add_argument(
        "--enforce-eager", action="store_true",
        help="launch the operations of each step one by one, without CUDA graphs: slower, starts sooner",
    )  # fmt: skip
    group.add_argument(
        "--speculative-config", metavar="JSON",
        help='drafts several tokens of each sequence and verifies them in one step, say {"method": "ngram", '
        '"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}, which copies what followed the '
        'same tokens before, or {"method": "draft_model", "model": "small.gguf", "num_speculative_tokens": 4}, '
        "which asks a smaller model of the same vocabulary; output does not change (default: none)",
    )  # fmt: skip
    group = parser.add_argument_group("worker: KV cache")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (default %(default)s)")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="keep blocks of finished prompts for later ones (default on)",
    )  # fmt: skip
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.92, metavar="F",
        help="share of the GPU's memory for weights, activations and KV cache (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-memory-bytes", type=int, metavar="N",
        help="size of the KV cache of each rank, instead of what is left (default on cpu: 512 MiB)",
    )  # fmt: skip
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks, instead of a size in bytes")
    group.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE",
        help="auto: the model's dtype; fp8 or fp8_e4m3: 8-bit floats without scales, half the size, with less accuracy "
        "(default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--shared-prefix-attention", action=argparse.BooleanOptionalAction, default=True,
        help="on a GPU, read cached blocks that many decoding sequences share once for all of them (default on)",
    )  # fmt: skip


def parse_args(argv: list[str] | None = None) -> WorkerConfig:
    """Parses a command line. Raises ConfigError; argparse itself exits for unknown flags and ``--help``."""
    parser = argparse.ArgumentParser(prog=PROG, description="Run one Quire worker: KV blocks, step loop, sampling.")
    add_arguments(parser)
    return WorkerConfig.from_args(parser.parse_args(argv))
