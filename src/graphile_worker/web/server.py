"""Serve a dashboard without another program: the address, the link to open, and the end."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from graphile_worker.errors import ConfigurationError, MissingExtraError
from graphile_worker.web.security import is_loopback

try:
    import uvicorn
except ImportError as error:
    raise MissingExtraError(
        "The dashboard needs extra packages: pip install 'graphile-worker[web]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from graphile_worker.web.auth import Auth
    from graphile_worker.web.dashboard import Dashboard

_GRACE = 2
"""Seconds that open streams have to end when the server stops."""
_ANY = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - to recognize them


def check_exposed(host: str, auth: Auth | None) -> None:
    """Check that strangers cannot open a dashboard at this address.

    Raises:
        ConfigurationError: Other machines can reach it, and there is no `auth`.
    """
    if auth is None and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host!r} lets other machines open the dashboard, and so users must sign in. Set "
            "GRAPHILE_WORKER_WEB_TOKEN, or GRAPHILE_WORKER_WEB_USER=name:password, or pass --proxy-header. "
            "Or leave out --host."
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind a port, and return its socket.

    Raises:
        ConfigurationError: The port cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"Invalid host {host!r}: {error.strerror}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # the link works as soon as it is printed
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"Cannot listen on {host or '*'}:{port}: {error.strerror}. Choose another port with --port."
        ) from error
    return bound


def address_of(bound: socket.socket, root_path: str = "", token: str | None = None) -> str:
    """Return the address to open in a browser of this machine."""
    host, port = bound.getsockname()[:2]
    if host in _ANY:
        host = "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}{root_path}/" + (f"?token={quote(token)}" if token else "")


def make_server(dashboard: Dashboard, root_path: str = "") -> uvicorn.Server:
    """Return a server for a dashboard. Serve it with ``await server.serve(sockets=[...])``.

    Args:
        dashboard: The dashboard.
        root_path: The path at which a proxy serves it, whether or not the proxy passes that on.
    """
    # The address of the connection counts for proxy_auth, so headers must not replace it.
    return uvicorn.Server(
        uvicorn.Config(
            under(dashboard, root_path),
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=_GRACE,
        )
    )


def under(app: ASGIApp, root_path: str) -> ASGIApp:
    """Return the application as it is below a path."""
    root = "/" + root_path.strip("/") if root_path.strip("/") else ""
    if not root:
        return app

    async def prefixed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            path = scope["path"]
            whole = path if path == root or path.startswith(f"{root}/") else root + path
            scope = {**scope, "path": whole, "root_path": root}
        await app(scope, receive, send)

    return prefixed


@contextmanager
def serving(dashboard: Dashboard, bound: socket.socket) -> Iterator[None]:
    """Serve a dashboard on a thread for the duration of a ``with`` block."""
    server = make_server(dashboard)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[bound])), name="dashboard", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_GRACE + 1)
