"""The workers' heartbeats, and the release of jobs and queues that dead workers hold."""

from __future__ import annotations

import json
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from graphile_worker._db.connection import transactions
from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.connection.any_connection import Call, Operation, fetching_rows, run_own
from graphile_worker._db.connection.connect import is_utf8, read_committed
from graphile_worker._db.queries import jobs
from graphile_worker._db.queries.cancellations import settle, settling
from graphile_worker._db.queries.failures import read_died
from graphile_worker._db.queries.row_by_row import all_or_each
from graphile_worker._db.sql_files import Schema, one_text_statement, statements_for
from graphile_worker.workers import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import asyncpg

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker.job import Job

_FILE = "workers.sql"
_SWEEP_STATEMENTS = (
    "lock_dead_workers",
    "release_jobs",
    "record_released_jobs",
    "find_idle_queues",
    "release_queues",
    "release_shares",
    "notify_jobs",
    "delete_dead_workers",
)


class ServerIdentity(NamedTuple):
    """The server, as one session sees it."""

    epoch: str
    """The server's start time, which differs after each restart and on each machine."""
    is_session: bool
    """Whether the session belongs to this client alone; False behind a pooler that shares its sessions."""
    is_direct: bool
    """Whether the connection goes to the server directly, so that no pooler can reject it."""


class Beat(NamedTuple):
    """A Python worker's last heartbeat, and its lease."""

    id: str
    beat: str
    dead: bool
    seconds: float
    fast: float | None
    """The lease for a worker without sessions; None if its sessions prove nothing."""
    same_epoch: bool
    due: bool
    """Whether the worker is dead, and due to be swept again."""


class Suspect(NamedTuple):
    """A worker to declare dead, if its heartbeat has not changed."""

    id: str
    beat: str
    silence: float


class HeldQueue(NamedTuple):
    """A serial queue that a worker has locked."""

    id: int
    name: str
    locked_by: str


async def identify_server(connection: Connection, schema: Schema) -> ServerIdentity:
    """Identify the server, and whether a pooler is in between."""
    [row] = await connection.fetch(statements_for(schema, _FILE)["identify_server"])
    transport = getattr(connection, "_transport", None)  # the driver has no public way to get it
    sock = transport.get_extra_info("socket") if transport is not None else None
    is_session = row["pid"] == connection.get_server_pid()
    is_direct = is_session and sock is not None and _is_direct(sock, row["address"], row["port"])
    return ServerIdentity(row["epoch"], is_session, is_direct)


def _is_direct(sock: socket.socket, address: str | None, port: int | None) -> bool:
    if sock.family == getattr(socket, "AF_UNIX", None):
        return True
    return list(sock.getpeername()[:2]) == [address, port]


async def hold_session(connection: Connection, schema: Schema, worker_id: str) -> bool:
    """Take the lock that shows that this session of the worker exists; False if it is not available."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["hold_session"], worker_id))


async def set_lock_timeout(
    connection: Connection, schema: Schema, seconds: float, *, in_transaction: bool = False
) -> None:
    """Limit how long statements wait for a lock, in this session or in this transaction."""
    statement = statements_for(schema, _FILE)["set_lock_timeout"]
    await connection.execute(statement, str(round(seconds * 1000)), in_transaction)


async def register(
    connection: Connection, schema: Schema, worker_id: str, metadata: Mapping[str, object]
) -> None:
    """Register the worker as alive, even if it was declared dead."""
    statements = statements_for(schema, _FILE)
    prepare = [statements["register"], statements["revive"]]
    async with read_committed(connection, duration=transactions.DURATION, prepare=prepare):
        await connection.execute(statements["register"], worker_id, _as_json(connection, metadata))
        await connection.execute(statements["revive"], worker_id)


async def record_heartbeat(
    connection: Connection, schema: Schema, worker_id: str, changes: Mapping[str, object]
) -> bool:
    """Record a heartbeat; return False if the worker was declared dead or its row was removed."""
    statement = statements_for(schema, _FILE)["heartbeat"]
    return bool(await connection.fetchval(statement, worker_id, _as_json(connection, changes)))


async def deregister(connection: Connection, schema: Schema, worker_id: str) -> None:
    """Remove the row of a worker that has stopped and holds no locks."""
    await connection.execute(statements_for(schema, _FILE)["deregister"], worker_id)


async def read_heartbeats(connection: Connection, schema: Schema) -> list[Beat]:
    """Return the last heartbeats of all Python workers."""
    return [Beat(*row) for row in await connection.fetch(statements_for(schema, _FILE)["read_heartbeats"])]


async def find_lost_sessions(
    connection: Connection, schema: Schema, worker_ids: Sequence[str]
) -> frozenset[str]:
    """Return the workers that have no session."""
    rows = await connection.fetch(statements_for(schema, _FILE)["find_lost_sessions"], worker_ids)
    return frozenset(row["id"] for row in rows)


async def claim_dead_workers(
    connection: Connection,
    schema: Schema,
    suspects: Sequence[Suspect],
    sweeper: str,
    *,
    all_dead: bool,
    busy: float = 0.0,
) -> list[str]:
    """Declare the suspects dead, and return all workers to sweep now; none if another sweeper is active.

    No other sweeper takes these workers for `busy` seconds and a few more.
    """
    statements = statements_for(schema, _FILE)
    prepare = [statements[name] for name in ("become_sweeper", "claim_dead_workers", "declare_dead")]
    async with read_committed(connection, duration=transactions.DURATION, prepare=prepare):
        await connection.execute(statements["set_sweep_timeouts"])
        if not await connection.fetchval(statements["become_sweeper"]):
            return []
        # First, so that this does not return the workers that are declared dead below.
        taken = [
            row["id"] for row in await connection.fetch(statements["claim_dead_workers"], all_dead, busy)
        ]
        if suspects:
            ids, beats, silences = zip(*suspects, strict=True)
            declared = await connection.fetch(statements["declare_dead"], ids, beats, silences, sweeper, busy)
            taken += [row["id"] for row in declared]
    return taken


async def read_workers(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> list[WorkerInfo]:
    """Return the rows of the workers."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_workers"], worker_ids)
    return [_read_worker(row) for row in rows]


def keeping_heartbeats(schema: Schema) -> Operation[bool]:
    """Return whether the table of heartbeats exists; it does not in a schema that only Node has migrated."""
    return (yield Call(one_text_statement(schema, _FILE, "keeps_heartbeats"), schema.quoted)) == "true"


async def keeps_heartbeats(connection: Connection, schema: Schema) -> bool:
    """Return whether the table of heartbeats exists."""
    return await run_own(connection, keeping_heartbeats(schema))


def listing_workers(schema: Schema, *, include_locks: bool) -> Operation[list[WorkerInfo]]:
    """Return all workers and their locks, or only workers with a row, which needs no pass over the jobs."""
    has_table = yield from keeping_heartbeats(schema)
    name = "list_workers" if has_table else "list_holders"
    if not include_locks:
        name = "read_all_workers"
        if not has_table:
            return []
    rows = yield from fetching_rows(schema, _FILE, name, times=("started_at", "last_heartbeat_at"))
    return [_read_worker(row) for row in rows]


async def list_workers(connection: Connection, schema: Schema, *, include_locks: bool) -> list[WorkerInfo]:
    """Return the workers that `listing_workers` returns, on a connection of the library."""
    return await run_own(connection, listing_workers(schema, include_locks=include_locks))


class HeldLocks(NamedTuple):
    """The jobs and queues that some workers have locked."""

    jobs: list[Job]
    queues: list[HeldQueue]
    died_before: frozenset[int]
    """The ids of jobs whose previous run also ended with the death of its worker."""


async def read_held_locks(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> HeldLocks:
    """Return the jobs and queues that these workers have locked."""
    statement = statements_for(schema, _FILE)["read_held_queues"]
    queues = [HeldQueue(*row) for row in await fetch(connection, statement, worker_ids)]
    rows = await jobs.fetch_jobs(connection, schema, having_locked_by_any=worker_ids)
    died_before = await read_died(connection, schema, worker_ids)
    return HeldLocks([jobs.read_job(row) for row in rows], queues, died_before)


class ReleasedLocks(NamedTuple):
    """The ids of released jobs and queues, and of refused ones with the server's messages."""

    jobs: set[int]
    queues: set[int]
    refused_jobs: Mapping[int, str]
    refused_queues: Mapping[int, str]


async def release_locks(
    connection: Connection, schema: Schema, worker_ids: Sequence[str], changes: Sequence[Mapping[str, object]]
) -> ReleasedLocks:
    """Release the jobs of dead workers, and their queues that then have no locked job.

    A job that the server refuses to release, usually because of a trigger, stays locked; the others are
    released.
    """
    statements = statements_for(schema, _FILE)

    async def release_jobs(part: Sequence[Mapping[str, object]]) -> list[asyncpg.Record]:
        rows = await connection.fetch(statements["release_jobs"], _as_json(connection, part))
        released = {row["id"] for row in rows}
        kept = [change for change in part if change.get("details") is not None and change["id"] in released]
        if kept:
            await connection.fetch(statements["record_died_attempts"], _as_json(connection, kept))
        return rows

    async def release_queues(ids: Sequence[int]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["release_queues"], dead, ids)

    prepare = [*(statements[name] for name in _SWEEP_STATEMENTS), *settling(schema)]
    if any(change.get("details") is not None for change in changes):
        prepare.append(statements["record_died_attempts"])
    async with read_committed(connection, duration=transactions.DURATION, prepare=prepare):
        await connection.execute(statements["set_sweep_timeouts"])
        dead = [row["id"] for row in await connection.fetch(statements["lock_dead_workers"], worker_ids)]
        still_dead = [change for change in changes if change["locked_by"] in dead]
        # Jobs before queues, the order of every statement that locks both.
        jobs = await all_or_each(connection, schema, still_dead, release_jobs)
        if jobs.rows:
            await connection.execute(statements["record_released_jobs"], *zip(*jobs.rows, strict=True))
            # Before another worker can claim the jobs.
            await settle(connection, schema)
        idle = [row["id"] for row in await connection.fetch(statements["find_idle_queues"], dead)]
        queues = await all_or_each(connection, schema, idle, release_queues)
        shares = await connection.fetch(statements["release_shares"], dead)
        if jobs.rows or queues.rows or shares:
            await connection.execute(statements["notify_jobs"], len(jobs.rows) or 1)
        await connection.execute(statements["delete_dead_workers"], dead)
    return ReleasedLocks(
        {row["id"] for row in jobs.rows},
        {row["id"] for row in queues.rows},
        {cast("int", change["id"]): message for change, message in jobs.refused},
        dict(queues.refused),
    )


async def unlock_stale(connection: Connection, schema: Schema) -> ReleasedLocks:
    """Release all locks that are more than four hours old, of workers in any language."""
    statements = statements_for(schema, _FILE)

    async def unlock_jobs(ids: Sequence[int]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["unlock_stale_jobs"], ids)

    async def unlock_queues(ids: Sequence[int]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["unlock_stale_queues"], ids)

    prepare = [
        statements[name]
        for name in ("find_stale_jobs", "unlock_stale_jobs", "find_stale_queues", "unlock_stale_queues")
    ]
    async with read_committed(connection, prepare=prepare):
        ids = [row["id"] for row in await connection.fetch(statements["find_stale_jobs"])]
        jobs = await all_or_each(connection, schema, ids, unlock_jobs)
        ids = [row["id"] for row in await connection.fetch(statements["find_stale_queues"])]
        queues = await all_or_each(connection, schema, ids, unlock_queues)
        await connection.execute(statements["delete_old_sessions"])
    # In a transaction of its own, so that it does not delay the jobs that were unlocked.
    await connection.execute(statements["delete_old_failures"])
    await connection.execute(statements["forget_dead_workers"])
    return ReleasedLocks(
        {row["id"] for row in jobs.rows},
        {row["id"] for row in queues.rows},
        dict(jobs.refused),
        dict(queues.refused),
    )


def _as_json(connection: Connection, value: object) -> str:
    return json.dumps(value if is_utf8(connection) else _in_ascii(value), ensure_ascii=False)


def _in_ascii(value: object) -> object:
    match value:
        case str():
            return value.encode("ascii", "backslashreplace").decode()
        case list():
            return [_in_ascii(item) for item in value]
        case dict():
            # Except values that are compared: they come from the database, so it can store their characters.
            return {
                name: item if name in {"key", "locked_by"} else _in_ascii(item)
                for name, item in value.items()
            }
        case _:
            return value


def _read_worker(row: asyncpg.Record | Mapping[str, Any]) -> WorkerInfo:
    try:
        decoded = json.loads(row["metadata"] or "{}")
    except (ValueError, RecursionError):
        decoded = {}
    metadata: Mapping[str, Any] = decoded if isinstance(decoded, dict) else {}
    lease = metadata.get("lease") if isinstance(metadata.get("lease"), dict) else None
    died_at, state = _parse_time(metadata.get("died_at")), metadata.get("state")
    if died_at is not None:
        state = "dead"
    elif lease is not None and (row["silence"] or 0.0) > (lease.get("fast") or lease.get("seconds") or 0.0):
        state = "silent"
    language = metadata.get("language") or ("node" if row["id"].startswith(("pool-", "worker-")) else None)
    if language is None and metadata.keys() == {"pid"}:
        language = "rust"
    return WorkerInfo(
        id=row["id"],
        language=language,
        version=metadata.get("version"),
        host=metadata.get("host"),
        pid=metadata.get("pid"),
        concurrency=metadata.get("concurrency"),
        tasks=metadata.get("tasks"),
        started_at=row["started_at"],
        last_heartbeat_at=row["last_heartbeat_at"],
        seconds_since_heartbeat=row["silence"],
        state=state,
        died_at=died_at,
        lease=lease,
        reason=metadata.get("reason"),
        jobs=row["jobs"],
        queues=row["queues"],
    )


def _parse_time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


async def notify(connection: Connection, schema: Schema, channel: str, message: str) -> None:
    """Send a notification."""
    await connection.execute(statements_for(schema, _FILE)["notify"], channel, message)
