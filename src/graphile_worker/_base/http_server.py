"""`HttpServer`: a small HTTP server for health checks and metrics, and `fetch`, its client.

It answers one request per connection. It is not meant for the open internet.
"""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    Page = Callable[[], Awaitable["Response"]]

_MAX_HEADER_BYTES = 16_384
_REQUEST_TIMEOUT = 5.0
_MAX_CONNECTIONS = 64
"""Open connections at once. One more closes the oldest connection that has not sent its request."""
_BACKLOG = 32
_LOG_INTERVAL = 60.0
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Response(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes
    content_type: str = "application/json"


_REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class HttpServer:
    """Serves pages over HTTP, on the event loop that calls `listen`.

    Args:
        pages: The function for each path. Pages may be added while the server runs.
        log_error: Called with an error that prevents the server from accepting connections, at most once a
            minute.
    """

    def __init__(self, pages: Mapping[str, Page], log_error: Callable[[BaseException], object]) -> None:
        self._pages = pages
        self._log_error = log_error
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, None] = {}
        self._logged_at: float | None = None

    async def listen(self, address: tuple[str | None, int] | socket.socket) -> None:
        """Serve requests at a host and port, or on a listening socket.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        limits: dict[str, Any] = {"limit": _MAX_HEADER_BYTES, "backlog": _BACKLOG}
        if not isinstance(address, tuple):
            self._server = await asyncio.start_unix_server(self._serve, sock=address, **limits)
            return
        host, port = address
        try:
            self._server = await asyncio.start_server(self._serve, host, port, **limits)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on the health address {host or ''}:{port}: {error.strerror or error}."
            ) from None

    async def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log once a minute that no connection can be accepted. asyncio would log it many times a second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "socket" in context):
            loop.default_exception_handler(context)
            return
        now = monotonic()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            self._log_error(error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= _MAX_CONNECTIONS:  # health probes send their request at once
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.transport.abort()
        self._clients[writer] = None
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(request))
                    await writer.drain()
        finally:
            self._clients.pop(writer, None)
            writer.close()

    async def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.decode("latin-1").partition(" ")
        page = self._pages.get(rest.partition(" ")[0].partition("?")[0])
        if method not in {"GET", "HEAD"}:
            response = Response(405, b"{}")
        elif page is None:
            response = Response(404, msgspec.json.encode({"paths": list(self._pages)}))
        else:
            response = await _call(page)
        head = (
            f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\n"
            f"Content-Type: {response.content_type}\r\nContent-Length: {len(response.body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else response.body)


async def _call(page: Page) -> Response:
    try:
        return await page()
    except Exception as error:  # noqa: BLE001 - a page may be the user's code, such as a collector of metrics
        return Response(500, msgspec.json.encode({"error": repr(error)}))


async def fetch(socket_path: Path, path: str) -> Response:
    """Request a page from the server that listens on a Unix socket.

    Raises:
        OSError: No server listens there, or it closed the connection without an answer.
    """
    reader, writer = await asyncio.open_unix_connection(socket_path)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    try:
        status = int(lines[0].split(" ")[1])
    except (IndexError, ValueError):
        raise ConnectionError("The connection was closed without an answer.") from None
    return Response(status, body)
