"""Freeing what was locked for longer than anybody may hold a lock."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker._db import workers as database
from graphile_worker._runtime.service import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._db.session import Session
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.options import WorkerOptions

_FIRST = 60.0


class StaleLocks(Service):
    """Graphile Worker's rule: after four hours a lock is nobody's. Every 8 to 10 minutes."""

    name = "stale locks"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        options: WorkerOptions,
        session: Session,
        check_revisions: Callable[[], Awaitable[None]],
        events: Events,
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._shortest = options.min_reset_locked_interval
        self._longest = options.max_reset_locked_interval
        self._session = session
        self._check_revisions = check_revisions
        self._events = events
        self._begun = False

    async def tick(self) -> float:
        """Look, but not at once: many workers may start together."""
        if not self._begun:
            self._begun = True
            return random.uniform(0, min(_FIRST, self._longest))  # noqa: S311 - no secret
        delay = random.uniform(self._shortest, self._longest)  # noqa: S311 - no secret
        await self.unlock(delay)
        # Somebody without ears may have missed that the schema was changed.
        await self._check_revisions()
        return delay

    async def unlock(self, delay: float | None = None) -> None:
        """Free them now."""
        self._events.emit(event.ResetLockedStarted(worker_pool=self._pool))
        try:
            freed = await self._session.call(lambda on: database.unlock_stale(on, self._session.schema))
        except Exception as error:  # noqa: BLE001 - it is tried again later, whatever it is
            self.logger.warning("Stale locks could not be freed: %s", error)
            self._events.emit(event.ResetLockedFailure(worker_pool=self._pool, delay=delay, error=error))
        else:
            for kind, refused in (("job", freed.refused_jobs), ("queue", freed.refused_queues)):
                for number, why in refused.items():
                    self.logger.warning(
                        "The database refuses to free the %s %d, locked for more than 4 hours: %s",
                        *(kind, number, why),
                    )
            self._events.emit(event.ResetLockedSuccess(worker_pool=self._pool, delay=delay))
