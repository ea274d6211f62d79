"""Cancelling jobs, also those that run: requests in a table of ours, and a channel that tells of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

import asyncpg

from graphile_worker._db.connect import read_committed
from graphile_worker._db.failures import is_refusal
from graphile_worker._db.one_by_one import all_or_each
from graphile_worker._db.sql import statements_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from graphile_worker._db.connect import Connection
    from graphile_worker._db.sql import Schema

CHANNEL = "_private_python_cancel"
"""Where it is told that there are requests, with the name of the schema: a database may have several."""
_FILE = "cancellations.sql"

CancelAnswer: TypeAlias = Literal["cancelled", "requested"]


class Answer(NamedTuple):
    """What it came to for a job."""

    answer: CancelAnswer
    runs: bool
    """Otherwise it was asked for because somebody's transaction has the row."""


class Request(NamedTuple):
    """That a job is to be cancelled which somebody holds."""

    job_id: int
    reason: str
    locked_by: str | None
    locked_at: datetime | None


async def cancel(connection: Connection, schema: Schema, job_id: int, reason: str) -> CancelAnswer | None:
    """Cancel the job if nobody has it, or ask whoever has it; None if it is over."""
    found = (await cancel_many(connection, schema, [job_id], reason)).get(job_id)
    return None if found is None else found.answer


async def cancel_many(
    connection: Connection, schema: Schema, job_ids: Sequence[int], reason: str
) -> dict[int, Answer]:
    """The same for many; those that are over are not in the answer."""
    statement = statements_for(schema, _FILE)["cancel"]
    rows = await connection.fetch(statement, job_ids, reason, CHANNEL, schema.name)
    return {row["id"]: Answer(cast("CancelAnswer", row["answer"]), row["runs"]) for row in rows}


async def settle(connection: Connection, schema: Schema) -> Sequence[Request]:
    """Do what can be done now about what was asked for; returns the rest.

    A request that the server refuses, because of a trigger on the job as a rule, keeps no other from being
    settled.
    """
    statements = statements_for(schema, _FILE)

    async def settle_some(ids: Sequence[int] | None) -> list[asyncpg.Record]:
        return await connection.fetch(statements["settle"], ids)

    try:
        async with connection.transaction() if connection.is_in_transaction() else nullcontext():
            rows = await settle_some(None)
    except asyncpg.PostgresError as error:
        if not is_refusal(error):
            raise
        async with read_committed(connection):
            ids = [row["id"] for row in await connection.fetch(statements["read_requests"])]
            rows = (await all_or_each(connection, schema, ids, settle_some)).rows
    return [Request(*row) for row in rows]
