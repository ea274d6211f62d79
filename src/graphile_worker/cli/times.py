"""Parsing and formatting of moments and durations."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from graphile_worker._base.durations import format_duration
from graphile_worker.cli.settings import duration

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DELAY = re.compile(r"\+?(\d+(?:\.\d+)?)\s*([smhdw])")
_LONGEST = 3e10


def read_moment(text: str) -> datetime | timedelta:
    """Parse a moment, or a delay from now.

    >>> read_moment("now"), read_moment("5m"), read_moment("2030-01-01T00:00Z").year
    (datetime.timedelta(0), datetime.timedelta(seconds=300), 2030)

    Raises:
        ValueError: The text is invalid; the error says what it must be.
    """
    if text.strip().lower() == "now":
        return timedelta(0)
    if match := _DELAY.fullmatch(text.strip()):
        return _delay(float(match[1]) * _UNITS[match[2]])
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            "now, a time from now (90s, 5m, 2h, 1d), or a moment with its time zone (2030-01-31T12:00Z)"
        ) from None
    if moment.utcoffset() is None:
        raise ValueError(
            f"a moment with its time zone: {text.strip()}Z in UTC, {text.strip()}+01:00 in Paris"
        )
    return moment


def read_delay(text: str) -> timedelta:
    """Parse a delay: a number of seconds, or a number with a unit.

    >>> read_delay("5"), read_delay("1.5h")
    (datetime.timedelta(seconds=5), datetime.timedelta(seconds=5400))

    Raises:
        ValueError: The text is invalid; the error says what it must be.
    """
    stripped = text.strip()
    match = _DELAY.fullmatch(stripped) or _DELAY.fullmatch(f"{stripped}s")
    if match is None:
        raise ValueError("a number of seconds, or a number with a unit (90s, 5m, 2h, 1d)")
    return _delay(float(match[1]) * _UNITS[match[2]])


def _delay(seconds: float) -> timedelta:
    if seconds > _LONGEST:
        raise ValueError("at most a thousand years from now")
    return timedelta(seconds=seconds)


class Delay(click.ParamType[timedelta]):
    """Type of options that take a delay."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Parse the value."""
        if isinstance(value, timedelta):
            return value
        try:
            return read_delay(value)
        except ValueError as error:
            self.fail(f"{value!r} is not valid: must be {error}.", param, ctx)


class Moment(click.ParamType[Any]):
    """Type of options that take a moment."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the value."""
        if isinstance(value, datetime | timedelta):
            return value
        try:
            return read_moment(value)
        except ValueError as error:
            self.fail(f"{value!r} is not valid: must be {error}.", param, ctx)


class Period(click.ParamType[float]):
    """Type of options that take a duration: a number with a unit, or seconds."""

    name = "TIME"

    def __init__(self, *, minimum: float = 0.0) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the value."""
        try:
            seconds = float(value) if not isinstance(value, str) or value.isdecimal() else duration(value)
        except ValueError as error:
            self.fail(f"{value!r} is not valid: must be seconds, or {error}.", param, ctx)
        if seconds < self._minimum:
            self.fail(f"{value!r} is not valid: must be at least {self._minimum * 1000:.0f}ms.", param, ctx)
        return seconds


def format_relative(moment: datetime, now: datetime | None = None) -> str:
    """Return the distance of a moment from now.

    >>> noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    >>> format_relative(noon + timedelta(minutes=5), noon), format_relative(noon - timedelta(hours=3), noon)
    ('in 5 min', '3 h ago')
    """
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {format_duration(seconds)}" if seconds > 0 else f"{format_duration(-seconds)} ago"


def format_time(moment: datetime | None) -> str:
    """Return a moment in this machine's time zone, with its distance from now."""
    if moment is None:
        return ""
    try:
        local = moment.astimezone()
    except OverflowError:  # the end of the calendar
        local = moment
    return f"{local:%Y-%m-%d %H:%M:%S} ({format_relative(moment)})"


def format_iso(moment: datetime | None) -> str:
    """Return a moment for programs, in UTC."""
    return "" if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
