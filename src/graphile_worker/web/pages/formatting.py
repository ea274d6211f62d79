"""How pages write numbers, times and JSON."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._base.payload import decode_or_raw

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNKNOWN = "\N{EN DASH}"
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_TWO_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
MAX_DEPTH = 50
"""Levels of a JSON value that are shown as a tree."""
_MILLISECOND = 0.001
_TENTH, _TEN = 0.1, 10.0


def count(value: float | None) -> str:
    """Write a number of things.

    >>> count(12345), count(None) == UNKNOWN
    ('12,345', True)
    """
    return UNKNOWN if value is None else f"{value:,.0f}"


def duration(value: float | None) -> str:
    """Write seconds with two units at most.

    >>> [duration(seconds) for seconds in (0, 0.0004, 0.25, 3.27, 42, 75, 3700, 200000)]
    ['0 s', '<1 ms', '250 ms', '3.3 s', '42 s', '1 min 15 s', '1 h 1 min', '2 d 7 h']
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    value = max(value, 0.0)
    if value < _MINUTE:
        return _short_duration(value)
    for unit, name, lesser, lesser_name in _TWO_UNITS:
        if value >= unit:
            rest = int(value % unit // lesser)
            return f"{int(value // unit):,} {name}" + (f" {rest} {lesser_name}" if rest else "")
    return f"{value:.0f} s"


def _short_duration(value: float) -> str:
    if value == 0:
        return "0 s"
    if value < _MILLISECOND:
        return "<1 ms"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < _TEN else f"{int(value)} s"


def relative(moment: datetime, now: datetime | None = None) -> str:
    """Write how far a moment is from now.

    >>> from datetime import timedelta
    >>> now = datetime(2026, 1, 1, tzinfo=UTC)
    >>> [relative(now + timedelta(seconds=apart), now) for apart in (-90, 7200, 0)]
    ['1 min ago', 'in 2 h', 'now']
    """
    apart = (moment - (now or datetime.now(UTC))).total_seconds()
    size = abs(apart)
    if size < 1:
        return "now"
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min"), (1, "s")):
        if size >= unit:
            text = f"{int(size // unit):,} {name}"
            return f"in {text}" if apart > 0 else f"{text} ago"
    return "now"


def exact(moment: datetime | None) -> str:
    """Write a moment to the second, in UTC.

    >>> exact(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    '2026-01-02 03:04:05 UTC'
    """
    return "unknown" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def iso(moment: datetime) -> str:
    """Write a moment for programs."""
    return moment.astimezone(UTC).isoformat()


def time_of_day(moment: datetime) -> str:
    """Write the time of a moment, in UTC."""
    return f"{moment.astimezone(UTC):%H:%M:%S} UTC"


def day_and_time(moment: datetime) -> str:
    """Write a moment to the minute, in UTC.

    >>> day_and_time(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    '2 Jan 03:04'
    """
    moment = moment.astimezone(UTC)
    return f"{moment.day} {moment:%b %H:%M}"


def percent(part: float | None) -> str:
    """Write a part of one as a percentage.

    >>> percent(0.123), percent(0.0004), percent(0), percent(1)
    ('12 %', '<0.1 %', '0 %', '100 %')
    """
    if part is None:
        return UNKNOWN
    value = part * 100
    if 0 < value < _TENTH:
        return "<0.1 %"
    return f"{value:.1f} %" if 0 < value < _TEN and round(value, 1) != round(value) else f"{value:.0f} %"


def shorten(text: object, length: int) -> str:
    """Cut a text that is longer, and mark it.

    >>> shorten("invoice", 4)
    'inv…'
    """
    whole = str(text)
    return whole if len(whole) <= length else whole[: length - 1] + "…"


def first_line(text: object) -> str:
    """Return the first line of a text that is not empty."""
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def raw_json(value: Any) -> str:
    """Write a JSON value with sorted keys, two spaces a level, and exact integers.

    A stored value that Python cannot read, or that is too deep, is written as it is stored.
    """
    read = plain(value)
    if isinstance(read, msgspec.Raw):
        return bytes(read).decode(errors="backslashreplace")
    return json.dumps(read, indent=2, sort_keys=True, ensure_ascii=False, default=str)


def short_json(value: Any) -> str:
    """Write a JSON value on one line."""
    return json.dumps(plain(value), ensure_ascii=False, sort_keys=True, default=str)


def quoted(text: str) -> str:
    """Write a string as JSON has it, but with its letters."""
    return json.dumps(text, ensure_ascii=False)


def in_order(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the entries of an object by key."""
    return sorted(value.items(), key=lambda entry: str(entry[0]))


def plain(value: Any) -> Any:
    """Return a value as JSON has it: `msgspec.Raw` is decoded, except if it cannot be read or is too deep."""
    if not isinstance(value, msgspec.Raw):
        return value
    read = decode_or_raw(bytes(value).decode(errors="backslashreplace"))
    return value if _is_deep(read) else read


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level, depth = [one for many in inner for one in many], depth + 1
    return bool(level)


def qualifier(name: str, value: object) -> str:
    """Write a qualifier of the search, with quotes where the value needs them.

    >>> qualifier("task", "send mail"), qualifier("task", "send")
    ('task:"send mail"', 'task:send')
    """
    text = str(value)
    if text and not any(letter.isspace() or letter in '"\\' for letter in text):
        return f"{name}:{text}"
    return f'{name}:"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Join names, and count those that are left out.

    >>> join_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"
