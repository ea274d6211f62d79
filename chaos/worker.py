"""`python -m chaos.worker`: a Python worker of a run, in a process of its own.

Its argument is its `Orders` as JSON. Orders to come are read from standard input: ``clock 3600`` sets the
wall clock that the worker sees ahead by so many seconds. When the input ends whoever started us is gone, and
so are we, without a word.
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
from typing import Any

import msgspec

from chaos.leases import Leases  # noqa: TC001 - msgspec looks at it
from chaos.ledger import PAUSED, Fault, Ledger, Ready, Told, now
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
"""Of prctl; Linux only."""
_LOOK = 0.1
_MOST_CONNECTIONS = 3
"""Few, so that jobs often hold all of them."""


class Orders(msgspec.Struct, kw_only=True):
    """How to work."""

    slot: int
    ledger: str
    dsn: str
    leases: Leases
    concurrency: int = 8
    prefetch: int = 0


async def work(orders: Orders) -> None:
    """Work until a signal ends it."""
    os.environ[LEDGER_VARIABLE] = orders.ledger
    ledger = Ledger(Path(orders.ledger))  # open to the end: threads may outlive the worker
    threading.Thread(target=_note_pauses, args=(ledger, orders), daemon=True).start()
    runner = await run(
        tasks_for(ledger),
        orders.dsn,
        concurrency=orders.concurrency,
        max_pool_size=_MOST_CONNECTIONS,
        prefetch=orders.prefetch,
        events=_events(ledger),
        exit_if_stuck=True,  # whoever starts us starts another
        **orders.leases._asdict(),
    )
    ledger.write(Ready(at=now(), slot=orders.slot, worker=runner.id, pid=os.getpid()))
    await runner.wait()


class _Unreliable(logging.Handler):
    """A log server that is away now and then; and a listener that fails as often."""

    def __init__(self) -> None:
        super().__init__()
        self._failures = cycle([None] * 5 + [OSError, SystemExit, asyncio.CancelledError])

    def emit(self, _record: logging.LogRecord) -> None:
        self.listen()

    def listen(self, _event: object = None) -> None:
        error = next(self._failures)
        if error is not None:
            raise error("an observer fails")


def _note_pauses(ledger: Ledger, orders: Orders) -> None:
    """Those in which jobs may be lost; shorter ones are no excuse for anything."""
    last = now()
    while True:
        time.sleep(_LOOK)
        before, last = last, now()
        if last - before >= orders.leases.short_silence:
            ledger.write(Fault(at=before, until=last, kind=PAUSED, pids=[os.getpid()], slots=[orders.slot]))


def _events(ledger: Ledger) -> Events:
    events, worker = Events(), ""
    events.on(JobComplete, _Unreliable().listen)

    def tell(event: Event, **more: Any) -> None:
        ledger.write(Told(at=now(), name=event.name, worker=worker, pid=os.getpid(), **more))

    @events.on(PoolCreate)
    def created(event: PoolCreate) -> None:
        nonlocal worker
        worker = event.worker_pool.id

    @events.on(WorkerRecovered)
    def recovered(event: WorkerRecovered) -> None:
        about = event.recovered
        tell(event, about=about.worker.id, jobs=[job.id for job in about.jobs])

    def of_job(event: JobComplete | JobInterrupted | JobLost) -> None:
        tell(event, job=event.job.id, attempt=event.job.attempts)

    for about_pool in (PoolFenced, PoolUnfenced):
        events.on(about_pool, tell)
    for about_job in (JobComplete, JobInterrupted, JobLost):
        events.on(about_job, of_job)
    return events


def _obey(clock: WallClock) -> None:
    for line in sys.stdin:
        order, _, value = line.partition(" ")
        if order == "clock":
            clock.ahead = float(value)
    os._exit(1)


def _die_with_parent() -> None:
    """Also if we are stopped by a signal, when nobody reads the end of the input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def main() -> None:
    """Work as ordered."""
    _die_with_parent()
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("graphile_worker").setLevel(logging.WARNING)
    logging.getLogger("graphile_worker").addHandler(_Unreliable())
    clock = WallClock()
    clock.install()
    threading.Thread(target=_obey, args=(clock,), daemon=True).start()
    try:
        asyncio.run(work(orders))
    except DatabaseError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
