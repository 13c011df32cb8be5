"""Processes whose log a test reads."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


async def start(module: str, *flags: object, **environment: str) -> asyncio.subprocess.Process:
    """``python -m module flags``, with more in its environment."""
    command = (sys.executable, "-m", module, *map(str, flags))
    return await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )


async def until_said(process: asyncio.subprocess.Process, words: str) -> str:
    """The first line of its log with these words."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, f"it ended without saying {words!r}"
    return line


@asynccontextmanager
async def ended(*processes: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Ends processes with the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()
