"""The engine's arguments: vLLM's names, each a flag of the worker or the router. Needs no torch."""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import worker.config
from quire.config import forwarded_flags
from quire.models import DEMO_MODEL
from quire.offline.field_errors import without_flags
from worker.config import WorkerConfig

# Not the worker's: which files are read.
_FILES = ("model", "tokenizer", "chat_template")
_SWITCHES = ("enable_prefix_caching", "shared_prefix_attention", "enforce_eager", "async_scheduling")


@dataclass(kw_only=True)
class EngineArgs:
    """What ``quire serve`` takes as flags, as far as it concerns the engine; None is the flag's default.

    Attributes:
        model: a folder, a .gguf file, a hub id, or the demo model; fetched when it is not here yet.
        tokenizer: a folder or .gguf file to take the tokenizer from, if not the model's.
        chat_template: a Jinja file to use instead of the model's template.
        speculative_config: a dict with the fields of ``--speculative-config``, or its JSON.

    The others are those of ``quire worker --help``.
    """

    model: str | Path = DEMO_MODEL
    tokenizer: str | Path | None = None
    chat_template: str | Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    max_num_prefill_tokens_with_decodes: int | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    speculative_config: dict[str, Any] | str | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.92
    shared_prefix_attention: bool = True
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None

    def worker_config(self, model: Path) -> WorkerConfig:
        """The worker's settings for a model that lies at ``model``; its own parser reads and checks them, as flags.

        Raises:
            ValueError: an argument is wrong or not supported; the message names it.
        """
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "async_scheduling"):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _FILES}
        if isinstance(self.speculative_config, dict):
            values["speculative_config"] = json.dumps(self.speculative_config)
        parser = _Parser(add_help=False, allow_abbrev=False)
        worker.config.add_arguments(parser)
        try:
            flags = forwarded_flags(_add_engine_arguments, argparse.Namespace(**values))
            return WorkerConfig.from_args(parser.parse_args(["--model", str(model), *flags]))
        except ValueError as error:
            raise ValueError(without_flags(str(error))) from error


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    worker.config.add_arguments(parser, listen=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A library does not exit."""
        raise ValueError(message.removeprefix("argument "))
