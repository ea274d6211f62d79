"""Pauses of tasks, of queues and of everything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphile_worker._db.connection.any_connection import Call, Operation
from graphile_worker._db.queries.jobs import split_instant
from graphile_worker._db.sql_files import Schema, one_text_statement, statements_for
from graphile_worker.limits import Pause

if TYPE_CHECKING:
    from datetime import timedelta

    from graphile_worker._db.connection.connect import Connection

CHANNEL = "_private_python_pause"
"""The channel that announces changes of pauses. The payload is empty."""
PYTHON_WORKER = "python-"
"""How the ids of Python workers begin."""
LATE_STATEMENT = 0.5
"""Seconds within which a statement of a Node or Rust worker ends that was under way when a pause ended."""
_FILE = "pauses.sql"
_TIMES = ("paused_at", "until")


class ActivePause(NamedTuple):
    """A pause, for a worker that obeys it."""

    kind: str
    name: str
    reason: str | None
    paused_by: str
    seconds: float | None
    """The time until its end; None if it has none."""


def pausing(
    schema: Schema,
    kind: str,
    name: str,
    until: datetime | timedelta | None,
    reason: str | None,
    paused_by: str | None,
) -> Operation[Pause]:
    """Pause a task, a queue or everything. A pause that exists is changed."""
    moment, delay = split_instant(until)
    document = {
        "kind": kind,
        "name": name,
        "until": moment,
        "delay": delay,
        "reason": reason,
        "paused_by": paused_by,
    }
    text = yield _call(schema, "pause", document)
    return _read_pause(msgspec.json.decode(text))


def resuming(schema: Schema, kind: str, name: str) -> Operation[str | None]:
    """End a pause.

    Returns the worker that has got the lock of the queue back because it still runs a job of the queue;
    otherwise an empty text. None if there was no pause.
    """
    resumed: str | None
    [resumed] = msgspec.json.decode((yield _call(schema, "resume", {"kind": kind, "name": name})))
    return resumed


def listing_pauses(schema: Schema) -> Operation[list[Pause]]:
    """Return all pauses; none if the table does not exist yet or the role may not read it."""
    if (yield Call(one_text_statement(schema, _FILE, "reads_pauses"), schema.quoted)) != "true":
        return []
    text = yield Call(one_text_statement(schema, _FILE, "list_pauses"), "")
    return [_read_pause(row) for row in msgspec.json.decode(text)]


async def read_lock(connection: Connection, schema: Schema, queue: str, worker: str) -> datetime | None:
    """Return since when the worker has locked the queue; None if it has not."""
    locked_at: datetime | None = await connection.fetchval(
        statements_for(schema, _FILE)["read_lock"], queue, worker
    )
    return locked_at


async def release_idle_queue(
    connection: Connection, schema: Schema, queue: str, worker: str, locked_at: datetime
) -> None:
    """Release a queue of which no job runs, if a Node or Rust worker has locked it then."""
    await connection.execute(statements_for(schema, _FILE)["release_idle_queue"], queue, worker, locked_at)


async def read_pauses(connection: Connection, schema: Schema) -> list[ActivePause]:
    """Return the pauses that are stored, with those that are over."""
    statements = statements_for(schema, _FILE)
    return [ActivePause(*row) for row in await connection.fetch(statements["read_pauses"])]


async def end_expired(connection: Connection, schema: Schema) -> list[tuple[str, str]]:
    """End the pauses that are over.

    Returns the queues whose locks were given back to Node or Rust workers, with these workers.
    """
    rows = await connection.fetch(statements_for(schema, _FILE)["end_expired"])
    return [(row["name"], row["holder"]) for row in rows if not row["holder"].startswith(PYTHON_WORKER)]


def _call(schema: Schema, name: str, document: object) -> Call:
    return Call(one_text_statement(schema, _FILE, name), msgspec.json.encode(document).decode())


def _read_pause(row: dict[str, Any]) -> Pause:
    for name in _TIMES:
        if row[name] is not None:
            row[name] = datetime.fromisoformat(row[name]).replace(tzinfo=UTC)
    return Pause(**row)
