"""`delay` and `apply_async` for tasks, for programs that move here from Celery. Celery is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from graphile_worker.contrib._other_queues import change_class, reject_options
from graphile_worker.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.job import JobHandle

__all__ = ["CeleryTask", "celery_methods"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
V = TypeVar("V")

_ADVICE = {
    **dict.fromkeys(
        ("queue", "routing_key", "exchange"),
        "Give each worker the tasks that it should run: see docs/migrating/celery.md.",
    ),
    **dict.fromkeys(("link", "chain", "group", "chord"), "Let the task add the next job."),
    "link_error": "Listen to the event job:failed, or write a middleware.",
    "expires": "Pass the deadline as an argument, and raise Cancel if it is over.",
    "task_id": "Pass job_key= to task.using(...), or use the id of the job that this returns.",
    "soft_time_limit": "Pass time_limit=. It is the timeout of the job.",
    **dict.fromkeys(("serializer", "compression"), "A payload is always JSON."),
    **dict.fromkeys(("retry", "retry_policy"), "The job is added or an exception is raised."),
    "headers": "Pass the values as arguments, or add them in a middleware.",
    "ignore_result": "Results are kept if the task has keep_result=True.",
}


class CeleryTask(Task[P, Q, R, V], Generic[P, Q, R, V]):
    """A task with Celery's methods to add jobs. `celery_methods` makes one.

    Both methods block, as Celery's do. In a coroutine, use `Task.enqueue`. Their result is the job, not an
    ``AsyncResult``: see docs/guides/results.md.
    """

    def delay(self, /, *args: Q.args, **kwargs: Q.kwargs) -> JobHandle[V]:
        """Add a job, as `Task.enqueue_sync` does.

        Raises:
            InvalidJobError: The arguments do not match the function.
            ConfigurationError: This thread has a running event loop.
        """
        return self.enqueue_sync(*args, **kwargs)

    def apply_async(
        self,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        countdown: float | None = None,
        eta: datetime | None = None,
        priority: int | None = None,
        time_limit: float | None = None,
        connection: AnyConnection | None = None,
        **options: Any,
    ) -> JobHandle[V]:
        """Add a job with options.

        Args:
            args: Arguments by position.
            kwargs: Arguments by name.
            countdown: Seconds until the job may run.
            eta: When the job may run: a datetime with a time zone.
            priority: Lower numbers run first, as in Celery with Redis. With RabbitMQ it is the other way
                round.
            time_limit: The timeout of the job, in seconds.
            connection: Your session, not a broker's connection. The job is added in its transaction.
            options: Celery's other options. They are refused, and the error says what to do instead.

        Raises:
            InvalidJobError: An option is not supported, or the arguments do not match the function.
        """
        reject_options("apply_async", options, _ADVICE)
        given = {"delay": countdown, "run_at": eta, "priority": priority, "timeout": time_limit}
        chosen: Any = {name: value for name, value in given.items() if value is not None}
        enqueuer: Any = self.using(connection=connection, **chosen)
        job: JobHandle[V] = enqueuer.enqueue_sync(*(args or ()), **(kwargs or {}))
        return job


def celery_methods(task: Task[P, Q, R, V]) -> CeleryTask[P, Q, R, V]:
    """Decorate a task, to give it `CeleryTask.delay` and `CeleryTask.apply_async`.

    It goes above ``@app.task``. See docs/migrating/celery.md for what else differs.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.celery import celery_methods
        >>> app = App(dsn=dsn)
        >>> app.migrate_sync()
        >>> @celery_methods
        ... @app.task
        ... def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> job = hello.delay("Ann")
        >>> later = hello.apply_async(("Bob",), countdown=3600)
        >>> app.run_once_sync().succeeded
        Hello, Ann
        1
        >>> app.close_sync()
    """
    changed: CeleryTask[P, Q, R, V] = change_class(task, CeleryTask, "celery_methods")
    return changed
