"""Cancel jobs, including running ones: a table holds the requests, and a channel announces them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import asyncpg
import msgspec

from graphile_worker._db.connection.any_bytes import as_sent
from graphile_worker._db.connection.any_connection import Call, Operation, run_own
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.connection.error_mapping import is_refusal
from graphile_worker._db.queries.failures import recording, recording_failures
from graphile_worker._db.queries.row_by_row import all_or_each
from graphile_worker._db.sql_files import one_text_statement, statements_for
from graphile_worker.history import AttemptOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.sql_files import Schema

CHANNEL = "_private_python_cancel"
"""The channel that announces requests. The payload is the schema's name: a database may have several."""
_FILE = "cancellations.sql"

CancelAnswer: TypeAlias = Literal["cancelled", "requested"]


class CancelResult(NamedTuple):
    """What cancelling did to one job."""

    answer: CancelAnswer
    runs: bool
    """Whether the job is running. A request for any other job means that a transaction has its row locked."""


class Request(NamedTuple):
    """A request to cancel a job that is locked."""

    job_id: int
    reason: str
    locked_by: str | None
    locked_at: datetime | None


def cancelling(schema: Schema, job_ids: Sequence[int], reason: str) -> Operation[dict[int, CancelResult]]:
    """Cancel jobs, or request it from the workers that run them. The result has no finished jobs."""
    request = {"ids": job_ids, "reason": reason, "channel": CHANNEL, "schema": schema.name}
    statement = one_text_statement(schema, _FILE, "cancel")
    text = yield Call(statement, msgspec.json.encode(request).decode())
    results = {job_id: CancelResult(answer, runs) for job_id, answer, runs in msgspec.json.decode(text)}
    cancelled = (job_id for job_id, result in results.items() if result.answer == "cancelled")
    yield from recording_failures(schema, cancelled, AttemptOutcome.CANCELLED)
    return results


async def cancel_many(
    connection: Connection, schema: Schema, job_ids: Sequence[int], reason: str
) -> dict[int, CancelResult]:
    """Cancel many jobs on a connection of the library; the result does not contain finished jobs."""
    async with read_committed(connection, prepare=await statements_to_cancel(connection, schema)):
        return await run_own(connection, cancelling(schema, job_ids, reason))


async def statements_to_cancel(connection: Connection, schema: Schema) -> list[str]:
    """Return the statements of `cancel_many`, to prepare them before the transaction that it is a part of."""
    cancel = await as_sent(connection, one_text_statement(schema, _FILE, "cancel").render("$1"))
    return [cancel, *await recording(connection, schema)]


def settling(schema: Schema) -> list[str]:
    """Return the statements of `settle`, to prepare them before the transaction that it is a part of."""
    statements = statements_for(schema, _FILE)
    return [statements["settle"], statements["read_requests"]]


async def settle(connection: Connection, schema: Schema) -> Sequence[Request]:
    """Carry out the requests that can be carried out now; return the others.

    A request that the server rejects, usually because of a trigger on the jobs table, does not block the
    others.
    """
    statements = statements_for(schema, _FILE)

    async def settle_requests(ids: Sequence[int] | None) -> list[asyncpg.Record]:
        return await connection.fetch(statements["settle"], ids)

    try:
        async with connection.transaction() if connection.is_in_transaction() else nullcontext():
            rows = await settle_requests(None)
    except asyncpg.PostgresError as error:
        if not is_refusal(error):
            raise
        async with read_committed(connection, prepare=settling(schema)):
            ids = [row["id"] for row in await connection.fetch(statements["read_requests"])]
            rows = (await all_or_each(connection, schema, ids, settle_requests)).rows
    return [Request(*row) for row in rows]
