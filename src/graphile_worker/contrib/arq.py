"""A `JobPool` with ARQ's `enqueue_job`, for programs that move here from ARQ. ARQ is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker.contrib._other_queues import reject_options

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker.app import App
    from graphile_worker.job import JobHandle

__all__ = ["JobPool"]

_ADVICE = {
    "_queue_name": "Give each worker the tasks that it should run: see docs/migrating/arq.md.",
    "_expires": "Pass the deadline as an argument, and raise Cancel if it is over.",
    "_job_try": "The attempts of a job begin with 1.",
}


class JobPool:
    """Adds jobs by the names of their tasks, as the pool from ARQ's ``create_pool`` does.

    Args:
        app: The app, which has the tasks.
        connection: Your connection or session. The jobs are added in its transaction.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.arq import JobPool
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def main():
        ...     await app.migrate()
        ...     pool = JobPool(app)
        ...     await pool.enqueue_job("hello", "Ann")
        ...     await pool.enqueue_job("hello", name="Bob", _defer_by=3600)
        ...     return await app.run_once()
        >>> asyncio.run(main()).succeeded
        Hello, Ann
        1
    """

    def __init__(self, app: App, *, connection: AnyConnection | None = None) -> None:
        self._app = app
        self._connection = connection

    async def enqueue_job(
        self,
        function: str,
        *args: Any,
        _job_id: str | None = None,
        _defer_until: datetime | None = None,
        _defer_by: float | timedelta | None = None,
        **kwargs: Any,
    ) -> JobHandle[Any]:
        """Add a job.

        Args:
            function: Identifier of the task.
            args: Arguments of the task by position.
            _job_id: The key of the job. Another job with the same key changes the one that waits; ARQ returns
                None instead.
            _defer_until: When the job may run: a datetime with a time zone.
            _defer_by: Seconds, or a timedelta, until the job may run.
            kwargs: Arguments by name. ARQ's other options are not supported.

        Raises:
            KeyError: The app does not have the task.
            InvalidJobError: An option is not supported, or the arguments do not match the function.
        """
        reject_options(
            "enqueue_job", {name: kwargs[name] for name in kwargs if name.startswith("_")}, _ADVICE
        )
        given = {"job_key": _job_id, "run_at": _defer_until, "delay": _defer_by}
        options: Any = {name: value for name, value in given.items() if value is not None}
        task: Any = self._app.tasks[function]
        job: JobHandle[Any] = await task.using(connection=self._connection, **options).enqueue(
            *args, **kwargs
        )
        return job
