"""Flask: an application context around each job, the command ``flask graphile-worker``, and `db.session`.

Needs Flask. Flask-SQLAlchemy is optional.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from graphile_worker.cli.entry import host_command
from graphile_worker.errors import ConfigurationError, MissingExtraError
from graphile_worker.middleware import Middleware

try:
    from flask import current_app
except ImportError as error:
    raise MissingExtraError("graphile_worker.contrib.flask needs Flask: pip install flask") from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask import Flask

    from graphile_worker._client.bound import BoundApp
    from graphile_worker.app import App
    from graphile_worker.context import JobContext
    from graphile_worker.middleware import Running

__all__ = ["GraphileWorker"]

_EXTENSION = "graphile_worker"


class GraphileWorker:
    """The Flask extension.

    Each job of the app runs in an application context of the Flask application, so it can use
    ``current_app``, ``g`` and ``db.session``. When the context ends, Flask-SQLAlchemy removes the session. A
    plain ``def`` has its context on its own thread.

    If the app has no connection string, the extension takes one from the configuration of the Flask
    application: ``GRAPHILE_WORKER_DSN``, or else ``SQLALCHEMY_DATABASE_URI`` if that is PostgreSQL.
    ``GRAPHILE_WORKER_SCHEMA`` is the name of the schema.

    The command ``flask graphile-worker`` is the whole command of this library, for this app.

    Args:
        app: The app.
        web: The Flask application. Without it, call `init_app` later.

    Example:
        >>> from flask import Flask, current_app
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.flask import GraphileWorker
        >>> app = App()
        >>> queue = GraphileWorker(app)
        >>> @app.task
        ... def hello(name: str) -> None:
        ...     print(f"Hello, {name}, from {current_app.config['SHOP']}")
        >>> def create_app():
        ...     web = Flask("shop")
        ...     web.config.update(SHOP="the tea shop", GRAPHILE_WORKER_DSN=dsn)
        ...     queue.init_app(web)
        ...     return web
        >>> web = create_app()
        >>> app.migrate_sync()
        >>> job = hello.enqueue_sync(name="Ann")
        >>> app.run_once_sync()
        Hello, Ann, from the tea shop
        RunSummary(succeeded=1, failed=0, snoozed=0, cancelled=0, errors=())
        >>> app.close_sync()
    """

    def __init__(self, app: App, web: Flask | None = None) -> None:
        self.app = app
        self._context = _ApplicationContext(app)
        self._from_flask: set[str] = set()
        """The settings of the app that came from a Flask application. The next one may replace them."""
        app.close_sync()  # an import may have added jobs, and an open app cannot be configured
        app.configure(middleware=[self._context, *(app.settings["middleware"] or ())])
        if web is not None:
            self.init_app(web)

    def init_app(self, web: Flask) -> None:
        """Register the command, and run the app's jobs in contexts of this Flask application.

        If it is called for several applications, jobs run in contexts of the last one.
        """
        web.extensions[_EXTENSION] = self
        web.cli.add_command(host_command(lambda: self.app, name="graphile-worker", program="flask"))
        self._context.web = web
        found = {"dsn": _find_dsn(web), "schema": web.config.get("GRAPHILE_WORKER_SCHEMA")}
        settings = self.app.settings
        missing = {
            name: value
            for name, value in found.items()
            if value is not None and settings[name] != value and self._may_set(name)
        }
        if missing:
            self._from_flask |= missing.keys()
            self.app.close_sync()
            self.app.configure(**missing)

    def _may_set(self, name: str) -> bool:
        return name in self._from_flask or not (
            self.app._sets(name) or (name == "dsn" and self.app._sets("pool"))
        )

    @property
    def jobs(self) -> BoundApp:
        """The app, bound to ``db.session``: jobs are committed or rolled back together with it.

        Raises:
            ConfigurationError: The Flask application does not use Flask-SQLAlchemy.

        Example:
            >>> from flask import Flask
            >>> from flask_sqlalchemy import SQLAlchemy
            >>> from graphile_worker import App
            >>> from graphile_worker.contrib.flask import GraphileWorker
            >>> web = Flask("shop")
            >>> web.config["SQLALCHEMY_DATABASE_URI"] = dsn.replace("postgresql:", "postgresql+psycopg:")
            >>> db, app = SQLAlchemy(web), App()
            >>> queue = GraphileWorker(app, web)
            >>> @app.task
            ... def hello(name: str) -> None: ...
            >>> app.migrate_sync()
            >>> with web.app_context():
            ...     job = queue.jobs.using(hello).enqueue_sync(name="Ann")
            ...     db.session.rollback()
            >>> app.utils.get_job_sync(id=job.id) is None
            True
            >>> app.close_sync()
            >>> with web.app_context():
            ...     db.engine.dispose()
        """
        database = current_app.extensions.get("sqlalchemy")
        if database is None:
            raise ConfigurationError(
                "This Flask application does not use Flask-SQLAlchemy, so there is no db.session. Pass your "
                "own session: task.using(connection=session).enqueue_sync(...)."
            )
        return self.app.bind(database.session)


class _ApplicationContext(Middleware):
    """Runs each job in an application context of Flask."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.web: Flask | None = None

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Run a coroutine function in a context on the event loop; `call` does the rest."""
        task = self._app.tasks.get(ctx.job.task_identifier)
        if task is None or not inspect.iscoroutinefunction(task.binding.function):
            return await proceed()
        with self._find_web().app_context():
            return await proceed()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a plain function in a context, on its thread."""
        with self._find_web().app_context():
            return function()

    def _find_web(self) -> Flask:
        if self.web is None:
            raise ConfigurationError(
                "The job needs a Flask application, and GraphileWorker.init_app was not called in this "
                "process. Start the worker with flask graphile-worker run, or create the application in the "
                "module that the worker loads."
            )
        return self.web


def _find_dsn(web: Flask) -> str | None:
    if (given := web.config.get("GRAPHILE_WORKER_DSN")) is not None:
        return str(given)
    uri = web.config.get("SQLALCHEMY_DATABASE_URI")
    if uri is None:
        return None
    from sqlalchemy import make_url  # noqa: PLC0415 - only if it is used

    url = make_url(uri)
    if url.get_backend_name() != "postgresql":
        return None
    return url.set(drivername="postgresql").render_as_string(hide_password=False)
