"""Listen for notifications."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from graphile_worker._db.connection.connect import is_open

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from graphile_worker._db.connection.connect import Connection, Pool

_UNLISTEN_TIMEOUT = 2.0


class Listener:
    """A connection that listens, and an event that is set when the connection closes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.closed = asyncio.Event()


@asynccontextmanager
async def listening(
    pool: Pool, channels: Sequence[str], callback: Callable[[str, str], None]
) -> AsyncIterator[Listener]:
    """Listen on a dedicated connection; call `callback` with the channel and message of each notification."""

    def on_notification(_connection: object, _pid: int, channel: str, message: object) -> None:
        callback(channel, str(message))

    def on_termination(_connection: object) -> None:
        listener.closed.set()

    async with pool.dedicated() as connection:
        listener = Listener(connection)
        connection.add_termination_listener(on_termination)
        try:
            for channel in channels:
                await connection.add_listener(channel, on_notification)
            yield listener
        finally:
            if is_open(connection):
                connection.remove_termination_listener(on_termination)
            # The caller's pool expects the connection without listeners. The server may not respond any more,
            # so this is tried only once, with a timeout.
            with suppress(Exception):
                async with asyncio.timeout(_UNLISTEN_TIMEOUT):
                    for channel in channels:
                        if is_open(connection):
                            await connection.remove_listener(channel, on_notification)
