"""A clock that a test sets and moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from graphile_worker.job import as_utc


class Clock:
    """A test's time, which stands still until the test moves it.

    Pass it to `override`, `drain` or `inline`. Jobs are then scheduled from its time, become due by it, and
    are delayed from it when they fail or snooze. What the database does by itself uses the database's time:
    for example, a trigger that adds a job.

    Args:
        at: The time to start at, as an aware datetime [now].

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
        """Return the clock's time."""
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
        """Move the clock by the sum of all arguments, and return its new time."""
        self._now += by + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        return self._now

    def move_to(self, at: datetime) -> datetime:
        """Set the clock to an aware datetime, and return its new time."""
        self._now = as_utc("at", at)
        return self._now
