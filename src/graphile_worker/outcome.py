"""What can become of a job that a worker claimed, and the exceptions by which a task chooses it."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.durations import seconds, shown
from graphile_worker.job import as_utc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.durations import Duration
    from graphile_worker.job import Job

_LONGEST_ERROR = 10_000
_LAST_STEP = 10
_WITHOUT_MESSAGE = (KeyError, SystemExit, StopIteration)
"""What they are about is no sentence: a key, a status, a value."""


class ControlFlow(Exception):  # noqa: N818 - no errors, but decisions
    """Base of what a task raises in order to choose the outcome of its job.

    Attributes:
        reason: Why, for people. It is kept as the job's `last_error`; if there is none, that of the exception
            it was raised from.
    """

    reason: str = ""

    def __init__(self, reason: str | BaseException = "") -> None:
        super().__init__(reason)
        if isinstance(reason, BaseException):
            self.__cause__ = reason
        else:
            self.reason = str(reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)

    @property
    def why(self) -> str:
        """The reason, or that of the exception it was raised from."""
        return self.reason or (describe_error(self.__cause__) if self.__cause__ else "")

    def __str__(self) -> str:
        return ": ".join(part for part in (self._what(), self.why) if part)

    def _what(self) -> str:
        """What was chosen, for `last_error`."""
        return ""


class Retry(ControlFlow):
    """Fail this attempt, and try again at a time of the task's choice.

    On the last attempt there is no next one: then the job has failed for good.

    Args:
        after: Seconds, or a timedelta, from now.
        at: An aware datetime, in place of `after`.
        reason: Why, for people.

    Example:
        >>> from graphile_worker import Retry
        >>> async def fetch(payload):
        ...     raise Retry("the other side is busy", after=60)
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
            raise TypeError("Retry takes after= or at=: one of the two.")
        if isinstance(at, timedelta):
            raise TypeError("Retry takes a timedelta as after=, and an aware datetime as at=.")
        self.after = None if after is None else seconds("after", after)
        self.at = None if at is None else as_utc("at", at)

    def _what(self) -> str:
        if self.after is None and self.at is None:
            return "To be tried again"
        return f"To be tried again {f'at {self.at}' if self.after is None else f'in {shown(self.after)}'}"


class Fail(ControlFlow):
    """Fail for good: no more attempts, however many are left.

    Example:
        >>> from graphile_worker import Fail
        >>> async def charge(payload):
        ...     if payload["amount"] < 0:
        ...         raise Fail("an amount below zero will not get better")
    """

    def _what(self) -> str:
        return "" if self.why else "Failed for good, by its task"


class Snooze(ControlFlow):
    """Not now: run again after a delay. It is no failure, and the attempt is given back.

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

    def _what(self) -> str:
        return f"Snoozed for {shown(self.delay)}"


class Cancel(ControlFlow):
    """Leave it: the job is not wanted any more. It does not run again, and is no failure to be alarmed by.

    It stays in the table as a job without attempts, with the reason.

    Example:
        >>> from graphile_worker import Cancel
        >>> async def remind(payload):
        ...     raise Cancel("the appointment was called off")
    """

    def _what(self) -> str:
        return "Cancelled"


class Completed(msgspec.Struct, frozen=True):
    """It returned: the job is deleted."""


class Failed(msgspec.Struct, frozen=True):
    """It raised: the job is tried again later, if it has attempts left."""

    error: BaseException
    delay: float | None = None
    """Seconds until the next attempt; None: as Graphile Worker has it."""
    at: datetime | None = None
    """Or when it is."""
    final: bool = False
    """Whether there is none, even if attempts are left."""
    left: Sequence[int] | None = None
    """The places of the items of a batch that are left to do, if some are done."""
    batch_errors: Sequence[BaseException] | None = None
    """What the items of a batch failed with."""

    def is_last_of(self, job: Job) -> bool:
        """Whether the job does not run again."""
        return self.final or job.attempts >= job.max_attempts

    def retry_in(self, job: Job, now: datetime) -> float | None:
        """Seconds until the next attempt, if there is one."""
        if self.is_last_of(job):
            return None
        if self.at is not None:
            return max(0.0, (self.at - now).total_seconds())
        return default_delay(job.attempts) if self.delay is None else self.delay


class Snoozed(msgspec.Struct, frozen=True):
    """It asked for a delay: the attempt is given back."""

    choice: Snooze


class Cancelled(msgspec.Struct, frozen=True):
    """It is not wanted any more: it does not run again."""

    choice: Cancel
    left: Sequence[int] | None = None
    """As for `Failed`."""


class Interrupted(msgspec.Struct, frozen=True):
    """The worker stopped it: the attempt is given back, and the job is available after `delay` seconds."""

    delay: float = 0.0


class Returned(msgspec.Struct, frozen=True):
    """It was claimed ahead and not started: the attempt is given back."""


Outcome: TypeAlias = Completed | Failed | Snoozed | Cancelled | Interrupted | Returned


def chosen(choice: ControlFlow) -> Outcome:
    """The outcome that a task chose."""
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
    """What a job comes to that somebody has cancelled while it ran, and that then came to this."""
    match outcome:
        case Completed() | Cancelled():
            return outcome
        case Failed(error=error, left=left):
            choice.__cause__ = error
            return Cancelled(choice, left)
        case _:
            return Cancelled(choice)


def unwrapped(error: BaseException) -> BaseException:
    """The choice alone, if a task group has wrapped it; any other error as it is."""
    inner = error
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner if isinstance(inner, ControlFlow) else error


def default_delay(attempt: int) -> float:
    """Seconds between that attempt and the next, as Graphile Worker has them.

    >>> [round(default_delay(attempt)) for attempt in (1, 2, 3, 10, 25)]
    [3, 7, 20, 22026, 22026]
    """
    return math.exp(min(_LAST_STEP, attempt))


def _restored(kind: type[ControlFlow], args: tuple[Any, ...], state: dict[str, Any]) -> ControlFlow:
    """One that went to another process, as it was."""
    choice = kind.__new__(kind, *args)
    choice.__dict__.update(state)
    return choice


def describe_error(error: BaseException) -> str:
    """What is kept of an error as the job's `last_error`.

    >>> describe_error(ValueError("no such file"))
    'no such file'
    >>> describe_error(ValueError())
    'ValueError'
    >>> describe_error(KeyError("name"))
    "KeyError: 'name'"
    """
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an exception whose text cannot be had is still an exception
        text = ""
    kind = type(error).__name__
    if text and isinstance(error, _WITHOUT_MESSAGE):
        text = f"{kind}: {text}"
    return storable(text or kind)


def storable(text: str) -> str:
    """The text, as long as it may be, and without what PostgreSQL cannot keep as text."""
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + "…"
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()
