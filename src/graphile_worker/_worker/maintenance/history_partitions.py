"""`HistoryPartitions`: creates the partitions of the history ahead of time, and drops old ones."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING

from graphile_worker._db.queries import history as database
from graphile_worker._worker.service import Service
from graphile_worker.errors import DatabaseError

if TYPE_CHECKING:
    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.connection.session import Session
    from graphile_worker._worker.execution.attempts import AttemptRecorder

_INTERVAL = 3600.0
_RETRY = 10.0
_LONGEST_RETRY = 300.0
_MAX_FIRST_DELAY = 60.0


class HistoryPartitions(Service):
    """Keeps the partitions of the history. Workers take turns, and no exchange waits for it.

    A worker that keeps no history only drops old partitions.

    Args:
        attempts: Knows whether this worker keeps attempts.
        keep_for: Seconds that attempts are kept.
        session: The connections to the database.
        logger: The worker's logger.
    """

    name = "history"

    def __init__(
        self, *, attempts: AttemptRecorder, keep_for: float, session: Session, logger: ScopedLogger
    ) -> None:
        super().__init__(logger)
        self._attempts = attempts
        self._keep_for = keep_for
        self._session = session
        self._started = self._warned = False
        self._tries = 0
        attempts.on_first = self.wake

    async def prepare(self) -> None:
        """Create the partitions before the first attempt is recorded. If that fails, it is repeated later."""
        if self._attempts.is_active:
            try:
                await self.maintain()
            except DatabaseError as error:
                self.logger.warning("Cannot prepare the history: %s", error)

    async def tick(self) -> float:
        """Create and drop partitions, but not at once, because many workers may start together."""
        if not self._started:
            self._started = True
            return random.uniform(0, _MAX_FIRST_DELAY)  # noqa: S311 - no secret
        try:
            is_done = await self.maintain()
        except DatabaseError as error:  # the worker's loop reports an outage
            self.logger.debug("Cannot maintain the history: %s", error)
            self.record_failure(error)
            is_done = False
        self._tries = 0 if is_done else self._tries + 1
        delay = _INTERVAL if is_done else min(_RETRY * 2.0 ** min(self._tries - 1, 10), _LONGEST_RETRY)
        return delay * random.uniform(0.8, 1.0)  # noqa: S311 - no secret

    async def maintain(self) -> bool:
        """Create missing partitions, and drop old ones. Returns whether nothing is left to do."""
        schema, call = self._session.schema, self._session.call
        found = await call(lambda on: database.inspect_partitions(on, schema), attempts=1)
        if found is None:
            return True
        limit = found.now - timedelta(seconds=self._keep_for)
        expired, missing = found.expired(self._keep_for), found.missing()
        writes = self._attempts.is_active or self._attempts.has_recorded
        if not found.may_create:
            if writes:
                self._warn(found)
            expired, missing = [], []
        is_done = True
        if writes and missing:
            is_done = await call(lambda on: database.create_partitions(on, schema, found), attempts=1)
            if is_done:
                await call(lambda on: database.analyze(on, schema), attempts=1)
        if expired:
            dropped = await call(lambda on: database.drop_partitions(on, schema, found, expired), attempts=1)
            if dropped:
                self.logger.info("Removed %d days from the history", len(dropped))
            is_done = is_done and len(dropped) == len(expired)
        # Even if this worker keeps no history: the default partition may have rows of called jobs.
        if writes or found.days or found.may_create:
            while await call(lambda on: database.delete_old_rows(on, schema, limit), attempts=1):
                pass
        return is_done

    def _warn(self, found: database.Partitions) -> None:
        if not self._warned:
            self._warned = True
            self.logger.warning(
                "The role %r may not create or drop partitions of the history, so all attempts go to one "
                "table, and old ones are deleted row by row. Let the workers connect as the owner of the "
                "schema, %r, or as a member of it",
                found.role,
                found.owner,
            )
