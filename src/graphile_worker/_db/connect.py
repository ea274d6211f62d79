"""From a connection string to a connection, with errors that say what to do."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import asyncpg

from graphile_worker.errors import ConfigurationError, DatabaseError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EMBEDDED = "embedded:"


def find_dsn(dsn: str | None) -> str:
    """The connection string given, or else what the environment says.

    With none at all it is an error: a worker must not pick a database by chance.
    """
    if dsn:
        return dsn
    if url := os.environ.get("DATABASE_URL"):
        return url
    if os.environ.get("PGDATABASE"):
        return "postgresql://"  # the driver reads the other PG* variables
    raise ConfigurationError(
        "No database was named. Pass a connection string "
        "(postgresql://user@host/database), or set DATABASE_URL or PGDATABASE."
    )


@asynccontextmanager
async def connect(dsn: str | None) -> AsyncIterator[asyncpg.Connection]:
    """A connection that is closed at the end; an embedded server is kept up for as long."""
    dsn = find_dsn(dsn)
    if dsn.startswith(EMBEDDED):
        # Here, because it is for development alone, and not for every platform.
        from graphile_worker.embedded import EmbeddedPostgres  # noqa: PLC0415

        with EmbeddedPostgres(dsn.removeprefix(EMBEDDED) or None) as server:
            async with connect(server.dsn()) as connection:
                yield connection
        return
    connection = await open_connection(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def open_connection(dsn: str) -> asyncpg.Connection:
    """A connection of the driver's, or a `DatabaseError` of one sentence."""
    try:
        return await asyncpg.connect(dsn)
    except asyncpg.InvalidCatalogNameError as error:
        raise DatabaseError(f"{_sentence(error)} Create it, or name another.") from error
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        raise DatabaseError(f"The server at {describe(dsn)} refuses the user: {_sentence(error)}") from error
    except asyncpg.PostgresError as error:
        raise DatabaseError(
            f"The server at {describe(dsn)} accepts no connection: {_sentence(error)}"
        ) from error
    except OSError as error:
        raise DatabaseError(
            f"Cannot reach the database at {describe(dsn)}: {error}. "
            "Is the server running, and are host and port right?"
        ) from error
    except (asyncpg.ClientConfigurationError, ValueError):
        # Not chained: the driver's message may quote a part of the password.
        raise ConfigurationError(
            "The connection string cannot be read. It looks like postgresql://user:password@host/"
            "database, with special characters in the password percent-encoded."
        ) from None


def describe(dsn: str) -> str:
    """Where a connection string points to, for messages: never the password."""
    try:
        parts = urlsplit(dsn)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "the given address"
    where = host or os.environ.get("PGHOST") or "the local socket"
    if port:
        where += f":{port}"
    return where + (parts.path if len(parts.path) > 1 else "")


def _sentence(error: asyncpg.PostgresError) -> str:
    text = str(error).strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
