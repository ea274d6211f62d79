"""What time it is for the queue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """The database's time, estimated between its answers; or this machine's, if that is what counts."""

    def __init__(self, *, local: bool) -> None:
        self._local = local
        self._ahead = timedelta(0)

    def now(self) -> datetime:
        """The time that counts."""
        return datetime.now(UTC) if self._local else self.database_now()

    def database_now(self) -> datetime:
        """What the database would say."""
        return datetime.now(UTC) + self._ahead

    @property
    def as_of(self) -> datetime | None:
        """What to tell the database that the time is; None if it knows best."""
        return datetime.now(UTC) if self._local else None

    def observe(self, database_now: datetime) -> None:
        """The database said what time it is."""
        self._ahead = database_now - datetime.now(UTC)
