"""Patterns: five fields, what they mean, and which minutes that makes.

Minutes are those of a wall clock here. Which moments they are, in a time zone, is the business of `schedule`.
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
"""What is blank for Node, as the inside of a set in a regular expression. Python's own idea differs."""
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
SHORT = 3
"""How many letters of a name are enough."""
_SUNDAY = 7
_EVERY_DAY, _ALL_WEEK, _ALL_HOURS = 31, 7, 24
# From 2096 to 2104 there is no 29 February. Nothing that happens at all is rarer.
_LONGEST_GAP = 8 * 12 + 1
_MOST_DIGITS = 30
_NEAR = 0.7  # nearer than @every is to @weekly
_PART = re.compile(
    r"(?P<all>\*)(?:/(?P<every>[0-9]+))?"
    r"|(?P<first>[0-9]+|[A-Za-z]{3})(?:-(?P<last>[0-9]+|[A-Za-z]{3})(?:/(?P<step>[0-9]+))?)?"
)


class Word(NamedTuple):
    """A piece of a line, and where it begins: the first column is 0."""

    column: int
    text: str


class Fault(NamedTuple):
    """What is wrong with a piece of a line."""

    word: Word
    message: str


class Field(NamedTuple):
    """One of the five."""

    name: str
    first: int
    last: int
    names: Sequence[str] = ()


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, [name[:SHORT].upper() for name in MONTHS]),
    # Sunday may be called 7 too.
    Field("day of week", 0, _SUNDAY, [name[:SHORT].upper() for name in WEEKDAYS]),
)


@dataclass(frozen=True)
class Pattern:
    """The values of each field that fit; Sunday is 0."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]

    @cached_property
    def _either_day_will_do(self) -> bool:
        return len(self.days) < _EVERY_DAY and len(self.weekdays) < _ALL_WEEK

    @cached_property
    def every_hour(self) -> bool:
        """Whether it is about minutes of whatever hour."""
        return len(self.hours) == _ALL_HOURS

    @cached_property
    def _times(self) -> list[tuple[int, int]]:
        return [(hour, minute) for hour in sorted(self.hours) for minute in sorted(self.minutes)]

    def fits(self, minute: int, hour: int, day: int, month: int, weekday: int) -> bool:
        """Whether these values fit."""
        return (
            minute in self.minutes
            and hour in self.hours
            and month in self.months
            and self._day_fits(day, weekday)
        )

    def _day_fits(self, day: int, weekday: int) -> bool:
        if self._either_day_will_do:
            return day in self.days or weekday in self.weekdays
        return day in self.days and weekday in self.weekdays

    def fits_wall(self, wall: datetime) -> bool:
        """Whether this minute of a wall clock fits."""
        return self.fits(wall.minute, wall.hour, wall.day, wall.month, wall.isoweekday() % 7)

    def walls_after(self, wall: datetime) -> Iterator[datetime]:
        """The minutes of the wall clock that fit, after this one, in order; there may be none."""
        begin = wall.replace(second=0, microsecond=0, tzinfo=None, fold=0)
        first, reached = begin.date(), (begin.hour, begin.minute)
        for day in self._days_from(first):
            for time in self._times:
                if day > first or time > reached:
                    yield datetime(day.year, day.month, day.day, *time)  # noqa: DTZ001 - a wall clock's

    def _days_from(self, first: date) -> Iterator[date]:
        """Month by month, for most of those that do not fit can be left out whole."""
        year, month, in_vain = first.year, first.month, 0
        while year <= MAXYEAR and in_vain <= _LONGEST_GAP:
            in_vain += 1
            if month in self.months:
                for number in range(1, calendar.monthrange(year, month)[1] + 1):
                    day = date(year, month, number)
                    if day >= first and self._day_fits(number, day.isoweekday() % 7):
                        in_vain = 0
                        yield day
            year, month = (year, month + 1) if month < len(MONTHS) else (year + 1, 1)


@lru_cache(maxsize=4096)
def parse_pattern(text: str) -> Pattern:
    """The pattern that a text means; what only we know is allowed: names, steps on ranges, ``@daily``.

    >>> sorted(parse_pattern("*/20 8 * * MON-FRI").minutes)
    [0, 20, 40]
    >>> parse_pattern("0 8 * *")
    Traceback (most recent call last):
    graphile_worker.errors.ConfigurationError: The pattern '0 8 * *' is wrong: it has 4 fields; expected 5: \
minute, hour, day of month, month, day of week.
    """
    words = words_of(text)
    faults: list[Fault] = []
    pattern = None
    if len(words) == len(FIELDS) or (len(words) == 1 and text.strip().startswith("@")):
        pattern = read_pattern(words, faults, strict=False)
    else:
        names = ", ".join(field.name for field in FIELDS)
        faults.append(Fault(Word(0, text), f"it has {len(words)} fields; expected 5: {names}"))
    if pattern is None:
        problems = "; ".join(fault.message for fault in faults)
        raise ConfigurationError(f"The pattern {text!r} is wrong: {problems}.")
    return pattern


def words_of(text: str, start: int = 0) -> list[Word]:
    """What stands between blanks."""
    return [Word(found.start(), found.group()) for found in WORD.finditer(text, start)]


def read_pattern(words: Sequence[Word], faults: list[Fault], *, strict: bool) -> Pattern | None:
    """The pattern of five words, or of a nickname; None if there are faults, which are added."""
    if words[0].text.startswith("@"):
        meaning = NICKNAMES.get(words[0].text.lower())
        if meaning is None:
            near = difflib.get_close_matches(words[0].text.lower(), NICKNAMES, n=1, cutoff=_NEAR)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(NICKNAMES)}"
            faults.append(Fault(words[0], f"there is no {words[0].text!r}; {hint}"))
            return None
        words = words_of(meaning)
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
            if not part:  # there is no text to point at: point at all of it
                where = word
            faults.append(Fault(where, f"the {field.name} {where.text!r} {problem}"))
        column += len(part) + 1
    return frozenset(value % _SUNDAY for value in found) if field.last == _SUNDAY else frozenset(found)


def _values(part: str, field: Field, *, strict: bool) -> range:
    if not part:
        raise ValueError("has nothing beside a comma; expected a number, a range, * or */n")
    given = _PART.fullmatch(part)
    if given is None:
        raise ValueError(_what_is_expected(part, field, strict=strict))
    if strict and (given["step"] or part.upper() != part.lower()):
        raise ValueError(
            f"is only understood in extended mode; expected a number from {field.first} to {field.last}, "
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
        raise ValueError("is no range: its end must be larger than its beginning")
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
            raise ValueError(f"has no meaning; expected {expected}")
        return field.names.index(text.upper()) + (field.first if field.last != _SUNDAY else 0)
    value = integer(text)
    if not field.first <= value <= field.last:
        size = "large" if value > field.last else "small"
        raise ValueError(f"is too {size}; expected {field.first} to {field.last}")
    return value


def _what_is_expected(part: str, field: Field, *, strict: bool) -> str:
    if re.fullmatch(r"[0-9]+/[0-9]+", part):
        first, _, step = part.partition("/")
        return f"has a step but no range; expected {first}-{field.last}/{step}, in extended mode, or */{step}"
    names = "" if strict or not field.names else f", a name such as {field.names[1]}"
    return (
        f"is not understood; expected a number from {field.first} to {field.last}{names}, a range, * or */n"
    )


def integer(text: str) -> int:
    """Digits as a number. Of more than Python likes to read, some will do: it is far too large anyway.

    >>> integer("007")
    7
    """
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    return int(sign + (digits.lstrip("0")[:_MOST_DIGITS] or "0"))
