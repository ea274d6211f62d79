"""The kinds of values that the options of a worker take, each with its check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphile_worker._base.durations import seconds
from graphile_worker.cron.item import parse_fill
from graphile_worker.errors import ConfigurationError
from graphile_worker.history import read_history

MAX_COUNT = 100_000


@dataclass(frozen=True)
class Kind:
    """The kind of value that an option takes: by default any, checked by the code that uses the value."""

    metavar: str = field(default="TEXT", kw_only=True)
    """Placeholder for the value in help texts."""

    def check(self, name: str, value: Any) -> Any:  # noqa: ARG002 - other kinds use the name
        """Return the value as the worker uses it.

        Raises:
            ConfigurationError: The option does not take this value.
        """
        return value


@dataclass(frozen=True)
class Count(Kind):
    """An integer from `minimum` to 100,000; None or ``"auto"`` where allowed."""

    minimum: int
    optional: bool = field(default=False, kw_only=True)
    auto: bool = field(default=False, kw_only=True)
    """Whether ``"auto"`` is allowed: the worker decides."""
    metavar: str = field(default="N", kw_only=True)

    def check(self, name: str, value: Any) -> Any:
        """Return the integer."""
        if (value is None and self.optional) or (value == "auto" and self.auto):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= MAX_COUNT:
            raise ConfigurationError(
                f"{name} is {value!r}; it must be an integer from {self.minimum} to {MAX_COUNT:,}"
                f"{', or auto' if self.auto else ''}."
            )
        return value


@dataclass(frozen=True)
class Seconds(Kind):
    """A duration: seconds or a timedelta; or None, for an option whose default is None."""

    allowed: str = "more than 0"
    optional: bool = field(default=False, kw_only=True)
    may_be_milliseconds: bool = field(default=False, kw_only=True)
    """Whether a number without a unit in a setting means milliseconds, as in Graphile Worker."""
    metavar: str = field(default="TIME", kw_only=True)

    def check(self, name: str, value: Any) -> Any:
        """Return the seconds."""
        if value is None and self.optional:
            return None
        return seconds(name, value, self.allowed)


@dataclass(frozen=True)
class Switch(Kind):
    """True or False."""

    def check(self, name: str, value: Any) -> Any:
        """Return the boolean."""
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} is {value!r}; it must be True or False.")
        return value


@dataclass(frozen=True)
class Age(Seconds):
    """A duration that may also be a text such as ``"14d"``."""

    def check(self, name: str, value: Any) -> Any:
        """Return the seconds."""
        if isinstance(value, str):
            try:
                value = parse_fill(value)
            except ConfigurationError:
                raise ConfigurationError(
                    f"{name} is {value!r}; it must be seconds, a timedelta, or a text such as '14d'."
                ) from None
        return super().check(name, value)


@dataclass(frozen=True)
class Keeping(Kind):
    """Which attempts the history keeps: a word, or a `History`."""

    metavar: str = field(default="KEEP", kw_only=True)

    def check(self, name: str, value: Any) -> Any:
        """Return the `History`."""
        return read_history(name, value)


@dataclass(frozen=True)
class Size(Kind):
    """A number of bytes; the session checks it."""

    metavar: str = field(default="SIZE", kw_only=True)


@dataclass(frozen=True)
class Address(Kind):
    """A port or ``host:port``; the health server checks it."""

    metavar: str = field(default="ADDRESS", kw_only=True)
