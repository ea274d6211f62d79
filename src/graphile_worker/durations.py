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
        or not math.isfinite(number)
        or number < 0
        or (number == 0 and allowed == "more than 0")
    ):
        raise ConfigurationError(f"{name} is {value!r}; it must be seconds or a timedelta, {allowed}.")
    return float(number)


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
