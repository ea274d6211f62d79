"""`CronItem`: a task, and when jobs of it are to be added."""

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

from graphile_worker.cron.expression import Pattern, integer, parse_pattern
from graphile_worker.cron.schedule import as_minute, fires, occurrences, zone_of
from graphile_worker.durations import LONGEST, Duration, takes_one
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import MOST_JOB_KEY, JobKeyMode, JobSpec
from graphile_worker.payload import as_decoded

Predicate: TypeAlias = Callable[[datetime], object]
Overlap: TypeAlias = Literal["allow", "skip"]
FILL = re.compile(r"(?:[0-9]+[smhdw])+")
_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_LONGEST_FILL = timedelta.max.days


@dataclass(frozen=True)
class CronItem:
    """A task, and when jobs of it are to be added.

    Args:
        task: The identifier of the task.
        match: When: a pattern of five fields, as in a crontab, or a function that is called with each minute,
            an aware datetime in the item's time zone, and says whether it is one.
        identifier: What the schedule is known by in the database, and must be the only one of; by default the
            task. Whoever changes it makes a new schedule.
        payload: What the task gets. The key ``_cron`` is added to it: ``{"ts": …, "backfilled": …}``.
        backfill: How far to look back, when a worker starts, for minutes that no worker was there for.
        max_attempts: As for any job.
        queue_name: As for any job.
        priority: As for any job.
        job_key: As for any job: the next run replaces one that has not begun.
        job_key_mode: As for any job.
        tz: The time zone of the pattern, such as ``"Europe/Paris"``, or the `ZoneInfo` of that name; by
            default UTC.
        overlap: ``"skip"`` to add no job while the one before is waiting or running.
        flags: As for any job.
        pattern: Another name of `match`.
        fill: Another name of `backfill`, which may be seconds, or a phrase such as ``"2h30m"``.

    Raises:
        ConfigurationError: An argument is wrong.

    Example:
        >>> from datetime import UTC, datetime
        >>> from graphile_worker import CronItem
        >>> item = CronItem("report", "0 8 * * MON-FRI", tz="Europe/Paris", fill="2h")
        >>> str(item.next_after(datetime(2030, 3, 29, 12, tzinfo=UTC)))  # a Friday; Paris has winter time
        '2030-04-01 06:00:00+00:00'
        >>> item.backfill
        datetime.timedelta(seconds=7200)
    """

    task: str
    match: str | Predicate = ""
    identifier: str = ""
    payload: Any = None
    backfill: timedelta = timedelta(0)
    max_attempts: int | None = None
    queue_name: str | None = None
    priority: int | None = None
    job_key: str | None = None
    job_key_mode: JobKeyMode | str | None = None
    tz: str | ZoneInfo | None = None
    overlap: Overlap = "allow"
    flags: Iterable[str] | None = None
    pattern: InitVar[str | Predicate | None] = None
    fill: InitVar[Duration | str | None] = None
    _place = ""  # where it was declared, for messages: not a field

    def __post_init__(self, pattern: str | Predicate | None, fill: Duration | str | None) -> None:
        self._check_names()
        if pattern is not None:
            if self.match:
                raise ConfigurationError(f"{self} has match and pattern, which mean the same. Give one.")
            self._set("match", pattern)
        if fill is not None and self.backfill:
            raise ConfigurationError(f"{self} has backfill and fill, which mean the same. Give one.")
        self._set("backfill", parse_fill(self.backfill if fill is None else fill))
        self._set("job_key_mode", self._read_mode())
        if isinstance(self.flags, list | tuple | set):
            self._set("flags", frozenset(self.flags))
        if self.overlap not in {"allow", "skip"}:
            raise ConfigurationError(f"{self} has overlap={self.overlap!r}; it must be 'allow' or 'skip'.")
        if self.overlap == "skip" and self.job_key is not None:
            raise ConfigurationError(
                f"{self} has overlap='skip', which needs the job's key for itself, and job_key too. Give one."
            )
        if isinstance(self.tz, ZoneInfo) and self.tz.key:
            self._set("tz", self.tz.key)
        _ = self._match, self._zone  # they raise

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
        # Type checkers know what these are; people have been known to pass something else.
        task: object = self.task
        identifier: object = self.identifier
        if not isinstance(task, str) or not task:
            raise ConfigurationError(f"A cron item has the task {task!r}; it must be its identifier.")
        if not isinstance(identifier, str) or "\0" in identifier:
            raise ConfigurationError(
                f"An item of the task {task!r} has the identifier {identifier!r}, which is no text."
            )
        if not identifier:
            self._set("identifier", task)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash((self.task, self.identifier))  # a payload has none

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
        if not callable(match) or not takes_one(match):
            raise ConfigurationError(
                f"{self} has match={self.match!r}; it must be a pattern, or a function of a datetime."
            )
        return match

    @cached_property
    def _zone(self) -> tzinfo:
        if self.tz is None:
            return UTC
        try:
            return zone_of(self.tz)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self}: {error}") from None

    def matches(self, moment: datetime) -> bool:
        """Whether a job is to be added at that minute.

        Args:
            moment: Its seconds do not count. Without a time zone it is taken for UTC.

        Example:
            >>> from datetime import UTC, datetime
            >>> from graphile_worker import CronItem
            >>> CronItem("report", "0 8 * * *").matches(datetime(2030, 1, 1, 8, 0, 59, tzinfo=UTC))
            True
        """
        return fires(self._match, self._zone, as_minute(moment))

    def next_after(self, moment: datetime) -> datetime | None:
        """The first minute after that one at which a job is to be added, in UTC.

        Args:
            moment: Without a time zone it is taken for UTC.

        Returns:
            None if there is none: on 31 February nothing happens. A function of the caller's is tried for
            the minutes of a year.

        Example:
            >>> from datetime import UTC, datetime
            >>> from graphile_worker import CronItem
            >>> item = CronItem("leap", "0 0 29 2 *")
            >>> str(item.next_after(datetime(2097, 1, 1, tzinfo=UTC)))
            '2104-02-29 00:00:00+00:00'
        """
        return next(occurrences(self._match, self._zone, as_minute(moment)), None)

    def occurrences(self, after: datetime, until: datetime | None = None) -> Iterator[datetime]:
        """All minutes after the one, up to the other and including it, at which jobs are to be added, in UTC.

        Args:
            after: Without a time zone it is taken for UTC.
            until: By default there is no end, but that of all dates; or, of a function of the caller's, a
                year in which it was never true.

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

    def job_at(self, minute: datetime, *, backfilled: bool = False) -> JobSpec:
        """The job that is added at that minute.

        Raises:
            ConfigurationError: The database would not take such a job.
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
                job_key=self._own_key if self.overlap == "skip" else self.job_key,
                job_key_mode=None if self.overlap == "skip" else self.job_key_mode,
                flags=self.flags,
            )
        except InvalidJobError as error:
            raise ConfigurationError(f"{self}: {error}") from None

    @cached_property
    def _own_key(self) -> str:
        """The key by which the job before is found: there are not two items with the same identifier."""
        key = f"_cron:{self.identifier}"
        return key if len(key) <= MOST_JOB_KEY else f"_cron:{sha256(key.encode()).hexdigest()}"

    @cached_property
    def _stored_payload(self) -> Mapping[str, Any]:
        payload = {} if self.payload is None else as_decoded(self.payload)
        if not isinstance(payload, dict):
            raise ConfigurationError(f"{self} has the payload {self.payload!r}; it must be a JSON object.")
        return payload


@lru_cache(maxsize=128)
def _javascript_iso(minute: datetime) -> str:
    """A minute as JavaScript writes it: one text for all items that fire in it."""
    return f"{minute.isoformat()[:16]}:00.000Z"


def remember_place(item: CronItem, place: str) -> None:
    """Remember where an item was declared, unless that is known: for a message that two are the same."""
    if not item._place:  # noqa: SLF001 - not a part of what users see
        object.__setattr__(item, "_place", place)


def parse_cron_items(items: Iterable[CronItem | Mapping[str, Any]]) -> list[CronItem]:
    """Items, given as they are or as dictionaries of their arguments, checked as a whole.

    Raises:
        ConfigurationError: One is wrong, its jobs could not be added, or two have the same identifier.

    Example:
        >>> from graphile_worker import parse_cron_items
        >>> [item] = parse_cron_items([{"task": "report", "match": "0 8 * * *"}])
        >>> item.identifier
        'report'
    """
    if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
        raise ConfigurationError(
            f"Cron items are a list of CronItem or dict, not {items!r}. A crontab's text is read by "
            "parse_crontab."
        )
    found: dict[str, CronItem] = {}
    for number, given in enumerate(items):
        item = given if isinstance(given, CronItem) else _item_of(given)
        remember_place(item, f"cron_items[{number}]")
        item.job_at(datetime.now(UTC))  # raises if the database would not take it
        if item.identifier in found:
            places = [one._place for one in (found[item.identifier], item)]  # noqa: SLF001
            raise ConfigurationError(
                f"There are two cron items with the identifier {item.identifier!r}: "
                f"{' and '.join(places)}. Give one another identifier, by identifier=… (in a crontab ?id=…): "
                "a schedule is known by it."
            )
        found[item.identifier] = item
    return list(found.values())


def _item_of(given: object) -> CronItem:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"A cron item is a CronItem or a dict, not {given!r}.")
    names = [*(field.name for field in fields(CronItem)), "pattern", "fill"]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(names)}."
            raise ConfigurationError(f"A cron item has no {name!r}. {hint}")
    if "task" not in given:
        raise ConfigurationError(f"A cron item needs a task: {given!r}.")
    return CronItem(**given)


def parse_fill(period: object) -> timedelta:
    """How far to look back: seconds, a timedelta, or a phrase such as ``4w3d2h1m``.

    >>> parse_fill("4w3d2h1m") // timedelta(minutes=1)
    44761
    """
    if isinstance(period, timedelta) and period >= timedelta(0):
        return period
    if isinstance(period, int | float) and not isinstance(period, bool) and 0 <= period <= LONGEST:
        return timedelta(seconds=period)
    if not isinstance(period, str) or not FILL.fullmatch(period):
        raise ConfigurationError(
            f"A backfill of {period!r} is not understood; it must be seconds, a timedelta, or a phrase of "
            "numbers, each with w, d, h, m or s: '4w3d2h1m'."
        )
    total = sum(integer(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[0-9]+[smhdw]", period))
    days, rest = divmod(total, _UNITS["d"])
    return timedelta(days=days, seconds=rest) if days < _LONGEST_FILL else timedelta(days=_LONGEST_FILL)


def fill_phrase(period: timedelta) -> str:
    """The phrase that means this.

    >>> fill_phrase(timedelta(days=8, minutes=90))
    '1w1d1h30m'
    """
    rest, phrase = period.days * _UNITS["d"] + period.seconds, ""
    for unit, size in _UNITS.items():
        count, rest = divmod(rest, size)
        phrase += f"{count}{unit}" if count else ""
    return phrase or "0s"
