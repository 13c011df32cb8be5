"""The processes that quire serve owns: their output, their start, their end. All with real processes."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from quire import stack as stack_module
from quire.child import Child, describe_status
from quire.console import Console
from quire.plan import ProcessPlan, child_environment
from quire.stack import Stack, StackError

MakePlan = Callable[[str, str], ProcessPlan]

# Says when its signal handler is in place, and notes its end in a file.
POLITE = """
import signal, sys, time
def leave(*_):
    with open("ends", "a") as file:
        file.write(sys.argv[1] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1], "w").close()
time.sleep(60)
"""

# Refuses to leave.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.fixture
def make_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """Plans a process from its name and its source. It runs in tmp_path and gets its name as its argument."""
    monkeypatch.chdir(tmp_path)
    environment = child_environment(os.environ)
    environment["PYTHONPATH"] += f":{tmp_path}"

    def make(name: str, source: str) -> ProcessPlan:
        module = f"program_{name.replace(' ', '_')}"
        (tmp_path / f"{module}.py").write_text(source)
        return ProcessPlan(name, module, (name,), "nowhere", environment)

    return make


class Screen(Console):
    """A console that keeps what it was given to show."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        super().__init__(["worker 0", "worker 1", "router", "gateway"], self.text)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """A stack whose processes are gone after the test."""
    stack = Stack(Screen(), shutdown_timeout=30.0)
    yield stack
    stack.kill()
    await stack.stop()


def there(*names: str) -> bool:
    return all(Path(name).exists() for name in names)


def ends() -> list[str]:
    """Names of the processes that left politely, in order."""
    return Path("ends").read_text().splitlines()


async def until_there(*names: str) -> None:
    while not there(*names):
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def never() -> None:
    await asyncio.Event().wait()


async def start(plan: ProcessPlan, lines: list[str]) -> Child:
    return await Child.start(plan.name, plan.package, plan.args, plan.environment, lambda _, line: lines.append(line))


async def test_output_comes_as_whole_lines(make_plan: MakePlan) -> None:
    source = """
import os, sys
os.write(1, b"one\\ntwo \\xc3")
os.write(1, b"\\xa9\\r\\n\\n10%\\r20%\\rbad \\xff\\n")
os.write(2, b"x" * 100_000 + b"\\nlast")
sys.exit(3)
"""
    lines: list[str] = []
    child = await start(make_plan("worker 0", source), lines)
    assert await child.end == 3
    assert lines[:5] == ["one", "two é", "10%", "20%", "bad \ufffd"]
    assert lines[-1] == "last"
    assert set("".join(lines[5:-1])) == {"x"}
    assert max(map(len, lines)) <= 8192
    assert list(child.tail) == lines[-20:]


async def test_a_child_has_no_terminal_and_a_group_of_its_own(make_plan: MakePlan) -> None:
    lines: list[str] = []
    child = await start(make_plan("router", "import os, sys\nprint(os.getpgid(0), repr(sys.stdin.read()))"), lines)
    assert await child.end == 0
    group, stdin = lines[0].split()
    assert int(group) != os.getpgid(0)
    assert stdin == "''"


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_no_child_outlives_a_killed_launcher(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan("worker 0", POLITE + "# ")
    launcher = f"""
import asyncio, os
from quire.child import Child
async def main():
    child = await Child.start("worker 0", {plan.package!r}, ("here",), os.environ, print)
    print(child._process.pid, flush=True)
    await child.end
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", launcher], env=plan.environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: there("here"))
        parent.kill()
    wait_until(lambda: not alive(pid))
    assert not there("ends"), "the kernel killed it; nobody asked it to leave"


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_whose_parent_is_gone_never_starts(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan("worker 0", "open('started', 'w')")
    command = [sys.executable, "-m", "quire.tied", "1", plan.package]
    assert subprocess.run(command, env=plan.environment, check=False).returncode == 1
    assert not Path("started").exists()


async def test_a_tier_is_ready_when_all_its_probes_say_so(stack: Stack, make_plan: MakePlan) -> None:
    plans = [make_plan("worker 0", POLITE), make_plan("worker 1", POLITE)]
    await stack.start(plans, [until_there("worker 0"), until_there("worker 1")], 20.0)
    assert there("worker 0", "worker 1")


async def test_a_death_during_the_start_is_seen_at_once_and_explained(stack: Stack, make_plan: MakePlan) -> None:
    plan = make_plan("worker 0", "import sys\nsys.exit('worker: --block-size is 7; it must be a power of two')")
    with pytest.raises(StackError, match="worker 0 ended with status 1 before it was ready") as raised:
        await stack.start([plan], [never()], 20.0)
    assert raised.value.last_lines == ("worker: --block-size is 7; it must be a power of two",)


async def test_an_earlier_tier_is_watched_while_a_later_one_starts(stack: Stack, make_plan: MakePlan) -> None:
    await stack.start([make_plan("worker 0", "import time\ntime.sleep(0.5)")], [asyncio.sleep(0)], 20.0)
    with pytest.raises(StackError, match=r"worker 0 ended with status 0; its last lines"):
        await stack.start([make_plan("router", POLITE)], [never()], 20.0)


async def test_tiers_start_together_and_the_first_failure_is_that_of_all(stack: Stack, make_plan: MakePlan) -> None:
    async def after(name: str) -> None:
        await until_there("worker 0", "router", name)  # none of them is ready before all were started

    await stack.start_together(
        stack.start([make_plan("worker 0", POLITE)], [after("worker 0")], 20.0),
        stack.start([make_plan("router", POLITE)], [after("router")], 20.0),
    )
    await stack.stop()
    assert ends() == ["router", "worker 0"]


async def test_who_fails_while_others_start_is_named(stack: Stack, make_plan: MakePlan) -> None:
    with pytest.raises(StackError, match="worker 0 ended with status 1 before it was ready") as raised:
        await stack.start_together(
            stack.start([make_plan("worker 0", "import sys\nsys.exit('no such model')")], [never()], 20.0),
            stack.start([make_plan("router", POLITE)], [never()], 20.0),
        )
    assert raised.value.last_lines == ("no such model",)


async def test_a_start_has_an_end(stack: Stack, make_plan: MakePlan) -> None:
    plans = [make_plan("worker 0", POLITE), make_plan("worker 1", POLITE)]
    with pytest.raises(StackError, match=r"^worker 1 was not ready after 0 s; --startup-timeout"):
        await stack.start(plans, [asyncio.sleep(0), never()], 0.3)


async def test_a_later_death_is_reported(stack: Stack, make_plan: MakePlan) -> None:
    await stack.start([make_plan("worker 0", POLITE)], [until_there("worker 0")], 20.0)
    await stack.start(
        [make_plan("router", "import os\nprint('sad', flush=True)\nos.abort()")], [asyncio.sleep(0)], 20.0
    )
    with pytest.raises(StackError, match="router was killed by SIGABRT") as raised:
        await stack.until_one_ends()
    assert raised.value.last_lines[0] == "sad"


async def test_nobody_waits_for_what_has_nothing_left_to_serve(stack: Stack, make_plan: MakePlan) -> None:
    # Ends as a gateway does: when its calls have, of which one hangs for as long as there is a router.
    gateway = POLITE.replace("def leave(*_):", "def leave(*_):\n    while alive(): time.sleep(0.01)").replace(
        "def leave",
        "import os\ndef alive():\n    return os.path.exists(f'/proc/{open(\"pid\").read()}/exe')\ndef leave",
    )
    router = STUBBORN.replace("open(", "import os\nopen('pid', 'w').write(str(os.getpid()))\nopen(", 1)
    await stack.start([make_plan("worker 0", "import time\ntime.sleep(1)")], [asyncio.sleep(0)], 20.0)
    await stack.start([make_plan("router", router)], [until_there("router")], 20.0)
    await stack.start([make_plan("gateway", gateway)], [until_there("gateway")], 20.0)
    with suppress(StackError):
        await stack.until_one_ends()
    began = time.monotonic()
    await stack.stop()
    assert time.monotonic() - began < 10
    assert ends() == ["gateway"]


async def test_the_end_comes_in_the_reverse_order_of_the_start(stack: Stack, make_plan: MakePlan) -> None:
    workers = [make_plan("worker 0", POLITE), make_plan("worker 1", POLITE)]
    await stack.start(workers, [until_there("worker 0", "worker 1"), asyncio.sleep(0)], 20.0)
    for name in ("router", "gateway"):
        await stack.start([make_plan(name, POLITE)], [until_there(name)], 20.0)
    await stack.stop()
    assert ends()[:2] == ["gateway", "router"]
    assert sorted(ends()[2:]) == ["worker 0", "worker 1"]


async def test_who_stays_too_long_is_killed(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "_LEAVE_S", 0.1)
    screen = Screen()
    stack = Stack(screen, shutdown_timeout=0.1)
    await stack.start([make_plan("worker 0", STUBBORN)], [until_there("worker 0")], 20.0)
    async with asyncio.timeout(10):
        await stack.stop()
        with suppress(StackError):
            await stack.until_one_ends()
    assert "worker 0 did not end within" in screen.text.getvalue()


def ignores_sigterm(process: str) -> bool:
    """Whether a process has got so far that SIGTERM does nothing to it."""
    ignored = Path(f"/proc/{process}/status").read_text().partition("SigIgn:")[2].split()[0]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_second_signal_ends_everything_at_once(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan("worker 0", STUBBORN + "# ")
    launcher = f"""
import asyncio, os
from quire.plan import Plan, ProcessPlan
from quire.serve import serve_plan
process = ProcessPlan("worker 0", {plan.package!r}, ("here",), "127.0.0.1:1", os.environ)
asyncio.run(serve_plan(Plan(("m",), (process,), process, process), 60.0, 60.0))
"""
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, env=plan.environment, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        wait_until(lambda: there("here"))
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        wait_until(lambda: len(listed.read_text().split()) == 3)  # all are started at once
        children = listed.read_text().split()
        wait_until(lambda: all(ignores_sigterm(child) for child in children))
        parent.send_signal(signal.SIGINT)
        lines = iter(parent.stderr.readline, "")
        assert any("SIGINT: stopping" in line for line in lines)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(20) == 130
    wait_until(lambda: not any(alive(int(child)) for child in children))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with status 0"),
        (1, "ended with status 1"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory?)"),
        (-99, "was killed by signal 99"),
    ],
)
def test_statuses_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words


def test_a_file_gets_no_colours() -> None:
    screen = Screen()
    screen.line("router", "\x1b[31mred\x1b[0m")
    screen.failure("it broke", ["because"])
    assert screen.text.getvalue() == "router   | red\n\nquire: it broke\n    because\n"


def test_a_terminal_gets_colours() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = Terminal()
    Console(["worker 0"], text).line("worker 0", "hello")
    assert text.getvalue() == "\x1b[36mworker 0 |\x1b[0m hello\n"


def test_a_lost_terminal_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Console(["worker 0"], Gone()).line("worker 0", "nobody reads this")
