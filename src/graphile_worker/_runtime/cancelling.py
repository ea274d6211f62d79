"""Cancelling jobs in hand that somebody does not want any more."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._db.cancellations import settle
from graphile_worker._db.exchange import Claim
from graphile_worker._runtime.service import Service
from graphile_worker.errors import DatabaseError
from graphile_worker.outcome import Cancel

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._db.session import Session
    from graphile_worker._runtime.in_hand import InHand
    from graphile_worker.logs import ScopedLogger

_SOON = 0.1
_TO_BE_SURE = 60.0
_BETWEEN_EXCHANGES = 0.25


class Cancelling(Service):
    """Looks which jobs are to be cancelled: when it is told, and as long as there are some.

    It looks after jobs of others too: one that its worker, of whatever language, has failed or given back is
    not to run again.

    Args:
        worker_id: Who holds our jobs.
        in_hand: Those.
        session: Where to look.
        poll_interval: How often, if nobody tells.
        hears: Whether we would be told.
        exchanged: When the worker last had an answer; where we are not told, we look after that too.
        logger: Where to say what goes wrong.
    """

    name = "cancelling"

    def __init__(
        self,
        *,
        worker_id: str,
        in_hand: InHand,
        session: Session,
        poll_interval: float,
        hears: Callable[[], bool],
        exchanged: Callable[[], float | None],
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._worker_id = worker_id
        self._in_hand = in_hand
        self._session = session
        self._poll_interval = poll_interval
        self._hears = hears
        self._exchanged = exchanged
        self._seen: float | None = None
        self._told = False
        self._due = 0.0

    def wake(self) -> None:
        """Jobs may have been cancelled: look at once."""
        self._told = True
        super().wake()

    async def tick(self) -> float:
        """One look, if it is time for one. The first was made before all began."""
        if self._told or monotonic() >= self._due or (self._exchanged() != self._seen and not self._hears()):
            self._told, self._due = False, monotonic() + self._poll_interval
            try:
                await self.look()
            except DatabaseError as error:  # it is said elsewhere
                self.logger.debug("It could not be read which jobs are to be cancelled: %s", error)
        delay = max(0.0, self._due - monotonic())
        # To ask whether there was an exchange costs nothing, neither here nor there.
        return delay if self._hears() else min(delay, _BETWEEN_EXCHANGES)

    async def look(self) -> None:
        """Do what there is to do, and see when to look again."""
        self._seen = self._exchanged()
        self._due = monotonic() + await self._look()

    async def _look(self) -> float:
        requests = await self._session.call(lambda on: settle(on, self._session.schema))
        ours = {
            Claim(request.job_id, request.locked_at): request.reason
            for request in reversed(requests)  # the first one's reason counts
            if request.locked_by == self._worker_id and request.locked_at is not None
        }
        if ours:
            known = {held.claim: held for held in self._in_hand.all}
            for claim in ours.keys() & known.keys():
                self._in_hand.cancel(known[claim], Cancel(ours[claim]))
            if ours.keys() - known.keys():  # claimed, but we have not been told yet
                return min(_SOON, self._poll_interval)
        return _TO_BE_SURE if self._hears() and not requests else self._poll_interval
