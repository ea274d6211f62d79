"""Change rows together, or in smaller groups if the server rejects the change.

A user's constraint or trigger may reject the change to one row. That must not keep the other rows from being
changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import asyncpg

from graphile_worker._db.connection.error_mapping import is_refusal, message_of
from graphile_worker._db.sql_files import Schema, statements_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from graphile_worker._db.connection.connect import Connection

T = TypeVar("T")


class Changed(NamedTuple, Generic[T]):
    """The result of a change."""

    rows: list[asyncpg.Record]
    """The rows that the statements returned."""
    refused: list[tuple[T, str]]
    """The items that the server refuses to change, each with the server's message."""


async def all_or_each(
    connection: Connection,
    schema: Schema,
    items: Sequence[T],
    change: Callable[[Sequence[T]], Awaitable[list[asyncpg.Record]]],
) -> Changed[T]:
    """Change all items; if the server refuses that, change the items that it accepts.

    The items are halved until each refused item is alone. Must be called in a transaction.
    """
    changed: Changed[T] = Changed([], [])
    if not items:
        return changed
    await connection.execute(statements_for(schema, "exchange.sql")["check_constraints_now"])
    parts = [list(items)]
    while parts:
        part = parts.pop()
        try:
            async with connection.transaction():
                changed.rows.extend(await change(part))
        except asyncpg.PostgresError as error:
            if not is_refusal(error):
                raise
            if len(part) == 1:
                changed.refused.append((part[0], message_of(error)))
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
    return changed
