"""The outcomes of a job, and the exceptions that a task raises to choose one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker._base.durations import format_seconds, seconds
from graphile_worker.job import as_utc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker._base.durations import Duration
    from graphile_worker.job import Job

_MAX_ERROR_LENGTH = 10_000
_LAST_GROWING_ATTEMPT = 10
_WITHOUT_MESSAGE = (KeyError, SystemExit, StopIteration)
"""Exceptions whose text is not a message, but a key, an exit status or a value."""


class ControlFlow(Exception):  # noqa: N818 - a decision, not an error
    """Base class of the exceptions that a task raises to choose the outcome of its job.

    Attributes:
        reason: The reason, for people. It is stored in the job's `last_error`. Without a reason, the message
            of the exception that this one was raised from is stored.
    """

    reason: str = ""

    def __init__(self, reason: str | BaseException = "") -> None:
        super().__init__(reason)
        if isinstance(reason, BaseException):
            self.__cause__ = reason
        else:
            self.reason = str(reason)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling would call __init__ with args, which lack the keyword arguments.
        return _restore, (type(self), self.args, self.__dict__)

    @property
    def why(self) -> str:
        """The reason, or the message of the exception that this one was raised from."""
        return self.reason or (describe_error(self.__cause__) if self.__cause__ else "")

    def __str__(self) -> str:
        return ": ".join(part for part in (self._summary(), self.why) if part)

    def _summary(self) -> str:
        """Return the chosen outcome in words, for `last_error`."""
        return ""


class Retry(ControlFlow):
    """Raise it to fail this attempt and retry at a chosen time.

    If this was the last attempt, the job has failed permanently.

    Args:
        reason: The reason, for people, or the exception that caused the retry.
        after: Delay from now, in seconds or as a timedelta.
        at: An aware datetime, instead of `after`.

    Raises:
        TypeError: Neither or both of `after` and `at` are given.

    Example:
        >>> from graphile_worker import Retry
        >>> async def fetch(payload):
        ...     raise Retry("the server is busy", after=60)
    """

    after: float | None = None
    at: datetime | None = None

    def __init__(
        self,
        reason: str | BaseException = "",
        *,
        after: Duration | None = None,
        at: datetime | None = None,
    ) -> None:
        super().__init__(reason)
        if (after is None) == (at is None):
            raise TypeError("Retry takes either after= or at=.")
        if isinstance(at, timedelta):
            raise TypeError(f"at is {at!r}; it must be an aware datetime. Pass a timedelta as after=.")
        self.after = None if after is None else seconds("after", after)
        self.at = None if at is None else as_utc("at", at)

    def _summary(self) -> str:
        if self.after is None and self.at is None:
            return "Retry"
        when = f"at {self.at}" if self.after is None else f"in {format_seconds(self.after)}"
        return f"Retry {when}"


class Fail(ControlFlow):
    """Raise it to fail the job permanently, even if attempts are left.

    Args:
        reason: The reason, for people, or the exception that caused the failure.

    Example:
        >>> from graphile_worker import Fail
        >>> async def charge(payload):
        ...     if payload["amount"] < 0:
        ...         raise Fail("the amount is negative")
    """

    def _summary(self) -> str:
        return "" if self.why else "The task failed the job permanently"


class Snooze(ControlFlow):
    """Raise it to run the job again after a delay. This is not a failure, and the attempt does not count.

    Args:
        delay: Delay from now, in seconds or as a timedelta.
        reason: The reason, for people, or the exception that caused the delay.

    Example:
        >>> from graphile_worker import Snooze
        >>> async def publish(payload):
        ...     if not payload["approved"]:
        ...         raise Snooze(300, "not approved yet")
    """

    delay: float = 60.0

    def __init__(self, delay: Duration, reason: str | BaseException = "") -> None:
        super().__init__(reason)
        self.delay = seconds("delay", delay, "more than 0")

    def _summary(self) -> str:
        return f"Snoozed for {format_seconds(self.delay)}"


class Cancel(ControlFlow):
    """Raise it to cancel the job, because it is not needed any more. The job does not run again.

    This is not a failure. The job stays in the table without attempts left, with the reason in `last_error`.

    Args:
        reason: The reason, for people, or the exception that caused the cancellation.

    Example:
        >>> from graphile_worker import Cancel
        >>> async def remind(payload):
        ...     raise Cancel("the appointment was cancelled")
    """

    def _summary(self) -> str:
        return "Cancelled"


class Completed(msgspec.Struct, frozen=True):
    """The task returned. The job is deleted."""


class Failed(msgspec.Struct, frozen=True):
    """The task raised an exception. The job is retried later, if it has attempts left."""

    error: BaseException
    delay: float | None = None
    """Seconds until the next attempt; None for Graphile Worker's delay."""
    at: datetime | None = None
    """The time of the next attempt, instead of `delay`."""
    final: bool = False
    """Whether the job is not retried, even if attempts are left."""
    left: Sequence[int] | None = None
    """The indexes of the items that remain in a batch, if some are done."""
    batch_errors: Sequence[BaseException] | None = None
    """The errors of the items of a batch that failed."""

    def is_last_of(self, job: Job) -> bool:
        """Return whether the job does not run again."""
        return self.final or job.attempts >= job.max_attempts

    def retry_in(self, job: Job, now: datetime) -> float | None:
        """Return the seconds until the next attempt; None if there is none."""
        if self.is_last_of(job):
            return None
        if self.at is not None:
            return max(0.0, (self.at - now).total_seconds())
        return default_delay(job.attempts) if self.delay is None else self.delay


class Snoozed(msgspec.Struct, frozen=True):
    """The task raised `Snooze`. The job runs again after the delay, and the attempt does not count."""

    choice: Snooze


class Cancelled(msgspec.Struct, frozen=True):
    """The job was cancelled, by the task or by `WorkerUtils.cancel_job`. It does not run again."""

    choice: Cancel
    left: Sequence[int] | None = None
    """The indexes of the items that remain in a batch, if some are done."""


class Interrupted(msgspec.Struct, frozen=True):
    """The worker stopped the job. The attempt does not count, and the job is due after `delay` seconds."""

    delay: float = 0.0


class Returned(msgspec.Struct, frozen=True):
    """The job was prefetched and not started. The attempt does not count."""


Outcome: TypeAlias = Completed | Failed | Snoozed | Cancelled | Interrupted | Returned


def outcome_of_choice(choice: ControlFlow) -> Outcome:
    """Return the outcome that the task chose with this exception."""
    match choice:
        case Retry():
            return Failed(choice, delay=choice.after, at=choice.at)
        case Snooze():
            return Snoozed(choice)
        case Cancel():
            return Cancelled(choice)
        case _:
            return Failed(choice, final=True)


def as_cancelled(choice: Cancel, outcome: Outcome) -> Outcome:
    """Return the outcome of a job that was cancelled while it ran, and then ended with this outcome."""
    match outcome:
        case Completed() | Cancelled():
            return outcome
        case Failed(error=error, left=left):
            choice.__cause__ = error
            return Cancelled(choice, left)
        case _:
            return Cancelled(choice)


def unwrap_control_flow(error: BaseException) -> BaseException:
    """Return the `ControlFlow` exception that a task group wrapped. Return any other error unchanged."""
    inner = error
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner if isinstance(inner, ControlFlow) else error


def default_delay(attempt: int) -> float:
    """Return Graphile Worker's delay between an attempt and the next one, in seconds.

    >>> [round(default_delay(attempt)) for attempt in (1, 2, 3, 10, 25)]
    [3, 7, 20, 22026, 22026]
    """
    return math.exp(min(_LAST_GROWING_ATTEMPT, attempt))


def _restore(kind: type[ControlFlow], args: tuple[Any, ...], state: dict[str, Any]) -> ControlFlow:
    """Create a `ControlFlow` exception from its pickled state, without calling its `__init__`."""
    choice = kind.__new__(kind, *args)
    choice.__dict__.update(state)
    return choice


def describe_error(error: BaseException) -> str:
    """Return the text that is stored as `last_error` for an exception.

    >>> describe_error(ValueError("no such file"))
    'no such file'
    >>> describe_error(ValueError())
    'ValueError'
    >>> describe_error(KeyError("name"))
    "KeyError: 'name'"
    """
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - the exception's own __str__ may raise anything
        text = ""
    kind = type(error).__name__
    if text and isinstance(error, _WITHOUT_MESSAGE):
        text = f"{kind}: {text}"
    return storable(text or kind)


def storable(text: str) -> str:
    """Return the text, truncated, and with characters escaped that PostgreSQL cannot store."""
    if len(text) > _MAX_ERROR_LENGTH:
        text = text[:_MAX_ERROR_LENGTH] + "…"
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class RunSummary:
    """The outcomes recorded by `run_once`, `testing.drain`, or a `Runner` so far.

    A job that was lost while it ran is not counted.

    >>> RunSummary(succeeded=2, failed=1).failed
    1
    """

    succeeded: int = 0
    failed: int = 0
    """Failed attempts, whether or not they are retried."""
    snoozed: int = 0
    cancelled: int = 0
    errors: tuple[BaseException, ...] = field(default=(), compare=False)
    """The errors of the failed attempts, in order. Only `testing.drain` collects them."""
