"""``quire serve``: from the command line to a ready server, and from Ctrl-C to a clean end."""

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from quire.config import PROG, parse_args
from quire.console import Console
from quire.models import ModelError, resolve
from quire.placement import PlacementError
from quire.plan import Plan, make_plan
from quire.ports import PortError
from quire.readiness import until_grpc_serves, until_http_serves
from quire.stack import Stack, StackError

_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Serves until Ctrl-C or SIGTERM. Returns the exit status: 0 after a clean stop, 1 when something failed."""
    try:
        config = parse_args(argv)
        plan = make_plan(config, resolve(config.model), os.environ)
    except (ValueError, ModelError, PortError, PlacementError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    return asyncio.run(serve_plan(plan, config.startup_timeout, config.shutdown_timeout))


async def serve_plan(plan: Plan, startup_timeout: float, shutdown_timeout: float) -> int:
    """Runs a plan's processes until a signal or a failure; a second signal ends this process and them at once."""
    console = Console([process.name for process in (*plan.workers, plan.router, plan.gateway)])
    stack = Stack(console, shutdown_timeout)
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            stack.kill()
            os._exit(_INTERRUPTED)
        console.say(f"{signal.Signals(number).name}: stopping (again to stop at once)")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started with nohup
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    status = 0
    try:
        await _until(stop, _run(plan, stack, startup_timeout))
    except StackError as error:
        console.failure(str(error), error.last_lines)
        status = 1
    finally:
        await stack.stop()
    console.say("stopped")
    return status


async def _run(plan: Plan, stack: Stack, limit_s: float) -> None:
    """Brings everything up, says so, and returns never: it ends by StackError or by being cancelled."""
    started = time.monotonic()
    # Workers take longest; that router and gateway load their own meanwhile takes seconds off the whole.
    await stack.start_together(
        stack.start(
            plan.workers, [until_grpc_serves(worker.address, "quire.v1.Worker") for worker in plan.workers], limit_s
        ),
        stack.start([plan.router], [_until_router_serves(plan)], limit_s),
        stack.start([plan.gateway], [_until_gateway_serves(plan)], limit_s),
    )
    sys.stdout.write(ready_message(plan, time.monotonic() - started))
    sys.stdout.flush()
    await stack.until_one_ends()


async def _until_router_serves(plan: Plan) -> None:
    await until_grpc_serves(plan.router.address, "quire.v1.Inference", plan.router_tls)


async def _until_gateway_serves(plan: Plan) -> None:
    # Asked before, it could only say, and log, that there is no router yet.
    await _until_router_serves(plan)
    await until_http_serves(f"{plan.url}/health", plan.router_tls)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` until it fails or ``stop`` is set."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0] in done:
        with suppress(asyncio.CancelledError):
            tasks[0].result()


def ready_message(plan: Plan, seconds: float) -> str:
    """What is printed when everything is ready: the addresses, and a command to paste."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": plan.model_names[0], "messages": [question], "temperature": 0}
    key = '-H "Authorization: Bearer $QUIRE_API_KEY" ' if plan.keys_needed else ""
    return (
        f"\nQuire is ready after {seconds:.1f} s: OpenAI API {plan.url}/v1, "
        f"gRPC {plan.router.address}, model {plan.model_names[0]}\n"
        f"  curl {plan.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(json.dumps(body))}\n\n"
    )
