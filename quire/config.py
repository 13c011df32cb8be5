"""The settings of ``quire serve``: its own flags, and those it passes on to the processes it starts.

Every process declares its flags itself, in its ``config`` module; here they are only gathered. Imports no torch.
"""

import argparse
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import gateway.config
import router.config
import worker.config
from protos.api_keys import keys_from_args
from protos.logs import add_log_arguments
from protos.tls import ClientTls, ServerTls
from quire.models import DEMO_MODEL

PROG = "quire serve"

AddArguments = Callable[[argparse.ArgumentParser], None]

# Flags of the processes that the launcher sets itself, and what to do instead of giving them.
_REFUSED = {
    "--worker-id": "workers are named by their addresses",
    "--worker-urls": "--workers says how many to start; to use running ones, start `quire router` and `quire gateway`",
    "--router": "--grpc-port says where the router listens; to use a running one, start `quire gateway`",
    **{
        f"--worker-ssl-{part}": "its workers listen on 127.0.0.1 alone, without TLS"
        for part in ("ca-certs", "certfile", "keyfile", "name")
    },
}
# What is not passed on as it was given, by its name in the parsed namespace.
_OWN = {"model", "served_model_name", "host", "port", "shutdown_timeout", "log_level", "log_format"}.union(
    flag.removeprefix("--").replace("-", "_") for flag in _REFUSED
)


# What clients connect to, router and gateway, has TLS where it is asked for; the workers behind them have none.
_NOT_FOR_WORKERS = {
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_client_names"),
    *("router_ssl_ca_certs", "router_ssl_certfile", "router_ssl_keyfile", "router_ssl_name"),
}


@dataclass(frozen=True)
class ServeConfig:
    """All settings of one ``quire serve``. See ``build_parser`` for their meaning."""

    model: str
    served_model_names: tuple[str, ...]
    host: str
    port: int
    grpc_port: int
    workers: int
    worker_port: int
    startup_timeout: float
    shutdown_timeout: float
    log_level: str
    log_format: str
    device: str
    tensor_parallel_size: int
    # Whether clients need a key.
    keys_needed: bool
    # Of HTTP and gRPC, and of the gateway's calls to the router.
    tls: ServerTls | None
    router_tls: ClientTls | None
    # Ready to be put on the processes' command lines.
    worker_flags: tuple[str, ...]
    router_flags: tuple[str, ...]
    gateway_flags: tuple[str, ...]

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ServeConfig":
        """Builds the settings from what ``build_parser`` parsed. Raises ValueError, naming the flag, for bad ones."""
        if args.positional_model and args.model and args.positional_model != args.model:
            raise ValueError(f"two models: {args.positional_model} and --model {args.model}; give one")
        if args.workers < 1:
            raise ValueError(f"--workers is {args.workers}; it must be at least 1")
        for flag, port in (
            ("--port", args.port),
            ("--grpc-port", args.grpc_port),
            ("--worker-port", args.worker_port),
        ):
            last = port + args.workers - 1 if flag == "--worker-port" and port else port
            if port < 0 or last > 65535:
                raise ValueError(f"{flag} {port}: ports go from 1 to 65535, and 0 takes a free one")
        if not (0 < args.startup_timeout < math.inf and 0 <= args.shutdown_timeout < math.inf):
            raise ValueError("--startup-timeout must be above 0, --shutdown-timeout at least 0, and both finite")
        keys = keys_from_args(args)
        # Keys with limits are for the gateway: over gRPC they would not be held to them, and let nobody in.
        of_gateway = ("api_keys_file",) if router.config.not_enforced(keys) else ()
        tls, router_tls = ServerTls.from_args(args), ClientTls.from_args(args, "router")
        _check_tls(tls, router_tls)
        return cls(
            model=args.positional_model or args.model or DEMO_MODEL,
            served_model_names=tuple(args.served_model_name or ()),
            host=args.host,
            port=args.port,
            grpc_port=args.grpc_port,
            workers=args.workers,
            worker_port=args.worker_port,
            startup_timeout=args.startup_timeout,
            shutdown_timeout=args.shutdown_timeout,
            log_level=args.log_level,
            log_format=args.log_format,
            device=args.device,
            tensor_parallel_size=args.tensor_parallel_size,
            keys_needed=bool(keys),
            tls=tls,
            router_tls=router_tls,
            worker_flags=forwarded_flags(worker.config.add_arguments, args, _NOT_FOR_WORKERS),
            router_flags=forwarded_flags(router.config.add_arguments, args, of_gateway),
            gateway_flags=forwarded_flags(gateway.config.add_arguments, args),
        )


def _check_tls(tls: ServerTls | None, router_tls: ClientTls | None) -> None:
    """Raises ValueError when the gateway could not call the router, or would without need."""
    if tls is None and router_tls is not None:
        raise ValueError("--router-ssl-ca-certs without --ssl-certfile: the router would have no TLS; give both")
    if tls is not None and router_tls is None:
        raise ValueError(
            "--ssl-certfile needs --router-ssl-ca-certs, by which the gateway knows the router: the authority of that "
            "certificate, or the certificate itself; and --router-ssl-name where 127.0.0.1 is none of its names"
        )
    if tls is not None and tls.ca_certs is not None and (router_tls is None or router_tls.certfile is None):
        raise ValueError(
            "--ssl-ca-certs lets only clients with certificates in, and the gateway is one to the router; give it one "
            "with --router-ssl-certfile and --router-ssl-keyfile"
        )


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``quire serve``: the flags of all processes, where the launcher's own take precedence."""
    parser = _Parser(
        prog=PROG,
        usage=f"{PROG} [MODEL] [flags]",
        description="Serve a model: start workers, router and gateway, and end them together.",
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help=f"the same as --model (default {DEMO_MODEL})"
    )
    group = parser.add_argument_group("serve")
    worker.config.add_arguments(parser)
    router.config.add_arguments(parser)
    gateway.config.add_arguments(parser)
    # Added last, so that they replace the processes' flags of the same name.
    group.add_argument("--model", help="a folder, a .gguf file, a hub id such as org/name, or the demo model's name")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that clients use (default: the model's own)"
    )
    group.add_argument("--host", default="127.0.0.1", help="address of HTTP and gRPC (default %(default)s: local only)")
    group.add_argument("--port", type=int, default=8000, help="HTTP port, OpenAI API (default %(default)s)")
    group.add_argument("--grpc-port", type=int, default=50051, metavar="PORT", help="gRPC port (default %(default)s)")
    group.add_argument(
        "--workers", "--data-parallel-size", "-dp", type=int, default=1, metavar="N",
        help="worker processes, each with the whole model (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--worker-port", type=int, default=0, metavar="PORT",
        help="port of worker 0, the next have the next ones (default: free ones); only this machine can reach them",
    )  # fmt: skip
    group.add_argument(
        "--startup-timeout", type=float, default=600.0, metavar="S",
        help="seconds until all must be ready (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="S",
        help="seconds that running requests get after Ctrl-C or SIGTERM (default %(default)s)",
    )  # fmt: skip
    add_log_arguments(group)
    for flag, instead in _REFUSED.items():
        group.add_argument(flag, action=_Refuse, instead=instead)
    return parser


def parse_args(argv: Sequence[str]) -> ServeConfig:
    """Parses the command line of ``quire serve``.

    Raises:
        ValueError: a flag is unknown, impossible or not supported; the message names it.
        SystemExit: from argparse, for ``--help``.
    """
    # Intermixed: plain parsing of an optional positional fails when it stands after a flag.
    config = ServeConfig.from_args(build_parser().parse_intermixed_args(argv))
    # What a process will refuse is better said before a model is downloaded and others are started.
    worker.config.parse_args(["--model", os.devnull, *config.worker_flags])
    router.config.parse_args(["--model", os.devnull, "--worker-urls", "127.0.0.1:1", *config.router_flags])
    gateway.config.parse_args([*config.gateway_flags])
    return config


def forwarded_flags(
    add_arguments: AddArguments, args: argparse.Namespace, left_out: Collection[str] = ()
) -> tuple[str, ...]:
    """The flags of one process that were given, spelt out for its command line; the launcher's own are left out."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags: list[str] = []
    for action in parser._actions:  # argparse has no public list of a parser's actions
        if action.dest not in {*_OWN, *left_out} and getattr(args, action.dest) != action.default:
            flags += _spell(action, getattr(args, action.dest))
    return tuple(flags)


def _spell(action: argparse.Action, value: Any) -> list[str]:
    flag = max(action.option_strings, key=len)
    if isinstance(action, argparse.BooleanOptionalAction):
        wanted = [name for name in action.option_strings if name.startswith("--no-") != value]
        return [wanted[-1]]
    if action.nargs == 0:  # store_true and its like
        return [flag]
    if not isinstance(value, list | tuple):
        return [flag, str(value)]
    if action.nargs is None:  # append
        return [part for item in value for part in (flag, str(item))]
    return [flag, *map(str, value)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """All bad settings end alike, also those that argparse finds."""
        raise ValueError(f"{message}; see {PROG} --help")


class _Refuse(argparse.Action):
    """Ends the parse: a flag that one of the processes has, but that the launcher sets itself."""

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str) -> None:
        super().__init__(option_strings, dest, nargs="*", help=argparse.SUPPRESS)
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        parser.error(f"{self.option_strings[0]} is set by {PROG}: {self._instead}")
