"""What can be said of a task and of its jobs, by name."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from graphile_worker.durations import Duration, seconds, takes_one
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import TIMEOUT_FLAG, Job, checked_flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from graphile_worker.job import JobKeyMode
    from graphile_worker.retry import RetryOption

OnInvalidPayload: TypeAlias = Literal["retry", "fail"]
TimeoutOption: TypeAlias = "Duration | Callable[[Job], Duration | None] | None"
ExecutorOption: TypeAlias = Literal["process"] | None
_ELSEWHERE = {
    **dict.fromkeys(("queue",), "queue_name"),
    **dict.fromkeys(("countdown", "delay", "eta", "at", "schedule_at", "scheduled_at"), "run_at"),
    **dict.fromkeys(("key", "lock", "queueing_lock", "unique_key"), "job_key"),
    **dict.fromkeys(("retries", "max_retries"), "max_attempts"),
}
"""What the same thing is called in other job queues."""


class JobOptions(TypedDict, total=False):
    """What can be said about a job beside its payload: see `WorkerUtils.add_job`."""

    queue_name: str | None
    run_at: datetime | timedelta | str | None
    max_attempts: int | None
    job_key: str | None
    job_key_mode: JobKeyMode | str | None
    priority: int | None
    flags: Iterable[str] | None
    timeout: Duration | None


class TaskOptions(TypedDict, total=False):
    """What can be said about a task: see `TaskDecorator`."""

    queue_name: str | None
    max_attempts: int | None
    job_key: str | Callable[..., str | None] | None
    job_key_mode: JobKeyMode | str | None
    priority: int | None
    flags: Iterable[str] | None
    retry: RetryOption
    timeout: TimeoutOption
    executor: ExecutorOption
    batch: bool
    on_invalid_payload: OnInvalidPayload | None


def with_timeout(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the timeout where jobs have it: among the flags, for there is no other place."""
    known = dict(options)
    timeout = known.pop("timeout", None)
    if timeout is not None:
        flag = f"{TIMEOUT_FLAG}{_timeout_of_job(timeout):g}"
        known["flags"] = {*(checked_flags(known.get("flags") or ())), flag}
    return known


def _timeout_of_job(timeout: object) -> float:
    try:
        return seconds("timeout", timeout, "more than 0")
    except ConfigurationError as error:
        raise InvalidJobError(str(error), argument="timeout") from None


def read_timeout(given: object) -> float | Callable[[Job], Duration | None] | None:
    """What was given as `timeout`: seconds, or a function of the job."""
    if given is None or (callable(given) and takes_one(given)):
        return given
    return seconds("timeout", given, "more than 0")


def read_executor(given: object, function: Any) -> ExecutorOption:
    """What was given as `executor`; refuses a function that only the process in which it was made has."""
    if given is not None and given != "process":
        raise ConfigurationError(
            f"executor is {given!r}; it must be 'process', or left out: then an async def runs on the event "
            "loop, and a def on a thread."
        )
    if given == "process" and "<locals>" in getattr(function, "__qualname__", ""):
        raise ConfigurationError(
            f"{function.__qualname__} is inside of a function, where a process does not find it. Declare a "
            "task that is to run in a process at the top level of a module."
        )
    return "process" if given == "process" else None


def refuse_queue_template(identifier: str, queue_name: object) -> None:
    """Refuse braces in the queue name of a declaration: all its jobs would share a queue of that name."""
    if _has_braces(queue_name):
        raise ConfigurationError(
            f"The task {identifier!r} has queue_name={queue_name!r}. Only job_key can be a template. Name "
            f"the queue where the job is added: using(queue_name=f{queue_name!r})."
        )


def refuse_queue_braces(queue_name: object) -> None:
    """Refuse braces in the queue name of a task's job: an f is missing before the text, as a rule.

    `App.add_job` takes any name, as SQL and Node do.
    """
    if _has_braces(queue_name):
        raise InvalidJobError(
            f"queue_name is {queue_name!r}, and a queue name is not a template. Pass the name itself, for "
            f"example f{queue_name!r}; app.add_job takes a name with braces.",
            argument="queue_name",
        )


def _has_braces(queue_name: object) -> bool:
    return isinstance(queue_name, str) and ("{" in queue_name or "}" in queue_name)


def check_many(function: str, what: str, given: object) -> None:
    """Refuse what is no list of things, though a text can be read letter by letter."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidJobError(
            f"{function} takes {what} in a list, or in anything else that can be iterated over, not "
            f"{reprlib.repr(given)}.",
            argument=what,
        )


def check_job_options(function: str, given: Mapping[str, Any]) -> None:
    """Refuse what no job has, and a timeout that is none; the rest is checked where the job is made."""
    for name in given:
        if name not in JobOptions.__annotations__:
            hint = unknown_option(name, JobOptions.__annotations__)
            raise InvalidJobError(f"{function} takes no {name!r}. {hint}", argument=name)
    if given.get("timeout") is not None:
        _timeout_of_job(given["timeout"])


def unknown_option(name: str, known: Iterable[str]) -> str:
    """What was meant, perhaps, or else what there is."""
    known = list(known)
    near = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    return f"Did you mean {near}?" if near in known else f"It takes {', '.join(known)}."
