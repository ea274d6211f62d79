"""The worker's hold on life: its heartbeat, and giving up its work in time when nobody hears it."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import threading
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from graphile_worker._db.failures import translated
from graphile_worker._db.retryable import retrying
from graphile_worker._runtime.heartbeat import Heartbeat
from graphile_worker.liveness import MOST_OF_TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker._db.connect import Pool
    from graphile_worker._db.exchange import Held
    from graphile_worker._db.sql import Schema
    from graphile_worker._runtime.sidecar import Sidecar
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker._runtime.worker import Worker
    from graphile_worker.events import WorkerPool
    from graphile_worker.liveness import Health
    from graphile_worker.logs import ScopedLogger

_ATTEMPTS = 4
_LONGEST_NAP = 1.0
_STEP = 0.1
_GOODBYE = 0.5


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
        health: Returns the worker's health, for its heartbeats.
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
        health: Callable[[], Health],
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
        self._health = health
        self._may_exit = may_exit
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._heartbeat: Heartbeat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._woken = asyncio.Event()
        self._over_since: float | None = None
        """When it was noticed that the lease is over; None if nothing of that time is left."""
        self._was_dead = False
        """Whether others had declared us dead by then, and took what could not be stopped."""
        self._orphaned: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Register; an error is the caller's."""
        if self._vitals.lease is None:
            return
        self._heartbeat = heartbeat = Heartbeat(
            dial=await self._beat_on.dialler(),
            in_transactions=lambda: not self._beat_on.prepared_statements,
            one_host=self._beat_on.has_one_host,
            schema=self._schema,
            worker_id=self._pool.id,
            metadata=self._metadata,
            health=self._health,
            vitals=self._vitals,
            on_death=self._on_death,
            on_beat=lambda: self._tell(self._worker.unfence),
            on_loss=self._woken.set,
            say=lambda *words: self._tell(partial(self._logger.log, *words)),
        )
        with translated(self._schema):
            await retrying(lambda: self._sidecar.run(heartbeat.begin()), attempts=_ATTEMPTS)
        await self._sidecar.run(self._begin(heartbeat))

    async def _begin(self, heartbeat: Heartbeat) -> None:
        """On the sidecar."""
        self._tasks = [asyncio.create_task(heartbeat.beat_for_ever()), asyncio.create_task(self._watch())]

    def _on_death(self) -> None:
        self._was_dead = True
        self._woken.set()
        self._tell(self._worker.mourn)

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

    def _tell(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            # The event loop was closed, and nobody stopped us: a worker without one does not live.
            if self._orphaned is None and self._heartbeat is not None:
                self._orphaned = asyncio.ensure_future(self._leave(self._heartbeat))

    async def _leave(self, heartbeat: Heartbeat) -> None:
        await self._end(heartbeat, deregister=self._worker.leaves_nothing)
        self._sidecar.end()

    async def _watch(self) -> None:
        """On the sidecar, because the worker's event loop may be blocked by the very work to give up."""
        while True:
            self._woken.clear()
            try:
                nap = self._look()
            except Exception:  # it must go on, whatever it is
                self._logger.exception("The watch over the heartbeat failed")
                nap = _STEP
            with suppress(TimeoutError):
                async with asyncio.timeout(nap):
                    await self._woken.wait()

    def _look(self) -> float:
        """Give up what must be; returns the seconds until the next look."""
        vitals, now = self._vitals, self._vitals.clock()
        left = vitals.ends() - now
        is_over = left <= 0 or vitals.dead or (self._was_dead and self._over_since is None)
        if is_over:
            self._tell(self._worker.fence)
            self._over_since = self._over_since or now
        if self._over_since is None:
            return min(left, _LONGEST_NAP)
        stuck = self._worker.stuck
        late = [held for held in stuck if now >= self._stops_by(held.job.task_identifier)]
        if late and self._may_exit:
            self._exit(late)
        if not (is_over or stuck):
            self._over_since, self._was_dead = None, False
        return _STEP

    def _stops_by(self, task: str) -> float:
        """When work that did not stop by then is to be ended with the process."""
        margin = self._vitals.lease.fast_margin if self._vitals.lease is not None else 0.0
        # Who slept for so long finds that it is late already. Still it has a moment to stop in order.
        noticed = (self._over_since or 0.0) + 0.8 * margin
        return noticed if self._was_dead else max(noticed, self._vitals.taken_from(task) - 0.2 * margin)

    def _exit(self, stuck: Sequence[Held]) -> None:
        ids = ", ".join(str(held.job.id) for held in stuck)
        say = partial(
            self._logger.critical,
            "Others may run the jobs of this worker, and these cannot be stopped: %s. So this process ends.",
            ids,
        )
        # On a thread: who blocks the event loop may block the log too.
        for do in (say, logging.shutdown):
            thread = threading.Thread(target=do, daemon=True)
            thread.start()
            thread.join(_GOODBYE)
        os._exit(1)


def _first(tasks: Sequence[str]) -> list[str]:
    """As many as fit into a row that is read for each exchange."""
    sizes = accumulate(len(task.encode()) for task in tasks)
    return [task for task, size in zip(tasks, sizes, strict=True) if size <= MOST_OF_TASKS]
