"""Moments, as people write and read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from graphile_worker.cli.settings import duration
from graphile_worker.durations import lasting

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DELAY = re.compile(r"\+?(\d+(?:\.\d+)?)\s*([smhdw])")
_LONGEST = 3e10


def read_moment(text: str) -> datetime | timedelta:
    """A moment, or how long from now; a ValueError says what it can be.

    >>> read_moment("now"), read_moment("5m"), read_moment("2030-01-01T00:00Z").year
    (datetime.timedelta(0), datetime.timedelta(seconds=300), 2030)
    """
    if text.strip().lower() == "now":
        return timedelta(0)
    if match := _DELAY.fullmatch(text.strip()):
        seconds = float(match[1]) * _UNITS[match[2]]
        if seconds > _LONGEST:
            raise ValueError("at most a thousand years from now")
        return timedelta(seconds=seconds)
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


class Moment(click.ParamType[Any]):
    """The type of an option that is a moment."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        if isinstance(value, datetime | timedelta):
            return value
        try:
            return read_moment(value)
        except ValueError as error:
            self.fail(f"{value!r} does not do; it must be {error}.", param, ctx)


class Period(click.ParamType[float]):
    """The type of an option that is a duration: a number with a unit, or seconds."""

    name = "TIME"

    def __init__(self, *, least: float = 0.0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it."""
        try:
            seconds = float(value) if not isinstance(value, str) or value.isdecimal() else duration(value)
        except ValueError as error:
            self.fail(f"{value!r} does not do; it must be seconds, or {error}.", param, ctx)
        if seconds < self._least:
            self.fail(f"It must be at least {self._least * 1000:.0f}ms.", param, ctx)
        return seconds


def from_now(moment: datetime, now: datetime | None = None) -> str:
    """How far away it is.

    >>> noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    >>> from_now(noon + timedelta(minutes=5), noon), from_now(noon - timedelta(hours=3), noon)
    ('in 5 min', '3 h ago')
    """
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {lasting(seconds)}" if seconds > 0 else f"{lasting(-seconds)} ago"


def both(moment: datetime | None) -> str:
    """A moment on this machine's clock, and how far away it is."""
    if moment is None:
        return ""
    try:
        local = moment.astimezone()
    except OverflowError:  # the end of the calendar
        local = moment
    return f"{local:%Y-%m-%d %H:%M:%S} ({from_now(moment)})"


def iso(moment: datetime | None) -> str:
    """A moment for programs, in UTC."""
    return "" if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
