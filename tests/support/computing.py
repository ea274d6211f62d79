"""Tasks that run in processes. The processes import them from this module."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pydantic

from graphile_worker import App, Cancel, Fail, JobContext, Retry, Snooze, task
from graphile_worker.retry import ByException

app = App("postgresql://unused@localhost:1/unused")  # not reachable: the worker has another database


class OddError(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")


class KnownError(Exception): ...


class Size(pydantic.BaseModel):
    width: int


@dataclass
class Crop:
    left: int
    size: Size


@task(executor="process")
def report_process(path: str, ctx: JobContext) -> None:
    """Write the process, its parent and the worker to a file."""
    write_pid(path, os.getppid(), ctx.worker_id)


@task(executor="process")
def add_in_process(ctx: JobContext) -> None:
    ctx.add_job_sync("added")


@task(executor="process")
def wait(path: str, gate: str) -> None:
    """Write the process id, then wait until the test writes to the gate."""
    write_pid(path)
    Path(gate).read_text()


@task(executor="process", keep_result=True)
def report_half(gate: str, ctx: JobContext) -> str:
    """Report progress, then wait until the test writes to the gate."""
    ctx.progress(0.5, "half")
    return Path(gate).read_text()


@task(executor="process", timeout=600)
def exceed_timeout(path: str, ctx: JobContext) -> None:
    child = subprocess.Popen(["sleep", "600"])
    write_pid(path, child.pid)
    ctx.extend_deadline(0.2)
    child.wait()


@task(executor="process", timeout=1)
def quick() -> None: ...


@task(executor="process")
def hold_gil(path: str) -> None:
    """Hold the GIL, so that no other thread of this process runs."""
    write_pid(path)
    ctypes.PyDLL(None).usleep(600_000_000)


@task(executor="process")
def crash(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)


@task(executor="process")
def leave_fork_behind(path: str) -> None:
    """Leave a child that keeps the process's file descriptors open."""
    child = os.fork()
    if not child:
        threading.Event().wait()
    write_pid(path, child)
    os._exit(4)


@task(executor="process")
def log_in_fork() -> None:
    child = os.fork()
    logging.getLogger("shop").error("in %s", "a fork" if not child else "the process")
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


@task(executor="process", retry=ByException({KnownError: [600], OddError: [700]}))
def fail(how: str) -> None:
    match how:
        case "known":
            raise KnownError("as it is")
        case "odd":
            raise OddError(3, "cannot be unpickled")
        case "exit":
            sys.exit("enough")
        case "cause":
            try:
                int("beneath")
            except ValueError as error:
                raise Retry(error, after=300) from error
        case "local":

            class LocalError(Exception): ...

            raise LocalError("only this process has it")


@task(executor="process")
def choose(what: str) -> None:
    match what:
        case "retry":
            raise Retry("busy", after=500)
        case "fail":
            raise Fail("never")
        case "snooze":
            raise Snooze(400, "later")
        case "cancel":
            raise Cancel("unwanted")


@task(executor="process", batch=True)
async def items(batch: list[int]) -> list[Any]:
    return [odd(item) if item < 5 else await odd(item) for item in batch]


async def odd(item: int) -> Any:
    if item == 3:
        raise Fail("three")
    return OddError(item, "even") if item % 2 == 0 else None


@task(executor="process", batch=True)
def miscount(batch: list[int]) -> list[None]:
    return [None] * (len(batch) + 1)


@task(executor="process")
def typed(path: str, crop: Crop, numbers: list[int], sizes: dict[str, Size] | None = None) -> None:
    assert isinstance(crop, Crop)
    assert isinstance(crop.size, Size)
    Path(path).write_text(repr((crop, numbers, sizes)))


@task(executor="process")
class Resize(msgspec.Struct):
    identifier: ClassVar[str] = "resize"
    path: str
    width: int

    def run(self, ctx: JobContext) -> None:
        Path(self.path).write_text(f"{self.width} {ctx.job.task_identifier}")


@task(executor="process")
async def add_on_event_loop(path: str, ctx: JobContext) -> str:
    await asyncio.sleep(0)
    job = await ctx.add_job("other", {"path": path})
    write_pid(path, job.id)
    return "ok"


@task(executor="process")
def log(ctx: JobContext) -> None:
    ctx.logger.info("to be read by %s", "people", extra={"order": 7, "odd": threading.Lock()})
    ctx.logger.debug("below the level")
    try:
        fail.function("known")
    except KnownError:
        logging.getLogger("shop").exception("with a traceback")


@task(executor="process")
def write_state(path: str, ctx: JobContext[Any]) -> None:
    Path(path).write_text(repr(ctx.state))


@task(executor="process", timeout=60)
def write_deadline(path: str, ctx: JobContext) -> None:
    assert ctx.deadline is not None
    Path(path).write_text(f"{(ctx.deadline - ctx.now()).total_seconds()} {bool(ctx.stop_requested)}")


@task(executor="process", timeout=5)
def extend(path: str, gate: str, ctx: JobContext) -> None:
    ctx.extend_deadline(60)
    wait.function(path, gate)


@task(executor="process")
def stop_on_signal(path: str, ctx: JobContext) -> None:
    write_pid(path)
    assert ctx.stop_requested.wait(20)


@task(executor="process", timeout=60)
async def stop_on_signal_async(path: str, ctx: JobContext) -> None:
    write_pid(path)
    await ctx.stop_requested


@task(executor="process")
def add(path: str, ctx: JobContext) -> None:
    first = ctx.run_sync(ctx.add_job("typed_job", {"n": 1}, priority=3))
    many = ctx.run_sync(ctx.add_jobs([loose.spec(crop=Crop(1, Size(width=2)))]))
    third = loose.enqueue_sync(crop=Crop(3, Size(width=4)))
    Path(path).write_text(f"{first.id} {many[0].id} {third.id} {first.priority}")


@task(executor="process")
def add_instances_and_tasks(path: str, ctx: JobContext) -> None:
    ctx.run_sync(ctx.add_job(Resize(path, 1), priority=3))
    ctx.run_sync(ctx.add_job(loose, {"crop": {"left": 1, "size": {"width": 2}}}))
    ctx.run_sync(ctx.add_jobs([Resize(path, 2)]))


@task(executor="process")
def add_invalid(what: str, ctx: JobContext) -> None:
    match what:
        case "payload":
            ctx.run_sync(ctx.add_job("typed_job", {"n": "x"}))
        case "class":
            ctx.run_sync(ctx.add_job(Resize))  # type: ignore[arg-type]
        case "utils":
            ctx.run_sync(ctx.utils.stats())
        case "connection":
            ctx.run_sync(ctx.query("select 1"))
        case "transaction":
            ctx.transaction()
        case "complete":
            ctx.run_sync(ctx.complete(connection=None))  # type: ignore[arg-type]
        case "complete_sync":
            ctx.complete_sync(connection=None)  # type: ignore[arg-type]


@app.task(executor="process")
def task_of_app(path: str) -> None:
    job = next_task_of_app.enqueue_sync(n=1)
    other = app.add_job_sync("elsewhere")
    write_pid(path, job.id, other.id)


@app.task
def next_task_of_app(n: int) -> None: ...


@task
def loose(crop: Crop) -> None: ...


@task
def typed_job(n: int) -> None: ...


def write_pid(path: str, *more: object) -> None:
    """Write the process id in one step, because the test waits for the file."""
    whole = Path(f"{path}.part")
    whole.write_text(" ".join(map(str, (os.getpid(), *more))))
    whole.rename(path)


@task(executor="process")
def until_stopped(path: str, ctx: JobContext) -> None:
    """Write whether the stop signal arrived within 20 seconds."""
    Path(path).write_text(str(ctx.stop_requested.wait(20)))


@task(executor="process")
def count_lines(path: str, ctx: JobContext) -> None:
    """Append the attempt to a file repeatedly, until the process is killed."""
    while True:
        with Path(path).open("a") as file:
            file.write(f"{ctx.job.attempts}\n")
        threading.Event().wait(0.02)


@task(executor="process", timeout=30)
def leave_thread_behind(ctx: JobContext) -> None:
    def keep_alive() -> None:
        while True:
            ctx.extend_deadline(30)
            threading.Event().wait(0.01)

    threading.Thread(target=keep_alive, daemon=True).start()


@task(executor="process", timeout=0.3)
def sleep_long() -> None:
    threading.Event().wait(20)


@task(executor="process")
async def cancel_itself() -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel("by the task")
    await asyncio.sleep(20)


@task(executor="process")
def append_attempt(path: str, gate: str, ctx: JobContext) -> None:
    """Append the process id and the attempt to a file, then wait until the gate opens."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()} {ctx.job.attempts}\n")
    Path(gate).read_text()


@task(executor="process")
def double(n: int) -> int:
    return 2 * n


@task(executor="process", max_attempts=1)
def call_another(n: int) -> int:
    return double.call_sync(n)


@task(executor="process")
def sum_up(n: int) -> int:
    """Return the sum of the numbers up to `n`."""
    if n < 0:
        raise ValueError(f"{n} is negative")
    return sum(range(n + 1))
