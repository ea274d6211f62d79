"""Read the results of jobs that have ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.queries.failures import CANCEL_TYPE
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.history import OUTCOMES, AttemptOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    import asyncpg

    from graphile_worker._db.connection.connect import Connection

_CLOCK_TOLERANCE = timedelta(hours=1)
"""How far the database's clock may be set back between adding a job and its end."""
_BEFORE_ALL = datetime(2000, 1, 1, tzinfo=UTC)


class JobEnd(NamedTuple):
    """What the database has about a job that has ended."""

    is_there: bool
    """Whether the job's row still exists: the job has no attempts left."""
    last_error: str | None
    outcome: AttemptOutcome | None
    """The outcome of the last attempt in the history; None if there is none."""
    final: bool
    """Whether that attempt was the last one of the job."""
    error: str | None
    is_cancelled: bool
    """Whether the job was cancelled: while it ran, or before it started."""
    error_type: str | None
    traceback: str | None
    result: str | None
    """The result as JSON text; None if it is not kept."""
    no_result: str | None
    """Why the result is not kept, although it should be."""


def completed_with(result: str) -> JobEnd:
    """Return the end of a job that is complete, with its result as JSON text."""
    return JobEnd(
        is_there=False,
        last_error=None,
        outcome=AttemptOutcome.COMPLETED,
        final=True,
        error=None,
        is_cancelled=False,
        error_type=None,
        traceback=None,
        result=result,
        no_result=None,
    )


async def read_results(
    connection: Connection, schema: Schema, since: Mapping[int, datetime | None]
) -> dict[int, JobEnd]:
    """Return the jobs that have ended, by id.

    Args:
        connection: The connection to use.
        schema: The schema of the queue.
        since: When each job was added, by id; None if that is not known.
    """
    times = [time for time in since.values() if time is not None]
    oldest = min(times) - _CLOCK_TOLERANCE if len(times) == len(since) else _BEFORE_ALL
    statement = statements_for(schema, "results.sql")["read_results"]
    rows = await fetch(connection, statement, list(since), oldest)
    return {
        row["id"]: JobEnd(
            is_there=row["is_there"],
            last_error=row["last_error"],
            outcome=None if row["outcome"] is None else OUTCOMES.get(row["outcome"]),
            final=bool(row["final"]),
            error=row["error"],
            is_cancelled=_is_cancelled(row),
            error_type=row["error_type"],
            traceback=row["traceback"],
            result=row["result"],
            no_result=row["no_result"],
        )
        for row in rows
    }


def _is_cancelled(row: asyncpg.Record) -> bool:
    # A job that was cancelled while it was not running has no attempt that says so.
    is_last = OUTCOMES.get(row["outcome"]) is AttemptOutcome.CANCELLED and row["final"]
    return bool(is_last or row["recorded_type"] == CANCEL_TYPE)
