"""`Session`: one schema, and the connections to work on it with."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from graphile_worker._db.callers import as_ours
from graphile_worker._db.failures import translated
from graphile_worker._db.migrate import check_adoptable
from graphile_worker._db.retryable import retrying
from graphile_worker.errors import ConfigurationError, DatabaseError, SchemaError, SchemaMissingError
from graphile_worker.logs import never_raising
from graphile_worker.payload import MAX_PAYLOAD_SIZE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from graphile_worker._db.connect import Connection, Pool
    from graphile_worker._db.sql import Schema
    from graphile_worker.logs import AnyLogger

T = TypeVar("T")
_ATTEMPTS = 10


class Session:
    """Runs operations on connections of a pool, or on one that the caller brings.

    Args:
        schema: The schema.
        pool: The connections.
        logger: Where to say that an operation is repeated.
        max_payload_size: How many bytes of JSON a payload may have when it is added.
    """

    def __init__(
        self, schema: Schema, pool: Pool, logger: AnyLogger, max_payload_size: int = MAX_PAYLOAD_SIZE
    ) -> None:
        # By its type first: a range looks for what is not an int at each of its numbers.
        if type(max_payload_size) is not int or max_payload_size not in range(1, 2**30):
            raise ConfigurationError(
                f"max_payload_size is {max_payload_size!r}; it must be a number of bytes from 1 to "
                f"{2**30 - 1:,}: PostgreSQL stores no more in one value."
            )
        self.schema = schema
        self.pool = pool
        self.logger = never_raising(logger)
        self.max_payload_size = max_payload_size

    async def call(
        self,
        operation: Callable[[Connection], Awaitable[T]],
        connection: Connection | None = None,
        *,
        attempts: int = _ATTEMPTS,
    ) -> T:
        """The result of an operation that is one statement, or one transaction.

        On a connection of ours it is repeated if the server rolled it back for a reason that passes. On the
        caller's never: what else is in the transaction is not ours to repeat.
        """

        async def once() -> T:
            async with self.connection() as own:
                return await operation(own)

        if connection is None:
            try:
                with translated(self.schema):
                    return await retrying(once, attempts=attempts, logger=self.logger)
            except SchemaMissingError as error:
                raise await self._why_missing(error) from error.__cause__
        ours = as_ours(connection)
        with translated(self.schema):
            return await operation(ours)

    async def _why_missing(self, error: SchemaMissingError) -> SchemaError:
        """A schema that we refuse lacks something too, and there it is no help to be sent to `migrate`."""
        try:
            with translated(self.schema):
                async with self.connection() as own:
                    await check_adoptable(own, self.schema)
        except SchemaError as refusal:
            return refusal
        except DatabaseError:
            pass  # then what is known already has to do
        return error

    @asynccontextmanager
    async def connection(self, given: Connection | None = None) -> AsyncIterator[Connection]:
        """The connection given, or one of ours."""
        if given is not None:
            yield as_ours(given)
        else:
            async with self.pool.connection() as own:
                yield own
