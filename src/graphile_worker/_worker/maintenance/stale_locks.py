"""`StaleLocks`: releases locks that are older than four hours."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._db.queries import workers as database
from graphile_worker._worker.service import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker._worker.options import WorkerOptions
    from graphile_worker.events import WorkerPool

_MAX_FIRST_DELAY = 60.0


class StaleLocks(Service):
    """Releases stale locks, by default every 8 to 10 minutes, as Graphile Worker does.

    Args:
        pool: The worker's identity.
        options: The worker's options.
        session: The connection to the database.
        check_revisions: Checks whether this version still supports the schema.
        logger: The worker's logger.
    """

    name = "stale locks"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        options: WorkerOptions,
        session: Session,
        check_revisions: Callable[[], Awaitable[None]],
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._shortest = options.min_reset_locked_interval
        self._longest = options.max_reset_locked_interval
        self._session = session
        self._check_revisions = check_revisions
        self._events = options.events
        self._started = False

    async def tick(self) -> float:
        """Release stale locks, but not at once, because many workers may start together."""
        if not self._started:
            self._started = True
            return random.uniform(0, min(_MAX_FIRST_DELAY, self._longest))  # noqa: S311 - no secret
        delay = random.uniform(self._shortest, self._longest)  # noqa: S311 - no secret
        await self.unlock(delay)
        # A worker without LISTEN may have missed a migration.
        await self._check_revisions()
        return delay

    async def unlock(self, delay: float | None = None) -> None:
        """Release stale locks now."""
        self._events.emit(event.ResetLockedStarted(worker_pool=self._pool))
        try:
            released = await self._session.call(lambda on: database.unlock_stale(on, self._session.schema))
        except Exception as error:  # noqa: BLE001 - any error is retried later
            self.logger.warning("Cannot release stale locks: %s", error)
            self._events.emit(event.ResetLockedFailure(worker_pool=self._pool, delay=delay, error=error))
        else:
            for kind, refused in (("job", released.refused_jobs), ("queue", released.refused_queues)):
                for number, why in refused.items():
                    self.logger.warning(
                        "The database refuses to release the %s %d, locked for more than 4 hours: %s",
                        kind,
                        number,
                        why,
                    )
            self._events.emit(event.ResetLockedSuccess(worker_pool=self._pool, delay=delay))
