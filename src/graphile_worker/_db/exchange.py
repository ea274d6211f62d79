"""The exchange, and what else a worker asks of the database about the jobs it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from asyncpg.pool import PoolConnectionProxy

from graphile_worker._db.any_bytes import fetch as fetch_any_bytes
from graphile_worker._db.any_bytes import keeps_any_bytes
from graphile_worker._db.changes import as_changes
from graphile_worker._db.connect import knows_all_characters, read_committed
from graphile_worker._db.failures import GivenUpError
from graphile_worker._db.one_by_one import all_or_each
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker._db.user_functions import explain, running_function
from graphile_worker.job import Job, JobState
from graphile_worker.payload import decode_payload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    import asyncpg

    from graphile_worker._db.connect import Connection
    from graphile_worker.outcome import Outcome

    Fetch = Callable[..., Awaitable[list[asyncpg.Record]]]

_NO_FLAGS: frozenset[str] = frozenset()
_NEVER = 1e9
_LONGEST_WAIT = 5.0


class Claim(NamedTuple):
    """A job may be claimed twice by one worker, if somebody frees it meanwhile: then the time tells."""

    job_id: int
    locked_at: datetime


@dataclass(slots=True)
class QueueLock:
    """A serial queue that is ours."""

    id: int
    locked_at: datetime
    name: str


class Held(msgspec.Struct, eq=False, gc=False):
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


class Result(msgspec.Struct, frozen=True, gc=False):
    """What became of a job; with the lock of its queue, if no other job of that queue is in hand."""

    held: Held
    outcome: Outcome
    queue: QueueLock | None
    plain: bool = False
    """Whether to leave out all that the task has said: the database has refused it."""


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
    tasks: Collection[str] | None = None
    """Only jobs of these; None for all that the worker has."""
    partial: bool = False
    """Whether jobs of others could be claimed too, by another wish."""
    after_queue: int | None = 0
    """Where to go on visiting queues one by one, if jobs of locked queues hide the others; None: not now."""
    left_out: Sequence[int] | None = None
    """Ids of jobs not to claim."""


NOTHING = Wish()
_order = attrgetter("order")


class Refusal(NamedTuple):
    """Why the server refused to change a job: a constraint or a trigger, as a rule."""

    message: str
    sqlstate: str
    task: str = ""
    """Known for jobs that could not be claimed."""

    @property
    def is_about_data(self) -> bool:
        """Whether a value cannot be what it is to be."""
        return self.sqlstate.startswith("22")


@dataclass(slots=True)
class Reply:
    """What the exchange came to."""

    now: datetime
    claimed: list[Held] = field(default_factory=list)
    busy: set[Claim] = field(default_factory=set)
    """Finished jobs that somebody's transaction has locked: still ours, ask again."""
    lost: set[Claim] = field(default_factory=set)
    """Finished jobs that are not ours any more."""
    refused: dict[Claim, Refusal] = field(default_factory=dict)
    """Finished jobs whose results the server does not take. Empty unless the call was careful."""
    unclaimable: dict[int, Refusal] = field(default_factory=dict)
    """Jobs that the server does not let us lock, by id. Empty unless the call was careful."""
    contended: bool = False
    next_due: datetime | None = None
    next_queue: int | None = 0
    """Where to go on with that; 0 if there is no need to, None if there is, and it was not done."""
    cost: float = 0.0


class Answer:
    """The rows of a reply. To read them takes a while, and the next exchange need not wait for that."""

    def __init__(self, rows: list[asyncpg.Record], worker_id: str, tasks: Mapping[int, str]) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._tasks = tasks

    @property
    def only_jobs(self) -> int:
        """How many jobs were claimed; 0 if there is something about queues or results too."""
        rows = self._rows
        return len(rows) - 1 if rows[0]["kind"] is None and rows[-2]["kind"] is None else 0

    def read(self) -> Reply:
        """What it says. May be called once."""
        return _read_reply(self._rows, self._worker_id, self._tasks)


class Backend(NamedTuple):
    """The server's process for a connection."""

    pid: int
    started: str


class Locked(NamedTuple):
    """All that the database has under our name."""

    jobs: list[Held]
    queues: dict[int, datetime]
    taken: frozenset[Claim] = frozenset()
    """What others took from us, because they had declared us dead."""
    generation: int = 0
    """Of the session that read it: calls of earlier sessions do nothing from now on."""


async def prepare(connection: Connection, schema: Schema) -> Fetch:
    """The exchange, prepared on that connection."""
    text = statements_for(schema, "exchange.sql")["exchange"]
    if keeps_any_bytes(connection):
        return partial(fetch_any_bytes, connection, text, timeout=_patience(connection))
    statement = await connection.prepare(text)
    return partial(statement.fetch, timeout=_patience(connection))


def _patience(connection: Connection) -> float | None:
    """A pool of the caller's may have a limit for statements, but an exchange is not to be given up."""
    return _NEVER if isinstance(connection, PoolConnectionProxy) else None  # which spares a timer


async def exchange(
    connection: Connection,
    schema: Schema,
    worker_id: str,
    results: Sequence[Result],
    wish: Wish,
    tasks: Mapping[int, str],
    fetch: Fetch | None = None,
    *,
    generation: int | None = None,
    careful: bool = False,
) -> Answer:
    """Record results, and claim jobs; with what `prepare` returned it is faster.

    Args:
        connection: Where to ask.
        schema: Whose jobs.
        worker_id: The worker that holds the jobs.
        results: The outcomes of jobs.
        wish: What to claim.
        tasks: The worker's tasks by their ids.
        fetch: What `prepare` returned.
        generation: That of the session, from `read_locked`. The server refuses the call if the worker has
            connected again since. None for a worker that never reads back what it holds.
        careful: Whether to record and claim job by job, so that a refusal concerns one job alone. Slower.
    """
    if fetch is None:
        statement = statements_for(schema, "exchange.sql")["exchange"]
        fetch = partial(fetch_any_bytes, connection, statement, timeout=_patience(connection))
    queued = any(result.queue for result in results)
    rows = await fetch(
        worker_id,
        [result.held.job.id for result in results],
        [result.held.locked_at for result in results],
        [result.queue and result.queue.id for result in results] if queued else None,
        [result.queue and result.queue.locked_at for result in results] if queued else None,
        as_changes(results, unicode=knows_all_characters(connection)),
        [task_id for task_id, task in tasks.items() if wish.tasks is None or task in wish.tasks],
        wish.wanted,
        wish.run_length,
        wish.forbidden_flags,
        wish.as_of,
        *(wish.mark or (None, None, None)),
        wish.after_queue,
        generation,
        careful,
        wish.left_out,
    )
    return Answer(rows, worker_id, tasks)


def _read_reply(rows: list[asyncpg.Record], worker_id: str, tasks: Mapping[int, str]) -> Reply:
    end = rows.pop()
    now: datetime = end["locked_at"]
    reply = Reply(
        now=now,
        contended=end["contended"],
        next_due=end["next_due"],
        next_queue=end["next_queue"],
        cost=end["cost"],
    )
    queues: dict[int, QueueLock] = {}
    while rows and (kind := rows[-1]["kind"]) == "queue":
        row = rows.pop()
        queues[row["job_queue_id"]] = QueueLock(row["job_queue_id"], now, row["queue_name"])
    while rows and rows[-1]["kind"] == "unclaimable":
        row = rows.pop()
        reply.unclaimable[row["id"]] = _read_refusal(row, tasks.get(row["task_id"], ""))
    claimed = rows
    if rows and rows[0]["kind"] is not None:
        claimed = []
        for row in rows:
            kind = row["kind"]
            claim = Claim(row["id"], row["locked_at"])
            if kind is None:
                claimed.append(row)
            elif kind == "refused":
                reply.refused[claim] = _read_refusal(row)
            else:
                (reply.busy if kind == "busy" else reply.lost).add(claim)
    reply.claimed = [_read_held(row, worker_id, tasks, queues, now) for row in claimed]
    reply.claimed.sort(key=_order)
    return reply


def _read_refusal(row: asyncpg.Record, task: str = "") -> Refusal:
    sqlstate = row["key"]
    return Refusal(explain(row["last_error"], sqlstate, running_function(row["payload"])), sqlstate, task)


def _read_held(
    row: asyncpg.Record,
    worker_id: str,
    tasks: Mapping[int, str],
    queues: Mapping[int, QueueLock],
    locked_at: datetime,
) -> Held:
    """A job of ours; those of one queue share its lock."""
    # By place, which is the statement's order: by name each costs twice as much.
    (
        _, job_id, task_id, queue_id, _, payload, priority, run_at, attempts, max_attempts, last_error,
        created_at, updated_at, key, revision, flags, *_,
    ) = row  # fmt: skip
    unreadable, known_flags, what = None, _NO_FLAGS, "payload"
    try:
        payload = decode_payload(payload)
        if flags:
            what = "flags"
            known_flags = frozenset(decode_payload(flags))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must fail this job alone
        # A new one: that one's traceback leads to all other jobs of the reply, and would keep them.
        payload, unreadable = None, ValueError(f"The {what} cannot be decoded: {error!s}")
    created_at = created_at or run_at
    queue = None if queue_id is None else queues[queue_id]
    job = Job(
        id=job_id,
        task_identifier=tasks.get(task_id, ""),
        queue_name=None if queue is None else queue.name,
        payload=payload,
        priority=priority,
        run_at=run_at,
        attempts=attempts,
        max_attempts=max_attempts,
        last_error=last_error,
        created_at=created_at,
        updated_at=updated_at or created_at,
        key=key,
        locked_at=locked_at,
        locked_by=worker_id,
        revision=revision,
        flags=known_flags,
        is_available=False,
        task_id=task_id,
        job_queue_id=queue_id,
        state=JobState.RUNNING,
    )
    return Held(job, locked_at, queue, unreadable)


async def identify_backend(connection: Connection, schema: Schema) -> Backend | None:
    """Which process serves the connection; None if a pooler in between may change it."""
    row = await connection.fetchrow(statements_for(schema, "exchange.sql")["identify_backend"])
    if row is None or row["pid"] != connection.get_server_pid():
        return None
    return Backend(row["pid"], row["started"])


async def end_backend(connection: Connection, schema: Schema, backend: Backend) -> None:
    """End that process, if it is still there."""
    await connection.execute(statements_for(schema, "exchange.sql")["end_backend"], *backend)


async def register_tasks(
    connection: Connection, schema: Schema, identifiers: Iterable[str]
) -> dict[int, str]:
    """The tasks by the ids that jobs refer to them with."""
    names = list(identifiers)
    await connection.execute(statements_for(schema, "exchange.sql")["register_tasks"], names)
    return await read_tasks(connection, schema, names)


async def read_tasks(connection: Connection, schema: Schema, identifiers: Iterable[str]) -> dict[int, str]:
    """Those that are there already."""
    statement = statements_for(schema, "exchange.sql")["read_tasks"]
    return {row["id"]: row["identifier"] for row in await connection.fetch(statement, list(identifiers))}


async def read_locked(
    connection: Connection, schema: Schema, worker_id: str, tasks: Mapping[int, str]
) -> Locked:
    """All that is locked by the worker, when none of its exchanges is under way or can begin any more.

    An exchange of an earlier session that hangs, and that could not be ended, makes this fail after a while.
    """
    statements = statements_for(schema, "exchange.sql")
    async with read_committed(connection):
        patience = await connection.fetchval(statements["limit_wait"], f"{_LONGEST_WAIT}s")
        generation = await connection.fetchval(statements["begin_generation"], worker_id)
        await connection.execute(statements["limit_wait"], patience)
        ours = await connection.fetch(statements["read_locked_queues"], worker_id)
        rows = await fetch_any_bytes(connection, statements["read_locked_jobs"], worker_id)
        taken = await connection.fetch(statements["read_taken_jobs"], worker_id)
    queues = {row["id"]: row["locked_at"] for row in ours}
    locks = {
        row["job_queue_id"]: QueueLock(row["job_queue_id"], row["locked_at"], row["queue_name"])
        for row in rows
        if row["job_queue_id"] is not None
    }
    for queue_id, locked_at in queues.items():
        if queue_id in locks:
            locks[queue_id].locked_at = locked_at
    jobs = [_read_held(row, worker_id, tasks, locks, row["locked_at"]) for row in rows]
    for held in jobs:
        # A takeover leaves no key and no attempts, and is the only thing that changes a job while it is ours.
        job = held.job
        held.superseded = (
            job.key is None and job.attempts >= job.max_attempts and job.updated_at > held.locked_at
        )
    claims = frozenset(Claim(row["id"], row["locked_at"]) for row in taken)
    return Locked(jobs, queues, claims, generation)


async def unlock_queues(
    connection: Connection, schema: Schema, worker_id: str, queues: Mapping[int, datetime]
) -> set[int]:
    """Release queues, each by its id and the time of its lock.

    Returns those that are still locked, because another transaction has the row, or a trigger refuses it.
    """
    statement = statements_for(schema, "exchange.sql")["unlock_queues"]

    async def unlock(some: Sequence[tuple[int, datetime]]) -> list[asyncpg.Record]:
        ids, locks = zip(*some, strict=True)
        return await connection.fetch(statement, worker_id, ids, locks)

    async with read_committed(connection):
        unlocked = await all_or_each(connection, schema, list(queues.items()), unlock)
    return {row["id"] for row in unlocked.rows} | {queue_id for (queue_id, _), _ in unlocked.refused}


async def end_session(connection: Connection, schema: Schema, worker_id: str, generation: int) -> None:
    """Let no call of the session do anything any more: the worker holds nothing, and ends."""
    await connection.execute(statements_for(schema, "exchange.sql")["end_session"], worker_id, generation)


async def renew(
    connection: Connection,
    schema: Schema,
    worker_id: str,
    jobs: Sequence[Held],
    queues: Sequence[QueueLock],
    *,
    generation: int | None = None,
) -> None:
    """Lock again, as of now, what is still ours, so that nobody takes the locks for forgotten."""
    statements = statements_for(schema, "exchange.sql")

    async def renew_jobs(jobs: Sequence[Held]) -> list[asyncpg.Record]:
        ids, locks = [held.job.id for held in jobs], [held.locked_at for held in jobs]
        return await connection.fetch(statements["renew_jobs"], worker_id, ids, locks)

    async def renew_queues(queues: Sequence[QueueLock]) -> list[asyncpg.Record]:
        ids, locks = [queue.id for queue in queues], [queue.locked_at for queue in queues]
        return await connection.fetch(statements["renew_queues"], worker_id, ids, locks)

    async with read_committed(connection):
        if generation is not None and not await connection.fetchval(
            statements["confirm_generation"], worker_id, generation
        ):
            raise GivenUpError("this call was given up by its worker")
        # Jobs before queues, as everybody does who locks both. What the server refuses stays as it is.
        renewed = await all_or_each(connection, schema, jobs, renew_jobs)
        job_locks = {row["id"]: row["locked_at"] for row in renewed.rows}
        renewed_queues = await all_or_each(connection, schema, queues, renew_queues)
        queue_locks = {row["id"]: row["locked_at"] for row in renewed_queues.rows}
    for held in jobs:
        held.locked_at = job_locks.get(held.job.id, held.locked_at)
    for queue in queues:
        queue.locked_at = queue_locks.get(queue.id, queue.locked_at)


async def notify(connection: Connection, schema: Schema, channel: str, message: str) -> None:
    """Send a notification."""
    await connection.execute(statements_for(schema, "exchange.sql")["notify"], channel, message)
