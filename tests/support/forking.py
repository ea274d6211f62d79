"""Process tasks that fork in the ways that programs and libraries do."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphile_worker import JobContext, task

if TYPE_CHECKING:
    from collections.abc import Callable


@task(executor="process", max_attempts=1)
def fork(how: str, path: str, gate: str, ctx: JobContext) -> int:
    """Fork a child that acts as `how` says. The task itself returns the id of its job."""
    child = ctypes.CDLL(None).fork() if how == "fork in C" else os.fork()
    if child == 0:
        act(how, path, gate, ctx)
        return -1
    if how in {"return late", "return unattended"}:
        write(path, child)
    else:
        _, status = os.waitpid(child, 0)
        write(path, os.waitstatus_to_exitcode(status))
    return ctx.job.id


def act(how: str, path: str, gate: str, ctx: JobContext) -> None:
    match how:
        case "raise":
            raise ValueError("in the child")
        case "exit":
            sys.exit(7)
        case "print":
            print("printed by the child")  # noqa: T201 - the test reads it
            os.write(1, b"written by the child\n")
        case "fork again":
            middle = os.fork()
            if middle:
                os.waitpid(middle, 0)
        case "return late":
            Path(gate).read_text()
        case "start a thread":
            threading.Thread(target=write, args=(f"{path}.thread", "joined")).start()
        case "use the context":
            uses = (lambda: ctx.run_sync(ctx.add_job("fork")), lambda: ctx.extend_deadline(60))
            for number, use in enumerate(uses):
                write(f"{path}.{number}", error_of(use))


def error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:  # noqa: BLE001 - the test checks the type
        return f"{type(error).__name__}: {error}"
    return "none"


@task(executor="process", max_attempts=1)
async def fork_on_loop(path: str, ctx: JobContext) -> int:
    """Fork on an event loop, which the child must not close."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        write(path, os.waitstatus_to_exitcode(status))
    return ctx.job.id if child else -1


@task(executor="process", max_attempts=1)
def fork_pool(path: str, ctx: JobContext) -> int:
    """Use a multiprocessing pool that forks."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        write(path, *pool.map(abs, [-1, -2]))
    return ctx.job.id


@task(executor="process", max_attempts=1)
def list_open_sockets(path: str, ctx: JobContext) -> int:
    """List the file descriptors of a program that was started without closing any."""
    os.system(f"ls -l /proc/self/fd > {path}.part; mv {path}.part {path}")
    return ctx.job.id


@task(executor="process", max_attempts=1)
def run_for(seconds: float, ledger: str, ctx: JobContext, error: str | None = None) -> int:
    """Run for some seconds, write the job's id to the ledger, then return it or raise."""
    threading.Event().wait(seconds)
    with Path(ledger).open("a") as file:
        file.write(f"{ctx.job.id}\n")
    if error is not None:
        raise ValueError(error)
    return ctx.job.id


@task(executor="process", max_attempts=2)
def wait_at(gate: str, path: str) -> None:
    write(path, os.getpid())
    Path(gate).read_text()


def write(path: str, *words: Any) -> None:
    """Write a file in one step, because a test waits for it."""
    whole = Path(f"{path}.part{os.getpid()}")
    whole.write_text(" ".join(map(str, words)))
    whole.rename(path)
