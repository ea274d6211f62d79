"""From patterns to moments: time zones, and the days on which clocks are changed.

A pattern is about a wall clock. Where clocks are changed, some of its minutes are skipped, once a year, and
some come twice. Patterns are of two kinds there:

- One whose hours are all 24 (``*/5 * * * *``, ``30 * * * *``) is about an interval, and goes by real time: it
  fires at each minute that the wall clock shows and that fits, in both of the hours that look the same, and
  not at all in the hour that is skipped. So ``30 * * * *`` always fires an hour after the last time.
- Any other (``30 2 * * *``, ``0 */2 * * *``) is about times of the day, and each of them is had once. Of a
  minute that comes twice, the first fires. If minutes that fit are skipped, however many, then the first
  minute after the gap fires, once.

So with Europe/Paris, on the last Sunday of March, when 02:00 is followed by 03:00, ``30 2 * * *`` fires at
03:00; and on the last Sunday of October, when 02:59 is followed by 02:00, at the first 02:30.

A predicate is called with each minute that there is, and decides by itself.
"""

from __future__ import annotations

import difflib
import zoneinfo
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, TypeAlias

from graphile_worker.cron.expression import Pattern
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Predicate: TypeAlias = Callable[[datetime], object]

MINUTE = timedelta(minutes=1)
_DAY = timedelta(days=1)
_ALWAYS_THERE = {"UTC", "Etc/UTC"}
_FOR_A_PREDICATE = timedelta(days=366)


def zone_of(name: object) -> tzinfo:
    """The time zone of that name.

    >>> zone_of("Europe/Pariss")
    Traceback (most recent call last):
    graphile_worker.errors.ConfigurationError: There is no time zone 'Europe/Pariss'; did you mean \
Europe/Paris?
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"The time zone {name!r} must be a name, such as 'Europe/Paris' or 'UTC'.")
    if name in _ALWAYS_THERE:
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # the others: a path, a folder
        known = zoneinfo.available_timezones()
    if not known:
        raise ConfigurationError(
            f"The time zone {name!r} cannot be looked up, for this machine has no time zone database. Bring "
            "one along: pip install tzdata."
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "names are those of the IANA, such as Europe/Paris."
    raise ConfigurationError(f"There is no time zone {name!r}; {hint}")


def as_minute(moment: datetime) -> datetime:
    """The minute that a moment is in, in UTC, which is what a moment without a time zone is taken for."""
    if moment.tzinfo is UTC and not moment.second and not moment.microsecond:
        return moment
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).replace(second=0, microsecond=0)


def fires(match: Pattern | Predicate, zone: tzinfo, minute: datetime) -> bool:
    """Whether that minute, given in UTC, is one of those meant."""
    wall = minute if zone is UTC else minute.astimezone(zone)
    if not isinstance(match, Pattern):
        return bool(match(wall))
    if zone is UTC or match.every_hour:
        return match.fits_wall(wall)
    return (wall.fold == 0 and match.fits_wall(wall)) or _follows_a_gap_that_fits(match, wall, minute)


def _follows_a_gap_that_fits(match: Pattern, wall: datetime, minute: datetime) -> bool:
    before = (minute - MINUTE).astimezone(wall.tzinfo)
    skipped, end = before.replace(tzinfo=None, fold=0) + MINUTE, wall.replace(tzinfo=None, fold=0)
    return skipped < end and next(match.walls_after(skipped - MINUTE), end) < end


def occurrences(
    match: Pattern | Predicate, zone: tzinfo, after: datetime, until: datetime | None = None
) -> Iterator[datetime]:
    """The minutes that fire after that one, in order, in UTC; until there are none, or no more dates.

    Of a predicate nobody knows when it is true next, so it ends after a year without.
    """
    try:
        if not isinstance(match, Pattern):
            yield from _trials(match, zone, after, until)
        elif zone is UTC:
            for wall in match.walls_after(after):
                yield wall.replace(tzinfo=UTC)
        else:
            yield from _in_zone(match, zone, after)
    except OverflowError:  # the end of all dates
        return


def _trials(
    predicate: Predicate, zone: tzinfo, after: datetime, until: datetime | None
) -> Iterator[datetime]:
    last, minute = after, after
    while minute < until if until is not None else minute - last < _FOR_A_PREDICATE:
        minute += MINUTE
        if fires(predicate, zone, minute):
            last = minute
            yield minute


def _in_zone(match: Pattern, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    """As long as the clocks are not changed, the wall clock differs from UTC by the same offset."""
    begin: datetime | None = after
    while begin is not None:
        wall = begin.astimezone(zone)
        offset, seen, begin = _offset(wall), begin, None
        for found in match.walls_after(wall):
            minute = (found - offset).replace(tzinfo=UTC)
            changed = _first_change(zone, seen, minute)
            if changed is not None:
                if fires(match, zone, changed):
                    yield changed
                begin = changed
                break
            seen = minute
            if match.every_hour or minute.astimezone(zone).fold == 0:
                yield minute


def _first_change(zone: tzinfo, after: datetime, until: datetime) -> datetime | None:
    """The first minute, of those up to the last, at which clocks differ from the minute before."""
    offset, low = _offset(after.astimezone(zone)), after
    while low < until:
        # A day is short enough not to miss that they were changed and changed back.
        high = min(low + _DAY, until)
        if _offset(high.astimezone(zone)) != offset:
            while high - low > MINUTE:
                middle = low + (high - low) // (2 * MINUTE) * MINUTE
                if _offset(middle.astimezone(zone)) == offset:
                    low = middle
                else:
                    high = middle
            return high
        low = high
    return None


def _offset(wall: datetime) -> timedelta:
    """In whole minutes, though a century ago there were others."""
    return (wall.utcoffset() or timedelta(0)) // MINUTE * MINUTE
