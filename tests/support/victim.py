"""A worker program that tests freeze, block and kill. It prints when its jobs begin and end."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import sys
import time
from typing import Any

from graphile_worker import Events, JobContext, run


def report(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - the test reads it


async def sleep(payload: float, ctx: JobContext) -> None:
    """Sleep for that many seconds without blocking the event loop."""
    report("begun sleep", ctx.job.id)
    await asyncio.sleep(payload)
    report("ended sleep", ctx.job.id)


def block_thread(payload: float, ctx: JobContext) -> None:
    """Block a worker thread."""
    report("begun block_thread", ctx.job.id)
    time.sleep(payload)
    report("ended block_thread", ctx.job.id)


async def block_loop(payload: float, ctx: JobContext) -> None:
    """Block the event loop."""
    report("begun block_loop", ctx.job.id)
    time.sleep(payload)
    report("ended block_loop", ctx.job.id)


async def hold_gil(payload: float, ctx: JobContext) -> None:
    """Hold the GIL: no Python code runs in any thread meanwhile."""
    report("begun hold_gil", ctx.job.id)
    ctypes.PyDLL(None).usleep(int(payload * 1e6))
    report("ended hold_gil", ctx.job.id)


async def die(_payload: object, ctx: JobContext) -> None:
    """Kill the worker's process."""
    report("begun die", ctx.job.id)
    os.kill(os.getpid(), 9)


async def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[2])
    if (kill_on := options.pop("kill_on", None)) is not None:
        options["events"] = Events()
        options["events"].on(kill_on, lambda _event: os.kill(os.getpid(), 9))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    tasks = {function.__name__: function for function in (sleep, block_thread, block_loop, hold_gil, die)}
    runner = await run(tasks, sys.argv[1], **options)
    report("ready", runner.id)
    await runner.wait()


if __name__ == "__main__":
    asyncio.run(main())
