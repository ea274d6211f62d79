"""The tasks of a run. They record their runs, and some of them are faults themselves."""

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

from chaos.ledger import CANCELLED, OK, RAISED, Ledger, RunEnded, RunStarted, now
from graphile_worker import GraphileWorkerError, JobContext, task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ASYNC, THREAD, HOLD_CONNECTION = "wait", "wait_on_thread", "hold_connection"
HOLD_GIL, FORK = "hold_gil", "fork"
PROCESS = "fork_in_process"
LEDGER_VARIABLE = "CHAOS_LEDGER"
"""The environment variable with the path of the worker's ledger, for the processes that the worker starts."""
# A function of a PyDLL keeps the GIL, so no other thread runs during the call, including the event loop's.
_HOLDING_GIL = ctypes.PyDLL(None)
_MICROSECONDS = 1_000_000
_STEP = 0.05


class IntendedError(Exception):
    """The failure of a job that is meant to fail."""


def tasks_for(ledger: Ledger) -> dict[str, Callable[..., Any]]:
    """Return the tasks, which record their runs in a ledger."""

    async def wait(payload: dict[str, Any], ctx: JobContext) -> None:
        with _recorded(ledger, payload, ctx):
            for step in _steps(payload["seconds"]):
                await asyncio.sleep(step)

    async def hold_connection(payload: dict[str, Any], ctx: JobContext) -> None:
        with _recorded(ledger, payload, ctx):
            async with AsyncExitStack() as stack:
                with suppress(GraphileWorkerError):  # the task tests a held connection, not outages
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
    """Fork a child that returns from the task at once. The child must not report the job's outcome."""
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
    started = RunStarted(
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
    ledger.write(started)
    try:
        yield
        if job.attempts <= payload["fails"]:
            raise IntendedError(f"attempt {job.attempts} of {payload['fails']} that fail")
        outcome = OK
    except asyncio.CancelledError:
        outcome = CANCELLED
        raise
    finally:
        ledger.write(RunEnded(at=now(), run=run, outcome=outcome))


def _steps(seconds: float) -> list[float]:
    """Split a duration into small steps, so that a frozen job still has work to do when it continues.

    A single long sleep would be over when the process continues. With steps, the ledgers show whether the
    worker stops the job then.
    """
    whole, rest = divmod(seconds, _STEP)
    return [_STEP] * int(whole) + [rest]


def _wait_on_thread(seconds: float) -> None:
    for step in _steps(seconds):
        time.sleep(step)


def _hold_gil(seconds: float) -> None:
    _HOLDING_GIL.usleep(int(seconds * _MICROSECONDS))


def _fork(seconds: float) -> None:
    """Fork a child that holds the worker's sockets. While the child lives, the server sees a live worker."""
    child = os.fork()
    if child == 0:
        try:
            time.sleep(seconds)
        finally:
            os._exit(0)
    threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()
