"""Freeing what dead workers hold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._runtime.service import Service
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.liveness import Lease, Recovered
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.recovery import Sweeper

_LOOKS_PER_LEASE = 4
_JITTER = 0.2
_SUSPICIOUS = 0.25


class Sweeping(Service):
    """Watches the other workers, and sweeps when one is dead."""

    name = "sweeper"

    def __init__(
        self, *, pool: WorkerPool, lease: Lease, sweeper: Sweeper, events: Events, logger: ScopedLogger
    ) -> None:
        super().__init__(logger)
        self._interval = lease.fast / _LOOKS_PER_LEASE
        self._pool = pool
        self._sweeper = sweeper
        self._events = events
        self._begun = False

    async def tick(self) -> float:
        """One look."""
        if not self._begun:  # not in the way of the first jobs
            self._begun = True
            return self._interval * random.uniform(0.1, 0.3)  # noqa: S311 - no secret
        try:
            found = await self._sweeper.look()
        except DatabaseError as error:  # it is said elsewhere; and who was away observes anew
            self.logger.debug("The other workers could not be looked at: %s", error)
            found = []
        for recovered in found:
            self._tell(recovered)
        # Those who watch the same worker do not look at the same time.
        delay = self._interval * random.uniform(1 - _JITTER, 1.0)  # noqa: S311 - no secret
        return delay * _SUSPICIOUS if self._sweeper.suspicious else delay

    def _tell(self, recovered: Recovered) -> None:
        self._events.emit(event.WorkerRecovered(worker_pool=self._pool, recovered=recovered))
        self.logger.warning(
            "Worker %s died, not heard from for %.1f s; freed %d jobs and %d queues of it",
            recovered.worker.name,
            recovered.silence,
            len(recovered.jobs),
            len(recovered.queues),
        )
