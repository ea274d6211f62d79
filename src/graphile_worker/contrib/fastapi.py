"""FastAPI: a lifespan, a dependency that adds jobs in the session of a request, and a health router.

Needs FastAPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_origin

from graphile_worker._client.bound import BoundApp
from graphile_worker.errors import ConfigurationError, MissingExtraError

try:
    from fastapi import APIRouter, Depends, params
except ImportError as error:
    raise MissingExtraError("graphile_worker.contrib.fastapi needs FastAPI: pip install fastapi") from error

from graphile_worker.contrib.starlette import health_routes, lifespan  # after FastAPI, whose error is clearer

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.app import App

__all__ = ["BoundApp", "bound_app", "health_router", "lifespan"]


def bound_app(app: App, session: Any, *, require_transaction: bool = False) -> Callable[..., BoundApp]:
    """Return a dependency: the app, bound to the session of the request.

    Jobs that an endpoint adds with it are committed or rolled back together with the session.

    Args:
        app: The app.
        session: What gives the endpoint its session or connection: the function, ``Depends(...)``, or the
            ``Annotated`` type. Pass the same as the endpoint uses. FastAPI then calls the function once in a
            request, so both get the same session.
        require_transaction: Whether to refuse a session that is not in a transaction.

    Raises:
        ConfigurationError: `session` is none of these.

    Example:
        >>> from typing import Annotated
        >>> import asyncpg
        >>> from fastapi import Depends, FastAPI
        >>> from fastapi.testclient import TestClient
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.fastapi import BoundApp, bound_app, lifespan
        >>> app = App(dsn=dsn)
        >>> @app.task
        ... async def hello(name: str) -> None: ...
        >>> async def open_transaction():
        ...     async with app.utils.connection() as connection, connection.transaction():
        ...         yield connection
        >>> Transaction = Annotated[asyncpg.Connection, Depends(open_transaction, scope="function")]
        >>> Jobs = Annotated[BoundApp, Depends(bound_app(app, Transaction))]
        >>> web = FastAPI(lifespan=lifespan(app))
        >>> @web.post("/greetings/{name}")
        ... async def greet(name: str, jobs: Jobs) -> str:
        ...     return (await jobs.using(hello).enqueue(name)).task_identifier
        >>> with TestClient(web) as client:
        ...     client.post("/greetings/Ann").json()
        'hello'
    """
    annotation = _annotation(session)
    if annotation is None:
        raise ConfigurationError(
            f"bound_app takes what gives the endpoint its session, not {session!r}. Pass the function, "
            "Depends(...), or Annotated[AsyncSession, Depends(...)]."
        )

    def bind(session: Any) -> BoundApp:
        return app.bind(session, require_transaction=require_transaction)

    bind.__annotations__["session"] = annotation
    return bind


def _annotation(session: Any) -> Any:
    """Return the annotation of a parameter that receives the session; None if it cannot."""
    if isinstance(session, params.Depends):
        return Annotated[Any, session]
    if get_origin(session) is Annotated:
        has_dependency = any(isinstance(one, params.Depends) for one in session.__metadata__)
        return session if has_dependency else None
    is_function = callable(session) and not isinstance(session, type)
    return Annotated[Any, Depends(session)] if is_function else None


def health_router(app: App) -> APIRouter:
    """Return a router with ``/live`` and ``/ready``: see `graphile_worker.contrib.starlette.health_routes`.

    Args:
        app: The app.

    Example:
        >>> from fastapi import FastAPI
        >>> from fastapi.testclient import TestClient
        >>> from graphile_worker import App
        >>> from graphile_worker.contrib.fastapi import health_router, lifespan
        >>> app = App(dsn=dsn)
        >>> web = FastAPI(lifespan=lifespan(app))
        >>> web.include_router(health_router(app), prefix="/health")
        >>> with TestClient(web) as client:
        ...     client.get("/health/ready").json()
        {'ready': True, 'reason': None}
    """
    router = APIRouter()
    router.routes.extend(health_routes(app))
    return router
