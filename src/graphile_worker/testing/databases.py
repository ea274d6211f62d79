"""A fresh database for each test, copied from a template in milliseconds."""

from __future__ import annotations

import itertools
import os
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from graphile_worker._db.connect import connect
from graphile_worker._db.databases import create_database, drop_database, dsn_of
from graphile_worker._db.migrate import migrate
from graphile_worker.client import find_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Databases:
    """Makes databases on one server, with the schema installed or empty.

    Args:
        server_dsn: A connection string for a role that may create databases, naming a database that
            is there already.
        schema: The name of the schema to install; by default ``GRAPHILE_WORKER_SCHEMA``, or
            ``graphile_worker``.

    Example:
        >>> import asyncio
        >>> from graphile_worker.testing import Databases
        >>> async def main():
        ...     databases = Databases(dsn)
        ...     async with databases.fresh() as fresh_dsn:
        ...         ...  # add jobs, run workers
        ...     await databases.close()
        >>> asyncio.run(main())
    """

    def __init__(self, server_dsn: str, *, schema: str | None = None) -> None:
        self._server_dsn = server_dsn
        self._prefix = f"gw_test_{os.getpid()}_{secrets.token_hex(3)}"
        self._numbers = itertools.count(1)
        self._template: str | None = None
        self._schema = find_schema(schema)

    @asynccontextmanager
    async def fresh(self, *, empty: bool = False) -> AsyncIterator[str]:
        """The connection string of a new database, dropped at the end.

        Args:
            empty: Without the schema.

        Raises:
            AssertionError: At the end, connections to the database were still open.
        """
        name = f"{self._prefix}_{next(self._numbers)}"
        template = "template0" if empty else await self._ensure_template()
        async with connect(self._server_dsn) as connection:
            await create_database(connection, name, template=template)
        try:
            yield dsn_of(self._server_dsn, name)
        finally:
            async with connect(self._server_dsn) as connection:
                leaked = await drop_database(connection, name)
        if leaked:
            raise AssertionError("Connections were left open:\n" + "\n".join(leaked))

    async def close(self) -> None:
        """Drop the template."""
        if self._template is not None:
            async with connect(self._server_dsn) as connection:
                await drop_database(connection, self._template)
            self._template = None

    async def _ensure_template(self) -> str:
        if self._template is not None:
            return self._template
        name = f"{self._prefix}_template_{next(self._numbers)}"
        async with connect(self._server_dsn) as connection:
            await create_database(connection, name)
        async with connect(dsn_of(self._server_dsn, name)) as connection:
            await migrate(connection, self._schema)
        if self._template is None:
            self._template = name
        else:  # somebody else needed one at the same time
            async with connect(self._server_dsn) as connection:
                await drop_database(connection, name)
        return self._template
