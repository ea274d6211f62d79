"""A proxy between a worker and the server, which can cut, stall and blackhole connections."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_Pair: TypeAlias = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Proxy:
    """A TCP proxy. The callback `cut_when` decides by the forwarded bytes whether to cut the connection.

    The proxy calls it with the direction ("query" or "reply") and the bytes, before it forwards them. True
    drops the bytes and cuts the connection. "after" forwards the bytes and then cuts the connection.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._blackholed: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting_allowed = asyncio.Event()
        self._connecting_allowed.set()
        self.cut_when: Callable[[str, bytes], bool | str] = lambda _direction, _data: False
        self.refusing = False
        self.frozen = False
        self.cuts = 0

    async def start(self) -> int:
        """Start to listen. Return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Cut all connections and stop listening."""
        assert self._server is not None
        self._server.close()
        self.cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> None:
        """Abort all connections."""
        for pair in list(self._pairs):
            self._cut(pair)

    def start_blackhole(self) -> None:
        """Discard all bytes in both directions without closing connections. New connections hang."""
        self._connecting_allowed.clear()
        self._blackholed |= self._pairs

    def end_blackhole(self) -> None:
        """Let new connections through again. Cut the connections that lost bytes: they are beyond repair."""
        for pair in self._blackholed & self._pairs:
            self._cut(pair)
        self._blackholed.clear()
        self._connecting_allowed.set()

    def _cut(self, pair: _Pair) -> None:
        self.cuts += 1
        self._pairs.discard(pair)
        for writer in pair:
            writer.transport.abort()

    def _keep(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())
        try:
            await self._connecting_allowed.wait()
            server_reader, server_writer = await self._connect()
        except (OSError, asyncio.CancelledError):  # the server is down, or the proxy is stopping
            writer.transport.abort()
            return
        pair = (writer, server_writer)
        self._pairs.add(pair)
        for direction, source, sink in (
            ("query", reader, server_writer),
            ("reply", server_reader, writer),
        ):
            self._keep(asyncio.create_task(self._pump(direction, source, sink, pair)))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.refusing:
            raise ConnectionRefusedError
        if self._host.startswith("/"):
            return await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        return await asyncio.open_connection(self._host, self._port)

    async def _pump(
        self, direction: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: _Pair
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                while self.frozen:  # noqa: ASYNC110 - a plain flag is easier to set
                    await asyncio.sleep(0.01)
                if pair in self._blackholed:
                    continue
                decision = self.cut_when(direction, data)
                if decision is True:
                    self._cut(pair)
                    return
                sink.write(data)
                await sink.drain()
                if decision == "after":
                    self._cut(pair)
                    return
        if pair in self._blackholed:
            return  # the blackhole hides the end of a connection too
        self._pairs.discard(pair)
        for writer in pair:
            writer.close()


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    """Start a proxy. Yield it, and the connection string that goes through it."""
    parts = urlsplit(dsn)
    query = {key: values[0] for key, values in parse_qs(parts.query).items()}
    host = query.pop("host", None) or parts.hostname or "localhost"
    port = int(query.pop("port", None) or parts.port or 5432)
    proxy = Proxy(host, port)
    local = await proxy.start()
    user = f"{parts.username or 'postgres'}" + (f":{parts.password}" if parts.password else "")
    query["sslmode"] = "disable"
    try:
        yield proxy, urlunsplit(("postgresql", f"{user}@127.0.0.1:{local}", parts.path, urlencode(query), ""))
    finally:
        await proxy.stop()
