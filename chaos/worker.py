"""`python -m chaos.worker`: a Python worker of a run, in its own process.

Its argument is a `WorkerConfig` as JSON. It reads commands from standard input: ``clock 3600`` sets the wall
clock that the worker sees ahead by 3600 seconds. When the input ends, the harness is gone, and the process
exits at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import msgspec

from chaos.leases import Leases  # noqa: TC001 - msgspec reads the annotation
from chaos.ledger import PAUSED, Fault, Ledger, WorkerEvent, WorkerReady, now
from chaos.tasks import LEDGER_VARIABLE, tasks_for
from chaos.wall_clock import WallClock
from graphile_worker import DatabaseError, Events, run
from graphile_worker.events import (
    Event,
    JobComplete,
    JobInterrupted,
    JobLost,
    PoolCreate,
    PoolFenced,
    PoolUnfenced,
    WorkerRecovered,
)

_SET_DEATH_SIGNAL = 1
"""The option PR_SET_PDEATHSIG of prctl, on Linux only."""
_PAUSE_CHECK_INTERVAL = 0.1
_MOST_CONNECTIONS = 3
"""Few, so that jobs often hold all connections."""


class WorkerConfig(msgspec.Struct, kw_only=True):
    """The configuration of a worker process."""

    slot: int
    ledger: str
    dsn: str
    leases: Leases
    concurrency: int = 8
    prefetch: int | Literal["auto"] = "auto"
    history: bool = True
    """Whether the history keeps all attempts. Without it, most exchanges are plain statements."""


async def work(config: WorkerConfig) -> None:
    """Run jobs until a signal stops the worker."""
    os.environ[LEDGER_VARIABLE] = config.ledger
    ledger = Ledger(Path(config.ledger))  # open to the end: threads may outlive the worker
    threading.Thread(target=_record_pauses, args=(ledger, config), daemon=True).start()
    runner = await run(
        tasks_for(ledger),
        config.dsn,
        concurrency=config.concurrency,
        max_pool_size=_MOST_CONNECTIONS,
        prefetch=config.prefetch,
        history="all" if config.history else "none",  # the audit compares it with what ran
        events=_events(ledger),
        exit_if_stuck=True,  # the fleet starts a replacement
        **config.leases._asdict(),
    )
    ledger.write(WorkerReady(at=now(), slot=config.slot, worker=runner.id, pid=os.getpid()))
    await runner.wait()


class _UnreliableObserver(logging.Handler):
    """A log handler that fails now and then, and an event listener that fails as often."""

    def __init__(self) -> None:
        super().__init__()
        self._failures = cycle([None] * 5 + [OSError, SystemExit, asyncio.CancelledError])

    def emit(self, _record: logging.LogRecord) -> None:
        self.listen()

    def listen(self, _event: object = None) -> None:
        error = next(self._failures)
        if error is not None:
            raise error("an observer fails")


def _record_pauses(ledger: Ledger, config: WorkerConfig) -> None:
    """Record pauses in which jobs may be lost. Shorter pauses do not explain a violation."""
    last = now()
    while True:
        time.sleep(_PAUSE_CHECK_INTERVAL)
        before, last = last, now()
        if last - before >= config.leases.short_silence:
            ledger.write(Fault(at=before, until=last, kind=PAUSED, pids=[os.getpid()], slots=[config.slot]))


def _events(ledger: Ledger) -> Events:
    events, worker = Events(), ""
    events.on(JobComplete, _UnreliableObserver().listen)

    def record(event: Event, **more: Any) -> None:
        ledger.write(WorkerEvent(at=now(), name=event.name, worker=worker, pid=os.getpid(), **more))

    @events.on(PoolCreate)
    def created(event: PoolCreate) -> None:
        nonlocal worker
        worker = event.worker_pool.id

    @events.on(WorkerRecovered)
    def recovered(event: WorkerRecovered) -> None:
        about = event.recovered
        record(event, about=about.worker.id, jobs=[job.id for job in about.jobs])

    def record_job(event: JobComplete | JobInterrupted | JobLost) -> None:
        record(event, job=event.job.id, attempt=event.job.attempts)

    for pool_event in (PoolFenced, PoolUnfenced):
        events.on(pool_event, record)
    for job_event in (JobComplete, JobInterrupted, JobLost):
        events.on(job_event, record_job)
    return events


def _run_commands(clock: WallClock) -> None:
    for line in sys.stdin:
        command, _, value = line.partition(" ")
        if command == "clock":
            clock.ahead = float(value)
    os._exit(1)


def _die_with_parent() -> None:
    """Let the kernel kill this process with its parent. A frozen process cannot read the end of its input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def main() -> None:
    """Run the worker that the first argument configures."""
    _die_with_parent()
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("graphile_worker").setLevel(logging.WARNING)
    logging.getLogger("graphile_worker").addHandler(_UnreliableObserver())
    clock = WallClock()
    clock.install()
    threading.Thread(target=_run_commands, args=(clock,), daemon=True).start()
    try:
        asyncio.run(work(config))
    except DatabaseError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
