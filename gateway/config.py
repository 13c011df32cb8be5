"""The gateway's settings: flags with vLLM's names, parsed once into a frozen value. Imports no gRPC."""

import argparse
import math
import os
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gateway.request_limits import RequestLimits, add_limit_arguments
from protos.api_keys import ApiKey, KeyFileError, add_key_arguments, keys_from_args, own_key
from protos.logs import add_log_arguments
from protos.tls import ClientTls, ServerTls, TlsError, add_client_arguments, add_server_arguments
from protos.tracing import add_tracing_argument

PROG = "quire gateway"
TOOL_CALL_PARSERS = ("hermes", "json", "llama3_json", "mistral")
_MOST_PROCESSES = 64
REASONING_PARSERS = ("deepseek_r1", "qwen3")


class ConfigError(ValueError):
    """A setting is impossible; the message names the flag and says what to do."""


@dataclass(frozen=True)
class GatewayConfig:
    """All settings of one gateway process. See ``add_arguments`` for their meaning; times are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = 1
    router: str = "127.0.0.1:50051"
    request_timeout: float = 600.0
    limits: RequestLimits = field(default_factory=RequestLimits)
    shutdown_timeout: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    # Of --api-key, QUIRE_API_KEY and --api-keys-file together; with none, nobody needs one.
    api_keys: tuple[ApiKey, ...] = ()
    # Shown to the router; empty: none.
    router_api_key: str = field(default="", repr=False)
    tls: ServerTls | None = None
    router_tls: ClientTls | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "GatewayConfig":
        """Builds the settings from parsed flags. Raises ConfigError for what is impossible."""
        made: dict[str, Any] = {"limits": RequestLimits.from_args(args)}
        try:
            made |= {"api_keys": keys_from_args(args), "router_api_key": own_key(os.environ)}
            made |= {"tls": ServerTls.from_args(args), "router_tls": ClientTls.from_args(args, "router")}
        except (KeyFileError, TlsError) as error:
            raise ConfigError(str(error)) from error
        values = made | {name: getattr(args, name) for name in cls.__dataclass_fields__ if name not in made}
        values["allowed_origins"] = tuple(values["allowed_origins"])
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError when a value is out of range."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be 0 (any free port) to 65535")
        if not 1 <= self.processes <= _MOST_PROCESSES:
            raise ConfigError(f"--processes is {self.processes}; it must be 1 to {_MOST_PROCESSES}")
        host, colon, port = self.router.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise ConfigError(f"--router is {self.router!r}; it must be HOST:PORT, say 127.0.0.1:50051")
        if not 0 < self.request_timeout < math.inf:
            raise ConfigError(f"--request-timeout is {self.request_timeout}; it must be above 0 seconds")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"--shutdown-timeout is {self.shutdown_timeout}; it must be 0 seconds or more")
        if fault := self.limits.fault():
            raise ConfigError(fault)
        for origin in self.allowed_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(
                    f"--allowed-origins has {origin!r}; an origin is * or begins with http:// or https://"
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the gateway's flags."""
    default = GatewayConfig()
    group = parser.add_argument_group("gateway")
    group.add_argument("--host", default=default.host, help="address to bind (default %(default)s)")
    group.add_argument(
        "--port", type=int, default=default.port, help="HTTP port; 0 takes a free one (default %(default)s)"
    )
    group.add_argument(
        "--processes", "--api-server-count", type=int, default=default.processes, metavar="N",
        help="gateway processes that share the port; each counts the limits of keys for itself (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--router", default=default.router, metavar="HOST:PORT", help="the router's gRPC address (default %(default)s)"
    )
    group.add_argument(
        "--request-timeout", type=float, default=default.request_timeout, metavar="S",
        help="seconds that one request may take, waiting included (default %(default)s)",
    )  # fmt: skip
    add_limit_arguments(group)
    group.add_argument(
        "--allowed-origins", nargs="+", default=default.allowed_origins, metavar="ORIGIN",
        help="origins whose web pages may call this server, or * for all (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--tool-call-parser", default=default.tool_call_parser, choices=("auto", *TOOL_CALL_PARSERS),
        help="format in which calls of tools are read; auto is that of the model's chat template, where it is one of "
        "these, else json, which the model is then told in words (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", default=default.reasoning_parser, choices=REASONING_PARSERS,
        help="splits <think>...</think> from the answer: qwen3 where the model writes the opening mark itself, "
        "deepseek_r1 where the chat template does (default: none)",
    )  # fmt: skip
    add_key_arguments(group)
    group.add_argument(
        "--shutdown-timeout", type=float, default=default.shutdown_timeout, metavar="S",
        help="seconds that running requests get after SIGTERM (default %(default)s)",
    )  # fmt: skip
    add_log_arguments(group)
    add_tracing_argument(group)
    add_server_arguments(parser, names=False)
    add_client_arguments(parser, "router")


def parse_args(argv: list[str] | None = None) -> GatewayConfig:
    """Settings from the command line. Raises ConfigError for bad flags; ``--help`` exits."""
    parser = _Parser(prog=PROG, description="Serves the OpenAI REST API and passes requests on to a router.")
    add_arguments(parser)
    return GatewayConfig.from_args(parser.parse_args(argv))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """All bad settings end alike, also those that argparse finds."""
        raise ConfigError(f"{message}; see {PROG} --help")
