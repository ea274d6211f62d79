"""Durations, as people give them."""

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
"""Seconds, about a thousand years: beyond, PostgreSQL or Python would refuse the date."""
_WITHOUT_FRACTION = 100
_STEPS = ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "days"))


def seconds(name: str, value: object, allowed: str = "0 or more") -> float:
    """A duration as seconds; refuses what is none.

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
    except OverflowError:  # an integer beyond all floats
        return False


def takes_one(function: Callable[..., object]) -> bool:
    """Whether a function of the user's that decides about something can be called with it.

    >>> takes_one(lambda job: 3), takes_one(lambda: 3)
    (True, False)
    """
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # some written in C do not tell
        return True
    return not inspect.iscoroutinefunction(function)


def shown(duration: float) -> str:
    """Seconds, for people.

    >>> shown(2.71828), shown(60.0), shown(3600.4)
    ('2.72 s', '60 s', '3,600 s')
    """
    return f"{duration:,.0f} s" if duration >= _WITHOUT_FRACTION else f"{duration:.3g} s"


def lasting(duration: float) -> str:
    """Seconds as people say them, in two figures or so.

    >>> lasting(0.25), lasting(3.2), lasting(90), lasting(90 * 60), lasting(3 * 3600), lasting(864_000)
    ('0.2 s', '3 s', '90 s', '90 min', '3 h', '10 days')
    """
    if duration < 1:
        return f"{duration:.1f} s"
    unit, name = next((unit, name) for below, unit, name in _STEPS if duration < below)
    return f"{int(duration // unit)} {name}"
