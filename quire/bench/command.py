"""``quire bench``: which benchmark, and the rest of the line to it."""

import argparse
import importlib

_BENCHMARKS = {
    "serve": "a load against a running server, OpenAI's API or gRPC",
    "latency": "the engine alone: one batch, step by step",
    "throughput": "the engine alone: many requests at once",
    "startup": "from the start of quire serve to ready and to a first token, cold and warm",
}


def main(argv: list[str]) -> int:
    """Runs ``quire bench`` with these arguments. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="quire bench",
        usage="quire bench BENCHMARK ...",
        description="Measure a server, the engine by itself, or a start.",
        epilog="benchmarks:\n"
        + "".join(f"  {name:<11}{what}\n" for name, what in _BENCHMARKS.items())
        + "\nEach has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=_BENCHMARKS, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv or ["--help"])
    # Each imports only what it needs: a load needs no torch.
    status: int = importlib.import_module(f"quire.bench.{args.benchmark}").main(args.rest)
    return status
