"""Freeing what dead workers hold."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._runtime.service import Service
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from graphile_worker._db.dialled import DialledConnection
    from graphile_worker._runtime.relay import Relay
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.liveness import Recovered
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.recovery import Sweeper

_JITTER = 0.2
_FIRST = 0.3
_MOST_NAMED = 10


class Sweeping(Service):
    """Watches the other workers, and sweeps when one is dead.

    It runs on the sidecar, with a connection of its own. So neither a task that blocks the event loop nor one
    that takes all connections keeps it from that.

    Args:
        pool: Who watches.
        sweeper: Looks, and frees.
        connection: What the sweeper looks through.
        relay: To the worker's event loop, where events are emitted.
        events: Where to tell.
        logger: The same, for people.
    """

    name = "sweeper"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        sweeper: Sweeper,
        connection: DialledConnection,
        relay: Relay,
        events: Events,
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._sweeper = sweeper
        self._connection = connection
        self._relay = relay
        self._events = events
        self._begun = False

    async def find_out(self) -> None:
        """Learn how to connect; on the worker's event loop, before it is started on the sidecar."""
        await self._connection.find_out()

    async def _run(self) -> None:
        try:
            await super()._run()
        finally:
            await self._connection.close()

    async def tick(self) -> float:
        """One look."""
        if not self._begun:  # not in the way of the first jobs
            self._begun = True
            return random.uniform(0, _FIRST)  # noqa: S311 - no secret
        try:
            found = await self._sweeper.look()
        except DatabaseError as error:  # it is said elsewhere; and who was away observes anew
            self.logger.debug("The other workers could not be looked at: %s", error)
            self.complain(error)
            found = []
        for recovered in found:
            self._relay.call(partial(self._tell, recovered))
        # Those who watch the same worker do not look at the same time.
        return self._sweeper.interval * random.uniform(1 - _JITTER, 1.0)  # noqa: S311 - no secret

    def _tell(self, recovered: Recovered) -> None:
        self._events.emit(event.WorkerRecovered(worker_pool=self._pool, recovered=recovered))
        jobs = ", ".join(f"{job.id} ({job.task_identifier})" for job in recovered.jobs[:_MOST_NAMED])
        if len(recovered.jobs) > _MOST_NAMED:
            jobs += f" and {len(recovered.jobs) - _MOST_NAMED} more"
        self.logger.warning(
            "Worker %s is dead: no heartbeat for %.1f s while we watched. Freed %s",
            recovered.worker.name,
            recovered.silence,
            f"its jobs: {jobs}" if jobs else f"{len(recovered.queues)} queues, and no job",
        )
        for job in recovered.jobs:
            if job.attempts >= job.max_attempts:
                self.logger.error(
                    "Job %d (%s) has failed for good: its worker died in its last attempt",
                    job.id,
                    job.task_identifier,
                )
