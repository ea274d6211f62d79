"""A `Queue` with RQ's methods, for programs that move here from RQ. RQ is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker.contrib._other_queues import reject_options
from graphile_worker.errors import ConfigurationError
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.app import App
    from graphile_worker.job import Job

__all__ = ["Queue"]

_ADVICE = {
    **dict.fromkeys(("result_ttl", "ttl", "failure_ttl"), "See history= and keep_result= of the task."),
    "depends_on": "Let the first task add the next job.",
    "retry": "Pass max_attempts= and retry= to @app.task.",
    "repeat": "Use @app.cron, or let the task raise Snooze.",
    "description": "Log it, or pass it as an argument.",
    "meta": "Pass the values as arguments; a task reports with ctx.progress.",
    **dict.fromkeys(
        ("on_success", "on_failure", "on_stopped"), "Listen to the events of the app, or write a middleware."
    ),
}
_OPTIONS = {"job_timeout", "job_id", "at_front"}
_AT_FRONT = -100
"""The priority of jobs that are added with ``at_front=True``."""


class Queue:
    """Adds jobs with RQ's methods. They block, as RQ's do.

    A queue here has no name, because a worker chooses jobs by their tasks: see docs/migrating/rq.md.

    Args:
        app: The app.
        connection: Your session, not a Redis connection. The jobs are added in its transaction.

    Example:
        >>> from datetime import timedelta
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.rq import Queue
        >>> app = App(dsn=dsn)
        >>> app.migrate_sync()
        >>> @app.task
        ... def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> queue = Queue(app)
        >>> job = queue.enqueue(hello, "Ann", job_timeout=60)
        >>> later = queue.enqueue_in(timedelta(hours=1), hello, name="Bob")
        >>> app.run_once_sync().succeeded
        Hello, Ann
        1
        >>> app.close_sync()
    """

    def __init__(self, app: App, *, connection: AnyConnection | None = None) -> None:
        self._app = app
        self._connection = connection

    def enqueue(self, f: Any, /, *args: Any, **kwargs: Any) -> Job:
        """Add a job.

        Args:
            f: The task, or its identifier.
            args: Arguments of the task by position.
            kwargs: Arguments by name, and RQ's options: `job_timeout` in seconds; `job_id`, which becomes the
                job's key; and `at_front`, which is priority -100.

        Raises:
            ConfigurationError: `f` is not a task of the app.
            InvalidJobError: An option is not supported, or the arguments do not match the function.
        """
        return self._enqueue(f, args, kwargs, {})

    def enqueue_in(self, time_delta: timedelta, f: Any, /, *args: Any, **kwargs: Any) -> Job:
        """Add a job that may run after some time. No scheduler is needed."""
        return self._enqueue(f, args, kwargs, {"delay": time_delta})

    def enqueue_at(self, datetime: datetime, f: Any, /, *args: Any, **kwargs: Any) -> Job:
        """Add a job that may run from this time on, a datetime with a time zone."""
        return self._enqueue(f, args, kwargs, {"run_at": datetime})

    def _enqueue(
        self, f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: dict[str, Any]
    ) -> Job:
        given = {name: value for name, value in kwargs.items() if name in _OPTIONS}
        arguments = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        task = self._find(f)
        reject_options(
            "enqueue",
            {name: arguments[name] for name in _ADVICE if name in arguments and not task.binding.takes(name)},
            _ADVICE,
        )
        if given.get("job_timeout") is not None:
            options["timeout"] = given["job_timeout"]
        if given.get("job_id") is not None:
            options["job_key"] = given["job_id"]
        if given.get("at_front"):
            options["priority"] = _AT_FRONT
        enqueuer = task.using(connection=self._connection, **options)
        job: Job = enqueuer.enqueue_sync(*args, **arguments)
        return job

    def _find(self, f: Any) -> Any:
        if isinstance(f, str):
            return self._app.tasks[f]
        task = task_of(f)
        if task is None:
            raise ConfigurationError(
                f"{getattr(f, '__qualname__', f)} is not a task. Decorate the function with @app.task, or "
                "pass the identifier of a task."
            )
        return task
