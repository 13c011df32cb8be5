"""The flags of benchmarks that run the engine in this process: those of ``quire worker`` that concern it."""

import argparse
import os
from dataclasses import fields
from pathlib import Path

import worker.config
from protos.logs import add_log_arguments
from quire.config import forwarded_flags
from quire.models import DEMO_MODEL
from quire.offline.engine_args import EngineArgs
from worker.config import WorkerConfig


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what ``quire serve`` takes for the model and its engine, with the same meaning and defaults."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", default=DEMO_MODEL, help="a folder, a .gguf file, a hub id, or the demo model (default %(default)s)"
    )
    add_log_arguments(group)
    _add_engine_arguments(parser)


def worker_config(args: argparse.Namespace, model: Path) -> WorkerConfig:
    """The engine's settings for a model that lies at ``model``. Raises ValueError, naming the flag, for bad ones."""
    flags = forwarded_flags(_add_engine_arguments, args, ("model",))
    return worker.config.parse_args(["--model", str(model), *flags])


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """The same for the offline API. Raises ValueError, naming the flag, for bad ones."""
    worker_config(args, Path(os.devnull))
    return EngineArgs(
        **{each.name: getattr(args, each.name) for each in fields(EngineArgs) if hasattr(args, each.name)}
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    worker.config.add_arguments(parser, listen=False)
