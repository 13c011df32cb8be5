"""``quire bench serve``: a load against a running server, any of OpenAI's API or Quire's gRPC."""

import argparse
import asyncio
import math
import os
import signal
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from protos.tls import ClientTls, TlsError, add_client_arguments
from quire.bench.dataset import DatasetError
from quire.bench.figures import LIMITED, Times, figures_of
from quire.bench.fronts import ENDPOINTS, TIMEOUT_S, Front, GrpcFront, HttpFront, Sampling
from quire.bench.load import Run, run_load
from quire.bench.plot import PlotError, check_plot, write_plot
from quire.bench.records import Record, RequestFailed, Session
from quire.bench.request_flags import (
    add_request_arguments,
    ignores_eos,
    not_negative,
    positive,
    sessions_of,
    with_arrivals,
)
from quire.bench.result_flags import add_result_arguments
from quire.bench.table import serving_json, serving_table, write_json
from quire.bench.workloads import Form

PROG = "quire bench serve"
_INTERRUPTED = 130
_SECRET = ("api_key",)
_DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class _Plan:
    """What is sent, and how the server is asked."""

    sessions: list[Session]
    warmups: list[Session]
    limits: dict[str, float]


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``quire bench serve``."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        allow_abbrev=False,
        description="Send requests to a running server and measure what comes back. Token counts are the server's own\n"
        "(usage). Exits 1 when a request failed; failures are counted by kind.",
        epilog="examples:\n"
        f"  {PROG} --max-concurrency 64 --input-len 1024 --output-len 256\n"
        f"  {PROG} --grpc 127.0.0.1:50051 --request-rate 8 --goodput ttft:200 tpot:40 --plot load.html\n"
        f"  {PROG} --base-url https://example.org/v1 --endpoint chat --dataset questions.jsonl --json load.json\n"
        "Servers that refuse fields that OpenAI does not have need --no-ignore-eos.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", metavar="URL", help=f"of an OpenAI API, up to /v1; no proxy is used (default {_DEFAULT_URL})"
    )
    group.add_argument("--grpc", metavar="HOST:PORT", help="a Quire router's gRPC instead")
    group.add_argument(
        "--endpoint", default="completions", choices=ENDPOINTS,
        help="of the OpenAI API (default %(default)s, which takes token ids: prompts have exact lengths)",
    )  # fmt: skip
    group.add_argument("--model", metavar="NAME", help="as the server calls it (default: its first)")
    group.add_argument(
        "--api-key", metavar="KEY", help="sent as a bearer token (default: $QUIRE_API_KEY, else $OPENAI_API_KEY)"
    )
    group.add_argument(
        "--ssl-ca-certs", type=Path, metavar="FILE", help="PEM; authorities for https (default: the system's)"
    )
    group.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help="of a request (default %(default)g)"
    )
    add_client_arguments(parser, "router")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R",
        help="sessions a second, arriving at random (default inf: all at once, or as --max-concurrency lets)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B",
        help="of arrivals: 1 is a Poisson process, less comes in bursts, more comes evenly (default %(default)g)",
    )  # fmt: skip
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="most requests at a time (default: any)")
    group.add_argument(
        "--num-warmups", type=not_negative, default=0, metavar="N",
        help="requests sent before, and not counted (default %(default)s)",
    )  # fmt: skip
    add_request_arguments(parser, sessions=True)
    group = parser.add_argument_group("prompts and outputs")
    group.add_argument(
        "--text-prompts", action="store_true",
        help="words instead of token ids, for completions servers that take no ids; about a token each",
    )  # fmt: skip
    group.add_argument(
        "--vocab-size", type=positive, default=32000, metavar="N",
        help="token ids lie below it (default %(default)s); lower it for models with fewer",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, help="of all outputs (default %(default)g: greedy)")
    group.add_argument("--top-p", type=float, metavar="P", help="of all outputs (default: the server's)")
    group = add_result_arguments(parser, plotted="TTFT, ITL and E2E")
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS",
        help="also count the requests that keep all of these, say ttft:200 tpot:30; itl is of a request's longest gap, "
        "e2e of the whole",
    )  # fmt: skip
    return parser


def goodput_limits(texts: Sequence[str]) -> dict[str, float]:
    """The limits of --goodput in ms by name. Raises ValueError for what is none."""
    limits = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in LIMITED or not limit.replace(".", "", 1).isdigit():
            raise ValueError(f"--goodput {text}: wanted one of {', '.join(LIMITED)} and milliseconds, say ttft:200")
        limits[name] = float(limit)
    return limits


def main(argv: list[str]) -> int:
    """Runs the load. Returns 0 when all requests are complete, 1 when one failed, 130 when it was interrupted."""
    args = build_parser().parse_args(argv)
    try:
        front = _front(args)
        plan = _plan(args)
        return uvloop.run(_measure(args, front, plan))
    except RequestFailed as failure:
        sys.stderr.write(f"{PROG}: {failure} ({failure.kind})\n")
    except (ValueError, PlotError, OSError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
    return 1


def _front(args: argparse.Namespace) -> Front:
    """Raises ValueError for settings that lead to no server."""
    if args.grpc and args.base_url:
        raise ValueError("--grpc and --base-url name two servers; give one")
    if not 0 < args.timeout < math.inf:
        raise ValueError(f"--timeout is {args.timeout}; it must be above 0 and finite")
    sampling = Sampling(args.temperature, args.top_p, ignores_eos(args))
    key = args.api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    if args.grpc:
        return GrpcFront(args.grpc, args.model or "", sampling, key, ClientTls.from_args(args, "router"), args.timeout)
    try:
        trusted = ssl.create_default_context(cafile=args.ssl_ca_certs) if args.ssl_ca_certs else None
    except OSError as error:
        raise TlsError(f"--ssl-ca-certs is {args.ssl_ca_certs}: {error.strerror or error}") from error
    url = args.base_url or _DEFAULT_URL
    url = url if "://" in url else f"http://{url}"
    return HttpFront(url, args.model or "", args.endpoint, sampling, key, trusted, args.timeout)


def _plan(args: argparse.Namespace) -> _Plan:
    """Raises ValueError for settings that make no load, PlotError for a plot that could not be written."""
    for name in ("request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if args.plot is not None:
        check_plot(args.plot)
    sessions = sessions_of(args, _form(args), args.vocab_size, args.num_warmups)
    if args.grpc:
        for session in sessions:
            _check_grpc(session)
    warmups, sessions = sessions[: args.num_warmups], sessions[args.num_warmups :]
    if args.request_rate < math.inf:
        sessions = with_arrivals(sessions, args.request_rate, args.burstiness, args.seed)
    return _Plan(sessions, warmups, goodput_limits(args.goodput or ()))


def _form(args: argparse.Namespace) -> Form:
    if args.grpc:
        return "ids"  # or whatever a dataset has: gRPC takes all
    if args.endpoint == "chat":
        return "messages"
    # Completions do not tell the ids of an answer, by which a session would go on.
    return "text" if args.text_prompts or args.dataset or args.workload == "sessions" else "ids"


def _check_grpc(session: Session) -> None:
    for job in session.turns:
        if job.fields:
            names = ", ".join(job.fields)
            raise DatasetError(f"{job.source}: {names} cannot be sent by --grpc; leave it out, or give --base-url")
        if isinstance(job.prompt[0], dict):
            for message in job.prompt:
                if not isinstance(message, dict) or not isinstance(message["content"], str) or len(message) > 2:
                    raise DatasetError(f"{job.source}: --grpc sends messages of a role and a text alone")


async def _measure(args: argparse.Namespace, front: Front, plan: _Plan) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        async with front:
            if not args.model:
                names = await front.models()
                if not names:
                    raise RequestFailed("not_found", "the server has no model; name one with --model")
                args.model = front.model = names[0]
            if plan.warmups:
                warmed = await run_load(front, plan.warmups, args.max_concurrency, stop=stop)
                for record in warmed.records:
                    if record.error:
                        raise RequestFailed(record.error, f"a request of --num-warmups failed: {record.detail}")
            total = sum(len(session.turns) for session in plan.sessions)
            with Progress(total) as progress:
                run = await run_load(front, plan.sessions, args.max_concurrency, stop=stop, on_end=progress.add)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return _report(args, plan, run)


class Progress:
    """A bar on standard error, where that is a terminal: how many requests are through, and how many failed."""

    def __init__(self, total: int) -> None:
        self._bar: Any = tqdm(total=total, unit="req", dynamic_ncols=True) if sys.stderr.isatty() else None
        self._failed = self._tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, record: Record) -> None:
        """A request is through."""
        self._failed += bool(record.error)
        self._tokens += record.tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._tokens:,} tokens out, {self._failed} failed", refresh=False)
            self._bar.update()


def _report(args: argparse.Namespace, plan: _Plan, run: Run) -> int:
    figures = figures_of(run.records, run.ended - run.began, args.percentiles, plan.limits)
    table = serving_table(figures, run.unsent)
    if run.interrupted:
        table = f"interrupted: what there is until then\n{table}"
    sys.stdout.write(table)
    sys.stdout.flush()
    settings = {name: value for name, value in vars(args).items() if name not in _SECRET}
    if args.json is not None:
        rows = {"requests": [_row(record, run.began) for record in run.records]}
        result = {"interrupted": run.interrupted, **serving_json(figures, run.unsent), **rows}
        write_json(args.json, "serve", settings, result)
    if args.plot is not None:
        write_plot(args.plot, f"quire bench serve: {args.model}", _distributions(run), table)
    return _INTERRUPTED if run.interrupted else int(figures.failed > 0)


def _row(record: Record, began: float) -> dict[str, Any]:
    """What --json tells of one request."""
    row: dict[str, Any] = {"began_s": record.began - began, "prompt_tokens": record.prompt_tokens}
    if record.error:
        return {**row, "error": record.error, "detail": record.detail}
    times = Times.of(record)
    longest = max(times.itl, default=None)
    known = {"ttft_ms": times.ttft, "tpot_ms": times.tpot, "longest_itl_ms": longest, "e2e_ms": times.e2e}
    return {**row, "cached_tokens": record.cached_tokens, "output_tokens": record.tokens, **known}


def _distributions(run: Run) -> Mapping[str, list[float]]:
    times = [Times.of(record) for record in run.records if not record.error]
    return {
        "TTFT: time to first token": [each.ttft for each in times],
        "ITL: between two messages of a stream": [interval for each in times for interval in each.itl],
        "E2E: whole request": [each.e2e for each in times],
    }
