"""`Cancellations`: stops claimed jobs that were cancelled."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._db.queries.cancellations import settle
from graphile_worker._db.queries.exchange import Claim
from graphile_worker._worker.service import Service
from graphile_worker.errors import DatabaseError
from graphile_worker.outcome import Cancel

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker._worker.execution.claimed_jobs import ClaimedJobs

_UNKNOWN_CLAIM_DELAY = 0.1
"""Seconds until the next read if a request names a claim that this worker does not know yet."""
_IDLE_INTERVAL = 60.0
"""Seconds between two reads while there are no requests and notifications arrive."""
_EXCHANGE_CHECK_INTERVAL = 0.25
"""Seconds between two checks whether there was an exchange."""


class Cancellations(Service):
    """Reads cancellation requests after a notification, and regularly while there are any.

    It also settles requests for the jobs of other workers. When a worker in any language has failed or
    returned a cancelled job, the job must not run again.

    Args:
        worker_id: The worker's id, which locks its jobs.
        claimed_jobs: The worker's claimed jobs.
        session: The connection to the database.
        poll_interval: Seconds between two reads without a notification.
        is_notified: Returns whether notifications arrive.
        last_exchange: Returns when the last answered exchange was sent. Without notifications, requests are
            read after each exchange too.
        logger: The worker's logger.
    """

    name = "cancelling"

    def __init__(
        self,
        *,
        worker_id: str,
        claimed_jobs: ClaimedJobs,
        session: Session,
        poll_interval: float,
        is_notified: Callable[[], bool],
        last_exchange: Callable[[], float | None],
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._worker_id = worker_id
        self._claimed_jobs = claimed_jobs
        self._session = session
        self._poll_interval = poll_interval
        self._is_notified = is_notified
        self._last_exchange = last_exchange
        self._seen_exchange: float | None = None
        self._notified = False
        self._due = 0.0
        self.turn = asyncio.Lock()
        """Held during a read. Other services that read after each notification share its connection."""

    def wake(self) -> None:
        """Read the requests now, because jobs may have been cancelled."""
        self._notified = True
        super().wake()

    async def tick(self) -> float:
        """Read the requests if that is due. At the start, the worker has just read them."""
        has_exchanged = self._last_exchange() != self._seen_exchange and not self._is_notified()
        if self._notified or monotonic() >= self._due or has_exchanged:
            self._notified, self._due = False, monotonic() + self._poll_interval
            try:
                await self.poll()
            except DatabaseError as error:  # the worker's loop reports the outage
                self.logger.debug("Cannot read the cancellation requests: %s", error)
        delay = max(0.0, self._due - monotonic())
        # Without notifications, check often whether there was an exchange. That needs no query.
        return delay if self._is_notified() else min(delay, _EXCHANGE_CHECK_INTERVAL)

    async def poll(self) -> None:
        """Read the requests, cancel their jobs, and compute when to read again."""
        self._seen_exchange = self._last_exchange()
        async with self.turn:
            self._due = monotonic() + await self._settle()

    async def _settle(self) -> float:
        requests = await self._session.call(lambda on: settle(on, self._session.schema))
        own = {
            Claim(request.job_id, request.locked_at): request.reason
            for request in reversed(requests)  # the reason of the first request counts
            if request.locked_by == self._worker_id and request.locked_at is not None
        }
        if own:
            known = {claimed.claim: claimed for claimed in self._claimed_jobs.all}
            for claim in own.keys() & known.keys():
                self._claimed_jobs.cancel(known[claim], Cancel(own[claim]))
            if own.keys() - known.keys():  # claimed by an exchange whose reply has not arrived
                return min(_UNKNOWN_CLAIM_DELAY, self._poll_interval)
        return _IDLE_INTERVAL if self._is_notified() and not requests else self._poll_interval
