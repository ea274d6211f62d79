"""A clock that a test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from graphile_worker.job import as_utc


class Clock:
    """The time that counts for jobs of a test: it stands still until it is moved.

    Given to `using`, `drain` or `inline`, it is the "now" from which jobs are scheduled, by which they are
    due, and from which they are put off when they fail or snooze. What the database does by itself, such as
    adding a job in a trigger, has the database's time.

    Args:
        at: What time it is, as an aware datetime; by default it is now.

    Example:
        >>> from datetime import UTC, datetime
        >>> from graphile_worker.testing import Clock
        >>> clock = Clock(datetime(2030, 1, 1, 8, tzinfo=UTC))
        >>> print(clock.move(hours=1, minutes=30))
        2030-01-01 09:30:00+00:00
    """

    def __init__(self, at: datetime | None = None) -> None:
        self._now = datetime.now(UTC) if at is None else as_utc("at", at)

    def __repr__(self) -> str:
        return f"Clock({self._now})"

    def now(self) -> datetime:
        """What time it is."""
        return self._now

    def move(
        self,
        by: timedelta = timedelta(0),
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> datetime:
        """Move it, by all of these together; returns what time it is then."""
        self._now += by + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        return self._now

    def move_to(self, at: datetime) -> datetime:
        """Set it, to an aware datetime; returns what time it is then."""
        self._now = as_utc("at", at)
        return self._now
