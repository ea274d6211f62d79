"""Changing very many jobs: a batch is a transaction, and its jobs are in the order of their ids."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db import cancellations, queries
from graphile_worker._db.connect import read_committed
from graphile_worker._db.queries import composed
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.payload import as_one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from graphile_worker._db.cancellations import Answer
    from graphile_worker._db.connect import Connection
    from graphile_worker.job import Job

_FILE = "jobs.sql"


class Left(NamedTuple):
    """A job that was not changed, and what it is instead."""

    id: int
    locked_by: str | None
    state: str


async def count(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> int:
    """How many jobs there are for which all filters hold."""
    statement, values = composed(schema, statements_for(schema, _FILE)["count_selected"], filters)
    return int(str(await connection.fetchval(statement, *values)))


async def highest_id(connection: Connection, schema: Schema) -> int:
    """The id of the newest job; 0 if there is none."""
    return int(str(await connection.fetchval(statements_for(schema, _FILE)["highest_id"])))


async def change_batch(
    connection: Connection,
    schema: Schema,
    name: str,
    filters: Mapping[str, object],
    arguments: Sequence[object],
    *,
    limit: int,
) -> tuple[list[int], list[int], int]:
    """Change the first jobs for which the filters hold.

    Returns the ids of those that were seen, of those that were changed, and how many of these run.

    They are locked first, so that none of them becomes another between being chosen and being changed. What
    somebody else has locked at this moment is passed over, because to wait for it might take long.
    """
    statements = statements_for(schema, _FILE)
    async with in_order(connection, schema, filters):
        seen = await _page(connection, schema, {**filters, "first_jobs": limit, "lock": True})
        if not seen:
            return [], [], 0
        rows = await connection.fetch(statements[f"{name}_many"], seen, *arguments)
        if rows and name in {"retry", "reschedule"}:
            await connection.execute(statements["tell_of_due_jobs"], len(rows))
    return seen, sorted(row["id"] for row in rows), sum(row.get("runs", False) for row in rows)


async def cancel_batch(
    connection: Connection, schema: Schema, filters: Mapping[str, object], reason: str, *, limit: int
) -> tuple[list[int], Mapping[int, Answer]]:
    """The same for cancelling; with what it came to for each job.

    They are not locked, because their workers must be able to record what becomes of them.
    """
    async with in_order(connection, schema, filters):
        seen = await _page(connection, schema, {**filters, "first_jobs": limit})
        answers = await cancellations.cancel_many(connection, schema, seen, reason) if seen else {}
    return seen, answers


async def read_page(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> list[Job]:
    """Whole jobs, with their payloads as they are stored; one of the filters says how many."""
    async with in_order(connection, schema, filters):
        rows = await queries.fetch_jobs(connection, schema, **filters)
    return [queries.read_job(row, read_payload=as_one_line) for row in rows]


async def read_ids(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> list[int]:
    """Only their ids."""
    async with in_order(connection, schema, filters):
        return await _page(connection, schema, filters)


@asynccontextmanager
async def in_order(
    connection: Connection, schema: Schema, filters: Mapping[str, object]
) -> AsyncIterator[None]:
    """A transaction that walks along the ids, unless few jobs are named anyway."""
    async with read_committed(connection):
        if filters.get("having_key") is None and "having_id_any" not in filters:
            await connection.execute(statements_for(schema, _FILE)["do_not_sort"])
        yield


async def _page(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> list[int]:
    statement, values = composed(schema, statements_for(schema, _FILE)["select_ids"], filters)
    return [row["id"] for row in await connection.fetch(statement, *values)]


async def explain_left(connection: Connection, schema: Schema, ids: Sequence[int]) -> list[Left]:
    """Those of the ids that are there, and in which state."""
    rows = await connection.fetch(statements_for(schema, _FILE)["explain_left"], ids)
    return [Left(*row) for row in rows]


async def hides_rows(connection: Connection, schema: Schema) -> bool:
    """Whether the role does not see the jobs, and is not told so."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["hides_rows"], schema.name))
