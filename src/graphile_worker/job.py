"""The values that describe a job: `Job`, as it is stored, and `JobSpec`, as it is asked for."""

from __future__ import annotations

from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker.errors import InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_IDENTIFIER = MOST_QUEUE_NAME = 128
MOST_JOB_KEY = 512
SMALLINT = range(-(2**15), 2**15)
TIMEOUT_FLAG = "timeout:"
"""A job whose timeout is not its task's has a flag that begins like this, followed by seconds."""
_LONGEST_DELAY = timedelta(days=365_000)
"""A thousand years: from now it stays within the years that a datetime has."""


class JobKeyMode(StrEnum):
    """What adding a job does if its key is in use.

    >>> JobKeyMode.PRESERVE_RUN_AT == "preserve_run_at"
    True
    """

    REPLACE = "replace"
    """Overwrite the pending job, its time included: debouncing."""
    PRESERVE_RUN_AT = "preserve_run_at"
    """Overwrite the pending job but keep its time: throttling."""
    UNSAFE_DEDUPE = "unsafe_dedupe"
    """Change nothing, even if the job with that key runs or has failed for good."""


class JobState(StrEnum):
    """Where a job stands, by the database's time."""

    READY = "ready"
    """Due, and waiting for a worker, or for its queue."""
    SCHEDULED = "scheduled"
    """Its time has not come: a first run, or a retry."""
    RUNNING = "running"
    """Locked by a worker."""
    FAILED = "failed"
    """Out of attempts; it stays until somebody completes, retries or cleans it up."""


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job as the database has it: the columns of its row, and the names of its task and queue."""

    id: int
    task_identifier: str
    queue_name: str | None
    payload: Any
    priority: int
    run_at: datetime
    attempts: int
    max_attempts: int
    last_error: str | None
    created_at: datetime
    updated_at: datetime
    key: str | None
    locked_at: datetime | None
    locked_by: str | None
    revision: int
    flags: frozenset[str]
    is_available: bool
    task_id: int
    job_queue_id: int | None
    state: JobState


class _What(msgspec.Struct, frozen=True, gc=False):
    identifier: str
    payload: Any = None


class JobSpec(_What, frozen=True, kw_only=True, gc=False):
    """A job to be added. What is None takes the database's default.

    A wrong value is refused here, with an `InvalidJobError` that names it.

    >>> JobSpec("send", {"to": "Ann"}, priority=-1).priority
    -1
    >>> JobSpec("send", max_attempts=0)
    Traceback (most recent call last):
    graphile_worker.errors.InvalidJobError: max_attempts is 0; it must be from 1 to 32767.
    """

    queue_name: str | None = None
    run_at: datetime | timedelta | None = None
    max_attempts: int | None = None
    job_key: str | None = None
    job_key_mode: JobKeyMode | str | None = None
    priority: int | None = None
    flags: Iterable[str] | None = None

    def __post_init__(self) -> None:
        check_text("identifier", self.identifier, most=MOST_IDENTIFIER, code="GWBID")
        if self.queue_name is not None:
            check_text("queue_name", self.queue_name, most=MOST_QUEUE_NAME, code="GWBQN")
        if self.job_key is not None:
            check_text("job_key", self.job_key, most=MOST_JOB_KEY, code="GWBJK")
        if self.job_key_mode is not None and self.job_key_mode not in _KEY_MODES:
            raise InvalidJobError(
                f"job_key_mode is {self.job_key_mode!r}; it must be one of {', '.join(_KEY_MODES)}.",
                argument="job_key_mode",
                code="GWBKM",
            )
        if self.max_attempts is not None:
            check_integer("max_attempts", self.max_attempts, range(1, SMALLINT.stop), code="GWBMA")
        if self.priority is not None:
            check_integer("priority", self.priority, SMALLINT)
        if self.run_at is not None:
            at = read_instant("run_at", self.run_at)
            if at is not self.run_at:  # it was a text
                msgspec.structs.force_setattr(self, "run_at", at)
        if self.flags is not None:
            msgspec.structs.force_setattr(self, "flags", checked_flags(self.flags))

    def replace(self, **changes: Any) -> JobSpec:
        """The same but for these.

        >>> JobSpec("send", {"to": "Ann"}).replace(priority=5).priority
        5
        """
        return msgspec.structs.replace(self, **changes)


_KEY_MODES = [mode.value for mode in JobKeyMode]


def check_integer(argument: str, value: object, allowed: range, *, code: str | None = None) -> None:
    """Refuse what does not fit the column."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidJobError(
            f"{argument} is {value!r}; it must be an integer.", argument=argument, code=code
        )
    if value not in allowed:
        raise InvalidJobError(
            f"{argument} is {value}; it must be from {allowed[0]} to {allowed[-1]}.",
            argument=argument,
            code=code,
        )


def read_instant(argument: str, value: object) -> datetime | timedelta:
    """Return a moment that can be stored: an aware datetime, or a timedelta from now.

    Refuses anything else, except an ISO 8601 text with an offset from UTC.
    """
    if isinstance(value, timedelta):
        if not -_LONGEST_DELAY <= value <= _LONGEST_DELAY:
            raise InvalidJobError(
                f"{argument} is {value}; it must not be more than {_LONGEST_DELAY.days} days.",
                argument=argument,
            )
        return value
    moment = _read_iso(argument, value) if isinstance(value, str) else value
    _check_aware(argument, moment, ", an ISO 8601 text with an offset, or a timedelta from now")
    return moment  # type: ignore[return-value]


def _read_iso(argument: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise InvalidJobError(
            f"{argument} is {text!r}; it must be ISO 8601 with an offset from UTC, for example "
            "'2030-01-31T12:00:00Z' or '2030-01-31T12:00:00+01:00'.",
            argument=argument,
        )
    return moment


def _check_aware(argument: str, value: object, alternative: str = "") -> None:
    if not isinstance(value, datetime):
        raise InvalidJobError(
            f"{argument} is {value!r}; it must be an aware datetime{alternative}.", argument=argument
        )
    if _offset(argument, value) is None:
        raise InvalidJobError(
            f"{argument} is {value!r}, which has no time zone, so it means another moment on another "
            f"machine. Pass an aware datetime, for example datetime.now(UTC){alternative}.",
            argument=argument,
        )


def _offset(argument: str, value: datetime) -> timedelta | None:
    offset = None
    try:
        offset = value.utcoffset()
        if offset is not None and not MINYEAR < value.year < MAXYEAR:
            value.astimezone(UTC)
    except OverflowError:
        raise InvalidJobError(
            f"{argument} is {value}, which has no date in UTC: it must be from the year {MINYEAR} to "
            f"{MAXYEAR} there.",
            argument=argument,
        ) from None
    return offset


def as_utc(argument: str, value: datetime) -> datetime:
    """The same moment in UTC; refuses what has no time zone."""
    _check_aware(argument, value)
    return value.astimezone(UTC)


def check_text(argument: str, value: object, *, most: int, code: str | None = None) -> None:
    """Refuse what is no text of that length that PostgreSQL can store."""
    if not isinstance(value, str):
        problem = "it must be a str"
    elif not value:
        problem = f"it must have 1 to {most} characters"
    elif len(value) > most:
        problem = f"it has {len(value)} characters, and at most {most} are stored"
    elif "\0" in value or not _is_unicode(value):
        problem = "PostgreSQL cannot store it as text"
    else:
        return
    shown = repr(value) if len(repr(value)) <= most else repr(value)[:60] + "…"
    raise InvalidJobError(f"{argument} is {shown}; {problem}.", argument=argument, code=code)


def checked_flags(flags: Iterable[str]) -> frozenset[str]:
    """The flags; refuses what is no list of strings."""
    try:
        # A string is iterable too, and was meant as one flag.
        checked = frozenset((None,) if isinstance(flags, str) else flags)
    except TypeError:
        checked = frozenset((None,))
    good = frozenset(
        flag for flag in checked if isinstance(flag, str) and "\0" not in flag and _is_unicode(flag)
    )
    if good != checked:
        raise InvalidJobError(f"flags is {flags!r}; it must be a list or set of strings.", argument="flags")
    return good


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
