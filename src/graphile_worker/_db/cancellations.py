"""Cancelling jobs, also those that run: requests in a table of ours, and a channel that tells of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

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


class Request(NamedTuple):
    """That a job is to be cancelled which somebody holds."""

    job_id: int
    reason: str
    locked_by: str | None
    locked_at: datetime | None


async def cancel(connection: Connection, schema: Schema, job_id: int, reason: str) -> CancelAnswer | None:
    """Cancel the job if nobody has it, or ask whoever has it; None if it is over."""
    statement = statements_for(schema, _FILE)["cancel"]
    answer = await connection.fetchval(statement, job_id, reason, CHANNEL, schema.name)
    return cast("CancelAnswer | None", answer)


async def settle(connection: Connection, schema: Schema) -> Sequence[Request]:
    """Do what can be done now about what was asked for; returns the rest."""
    rows = await connection.fetch(statements_for(schema, _FILE)["settle"])
    return [Request(*row) for row in rows]
