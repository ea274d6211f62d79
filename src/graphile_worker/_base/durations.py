"""Durations as users pass them, and as messages show them."""

from __future__ import annotations

import inspect
import math
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

Duration: TypeAlias = float | timedelta
LONGEST = 3e10
"""Seconds, about a thousand years. PostgreSQL or Python would reject a date that is further away."""
_WITHOUT_FRACTION = 100
_UNITS = ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days"))
"""Below how many seconds a unit is used, its length in seconds, and its name."""


def seconds(name: str, value: object, allowed: str = "0 or more") -> float:
    """Return a duration in seconds.

    Raises:
        ConfigurationError: The value is not a duration, or is out of range.

    >>> from datetime import timedelta
    >>> seconds("grace", timedelta(minutes=1))
    60.0
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if (
        not isinstance(number, int | float)
        or isinstance(number, bool)
        or not _is_finite(number)
        or number < 0
        or (number == 0 and allowed == "more than 0")
    ):
        raise ConfigurationError(f"{name} is {value!r}; it must be seconds or a timedelta, {allowed}.")
    return float(number)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # the integer is too large for a float
        return False


def accepts_one_argument(function: Callable[..., object]) -> bool:
    """Return whether a synchronous user function can be called with one argument.

    >>> accepts_one_argument(lambda job: 3), accepts_one_argument(lambda: 3)
    (True, False)
    """
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # some functions written in C have no signature
        return True
    return not inspect.iscoroutinefunction(function)


def format_seconds(duration: float) -> str:
    """Format a duration in seconds.

    >>> format_seconds(2.71828), format_seconds(60.0), format_seconds(3600.4)
    ('2.72 s', '60 s', '3,600 s')
    """
    return f"{duration:,.0f} s" if duration >= _WITHOUT_FRACTION else f"{duration:.3g} s"


def format_duration(duration: float) -> str:
    """Format a duration with about two digits, in the unit that fits.

    >>> [format_duration(duration) for duration in (0.25, 3.2, 90)]
    ['0.2 s', '3 s', '90 s']
    >>> [format_duration(hours * 3600) for hours in (1.5, 3, 240)]
    ['90 min', '3 h', '10 days']
    """
    if duration < 1:
        return f"{duration:.1f} s"
    unit, name = next((unit, name) for below, unit, name in _UNITS if duration < below)
    return f"{int(duration // unit)} {name}"
