"""Cron patterns in English."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker.cron.expression import MONTHS, WEEKDAYS, parse_pattern
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from graphile_worker.cron.expression import Pattern

_MAX_TIMES = 6
_ALL = {
    "minutes": range(60),
    "hours": range(24),
    "days": range(1, 32),
    "months": range(1, 13),
    "weekdays": range(7),
}
_WORKDAYS, _WEEKEND = frozenset(range(1, 6)), frozenset({0, 6})


def describe(expression: str) -> str | None:
    """Return a pattern in words; None if it is not a pattern.

    >>> describe("0 4 * * *")
    'at 04:00 every day'
    >>> describe("*/15 9-17 * * MON-FRI")
    'every 15 minutes from 09:00 to 17:45, Monday to Friday'
    >>> describe("30 2 1 * *"), describe("0 0 29 2 *")
    ('at 02:30 on the 1st of every month', 'at 00:00 on the 29th of February')
    >>> describe("5 * * * *"), describe("* * * * *"), describe("0 */6 * * 0")
    ('at 5 minutes past every hour', 'every minute', 'at 00:00, 06:00, 12:00 and 18:00 on Sunday')
    """
    try:
        pattern = parse_pattern(expression)
    except ConfigurationError:
        return None
    days = _describe_days(pattern)
    times = _describe_times(sorted(pattern.minutes), sorted(pattern.hours))
    if days == "every day":
        return times if times.startswith("every") or "every hour" in times else f"{times} every day"
    joint = ", " if times.startswith("every") and days[0].isupper() else " "
    return f"{times}{joint}{days if joint == ', ' or not days[0].isupper() else 'on ' + days}"


def _describe_times(minutes: Sequence[int], hours: Sequence[int]) -> str:
    step = _step(minutes, 60)
    every = None
    if step is not None:
        every = {1: "every minute", 60: "every hour"}.get(step, f"every {step} minutes")
    unit = "minute" if list(minutes) == [1] else "minutes"
    past = f"at {_join([str(one) for one in minutes])} {unit} past"
    if len(hours) == len(_ALL["hours"]):
        return every or f"{past} every hour"
    if len(minutes) * len(hours) <= _MAX_TIMES:
        return "at " + _join([f"{hour:02}:{minute:02}" for hour in hours for minute in minutes])
    if every is not None and list(hours) == list(range(hours[0], hours[-1] + 1)):
        return f"{every} from {hours[0]:02}:00 to {hours[-1]:02}:{minutes[-1]:02}"
    return f"{past} the hours {_join([str(one) for one in hours])}"


def _describe_days(pattern: Pattern) -> str:
    is_all = {name: len(getattr(pattern, name)) == len(values) for name, values in _ALL.items()}
    months = (
        "every month"
        if is_all["months"]
        else _join([MONTHS[one - 1].title() for one in sorted(pattern.months)])
    )
    days = f"on the {_join([_ordinal(one) for one in sorted(pattern.days)])} of {months}"
    weekdays = _describe_weekdays(pattern.weekdays)
    if is_all["days"] and is_all["weekdays"]:
        return "every day" if is_all["months"] else f"every day in {months}"
    if is_all["days"]:
        return weekdays if is_all["months"] else f"{weekdays} in {months}"
    return days if is_all["weekdays"] else f"{days}, and on {weekdays}"


def _describe_weekdays(weekdays: Collection[int]) -> str:
    if weekdays == _WORKDAYS:
        return "Monday to Friday"
    if weekdays == _WEEKEND:
        return "Saturday and Sunday"
    return _join([WEEKDAYS[one].title() for one in sorted(weekdays, key=lambda day: (day - 1) % 7)])


def _step(values: Sequence[int], size: int) -> int | None:
    """Return the step if the values are all multiples of one that divides the range."""
    step = size // len(values)
    return step if list(values) == list(range(0, size, step)) and size % step == 0 else None


def _ordinal(number: int) -> str:
    ending = "th" if number in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
