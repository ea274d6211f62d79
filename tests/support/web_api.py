"""Clients of a dashboard's API for tests."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

from graphile_worker import App
from graphile_worker.web import Dashboard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOCAL = ("127.0.0.1", 40_000)


@asynccontextmanager
async def api(app: App | str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a dashboard on this machine. Its requests come from the dashboard's own pages."""
    app = App(dsn=app) if isinstance(app, str) else app
    dashboard = Dashboard(app, **options)
    headers = {"Sec-Fetch-Site": "same-origin", "Accept": "application/json"}
    async with client(dashboard, headers=headers) as found:
        yield found
    await dashboard.close()
    await app.close()


def client(asgi: Any, *, address: tuple[str, int] = LOCAL, **options: Any) -> httpx.AsyncClient:
    """Return a client of an ASGI application, whose requests come from an address."""
    transport = httpx.ASGITransport(app=asgi, client=address)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8900", **options)
