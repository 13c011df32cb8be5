"""The router's settings: flags with vLLM's names, parsed once into a frozen value. Imports no gRPC."""

import argparse
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from protos.api_keys import (
    OWN_KEY_VARIABLE,
    ApiKey,
    KeyFileError,
    add_key_arguments,
    digest_of,
    keys_from_args,
    own_key,
)  # fmt: skip
from protos.logs import add_log_arguments
from protos.tls import ClientTls, ServerTls, TlsError, add_client_arguments, add_server_arguments
from protos.tracing import add_tracing_argument

PROG = "quire router"
DNS_SCHEME = "dns:///"
# A pause costs computing the prompt again, unless it is still cached: it must not come after every few tokens.
MIN_UNSENT_BYTES = 64 * 1024
POLICIES = ("prefix", "round_robin", "random", "least_load", "power_of_two", "session")


class ConfigError(ValueError):
    """A setting is impossible; the message names the flag or file and says what to do."""


@dataclass(frozen=True)
class RouterConfig:
    """All settings of one router process. See ``add_arguments`` for their meaning; times are seconds."""

    model: Path
    worker_urls: tuple[str, ...]
    enable_worker_registration: bool = False
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = None
    served_model_name: tuple[str, ...] = ()
    tokenizer: Path | None = None
    chat_template: Path | None = None
    policy: str = "prefix"
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 4_194_304
    max_queue_wait: float = 60.0
    max_unsent_bytes: int = 4 * 1024 * 1024
    tokenizer_threads: int = 4
    worker_timeout: float = 5.0
    max_attempts: int = 3
    shutdown_timeout: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None
    # Of --api-key, QUIRE_API_KEY and --api-keys-file together.
    api_keys: tuple[ApiKey, ...] = ()
    # SHA-256 of the processes' own key. With neither, nobody needs one.
    own_key: bytes | None = field(default=None, repr=False)
    tls: ServerTls | None = None
    worker_tls: ClientTls | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RouterConfig":
        """Builds the settings from parsed flags. Raises ConfigError for what is impossible."""
        try:
            own = own_key(os.environ)
            made: dict[str, Any] = {
                "api_keys": keys_from_args(args),
                "own_key": digest_of(own) if own else None,
                "tls": ServerTls.from_args(args),
                "worker_tls": ClientTls.from_args(args, "worker"),
            }
        except (KeyFileError, TlsError) as error:
            raise ConfigError(str(error)) from error
        values = made | {name: getattr(args, name) for name in cls.__dataclass_fields__ if name not in made}
        urls = [url for given in args.worker_urls for url in given.split(",") if url]
        values["worker_urls"] = tuple(dict.fromkeys(urls))
        values["served_model_name"] = tuple(dict.fromkeys(args.served_model_name or ()))
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError when a value is out of range."""
        if not self.worker_urls and not self.enable_worker_registration:
            raise ConfigError(
                "--worker-urls names no worker; give HOST:PORT of at least one, or let them register "
                "(--enable-worker-registration)"
            )
        for url in self.worker_urls:
            host, colon, port = url.removeprefix(DNS_SCHEME).rpartition(":")
            if not (colon and host and "/" not in host and port.isdecimal() and 0 < int(port) <= 65535):
                raise ConfigError(
                    f"--worker-urls has {url!r}; a worker is HOST:PORT, say 127.0.0.1:50061, and all addresses of a "
                    f"name are {DNS_SCHEME}NAME:PORT"
                )
        if "" in self.served_model_name:
            raise ConfigError("--served-model-name has an empty name; leave the flag out for the model's own name")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be 0 (any free port) to 65535")
        if self.metrics_port is not None and not 1 <= self.metrics_port <= 65535:
            raise ConfigError(f"--metrics-port is {self.metrics_port}; it must be 1 to 65535")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "tokenizer_threads", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}; it must be at least 1")
        if self.max_unsent_bytes < MIN_UNSENT_BYTES:
            raise ConfigError(f"--max-unsent-bytes is {self.max_unsent_bytes}; it must be at least {MIN_UNSENT_BYTES}")
        for name in ("max_queue_wait", "worker_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}; it must be above 0 seconds")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"--shutdown-timeout is {self.shutdown_timeout}; it must be 0 seconds or more")
        if fault := not_enforced(self.api_keys):
            raise ConfigError(
                f"--api-keys-file: {fault}, which gateways enforce and the router does not; give it keys without, or, "
                f"for calls of gateways alone, no file and the variable {OWN_KEY_VARIABLE}"
            )
        if self.enable_worker_registration and self.api_keys and self.own_key is None:
            raise ConfigError(
                f"--enable-worker-registration: where clients have keys, workers register with one of their own; set "
                f"the variable {OWN_KEY_VARIABLE} to the same for router, workers and gateways"
            )
        for name in ("model", "tokenizer", "chat_template"):
            path = getattr(self, name)
            if path is not None and not path.exists():
                raise ConfigError(f"{_flag(name)} is {path}: no such file or folder")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients may use for the model; the first is the one that answers carry."""
        if self.served_model_name:
            return self.served_model_name
        path = self.model.resolve()
        return (path.stem if path.suffix == ".gguf" else path.name,)


def not_enforced(keys: tuple[ApiKey, ...]) -> str:
    """What some key is given that only a gateway holds it to; empty: nothing."""
    for key in keys:
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests", "output_policy"):
            if getattr(key, name) is not None:
                return f"the key with sha256 {key.sha256.hex()[:8]}... has {name}"
    return ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the router's flags."""
    default = RouterConfig(Path(), ())
    group = parser.add_argument_group("router")
    group.add_argument(
        "--model", type=Path, required=True, metavar="PATH",
        help="the model's folder or .gguf file: its tokenizer, chat template and end-of-sequence tokens are read",
    )  # fmt: skip
    group.add_argument("--host", default=default.host, help="address to bind (default %(default)s)")
    group.add_argument(
        "--port", type=int, default=default.port, help="gRPC port; 0 takes a free one (default %(default)s)"
    )
    group.add_argument(
        "--metrics-port", type=int, default=default.metrics_port, metavar="PORT",
        help="HTTP port for the router's metrics in Prometheus' text format (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--worker-urls", nargs="+", action="extend", default=[], metavar="HOST:PORT",
        help="the workers' gRPC addresses, separated by spaces or commas; they need not be there yet. "
        f"{DNS_SCHEME}NAME:PORT is all addresses that a name has, looked up every few seconds",
    )  # fmt: skip
    group.add_argument(
        "--enable-worker-registration", action="store_true",
        help="take workers that announce themselves (quire worker --register) on --port; whoever reaches it can "
        "become one",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="names that clients use; several are aliases (default: the name of --model)",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="folder or .gguf file to take the tokenizer from (default: --model)",
    )
    group.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja chat template to use instead of the model's own"
    )
    group.add_argument(
        "--tokenizer-threads", type=int, default=default.tokenizer_threads, metavar="N",
        help="threads that tokenize and render templates (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--policy", default=default.policy, choices=POLICIES,
        help="which worker gets a sequence: prefix weighs what it has cached of the prompt against how busy it is, "
        "session keeps a session_id on one worker (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-num-queued-reqs", type=int, default=default.max_num_queued_reqs, metavar="N",
        help="most requests that wait for a worker; more are refused (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-num-queued-tokens", type=int, default=default.max_num_queued_tokens, metavar="N",
        help="most prompt tokens, cached ones aside, of the requests that wait; more are refused (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-queue-wait", type=float, default=default.max_queue_wait, metavar="S",
        help="seconds that a request waits for a worker before it is refused (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-unsent-bytes", type=int, default=default.max_unsent_bytes, metavar="N",
        help="about how much of a stream the router holds for a client that reads too slowly; then the stream is "
        "paused, and goes on when the client has caught up (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--worker-timeout", type=float, default=default.worker_timeout, metavar="S",
        help="seconds without a sign of life after which a worker counts as lost (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-attempts", type=int, default=default.max_attempts, metavar="N",
        help="workers in a row that may be lost with a request, none of which brought its output further, before it "
        "fails (default %(default)s)",
    )  # fmt: skip
    add_key_arguments(group)
    group.add_argument(
        "--shutdown-timeout", type=float, default=default.shutdown_timeout, metavar="S",
        help="seconds that running requests get after SIGTERM (default %(default)s)",
    )  # fmt: skip
    add_log_arguments(group)
    add_tracing_argument(group)
    add_server_arguments(parser)
    add_client_arguments(parser, "worker")


def parse_args(argv: list[str] | None = None) -> RouterConfig:
    """Settings from the command line. Raises ConfigError for bad flags; ``--help`` exits."""
    parser = _Parser(
        prog=PROG, description="Serves the gRPC Inference service: tokenizes, queues, routes to workers, detokenizes."
    )
    add_arguments(parser)
    return RouterConfig.from_args(parser.parse_args(argv))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """All bad settings end alike, also those that argparse finds."""
        raise ConfigError(f"{message}; see {PROG} --help")
