"""The settings of our own sessions, which don't depend on those of the role or the database.

``search_path`` is a matter of security: with the default one, a function or operator that another role made
in ``public`` may fit a call better than the one in ``pg_catalog``, and then runs with the worker's rights.
The timeouts and the read-only default are meant for other programs.

There are three ways to set them:

- A connection that we open brings them along when it connects (`startup_settings`).
- A connection from a caller's pool gets them after it is acquired (`set_for_session`); the pool resets it.
- Behind a pooler that shares sessions, each transaction sets them for itself (`own_transaction`).

Connections that run user code never get them: names in that code are resolved as the user set it up.
Statements on a caller's connection can't set anything. Their text qualifies every name instead.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.sql import read_statements
from graphile_worker._db.transactions import transaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from graphile_worker._db.connect import Connection

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
    """Return the settings to connect with: all of them, or only those that user code may have too."""
    return {**_APPLICATION, **_SETTINGS} if own else {**_APPLICATION}


def is_refusal(error: BaseException) -> bool:
    """Tell whether a pooler refused to connect because it doesn't pass on such settings."""
    return isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error)


async def set_for_session(connection: Connection) -> bool:
    """Set them in the session; return False, and set nothing, if a pooler shares it with others."""
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
        except asyncpg.FeatureNotSupportedError:  # a replica, where nothing can be written whatever is set
            await stack.enter_async_context(_transaction(connection, statements["set_for_transaction"]))
        yield


def _transaction(connection: Connection, settings: str) -> AbstractAsyncContextManager[None]:
    return transaction(connection, isolated=True, settings=settings)
