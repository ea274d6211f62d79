"""The values that describe a job: `Job`, which is stored, and `JobSpec`, which is to be added."""

from __future__ import annotations

from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from graphile_worker.errors import InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._base.durations import Duration

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

MAX_IDENTIFIER_LENGTH = MAX_QUEUE_NAME_LENGTH = 128
MAX_JOB_KEY_LENGTH = 512
MAX_PROGRESS_MESSAGE = 500
"""Characters of a progress message that are kept."""
SMALLINT = range(-(2**15), 2**15)
TIMEOUT_FLAG = "timeout:"
"""Prefix of the flag that holds a job's own timeout in seconds, if it is not its task's."""
_LONGEST_DELAY = timedelta(days=365_000)
"""A thousand years. Added to the current time, it stays within the range of datetime."""


class JobKeyMode(StrEnum):
    """What happens when a job is added and its key is already in use.

    >>> JobKeyMode.PRESERVE_RUN_AT == "preserve_run_at"
    True
    """

    REPLACE = "replace"
    """Overwrite the pending job, including its `run_at`: debouncing."""
    PRESERVE_RUN_AT = "preserve_run_at"
    """Overwrite the pending job, but keep its `run_at`: throttling."""
    UNSAFE_DEDUPE = "unsafe_dedupe"
    """Change nothing, even if the job with that key is running or has failed permanently."""


class JobState(StrEnum):
    """The state of a job, by the database's clock."""

    READY = "ready"
    """The job is due and waits for a worker, or for its serial queue."""
    SCHEDULED = "scheduled"
    """The job's `run_at` is in the future: its first run or a retry."""
    RUNNING = "running"
    """A worker has locked the job."""
    FAILED = "failed"
    """The job has no attempts left. It stays in the table until it is completed, retried or cleaned up."""


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored job: the columns of its row, and the names of its task and queue."""

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
    failed_at: datetime | None = None
    """When the failure that `last_error` describes was recorded, by the database's clock.

    Only `get_job` and `list_jobs` read it. None if the job did not fail, if another program recorded the
    failure (a Node worker, SQL), or if the job was rescheduled since.
    """
    error_type: str | None = None
    """The type of the exception that `last_error` describes, for example ``httpx.ReadTimeout``.

    None in the same cases as `failed_at`, and if the job failed without an exception.
    """
    traceback: str | None = None
    """The traceback of that exception, from the first frame of the task. A long one is shortened."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is, as its task has reported it with `JobContext.progress`.

    >>> from datetime import UTC, datetime
    >>> Progress(value=0.4, message="page 4 of 10", at=datetime.now(UTC)).value
    0.4
    """

    value: float | None
    """The part that is done, from 0 to 1; None if that is unknown."""
    message: str | None
    """What the task is doing."""
    at: datetime
    """When the task reported it, by the queue's clock. It may have been in an earlier attempt."""


def check_progress(value: object, message: object, at: datetime) -> Progress:
    """Return the progress that a task reports.

    Raises:
        InvalidJobError: The value is not a number from 0 to 1 or None, or the message is not a string.
    """
    number = None
    if value is not None:
        try:
            number = None if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or not 0 <= number <= 1:
            raise InvalidJobError(
                f"progress is {value!r}; it must be a number from 0 to 1, or None.", argument="progress"
            )
    if message is not None and not isinstance(message, str):
        raise InvalidJobError(
            f"The message of progress is {message!r}; it must be a str or None.", argument="message"
        )
    if message is not None:
        if len(message) > MAX_PROGRESS_MESSAGE:
            message = message[: MAX_PROGRESS_MESSAGE - 1] + "…"
        message = message.replace("\0", "\\0").encode(errors="backslashreplace").decode()
    return Progress(value=number, message=message, at=at)


class AwaitedJob(NamedTuple):
    """A job whose result is awaited: what is known about it."""

    id: int
    task_identifier: str = ""
    since: datetime | None = None
    """When the job was added; None if that is not known."""
    is_called: bool = False
    """Whether the server announces the job's end."""
    was_added_in_transaction: bool = False
    """Whether the job was added on a connection of the caller, who may not have committed it."""

    def __str__(self) -> str:
        return f"Job {self.id} ({self.task_identifier})" if self.task_identifier else f"Job {self.id}"


class ResultReader(Protocol[V_co]):
    """Waits for the results of the jobs of one task, and converts them."""

    async def read(self, job: AwaitedJob, limit: Duration | None) -> V_co:
        """Wait for the job's result."""

    def read_sync(self, job: AwaitedJob, limit: Duration | None) -> V_co:
        """Wait for the job's result, from code without an event loop."""

    async def progress(self, job: AwaitedJob) -> Progress | None:
        """Return what the job has reported last."""

    def progress_sync(self, job: AwaitedJob) -> Progress | None:
        """Return what the job has reported last, from code without an event loop."""


class JobHandle(Job, Generic[V], frozen=True, kw_only=True, gc=True, dict=True):
    """A job that was added with `Task.enqueue`: a `Job`, and the way to its result.

    It compares equal to the `Job` with the same values. Pickled or encoded, it is a plain `Job`.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> app = App(dsn=dsn)
        >>> @app.task(keep_result=True)
        ... async def total(prices: list[int]) -> int:
        ...     return sum(prices)
        >>> async def main():
        ...     await app.migrate()
        ...     job = await total.enqueue([3, 4])
        ...     async with app.running():
        ...         return await job.result(timeout=30)
        >>> asyncio.run(main())
        7
    """

    @classmethod
    def of(cls, job: Job, reader: ResultReader[V], *, in_transaction: bool = False) -> JobHandle[V]:
        """Return the handle of a job.

        Args:
            job: The job.
            reader: What waits for its result.
            in_transaction: Whether the job was added on a connection of the caller.
        """
        handle = cls(**msgspec.structs.asdict(job))
        # Not fields of the struct, which is frozen, because they are not values.
        handle.__dict__["reader"] = reader
        handle.__dict__["awaited"] = AwaitedJob(
            job.id, job.task_identifier, job.created_at, was_added_in_transaction=in_transaction
        )
        return handle

    async def result(self, timeout: Duration | None = None) -> V:  # noqa: ASYNC109 - the error names the job
        """Wait until the job has ended, and return the value that its task returned.

        Failed attempts that are retried do not end the wait. The task must keep its results: see
        docs/guides/results.md.

        Args:
            timeout: How long to wait, in seconds or as a timedelta; 0 only checks. By default without limit.

        Raises:
            JobFailedError: The job has failed permanently.
            JobCancelledError: The job was cancelled.
            ResultUnknownError: The result is not known: the task does not keep it, or a Node worker ran the
                job.
            ResultTimeoutError: The job has not ended in time. It goes on. It is also a `TimeoutError`.
        """
        reader: ResultReader[V] = self.__dict__["reader"]
        return await reader.read(self.__dict__["awaited"], timeout)

    def result_sync(self, timeout: Duration | None = None) -> V:
        """Wait for the result like `result`, from code without an event loop."""
        reader: ResultReader[V] = self.__dict__["reader"]
        return reader.read_sync(self.__dict__["awaited"], timeout)

    async def progress(self) -> Progress | None:
        """Return what the job has reported last with `JobContext.progress`.

        Returns:
            The progress; None if the job has reported none, or has ended.
        """
        reader: ResultReader[V] = self.__dict__["reader"]
        return await reader.progress(self.__dict__["awaited"])

    def progress_sync(self) -> Progress | None:
        """Return what the job has reported last, from code without an event loop."""
        reader: ResultReader[V] = self.__dict__["reader"]
        return reader.progress_sync(self.__dict__["awaited"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Job):
            return NotImplemented
        return msgspec.structs.astuple(self) == msgspec.structs.astuple(other)

    def __hash__(self) -> int:
        return hash(_plain_job(msgspec.structs.asdict(self)))

    def __copy__(self) -> JobHandle[V]:
        return self  # it is frozen, and a copy would have no reader

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_job, (msgspec.structs.asdict(self),)  # another process has other connections


def _plain_job(fields: dict[str, Any]) -> Job:
    return Job(**fields)


class _PositionalFields(msgspec.Struct, frozen=True, gc=False):
    identifier: str
    payload: Any = None


class JobSpec(_PositionalFields, frozen=True, kw_only=True, gc=False):
    """A job to be added. A field that is None gets the database's default.

    The fields are the arguments of `WorkerUtils.add_job`.

    Raises:
        InvalidJobError: A value is invalid. The error's `argument` names it.

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
        check_text("identifier", self.identifier, max_length=MAX_IDENTIFIER_LENGTH, code="GWBID")
        if self.queue_name is not None:
            check_text("queue_name", self.queue_name, max_length=MAX_QUEUE_NAME_LENGTH, code="GWBQN")
        if self.job_key is not None:
            check_text("job_key", self.job_key, max_length=MAX_JOB_KEY_LENGTH, code="GWBJK")
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
            if at is not self.run_at:  # it was ISO 8601 text
                msgspec.structs.force_setattr(self, "run_at", at)
        if self.flags is not None:
            msgspec.structs.force_setattr(self, "flags", check_flags(self.flags))

    def replace(self, **changes: Any) -> JobSpec:
        """Return a copy with some fields changed.

        >>> JobSpec("send", {"to": "Ann"}).replace(priority=5).priority
        5
        """
        return msgspec.structs.replace(self, **changes)


_KEY_MODES = [mode.value for mode in JobKeyMode]


def check_integer(argument: str, value: object, allowed: range, *, code: str | None = None) -> None:
    """Check that a value is an integer in the allowed range.

    Raises:
        InvalidJobError: It is not.
    """
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
    """Return a time that can be stored: an aware datetime, or a timedelta from now.

    Args:
        argument: Name of the argument, for messages.
        value: An aware datetime, ISO 8601 text with an offset from UTC, or a timedelta.

    Raises:
        InvalidJobError: The value is anything else.
    """
    if isinstance(value, timedelta):
        if not -_LONGEST_DELAY <= value <= _LONGEST_DELAY:
            raise InvalidJobError(
                f"{argument} is {value}; it must be at most {_LONGEST_DELAY.days} days.",
                argument=argument,
            )
        return value
    moment = _read_iso(argument, value) if isinstance(value, str) else value
    _check_aware(argument, moment, ", ISO 8601 text with an offset, or a timedelta from now")
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
            f"{argument} is {value!r}, which has no time zone, so its meaning depends on the machine. Pass "
            f"an aware datetime, for example datetime.now(UTC){alternative}.",
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
            f"{argument} is {value}, which is out of range in UTC: the year must be from {MINYEAR} to "
            f"{MAXYEAR}.",
            argument=argument,
        ) from None
    return offset


def as_utc(argument: str, value: datetime) -> datetime:
    """Return an aware datetime in UTC.

    Raises:
        InvalidJobError: The value is not an aware datetime.
    """
    _check_aware(argument, value)
    return value.astimezone(UTC)


def check_text(argument: str, value: object, *, max_length: int, code: str | None = None) -> None:
    """Check that a value is a non-empty string that PostgreSQL can store.

    Raises:
        InvalidJobError: It is not, or it is longer than `max_length` characters.
    """
    if not isinstance(value, str):
        problem = "it must be a str"
    elif not value:
        problem = f"it must have 1 to {max_length} characters"
    elif len(value) > max_length:
        problem = f"it has {len(value)} characters; the maximum is {max_length}"
    elif "\0" in value or not _is_unicode(value):
        problem = "PostgreSQL cannot store it as text"
    else:
        return
    shown = repr(value) if len(repr(value)) <= max_length else repr(value)[:60] + "…"
    raise InvalidJobError(f"{argument} is {shown}; {problem}.", argument=argument, code=code)


def check_flags(flags: Iterable[str]) -> frozenset[str]:
    """Return flags as a set.

    Raises:
        InvalidJobError: They are not an iterable of strings that PostgreSQL can store.
    """
    try:
        # A string is iterable too, but its letters are not meant as flags.
        checked = frozenset((None,) if isinstance(flags, str) else flags)
    except TypeError:
        checked = frozenset((None,))
    valid = frozenset(
        flag for flag in checked if isinstance(flag, str) and "\0" not in flag and _is_unicode(flag)
    )
    if valid != checked:
        raise InvalidJobError(f"flags is {flags!r}; it must be a list or set of strings.", argument="flags")
    return valid


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
