"""The exchange, and what else a worker asks of the database about the jobs it holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.connect import read_committed
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.job import Job, JobState
from graphile_worker.outcome import Completed, Failed, Interrupted, Outcome, Returned, describe_error
from graphile_worker.payload import decode_payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    import asyncpg

    from graphile_worker._db.connect import Connection

_NO_FLAGS: frozenset[str] = frozenset()
_NEVER = 1e9
"""A pool of the caller's may have a limit for statements, but an exchange is not to be given up."""


class Claim(NamedTuple):
    """A job may be claimed twice by one worker, if somebody frees it meanwhile: then the time tells."""

    job_id: int
    locked_at: datetime


@dataclass(slots=True)
class QueueLock:
    """A serial queue that is ours."""

    id: int
    locked_at: datetime


@dataclass(slots=True, eq=False)
class Held:
    """A job that is ours until its result is recorded."""

    job: Job
    locked_at: datetime
    queue: QueueLock | None
    unreadable: ValueError | None = None
    superseded: bool = False
    """Whether its key was taken over before we learnt that we have it."""

    @property
    def claim(self) -> Claim:
        """What the database knows it by."""
        return Claim(self.job.id, self.locked_at)

    @property
    def order(self) -> tuple[int, datetime, int]:
        """Jobs start in this order."""
        return self.job.priority, self.job.run_at, self.job.id


class Result(NamedTuple):
    """What became of a job; with the lock of its queue, if no other job of that queue is in hand."""

    held: Held
    outcome: Outcome
    queue: QueueLock | None


class Position(NamedTuple):
    """A place in the order in which jobs are taken."""

    priority: int
    run_at: datetime
    id: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What to claim."""

    wanted: int = 0
    run_length: int = 1
    forbidden_flags: Sequence[str] | None = None
    as_of: datetime | None = None
    """A job is due if its run_at is not later; by default the database's now."""
    mark: Position | None = None
    """Leave out what comes before."""
    after_queue: int = 0


NOTHING = Wish()


@dataclass(slots=True)
class Reply:
    """What the exchange came to."""

    now: datetime
    claimed: list[Held] = field(default_factory=list)
    busy: set[Claim] = field(default_factory=set)
    """Finished jobs that somebody's transaction has locked: still ours, ask again."""
    lost: set[Claim] = field(default_factory=set)
    """Finished jobs that are not ours any more."""
    contended: bool = False
    next_due: datetime | None = None
    next_queue: int = 0
    cost: float = 0.0


class Backend(NamedTuple):
    """The server's process for a connection."""

    pid: int
    started: str


class Locked(NamedTuple):
    """All that the database has under our name."""

    jobs: list[Held]
    queues: dict[int, datetime]


async def exchange(
    connection: Connection,
    schema: Schema,
    worker_id: str,
    results: Sequence[Result],
    wish: Wish,
    tasks: Mapping[int, str],
) -> Reply:
    """Record results, and claim jobs."""
    rows = await connection.fetch(
        statements_for(schema, "exchange.sql")["exchange"],
        worker_id,
        [result.held.job.id for result in results],
        [result.held.locked_at for result in results],
        [result.queue and result.queue.id for result in results],
        [result.queue and result.queue.locked_at for result in results],
        _changes(results, unicode=connection.get_settings().server_encoding.upper() == "UTF8"),
        list(tasks),
        wish.wanted,
        wish.run_length,
        wish.forbidden_flags,
        wish.as_of,
        *(wish.mark or (None, None, None)),
        wish.after_queue,
        timeout=_NEVER,
    )
    end = rows.pop()
    reply = Reply(
        now=end["locked_at"],
        contended=end["contended"],
        next_due=end["next_due"],
        next_queue=end["next_queue"],
        cost=end["cost"],
    )
    claimed = []
    for row in rows:
        match row["kind"]:
            case "claimed":
                claimed.append(row)
            case "busy":
                reply.busy.add(Claim(row["id"], row["locked_at"]))
            case _:
                reply.lost.add(Claim(row["id"], row["locked_at"]))
    reply.claimed = _read_held(claimed, worker_id, tasks, {})
    return reply


def _changes(results: Sequence[Result], *, unicode: bool) -> str | None:
    """What is to be done to those that did not complete."""
    changes = [
        _change(result.held, result.outcome, unicode=unicode)
        for result in results
        if type(result.outcome) is not Completed
    ]
    return json.dumps(changes) if changes else None


def _change(held: Held, outcome: Outcome, *, unicode: bool) -> dict[str, object]:
    job = held.job
    change: dict[str, object] = {"id": job.id, "locked_at": held.locked_at.isoformat()}
    match outcome:
        case Failed(error=error):
            text = describe_error(error)
            if not unicode:  # the database may not have every character
                text = text.encode("ascii", "backslashreplace").decode()
            return {**change, "action": "fail", "error": text}
        case Interrupted() | Returned():
            # Without a delay it keeps its run_at, and with it its place among the others.
            delay = (isinstance(outcome, Interrupted) and outcome.delay) or None
            attempts = None if held.superseded else job.attempts
            return {**change, "action": "return", "delay": delay, "attempts": attempts, "key": job.key}
        case Completed():
            raise AssertionError("completed jobs are not changed but deleted")


def _read_held(
    rows: Iterable[asyncpg.Record],
    worker_id: str,
    tasks: Mapping[int, str],
    queues: dict[int, QueueLock],
) -> list[Held]:
    """Jobs in the order in which they are to start; those of one queue share its lock."""
    found = []
    for row in rows:
        job, unreadable = _read_job(row, worker_id, tasks)
        queue = None
        if job.job_queue_id is not None:
            queue = queues.setdefault(job.job_queue_id, QueueLock(job.job_queue_id, row["locked_at"]))
        found.append(Held(job, row["locked_at"], queue, unreadable))
    found.sort(key=lambda held: held.order)
    return found


def _read_job(row: asyncpg.Record, worker_id: str, tasks: Mapping[int, str]) -> tuple[Job, ValueError | None]:
    payload, unreadable = None, None
    try:
        payload = decode_payload(row["payload"])
    except ValueError as error:  # it must fail this job alone
        unreadable = error
    flags = row["flags"]
    job = Job(
        id=row["id"],
        task_identifier=tasks.get(row["task_id"], ""),
        queue_name=row["queue_name"],
        payload=payload,
        priority=row["priority"],
        run_at=row["run_at"],
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        last_error=row["last_error"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        key=row["key"],
        locked_at=row["locked_at"],
        locked_by=worker_id,
        revision=row["revision"],
        flags=frozenset(decode_payload(flags)) if flags else _NO_FLAGS,
        is_available=False,
        task_id=row["task_id"],
        job_queue_id=row["job_queue_id"],
        state=JobState.RUNNING,
    )
    return job, unreadable


async def identify_backend(connection: Connection, schema: Schema) -> Backend | None:
    """Which process serves the connection; None if a pooler in between may change it.

    If it is ours alone, its session is set up too.
    """
    row = await connection.fetchrow(statements_for(schema, "exchange.sql")["identify_backend"])
    if row is None or row["pid"] != connection.get_server_pid():
        return None
    await connection.execute(statements_for(schema, "exchange.sql")["read_each_statement_anew"])
    return Backend(row["pid"], row["started"])


async def end_backend(connection: Connection, schema: Schema, backend: Backend) -> None:
    """End that process, if it is still there."""
    await connection.execute(statements_for(schema, "exchange.sql")["end_backend"], *backend)


async def register_tasks(
    connection: Connection, schema: Schema, identifiers: Iterable[str]
) -> dict[int, str]:
    """The tasks by the ids that jobs refer to them with."""
    statements, names = statements_for(schema, "exchange.sql"), list(identifiers)
    await connection.execute(statements["register_tasks"], names)
    return {row["id"]: row["identifier"] for row in await connection.fetch(statements["read_tasks"], names)}


async def read_locked(
    connection: Connection, schema: Schema, worker_id: str, tasks: Mapping[int, str]
) -> Locked:
    """All that is locked by the worker, when none of its exchanges is under way any more."""
    statements = statements_for(schema, "exchange.sql")
    async with read_committed(connection):
        await connection.execute(statements["await_exchanges"], worker_id)
        queues = {
            row["id"]: row["locked_at"]
            for row in await connection.fetch(statements["read_locked_queues"], worker_id)
        }
        locks = {queue_id: QueueLock(queue_id, locked_at) for queue_id, locked_at in queues.items()}
        rows = await connection.fetch(statements["read_locked_jobs"], worker_id)
    jobs = _read_held(rows, worker_id, tasks, locks)
    for held in jobs:
        # A takeover leaves no key and no attempts, and is the only thing that changes a job while it is ours.
        job = held.job
        held.superseded = (
            job.key is None and job.attempts >= job.max_attempts and job.updated_at > held.locked_at
        )
    return Locked(jobs, queues)


async def unlock_queues(
    connection: Connection, schema: Schema, worker_id: str, queue_ids: Sequence[int]
) -> None:
    """Let go of queues."""
    await connection.execute(statements_for(schema, "exchange.sql")["unlock_queues"], worker_id, queue_ids)


async def renew(
    connection: Connection, schema: Schema, worker_id: str, jobs: Sequence[Held], queues: Sequence[QueueLock]
) -> None:
    """Lock again, as of now, what is still ours, so that nobody takes the locks for forgotten."""
    statements = statements_for(schema, "exchange.sql")
    async with read_committed(connection):
        # Jobs before queues, as everybody does who locks both.
        rows = await connection.fetch(
            statements["renew_jobs"],
            worker_id,
            [held.job.id for held in jobs],
            [held.locked_at for held in jobs],
        )
        job_locks = {row["id"]: row["locked_at"] for row in rows}
        rows = await connection.fetch(
            statements["renew_queues"],
            worker_id,
            [queue.id for queue in queues],
            [queue.locked_at for queue in queues],
        )
        queue_locks = {row["id"]: row["locked_at"] for row in rows}
    for held in jobs:
        held.locked_at = job_locks.get(held.job.id, held.locked_at)
    for queue in queues:
        queue.locked_at = queue_locks.get(queue.id, queue.locked_at)


async def unlock_stale(connection: Connection, schema: Schema) -> None:
    """Free what has been locked for more than four hours, whoever locked it."""
    statements = statements_for(schema, "exchange.sql")
    async with read_committed(connection):
        await connection.execute(statements["unlock_stale_jobs"])
        await connection.execute(statements["unlock_stale_queues"])


async def notify(connection: Connection, schema: Schema, channel: str, message: str) -> None:
    """Send a notification."""
    await connection.execute(statements_for(schema, "exchange.sql")["notify"], channel, message)
