"""History: which attempts to run jobs are kept, and what is known about each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

Keep: TypeAlias = Literal["none", "failures", "all"]
KEEP: tuple[Keep, ...] = ("none", "failures", "all")
DEFAULT_KEEP_FOR = 14 * 86_400.0
MAX_RESULT_SIZE = 1_000_000
"""Bytes of JSON. A larger result is not stored."""
CALLED_FLAG = "python:called"
"""The flag of a job whose caller waits for its result. Its attempts are always kept, with the result, and the
server sends a notification on `ENDED_CHANNEL` when a row of the job is committed."""
ENDED_CHANNEL = "python:ended"
"""The channel of notifications about jobs with `CALLED_FLAG`. The payload is the job's id."""
CALLER_FLAG = "python:caller:"
"""Prefix of the flag with the caller's token, which is random. Workers then send the notification on the
channel ``python:ended:<token>`` instead, with the result if it is short. No other role can guess the channel,
so none can read or forge results."""
_TOKEN = re.compile("[0-9a-f]{32}")
NOT_COMPLETE = (
    "Only attempts of Python workers with history are listed; jobs that Node or Rust workers ran are not."
)
"""What every view of history says about jobs that are missing in it."""


def caller_of(flags: Iterable[str]) -> str | None:
    """Return the token of the caller who waits for a job with these flags; None if there is none."""
    for flag in flags:
        if flag.startswith(CALLER_FLAG) and _TOKEN.fullmatch(token := flag.removeprefix(CALLER_FLAG)):
            return token
    return None


class AttemptOutcome(StrEnum):
    """How an attempt to run a job ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"
    """The task raised `Snooze`. The attempt does not count, so the next one has the same number."""
    WORKER_DIED = "worker_died"
    """The worker died while it ran the job, and another worker released the job."""

    @property
    def code(self) -> int:
        """The number that is stored."""
        return _CODES[self]


_CODES = {outcome: place for place, outcome in enumerate(AttemptOutcome, 1)}
OUTCOMES: dict[int, AttemptOutcome] = {code: outcome for outcome, code in _CODES.items()}
"""Outcomes by the numbers that are stored."""


@dataclass(frozen=True, kw_only=True)
class JobAttempt:
    """An attempt to run a job, as the history has it.

    Jobs that Node or Rust workers ran leave no attempts in the history.
    """

    job_id: int
    attempt: int
    """The number of the attempt, from 1."""
    outcome: AttemptOutcome
    is_final: bool
    """Whether the job did not run again after this attempt: it was completed or cancelled, or had no attempts
    left."""
    task_identifier: str
    queue_name: str | None
    key: str | None
    worker: str | None
    """The id of the worker; None if the outcome was recorded by hand."""
    created_at: datetime
    """When the job was added."""
    run_at: datetime
    """When the attempt was due."""
    started_at: datetime | None
    """When the task was called; None if the job did not run."""
    ended_at: datetime
    """When the outcome was recorded: later than the end of the task, if the database was unavailable."""
    duration: float | None = None
    """Seconds that the task ran."""
    error: str | None = None
    """The error, as `last_error` has it."""
    error_type: str | None = None
    """The exception's type, for example ``ValueError`` or ``httpx.ReadTimeout``."""
    traceback: str | None = None
    has_result: bool = False
    """Whether the result is kept."""
    result: Any = None
    """What the task returned, as JSON has it."""
    no_result: str | None = None
    """The reason why a result that should have been kept is missing, for example because it is too large."""
    payload: Any = None
    """The payload, if it is kept."""

    @property
    def wait(self) -> float | None:
        """Seconds for which the attempt was due before the task was called."""
        if self.started_at is None:
            return None
        return max(0.0, (self.started_at - self.run_at).total_seconds())


@dataclass(frozen=True, kw_only=True)
class HistorySummary:
    """The attempts of one task in the history."""

    task_identifier: str
    attempts: int
    completed: int
    failed: int
    """Failed attempts, whether or not they were retried."""
    failed_permanently: int
    """Those of them after which the job had no attempts left."""
    cancelled: int
    snoozed: int
    workers_died: int
    """Attempts whose worker died."""
    median_duration: float | None
    """Seconds; None if no attempt ran."""
    p95_duration: float | None
    p95_wait: float | None
    """Seconds for which 95 % of the attempts were due at most, before their task was called."""


@dataclass(frozen=True, kw_only=True)
class PrunedHistory:
    """What `WorkerUtils.prune_history` removed."""

    days: int
    """Days whose attempts were removed as a whole."""
    attempts: int
    """Attempts that were removed one by one, because their days had no partition."""


@dataclass(frozen=True)
class History:
    """Which attempts to keep in the history, and with what.

    Args:
        keep: ``"none"``, ``"failures"`` (attempts that failed, were cancelled, or whose worker died), or
            ``"all"`` (also those that completed or snoozed their jobs).
        payload: Whether to keep the payloads.
        results: Whether to keep what tasks return. A task can decide with ``keep_result=``.
        redact: Called as ``redact(task_identifier, payload)`` before a payload is kept. Returns what to keep.
            If it raises an error, no payload is kept.

    Raises:
        ConfigurationError: An argument is wrong.

    >>> History("failures").keep
    'failures'
    """

    keep: Keep = "failures"
    payload: bool = False
    results: bool = False
    redact: Callable[[str, Any], Any] | None = None

    def __post_init__(self) -> None:
        check_keep("History(keep=...)", self.keep)
        for name in ("payload", "results"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigurationError(f"History({name}=...) is {value!r}; it must be True or False.")
        if self.redact is not None and not callable(self.redact):
            raise ConfigurationError(
                f"History(redact=...) is {self.redact!r}; it must be a function of the task's identifier and "
                "the payload."
            )


def check_keep(name: str, value: object) -> Keep:
    """Return which attempts to keep.

    Raises:
        ConfigurationError: The value is not ``"none"``, ``"failures"`` or ``"all"``.
    """
    if value not in KEEP:
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {', '.join(KEEP)}.")
    return value


def read_history(name: str, value: object) -> History:
    """Return the history that an option stands for.

    Raises:
        ConfigurationError: The value is neither a `History` nor the name of what to keep.
    """
    if isinstance(value, History):
        return value
    if value not in KEEP:
        raise ConfigurationError(
            f"{name} is {value!r}; it must be one of {', '.join(KEEP)}, or a History object."
        )
    return History(value)
