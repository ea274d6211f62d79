"""What is enqueued."""

from __future__ import annotations

import difflib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker._db.callers import is_connection
from graphile_worker.app import App
from graphile_worker.binding import ByKeys
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import Job, JobSpec, JobState, read_instant
from graphile_worker.payload import as_decoded
from graphile_worker.task_options import with_timeout
from graphile_worker.tasks import Enqueuer
from graphile_worker.testing.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._db.connect import Connection
    from graphile_worker.tasks import Task

    Where: TypeAlias = App | WorkerUtils | Connection
    What: TypeAlias = str | JobSpec | Enqueuer[...]

_ALL = 2**31 - 1
_MOST_SHOWN = 20
_TOLERANCE = timedelta(seconds=1)
_OPTIONS = ("queue_name", "run_at", "max_attempts", "job_key", "priority", "flags")


async def enqueued(where: Where | Enqueuer[...], task: What | None = None) -> list[Job]:
    """The jobs that wait to be run, now or later, in the order in which they were added.

    Those that failed for good are not among them: ``app.utils.list_jobs(state="failed")`` has those.

    Args:
        where: An app, a `WorkerUtils`, or a connection of asyncpg's; or a task, for its own jobs.
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
    utils, connection = _look(None if isinstance(where, Enqueuer) else where, task)
    name = None if task is None else _name(task)
    jobs = await utils.list_jobs(task=name, limit=_ALL, connection=connection)
    return [job for job in jobs if job.state in {JobState.READY, JobState.SCHEDULED}]


async def assert_enqueued(
    task: What, payload: Any = None, /, *, on: Where | None = None, **arguments: Any
) -> Job:
    """Fail unless such a job waits to be run; returns the first.

    Args:
        task: The task, with what is to hold for the job: ``hello.using(priority=-5, run_at=...)``. A
            ``run_at`` may be a second off; a timedelta is from when the job was added. Or a `JobSpec`, or the
            name of a task, and then `on` says where to look.
        payload: What the job has, if it takes no keyword arguments, or one of the name `on`: a mapping has
            some of its keys, anything else is the whole of it.
        on: An app, a `WorkerUtils` or a connection of asyncpg's; by default the task's own app.
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
    wanted = _Wanted(task, payload, arguments, on)
    found = await wanted.find()
    if not found:
        raise AssertionError(f"No such job is enqueued: {wanted}. {await wanted.others()}")
    return found[0]


async def assert_not_enqueued(
    task: What, payload: Any = None, /, *, on: Where | None = None, **arguments: Any
) -> None:
    """Fail if such a job waits to be run. The arguments are those of `assert_enqueued`.

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
    wanted = _Wanted(task, payload, arguments, on)
    if found := await wanted.find():
        raise AssertionError(f"Such a job is enqueued, and should not be: {wanted}.\n{_listed(found)}")


class _Wanted:
    """A job that somebody looks for."""

    def __init__(self, task: What, payload: Any, arguments: dict[str, Any], on: Where | None) -> None:
        _check(task, on)
        self._task, self._on = task, on
        utils, _ = _look(on, task)  # or there is nowhere to look
        self._clock = utils.clock if isinstance(utils, Place) else None
        self._options: dict[str, Any] = {}
        if isinstance(task, Enqueuer):
            self._options = with_timeout(task._options)  # noqa: SLF001 - what was said by using
            if self._options.get("run_at") is not None:
                self._options["run_at"] = read_instant("run_at", self._options["run_at"])
        elif isinstance(task, JobSpec):
            payload = task.payload if payload is None else payload
            given = {name: getattr(task, name) for name in _OPTIONS}
            self._options = {name: value for name, value in given.items() if value is not None}
        self._options.pop("job_key_mode", None)  # which no job keeps
        self._payload = _as_stored(payload)
        if isinstance(task, Enqueuer) and isinstance(task._task.binding, ByKeys):  # noqa: SLF001
            _check_names(task._task, arguments)  # noqa: SLF001
        if arguments:
            self._payload = {**(self._payload or {}), **_as_stored(arguments)}

    def __str__(self) -> str:
        about = "" if self._payload is None else f" with {self._payload!r}"
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{_name(self._task)!r}{about}{f' ({options})' if options else ''}"

    async def find(self) -> list[Job]:
        """All that fit."""
        return [job for job in await self._enqueued(self._task) if self._fits(job)]

    async def others(self) -> str:
        """What there is in its place."""
        if of_task := await self._enqueued(self._task):
            return f"Of that task there are:\n{_listed(of_task)}"
        jobs = await self._enqueued(None)
        return f"Of other tasks there are:\n{_listed(jobs)}" if jobs else "Nothing is enqueued."

    async def _enqueued(self, task: What | None) -> list[Job]:
        if self._on is not None:
            return await enqueued(self._on, task)
        assert isinstance(self._task, Enqueuer)  # noqa: S101 - or there was nowhere to look
        return await enqueued(self._task if task is not None else _home(self._task), task)

    def _fits(self, job: Job) -> bool:
        wanted, found = self._payload, job.payload
        if isinstance(wanted, dict) and isinstance(found, dict):
            fits = all(key in found and found[key] == value for key, value in wanted.items())
        else:
            fits = wanted is None or found == wanted
        return fits and all(self._has(job, name, value) for name, value in self._options.items())

    def _has(self, job: Job, name: str, value: Any) -> bool:
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
    """Nobody would notice a slip in what is not to be there."""
    for name in arguments:
        if not task.binding.takes(name):
            near = difflib.get_close_matches(name, task.binding.names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigurationError(f"The task {task.identifier!r} has no parameter {name!r}{hint}")


def _as_stored(value: Any) -> Any:
    return None if value is None else as_decoded(value)


def _name(task: What) -> str:
    if isinstance(task, Enqueuer):
        return task._task.identifier  # noqa: SLF001 - it is a Task, or of one
    return task if isinstance(task, str) else task.identifier


def _home(task: Enqueuer[...]) -> App:
    queue = task._task.queue  # noqa: SLF001 - the same
    assert isinstance(queue, App)  # noqa: S101 - nothing else is one
    return queue


def _look(where: Where | None, task: What | None) -> tuple[WorkerUtils, Connection | None]:
    """What to ask, and on which connection if not on its own."""
    connection = task._connection if isinstance(task, Enqueuer) else None  # noqa: SLF001 - by using
    if isinstance(where, WorkerUtils):
        return where, connection
    if isinstance(where, App):
        return where.utils, connection
    if isinstance(task, Enqueuer) and not (where is not None and task._task.is_loose):  # noqa: SLF001
        return _home(task).utils, connection if where is None else where
    if where is None:
        raise ConfigurationError("Where are the jobs? Pass a task of an app, or on=app.")
    return Place.on_connection(where, None), None


def _check(task: object, on: object) -> None:
    """Of what is not meant that way, a database would say something that helps nobody."""
    if not isinstance(task, str | JobSpec | Enqueuer):
        raise ConfigurationError(f"{task!r} is neither a task, nor the name of one, nor a JobSpec.")
    if on is not None and not isinstance(on, App | WorkerUtils) and not is_connection(on):
        hint = ""
        if isinstance(task, Enqueuer) and task._task.binding.takes("on"):  # noqa: SLF001
            hint = f" For what the task has as its parameter on, pass a dict: {{'on': {on!r}}}."
        raise ConfigurationError(
            f"on= says where to look: an app, a WorkerUtils or a connection of asyncpg's, not {on!r}.{hint}"
        )


def _listed(jobs: list[Job]) -> str:
    lines = [
        f"  {job.id}: {job.task_identifier!r} with {job.payload!r} (priority={job.priority}, "
        f"run_at={job.run_at}, queue_name={job.queue_name!r}, job_key={job.key!r})"
        for job in jobs[:_MOST_SHOWN]
    ]
    if len(jobs) > _MOST_SHOWN:
        lines.append(f"  and {len(jobs) - _MOST_SHOWN} more")
    return "\n".join(lines)
