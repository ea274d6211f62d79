"""The worker's hold on life: its heartbeat, and giving up its work in time when nobody hears it."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from graphile_worker._db.failures import translated
from graphile_worker._db.retryable import retrying
from graphile_worker._runtime.heartbeat import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker._db.connect import Pool
    from graphile_worker._db.exchange import Held
    from graphile_worker._db.sql import Schema
    from graphile_worker._runtime.sidecar import Sidecar
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker._runtime.worker import Worker
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger

_ATTEMPTS = 4
_LONGEST_NAP = 1.0
_STEP = 0.1
_CLEANING_UP = 1.0
_MOST_OF_TASKS = 1000


class Lifeline:
    """Between the heartbeat on the sidecar and the worker on the event loop.

    Args:
        pool: Who lives.
        version: Of this library.
        beat_on: The pool to connect like.
        schema: Where to say it.
        sidecar: Where the heartbeat runs.
        vitals: What is known.
        worker: Gives up its work.
        state: How it is.
        may_exit: Whether to end the process if the work cannot be stopped otherwise.
        logger: Where to say so.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        version: str,
        beat_on: Pool,
        schema: Schema,
        sidecar: Sidecar,
        vitals: Vitals,
        worker: Worker,
        state: Callable[[], str],
        may_exit: bool,
        logger: ScopedLogger,
    ) -> None:
        self._pool = pool
        self._metadata = {
            "language": "python",
            "version": version,
            "host": platform.node(),
            "pid": os.getpid(),
            "concurrency": pool.concurrency,
            "tasks": _first(pool.tasks),
        }
        self._beat_on = beat_on
        self._schema = schema
        self._sidecar = sidecar
        self._vitals = vitals
        self._worker = worker
        self._state = state
        self._may_exit = may_exit
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._heartbeat: Heartbeat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._woken = asyncio.Event()
        self._orphaned: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Register; an error is the caller's."""
        if self._vitals.lease is None:
            return
        self._heartbeat = heartbeat = Heartbeat(
            dial=await self._beat_on.dialler(),
            in_transactions=not self._beat_on.prepared_statements,
            schema=self._schema,
            worker_id=self._pool.id,
            metadata=self._metadata,
            state=self._state,
            vitals=self._vitals,
            on_death=lambda: self._tell(self._worker.mourn),
            on_beat=lambda: self._tell(self._worker.unfence),
            on_loss=self._woken.set,
            logger=self._logger,
        )
        with translated(self._schema):
            await retrying(lambda: self._sidecar.run(heartbeat.begin()), attempts=_ATTEMPTS)
        await self._sidecar.run(self._begin(heartbeat))

    async def _begin(self, heartbeat: Heartbeat) -> None:
        """On the sidecar."""
        self._tasks = [asyncio.create_task(heartbeat.beat_for_ever()), asyncio.create_task(self._watch())]

    def revive(self) -> None:
        """What was ours when others declared us dead is given up: live again."""
        if self._heartbeat is not None:
            self._sidecar.call(self._heartbeat.revive)

    async def stop(self, *, deregister: bool) -> None:
        """Beat no more; if nothing is left behind, say goodbye."""
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            await self._sidecar.run(self._end(heartbeat, deregister=deregister))

    async def _end(self, heartbeat: Heartbeat, *, deregister: bool) -> None:
        """On the sidecar."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await heartbeat.end(deregister=deregister)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            # The event loop was closed, and nobody stopped us: a worker without one does not live.
            if self._orphaned is None and self._heartbeat is not None:
                end = self._end(self._heartbeat, deregister=not self._worker.in_hand)
                self._orphaned = asyncio.ensure_future(end)

    async def _watch(self) -> None:
        """On the sidecar, because the worker's event loop may be blocked by the very work to give up."""
        vitals = self._vitals
        exit_at: float | None = None
        while True:
            self._woken.clear()
            left = vitals.ends() - vitals.clock()
            is_over = left <= 0 or vitals.dead
            if is_over:
                self._tell(self._worker.fence)
                exit_at = exit_at or self._exit_at()
            stuck = self._worker.stuck if exit_at is not None else ()
            if exit_at is not None and stuck and self._may_exit and vitals.clock() >= exit_at:
                self._exit(stuck)
            if not (is_over or stuck):
                exit_at = None
            with suppress(TimeoutError):
                async with asyncio.timeout(_STEP if is_over or stuck else min(left, _LONGEST_NAP)):
                    await self._woken.wait()

    def _exit_at(self) -> float:
        """When work that did not stop by then is to be ended with the process."""
        if self._vitals.dead:  # others run it already
            return self._vitals.clock() + _CLEANING_UP
        return self._vitals.taken_from() - 2 * _STEP

    def _exit(self, stuck: Sequence[Held]) -> None:
        self._logger.critical(
            "No heartbeat is recorded, so others may run the jobs of this worker now, and these cannot be "
            "stopped: %s. So this process ends.",
            ", ".join(str(held.job.id) for held in stuck),
        )
        logging.shutdown()
        os._exit(1)


def _first(tasks: Sequence[str]) -> list[str]:
    """As many as fit into a row that is read for each exchange."""
    sizes = accumulate(len(task.encode()) for task in tasks)
    return [task for task, size in zip(tasks, sizes, strict=True) if size <= _MOST_OF_TASKS]
