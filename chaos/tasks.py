"""What the jobs of a run do: they write down that they ran, and some of them are a nuisance."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.ledger import CANCELLED, OK, RAISED, Begun, Ended, Ledger, now
from graphile_worker import GraphileWorkerError, JobContext, task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ASYNC, THREAD, HOLD_CONNECTION = "wait", "wait_on_thread", "hold_connection"
HOLD_GIL, FORK = "hold_gil", "fork"
PROCESS = "fork_in_process"
LEDGER_VARIABLE = "CHAOS_LEDGER"
"""Names the worker's ledger, for the processes that it starts."""
# Of PyDLL's functions the caller keeps the GIL: no other thread runs meanwhile, the event loop's neither.
_HOLDING_GIL = ctypes.PyDLL(None)
_MICROSECONDS = 1_000_000
_STEP = 0.05


class AsToldError(Exception):
    """The job was to fail."""


def tasks_for(ledger: Ledger) -> dict[str, Callable[..., Any]]:
    """The tasks, which write to that ledger."""

    async def wait(payload: dict[str, Any], ctx: JobContext) -> None:
        with _recorded(ledger, payload, ctx):
            for step in _steps(payload["seconds"]):
                await asyncio.sleep(step)

    async def hold_connection(payload: dict[str, Any], ctx: JobContext) -> None:
        with _recorded(ledger, payload, ctx):
            async with AsyncExitStack() as stack:
                with suppress(GraphileWorkerError):  # the job is about holding one, not about outages
                    await stack.enter_async_context(ctx.connection())
                for step in _steps(payload["seconds"]):
                    await asyncio.sleep(step)

    def on_thread(act: Callable[[float], object]) -> Callable[..., None]:
        def run(payload: dict[str, Any], ctx: JobContext) -> None:
            with _recorded(ledger, payload, ctx):
                act(payload["seconds"])

        return run

    return {
        ASYNC: wait,
        THREAD: on_thread(_wait_on_thread),
        HOLD_CONNECTION: hold_connection,
        HOLD_GIL: on_thread(_hold_gil),
        FORK: on_thread(_fork),
        PROCESS: fork_in_process,
    }


@task(PROCESS, executor="process")
def fork_in_process(payload: dict[str, Any], ctx: JobContext) -> None:
    """Fork a child that returns from the task at once. It must not answer for a job."""
    child = os.fork()
    if child == 0:
        return
    os.waitpid(child, 0)
    with _recorded(_ledger_of_process(), payload, ctx, worker_pid=os.getppid()):
        _wait_on_thread(payload["seconds"])


@cache
def _ledger_of_process() -> Ledger:
    return Ledger(Path(os.environ[LEDGER_VARIABLE]))


@contextmanager
def _recorded(
    ledger: Ledger, payload: dict[str, Any], ctx: JobContext, worker_pid: int | None = None
) -> Iterator[None]:
    job, run, outcome = ctx.job, ledger.next_run(), RAISED
    begun = Begun(
        at=now(),
        run=run,
        job=job.id,
        token=payload["token"],
        attempt=job.attempts,
        task=job.task_identifier,
        queue=job.queue_name,
        worker=ctx.worker_id,
        pid=worker_pid or os.getpid(),
    )
    ledger.write(begun)
    try:
        yield
        if job.attempts <= payload["fails"]:
            raise AsToldError(f"attempt {job.attempts} of {payload['fails']} that fail")
        outcome = OK
    except asyncio.CancelledError:
        outcome = CANCELLED
        raise
    finally:
        ledger.write(Ended(at=now(), run=run, outcome=outcome))


def _steps(seconds: float) -> list[float]:
    """In small steps: of one long sleep nothing is left when a process wakes that was frozen meanwhile.

    So a job that was frozen has work to do afterwards, and whether it is stopped then can be seen.
    """
    whole, rest = divmod(seconds, _STEP)
    return [_STEP] * int(whole) + [rest]


def _wait_on_thread(seconds: float) -> None:
    for step in _steps(seconds):
        time.sleep(step)


def _hold_gil(seconds: float) -> None:
    _HOLDING_GIL.usleep(int(seconds * _MICROSECONDS))


def _fork(seconds: float) -> None:
    """Leave a child that has all our sockets for so long. To the server we live as long as it does."""
    child = os.fork()
    if child == 0:
        try:
            time.sleep(seconds)
        finally:
            os._exit(0)
    threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()
