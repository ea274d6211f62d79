"""Which schedules the database knows, and adding their jobs, each minute once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.bulk import add_jobs
from graphile_worker._db.connect import read_committed
from graphile_worker._db.queries import add_job
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.job import JobKeyMode, JobSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
    from datetime import datetime
    from typing import TypeAlias

    from graphile_worker._db.connect import Connection
    from graphile_worker.job import Job

    Add: TypeAlias = Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]
    Around: TypeAlias = Callable[[Sequence[JobSpec], Add], Awaitable[object]]


class KnownCrontab(NamedTuple):
    """What the database knows of a schedule of a recurring task."""

    known_since: datetime
    last_execution: datetime | None


class Due(NamedTuple):
    """A job that a schedule has for a minute. They sort as they are added."""

    minute: datetime
    place: int
    """The schedule's, in the crontab."""
    identifier: str
    spec: JobSpec
    exclusive: bool = False
    """Whether it is left out while the one before is unfinished, which has the same key."""


async def read_schedules(
    connection: Connection, schema: Schema, identifiers: Sequence[str]
) -> tuple[datetime, dict[str, KnownCrontab]]:
    """What time it is, and those of these schedules that are known. There is one identifier at least."""
    rows = await connection.fetch(statements_for(schema, "cron.sql")["read_schedules"], identifiers)
    known = {
        row["identifier"]: KnownCrontab(row["known_since"], row["last_execution"])
        for row in rows
        if row["known_since"] is not None
    }
    return rows[0]["now"], known


async def read_time(connection: Connection, schema: Schema) -> datetime:
    """What time it is."""
    now: datetime = await connection.fetchval(statements_for(schema, "cron.sql")["read_time"])
    return now


async def list_schedules(connection: Connection, schema: Schema) -> dict[str, KnownCrontab]:
    """All that are known, whoever has them."""
    rows = await connection.fetch(statements_for(schema, "cron.sql")["list_schedules"])
    return {row["identifier"]: KnownCrontab(row["known_since"], row["last_execution"]) for row in rows}


async def register(
    connection: Connection, schema: Schema, identifiers: Sequence[str], since: datetime
) -> None:
    """From now on they are known; nothing is owed for the time before."""
    await connection.execute(
        statements_for(schema, "cron.sql")["register_schedules"], list(identifiers), since
    )


async def schedule(
    connection: Connection, schema: Schema, due: Sequence[Due], around: Around | None = None
) -> list[Due]:
    """Add the jobs of minutes that nobody has had; those that were added.

    May be repeated: what was done is not done again.

    Args:
        connection: Where to.
        schema: The schema.
        due: The jobs, in the order in which to add them.
        around: Called, if given, with what there is to add, and with that which adds it.
    """
    statements = statements_for(schema, "cron.sql")
    async with read_committed(connection):
        last = await _lock(connection, schema, due)
        new = [one for one in due if (had := last[one.identifier]) is None or had < one.minute]
        if not new:
            return []
        keys = [one.spec.job_key for one in new if one.exclusive]
        unfinished = await connection.fetch(statements["find_unfinished"], keys) if keys else []
        added = _lasting(list(_without_overlap(new, {row["key"] for row in unfinished})))
        specs = [one.spec for one in added]
        if around is None:
            await _add(connection, schema, specs, read=False)
        else:
            await around(specs, partial(_add, connection, schema))
        executed = {one.identifier: one.minute for one in new}
        await connection.execute(statements["record_executions"], list(executed), list(executed.values()))
    return added


async def _add(
    connection: Connection, schema: Schema, specs: Sequence[JobSpec], *, read: bool = True
) -> list[Job]:
    jobs: list[Job] = []
    for run in _runs(specs):
        if len(run) == 1:
            jobs.append(await add_job(connection, schema, run[0]))
        else:
            jobs += await add_jobs(connection, schema, run, read=read)
    return jobs


async def _lock(connection: Connection, schema: Schema, due: Sequence[Due]) -> dict[str, datetime | None]:
    """The last minute of each schedule; until the end of the transaction nobody else can have another."""
    statement = statements_for(schema, "cron.sql")["lock_schedules"]
    places = {one.identifier: one.place for one in due}
    identifiers = sorted(places, key=places.__getitem__)
    while True:
        rows = await connection.fetch(statement, identifiers)
        if len(rows) == len(identifiers):
            return {row["identifier"]: row["last_execution"] for row in rows}
        # Somebody has deleted some.
        await register(connection, schema, identifiers, min(one.minute for one in due))


def _without_overlap(due: Iterable[Due], unfinished: set[str]) -> Iterator[Due]:
    for one in due:
        if one.exclusive and one.spec.job_key is not None:
            if one.spec.job_key in unfinished:
                continue
            unfinished.add(one.spec.job_key)
        yield one


def _lasting(due: list[Due]) -> list[Due]:
    """Without those that the next one of the same schedule would replace before anybody has seen them.

    Of each key the first stays too, for its time may be the one that is preserved.
    """
    ends: dict[tuple[str, str], tuple[Due, Due]] = {}
    for one in due:
        if one.spec.job_key is not None:
            first, _ = ends.get(key := (one.spec.job_key, one.identifier), (one, one))
            ends[key] = first, one
    if not ends:
        return due
    kept = {(one.minute, one.place) for pair in ends.values() for one in pair}
    return [one for one in due if one.spec.job_key is None or (one.minute, one.place) in kept]


def _runs(specs: Iterable[JobSpec]) -> Iterator[list[JobSpec]]:
    """The specs in their order, as many together as one call can add: none of them with the same key."""
    run: list[JobSpec] = []
    keys: set[str] = set()
    for spec in specs:
        alone = spec.job_key_mode == JobKeyMode.UNSAFE_DEDUPE
        if run and (alone or spec.job_key in keys or run[-1].job_key_mode == JobKeyMode.UNSAFE_DEDUPE):
            yield run
            run, keys = [], set()
        run.append(spec)
        if spec.job_key is not None:
            keys.add(spec.job_key)
    if run:
        yield run
