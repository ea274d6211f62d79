"""The exchange, and the other statements that a worker runs for the jobs that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from asyncpg.pool import PoolConnectionProxy

from graphile_worker._base.payload import decode_payload
from graphile_worker._db.connection.any_bytes import as_sent, fetch as fetch_any_bytes, is_sql_ascii
from graphile_worker._db.connection.connect import is_utf8, read_committed
from graphile_worker._db.connection.error_mapping import StaleSessionError
from graphile_worker._db.connection.transactions import DURATION
from graphile_worker._db.connection.user_functions import explain, running_function
from graphile_worker._db.queries.changes import as_changes
from graphile_worker._db.queries.limits import LimitCounts, as_arguments
from graphile_worker._db.queries.row_by_row import all_or_each
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.job import Job, JobState
from graphile_worker.outcome import Completed, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    import asyncpg

    from graphile_worker._db.connection.connect import Connection

    Fetch = Callable[..., Awaitable[list[asyncpg.Record]]]

_NO_FLAGS: frozenset[str] = frozenset()
_NEVER = 1e9
_LONGEST_WAIT = 5.0


class Claim(NamedTuple):
    """A claim of a job.

    One worker may claim a job twice, if the job is released in between. The times of the locks differ.
    """

    job_id: int
    locked_at: datetime


@dataclass(slots=True)
class QueueLock:
    """A serial queue that the worker has locked."""

    id: int
    locked_at: datetime
    name: str


class Completion(msgspec.Struct, gc=False):
    """What is known about a job that its task has completed in a transaction."""

    transaction: int | None = None
    """The id of the transaction, once the job is deleted in it. It may be open, or rolled back since."""
    is_committed: bool = False
    """Whether the transaction is certainly committed."""


class ClaimedJob(msgspec.Struct, eq=False, gc=False):
    """A job that the worker holds until its result is recorded."""

    job: Job
    locked_at: datetime
    queue: QueueLock | None
    unreadable: ValueError | None = None
    superseded: bool = False
    """Whether another job took over its key before the worker read back that it holds the job."""
    since: float = 0.0
    """When the job started, on the monotonic clock."""
    completion: Completion | None = None
    """Set if the job's task has completed the job in a transaction of its own."""

    @property
    def is_recorded(self) -> bool:
        """Whether the task has recorded that the job is done. Only the lock of its queue may be left."""
        return self.completion is not None and self.completion.is_committed

    @property
    def claim(self) -> Claim:
        """The claim's identity in the database."""
        return Claim(self.job.id, self.locked_at)

    @property
    def order(self) -> tuple[int, datetime, int]:
        """Sort key: jobs start in this order."""
        return self.job.priority, self.job.run_at, self.job.id


class AttemptRecord(msgspec.Struct, frozen=True, gc=False):
    """What the history keeps about an attempt, besides what the job's row and the outcome have."""

    started_at: datetime | None
    duration: float | None
    details: str | None = None
    """A JSON object: result, no_result, payload, keep_payload, key, attempt, called. Each is optional. An
    attempt that did not start has an object, which may be empty."""

    def without_details(self) -> AttemptRecord:
        """Return the record without values that come from the task."""
        before = {} if self.details is None else msgspec.json.decode(self.details)
        details = {name: before[name] for name in ("called", "caller") if name in before}
        details["no_result"] = "the database could not store it"
        return AttemptRecord(
            self.started_at, self.duration, self.details and msgspec.json.encode(details).decode()
        )


_NOT_KEPT = AttemptRecord(None, None)


class Result(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a job; with the lock of its queue, if the worker holds no other job of that queue."""

    held: ClaimedJob
    outcome: Outcome
    queue: QueueLock | None
    attempt: AttemptRecord | None = None
    """The attempt, if the history keeps it."""
    plain: bool = False
    """Whether to leave out all values that come from the task, because the database has rejected them."""


class Position(NamedTuple):
    """A position in the order in which jobs are claimed."""

    priority: int
    run_at: datetime
    id: int


class ClaimRequest(msgspec.Struct, frozen=True):
    """Which jobs to claim, and how many."""

    wanted: int = 0
    startable: int | None = None
    """How many of them start at once; None: all. The others need another attempt, because of crashes."""
    run_length: int = 1
    queues_first: bool = False
    """Whether to claim from the queues of the finished jobs first, and nothing else if that is enough."""
    forbidden_flags: Sequence[str] | None = None
    as_of: datetime | None = None
    """A job is due if its run_at is not later than this; by default the database's time."""
    mark: Position | None = None
    """Skip jobs before this position."""
    tasks: Collection[str] | None = None
    """Claim only jobs of these tasks; None for all tasks of the worker."""
    partial: bool = False
    """Whether another request could claim more jobs."""
    rooms: Mapping[str, int] | None = None
    """How many jobs may be claimed of tasks that are limited in this worker."""
    limits: LimitCounts | None = None
    after_queue: int | None = 0
    """Where to continue visiting queues one by one, if jobs in locked queues hide others; None: not now."""
    left_out: Sequence[int] | None = None
    """Ids of jobs not to claim."""
    flags_after: Position | None = None
    """Where to continue to look for jobs whose flags are all allowed, if some flags are forbidden."""
    as_notified: bool = False
    """Whether exactly the jobs are wanted that notifications announced."""
    is_probably_filled: bool = False
    """Whether there probably are as many jobs as wanted. Then the reply need not tell about other jobs."""

    @property
    def has_limits(self) -> bool:
        """Whether limits hold for this exchange, so that only the function of the database can make it."""
        return self.rooms is not None or self.limits is not None


NOTHING = ClaimRequest()
_order = attrgetter("order")


class Refusal(NamedTuple):
    """The server's error when it refused to change a job, usually from a constraint or a trigger."""

    message: str
    sqlstate: str
    task: str = ""
    """The task's identifier; set only for jobs that could not be claimed."""

    @property
    def is_about_data(self) -> bool:
        """Whether the server rejected a value."""
        return self.sqlstate.startswith("22")


@dataclass(slots=True)
class ExchangeReply:
    """The result of an exchange."""

    now: datetime
    claimed: list[ClaimedJob] = field(default_factory=list)
    busy: set[Claim] = field(default_factory=set)
    """Finished jobs that another transaction has locked. The worker still holds them and tries again."""
    lost: set[Claim] = field(default_factory=set)
    """Finished jobs that the worker does not hold any more."""
    refused: dict[Claim, Refusal] = field(default_factory=dict)
    """Finished jobs whose results the server refuses to record. Empty unless the call was careful."""
    unclaimable: dict[int, Refusal] = field(default_factory=dict)
    """Jobs that the server refuses to lock, by id. Empty unless the call was careful."""
    contended: bool = False
    partial: bool = False
    """Whether a small exchange claimed less than was wanted, and there may be more jobs."""
    withheld: bool = False
    """Whether jobs were not claimed ahead because the attempt would be their last one."""
    next_due: datetime | None = None
    next_queue: int | None = 0
    """The next request's `after_queue`; 0 if all queues were visited, None if visiting was skipped."""
    flags_after: Position | None = None
    """The next request's `flags_after`; None if all jobs that have flags were visited."""
    cost: float = 0.0


class Answer:
    """The rows of a reply. Decoding them takes time, so the next exchange may start first."""

    def __init__(
        self,
        rows: list[asyncpg.Record],
        worker_id: str,
        tasks: Mapping[int, str],
        held_queues: Mapping[int, QueueLock],
    ) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._tasks = tasks
        self._held_queues = held_queues

    @property
    def only_jobs(self) -> int:
        """The number of claimed jobs; 0 if the reply also has rows about queues or results."""
        rows = self._rows
        return len(rows) - 1 if rows[0]["kind"] is None and rows[-2]["kind"] is None else 0

    def read(self) -> ExchangeReply:
        """Decode the rows. May be called only once."""
        return _read_reply(self._rows, self._worker_id, self._tasks, self._held_queues)


class Backend(NamedTuple):
    """The server process of a connection."""

    pid: int
    started: str


class Locked(NamedTuple):
    """All jobs and queues that are locked under the worker's name."""

    jobs: list[ClaimedJob]
    queues: dict[int, datetime]
    taken: frozenset[Claim] = frozenset()
    """The jobs that a sweeper released because it had declared the worker dead."""
    generation: int = 0
    """The generation of the session that read them: calls of earlier sessions do nothing from now on."""


async def prepare(connection: Connection, schema: Schema) -> Fetch:
    """Prepare the exchange on the connection."""
    text = statements_for(schema, "exchange.sql")["exchange"]
    if is_sql_ascii(connection):
        return partial(fetch_any_bytes, connection, text, timeout=_timeout(connection))
    statement = await connection.prepare(text)
    return partial(statement.fetch, timeout=_timeout(connection))


def _timeout(connection: Connection) -> float | None:
    """Return a timeout that overrides a caller's pool: an exchange must not be abandoned halfway."""
    return _NEVER if isinstance(connection, PoolConnectionProxy) else None  # None needs no timer


async def exchange(
    connection: Connection,
    schema: Schema,
    worker_id: str,
    results: Sequence[Result],
    request: ClaimRequest,
    tasks: Mapping[int, str],
    fetch: Fetch | None = None,
    *,
    generation: int | None = None,
    careful: bool = False,
) -> Answer:
    """Record results, and claim jobs.

    Args:
        connection: The connection to use.
        schema: The schema of the queue.
        worker_id: The worker that holds the jobs.
        results: The outcomes of jobs.
        request: Which jobs to claim.
        tasks: The worker's tasks by their ids.
        fetch: The prepared call that `prepare` returned, which is faster.
        generation: The session's generation, from `read_locked`. The server refuses the call if the worker
            has connected again since. None for a worker that never reads back which jobs it holds.
        careful: Whether to record and claim job by job, so that a refusal affects only one job. Slower.
    """
    if fetch is None:
        statement = statements_for(schema, "exchange.sql")["exchange"]
        fetch = partial(fetch_any_bytes, connection, statement, timeout=_timeout(connection))
    results = sorted(results, key=_is_changed) if any(map(_is_changed, results)) else results
    queued = any(result.queue for result in results)
    claimable = {
        task_id: task for task_id, task in tasks.items() if request.tasks is None or task in request.tasks
    }
    rows = await fetch(
        worker_id,
        [result.held.job.id for result in results],
        [result.held.locked_at for result in results],
        [result.queue and result.queue.id for result in results] if queued else None,
        [result.queue and result.queue.locked_at for result in results] if queued else None,
        len(results) - sum(map(_is_changed, results)),
        as_changes(results, unicode=is_utf8(connection)),
        list(claimable),
        request.wanted,
        request.startable,
        request.run_length,
        request.queues_first,
        request.forbidden_flags,
        request.as_of,
        *(request.mark or (None, None, None)),
        request.after_queue,
        generation,
        careful,
        request.left_out,
        *(request.flags_after or (None, None, None)),
        *_as_attempts(results, unicode=is_utf8(connection)),
        *as_arguments(request.rooms, request.limits, claimable.values()),
    )
    return Answer(rows, worker_id, tasks, _newest_locks(results) if queued else {})


def _as_attempts(
    results: Sequence[Result], *, unicode: bool
) -> tuple[list[datetime | None] | None, list[float | None] | None, list[str | None] | None]:
    """Return the starts, durations and details of attempts, parallel to the results; None if none is kept."""
    if not any(result.attempt for result in results):
        return None, None, None
    starts: list[datetime | None] = []
    durations: list[float | None] = []
    details: list[str | None] = []
    for result in results:
        attempt = result.attempt or _NOT_KEPT
        # The database rejects details with characters that its encoding lacks.
        if attempt.details and (result.plain or not (unicode or attempt.details.isascii())):
            attempt = attempt.without_details()
        starts.append(attempt.started_at)
        durations.append(attempt.duration)
        details.append(attempt.details)
    return starts, durations, details if any(details) else None


def _newest_locks(results: Sequence[Result]) -> dict[int, QueueLock]:
    """Return the latest lock of each queue: a delayed result may have an older one that was removed."""
    locks: dict[int, QueueLock] = {}
    for result in results:
        lock = result.queue
        if lock is not None and (lock.id not in locks or locks[lock.id].locked_at < lock.locked_at):
            locks[lock.id] = lock
    return locks


def _is_changed(result: Result) -> bool:
    """Return whether the job stays in the database."""
    return type(result.outcome) is not Completed


def _read_reply(
    rows: list[asyncpg.Record],
    worker_id: str,
    tasks: Mapping[int, str],
    held_queues: Mapping[int, QueueLock],
) -> ExchangeReply:
    end = rows.pop()
    now: datetime = end["locked_at"]
    reply = ExchangeReply(
        now=now,
        contended=end["contended"],
        partial=end["kind"] == "partial",
        next_due=end["next_due"],
        next_queue=end["next_queue"],
        cost=end["cost"],
        withheld=end["withheld"],
    )
    if end["priority"] is not None:
        reply.flags_after = Position(end["priority"], end["run_at"], end["id"])
    queues = dict(held_queues)  # a queue that the worker claims from again keeps its lock
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
    reply.claimed = [_read_claimed_job(row, worker_id, tasks, queues, now) for row in claimed]
    reply.claimed.sort(key=_order)
    return reply


def _read_refusal(row: asyncpg.Record, task: str = "") -> Refusal:
    sqlstate = row["key"]
    return Refusal(explain(row["last_error"], sqlstate, running_function(row["payload"])), sqlstate, task)


def _read_claimed_job(
    row: asyncpg.Record,
    worker_id: str,
    tasks: Mapping[int, str],
    queues: Mapping[int, QueueLock],
    locked_at: datetime,
) -> ClaimedJob:
    """Make a claimed job from a row; jobs of one queue share its lock."""
    # Unpacked by position, in the statement's order: access by name costs twice as much.
    (
        _, job_id, task_id, queue_id, _, payload, priority, run_at, attempts, max_attempts, last_error,
        created_at, updated_at, key, revision, flags, *_,
    ) = row  # fmt: skip
    unreadable, known_flags, column = None, _NO_FLAGS, "payload"
    try:
        payload = decode_payload(payload)
        if flags:
            column = "flags"
            known_flags = frozenset(decode_payload(flags))
    except Exception as error:  # noqa: BLE001 - any error must fail only this job
        # A new error, because the traceback of the old one would keep all other jobs of the reply in memory.
        payload, unreadable = None, ValueError(f"The {column} cannot be decoded: {error!s}")
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
    return ClaimedJob(job, locked_at, queue, unreadable)


async def identify_backend(connection: Connection, schema: Schema) -> Backend | None:
    """Return the server process of the connection; None if a pooler in between may change it."""
    row = await connection.fetchrow(statements_for(schema, "exchange.sql")["identify_backend"])
    if row is None or row["pid"] != connection.get_server_pid():
        return None
    return Backend(row["pid"], row["started"])


async def end_backend(connection: Connection, schema: Schema, backend: Backend) -> None:
    """Terminate the server process, if it still exists."""
    await connection.execute(statements_for(schema, "exchange.sql")["end_backend"], *backend)


async def register_tasks(
    connection: Connection, schema: Schema, identifiers: Iterable[str]
) -> dict[int, str]:
    """Register the tasks, and return their identifiers by id."""
    names = list(identifiers)
    await connection.execute(statements_for(schema, "exchange.sql")["register_tasks"], names)
    return await read_tasks(connection, schema, names)


async def read_tasks(connection: Connection, schema: Schema, identifiers: Iterable[str]) -> dict[int, str]:
    """Return the identifiers of the tasks that are registered, by id."""
    statement = statements_for(schema, "exchange.sql")["read_tasks"]
    return {row["id"]: row["identifier"] for row in await connection.fetch(statement, list(identifiers))}


async def read_locked(
    connection: Connection, schema: Schema, worker_id: str, tasks: Mapping[int, str]
) -> Locked:
    """Return all that the worker has locked, once none of its earlier exchanges can run any more.

    Fails after a few seconds if an exchange of an earlier session hangs and could not be terminated.
    """
    statements = statements_for(schema, "exchange.sql")
    names = ("limit_wait", "begin_generation", "read_locked_queues", "read_taken_jobs")
    prepare = [*map(statements.__getitem__, names), await as_sent(connection, statements["read_locked_jobs"])]
    async with read_committed(connection, prepare=prepare):
        previous_limit = await connection.fetchval(statements["limit_wait"], f"{_LONGEST_WAIT}s")
        generation = await connection.fetchval(statements["begin_generation"], worker_id)
        await connection.execute(statements["limit_wait"], previous_limit)
        queue_rows = await connection.fetch(statements["read_locked_queues"], worker_id)
        rows = await fetch_any_bytes(connection, statements["read_locked_jobs"], worker_id)
        taken = await connection.fetch(statements["read_taken_jobs"], worker_id)
    queues = {row["id"]: row["locked_at"] for row in queue_rows}
    locks = {
        row["job_queue_id"]: QueueLock(row["job_queue_id"], row["locked_at"], row["queue_name"])
        for row in rows
        if row["job_queue_id"] is not None
    }
    for queue_id, locked_at in queues.items():
        if queue_id in locks:
            locks[queue_id].locked_at = locked_at
    jobs = [_read_claimed_job(row, worker_id, tasks, locks, row["locked_at"]) for row in rows]
    for held in jobs:
        # A takeover of the key leaves no key and no attempts. Nothing else changes a job that a worker holds.
        job = held.job
        held.superseded = (
            job.key is None and job.attempts >= job.max_attempts and job.updated_at > held.locked_at
        )
    claims = frozenset(Claim(row["id"], row["locked_at"]) for row in taken)
    return Locked(jobs, queues, claims, generation)


async def unlock_queues(
    connection: Connection, schema: Schema, worker_id: str, queues: Mapping[int, datetime]
) -> set[int]:
    """Release queues, given by the time of the lock by id.

    Returns:
        The queues that are still locked, because another transaction has locked the row, or a trigger
        rejects the change.
    """
    statement = statements_for(schema, "exchange.sql")["unlock_queues"]

    async def unlock(items: Sequence[tuple[int, datetime]]) -> list[asyncpg.Record]:
        ids, locks = zip(*items, strict=True)
        return await connection.fetch(statement, worker_id, ids, locks)

    async with read_committed(connection, duration=DURATION, prepare=[statement]):
        unlocked = await all_or_each(connection, schema, list(queues.items()), unlock)
    return {row["id"] for row in unlocked.rows} | {queue_id for (queue_id, _), _ in unlocked.refused}


async def end_session(connection: Connection, schema: Schema, worker_id: str, generation: int) -> None:
    """End the session of a worker that stops and holds no jobs: late calls of the session do nothing."""
    await connection.execute(statements_for(schema, "exchange.sql")["end_session"], worker_id, generation)


async def renew(
    connection: Connection,
    schema: Schema,
    worker_id: str,
    jobs: Sequence[ClaimedJob],
    queues: Sequence[QueueLock],
    *,
    generation: int | None = None,
) -> None:
    """Renew the locks that the worker still holds, so that they do not expire."""
    statements = statements_for(schema, "exchange.sql")

    async def renew_jobs(jobs: Sequence[ClaimedJob]) -> list[asyncpg.Record]:
        ids, locks = [held.job.id for held in jobs], [held.locked_at for held in jobs]
        return await connection.fetch(statements["renew_jobs"], worker_id, ids, locks)

    async def renew_queues(queues: Sequence[QueueLock]) -> list[asyncpg.Record]:
        ids, locks = [queue.id for queue in queues], [queue.locked_at for queue in queues]
        return await connection.fetch(statements["renew_queues"], worker_id, ids, locks)

    # While a worker that freezes in here has the rows locked, no sweeper can release its jobs.
    prepare = [statements[name] for name in ("confirm_generation", "renew_jobs", "renew_queues")]
    async with read_committed(connection, duration=DURATION, prepare=prepare):
        if generation is not None and not await connection.fetchval(
            statements["confirm_generation"], worker_id, generation
        ):
            raise StaleSessionError("the worker has opened a newer session")
        # Jobs before queues, the order of every statement that locks both. A refused lock stays as it is.
        renewed = await all_or_each(connection, schema, jobs, renew_jobs)
        job_locks = {row["id"]: row["locked_at"] for row in renewed.rows}
        renewed_queues = await all_or_each(connection, schema, queues, renew_queues)
        queue_locks = {row["id"]: row["locked_at"] for row in renewed_queues.rows}
    for held in jobs:
        held.locked_at = job_locks.get(held.job.id, held.locked_at)
    for queue in queues:
        queue.locked_at = queue_locks.get(queue.id, queue.locked_at)
