"""Changing rows together, and apart if the server refuses to.

A constraint or a trigger of the user's may refuse what a statement does to one row. That must not keep the
other rows from being changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import asyncpg

from graphile_worker._db.failures import is_refusal, message_of
from graphile_worker._db.sql import Schema, statements_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from graphile_worker._db.connect import Connection

T = TypeVar("T")


class Changed(NamedTuple, Generic[T]):
    """What came of it."""

    rows: list[asyncpg.Record]
    """What the statements returned."""
    refused: list[tuple[T, str]]
    """The items that the server refuses to change, and why."""


async def all_or_each(
    connection: Connection,
    schema: Schema,
    items: Sequence[T],
    change: Callable[[Sequence[T]], Awaitable[list[asyncpg.Record]]],
) -> Changed[T]:
    """Change all items; if the server refuses that, change those that it does not refuse.

    The items are halved until the refused ones are alone. To be called in a transaction.
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
