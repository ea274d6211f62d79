"""How the dashboard changes jobs: within limits of time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connection.session import Session
from graphile_worker._db.connection.transactions import transaction
from graphile_worker._db.sql_files import statements_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker._db.connection.connect import Connection

_FILE = "web_writes.sql"


class LimitedWrites(Session):
    """A session on another one's connections, for changes: each statement has a limit of time.

    Args:
        session: The session whose connections to use.
        seconds: How long a statement may take.
        lock_seconds: How long it may wait for a lock.
    """

    def __init__(self, session: Session, seconds: float, lock_seconds: float) -> None:
        super().__init__(session.schema, session.pool, session.logger, session.max_payload_size)
        limits = statements_for(session.schema, _FILE)["limits"]
        for name, limit in (("milliseconds", seconds), ("lock_milliseconds", lock_seconds)):
            limits = limits.replace(f"{{{name}}}", str(max(1, round(limit * 1000))))
        self._limits = limits

    @asynccontextmanager
    async def connection(self, given: Connection | None = None) -> AsyncIterator[Connection]:
        """Acquire a connection, in a transaction with the limits."""
        async with super().connection(given) as connection:
            is_shared = connection.is_in_transaction()  # behind a pooler, which shares its sessions
            async with transaction(connection, isolated=True, settings=self._limits):
                if is_shared:
                    await connection.execute(self._limits)
                yield connection


def waited_for_lock(error: BaseException | None) -> bool:
    """Return whether a statement ended because another transaction did not release a lock in time."""
    return isinstance(error, asyncpg.LockNotAvailableError)
