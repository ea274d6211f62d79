"""Maps patterns to moments, across time zones and daylight saving time changes.

A pattern describes wall-clock times. When clocks change, some wall-clock minutes are skipped and others
repeat. There are two kinds of patterns:

- A pattern that matches in all 24 hours (``*/5 * * * *``, ``30 * * * *``) describes an interval and follows
  real time. It fires at each matching minute that the wall clock shows: in both of two repeated hours, and
  not in a skipped hour. So ``30 * * * *`` always fires one hour after the last time.
- Any other pattern (``30 2 * * *``, ``0 */2 * * *``) describes times of day, and each fires once. A repeated
  minute fires the first time. If matching minutes are skipped, however many, the first minute after the gap
  fires once.

For example, in Europe/Paris the clock jumps from 02:00 to 03:00 on the last Sunday of March, and
``30 2 * * *`` fires at 03:00. On the last Sunday of October, 02:59 is followed by 02:00, and the pattern
fires at the first 02:30.

A predicate is called with each real minute, so it decides for itself.
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
_UTC_NAMES = {"UTC", "Etc/UTC"}
_PREDICATE_SEARCH = timedelta(days=366)


def get_zone(name: object) -> tzinfo:
    """Return a time zone by name.

    >>> get_zone("Europe/Pariss")
    Traceback (most recent call last):
    graphile_worker.errors.ConfigurationError: There is no time zone 'Europe/Pariss'; did you mean \
Europe/Paris?
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"The time zone {name!r} must be a name, such as 'Europe/Paris' or 'UTC'.")
    if name in _UTC_NAMES:  # available without a time zone database
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # ValueError: a path; OSError: a folder
        known = zoneinfo.available_timezones()
    if not known:
        raise ConfigurationError(
            f"The time zone {name!r} cannot be loaded, because this machine has no time zone database. "
            "Install one: pip install tzdata."
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "use an IANA name such as Europe/Paris."
    raise ConfigurationError(f"There is no time zone {name!r}; {hint}")


def as_minute(moment: datetime) -> datetime:
    """Return the start of a moment's minute, in UTC. A moment without a time zone counts as UTC."""
    if moment.tzinfo is UTC and not moment.second and not moment.microsecond:
        return moment
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).replace(second=0, microsecond=0)


def fires(match: Pattern | Predicate, zone: tzinfo, minute: datetime) -> bool:
    """Return whether a job is due in this minute, given in UTC."""
    wall = minute if zone is UTC else minute.astimezone(zone)
    if not isinstance(match, Pattern):
        return bool(match(wall))
    if zone is UTC or match.every_hour:
        return match.matches_wall_time(wall)
    return (wall.fold == 0 and match.matches_wall_time(wall)) or _ends_matching_gap(match, wall, minute)


def _ends_matching_gap(match: Pattern, wall: datetime, minute: datetime) -> bool:
    """Return whether clocks jumped forward to this minute, over minutes that match."""
    before = (minute - MINUTE).astimezone(wall.tzinfo)
    skipped, end = before.replace(tzinfo=None, fold=0) + MINUTE, wall.replace(tzinfo=None, fold=0)
    return skipped < end and next(match.wall_times_after(skipped - MINUTE), end) < end


def occurrences(
    match: Pattern | Predicate, zone: tzinfo, after: datetime, until: datetime | None = None
) -> Iterator[datetime]:
    """Yield the minutes after this one at which jobs are due, in order, in UTC.

    A predicate has to be called for each minute, so the search ends after a year without a match.
    """
    try:
        if not isinstance(match, Pattern):
            yield from _predicate_occurrences(match, zone, after, until)
        elif zone is UTC:
            for wall in match.wall_times_after(after):
                yield wall.replace(tzinfo=UTC)
        else:
            yield from _zone_occurrences(match, zone, after)
    except OverflowError:  # the last date that datetime supports
        return


def _predicate_occurrences(
    predicate: Predicate, zone: tzinfo, after: datetime, until: datetime | None
) -> Iterator[datetime]:
    last, minute = after, after
    while minute < until if until is not None else minute - last < _PREDICATE_SEARCH:
        minute += MINUTE
        if fires(predicate, zone, minute):
            last = minute
            yield minute


def _zone_occurrences(match: Pattern, zone: tzinfo, after: datetime) -> Iterator[datetime]:
    """Yield the due minutes in a time zone.

    Between two clock changes the offset from UTC is constant, so each such period is converted with one
    offset.
    """
    begin: datetime | None = after
    while begin is not None:
        wall = begin.astimezone(zone)
        offset, seen, begin = _offset(wall), begin, None
        for found in match.wall_times_after(wall):
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
    """Return the first minute of the period at which the offset changes; None if it does not change."""
    offset, low = _offset(after.astimezone(zone)), after
    while low < until:
        # Steps of a day are short enough not to miss a change that is soon changed back.
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
    """Return the offset from UTC in whole minutes. Some historical offsets include seconds."""
    return (wall.utcoffset() or timedelta(0)) // MINUTE * MINUTE
