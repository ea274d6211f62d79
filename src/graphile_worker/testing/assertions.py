"""Assertions about the jobs that wait to run."""

from __future__ import annotations

import difflib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker._base.payload import as_decoded
from graphile_worker._db.connection.caller_connection import is_connection
from graphile_worker._tasks.binding import KeywordBinding
from graphile_worker._tasks.options import as_spec_options
from graphile_worker.app import App
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import Job, JobSpec, JobState, read_instant
from graphile_worker.tasks import Enqueuer
from graphile_worker.testing.overrides import ClockedUtils

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker.tasks import Task

    JobSource: TypeAlias = App | WorkerUtils | Connection
    TaskOrSpec: TypeAlias = str | JobSpec | Enqueuer[...]

_NO_LIMIT = 2**31 - 1
_MAX_LISTED = 20
_TOLERANCE = timedelta(seconds=1)
_OPTIONS = ("queue_name", "run_at", "max_attempts", "job_key", "priority", "flags")


async def enqueued(where: JobSource | Enqueuer[...], task: TaskOrSpec | None = None) -> list[Job]:
    """Return the jobs that wait to run, now or later, in the order in which they were added.

    Permanently failed jobs are not included: ``app.utils.list_jobs(state="failed")`` lists them.

    Args:
        where: An app, a `WorkerUtils` or an asyncpg connection. A task lists its own jobs.
        task: Only jobs of this task: the task, or its name.

    Example:
        >>> import asyncio
        >>> from graphile_worker import WorkerUtils
        >>> from graphile_worker.testing import enqueued
        >>> async def test():
        ...     async with WorkerUtils(dsn=dsn) as utils:
        ...         await utils.migrate()
        ...         await utils.add_job("farewell", {"name": "Ann"})
        ...         return [job.payload for job in await enqueued(utils, "farewell")]
        >>> asyncio.run(test())
        [{'name': 'Ann'}]
    """
    if isinstance(where, Enqueuer):
        task = where if task is None else task
    utils, connection = _client_for(None if isinstance(where, Enqueuer) else where, task)
    name = None if task is None else _task_name(task)
    jobs = await utils.list_jobs(task=name, limit=_NO_LIMIT, connection=connection)
    return [job for job in jobs if job.state in {JobState.READY, JobState.SCHEDULED}]


async def assert_enqueued(
    task: TaskOrSpec, payload: Any = None, /, *, on: JobSource | None = None, **arguments: Any
) -> Job:
    """Fail unless a matching job waits to run. Return the first match.

    Args:
        task: The task, with the options that the job must have: ``hello.using(priority=-5, run_at=...)``.
            A ``run_at`` may differ by a second; a timedelta counts from the time when the job was added. A
            `JobSpec` or a task's name also works, together with `on`.
        payload: The expected payload, for a task that takes no keyword arguments or has a parameter named
            `on`. A mapping must be a subset of the job's payload; any other value must be equal to it.
        on: An app, a `WorkerUtils` or an asyncpg connection [the task's own app].
        arguments: Some of the arguments, as `enqueue` takes them.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import assert_enqueued
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str, greeting: str = "Hello") -> None: ...
        >>> async def test():
        ...     await app.migrate()
        ...     await hello.using(priority=-5).enqueue("Ann", "Hi")
        ...     job = await assert_enqueued(hello.using(priority=-5), name="Ann")
        ...     return job.payload
        >>> asyncio.run(test())
        {'name': 'Ann', 'greeting': 'Hi'}
    """
    expected = _ExpectedJob(task, payload, arguments, on)
    found = await expected.find()
    if not found:
        raise AssertionError(f"No matching job is enqueued: {expected}. {await expected.describe_others()}")
    return found[0]


async def assert_not_enqueued(
    task: TaskOrSpec, payload: Any = None, /, *, on: JobSource | None = None, **arguments: Any
) -> None:
    """Fail if a matching job waits to run. The arguments are those of `assert_enqueued`.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.testing import assert_not_enqueued
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None: ...
        >>> async def test():
        ...     await app.migrate()
        ...     await hello.enqueue("Ann")
        ...     await assert_not_enqueued(hello, name="Bob")
        >>> asyncio.run(test())
    """
    expected = _ExpectedJob(task, payload, arguments, on)
    if found := await expected.find():
        raise AssertionError(f"A job is enqueued that should not be: {expected}.\n{_format_jobs(found)}")


class _ExpectedJob:
    """The job that an assertion searches for."""

    def __init__(
        self, task: TaskOrSpec, payload: Any, arguments: dict[str, Any], on: JobSource | None
    ) -> None:
        _check_arguments(task, on)
        self._task, self._on = task, on
        utils, _ = _client_for(on, task)  # raises if there is no database to search
        self._clock = utils.clock if isinstance(utils, ClockedUtils) else None
        self._options: dict[str, Any] = {}
        if isinstance(task, Enqueuer):
            self._options = as_spec_options(task._options)  # noqa: SLF001 - the options of using()
            if self._options.get("run_at") is not None:
                self._options["run_at"] = read_instant("run_at", self._options["run_at"])
        elif isinstance(task, JobSpec):
            payload = task.payload if payload is None else payload
            given = {name: getattr(task, name) for name in _OPTIONS}
            self._options = {name: value for name, value in given.items() if value is not None}
        self._options.pop("job_key_mode", None)  # jobs do not store it
        self._payload = _decode(payload)
        if isinstance(task, Enqueuer) and isinstance(task._task.binding, KeywordBinding):
            _check_names(task._task, arguments)
        if arguments:
            self._payload = {**(self._payload or {}), **_decode(arguments)}

    def __str__(self) -> str:
        payload = "" if self._payload is None else f" with {self._payload!r}"
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{_task_name(self._task)!r}{payload}{f' ({options})' if options else ''}"

    async def find(self) -> list[Job]:
        """Return all matching jobs."""
        return [job for job in await self._enqueued(self._task) if self._matches(job)]

    async def describe_others(self) -> str:
        """Describe the jobs that are enqueued instead."""
        if same_task := await self._enqueued(self._task):
            return f"Enqueued jobs of that task:\n{_format_jobs(same_task)}"
        jobs = await self._enqueued(None)
        return f"Enqueued jobs of other tasks:\n{_format_jobs(jobs)}" if jobs else "Nothing is enqueued."

    async def _enqueued(self, task: TaskOrSpec | None) -> list[Job]:
        if self._on is not None:
            return await enqueued(self._on, task)
        assert isinstance(self._task, Enqueuer)  # noqa: S101 - _client_for has rejected the rest
        return await enqueued(self._task if task is not None else _app_of(self._task), task)

    def _matches(self, job: Job) -> bool:
        expected, found = self._payload, job.payload
        if isinstance(expected, dict) and isinstance(found, dict):
            matches = all(key in found and found[key] == value for key, value in expected.items())
        else:
            matches = expected is None or found == expected
        return matches and all(
            self._option_matches(job, name, value) for name, value in self._options.items()
        )

    def _option_matches(self, job: Job, name: str, value: Any) -> bool:
        match name, value:
            case "run_at", timedelta():
                added = job.created_at if self._clock is None else self._clock.now()
                return abs(job.run_at - added - value) <= _TOLERANCE
            case "run_at", datetime():
                return abs(job.run_at - value) <= _TOLERANCE
            case "flags", _:
                return set(value or ()) <= job.flags
            case "job_key", _:
                return bool(job.key == value)
        return bool(getattr(job, name) == value)


def _check_names(task: Task[Any, Any, Any], arguments: Iterable[str]) -> None:
    """Reject misspelled names: assert_not_enqueued would always pass with one."""
    for name in arguments:
        if not task.binding.takes(name):
            near = difflib.get_close_matches(name, task.binding.names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigurationError(f"The task {task.identifier!r} has no parameter {name!r}{hint}")


def _decode(value: Any) -> Any:
    return None if value is None else as_decoded(value)


def _task_name(task: TaskOrSpec) -> str:
    if isinstance(task, Enqueuer):
        return task._task.identifier
    return task if isinstance(task, str) else task.identifier


def _app_of(task: Enqueuer[...]) -> App:
    queue = task._task.queue
    assert isinstance(queue, App)  # noqa: S101 - the only class of queues
    return queue


def _client_for(where: JobSource | None, task: TaskOrSpec | None) -> tuple[WorkerUtils, Connection | None]:
    """Return the client to query, and the connection to use instead of the client's own."""
    connection: Any = task._connection if isinstance(task, Enqueuer) else None  # noqa: SLF001 - set by using()
    if isinstance(where, WorkerUtils):
        return where, connection
    if isinstance(where, App):
        return where.utils, connection
    if isinstance(task, Enqueuer) and not (where is not None and task._task._is_unattached):
        return _app_of(task).utils, connection if where is None else where
    if where is None:
        raise ConfigurationError("No database to search: pass a task that belongs to an app, or on=app.")
    return ClockedUtils.on_connection(where, None), None


def _check_arguments(task: object, on: object) -> None:
    """Reject wrong types here: the database's error would not name the argument."""
    if not isinstance(task, str | JobSpec | Enqueuer):
        raise ConfigurationError(f"Invalid task {task!r}: pass a task, a task's name or a JobSpec.")
    if on is not None and not isinstance(on, App | WorkerUtils) and not is_connection(on):
        hint = ""
        if isinstance(task, Enqueuer) and task._task.binding.takes("on"):
            hint = f" For the task's own parameter 'on', pass a dict: {{'on': {on!r}}}."
        raise ConfigurationError(
            f"Invalid on={on!r}: pass an app, a WorkerUtils or an asyncpg connection.{hint}"
        )


def _format_jobs(jobs: list[Job]) -> str:
    lines = [
        f"  {job.id}: {job.task_identifier!r} with {job.payload!r} (priority={job.priority}, "
        f"run_at={job.run_at}, queue_name={job.queue_name!r}, job_key={job.key!r})"
        for job in jobs[:_MAX_LISTED]
    ]
    if len(jobs) > _MAX_LISTED:
        lines.append(f"  and {len(jobs) - _MAX_LISTED} more")
    return "\n".join(lines)
