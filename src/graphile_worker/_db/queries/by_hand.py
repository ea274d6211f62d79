"""Record in the history that people completed, failed or cancelled jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._db.connection.any_bytes import as_sent
from graphile_worker._db.connection.any_connection import Call, Operation, run_own
from graphile_worker._db.sql_files import Schema, one_text_statement

if TYPE_CHECKING:
    from collections.abc import Iterable

    import asyncpg

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker.history import AttemptOutcome
    from graphile_worker.job import Job

_FILE = "by_hand.sql"


def recording_changed(schema: Schema, ids: Iterable[int], outcome: AttemptOutcome) -> Operation[None]:
    """Record jobs that were failed or cancelled by hand, in the transaction that changed them."""
    document = {"ids": list(ids), "outcome": outcome.code}
    yield from _recording(schema, "record_changed", document if document["ids"] else None)


def recording_completed(schema: Schema, jobs: Iterable[Job]) -> Operation[None]:
    """Record jobs that were completed by hand, in the transaction that deleted them."""
    documents = [
        {
            "id": job.id,
            "run_at": job.run_at,
            "created_at": job.created_at,
            "task_id": job.task_id,
            "queue_name": job.queue_name,
            "key": job.key,
            "flags": dict.fromkeys(job.flags, True),
        }
        for job in jobs
    ]
    yield from _recording(schema, "record_completed", documents)


def _recording(schema: Schema, name: str, document: Any) -> Operation[None]:
    if not document:
        return
    if (yield from _can_write(schema)):
        yield Call(one_text_statement(schema, _FILE, name), msgspec.json.encode(document).decode())


async def record_completed_rows(
    connection: Connection, schema: Schema, rows: Iterable[asyncpg.Record]
) -> None:
    """Do what `recording_completed` does, for rows of deleted jobs."""
    documents = [dict(row) for row in rows]
    for document in documents:
        document["flags"] = msgspec.Raw((document["flags"] or "{}").encode())
    await run_own(connection, _recording(schema, "record_completed", documents))


async def statements(connection: Connection, schema: Schema) -> list[str]:
    """Return the statements, to prepare them before the transaction."""
    names = ["writes_history"]
    if await run_own(connection, _can_write(schema)):
        names += ["record_changed", "record_completed"]
    return [await as_sent(connection, one_text_statement(schema, _FILE, name).render("$1")) for name in names]


def _can_write(schema: Schema) -> Operation[bool]:
    return (yield Call(one_text_statement(schema, _FILE, "writes_history"), schema.quoted)) == "true"
