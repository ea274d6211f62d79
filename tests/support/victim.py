"""A worker in a process of its own, for tests that do it harm. It prints what its jobs do."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import sys
import time
from typing import Any

from graphile_worker import JobContext, run


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - whoever started us reads it


async def sleep(payload: float, ctx: JobContext) -> None:
    """As long as it is told; on the event loop."""
    say("begun sleep", ctx.job.id)
    await asyncio.sleep(payload)
    say("ended sleep", ctx.job.id)


def block_thread(payload: float, ctx: JobContext) -> None:
    say("begun block_thread", ctx.job.id)
    time.sleep(payload)
    say("ended block_thread", ctx.job.id)


async def block_loop(payload: float, ctx: JobContext) -> None:
    say("begun block_loop", ctx.job.id)
    time.sleep(payload)
    say("ended block_loop", ctx.job.id)


async def hold_gil(payload: float, ctx: JobContext) -> None:
    """Nothing of Python runs meanwhile, in any thread."""
    say("begun hold_gil", ctx.job.id)
    ctypes.PyDLL(None).usleep(int(payload * 1e6))
    say("ended hold_gil", ctx.job.id)


async def die(_payload: object, ctx: JobContext) -> None:
    say("begun die", ctx.job.id)
    os.kill(os.getpid(), 9)


async def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    tasks = {function.__name__: function for function in (sleep, block_thread, block_loop, hold_gil, die)}
    runner = await run(tasks, sys.argv[1], **options)
    say("ready", runner.id)
    await runner.wait()


if __name__ == "__main__":
    asyncio.run(main())
