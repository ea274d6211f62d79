"""Which schedules the database knows, and adding their jobs, each minute once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db import transactions
from graphile_worker._db.bulk import add_jobs
from graphile_worker._db.connect import read_committed
from graphile_worker._db.queries import add_job
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.job import JobKeyMode, JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connect import Connection
    from graphile_worker.job import Job


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


class Wanted(NamedTuple):
    """What is to be added."""

    new: list[Due]
    """Jobs of minutes that no scheduler has added."""
    wanted: list[Due]
    """Of these the ones to add: neither those that would overlap, nor those that others would replace."""


class Changed(NamedTuple):
    """The outcome of adding jobs that middleware had changed."""

    jobs: list[Job] | None = None
    """Those that were added; None if others had added jobs of all these minutes."""
    superseded: bool = False
    """Whether others had added some of them. Then nothing was added."""


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


async def schedule(connection: Connection, schema: Schema, due: Sequence[Due]) -> list[Due]:
    """Add the jobs of minutes that nobody has had; those that were added.

    May be repeated: what was done is not done again.
    """
    await _prepare(connection, schema, [one.spec for one in due], read=False)
    async with read_committed(connection, duration=transactions.DURATION):
        last = await _lock(connection, schema, due)
        new, wanted = await _new_and_wanted(connection, schema, due, last)
        await add(connection, schema, [one.spec for one in wanted], read=False)
        await _record(connection, schema, new)
    return wanted


async def find_wanted(connection: Connection, schema: Schema, due: Sequence[Due]) -> Wanted | None:
    """What `schedule` would add now; None if others have added jobs of all these minutes.

    Nothing is locked, so others may add the same before us.
    """
    identifiers = list({one.identifier: None for one in due})
    _, known = await read_schedules(connection, schema, identifiers)
    last = {one: known[one].last_execution if one in known else None for one in identifiers}
    new, wanted = await _new_and_wanted(connection, schema, due, last)
    return Wanted(new, wanted) if new else None


async def schedule_changed(
    connection: Connection, schema: Schema, found: Wanted, specs: Sequence[JobSpec]
) -> Changed:
    """Add these instead of the jobs that were found, if the same would be found now."""
    await _prepare(connection, schema, specs, read=True)
    async with read_committed(connection, duration=transactions.DURATION):
        last = await _lock(connection, schema, found.new)
        new, wanted = await _new_and_wanted(connection, schema, found.new, last)
        if (new, wanted) != found:
            return Changed(superseded=bool(new))
        jobs = await add(connection, schema, specs)
        await _record(connection, schema, new)
    return Changed(jobs)


async def _prepare(connection: Connection, schema: Schema, specs: Sequence[JobSpec], *, read: bool) -> None:
    """Have the statements at hand before schedules are locked, for all workers."""
    cron, jobs = statements_for(schema, "cron.sql"), statements_for(schema, "jobs.sql")
    bulk = [jobs["prepare_bulk"], jobs["add_jobs" if read else "add_unread_jobs"]]
    adding = bulk if len(specs) > 1 else [jobs["add_job"]]
    locking = [cron[name] for name in ("lock_schedules", "find_unfinished", "record_executions")]
    await transactions.prepare(connection, [*locking, *adding])


async def _new_and_wanted(
    connection: Connection, schema: Schema, due: Sequence[Due], last: Mapping[str, datetime | None]
) -> tuple[list[Due], list[Due]]:
    """Those of minutes that no scheduler has added, and of these the ones whose jobs are to be added."""
    new = [one for one in due if (had := last[one.identifier]) is None or had < one.minute]
    keys = [one.spec.job_key for one in new if one.exclusive]
    statement = statements_for(schema, "cron.sql")["find_unfinished"]
    unfinished = await connection.fetch(statement, keys) if keys else []
    return new, _lasting(list(_without_overlap(new, {row["key"] for row in unfinished})))


async def _record(connection: Connection, schema: Schema, new: Sequence[Due]) -> None:
    executed = {one.identifier: one.minute for one in new}
    if executed:
        statement = statements_for(schema, "cron.sql")["record_executions"]
        await connection.execute(statement, list(executed), list(executed.values()))


async def add(
    connection: Connection, schema: Schema, specs: Sequence[JobSpec], *, read: bool = True
) -> list[Job]:
    """Add jobs, in the order of the specs; it may return none if the caller does not read them."""
    jobs: list[Job] = []
    for run in _runs(specs):
        if len(run) == 1:
            jobs.append(await add_job(connection, schema, run[0]))
        else:
            jobs += await add_jobs(connection, schema, run, read=read, idle=transactions.SHORT)
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
