"""Hearing notifications."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from graphile_worker._db.connect import is_open

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from graphile_worker._db.connect import Connection, Pool

_GOODBYE = 2.0


class Ear:
    """A connection that listens, and when it went deaf."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.closed = asyncio.Event()


@asynccontextmanager
async def listening(
    pool: Pool, channels: Sequence[str], heard: Callable[[str, str], None]
) -> AsyncIterator[Ear]:
    """Call `heard` with channel and message of each notification, on a connection for nothing else."""

    def on_notification(_connection: object, _pid: int, channel: str, message: object) -> None:
        heard(channel, str(message))

    def on_termination(_connection: object) -> None:
        ear.closed.set()

    async with pool.dedicated() as connection:
        ear = Ear(connection)
        connection.add_termination_listener(on_termination)
        try:
            for channel in channels:
                await connection.add_listener(channel, on_notification)
            yield ear
        finally:
            if is_open(connection):
                connection.remove_termination_listener(on_termination)
            # A pool wants it back as it was. Whoever does not answer now is not asked a second time.
            with suppress(Exception):
                async with asyncio.timeout(_GOODBYE):
                    for channel in channels:
                        if is_open(connection):
                            await connection.remove_listener(channel, on_notification)
