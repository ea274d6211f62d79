"""Cron patterns: parsing the five fields, and finding the minutes that match.

Minutes here are wall-clock times without a time zone. `schedule` maps them to moments in a time zone.
"""

from __future__ import annotations

import calendar
import difflib
import re
from dataclasses import dataclass
from datetime import MAXYEAR, date, datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPACE = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""Whitespace according to Node, for use in a regular expression's character set. Python's set differs."""
WORD = re.compile(f"[^{SPACE}]+")
NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
MONTHS = [
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
]
WEEKDAYS = ["sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"]
SHORT_NAME_LENGTH = 3
"""The length of abbreviated names of months and days."""
_SUNDAY = 7
_ALL_DAYS, _ALL_WEEKDAYS, _ALL_HOURS = 31, 7, 24
# There is no 29 February between 2096 and 2104. No pattern that ever matches has a longer gap, in months.
_LONGEST_GAP = 8 * 12 + 1
_MAX_DIGITS = 30
_MIN_SIMILARITY = 0.7  # high enough not to suggest @weekly for @every
_PART = re.compile(
    r"(?P<all>\*)(?:/(?P<every>[0-9]+))?"
    r"|(?P<first>[0-9]+|[A-Za-z]{3})(?:-(?P<last>[0-9]+|[A-Za-z]{3})(?:/(?P<step>[0-9]+))?)?"
)


class Word(NamedTuple):
    """A part of a line, and its column. The first column is 0."""

    column: int
    text: str


class Fault(NamedTuple):
    """A problem with a part of a line."""

    word: Word
    message: str


class Field(NamedTuple):
    """One of the five fields of a pattern."""

    name: str
    first: int
    last: int
    names: Sequence[str] = ()


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, [name[:SHORT_NAME_LENGTH].upper() for name in MONTHS]),
    # Both 0 and 7 are Sunday.
    Field("day of week", 0, _SUNDAY, [name[:SHORT_NAME_LENGTH].upper() for name in WEEKDAYS]),
)


@dataclass(frozen=True)
class Pattern:
    """The matching values of each field. Sunday is 0."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]

    @cached_property
    def _either_day_matches(self) -> bool:
        """Whether days and weekdays are both restricted. Then one of the two has to match."""
        return len(self.days) < _ALL_DAYS and len(self.weekdays) < _ALL_WEEKDAYS

    @cached_property
    def every_hour(self) -> bool:
        """Whether the pattern matches in every hour."""
        return len(self.hours) == _ALL_HOURS

    @cached_property
    def _times(self) -> list[tuple[int, int]]:
        return [(hour, minute) for hour in sorted(self.hours) for minute in sorted(self.minutes)]

    def matches(self, minute: int, hour: int, day: int, month: int, weekday: int) -> bool:
        """Return whether these values match."""
        return (
            minute in self.minutes
            and hour in self.hours
            and month in self.months
            and self._matches_day(day, weekday)
        )

    def _matches_day(self, day: int, weekday: int) -> bool:
        if self._either_day_matches:
            return day in self.days or weekday in self.weekdays
        return day in self.days and weekday in self.weekdays

    def matches_wall_time(self, wall: datetime) -> bool:
        """Return whether this wall-clock minute matches."""
        return self.matches(wall.minute, wall.hour, wall.day, wall.month, wall.isoweekday() % 7)

    def wall_times_after(self, wall: datetime) -> Iterator[datetime]:
        """Yield the matching wall-clock minutes after this one, in order. There may be none."""
        begin = wall.replace(second=0, microsecond=0, tzinfo=None, fold=0)
        first, reached = begin.date(), (begin.hour, begin.minute)
        for day in self._days_from(first):
            for time in self._times:
                if day > first or time > reached:
                    yield datetime(day.year, day.month, day.day, *time)  # noqa: DTZ001 - a wall-clock time

    def _days_from(self, first: date) -> Iterator[date]:
        """Yield the matching days from this one on. Months that don't match are skipped as a whole."""
        year, month, empty_months = first.year, first.month, 0
        while year <= MAXYEAR and empty_months <= _LONGEST_GAP:
            empty_months += 1
            if month in self.months:
                for number in range(1, calendar.monthrange(year, month)[1] + 1):
                    day = date(year, month, number)
                    if day >= first and self._matches_day(number, day.isoweekday() % 7):
                        empty_months = 0
                        yield day
            year, month = (year, month + 1) if month < len(MONTHS) else (year + 1, 1)


@lru_cache(maxsize=4096)
def parse_pattern(text: str) -> Pattern:
    """Parse a pattern in extended mode, with names, steps on ranges, and nicknames such as ``@daily``.

    >>> sorted(parse_pattern("*/20 8 * * MON-FRI").minutes)
    [0, 20, 40]
    >>> parse_pattern("0 8 * *")
    Traceback (most recent call last):
    graphile_worker.errors.ConfigurationError: Invalid pattern '0 8 * *': it has 4 fields; expected 5: \
minute, hour, day of month, month, day of week.
    """
    words = split_words(text)
    faults: list[Fault] = []
    pattern = None
    if len(words) == len(FIELDS) or (len(words) == 1 and text.strip().startswith("@")):
        pattern = read_pattern(words, faults, strict=False)
    else:
        names = ", ".join(field.name for field in FIELDS)
        faults.append(Fault(Word(0, text), f"it has {len(words)} fields; expected 5: {names}"))
    if pattern is None:
        problems = "; ".join(fault.message for fault in faults)
        raise ConfigurationError(f"Invalid pattern {text!r}: {problems}.")
    return pattern


def split_words(text: str, start: int = 0) -> list[Word]:
    """Split a text at whitespace."""
    return [Word(found.start(), found.group()) for found in WORD.finditer(text, start)]


def read_pattern(words: Sequence[Word], faults: list[Fault], *, strict: bool) -> Pattern | None:
    """Parse a pattern of five words or a nickname. Return None and add to `faults` if it is invalid."""
    if words[0].text.startswith("@"):
        meaning = NICKNAMES.get(words[0].text.lower())
        if meaning is None:
            near = difflib.get_close_matches(words[0].text.lower(), NICKNAMES, n=1, cutoff=_MIN_SIMILARITY)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(NICKNAMES)}"
            faults.append(Fault(words[0], f"there is no {words[0].text!r}; {hint}"))
            return None
        words = split_words(meaning)
    before = len(faults)
    values = [
        _read_field(word, field, faults, strict=strict) for word, field in zip(words, FIELDS, strict=True)
    ]
    return Pattern(*values) if len(faults) == before else None


def _read_field(word: Word, field: Field, faults: list[Fault], *, strict: bool) -> frozenset[int]:
    found: set[int] = set()
    column = word.column
    for part in word.text.split(","):
        try:
            found.update(_values(part, field, strict=strict))
        except ValueError as problem:
            where = Word(column, part)
            if not part:  # an empty part has no text, so name the whole field
                where = word
            faults.append(Fault(where, f"the {field.name} {where.text!r} {problem}"))
        column += len(part) + 1
    return frozenset(value % _SUNDAY for value in found) if field.last == _SUNDAY else frozenset(found)


def _values(part: str, field: Field, *, strict: bool) -> range:
    if not part:
        raise ValueError("has an empty part next to a comma; expected a number, a range, * or */n")
    given = _PART.fullmatch(part)
    if given is None:
        raise ValueError(_invalid_part_message(part, field, strict=strict))
    if strict and (given["step"] or part.upper() != part.lower()):
        raise ValueError(
            f"is only valid in extended mode; expected a number from {field.first} to {field.last}, "
            "a range, * or */n"
        )
    if given["all"]:
        return range(field.first, _last(field) + 1, _step(given["every"]))
    first = _number(given["first"], field)
    if given["last"] is None:
        return range(first, first + 1)
    last = _number(given["last"], field)
    if given["last"].upper() == "SUN":
        last = _SUNDAY
    if last <= first:
        raise ValueError("is not a range: its end must be greater than its start")
    return range(first, last + 1, _step(given["step"]))


def _last(field: Field) -> int:
    return field.last - 1 if field.last == _SUNDAY else field.last


def _step(text: str | None) -> int:
    step = 1 if text is None else integer(text)
    if step == 0:
        raise ValueError("has a step of 0; expected 1 or more")
    return step


def _number(text: str, field: Field) -> int:
    if not text.isdigit():
        if text.upper() not in field.names:
            expected = f"one of {', '.join(field.names)}" if field.names else "a number"
            raise ValueError(f"is not a known name; expected {expected}")
        return field.names.index(text.upper()) + (field.first if field.last != _SUNDAY else 0)
    value = integer(text)
    if not field.first <= value <= field.last:
        size = "large" if value > field.last else "small"
        raise ValueError(f"is too {size}; expected {field.first} to {field.last}")
    return value


def _invalid_part_message(part: str, field: Field, *, strict: bool) -> str:
    if re.fullmatch(r"[0-9]+/[0-9]+", part):
        first, _, step = part.partition("/")
        return f"has a step but no range; expected {first}-{field.last}/{step}, in extended mode, or */{step}"
    names = "" if strict or not field.names else f", a name such as {field.names[1]}"
    return f"is not valid; expected a number from {field.first} to {field.last}{names}, a range, * or */n"


def integer(text: str) -> int:
    """Parse digits as a number.

    Python limits how many digits it parses, so only the first 30 count. Any such number is too large anyway.

    >>> integer("007")
    7
    """
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    return int(sign + (digits.lstrip("0")[:_MAX_DIGITS] or "0"))
