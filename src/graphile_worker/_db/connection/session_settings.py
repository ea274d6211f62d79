"""The settings of the library's own sessions, which don't depend on those of the role or the database.

``search_path`` matters for security. With the default one, a function or operator that another role created
in ``public`` may match a call better than the one in ``pg_catalog``. It then runs with the worker's
privileges. The timeouts and the read-only default of a role or database are meant for other programs.

There are three ways to set them:

- A connection that the library opens sends them when it connects (`startup_settings`).
- A connection from the caller's pool gets them after it is acquired (`set_for_session`); the pool resets it.
- Behind a pooler that shares sessions, each transaction sets them for itself (`own_transaction`).

Connections that run user code never get these settings, so that names in that code resolve as the user
expects. Statements on a caller's connection can't set anything, so their text qualifies every name.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connection.transactions import transaction
from graphile_worker._db.sql_files import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker._db.connection.connect import Connection

_FILE = "session.sql"
_APPLICATION: Mapping[str, str] = {"application_name": "graphile-worker"}
_SETTINGS: Mapping[str, str] = {
    "search_path": "pg_catalog, pg_temp",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
}


def startup_settings(*, own: bool) -> dict[str, str]:
    """Return the settings to connect with: all of them, or only those that fit user code too."""
    return {**_APPLICATION, **_SETTINGS} if own else {**_APPLICATION}


def is_refusal(error: BaseException) -> bool:
    """Return whether a pooler rejected the connection because it doesn't support these settings."""
    return isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error)


async def set_for_session(connection: Connection) -> bool:
    """Set the settings for the session; return False, and set nothing, if a pooler shares the session."""
    statement = read_statements(_FILE)["set_for_session"]
    status = await connection.execute(statement.replace("{pid}", str(connection.get_server_pid())))
    return status == "SELECT 1"


@asynccontextmanager
async def own_transaction(connection: Connection) -> AsyncIterator[None]:
    """Open a transaction with the settings, in which each statement sees what was committed before it."""
    statements = read_statements(_FILE)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(_transaction(connection, statements["set_for_writing"]))
        except asyncpg.FeatureNotSupportedError:  # on a replica, where no setting allows writes
            await stack.enter_async_context(_transaction(connection, statements["set_for_transaction"]))
        yield


def _transaction(connection: Connection, settings: str) -> AbstractAsyncContextManager[None]:
    return transaction(connection, isolated=True, settings=settings)
