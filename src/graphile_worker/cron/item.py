"""`CronItem`: the schedule of a recurring task."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, fields
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import takewhile
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

from graphile_worker._base.durations import LONGEST, Duration, accepts_one_argument
from graphile_worker._base.payload import as_decoded
from graphile_worker.cron.expression import Pattern, integer, parse_pattern
from graphile_worker.cron.schedule import as_minute, fires, get_zone, occurrences
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import MAX_JOB_KEY_LENGTH, JobKeyMode, JobSpec

Predicate: TypeAlias = Callable[[datetime], object]
Overlap: TypeAlias = Literal["allow", "skip"]
FILL = re.compile(r"(?:[0-9]+[smhdw])+")
_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_LONGEST_FILL = timedelta.max.days


@dataclass(frozen=True)
class CronItem:
    """The schedule of a recurring task.

    Args:
        task: The identifier of the task.
        match: When to add a job: a pattern of five fields, as in a crontab, or a function. The function
            receives each minute, an aware datetime in the item's time zone, and returns whether it matches.
        identifier: The unique name of the schedule in the database. Default: the task. A changed identifier
            creates a new schedule.
        payload: The payload of the jobs. The key ``_cron`` is added: ``{"ts": …, "backfilled": …}``.
        backfill: How far back a starting worker adds jobs for minutes in which no worker ran.
        max_attempts: As for any job.
        queue_name: As for any job.
        priority: As for any job.
        job_key: As for any job: a new job replaces one that has not started.
        job_key_mode: As for any job.
        tz: The time zone of the pattern, such as ``"Europe/Paris"`` or a `ZoneInfo`. Default: UTC.
        overlap: ``"skip"`` adds no job while the previous one is waiting or running.
        flags: As for any job.
        pattern: Another name for `match`.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> from datetime import UTC, datetime
        >>> from graphile_worker import CronItem
        >>> item = CronItem("report", "0 8 * * MON-FRI", tz="Europe/Paris", backfill="2h")
        >>> str(item.next_after(datetime(2030, 3, 29, 12, tzinfo=UTC)))  # a Friday; Paris has winter time
        '2030-04-01 06:00:00+00:00'
        >>> item.backfill
        datetime.timedelta(seconds=7200)
    """

    task: str
    match: str | Predicate = ""
    identifier: str = ""
    payload: Any = None
    backfill: Duration | str = timedelta(0)
    max_attempts: int | None = None
    queue_name: str | None = None
    priority: int | None = None
    job_key: str | None = None
    job_key_mode: JobKeyMode | str | None = None
    tz: str | ZoneInfo | None = None
    overlap: Overlap = "allow"
    flags: Iterable[str] | None = None
    pattern: InitVar[str | Predicate | None] = None
    _location = ""  # where the item was declared, for messages; without annotation it is not a field

    def __post_init__(self, pattern: str | Predicate | None) -> None:
        self._check_names()
        if pattern is not None:
            if self.match:
                raise ConfigurationError(f"{self} has both match and pattern, which mean the same. Pass one.")
            self._set("match", pattern)
        self._set("backfill", parse_fill(self.backfill))
        self._set("job_key_mode", self._read_mode())
        if isinstance(self.flags, list | tuple | set):
            self._set("flags", frozenset(self.flags))
        if self.overlap not in {"allow", "skip"}:
            raise ConfigurationError(f"{self} has overlap={self.overlap!r}; it must be 'allow' or 'skip'.")
        if self.overlap == "skip" and self.job_key is not None:
            raise ConfigurationError(
                f"{self} has both overlap='skip' and job_key, but overlap='skip' sets the job key itself. "
                "Pass one."
            )
        if isinstance(self.tz, ZoneInfo) and self.tz.key:
            self._set("tz", self.tz.key)
        _ = self._match, self._zone  # raise an error if the pattern or the time zone is invalid

    def _read_mode(self) -> JobKeyMode | None:
        if self.job_key_mode is None:
            return JobKeyMode.REPLACE if self.job_key else None
        try:
            return JobKeyMode(self.job_key_mode)
        except ValueError:
            modes = ", ".join(JobKeyMode)
            raise ConfigurationError(
                f"{self} has job_key_mode={self.job_key_mode!r}; it must be one of {modes}."
            ) from None

    def _check_names(self) -> None:
        # Declared as object, because type checkers call these checks redundant. Untyped callers need them.
        task: object = self.task
        identifier: object = self.identifier
        if not isinstance(task, str) or not task:
            raise ConfigurationError(f"A cron item has the task {task!r}; it must be a task's identifier.")
        if not isinstance(identifier, str) or "\0" in identifier:
            raise ConfigurationError(
                f"A cron item of the task {task!r} has the identifier {identifier!r}; it must be a string "
                "without null characters."
            )
        if not identifier:
            self._set("identifier", task)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash((self.task, self.identifier))  # a payload is not hashable

    def __str__(self) -> str:
        return f"The cron item {self.identifier!r}"

    @cached_property
    def _match(self) -> Pattern | Predicate:
        if isinstance(self.match, str):
            try:
                return parse_pattern(self.match)
            except ConfigurationError as error:
                raise ConfigurationError(f"{self}: {error}") from None
        match: object = self.match
        if not callable(match) or not accepts_one_argument(match):
            raise ConfigurationError(
                f"{self} has match={self.match!r}; it must be a pattern, or a function of a datetime."
            )
        return match

    @cached_property
    def _zone(self) -> tzinfo:
        if self.tz is None:
            return UTC
        try:
            return get_zone(self.tz)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self}: {error}") from None

    def matches(self, moment: datetime) -> bool:
        """Return whether a job is due in this minute.

        Args:
            moment: The time. Seconds are ignored. Without a time zone it is in UTC.

        Example:
            >>> from datetime import UTC, datetime
            >>> from graphile_worker import CronItem
            >>> CronItem("report", "0 8 * * *").matches(datetime(2030, 1, 1, 8, 0, 59, tzinfo=UTC))
            True
        """
        return fires(self._match, self._zone, as_minute(moment))

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the next minute at which a job is due, in UTC.

        Args:
            moment: The time to start after. Without a time zone it is in UTC.

        Returns:
            None if no minute matches, for example because the pattern is for 31 February. A function is
            called for each minute of one year.

        Example:
            >>> from datetime import UTC, datetime
            >>> from graphile_worker import CronItem
            >>> item = CronItem("leap", "0 0 29 2 *")
            >>> str(item.next_after(datetime(2097, 1, 1, tzinfo=UTC)))
            '2104-02-29 00:00:00+00:00'
        """
        return next(occurrences(self._match, self._zone, as_minute(moment)), None)

    def occurrences(self, after: datetime, until: datetime | None = None) -> Iterator[datetime]:
        """Return all minutes at which jobs are due, in UTC.

        Args:
            after: The time to start after. Without a time zone it is in UTC.
            until: The last minute to include. By default there is no end, except the last possible date. If
                `match` is a function, a year without a match ends the search.

        Example:
            >>> from datetime import UTC, datetime
            >>> from graphile_worker import CronItem
            >>> item = CronItem("report", "0 */8 * * *")
            >>> [at.hour for at in item.occurrences(datetime(2030, 1, 1), datetime(2030, 1, 2))]
            [8, 16, 0]
        """
        if until is None:
            return occurrences(self._match, self._zone, as_minute(after))
        last = as_minute(until)
        return takewhile(lambda at: at <= last, occurrences(self._match, self._zone, as_minute(after), last))

    @property
    def backfill_period(self) -> timedelta:
        """How far back to add jobs for missed minutes."""
        assert isinstance(self.backfill, timedelta)  # noqa: S101 - converted by __post_init__
        return self.backfill

    def job_at(self, minute: datetime, *, backfilled: bool = False) -> JobSpec:
        """Return the job for this minute.

        Raises:
            ConfigurationError: The database would reject the job.
        """
        ts = as_minute(minute)
        cron = {"ts": _javascript_iso(ts), "backfilled": backfilled}
        try:
            return JobSpec(
                self.task,
                {**self._stored_payload, "_cron": cron},
                run_at=ts,
                max_attempts=self.max_attempts,
                queue_name=self.queue_name,
                priority=self.priority,
                job_key=self._overlap_key if self.overlap == "skip" else self.job_key,
                job_key_mode=None if self.overlap == "skip" else self.job_key_mode,
                flags=self.flags,
            )
        except InvalidJobError as error:
            raise ConfigurationError(f"{self}: {error}") from None

    @cached_property
    def _overlap_key(self) -> str:
        """The key that identifies the previous job. It is unique because the item's identifier is."""
        key = f"_cron:{self.identifier}"
        return key if len(key) <= MAX_JOB_KEY_LENGTH else f"_cron:{sha256(key.encode()).hexdigest()}"

    @cached_property
    def _stored_payload(self) -> Mapping[str, Any]:
        payload = {} if self.payload is None else as_decoded(self.payload)
        if not isinstance(payload, dict):
            raise ConfigurationError(f"{self} has the payload {self.payload!r}; it must be a JSON object.")
        return payload


@lru_cache(maxsize=128)
def _javascript_iso(minute: datetime) -> str:
    """Format a minute as JavaScript does. Cached, because many items may be due in the same minute."""
    return f"{minute.isoformat()[:16]}:00.000Z"


def set_location(item: CronItem, location: str) -> None:
    """Store where an item was declared, unless it is known. An error about duplicates names it."""
    if not item._location:  # noqa: SLF001 - private to this package
        object.__setattr__(item, "_location", location)


def parse_cron_items(items: Iterable[CronItem | Mapping[str, Any]]) -> list[CronItem]:
    """Check cron items, given as `CronItem` objects or as dictionaries of their arguments.

    Raises:
        ConfigurationError: An item or its jobs are invalid, or two items have the same identifier.

    Example:
        >>> from graphile_worker import parse_cron_items
        >>> [item] = parse_cron_items([{"task": "report", "match": "0 8 * * *"}])
        >>> item.identifier
        'report'
    """
    if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
        raise ConfigurationError(
            f"Cron items must be a list of CronItem or dict, not {items!r}. Use parse_crontab for the text "
            "of a crontab."
        )
    found: dict[str, CronItem] = {}
    for number, given in enumerate(items):
        item = given if isinstance(given, CronItem) else _item_from_dict(given)
        set_location(item, f"cron_items[{number}]")
        item.job_at(datetime.now(UTC))  # raises an error if the database would reject the job
        if item.identifier in found:
            locations = [one._location for one in (found[item.identifier], item)]  # noqa: SLF001
            raise ConfigurationError(
                f"There are two cron items with the identifier {item.identifier!r}: "
                f"{' and '.join(locations)}. Give one of them another identifier with identifier=… (in a "
                "crontab: ?id=…)."
            )
        found[item.identifier] = item
    return list(found.values())


def _item_from_dict(given: object) -> CronItem:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"A cron item must be a CronItem or a dict, not {given!r}.")
    names = [*(field.name for field in fields(CronItem)), "pattern"]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Options: {', '.join(names)}."
            raise ConfigurationError(f"A cron item has no option {name!r}. {hint}")
    if "task" not in given:
        raise ConfigurationError(f"A cron item needs a task: {given!r}.")
    return CronItem(**given)


def parse_fill(period: object) -> timedelta:
    """Parse a backfill period: seconds, a timedelta, or a phrase such as ``4w3d2h1m``.

    >>> parse_fill("4w3d2h1m") // timedelta(minutes=1)
    44761
    """
    if isinstance(period, timedelta) and period >= timedelta(0):
        return period
    if isinstance(period, int | float) and not isinstance(period, bool) and 0 <= period <= LONGEST:
        return timedelta(seconds=period)
    if not isinstance(period, str) or not FILL.fullmatch(period):
        raise ConfigurationError(
            f"Invalid backfill {period!r}: it must be seconds, a timedelta, or a phrase of numbers, each "
            "with w, d, h, m or s: '4w3d2h1m'."
        )
    total = sum(integer(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[0-9]+[smhdw]", period))
    days, rest = divmod(total, _UNITS["d"])
    return timedelta(days=days, seconds=rest) if days < _LONGEST_FILL else timedelta(days=_LONGEST_FILL)


def format_fill(period: timedelta) -> str:
    """Format a backfill period as a phrase.

    >>> format_fill(timedelta(days=8, minutes=90))
    '1w1d1h30m'
    """
    rest, phrase = period.days * _UNITS["d"] + period.seconds, ""
    for unit, size in _UNITS.items():
        count, rest = divmod(rest, size)
        phrase += f"{count}{unit}" if count else ""
    return phrase or "0s"
