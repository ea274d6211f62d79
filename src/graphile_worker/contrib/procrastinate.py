"""`defer`, `configure` and others for tasks, for programs that move here from Procrastinate.

Procrastinate is not needed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from graphile_worker.contrib._other_queues import change_class, reject_options
from graphile_worker.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.tasks import Enqueuer

__all__ = ["Deferrer", "ProcrastinateTask", "procrastinate_methods"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
V = TypeVar("V")

_ADVICE = {
    "queue": "Give each worker the tasks that it should run: see docs/migrating/procrastinate.md.",
}


class Deferrer:
    """A task with options for its next jobs: the return value of `ProcrastinateTask.configure`."""

    def __init__(self, enqueuer: Enqueuer[Any, Any], task_kwargs: Mapping[str, Any]) -> None:
        self._enqueuer = enqueuer
        self._task_kwargs = task_kwargs

    def defer(self, **arguments: Any) -> int:
        """Add a job from code without an event loop, and return its id."""
        return self._enqueuer.enqueue_sync(**{**self._task_kwargs, **arguments}).id

    async def defer_async(self, **arguments: Any) -> int:
        """Add a job, and return its id."""
        return (await self._enqueuer.enqueue(**{**self._task_kwargs, **arguments})).id

    def batch_defer(self, *arguments: Mapping[str, Any]) -> list[int]:
        """Add a job for each mapping of arguments, from code without an event loop, and return their ids."""
        merged = [{**self._task_kwargs, **one} for one in arguments]
        return [job.id for job in self._enqueuer.enqueue_many_sync(merged)]

    async def batch_defer_async(self, *arguments: Mapping[str, Any]) -> list[int]:
        """Add a job for each mapping of arguments, and return their ids."""
        merged = [{**self._task_kwargs, **one} for one in arguments]
        return [job.id for job in await self._enqueuer.enqueue_many(merged)]


class ProcrastinateTask(Task[P, Q, R, V], Generic[P, Q, R, V]):
    """A task with Procrastinate's methods to add jobs. `procrastinate_methods` makes one."""

    def configure(
        self,
        *,
        lock: str | None = None,
        queueing_lock: str | None = None,
        schedule_at: datetime | None = None,
        schedule_in: Mapping[str, float] | None = None,
        priority: int | None = None,
        task_kwargs: Mapping[str, Any] | None = None,
        connection: AnyConnection | None = None,
        **options: Any,
    ) -> Deferrer:
        """Return an object that adds jobs with options.

        Args:
            lock: Jobs with the same lock run one after another. It is the ``queue_name`` of the job.
            queueing_lock: At most one job with the same lock waits. It is the ``job_key``: another job
                changes the one that waits, and ``AlreadyEnqueued`` is not raised.
            schedule_at: When the job may run: a datetime with a time zone.
            schedule_in: Arguments of a timedelta, such as ``{"minutes": 5}``.
            priority: Higher numbers run first, as in Procrastinate. The job gets the negated number.
            task_kwargs: Arguments for all jobs.
            connection: Your connection or session. The jobs are added in its transaction.
            options: Procrastinate's other options. They are refused, and the error says what to do instead.

        Raises:
            InvalidJobError: An option is not supported, or invalid.
        """
        reject_options("configure", options, _ADVICE)
        given = {
            "queue_name": lock,
            "job_key": queueing_lock,
            "run_at": schedule_at,
            "delay": None if schedule_in is None else timedelta(**schedule_in),
            "priority": None if priority is None else -priority,
        }
        chosen: Any = {name: value for name, value in given.items() if value is not None}
        return Deferrer(self.using(connection=connection, **chosen), task_kwargs or {})

    def defer(self, **arguments: Any) -> int:
        """Add a job from code without an event loop, and return its id."""
        return Deferrer(self, {}).defer(**arguments)

    async def defer_async(self, **arguments: Any) -> int:
        """Add a job, and return its id."""
        return await Deferrer(self, {}).defer_async(**arguments)

    def batch_defer(self, *arguments: Mapping[str, Any]) -> list[int]:
        """Add a job for each mapping of arguments, from code without an event loop, and return their ids."""
        return Deferrer(self, {}).batch_defer(*arguments)

    async def batch_defer_async(self, *arguments: Mapping[str, Any]) -> list[int]:
        """Add a job for each mapping of arguments, and return their ids."""
        return await Deferrer(self, {}).batch_defer_async(*arguments)


def procrastinate_methods(task: Task[P, Q, R, V]) -> ProcrastinateTask[P, Q, R, V]:
    """Decorate a task, to give it the methods of `ProcrastinateTask`.

    It goes above ``@app.task``. See docs/migrating/procrastinate.md for what else differs.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.procrastinate import procrastinate_methods
        >>> app = App(dsn=dsn)
        >>> app.migrate_sync()
        >>> @procrastinate_methods
        ... @app.task
        ... def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> job_id = hello.defer(name="Ann")
        >>> later = hello.configure(schedule_in={"hours": 1}, lock="greetings").defer(name="Bob")
        >>> app.run_once_sync().succeeded
        Hello, Ann
        1
        >>> app.close_sync()
    """
    changed: ProcrastinateTask[P, Q, R, V] = change_class(task, ProcrastinateTask, "procrastinate_methods")
    return changed
