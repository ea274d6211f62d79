"""The tables of the statistics: what Python workers did, and how many jobs there were."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import msgspec

from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.sql_files import Schema, statements_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection

_FILE = "statistics.sql"
_DAY = 86_400
MERGE_AFTER = 120
"""Seconds after which the rows of several workers for one minute become one row."""
KEPT = {60: 25 * 3600, 300: 7 * _DAY + 3600, 3600: 90 * _DAY}
"""How many seconds rows of each period are kept. Then they become rows of the next period.

The extra hour is for callers that ask for exactly a day or a week.
"""
FLUSHES_KEPT = 7 * _DAY
"""Seconds after which the number of a worker's last batch is forgotten."""
_ROLL_UP_TIMEOUT = 60_000
_MAX_PAGES = 2000
"""The number of pages (of 8 kB) that a sample reads at most."""
_MAX_COUNTED = 5000
"""The number of available jobs of a task that a sample of a large table counts in the indexes."""


async def may_write(connection: Connection, schema: Schema, tables: Sequence[str]) -> bool:
    """Return whether these tables exist and the role may write to them.

    Args:
        connection: The connection to use.
        schema: The schema.
        tables: The names without the prefix ``_private_python_``.
    """
    statement = statements_for(schema, _FILE)["may_write"]
    return bool(await connection.fetchval(statement, schema.quoted, tables))


def encode_batch(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return counts as the JSON document that `flush` sends."""
    return msgspec.json.encode(rows).decode()


async def flush(connection: Connection, schema: Schema, worker: str, number: int, batch: str) -> None:
    """Add a worker's batch of counts. A batch with the same number or a lower one is ignored."""
    await connection.fetchval(statements_for(schema, _FILE)["flush"], worker, number, batch)


async def take_turn(connection: Connection, schema: Schema, name: str, seconds: float) -> bool:
    """Take the turn of the whole schema if it is due; the next one is due after this many seconds."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["take_turn"], name, seconds))


async def postpone_turn(connection: Connection, schema: Schema, name: str, seconds: float) -> None:
    """Let the next turn be due after this many seconds."""
    await connection.execute(statements_for(schema, _FILE)["postpone_turn"], name, seconds)


class _Merge(NamedTuple):
    statement: str
    of_period: int
    to_period: int
    age: int


_MERGES = (
    _Merge("merge_counts", 60, 60, MERGE_AFTER),
    _Merge("merge_counts", 60, 300, KEPT[60]),
    _Merge("merge_counts", 300, 3600, KEPT[300]),
    _Merge("merge_depths", 60, 300, KEPT[60]),
    _Merge("merge_depths", 300, 3600, KEPT[300]),
)


async def roll_up(connection: Connection, schema: Schema) -> None:
    """Merge old rows into rows of longer periods, and delete the oldest.

    Each statement does a whole step, so that an interruption between two of them does no harm.
    """
    statements = statements_for(schema, _FILE)
    for name, of_period, to_period, age in _MERGES:
        async with _limited(connection, schema, _ROLL_UP_TIMEOUT, prepare=[statements[name]]):
            await connection.fetchval(statements[name], of_period, to_period, age)
    async with _limited(connection, schema, _ROLL_UP_TIMEOUT, prepare=[statements["delete_old"]]):
        await connection.execute(statements["delete_old"], KEPT[3600], FLUSHES_KEPT)


async def sample_depths(connection: Connection, schema: Schema, timeout: float) -> bool:  # noqa: ASYNC109
    """Store how many jobs there are in each state, by task.

    A table of up to 2,000 pages is counted. Of a larger one, that many pages are read and the counts are
    scaled; available jobs of tasks that have few are counted in the indexes.

    Returns:
        Whether the sample was stored; False if it took longer than `timeout` seconds.
    """
    statements = statements_for(schema, _FILE)
    pages = await connection.fetchval(statements["count_pages"], schema.quoted)
    estimate = pages > _MAX_PAGES
    statement = statements["sample_some" if estimate else "sample_all"]
    percent = 100.0 * _MAX_PAGES / pages if estimate else 100.0
    try:
        # Not prepared before: that would wait for a locked table without a limit.
        async with _limited(connection, schema, round(timeout * 1000), seqscan=not estimate):
            await connection.fetchval(statement, estimate, percent, _MAX_COUNTED)
    except asyncpg.QueryCanceledError:
        return False
    return True


@asynccontextmanager
async def _limited(
    connection: Connection,
    schema: Schema,
    milliseconds: int,
    *,
    seqscan: bool = True,
    prepare: Sequence[str] = (),
) -> AsyncIterator[None]:
    """Open a transaction whose statements are cancelled after this time."""
    limit = statements_for(schema, _FILE)["limit_time"]
    async with read_committed(connection, prepare=[limit, *prepare]):
        await connection.fetchval(limit, str(milliseconds), "on" if seqscan else "off")
        yield


async def read_counts(
    connection: Connection, schema: Schema, since: datetime, step: int, task: str | None
) -> list[asyncpg.Record]:
    """Return what workers counted since then: a row per task and step."""
    return await fetch(connection, statements_for(schema, _FILE)["read_counts"], since, step, task)


async def read_depths(
    connection: Connection, schema: Schema, since: datetime, step: int, task: str | None
) -> list[asyncpg.Record]:
    """Return the sums of the samples since then: a row per step and task, and one per step for all tasks."""
    return await fetch(connection, statements_for(schema, _FILE)["read_depths"], since, step, task)
