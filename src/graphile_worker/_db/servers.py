"""The server that a connection string names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from graphile_worker._db.dsn import EMBEDDED
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from graphile_worker.embedded import EmbeddedPostgres


class Server:
    """The server that a connection string names; an embedded one is kept up for as long.

    Not a generator: when an event loop ends, all of those are closed at once, and this outlives connections.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._embedded: EmbeddedPostgres | None = None

    async def __aenter__(self) -> str:
        if not self._dsn.startswith(EMBEDDED):
            return self._dsn
        # Here, because it is for development alone, and not for every platform.
        from graphile_worker.embedded import EmbeddedPostgres  # noqa: PLC0415

        folder = self._dsn.removeprefix(EMBEDDED)
        if folder.startswith("//"):
            raise ConfigurationError(
                "embedded: takes a folder and no host, for example embedded:/some/folder"
            )
        server = EmbeddedPostgres(folder or None)
        starting = asyncio.ensure_future(asyncio.to_thread(server.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # a thread cannot be stopped, and would leave us a user for ever
            server.close()
            raise
        self._embedded = server
        return server.dsn()

    async def __aexit__(self, *_exception: object) -> None:
        if self._embedded is None:
            return
        try:
            await asyncio.to_thread(self._embedded.close)
        except RuntimeError:  # the program is ending, and begins no more threads
            self._embedded.close()
