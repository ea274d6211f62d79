"""The table that records when each job last failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from graphile_worker._db.connection.any_bytes import as_sent, fetch
from graphile_worker._db.connection.any_connection import Call, Operation, run_own
from graphile_worker._db.queries import by_hand
from graphile_worker._db.queries.by_hand import recording_changed
from graphile_worker._db.sql_files import Schema, one_text_statement, statements_for
from graphile_worker.history import AttemptOutcome
from graphile_worker.stats import FailureGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphile_worker._db.connection.connect import Connection

_FILE = "failures.sql"
CANCEL_TYPE = "Cancel"
"""The error type of jobs that were cancelled by hand: the name of the exception that a task would raise."""


def reads_failures(schema: Schema) -> Operation[bool]:
    """Return whether the table exists and the role may read it."""
    return (yield Call(one_text_statement(schema, _FILE, "reads_failures"), schema.quoted)) == "true"


def writes_failures(schema: Schema) -> Operation[bool]:
    """Return whether the table exists and the role may write to it."""
    return (yield Call(one_text_statement(schema, _FILE, "writes_failures"), schema.quoted)) == "true"


def recording_failures(
    schema: Schema, ids: Iterable[int], outcome: AttemptOutcome = AttemptOutcome.FAILED
) -> Operation[None]:
    """Record that these jobs failed, or were cancelled, now: in the transaction that changed them."""
    failed = list(ids)
    yield from recording_changed(schema, failed, outcome)
    if failed and (yield from writes_failures(schema)):
        statement = one_text_statement(schema, _FILE, "record_failures")
        error_type = CANCEL_TYPE if outcome is AttemptOutcome.CANCELLED else None
        yield Call(statement, msgspec.json.encode({"ids": failed, "error_type": error_type}).decode())


async def can_read_failures(connection: Connection, schema: Schema) -> bool:
    """Return whether the table exists and the role may read it."""
    return await run_own(connection, reads_failures(schema))


async def can_write_failures(connection: Connection, schema: Schema) -> bool:
    """Return whether the table exists and the role may write to it."""
    return await run_own(connection, writes_failures(schema))


async def recording(connection: Connection, schema: Schema) -> list[str]:
    """Return the statements of `record_failures`, to prepare them before the transaction.

    A statement that needs a table cannot be prepared without the table.
    """
    names = ["writes_failures"]
    if await can_write_failures(connection, schema):
        names.append("record_failures")
    own = [await as_sent(connection, one_text_statement(schema, _FILE, name).render("$1")) for name in names]
    return [*own, *await by_hand.statements(connection, schema)]


async def record_failures(connection: Connection, schema: Schema, ids: Iterable[int]) -> None:
    """Record that these jobs failed now, in the transaction that made them fail."""
    await run_own(connection, recording_failures(schema, ids))


async def list_groups(
    connection: Connection, schema: Schema, task: str | None, limit: int
) -> list[FailureGroup]:
    """Return failed jobs, grouped by task and error, the largest groups first."""
    rows = await fetch(connection, statements_for(schema, _FILE)["list_groups"], task, limit)
    return [FailureGroup(**dict(zip(row.keys(), row, strict=True))) for row in rows]


async def read_died(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> frozenset[int]:
    """Return the ids of these workers' jobs whose previous run also ended with the death of its worker."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_died"], worker_ids)
    return frozenset(row["id"] for row in rows)
