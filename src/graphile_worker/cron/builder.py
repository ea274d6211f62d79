"""`Cron`, which builds patterns from readable arguments."""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable
from datetime import time
from typing import TYPE_CHECKING, TypeAlias

from graphile_worker.cron.expression import FIELDS, MONTHS, SHORT_NAME_LENGTH, WEEKDAYS
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

Weekday: TypeAlias = int | str
_LEAP_YEAR = 2000
_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY = FIELDS


class Cron:
    """Builder of cron patterns, as an alternative to writing the five fields.

    Each method returns a pattern for ``@app.cron``, `CronItem` or a line of a crontab.

    Example:
        >>> from graphile_worker import Cron, CronItem
        >>> Cron.every(minutes=5)
        '*/5 * * * *'
        >>> Cron.hourly(at=15)
        '15 * * * *'
        >>> Cron.daily(at="08:00")
        '0 8 * * *'
        >>> Cron.weekly(on=["mon", "friday"], at="17:30")
        '30 17 * * 1,5'
        >>> Cron.monthly(on=1, at="06:00")
        '0 6 1 * *'
        >>> Cron.yearly(month="dec", on=24)
        '0 0 24 12 *'
        >>> CronItem("report", Cron.daily(at="08:00"), tz="Europe/Paris").match
        '0 8 * * *'
    """

    @staticmethod
    def every(*, minutes: int | None = None, hours: int | None = None) -> str:
        """Run at a fixed interval of minutes or hours.

        The number must divide an hour or a day evenly. Every 7 minutes, for example, would run 56 minutes
        past the hour and again 4 minutes later.
        """
        if (minutes is None) == (hours is None):
            raise ConfigurationError("Cron.every takes either minutes or hours.")
        if minutes is not None:
            return f"{_every('minutes', minutes, 60)} * * * *"
        return f"0 {_every('hours', hours, 24)} * * *"

    @staticmethod
    def hourly(*, at: int = 0) -> str:
        """Run every hour at this minute."""
        return f"{_number('at', at, _MINUTE.first, _MINUTE.last)} * * * *"

    @staticmethod
    def daily(*, at: str | time = "00:00") -> str:
        """Run every day at this time."""
        return f"{_time(at)} * * *"

    @staticmethod
    def weekly(*, on: Weekday | Iterable[Weekday] = "sunday", at: str | time = "00:00") -> str:
        """Run every week on this day, or on several. A day is a name or a number; 0 is Sunday."""
        days = list(on) if isinstance(on, Iterable) and not isinstance(on, str) else [on]
        if not days:
            raise ConfigurationError("Cron.weekly needs a day: on='monday'.")
        return f"{_time(at)} * * {','.join(str(day) for day in sorted({_weekday(day) for day in days}))}"

    @staticmethod
    def monthly(*, on: int = 1, at: str | time = "00:00") -> str:
        """Run on this day of each month. Shorter months without that day are skipped."""
        return f"{_time(at)} {_number('on', on, _DAY.first, _DAY.last)} * *"

    @staticmethod
    def yearly(*, month: int | str = 1, on: int = 1, at: str | time = "00:00") -> str:
        """Run every year on this day of this month."""
        number = _index_of_name("month", month, MONTHS) + 1 if isinstance(month, str) else month
        days = monthrange(_LEAP_YEAR, _number("month", number, _MONTH.first, _MONTH.last))[1]
        day = _number("on", on, _DAY.first, days)
        return f"{_time(at)} {day} {number} *"


def _every(name: str, step: int | None, whole: int) -> str:
    _number(name, step, 1, whole - 1)
    assert step is not None  # noqa: S101 - _number rejects None
    if whole % step:
        raise ConfigurationError(
            f"Cron.every({name}={step}) would run at uneven intervals, because {step} does not divide "
            f"{whole}. If that is what you want, write the pattern yourself, with */{step} for the {name}."
        )
    return "*" if step == 1 else f"*/{step}"


def _number(name: str, value: object, first: int, last: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise ConfigurationError(f"{name} is {value!r}; it must be a number from {first} to {last}.")
    return value


def _weekday(day: object) -> int:
    if isinstance(day, str):
        return _index_of_name("on", day, WEEKDAYS)
    return _number("on", day, _WEEKDAY.first, _WEEKDAY.last) % _WEEKDAY.last


def _index_of_name(argument: str, name: str, names: Sequence[str]) -> int:
    """Return the index of the name that begins with these letters, at least three."""
    for index, known in enumerate(names):
        if len(name) >= SHORT_NAME_LENGTH and known.startswith(name.lower()):
            return index
    raise ConfigurationError(f"{argument} is {name!r}; it must be one of {', '.join(names)}.")


def _time(at: object) -> str:
    """Format a time as the minute and hour fields of a pattern."""
    if isinstance(at, str):
        try:
            at = time.fromisoformat(at)
        except ValueError:
            raise ConfigurationError(f"at is {at!r}; it must be a time such as '08:00'.") from None
    if not isinstance(at, time) or at.tzinfo is not None or at.second or at.microsecond:
        raise ConfigurationError(
            f"at is {at!r}; it must be a time in hours and minutes. Set the time zone with tz=…."
        )
    return f"{at.minute} {at.hour}"
