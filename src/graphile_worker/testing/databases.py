"""Create a fresh database for each test, copied from a template in milliseconds."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from graphile_worker._db.connection.connect import connect
from graphile_worker._db.schema.databases import create_database, drop_database, dsn_of
from graphile_worker._db.schema.migrate import migrate
from graphile_worker.client import find_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence

T = TypeVar("T")


class Databases:
    """Temporary databases on one server, with the schema installed or empty.

    Args:
        server_dsn: A connection string for a role that may create databases. It names an existing database.
        schema: The name of the schema to install [``GRAPHILE_WORKER_SCHEMA``, or ``graphile_worker``].

    Example:
        >>> import asyncio
        >>> from graphile_worker.testing import Databases
        >>> async def main():
        ...     databases = Databases(dsn)
        ...     async with databases.fresh() as fresh_dsn:
        ...         ...  # add jobs, run workers
        ...     await databases.close()
        >>> asyncio.run(main())

    In code without an event loop:
        >>> with Databases(dsn) as databases, databases.fresh_sync() as fresh_dsn:
        ...     pass
    """

    def __init__(self, server_dsn: str, *, schema: str | None = None) -> None:
        self._server_dsn = server_dsn
        self._prefix = f"gw_test_{os.getpid()}_{secrets.token_hex(3)}"
        self._numbers = itertools.count(1)
        self._template: str | None = None
        self._schema = find_schema(schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        _run_in_thread(self.close())

    @asynccontextmanager
    async def fresh(self, *, empty: bool = False) -> AsyncIterator[str]:
        """Yield the connection string of a new database, and drop the database afterwards.

        Args:
            empty: Whether to leave out the schema.

        Raises:
            AssertionError: Connections to the database were still open at the end.
        """
        name = await self._create(empty=empty)
        try:
            yield dsn_of(self._server_dsn, name)
        finally:
            leaked = await self._drop(name)
        _check_leaks(leaked)

    @contextmanager
    def fresh_sync(self, *, empty: bool = False) -> Iterator[str]:
        """Create a database like `fresh`, for code without an event loop."""
        name = _run_in_thread(self._create(empty=empty))
        try:
            yield dsn_of(self._server_dsn, name)
        finally:
            leaked = _run_in_thread(self._drop(name))
        _check_leaks(leaked)

    async def close(self) -> None:
        """Drop the template."""
        if self._template is not None:
            async with connect(self._server_dsn) as connection:
                await drop_database(connection, self._template)
            self._template = None

    async def _create(self, *, empty: bool) -> str:
        name = f"{self._prefix}_{next(self._numbers)}"
        template = "template0" if empty else await self._ensure_template()
        async with connect(self._server_dsn) as connection:
            await create_database(connection, name, template=template)
        return name

    async def _drop(self, name: str) -> Sequence[str]:
        async with connect(self._server_dsn) as connection:
            return await drop_database(connection, name)

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
        else:  # another task created a template at the same time
            async with connect(self._server_dsn) as connection:
                await drop_database(connection, name)
        return self._template


def _check_leaks(leaked: Sequence[str]) -> None:
    if leaked:
        raise AssertionError("Connections were left open:\n" + "\n".join(leaked))


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a thread with its own event loop, and return its result."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
