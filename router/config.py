"""The router's settings: flags parsed once into a frozen value. Standard library only."""

import argparse
from dataclasses import dataclass
from pathlib import Path

PROG = "quire router"
POLICIES = ("least_load", "round_robin")


class ConfigError(ValueError):
    """A setting is impossible; the message names the flag and says what to do."""


@dataclass(frozen=True)
class RouterConfig:
    """All settings of the router process. See ``add_arguments`` for their meaning."""

    model: Path
    worker_urls: tuple[str, ...]
    served_model_name: tuple[str, ...] = ()
    tokenizer: Path | None = None
    chat_template: Path | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    policy: str = "least_load"
    max_num_queued_reqs: int = 1024
    max_queue_wait: float = 60.0
    worker_timeout: float = 5.0
    tokenizer_threads: int = 2
    shutdown_timeout: float = 30.0
    log_level: str = "info"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RouterConfig":
        """Builds the settings from parsed flags. Raises ConfigError for what is impossible."""
        values = {name: getattr(args, name) for name in cls.__dataclass_fields__}
        values["worker_urls"] = tuple(url for text in args.worker_urls for url in text.split(",") if url)
        values["served_model_name"] = tuple(args.served_model_name or (args.model.stem,))
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError when a value is out of range."""
        if not self.worker_urls:
            raise ConfigError("--worker-urls names no worker; give at least one host:port")
        for url in self.worker_urls:
            host, colon, port = url.rpartition(":")
            if not (host and colon and port.isdigit()):
                raise ConfigError(f"--worker-urls has {url!r}; wanted host:port")
        if len(set(self.worker_urls)) != len(self.worker_urls):
            raise ConfigError("--worker-urls names a worker twice")
        for name in ("max_num_queued_reqs", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError(f"--chat-template is {self.chat_template}, which is no file")
        for name in ("max_queue_wait", "worker_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0 seconds")


def add_arguments(parser: argparse.ArgumentParser, *, listen: bool = True) -> None:
    """Adds the router's flags. ``listen=False`` leaves out those that ``quire serve`` sets itself."""
    if listen:
        group = parser.add_argument_group("router: address")
        group.add_argument("--model", type=Path, required=True, help="folder or .gguf file with tokenizer and template")
        group.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
        group.add_argument("--port", type=int, default=50051, help="gRPC port; 0 takes a free one (default 50051)")
        group.add_argument(
            "--worker-urls", nargs="+", required=True, metavar="HOST:PORT", help="workers, by space or comma"
        )
        group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use")
        group.add_argument(
            "--shutdown-timeout", type=float, default=30.0, metavar="S",
            help="seconds that running requests get after SIGTERM (default %(default)s)",
        )  # fmt: skip
        group.add_argument(
            "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default %(default)s"
        )
    group = parser.add_argument_group("router: tokenizer")
    group.add_argument("--tokenizer", type=Path, metavar="PATH", help="take the tokenizer from here instead")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file instead of the model's template")
    group.add_argument(
        "--tokenizer-threads", type=int, default=2, metavar="N", help="threads that tokenize (default %(default)s)"
    )
    group = parser.add_argument_group("router: routing")
    group.add_argument("--policy", default="least_load", choices=POLICIES, help="how a worker is chosen (%(default)s)")
    group.add_argument(
        "--max-num-queued-reqs", type=int, default=1024, metavar="N",
        help="most requests that wait for a worker; more are refused (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-queue-wait", type=float, default=60.0, metavar="S",
        help="seconds that a request waits before it is refused (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--worker-timeout", type=float, default=5.0, metavar="S",
        help="seconds without an answer after which a worker counts as lost (default %(default)s)",
    )  # fmt: skip


def parse_args(argv: list[str] | None = None) -> RouterConfig:
    """Parses a command line. Raises ConfigError; argparse itself exits for unknown flags and ``--help``."""
    parser = argparse.ArgumentParser(prog=PROG, description="Run the Quire router: tokenize, queue, route, detokenize.")
    add_arguments(parser)
    return RouterConfig.from_args(parser.parse_args(argv))
