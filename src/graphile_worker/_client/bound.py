"""`BoundApp`: an app whose jobs are added and changed on one connection of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from graphile_worker._base.checked_connection import CheckedConnection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._db.queries.cancellations import CancelAnswer
    from graphile_worker._tasks.options import JobOptions
    from graphile_worker._tasks.specs import JobLike
    from graphile_worker.app import App
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.tasks import Enqueuer, HandlerClass

Q = ParamSpec("Q")
V = TypeVar("V")


class BoundApp:
    """An app on one connection: the return value of `App.bind`.

    Args:
        app: The app.
        connection: The caller's connection or session.
        require_transaction: Whether to refuse the connection if it is not in a transaction.

    Example:
        >>> import psycopg
        >>> from graphile_worker import App
        >>> app = App(dsn=dsn)
        >>> app.migrate_sync()
        >>> @app.task
        ... def greet(name: str) -> None: ...
        >>> with psycopg.connect(dsn) as connection:
        ...     jobs = app.bind(connection)
        ...     job = jobs.using(greet).enqueue_sync(name="Ann")
        ...     other = jobs.add_job_sync("greet", {"name": "Bob"})
        >>> app.close_sync()
    """

    def __init__(self, app: App, connection: AnyConnection, *, require_transaction: bool = False) -> None:
        self._app = app
        self.connection: AnyConnection = (
            CheckedConnection(connection, require=True) if require_transaction else connection
        )

    def using(self, task: Enqueuer[Q, V], **options: Unpack[JobOptions]) -> Enqueuer[Q, V]:
        """Return an enqueuer for a task on the connection, as ``task.using(connection=...)`` does."""
        return task.using(connection=self.connection, **options)

    async def add_job(self, job: JobLike, payload: Any = None, **options: Unpack[JobOptions]) -> Job:
        """Add a job: see `App.add_job`."""
        return await self._app.add_job(job, payload, connection=self.connection, **options)

    def add_job_sync(self, job: JobLike, payload: Any = None, **options: Unpack[JobOptions]) -> Job:
        """Add a job on a sync connection."""
        return self._app.add_job_sync(job, payload, connection=self.connection, **options)

    async def add_jobs(self, jobs: Iterable[JobSpec | HandlerClass]) -> list[Job]:
        """Add many jobs: see `App.add_jobs`."""
        return await self._app.add_jobs(jobs, connection=self.connection)

    def add_jobs_sync(self, jobs: Iterable[JobSpec | HandlerClass]) -> list[Job]:
        """Add many jobs on a sync connection."""
        return self._app.add_jobs_sync(jobs, connection=self.connection)

    async def cancel_job(self, job_id: int, reason: str | None = None) -> CancelAnswer | None:
        """Cancel a job: see `WorkerUtils.cancel_job`."""
        return await self._app.cancel_job(job_id, reason, connection=self.connection)

    def cancel_job_sync(self, job_id: int, reason: str | None = None) -> CancelAnswer | None:
        """Cancel a job on a sync connection."""
        return self._app.cancel_job_sync(job_id, reason, connection=self.connection)
