"""Connections that callers bring, so that what we do is a part of their transaction.

This is the one place that knows of which drivers they may be. A connection of another driver would be
wrapped here in what our statements use of asyncpg's: `fetch`, `fetchrow`, `execute`, `transaction`,
`is_in_transaction` and `get_settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from graphile_worker._db.connect import Connection


def as_ours(connection: Any) -> Connection:
    """The caller's connection, as our statements use it.

    Refuses what is no connection: on a pool each statement would be in a transaction of its own.
    """
    if not isinstance(connection, asyncpg.Connection | PoolConnectionProxy):
        raise ConfigurationError(
            f"connection= takes a connection of asyncpg's, not a {type(connection).__name__}. "
            "To use a pool, pass it as WorkerUtils(pool=...)."
        )
    return connection
