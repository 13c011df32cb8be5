"""``make compose-test``: the composition on a real engine. Streams survive a killed worker, scaling loses nothing.

    python -m tests.containers.run [--file OVERRIDE.yaml ...] [--keep]

Builds the images, starts two workers, and ends everything again, whatever happens. Needs Docker and nothing of ours but
httpx. Each line says what was seen, and when.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.doubles.processes import free_port

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
MODEL = "smollm2-135m-instruct"
PROJECT = "quire-test"
READY_S = 180.0
STORY = "Write a long story about a lighthouse keeper and a whale."


class Failed(Exception):
    """Something was not as it must be; the message says what."""


class Composition:
    """The containers of one project, by the command line.

    Args:
        files: beside compose.yaml.
    """

    def __init__(self, files: list[Path]) -> None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
        if not plugin and shutil.which("docker-compose") is None:
            raise Failed("neither 'docker compose' nor 'docker-compose' is installed")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment_port = str(port)
        named = [word for file in (COMPOSE / "compose.yaml", *files) for word in ("--file", str(file))]
        program = ["docker", "compose"] if plugin else ["docker-compose"]
        self._command = [*program, "--project-name", PROJECT, *named]

    def __call__(self, *args: str, shown: bool = False) -> str:
        """Runs compose and returns what it prints. Raises Failed."""
        pipe = None if shown else subprocess.PIPE
        command = ["env", f"PORT={self._environment_port}", *self._command, *args]
        done = subprocess.run(command, stdout=pipe, stderr=pipe, text=True, check=False)
        if done.returncode:
            said = (done.stderr or "").strip()[-2000:]
            raise Failed(f"compose {' '.join(args)} ended with {done.returncode}: {said}")
        return done.stdout or ""

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What Docker knows of a service's containers, ended ones included."""
        ids = self("ps", "--all", "--quiet", service).split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def scale(self, workers: int) -> None:
        """So many workers, the others as they are."""
        self("up", "--detach", "--no-recreate", "--scale", f"worker={workers}")

    async def until_workers(self, wanted: int) -> None:
        """Waits until the router has so many workers ready."""
        deadline = time.monotonic() + READY_S
        seen: object = None
        while time.monotonic() < deadline:
            try:
                async with httpx.AsyncClient(timeout=5) as client:
                    load = (await client.get(f"{self.url}/fleet")).json()
                seen = sum(worker["ready"] for worker in load["workers"])
                if seen == wanted:
                    return
            except (httpx.TransportError, json.JSONDecodeError, KeyError) as error:
                seen = repr(error)
            await asyncio.sleep(0.3)
        raise Failed(f"{wanted} workers were not ready after {READY_S:g} s; last seen: {seen}")


def docker(*args: str) -> str:
    """Runs docker and returns what it prints. Raises Failed."""
    done = subprocess.run(["docker", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"docker {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def body(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Of a chat request, answered alike by every worker."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": max_tokens, **more}


@asynccontextmanager
async def streamed(url: str, prompt: str, max_tokens: int) -> AsyncIterator[tuple[str, AsyncIterator[str]]]:
    """A streamed chat: the worker that began it, and its pieces of text, which raise Failed when it breaks off."""

    async def pieces(reply: httpx.Response) -> AsyncIterator[str]:
        done = False
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Failed(f"the stream ended with an error: {event['error']}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
        if not done:
            raise Failed("the stream ended without [DONE]")

    request = body(prompt, max_tokens, stream=True, ignore_eos=True)
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=request) as reply,
    ):
        if reply.status_code != 200:
            raise Failed(f"status {reply.status_code}: {(await reply.aread()).decode()[:500]}")
        yield reply.headers["x-quire-worker"], pieces(reply)


async def whole_text(url: str, prompt: str, max_tokens: int) -> str:
    """What a stream comes to."""
    async with streamed(url, prompt, max_tokens) as (_, pieces):
        return "".join([piece async for piece in pieces])


class Load:
    """Chats one after the other, on several connections, until ``stop``."""

    def __init__(self, url: str, connections: int) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(connections)]

    async def _run(self, index: int) -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            while not self._stop.is_set():
                try:
                    reply = await client.post(
                        f"{self._url}/v1/chat/completions", json=body(f"Count to {index}, then {self.answered}.", 16)
                    )
                    if reply.status_code == 200:
                        self.answered += 1
                    else:
                        self.failures.append(f"{reply.status_code}: {reply.text[:300]}")
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))

    async def stop(self) -> None:
        """Lets the last requests end. Raises Failed if one failed, or none was answered."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        if self.failures or not self.answered:
            raise Failed(f"{len(self.failures)} of {self.answered + len(self.failures)} failed: {self.failures[:3]}")


async def check(compose: Composition, say: "Say") -> None:
    """All that is to be seen, from an empty engine to the end. Raises Failed."""
    compose("build", shown=True)
    say("images built")
    compose("up", "--detach", "--scale", "worker=2", shown=True)
    await compose.until_workers(2)
    say("gateway, router and 2 workers are ready")

    undisturbed = await whole_text(compose.url, STORY, 200)
    say(f"a stream of 200 tokens: {undisturbed[:60]!r}…")

    async with streamed(compose.url, STORY, 200) as (worker, pieces):
        text = await anext(pieces) + await anext(pieces)
        # Its name is the container's, which is the beginning of its id, and the port.
        killed = worker.split(":")[0]
        if killed not in [each["Id"][: len(killed)] for each in compose.containers("worker")]:
            raise Failed(f"no container is worker {worker}")
        docker("kill", killed)
        say(f"worker {worker} was killed after {len(text)} characters")
        text += "".join([piece async for piece in pieces])
    if text != undisturbed:
        raise Failed(f"the stream whose worker was killed differs:\n{text}\n{undisturbed}")
    say("its stream went on at the other worker; the text is the same")
    docker("start", killed)
    await compose.until_workers(2)
    say("the killed worker is back")

    load = Load(compose.url, 4)
    for workers in (3, 1, 2):
        compose.scale(workers)
        await compose.until_workers(workers)
        say(f"scaled to {workers} under load: {load.answered} answered, {len(load.failures)} failed")
    await load.stop()
    say(f"{load.answered} requests answered while workers came and went, 0 failed")

    compose("restart", "router")
    await compose.until_workers(2)
    if await whole_text(compose.url, STORY, 200) != undisturbed:
        raise Failed("after the router's restart the same request has another answer")
    say("the router was restarted; gateway and workers found it again")

    compose("stop", shown=True)
    for service in ("gateway", "router", "worker"):
        for each in compose.containers(service):
            if status := each["State"]["ExitCode"]:
                raise Failed(f"{each['Name']} ended with status {status}")
    say("all ended when they were asked to, with status 0")


class Say:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, line: str) -> None:
        """Prints a line at once."""
        print(f"{time.monotonic() - self._began:6.1f} s  {line}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="make compose-test", description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--file", type=Path, action="append", default=[], help="further compose files, say of a proxy")
    parser.add_argument("--keep", action="store_true", help="leave the containers and the model's volume")
    args = parser.parse_args(argv)
    say = Say()
    try:
        compose = Composition(args.file)
        try:
            asyncio.run(check(compose, say))
        except BaseException:
            print(compose("logs", "--tail", "40"), file=sys.stderr)
            raise
        finally:
            if not args.keep:
                compose("down", "--volumes")
                say("containers and volume are gone")
    except (Failed, httpx.HTTPError) as error:
        print(f"make compose-test: {error!s}", file=sys.stderr)
        return 1
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
