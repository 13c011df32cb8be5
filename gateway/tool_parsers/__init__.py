"""Formats in which models write calls of tools: one file each, chosen by ``--tool-call-parser``."""

from collections.abc import Mapping

from gateway.tool_parsers.call_reader import ToolParser
from gateway.tool_parsers.hermes import HermesParser
from gateway.tool_parsers.mistral import MistralParser
from gateway.tool_parsers.plain_json import PlainJsonParser

PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": PlainJsonParser,
    "mistral": MistralParser,
    "json": PlainJsonParser,
}
"""By vLLM's names, and ``json`` for models of no format of their own."""
