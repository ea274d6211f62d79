"""The schedules that the database knows, and adding their jobs, once for each minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.connection import transactions
from graphile_worker._db.connection.any_connection import Operation, fetching_rows
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.queries.bulk_insert import add_jobs, adding
from graphile_worker._db.queries.jobs import add_job
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.job import JobKeyMode, JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker.job import Job


class KnownCrontab(NamedTuple):
    """A recurring task's schedule, as the database knows it."""

    known_since: datetime
    last_execution: datetime | None


class DueJob(NamedTuple):
    """The job of a schedule for one minute. Due jobs sort in the order in which they are added."""

    minute: datetime
    position: int
    """The schedule's position in the crontab."""
    identifier: str
    spec: JobSpec
    exclusive: bool = False
    """Whether to skip the job while the schedule's previous job, which has the same key, is unfinished."""


class Wanted(NamedTuple):
    """The due jobs of some minutes."""

    new: list[DueJob]
    """Jobs of minutes that no scheduler has added."""
    wanted: list[DueJob]
    """The ones to add: without jobs that would overlap, and without jobs that later ones would replace."""


class ScheduleResult(NamedTuple):
    """The outcome of adding jobs that middleware had changed."""

    jobs: list[Job] | None = None
    """The added jobs; None if other workers had already added the jobs of all these minutes."""
    superseded: bool = False
    """Whether other workers had added some of the jobs. Then nothing was added."""


async def read_schedules(
    connection: Connection, schema: Schema, identifiers: Sequence[str]
) -> tuple[datetime, dict[str, KnownCrontab]]:
    """Return the database's time, and the known ones of these schedules. Needs at least one identifier."""
    rows = await connection.fetch(statements_for(schema, "cron.sql")["read_schedules"], identifiers)
    known = {
        row["identifier"]: KnownCrontab(row["known_since"], row["last_execution"])
        for row in rows
        if row["known_since"] is not None
    }
    return rows[0]["now"], known


async def read_time(connection: Connection, schema: Schema) -> datetime:
    """Return the database's time."""
    now: datetime = await connection.fetchval(statements_for(schema, "cron.sql")["read_time"])
    return now


def listing_schedules(schema: Schema) -> Operation[dict[str, KnownCrontab]]:
    """Return all schedules that any worker has registered."""
    times = ("known_since", "last_execution")
    rows = yield from fetching_rows(schema, "cron.sql", "list_schedules", times=times)
    return {row["identifier"]: KnownCrontab(row["known_since"], row["last_execution"]) for row in rows}


async def register(
    connection: Connection, schema: Schema, identifiers: Sequence[str], since: datetime
) -> None:
    """Register schedules. No jobs are added for the time before `since`."""
    await connection.execute(
        statements_for(schema, "cron.sql")["register_schedules"], list(identifiers), since
    )


async def schedule(connection: Connection, schema: Schema, due: Sequence[DueJob]) -> list[DueJob]:
    """Add the jobs of minutes that no worker has added yet, and return the jobs that were added.

    Safe to repeat, because a recorded minute is not added again.
    """
    prepare = _statements(schema, [one.spec for one in due], read=False)
    async with read_committed(connection, duration=transactions.DURATION, prepare=prepare):
        last = await _lock(connection, schema, due)
        new, wanted = await _new_and_wanted(connection, schema, due, last)
        await add(connection, schema, [one.spec for one in wanted], read=False)
        await _record(connection, schema, new)
    return wanted


async def find_wanted(connection: Connection, schema: Schema, due: Sequence[DueJob]) -> Wanted | None:
    """Return what `schedule` would add now; None if other workers have added the jobs of all these minutes.

    Nothing is locked, so other workers may add the same jobs first.
    """
    identifiers = list({one.identifier: None for one in due})
    _, known = await read_schedules(connection, schema, identifiers)
    last = {one: known[one].last_execution if one in known else None for one in identifiers}
    new, wanted = await _new_and_wanted(connection, schema, due, last)
    return Wanted(new, wanted) if new else None


async def schedule_changed(
    connection: Connection, schema: Schema, found: Wanted, specs: Sequence[JobSpec]
) -> ScheduleResult:
    """Add these jobs instead of the ones that `find_wanted` found, if it would find the same ones now."""
    prepare = _statements(schema, specs, read=True)
    async with read_committed(connection, duration=transactions.DURATION, prepare=prepare):
        last = await _lock(connection, schema, found.new)
        new, wanted = await _new_and_wanted(connection, schema, found.new, last)
        if (new, wanted) != found:
            return ScheduleResult(superseded=bool(new))
        jobs = await add(connection, schema, specs)
        await _record(connection, schema, new)
    return ScheduleResult(jobs)


def _statements(schema: Schema, specs: Sequence[JobSpec], *, read: bool) -> list[str]:
    """Return the statements that lock schedules and add the jobs, to prepare them before the transaction."""
    cron, jobs = statements_for(schema, "cron.sql"), statements_for(schema, "jobs.sql")
    names = ("lock_schedules", "register_schedules", "find_unfinished", "record_executions")
    statements = [*(cron[name] for name in names), jobs["add_job"]]
    return [*statements, *adding(schema, read=read)] if len(specs) > 1 else statements


async def _new_and_wanted(
    connection: Connection, schema: Schema, due: Sequence[DueJob], last: Mapping[str, datetime | None]
) -> tuple[list[DueJob], list[DueJob]]:
    """Return the jobs of minutes that no worker has added, and the subset to add."""
    new = [one for one in due if (latest := last[one.identifier]) is None or latest < one.minute]
    keys = [one.spec.job_key for one in new if one.exclusive]
    statement = statements_for(schema, "cron.sql")["find_unfinished"]
    unfinished = await connection.fetch(statement, keys) if keys else []
    return new, _without_replaced(list(_without_overlap(new, {row["key"] for row in unfinished})))


async def _record(connection: Connection, schema: Schema, new: Sequence[DueJob]) -> None:
    executed = {one.identifier: one.minute for one in new}
    if executed:
        statement = statements_for(schema, "cron.sql")["record_executions"]
        await connection.execute(statement, list(executed), list(executed.values()))


async def add(
    connection: Connection, schema: Schema, specs: Sequence[JobSpec], *, read: bool = True
) -> list[Job]:
    """Add jobs in the order of the specs. Without `read`, some or all of them are not returned."""
    jobs: list[Job] = []
    for run in _runs(specs):
        if len(run) == 1:
            jobs.append(await add_job(connection, schema, run[0]))
        else:
            jobs += await add_jobs(connection, schema, run, read=read, idle=transactions.SHORT)
    return jobs


async def _lock(connection: Connection, schema: Schema, due: Sequence[DueJob]) -> dict[str, datetime | None]:
    """Lock the schedules until the end of the transaction, and return the last minute of each."""
    statement = statements_for(schema, "cron.sql")["lock_schedules"]
    indexes = {one.identifier: one.position for one in due}
    identifiers = sorted(indexes, key=indexes.__getitem__)
    while True:
        rows = await connection.fetch(statement, identifiers)
        if len(rows) == len(identifiers):
            return {row["identifier"]: row["last_execution"] for row in rows}
        # Another session has deleted some of the rows.
        await register(connection, schema, identifiers, min(one.minute for one in due))


def _without_overlap(due: Iterable[DueJob], unfinished: set[str]) -> Iterator[DueJob]:
    for one in due:
        if one.exclusive and one.spec.job_key is not None:
            if one.spec.job_key in unfinished:
                continue
            unfinished.add(one.spec.job_key)
        yield one


def _without_replaced(due: list[DueJob]) -> list[DueJob]:
    """Leave out jobs that a later job of the same schedule would replace at once.

    The first job of each key stays, because its run_at may be the one to preserve.
    """
    ends: dict[tuple[str, str], tuple[DueJob, DueJob]] = {}
    for one in due:
        if one.spec.job_key is not None:
            first, _ = ends.get(key := (one.spec.job_key, one.identifier), (one, one))
            ends[key] = first, one
    if not ends:
        return due
    kept = {(one.minute, one.position) for pair in ends.values() for one in pair}
    return [one for one in due if one.spec.job_key is None or (one.minute, one.position) in kept]


def _runs(specs: Iterable[JobSpec]) -> Iterator[list[JobSpec]]:
    """Yield the specs in order, in runs that one call can add. A run has no two specs with the same key."""
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
