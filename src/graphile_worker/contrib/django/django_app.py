"""`DjangoApp`: an app whose jobs are added on Django's own connection."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Unpack

from graphile_worker._base.checked_connection import CheckedConnection, DefaultConnection
from graphile_worker._client.per_loop import PerLoopClients
from graphile_worker._client.results import JOB_RUNNER
from graphile_worker.app import App
from graphile_worker.contrib.django import configuration
from graphile_worker.contrib.django.connections import DjangoConnections
from graphile_worker.errors import GraphileWorkerError
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from types import ModuleType

    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._db.queries.cancellations import CancelAnswer
    from graphile_worker._worker.run_options import AppRunOnceOptions, AppRunOptions
    from graphile_worker.client import WorkerUtils
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.outcome import RunSummary
    from graphile_worker.runner import Runner
    from graphile_worker.tasks import HandlerClass


class _DatabaseClients(PerLoopClients):
    """Clients whose connection string is the one of Django's database at the moment, unless one is set."""

    def __init__(self, app: DjangoApp, settings: dict[str, Any]) -> None:
        self._app = app
        self._given: dict[str, Any] = settings
        self._with_dsn: dict[str, Any] = {}
        super().__init__(settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of each `WorkerUtils`."""
        given = self._given
        if given["dsn"] is not None or given["pool"] is not None:
            return given
        dsn = configuration.find_dsn(self._app.database)
        if self._with_dsn.get("dsn") != dsn:  # Django's tests have a database of their own
            self._with_dsn = {**given, "dsn": dsn}
        return self._with_dsn

    @settings.setter
    def settings(self, settings: dict[str, Any]) -> None:
        is_django = settings["dsn"] is not None and settings["dsn"] == self._with_dsn.get("dsn")
        self._given = {**settings, "dsn": None} if is_django else settings
        self._with_dsn = {}


class DjangoApp(App):
    """The queue of a Django project. Its settings are in ``settings.GRAPHILE_WORKER``.

    Jobs are added on Django's connection of the current thread. In a ``transaction.atomic`` block they are
    part of the transaction; otherwise they are committed at once. In a coroutine, Django's own thread adds
    them. A worker uses connections of its own, with the parameters of ``settings.DATABASES``.

    Example:
        >>> from graphile_worker.contrib.django import DjangoApp
        >>> DjangoApp(database="reports").database
        'reports'
    """

    def __init__(self, *, database: str | None = None, **settings: Any) -> None:
        self._database = database
        self._connections = DjangoConnections(self)
        self.settings_error: Exception | None = None
        """The mistake in ``settings.GRAPHILE_WORKER`` that has kept the app from applying it."""
        self._before: dict[str, Any] = {}
        """What the settings were that ``settings.GRAPHILE_WORKER`` has changed."""
        self.on_running: Callable[[Runner], None] | None = None
        """Called with each worker that `running` has started."""
        middleware = [self._connections, *(settings.pop("middleware", None) or ())]
        super().__init__(middleware=middleware, **settings)
        self._clients = _DatabaseClients(self, dict(self._clients.settings))

    @property
    def database(self) -> str:
        """The alias of the database that has the queue."""
        return self._database if self._database is not None else configuration.database_alias()

    @database.setter
    def database(self, alias: str | None) -> None:
        self._database = alias

    @asynccontextmanager
    async def running(self, **options: Unpack[AppRunOptions]) -> AsyncIterator[Runner]:
        """Run a worker for the duration of an ``async with`` block: see `App.running`."""
        try:
            async with super().running(**options) as runner:
                if self.on_running is not None:
                    self.on_running(runner)
                yield runner
        finally:
            await self._connections.close()

    async def run_once(self, **options: Unpack[AppRunOnceOptions]) -> RunSummary:
        """Run all jobs that are due, and the jobs that they add: see `App.run_once`."""
        try:
            return await super().run_once(**options)
        finally:
            await self._connections.close()

    def read_settings(self) -> None:
        """Apply ``settings.GRAPHILE_WORKER``. The app's configuration calls it when Django starts.

        An error is kept in `settings_error`, so that ``manage.py check`` reports it.
        """
        self.settings_error = None
        try:
            configuration.check_type()
            given = configuration.app_settings()
            reset = {name: default for name, default in self._before.items() if name not in given}
            if given or reset:
                self.close_sync()
                self._before = {name: self._before.get(name, self.settings[name]) for name in given}
                self.configure(**reset, **given)
        except (GraphileWorkerError, ImportError, TypeError) as error:
            self.settings_error = error

    def configure(self, **settings: Any) -> None:
        """Change settings of the app before it opens a connection: see `App.configure`."""
        if "middleware" in settings:
            others = [one for one in settings["middleware"] or () if one is not self._connections]
            settings["middleware"] = [self._connections, *others]
        super().configure(**settings)

    def include_tasks(self, module: ModuleType) -> None:
        """Add the tasks of a module that were declared without an app, if there are any."""
        tasks = (task_of(thing) for thing in vars(module).values())
        self.include([task for task in tasks if task is not None and task._is_unattached])

    def on_django(self, connection: AnyConnection | None) -> AnyConnection:
        """Return the given connection, or else the one of Django's database."""
        return self.database if connection is None else connection

    def _quietly(
        self, connection: AnyConnection | None, *, require_transaction: bool = False
    ) -> AnyConnection:
        """Return the connection to add jobs on. Django's gives no warning in autocommit, its usual mode."""
        if connection is None:
            return DefaultConnection(self.database, require=require_transaction)
        return CheckedConnection(connection, require=True) if require_transaction else connection

    async def add_spec(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add the job that the spec describes."""
        return await super().add_spec(spec, connection=self._quietly(connection))

    def add_spec_sync(self, spec: JobSpec, *, connection: AnyConnection | None = None) -> Job:
        """Add the job that the spec describes, from code without an event loop."""
        return super().add_spec_sync(spec, connection=self._quietly(connection))

    async def add_jobs(
        self,
        jobs: Iterable[JobSpec | HandlerClass],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs: all of them, or none if one is rejected."""
        on = self._quietly(connection, require_transaction=require_transaction)
        return await super().add_jobs(jobs, connection=on)

    def add_jobs_sync(
        self,
        jobs: Iterable[JobSpec | HandlerClass],
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
    ) -> list[Job]:
        """Add many jobs, from code without an event loop."""
        on = self._quietly(connection, require_transaction=require_transaction)
        return super().add_jobs_sync(jobs, connection=on)

    async def cancel_job(
        self, job_id: int, reason: str | None = None, *, connection: AnyConnection | None = None
    ) -> CancelAnswer | None:
        """Cancel a job, even if it is running."""
        return await super().cancel_job(job_id, reason, connection=self.on_django(connection))

    def cancel_job_sync(
        self, job_id: int, reason: str | None = None, *, connection: AnyConnection | None = None
    ) -> CancelAnswer | None:
        """Cancel a job, even if it is running, from code without an event loop."""
        return super().cancel_job_sync(job_id, reason, connection=self.on_django(connection))

    def _add_jobs_through(self, utils: WorkerUtils) -> None:
        """Do nothing: a task process adds jobs on its own Django connection, in its transaction."""

    async def _call_spec(
        self, spec: JobSpec, limit: float | None, *, connection: AnyConnection | None = None
    ) -> Any:
        return await super()._call_spec(spec, limit, connection=self._for_call(connection))

    def _call_spec_sync(
        self, spec: JobSpec, limit: float | None, *, connection: AnyConnection | None = None
    ) -> Any:
        return super()._call_spec_sync(spec, limit, connection=self._for_call(connection))

    def _for_call(self, connection: AnyConnection | None) -> AnyConnection | None:
        """Return the connection for a job whose caller waits, which is an error in a transaction.

        Where a test runs jobs, the jobs that they call run in the same transaction.
        """
        return connection if JOB_RUNNER.get() is not None else self.on_django(connection)
