"""`Clock`: the current time, as the queue sees it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from graphile_worker.workers import since_boot


class Clock:
    """The database's time, estimated between replies; with ``use_local_time``, this machine's time."""

    def __init__(self, *, local: bool) -> None:
        self.local = local
        self._reply: datetime | None = None
        self._received_at = 0.0

    def now(self) -> datetime:
        """Return the current time: the database's, or this machine's with ``use_local_time``."""
        return datetime.now(UTC) if self.local else self.database_now()

    def database_now(self) -> datetime:
        """Return an estimate of the database's time."""
        if self._reply is None:
            return datetime.now(UTC)
        # The wall clock is not used, because it may be set between two replies.
        return self._reply + timedelta(seconds=since_boot() - self._received_at)

    @property
    def as_of(self) -> datetime | None:
        """The current time to pass to the database; None to use the database's clock."""
        return datetime.now(UTC) if self.local else None

    def observe(self, database_now: datetime) -> None:
        """Record the database's time from a reply."""
        self._reply, self._received_at = database_now, since_boot()
