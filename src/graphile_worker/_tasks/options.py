"""The options of tasks and jobs, and their checks."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, cast

from graphile_worker._base.durations import Duration, accepts_one_argument, seconds
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.history import check_keep
from graphile_worker.job import TIMEOUT_FLAG, Job, check_flags
from graphile_worker.limits import Limit, check_concurrency

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from graphile_worker.history import Keep
    from graphile_worker.job import JobKeyMode
    from graphile_worker.retry import RetryOption

OnInvalidPayload: TypeAlias = Literal["retry", "fail"]
TimeoutOption: TypeAlias = "Duration | Callable[[Job], Duration | None] | None"
ExecutorOption: TypeAlias = Literal["process"] | None
_OTHER_QUEUES_NAMES = {
    **dict.fromkeys(("queue",), "queue_name"),
    **dict.fromkeys(("countdown", "schedule_in"), "delay"),
    **dict.fromkeys(("eta", "at", "schedule_at", "scheduled_at"), "run_at"),
    **dict.fromkeys(("key", "lock", "queueing_lock", "unique_key"), "job_key"),
    **dict.fromkeys(("retries", "max_retries"), "max_attempts"),
}
"""Names of options in other job queues, for did-you-mean hints."""


class JobOptions(TypedDict, total=False):
    """Options of a job: see `WorkerUtils.add_job`."""

    queue_name: str | None
    run_at: datetime | timedelta | str | None
    delay: Duration | None
    max_attempts: int | None
    job_key: str | None
    job_key_mode: JobKeyMode | str | None
    priority: int | None
    flags: Iterable[str] | None
    timeout: Duration | None


class TaskOptions(TypedDict, total=False):
    """Options of a task: see `TaskDecorator`."""

    queue_name: str | Callable[..., str | None] | None
    max_attempts: int | None
    job_key: str | Callable[..., str | None] | None
    job_key_mode: JobKeyMode | str | None
    priority: int | Callable[..., int | None] | None
    flags: Iterable[str] | Callable[..., Iterable[str] | None] | None
    run_at: Callable[..., datetime | timedelta | str | None] | None
    key: str | Callable[..., str | None] | None
    debounce: Duration | str | None
    throttle: Duration | str | None
    unique: bool | None
    retry: RetryOption
    timeout: TimeoutOption
    executor: ExecutorOption
    batch: bool
    on_invalid_payload: OnInvalidPayload | None
    history: Keep | None
    keep_result: bool | None
    limit: Limit | None
    worker_limit: int | None


def merge_job_options(options: JobOptions, overrides: JobOptions) -> JobOptions:
    """Return the options with some overridden. A delay overrides a run_at, and the other way round."""
    kept = dict(options)
    if "delay" in overrides:
        kept.pop("run_at", None)
    if "run_at" in overrides:
        kept.pop("delay", None)
    return cast("JobOptions", {**kept, **overrides})


def as_spec_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as `JobSpec` has them: a delay as run_at, and a timeout as a flag.

    The schema has no column for a timeout.
    """
    stored = dict(options)
    timeout, delay = stored.pop("timeout", None), stored.pop("delay", None)
    if timeout is not None:
        flag = f"{TIMEOUT_FLAG}{_job_seconds('timeout', timeout, 'more than 0'):g}"
        stored["flags"] = {*(check_flags(stored.get("flags") or ())), flag}
    if delay is not None:
        if stored.get("run_at") is not None:
            raise InvalidJobError("Pass run_at or delay, not both.", argument="delay")
        try:
            stored["run_at"] = timedelta(seconds=_job_seconds("delay", delay, "0 or more"))
        except OverflowError:
            raise InvalidJobError(f"Invalid delay {delay!r}: it is too long.", argument="delay") from None
    return stored


def _job_seconds(name: str, value: object, allowed: str) -> float:
    try:
        return seconds(name, value, allowed)
    except ConfigurationError as error:
        raise InvalidJobError(str(error), argument=name) from None


def read_timeout(given: object) -> float | Callable[[Job], Duration | None] | None:
    """Check a task's `timeout` and return it as seconds, or as a function of the job."""
    if given is None or (callable(given) and accepts_one_argument(given)):
        return given
    return seconds("timeout", given, "more than 0")


def read_executor(given: object, function: Any) -> ExecutorOption:
    """Check a task's `executor`. Another process cannot import a function defined inside a function."""
    if given is not None and given != "process":
        raise ConfigurationError(
            f"Invalid executor {given!r}: it must be 'process' or None. With None, an async def runs on the "
            "event loop, and a def in a thread."
        )
    if given == "process" and "<locals>" in getattr(function, "__qualname__", ""):
        raise ConfigurationError(
            f"{function.__qualname__} is defined inside a function, so another process cannot import it. "
            "Declare a task with executor='process' at the top level of a module."
        )
    return "process" if given == "process" else None


def read_limits(limit: object, worker_limit: object) -> tuple[Limit | None, int | None]:
    """Check a task's `limit` and `worker_limit`."""
    if limit is not None and not isinstance(limit, Limit):
        raise ConfigurationError(
            f"limit is {limit!r}; it must be a Limit, for example Limit('stripe', concurrency=10). "
            "worker_limit takes an integer."
        )
    if worker_limit is not None:
        check_concurrency("worker_limit", worker_limit, 1)
    return limit, cast("int | None", worker_limit)


def read_history_options(history: object, keep_result: object) -> tuple[Keep | None, bool | None]:
    """Check a task's `history` and `keep_result`."""
    if keep_result is not None and not isinstance(keep_result, bool):
        raise ConfigurationError(f"keep_result is {keep_result!r}; it must be True or False.")
    keep = None if history is None else check_keep("history", history)
    if keep_result and keep not in {None, "all"}:
        raise ConfigurationError(
            f"keep_result=True needs history='all', because a result is part of the history; it is {keep!r}."
        )
    return keep, keep_result


def reject_queue_braces(queue_name: object) -> None:
    """Reject braces in the queue name of one job, because they usually mean that an f-string lacks its f.

    Only the queue name of a task is a template. `App.add_job` accepts any name, as SQL and Node do.
    """
    if _has_braces(queue_name):
        raise InvalidJobError(
            f"Invalid queue_name {queue_name!r}: in using(), a queue name is not a template. Pass the name "
            f"itself, for example f{queue_name!r}. Only app.add_job accepts a name with braces.",
            argument="queue_name",
        )


def _has_braces(queue_name: object) -> bool:
    return isinstance(queue_name, str) and ("{" in queue_name or "}" in queue_name)


def check_iterable(function: str, what: str, given: object) -> None:
    """Reject anything but an iterable of items. A string is iterable, but its items are characters."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidJobError(
            f"{function} takes a list or another iterable of {what}, not {reprlib.repr(given)}.",
            argument=what,
        )


def check_job_options(function: str, given: Mapping[str, Any]) -> None:
    """Reject unknown job options, and an invalid timeout or delay. `JobSpec` checks the other values."""
    for name in given:
        if name not in JobOptions.__annotations__:
            hint = option_hint(name, JobOptions.__annotations__)
            raise InvalidJobError(f"{function} has no option {name!r}. {hint}", argument=name)
    as_spec_options({name: given.get(name) for name in ("timeout", "delay", "run_at")})


def option_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown option: a similar name, or else all options."""
    known = list(known)
    near = _OTHER_QUEUES_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    return f"Did you mean {near}?" if near in known else f"Options: {', '.join(known)}."
