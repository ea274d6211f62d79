"""What time it is for the queue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from graphile_worker.liveness import since_boot


class Clock:
    """The database's time, estimated between its answers; or this machine's, if that is what counts."""

    def __init__(self, *, local: bool) -> None:
        self.local = local
        self._answer: datetime | None = None
        self._heard_at = 0.0

    def now(self) -> datetime:
        """The time that counts."""
        return datetime.now(UTC) if self.local else self.database_now()

    def database_now(self) -> datetime:
        """What the database would say."""
        if self._answer is None:
            return datetime.now(UTC)
        # Not by the wall clock, which may be set meanwhile.
        return self._answer + timedelta(seconds=since_boot() - self._heard_at)

    @property
    def as_of(self) -> datetime | None:
        """What to tell the database that the time is; None if it knows best."""
        return datetime.now(UTC) if self.local else None

    def observe(self, database_now: datetime) -> None:
        """The database said what time it is."""
        self._answer, self._heard_at = database_now, since_boot()
