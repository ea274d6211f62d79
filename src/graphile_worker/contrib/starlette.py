"""Starlette: a lifespan that opens the app or runs a worker, and routes for health checks.

Applications for FastAPI import the same lifespan from `graphile_worker.contrib.fastapi`. Needs Starlette.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Unpack

from graphile_worker.contrib import _serving
from graphile_worker.errors import MissingExtraError

try:
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(
        "graphile_worker.contrib.starlette needs Starlette: pip install starlette"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from starlette.requests import Request

    from graphile_worker._worker.run_options import AppRunOptions
    from graphile_worker.app import App

__all__ = ["health_routes", "lifespan"]

_STATE = "graphile_worker"
"""The key of the worker in the state of the server's lifespan."""


def lifespan(
    app: App,
    inner: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
    *,
    run_worker: bool = False,
    **options: Unpack[AppRunOptions],
) -> Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """Return a lifespan for a Starlette or FastAPI application.

    It closes the connections of the app when the server stops. With ``run_worker=True`` a worker runs while
    the server runs, in the same event loop. Each server process then has a worker of its own.

    Args:
        app: The app.
        inner: The application's own lifespan. It begins before the worker and ends after it, so tasks can
            use what it opens. The state that it yields is kept.
        run_worker: Whether to run a worker.
        options: Options of the worker, such as ``concurrency=10``: see docs/reference/settings.md. Also
            without a worker, the schema is installed or upgraded unless ``migrate=False``.

    Raises:
        ConfigurationError: There are options for a worker, but ``run_worker`` is not set.

    Example:
        >>> from starlette.applications import Starlette
        >>> from starlette.testclient import TestClient
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.starlette import health_routes, lifespan
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> web = Starlette(routes=health_routes(app), lifespan=lifespan(app, run_worker=True))
        >>> with TestClient(web) as client:
        ...     client.get("/ready").status_code
        200
    """
    _serving.check_worker_options(options, run_worker=run_worker)

    @asynccontextmanager
    async def composed(web: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with (
            nullcontext() if inner is None else inner(web) as state,
            _serving.serving(app, options, run_worker=run_worker) as runner,
        ):
            yield {**(state or {}), _STATE: runner}

    return composed


def health_routes(app: App) -> list[Route]:
    """Return the routes ``/live`` and ``/ready``, for the health checks of a container platform.

    They report the worker that runs in this server. Without one, the server is ready if it can read the
    queue. The status is 200 or 503, and the body is JSON.

    Args:
        app: The app.
    """

    async def live(request: Request) -> Response:
        return _as_response(await _serving.live(_runner_of(request)))

    async def ready(request: Request) -> Response:
        return _as_response(await _serving.ready(app, _runner_of(request)))

    return [
        Route("/live", live, include_in_schema=False),
        Route("/ready", ready, include_in_schema=False),
    ]


def _runner_of(request: Request) -> Any:
    return getattr(request.state, _STATE, None)


def _as_response(answer: tuple[int, bytes]) -> Response:
    status, body = answer
    return Response(body, status, media_type="application/json")
