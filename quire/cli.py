"""The ``quire`` command: finds the sub-command and hands the rest of the line to it."""

import argparse
import importlib
import sys
from collections.abc import Callable

from quire.models import DEMO_MODEL, ModelError, resolve, served_name

_COMMANDS = {
    "serve": "start workers, router and gateway together",
    "worker": "run one worker (KV blocks, step loop)",
    "router": "run the router (tokenizer, queue, gRPC Inference service)",
    "gateway": "run the gateway (OpenAI REST API)",
    "chat": "talk to a running server in the terminal",
    "bench": "measure a running server, the engine by itself, or a start",
    "fetch": "fetch a model, and print where it lies",
}


def main(argv: list[str] | None = None) -> int:
    """Runs ``quire`` with these arguments (default: the process's own). Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="quire",
        usage="quire COMMAND ...",
        description="Serve large language models.",
        epilog="commands:\n"
        + "".join(f"  {name:<9}{what}\n" for name, what in _COMMANDS.items())
        + "\nEach has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(arguments or ["--help"])
    try:
        return _run(args.command, args.rest)
    except ModelError as error:
        sys.stderr.write(f"quire {args.command}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


def _run(command: str, rest: list[str]) -> int:
    # Each command imports only what it needs: a router must start where torch is not installed.
    if command == "fetch":
        return _fetch(rest)
    if command == "serve":
        from quire.serve import main as serve

        return serve(rest)
    if command == "chat":
        from quire.chat import main as chat

        return chat(rest)
    if command == "bench":
        from quire.bench.command import main as bench

        return bench(rest)
    if command in ("worker", "router"):
        rest = with_local_model(rest, served=command == "router")
    entry: Callable[[list[str]], int] = importlib.import_module(f"{command}.__main__").main
    return entry(rest)


def with_local_model(argv: list[str], *, served: bool) -> list[str]:
    """The command line of a process with --model made a local path, fetched first if need be.

    Args:
        argv: the process's arguments; without --model they get the demo model.
        served: also add --served-model-name, so that clients see the name that was given and not the path.

    Raises:
        ModelError: there is no such model, or it could not be fetched.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        return argv
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--model", default=DEMO_MODEL)
    found, others = finder.parse_known_args(argv)
    result = ["--model", str(resolve(found.model)), *others]
    if served and not any(arg.split("=")[0] == "--served-model-name" for arg in others):
        result += ["--served-model-name", served_name(found.model)]
    return result


def _fetch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="quire fetch", description="Fetch a model if it is not here yet, and print its local path."
    )
    parser.add_argument(
        "model", nargs="?", default=DEMO_MODEL, help="a hub id, or the demo model (default %(default)s)"
    )
    sys.stdout.write(f"{resolve(parser.parse_args(argv).model)}\n")
    return 0
