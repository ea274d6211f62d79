"""`Session`: one schema and the connections to its database."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from graphile_worker._base.logs import never_raising
from graphile_worker._base.payload import MAX_PAYLOAD_SIZE
from graphile_worker._db.connection.any_connection import is_blocking, run
from graphile_worker._db.connection.caller_connection import adapt_connection
from graphile_worker._db.connection.error_mapping import translate_errors
from graphile_worker._db.connection.retryable import retrying
from graphile_worker._db.schema.migrate import check_adoptable
from graphile_worker.errors import ConfigurationError, DatabaseError, SchemaError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._db.connection.any_connection import Operation
    from graphile_worker._db.connection.connect import Connection, Pool
    from graphile_worker._db.sql_files import Schema

T = TypeVar("T")
_ATTEMPTS = 10


class SessionService(Protocol):
    """Something that runs in the background on the connections of a session, and is closed with it."""

    async def close(self) -> None:
        """Stop."""


K = TypeVar("K", bound=SessionService)


class Session:
    """Runs operations on connections from a pool, or on the caller's connection.

    Args:
        schema: The schema.
        pool: The connections.
        logger: Where to log that an operation is retried.
        max_payload_size: The largest payload to accept when a job is added, in bytes of JSON.
    """

    def __init__(
        self, schema: Schema, pool: Pool, logger: AnyLogger, max_payload_size: int = MAX_PAYLOAD_SIZE
    ) -> None:
        # The type is checked first, because `in` compares a value that is not an int with every number in the
        # range.
        if type(max_payload_size) is not int or max_payload_size not in range(1, 2**30):
            raise ConfigurationError(
                f"Invalid max_payload_size {max_payload_size!r}: must be a number of bytes from 1 to "
                f"{2**30 - 1:,}, the most that PostgreSQL stores in one value."
            )
        self.schema = schema
        self.pool = pool
        self.logger = never_raising(logger)
        self.max_payload_size = max_payload_size
        self._services: dict[Callable[[Session], SessionService], Any] = {}

    def service(self, kind: Callable[[Session], K]) -> K:
        """Return the session's service of this kind. It is created when it is first needed."""
        if kind not in self._services:
            self._services[kind] = kind(self)
        service: K = self._services[kind]
        return service

    async def close_services(self) -> None:
        """Close the services, because the pool will be closed."""
        for service in self._services.values():
            await service.close()

    async def call(
        self,
        operation: Callable[[Connection], Awaitable[T]],
        connection: Connection | None = None,
        *,
        attempts: int = _ATTEMPTS,
    ) -> T:
        """Return the result of an operation, which must be one statement or one transaction.

        On a connection from the pool, the operation is retried if the server rolled it back because of a
        transient error. On the caller's connection it is never retried, because the rest of the caller's
        transaction cannot be repeated here.
        """

        async def once() -> T:
            async with self.connection() as own:
                return await operation(own)

        if connection is None:
            try:
                with translate_errors(self.schema):
                    return await retrying(once, attempts=attempts, logger=self.logger)
            except SchemaMissingError as error:
                raise await self._why_missing(error) from error.__cause__
        if is_blocking():
            raise ConfigurationError(
                "This method takes only an asyncpg connection, which has to be awaited. Use the method "
                "without _sync, or leave out connection=."
            )
        adapted = adapt_connection(connection)
        with translate_errors(self.schema):
            return await operation(adapted)

    async def run(
        self,
        own: Callable[[Connection], Awaitable[T]],
        operation: Callable[[], Operation[T]],
        connection: Any,
    ) -> T:
        """Call `own` with a connection from the pool, or run the operation on the caller's connection."""
        if connection is None:
            return await self.call(own)
        return await run(connection, self.schema, operation())

    async def _why_missing(self, error: SchemaMissingError) -> SchemaError:
        """Return the error from `migrate` if it would reject the schema too; otherwise the error itself.

        A rejected schema lacks objects as well, but `migrate` cannot add them. So the advice to run it would
        not help.
        """
        try:
            with translate_errors(self.schema):
                async with self.connection() as own:
                    await check_adoptable(own, self.schema)
        except SchemaError as refusal:
            return refusal
        except DatabaseError:
            pass  # keep the original error
        return error

    @asynccontextmanager
    async def connection(self, given: Connection | None = None) -> AsyncIterator[Connection]:
        """Acquire a connection from the pool, or use the given one."""
        if given is not None:
            yield adapt_connection(given)
        else:
            async with self.pool.connection() as own:
                yield own
