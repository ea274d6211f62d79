"""The server that a connection string refers to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from graphile_worker._db.connection.dsn import EMBEDDED
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from graphile_worker.embedded import EmbeddedPostgres


class Server:
    """The server that a connection string refers to. An embedded server runs until the context ends.

    Not a generator, because an event loop that ends closes all generators at once. The server must outlive
    the connections to it.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._embedded: EmbeddedPostgres | None = None

    async def __aenter__(self) -> str:
        if not self._dsn.startswith(EMBEDDED):
            return self._dsn
        # Imported here, because it is only for development and not available on every platform.
        from graphile_worker.embedded import EmbeddedPostgres  # noqa: PLC0415

        folder = self._dsn.removeprefix(EMBEDDED)
        if folder.startswith("//"):
            raise ConfigurationError(
                "embedded: takes a folder, not a host: for example embedded:/some/folder"
            )
        server = EmbeddedPostgres(folder or None)
        starting = asyncio.ensure_future(asyncio.to_thread(server.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # a thread cannot be stopped, and the server would keep running
            server.close()
            raise
        self._embedded = server
        return server.dsn()

    async def __aexit__(self, *_exception: object) -> None:
        if self._embedded is None:
            return
        try:
            await asyncio.to_thread(self._embedded.close)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._embedded.close()
