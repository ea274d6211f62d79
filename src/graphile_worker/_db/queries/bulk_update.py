"""Change very many jobs in batches: each batch is one transaction, in the order of the jobs' ids."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._base.payload import as_one_line
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.queries import by_hand, cancellations, jobs
from graphile_worker._db.queries.failures import record_failures, recording
from graphile_worker._db.sql_files import Schema, statements_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.queries.cancellations import CancelResult
    from graphile_worker.job import Job

_FILE = "jobs.sql"


class UnchangedJob(NamedTuple):
    """A job that was not changed, and the state that it is in."""

    id: int
    locked_by: str | None
    state: str


async def count(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> int:
    """Count the jobs that match all filters."""
    statement, values = jobs.compose(schema, statements_for(schema, _FILE)["count_selected"], filters)
    return int(str(await connection.fetchval(statement, *values)))


async def highest_id(connection: Connection, schema: Schema) -> int:
    """Return the id of the newest job; 0 if there is none."""
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
    """Change the first jobs that match the filters.

    The rows are locked first, so that no job changes between being selected and being changed. Rows that
    another transaction has locked are skipped, because waiting for them might take long.

    Returns:
        The ids of the selected jobs, the ids of the changed jobs, and how many of the changed jobs are
        running.
    """
    statements = statements_for(schema, _FILE)
    selection = {**filters, "first_jobs": limit, "lock": True}
    prepare = [_selecting(schema, selection)[0], statements[f"{name}_many"], statements["notify_due_jobs"]]
    if name == "fail":
        prepare += await recording(connection, schema)
    elif name == "complete":
        prepare += await by_hand.statements(connection, schema)
    async with in_order(connection, schema, filters, prepare=prepare):
        selected = await _page(connection, schema, selection)
        if not selected:
            return [], [], 0
        rows = await connection.fetch(statements[f"{name}_many"], selected, *arguments)
        if name == "fail":
            await record_failures(connection, schema, (row["id"] for row in rows))
        elif name == "complete":
            await by_hand.record_completed_rows(connection, schema, rows)
        if rows and name in {"retry", "reschedule"}:
            await connection.execute(statements["notify_due_jobs"], len(rows))
    return selected, sorted(row["id"] for row in rows), sum(row.get("runs", False) for row in rows)


async def cancel_batch(
    connection: Connection, schema: Schema, filters: Mapping[str, object], reason: str, *, limit: int
) -> tuple[list[int], Mapping[int, CancelResult]]:
    """Cancel the first jobs that match the filters.

    The rows are not locked, because the jobs' workers must be able to record outcomes.

    Returns:
        The ids of the selected jobs, and the result for each of them that was not finished.
    """
    selection = {**filters, "first_jobs": limit}
    prepare = [
        _selecting(schema, selection)[0],
        *await cancellations.statements_to_cancel(connection, schema),
    ]
    async with in_order(connection, schema, filters, prepare=prepare):
        selected = await _page(connection, schema, selection)
        results = await cancellations.cancel_many(connection, schema, selected, reason) if selected else {}
    return selected, results


async def read_page(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> list[Job]:
    """Return whole jobs, with their payloads as they are stored; a filter sets the limit."""
    async with in_order(connection, schema, filters):
        rows = await jobs.fetch_jobs_and_failures(connection, schema, **filters)
    return [jobs.read_job(row, read_payload=as_one_line) for row in rows]


async def read_ids(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> list[int]:
    """Return the ids of jobs that match the filters."""
    async with in_order(connection, schema, filters):
        return await _page(connection, schema, filters)


@asynccontextmanager
async def in_order(
    connection: Connection, schema: Schema, filters: Mapping[str, object], *, prepare: Iterable[str] = ()
) -> AsyncIterator[None]:
    """Open a transaction that scans jobs by id, unless the filters name few jobs anyway."""
    async with read_committed(connection, prepare=prepare):
        if filters.get("having_key") is None and "having_id_any" not in filters:
            await connection.execute(statements_for(schema, _FILE)["disable_sort"])
        yield


async def _page(connection: Connection, schema: Schema, filters: Mapping[str, object]) -> list[int]:
    statement, values = _selecting(schema, filters)
    return [row["id"] for row in await connection.fetch(statement, *values)]


def _selecting(schema: Schema, filters: Mapping[str, object]) -> tuple[str, list[object]]:
    return jobs.compose(schema, statements_for(schema, _FILE)["select_ids"], filters)


async def read_unchanged(connection: Connection, schema: Schema, ids: Sequence[int]) -> list[UnchangedJob]:
    """Return the states of the jobs that still exist."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_unchanged"], ids)
    return [UnchangedJob(*row) for row in rows]


async def hides_rows(connection: Connection, schema: Schema) -> bool:
    """Return whether row level security silently hides jobs from the role."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["hides_rows"], schema.name))
