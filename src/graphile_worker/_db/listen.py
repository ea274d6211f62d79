"""Hearing notifications."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from graphile_worker._db.connect import Connection, Pool


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
            connection.remove_termination_listener(on_termination)
            for channel in channels:
                if not connection.is_closed():
                    await connection.remove_listener(channel, on_notification)
