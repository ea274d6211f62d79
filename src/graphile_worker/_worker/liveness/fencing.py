"""`Fencing`: stops the worker's jobs in time when no heartbeat is recorded."""

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

from graphile_worker._db.connection.error_mapping import translate_errors
from graphile_worker._db.connection.retryable import retrying
from graphile_worker._worker.liveness.heartbeat import Heartbeat
from graphile_worker.workers import MAX_TASK_NAMES_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker._base.background_thread import BackgroundThread
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.connect import Pool
    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._db.sql_files import Schema
    from graphile_worker._worker.claiming.outage import OutageLog
    from graphile_worker._worker.liveness.lease_state import LeaseState
    from graphile_worker._worker.loop import Worker
    from graphile_worker.events import WorkerPool
    from graphile_worker.workers import Health

_ATTEMPTS = 4
_MAX_CHECK_INTERVAL = 1.0
_FAST_CHECK_INTERVAL = 0.1
_LOG_TIMEOUT = 0.5


class Fencing:
    """Connects the heartbeat on the background thread with the worker on its event loop.

    Args:
        pool: The worker's identity.
        version: The version of this library.
        heartbeat_pool: The pool whose connection settings the heartbeat uses.
        schema: The schema of the queue.
        background_thread: The thread of the heartbeat.
        lease_state: The state of the worker's lease.
        worker: The worker, which gives up its jobs.
        health: Returns the worker's health, for its heartbeats.
        may_exit: Whether to end the process if jobs cannot be stopped otherwise.
        outage_log: Logs an outage once.
        logger: The worker's logger.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        version: str,
        heartbeat_pool: Pool,
        schema: Schema,
        background_thread: BackgroundThread,
        lease_state: LeaseState,
        worker: Worker,
        health: Callable[[], Health],
        may_exit: bool,
        outage_log: OutageLog,
        logger: ScopedLogger,
    ) -> None:
        self._pool = pool
        self._metadata = {
            "language": "python",
            "version": version,
            "host": platform.node(),
            "pid": os.getpid(),
            "concurrency": pool.concurrency,
            "tasks": _fitting(pool.tasks),
        }
        self._heartbeat_pool = heartbeat_pool
        self._schema = schema
        self._background_thread = background_thread
        self._lease_state = lease_state
        self._worker = worker
        self._health = health
        self._may_exit = may_exit
        self._outage_log = outage_log
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._heartbeat: Heartbeat | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._woken = asyncio.Event()
        self._over_since: float | None = None
        """When the end of the lease was noticed; None if no job from before still runs."""
        self._was_declared_dead = False
        """Whether another worker had declared this one dead by then, and released its jobs."""
        self._leaving: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Register the worker, and start its heartbeat. Raises the error if that fails."""
        if self._lease_state.lease is None:
            return
        self._heartbeat = heartbeat = Heartbeat(
            dial=await self._heartbeat_pool.connector(),
            in_transactions=lambda: not self._heartbeat_pool.prepared_statements,
            one_host=self._heartbeat_pool.has_one_host,
            schema=self._schema,
            worker_id=self._pool.id,
            metadata=self._metadata,
            health=self._health,
            lease_state=self._lease_state,
            on_death=self._on_death,
            on_beat=lambda: self._call_worker(self._worker.unfence),
            on_loss=self._woken.set,
            on_failure=lambda reason: self._call_worker(partial(self._outage_log.begin, "heartbeat", reason)),
            on_recovery=lambda: self._call_worker(partial(self._outage_log.end, "heartbeat")),
        )
        with translate_errors(self._schema):
            await retrying(lambda: self._background_thread.run(heartbeat.begin()), attempts=_ATTEMPTS)
        await self._background_thread.run(self._begin(heartbeat))

    async def _begin(self, heartbeat: Heartbeat) -> None:
        """Start the heartbeat and the watch. Called on the background thread."""
        self._tasks = [asyncio.create_task(heartbeat.run()), asyncio.create_task(self._watch())]

    def _on_death(self) -> None:
        self._was_declared_dead = True
        self._woken.set()
        self._call_worker(self._worker.handle_declared_dead)

    def revive(self) -> None:
        """Register the worker again, after it was declared dead and has given up its jobs."""
        if self._heartbeat is not None:
            self._background_thread.call(self._heartbeat.revive)

    async def stop(self, *, deregister: bool) -> None:
        """End the heartbeat.

        Args:
            deregister: Whether to remove the worker's row, because the worker holds no locks.
        """
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            await self._background_thread.run(self._end(heartbeat, deregister=deregister))

    async def _end(self, heartbeat: Heartbeat, *, deregister: bool) -> None:
        """Stop the heartbeat and the watch. Called on the background thread."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await heartbeat.end(deregister=deregister)

    def _call_worker(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            # The event loop was closed without stopping the worker, so the worker has ended.
            if self._leaving is None and self._heartbeat is not None:
                self._leaving = asyncio.ensure_future(self._leave(self._heartbeat))

    async def _leave(self, heartbeat: Heartbeat) -> None:
        await self._end(heartbeat, deregister=self._worker.holds_no_locks)
        self._background_thread.end()

    async def _watch(self) -> None:
        """Check the lease, on the background thread because a task may block the worker's event loop."""
        while True:
            self._woken.clear()
            try:
                delay = self._check()
            except Exception:  # no error may end the checks
                self._logger.exception("Cannot check the lease")
                delay = _FAST_CHECK_INTERVAL
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._woken.wait()

    def _check(self) -> float:
        """Give up jobs whose lease has ended. Returns the seconds until the next check."""
        lease_state, now = self._lease_state, self._lease_state.clock()
        left = lease_state.ends() - now
        is_over = left <= 0 or lease_state.dead or (self._was_declared_dead and self._over_since is None)
        if is_over:
            self._call_worker(self._worker.fence)
            self._over_since = self._over_since or now
        if self._over_since is None:
            return min(left, _MAX_CHECK_INTERVAL)
        stuck = self._worker.stuck
        late = [claimed for claimed in stuck if now >= self._stops_by(claimed.job.task_identifier)]
        if late and self._may_exit:
            self._exit(late)
        if not (is_over or stuck):
            self._over_since, self._was_declared_dead = None, False
        return _FAST_CHECK_INTERVAL

    def _stops_by(self, task: str) -> float:
        """Return the time when the process has to exit if jobs of the task still run."""
        margin = self._lease_state.lease.fast_margin if self._lease_state.lease is not None else 0.0
        # After a long suspension that time may already have passed. The jobs still get a moment to stop.
        noticed = (self._over_since or 0.0) + 0.8 * margin
        return (
            noticed
            if self._was_declared_dead
            else max(noticed, self._lease_state.takeover_time(task) - 0.2 * margin)
        )

    def _exit(self, stuck: Sequence[ClaimedJob]) -> None:
        ids = ", ".join(str(claimed.job.id) for claimed in stuck)
        log = partial(
            self._logger.critical,
            "Other workers may run this worker's jobs, and it cannot stop jobs %s. Exiting the process",
            ids,
        )
        # On a thread, because a task that blocks the event loop may block logging too.
        for function in (log, logging.shutdown):
            thread = threading.Thread(target=function, daemon=True)
            thread.start()
            thread.join(_LOG_TIMEOUT)
        os._exit(1)


def _fitting(tasks: Sequence[str]) -> list[str]:
    """Return as many task names as fit. The row must be small, because each exchange reads it."""
    sizes = accumulate(len(task.encode()) for task in tasks)
    return [task for task, size in zip(tasks, sizes, strict=True) if size <= MAX_TASK_NAMES_BYTES]
