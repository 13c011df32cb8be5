"""Quire in Python: ``from quire import LLM, SamplingParams``. Also the quire command, which needs none of these names.

Each name is imported when it is first used, so that the command, and images without torch, never load the engine.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.offline.engine_args import EngineArgs
    from quire.offline.llm import LLM
    from quire.offline.llm_engine import LLMEngine
    from quire.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from quire.offline.sampling_params import RequestOutputKind, SamplingParams
    from quire.offline.structured_outputs import StructuredOutputsParams
else:
    _HOMES = {
        "EngineArgs": "engine_args",
        "LLM": "llm",
        "LLMEngine": "llm_engine",
        "CompletionOutput": "outputs",
        "Logprob": "outputs",
        "RequestMetrics": "outputs",
        "RequestOutput": "outputs",
        "RequestOutputKind": "sampling_params",
        "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "structured_outputs",
    }

    def __getattr__(name):
        """Imports the module that defines a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module 'quire' has no attribute {name!r}")
        return getattr(importlib.import_module(f"quire.offline.{_HOMES[name]}"), name)


__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
