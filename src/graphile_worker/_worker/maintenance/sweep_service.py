"""`SweepService`: releases the jobs and queues of dead workers."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._worker.service import Service
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.dedicated import SingleConnectionPool
    from graphile_worker._recovery.sweeper import Sweeper
    from graphile_worker._worker.liveness.loop_relay import LoopRelay
    from graphile_worker.events import WorkerPool
    from graphile_worker.events.emitter import Events
    from graphile_worker.workers import RecoveredWorker

_JITTER = 0.2
_MAX_FIRST_DELAY = 0.3
_MAX_NAMED = 10


class SweepService(Service):
    """Observes the other workers, and releases the jobs of dead ones.

    It runs on the background thread, with its own connection. So a task that blocks the event loop or holds
    all connections does not stop it.

    Args:
        pool: The worker's identity.
        sweeper: Observes workers and releases their jobs.
        connection: The sweeper's connection.
        relay: Calls functions on the worker's event loop, where events are emitted.
        events: The event emitter.
        logger: The worker's logger.
    """

    name = "sweeper"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        sweeper: Sweeper,
        connection: SingleConnectionPool,
        relay: LoopRelay,
        events: Events,
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._sweeper = sweeper
        self._connection = connection
        self._relay = relay
        self._events = events
        self._started = False

    async def prepare(self) -> None:
        """Read how to connect, on the worker's event loop, before the service starts on its thread."""
        await self._connection.prepare()

    async def _run(self) -> None:
        try:
            await super()._run()
        finally:
            await self._connection.close()

    async def tick(self) -> float:
        """Observe the other workers once."""
        if not self._started:  # the worker's first jobs have priority
            self._started = True
            return random.uniform(0, _MAX_FIRST_DELAY)  # noqa: S311 - no secret
        try:
            found = await self._sweeper.sweep()
        except DatabaseError as error:  # the worker's loop reports the outage
            self.logger.debug("Cannot observe the other workers: %s", error)
            self.record_failure(error)
            found = []
        for recovered in found:
            self._relay.call(partial(self._report, recovered))
        # The delay is random, so that workers do not query at the same time.
        return self._sweeper.interval * random.uniform(1 - _JITTER, 1.0)  # noqa: S311 - no secret

    def _report(self, recovered: RecoveredWorker) -> None:
        self._events.emit(event.WorkerRecovered(worker_pool=self._pool, recovered=recovered))
        jobs = ", ".join(f"{job.id} ({job.task_identifier})" for job in recovered.jobs[:_MAX_NAMED])
        if len(recovered.jobs) > _MAX_NAMED:
            jobs += f" and {len(recovered.jobs) - _MAX_NAMED} more"
        self.logger.warning(
            "Worker %s is dead: no heartbeat for %.1f s while this worker observed it. Released %s",
            recovered.worker.name,
            recovered.silence,
            f"its jobs: {jobs}" if jobs else f"{len(recovered.queues)} queues, and no job",
        )
        for job in recovered.jobs:
            if job.attempts >= job.max_attempts:
                self.logger.error(
                    "Job %d (%s) failed permanently: its worker died during its last attempt",
                    job.id,
                    job.task_identifier,
                )
