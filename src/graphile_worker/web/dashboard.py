"""`Dashboard`: the ASGI application, and what it needs of an app."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import library_logger as logger
from graphile_worker._client.per_loop import DEFAULTS, PerLoopClients
from graphile_worker._db.queries.web_writes import LimitedWrites
from graphile_worker.client import WorkerUtils, find_schema
from graphile_worker.errors import ConfigurationError, MissingExtraError

try:
    import jinja2  # noqa: F401 - the pages need it
    from starlette.requests import Request
    from starlette.responses import RedirectResponse
    from starlette.routing import Mount, Router
    from starlette.staticfiles import StaticFiles
except ImportError as error:
    raise MissingExtraError(
        "The dashboard needs extra packages: pip install 'graphile-worker[web]'"
    ) from error

from graphile_worker.web import security
from graphile_worker.web.auth import READ_ONLY
from graphile_worker.web.broadcaster import Broadcaster
from graphile_worker.web.data import QueueData
from graphile_worker.web.errors import NotFoundError, problem_of
from graphile_worker.web.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from starlette.responses import Response
    from starlette.types import Message, Receive, Scope, Send

    from graphile_worker._base.durations import Duration
    from graphile_worker.app import App
    from graphile_worker.web.auth import Access, Auth

CONNECTIONS = 3
"""Connections of a dashboard for each schema, besides one that listens while a browser watches."""
WRITE_CONNECTIONS = 2
"""Further connections, opened when jobs are changed. Pages can be read while a change waits for a lock."""
_WRITE_SECONDS = 30.0
_LOCK_SECONDS = 2.0
_STATIC = Path(__file__).parent / "static"
_SCHEMAS = "/schemas/"


class Queue:
    """One schema: what reads it, what changes it, and what tells that it has changed."""

    def __init__(self, dashboard: Dashboard, schema: str) -> None:
        self.schema = schema
        self._dashboard = dashboard
        self._clients: PerLoopClients | None = None
        self._writers: PerLoopClients | None = None
        self._writer: tuple[WorkerUtils, WorkerUtils] | None = None
        self.data = QueueData(self, dashboard.app, redact=dashboard.redact, timeout=dashboard.timeout)
        self.operations = Operations(self, dashboard.app, self.data, read_only=dashboard.read_only)
        self.broadcaster = Broadcaster(self)

    @property
    def utils(self) -> WorkerUtils:
        """The client of this event loop, with connections of its own."""
        if self._clients is None:  # not earlier, because app.configure may change the settings
            self._clients = self._make_clients(CONNECTIONS, self._dashboard.timeout)
        return self._clients.utils

    @property
    def writer(self) -> WorkerUtils:
        """The client of this event loop for changes, which must not wait long."""
        if self._writers is None:
            self._writers = self._make_clients(WRITE_CONNECTIONS, _WRITE_SECONDS)
        base = self._writers.utils
        if self._writer is None or self._writer[0] is not base:
            settings = self._dashboard.app.settings
            session = LimitedWrites(base._session, _WRITE_SECONDS, _LOCK_SECONDS)  # noqa: SLF001 - the library's own
            limited = WorkerUtils._on_session(
                session, use_local_time=settings["use_local_time"], middleware=settings["middleware"]
            )
            self._writer = base, limited
        return self._writer[1]

    def _make_clients(self, connections: int, timeout: float) -> PerLoopClients:
        settings = self._dashboard.app.settings
        return PerLoopClients(
            {
                **{name: settings[name] for name in DEFAULTS},
                "schema": self.schema,
                "max_pool_size": connections,
                "pool_timeout": timeout,
            }
        )

    async def close(self) -> None:
        """Stop what runs in the background, and close the connections of this event loop."""
        await self.broadcaster.close()
        await self.operations.close()
        await self.data.close()
        for clients in (self._clients, self._writers):
            if clients is not None:
                await clients.close()


class Dashboard:
    """The dashboard and the JSON API of an app's queue: an ASGI application, to mount or to serve.

    Without `auth` it answers only requests from the machine that it runs on. The connections are its own:
    three, one while a browser watches, and two while it changes jobs. They are closed when the event loop
    ends, or by `close`.

    Args:
        app: The app. Its connection settings, tasks and recurring tasks are used; the dashboard runs no jobs.
        auth: A function of the request that returns what its user may do, an `Access`, or None for a
            stranger. It may be async. See `token_auth`, `basic_auth` and `proxy_auth`.
        read_only: Whether to refuse all changes, whatever the user may do.
        redact: Called as ``redact(task_identifier, payload)`` before a payload is shown. Returns what to
            show. If it raises an error, the payload is hidden. Payloads cannot be searched then.
        schemas: Names of further schemas in the same database, to switch between.
        allowed_hosts: Names under which the dashboard is served. Requests for other names are refused. By
            default that is not checked, because the program that mounts the dashboard can.
        query_timeout: How long a query may take, in seconds.

    Example:
        >>> from graphile_worker import App
        >>> from graphile_worker.web import Dashboard, token_auth
        >>> from starlette.applications import Starlette
        >>> app = App(dsn=dsn)
        >>> dashboard = Dashboard(app, auth=token_auth("a-long-random-secret"))
        >>> site = Starlette()
        >>> site.mount("/jobs", dashboard)
    """

    def __init__(
        self,
        app: App,
        *,
        auth: Auth | None = None,
        read_only: bool = False,
        redact: Callable[[str, Any], Any] | None = None,
        schemas: Iterable[str] = (),
        allowed_hosts: Iterable[str] | None = None,
        query_timeout: Duration = 3.0,
    ) -> None:
        if auth is not None and not callable(auth):
            raise ConfigurationError(f"Invalid auth {auth!r}: it must be a function of the request.")
        if redact is not None and not callable(redact):
            raise ConfigurationError(
                f"Invalid redact {redact!r}: it must be a function of the task's identifier and the payload."
            )
        if isinstance(schemas, str):
            raise ConfigurationError(f"Invalid schemas {schemas!r}: it must be a list of names.")
        self.app = app
        self.auth = auth
        self.read_only = read_only
        self.redact = redact
        self.timeout = seconds("query_timeout", query_timeout, "more than 0")
        self.allowed_hosts = (
            None if allowed_hosts is None else frozenset(map(_read_host, filter(None, allowed_hosts)))
        )
        if auth is None:
            logger.warning(
                "The dashboard has no auth=, so it answers every request from this machine, also those that "
                "a proxy on it passes on without saying so. Pass Dashboard(app, auth=...)."
            )
        main = find_schema(app.settings["schema"]).name
        names = dict.fromkeys([main, *(find_schema(name).name for name in schemas)])
        self._queues = {name: Queue(self, name) for name in names}
        self._main = self._queues[main]
        self._current: ContextVar[Queue] = ContextVar("queue", default=self._main)
        self._site = self._make_site()

    @property
    def queue(self) -> Queue:
        """The queue of the current request: that of the app's schema, or of the one in the path."""
        return self._current.get()

    @property
    def data(self) -> QueueData:
        """What reads the queue of the current request."""
        return self.queue.data

    @property
    def operations(self) -> Operations:
        """What changes the queue of the current request."""
        return self.queue.operations

    @property
    def schemas(self) -> list[str]:
        """The names of all schemas, that of the app first."""
        return list(self._queues)

    def schema_path(self, request: Request, schema: str) -> str:
        """Return the path of a schema's overview, from the root of the host."""
        root: str = quote(request.scope["state"]["root"])
        return f"{root}/" if schema == self._main.schema else f"{root}{_SCHEMAS}{quote(schema, safe='')}/"

    async def close(self) -> None:
        """Close the connections of this event loop. They are opened again when they are needed."""
        for queue in self._queues.values():
            await queue.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path_in(scope)
        has_started = False

        async def remember(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        guarded = security.guarding(remember, caches=path.startswith("/static/"))
        root = scope.get("root_path", "").rstrip("/")
        # `root` is where the dashboard is, `link_root` where its pages are: below it for other schemas.
        state = {**scope.get("state", {}), "root": root, "link_root": quote(root), "dashboard": self}
        state["access"] = None
        # Without the router of the program that mounts the dashboard, so that addresses are made by its own.
        inner = {**scope, "app": self, "root_path": root, "state": state}
        for name in ("router", "app_root_path", "endpoint", "path_params"):
            inner.pop(name, None)
        request = Request(inner, receive)
        token = self._current.set(self._main)
        try:
            response = await self._admit(request, path)
            if response is None:
                queue, inner["root_path"] = self._choose_queue(inner, path)
                state["link_root"] = quote(inner["root_path"])
                self._current.set(queue)
                await self._site(inner, receive, guarded)
                return
        except Exception as error:
            if has_started:
                raise
            response = await self._explain(request, error)
        finally:
            self._current.reset(token)
        await response(inner, receive, guarded)

    async def _admit(self, request: Request, path: str) -> Response | None:
        """Find out who the request is from; return a response if it goes no further."""
        security.check_host(request, self.allowed_hosts)
        if path.startswith("/static/"):  # the page that says how to sign in needs them too
            return None
        if request.method == "GET" and (found := security.login_redirect(request, self.auth)) is not None:
            return self._signed_in(request, path, *found)
        security.check_origin(request, request.method, self.auth)
        access = await security.authenticate(request, self.auth)
        request.scope["state"]["access"] = self._limited(access)
        return None

    def _signed_in(self, request: Request, path: str, target: str, cookie: str) -> Response:
        from graphile_worker.web.pages.rendering import signed_in_page  # noqa: PLC0415 - it imports this module

        response: Response
        if security.wants_json(request.scope, path):
            response = RedirectResponse(target, 303)
        else:
            response = signed_in_page(request, target)
        if cookie:
            root = request.scope["state"]["root"]
            response.headers["Set-Cookie"] = security.cookie_header(request, cookie, root)
        return response

    def _limited(self, access: Access) -> Access:
        return access.limited_to(READ_ONLY) if self.read_only else access

    def _choose_queue(self, scope: Scope, path: str) -> tuple[Queue, str]:
        root: str = scope["root_path"]
        if not path.startswith(_SCHEMAS):
            return self._main, root
        below = path.removeprefix(_SCHEMAS)
        for name, queue in self._queues.items():  # a name may contain slashes
            if below == name or below.startswith(f"{name}/"):
                return queue, f"{root}{_SCHEMAS}{name}"
        raise NotFoundError(f"This dashboard has no schema {below.partition('/')[0][:63]!r}.")

    async def _explain(self, request: Request, error: Exception) -> Response:
        from graphile_worker.web.api.responses import problem_response  # noqa: PLC0415 - it imports this module
        from graphile_worker.web.pages.routes import error_page  # noqa: PLC0415

        problem = problem_of(error)
        if problem.code == "internal":
            logger.error("A request of the dashboard failed", exc_info=error)
        path = _path_in(request.scope)
        response = None
        if not security.wants_json(request.scope, path):
            response = await error_page(self, request, problem)
        if response is None:
            response = problem_response(problem)
        challenge = getattr(self.auth, "challenge", None)
        if isinstance(error, security.NotAuthenticatedError) and challenge:
            response.headers["WWW-Authenticate"] = challenge
        return response

    def _make_site(self) -> Router:
        from graphile_worker.web.api.routes import api_routes  # noqa: PLC0415 - they import this module
        from graphile_worker.web.pages.routes import page_routes  # noqa: PLC0415

        routes = [
            *api_routes(self),
            *page_routes(self),
            Mount("/static", StaticFiles(directory=_STATIC), name="static"),
        ]
        return Router(routes)


def _read_host(name: str) -> str:
    found = name if security.is_address(name) else security.host_name(name)
    if not found:
        raise ConfigurationError(f"Invalid host {name!r} in allowed_hosts: write for example queue.example.")
    return found


def _path_in(scope: Mapping[str, Any]) -> str:
    """Return the path below the one where the dashboard is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    below = path[len(root) :] if root and (path == root or path.startswith(f"{root}/")) else path
    return below or "/"
