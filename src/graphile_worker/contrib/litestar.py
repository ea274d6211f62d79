"""Litestar: a plugin with a worker or an open app, a dependency, health checks and ``litestar workers``.

Needs Litestar 2.23 or newer.
"""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Unpack

from graphile_worker._client.bound import BoundApp
from graphile_worker.cli.entry import host_command
from graphile_worker.contrib import _serving
from graphile_worker.errors import MissingExtraError

try:
    from litestar import MediaType, Response, get
    from litestar.di import NamedDependency, Provide
    from litestar.plugins import CLIPlugin, InitPlugin
except ImportError as error:
    raise MissingExtraError(
        "graphile_worker.contrib.litestar needs Litestar 2.23 or newer: pip install 'litestar>=2.23'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from click import Group
    from litestar import Litestar
    from litestar.config.app import AppConfig
    from litestar.handlers import HTTPRouteHandler

    from graphile_worker._worker.run_options import AppRunOptions
    from graphile_worker.app import App
    from graphile_worker.runner import Runner

__all__ = ["BoundApp", "GraphileWorkerPlugin"]


class GraphileWorkerPlugin(InitPlugin, CLIPlugin):
    """The Litestar plugin.

    It opens the app while the server runs and closes it at the end, or runs a worker. It adds the command
    ``litestar workers``, which is the whole command of this library, for this app.

    Args:
        app: The app.
        session: The name of the dependency that provides the session of a request, such as
            ``"db_session"``. Handlers then can take a parameter ``jobs``: the app, bound to that session.
        jobs: Another name for the parameter ``jobs``.
        health_path: A path for health checks, such as ``"/health"``: below it are ``live`` and ``ready``.
        run_worker: Whether to run a worker in the server, in the same event loop. All further keyword
            arguments are its options, such as ``concurrency=10``: see docs/reference/settings.md. Also
            without a worker, the schema is installed or upgraded unless ``migrate=False``.

    Raises:
        ConfigurationError: There are options for a worker, but ``run_worker`` is not set.

    Example:
        >>> import asyncpg
        >>> from litestar import Litestar, post
        >>> from litestar.di import NamedDependency, Provide
        >>> from litestar.params import FromPath
        >>> from litestar.testing import TestClient
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.litestar import BoundApp, GraphileWorkerPlugin
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None: ...
        >>> async def open_transaction():
        ...     async with app.utils.connection() as connection, connection.transaction():
        ...         yield connection
        >>> @post("/greetings/{name:str}")
        ... async def greet(name: FromPath[str], jobs: NamedDependency[BoundApp]) -> str:
        ...     return (await jobs.using(hello).enqueue(name)).task_identifier
        >>> web = Litestar(
        ...     [greet],
        ...     dependencies={"db_session": Provide(open_transaction)},
        ...     plugins=[GraphileWorkerPlugin(app, session="db_session", health_path="/health")],
        ... )
        >>> with TestClient(web) as client:
        ...     client.post("/greetings/Ann").text, client.get("/health/ready").status_code
        ('hello', 200)
    """

    def __init__(
        self,
        app: App,
        *,
        session: str | None = None,
        jobs: str = "jobs",
        health_path: str | None = None,
        run_worker: bool = False,
        **options: Unpack[AppRunOptions],
    ) -> None:
        _serving.check_worker_options(options, run_worker=run_worker)
        self.app = app
        self._session = session
        self._jobs = jobs
        self._health_path = health_path
        self._run_worker = run_worker
        self._options = options
        self._runner: Runner | None = None

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Add the lifespan, the dependency and the health checks to the application."""
        app_config.lifespan = [*(app_config.lifespan or ()), self._lifespan]
        app_config.signature_namespace = {"BoundApp": BoundApp, **app_config.signature_namespace}
        if self._session is not None:
            provide = Provide(self._make_dependency(self._session), sync_to_thread=False)
            app_config.dependencies = {self._jobs: provide, **(app_config.dependencies or {})}
        if self._health_path is not None:
            app_config.route_handlers = [
                *app_config.route_handlers,
                *self._health_handlers(self._health_path),
            ]
        return app_config

    def on_cli_init(self, cli: Group) -> None:
        """Add the command ``litestar workers``."""
        cli.add_command(host_command(lambda: self.app, name="workers", program="litestar"))

    @asynccontextmanager
    async def _lifespan(self, _web: Litestar) -> AsyncIterator[None]:
        async with _serving.serving(self.app, self._options, run_worker=self._run_worker) as runner:
            self._runner = runner
            try:
                yield
            finally:
                self._runner = None

    def _make_dependency(self, session: str) -> Any:
        """Return a function with one parameter, which has the name of the dependency of the session."""

        def bind(**given: Any) -> BoundApp:
            return self.app.bind(given[session])

        named: Any = NamedDependency
        parameter = inspect.Parameter(session, inspect.Parameter.KEYWORD_ONLY, annotation=named[Any])
        bind.__signature__ = inspect.Signature([parameter], return_annotation=BoundApp)  # type: ignore[attr-defined]
        bind.__annotations__ = {session: parameter.annotation, "return": BoundApp}
        return bind

    def _health_handlers(self, path: str) -> list[HTTPRouteHandler]:
        prefix = path.rstrip("/")

        @get(f"{prefix}/live", include_in_schema=False)
        async def live() -> Response[bytes]:
            return _as_response(await _serving.live(self._runner))

        @get(f"{prefix}/ready", include_in_schema=False)
        async def ready() -> Response[bytes]:
            return _as_response(await _serving.ready(self.app, self._runner))

        return [live, ready]


def _as_response(answer: tuple[int, bytes]) -> Response[bytes]:
    status, body = answer
    return Response(body, status_code=status, media_type=MediaType.JSON)
