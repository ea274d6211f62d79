"""Named limits: what is declared, what is set at run time, and the shares of workers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from graphile_worker._db.connection.any_connection import Call, Operation
from graphile_worker._db.sql_files import Schema, one_text_statement, statements_for
from graphile_worker.limits import LimitState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker.limits import Limit

_FILE = "limits.sql"
_TRIES = 10
_PAUSE = 0.05
"""Seconds between two tries to write a limit whose row another transaction has locked."""


class LimitCounts(NamedTuple):
    """The named limits of a worker's tasks, and how many of their jobs it holds."""

    ids: Sequence[int]
    job_counts: Sequence[int]
    """Parallel to `ids`: how many jobs the worker holds if the results of the exchange are recorded."""
    places: Mapping[str, int]
    """The place of each task's limit in `ids`, from 1 on."""


def as_arguments(
    rooms: Mapping[str, int] | None, limits: LimitCounts | None, tasks: Collection[str]
) -> tuple[Sequence[int | None] | None, ...]:
    """Return the last four arguments of the exchange: for each task its room, and the place of its limit.

    Then follow the limits, and how many of their jobs the worker holds.
    """
    return (
        None if rooms is None else [rooms.get(task) for task in tasks],
        None if limits is None else [limits.places.get(task) for task in tasks],
        None if limits is None else limits.ids,
        None if limits is None else limits.job_counts,
    )


class RegisteredLimits(NamedTuple):
    """What `register_limits` has done."""

    ids: dict[str, int]
    """The ids of the limits, by name."""
    is_declared: bool
    """Whether the database has what the code declares."""


async def register_limits(
    connection: Connection, schema: Schema, limits: Mapping[str, Limit], *, declare: bool = True
) -> RegisteredLimits:
    """Add the limits of tasks that the database does not have.

    Args:
        connection: The connection to use.
        schema: The schema.
        limits: The limit of each task.
        declare: Whether to write what the code declares of limits that exist. This waits only briefly for
            a row that another transaction has locked.
    """
    statements = statements_for(schema, _FILE)
    concurrency: dict[str, int] = {}
    tasks: defaultdict[str, list[str]] = defaultdict(list)
    for task, limit in sorted(limits.items()):
        concurrency[limit.name] = limit.concurrency
        tasks[limit.name].append(task)
    names = list(concurrency)
    values = (
        names,
        list(concurrency.values()),
        [msgspec.json.encode(tasks[name]).decode() for name in names],
    )
    await connection.execute(statements["add_limits"], *values)
    is_declared = False
    if declare:
        for _ in range(_TRIES):
            is_declared = await connection.fetchval(statements["declare_limits"], *values) == 0
            if is_declared:
                break
            await asyncio.sleep(_PAUSE)
    rows = await connection.fetch(statements["read_limit_ids"], names)
    return RegisteredLimits({row["name"]: row["id"] for row in rows}, is_declared)


async def end_shares(connection: Connection, schema: Schema, worker_id: str) -> None:
    """Remove the shares of a worker that holds no jobs."""
    await connection.execute(statements_for(schema, _FILE)["end_shares"], worker_id)


async def end_lost_shares(connection: Connection, schema: Schema) -> None:
    """Remove the shares of workers that are gone, hold no jobs and were not swept."""
    await connection.execute(statements_for(schema, _FILE)["end_lost_shares"])


def listing_limits(schema: Schema) -> Operation[list[LimitState]]:
    """Return all limits; none if the tables do not exist yet or the role may not read them."""
    if (yield Call(one_text_statement(schema, _FILE, "reads_limits"), schema.quoted)) != "true":
        return []
    text = yield Call(one_text_statement(schema, _FILE, "list_limits"), "")
    return msgspec.json.decode(text, type=list[LimitState])


def setting_limit(schema: Schema, name: str, concurrency: int | None) -> Operation[bool]:
    """Set a limit at run time; None returns to what the code declares. Returns whether it exists."""
    document = msgspec.json.encode({"name": name, "concurrency": concurrency}).decode()
    return (yield Call(one_text_statement(schema, _FILE, "set_limit"), document)) == "true"


async def read_outsiders(connection: Connection, schema: Schema) -> dict[str, int]:
    """Return how many jobs of tasks with a limit other workers than Python's run, by task."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_outsiders"])
    return {row["identifier"]: row["jobs"] for row in rows}
