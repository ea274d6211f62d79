"""Which workers live: saying so, reading it, and freeing what dead ones hold."""

from __future__ import annotations

import json
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from graphile_worker._db import queries
from graphile_worker._db.any_bytes import fetch
from graphile_worker._db.cancellations import settle
from graphile_worker._db.connect import knows_all_characters, read_committed
from graphile_worker._db.one_by_one import all_or_each
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker._db.transactions import DURATION
from graphile_worker.liveness import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import asyncpg

    from graphile_worker._db.connect import Connection
    from graphile_worker.job import Job

_FILE = "workers.sql"


class Met(NamedTuple):
    """A server, as one session sees it."""

    epoch: str
    """Another one after each restart, and on each machine."""
    is_session: bool
    """Whether the session is ours alone; not if a pooler in between hands out its own."""
    is_direct: bool
    """Whether nothing is in between at all: then nobody else can refuse us."""


class Beat(NamedTuple):
    """What a worker of ours last said, and what it asks of others."""

    id: str
    beat: str
    dead: bool
    seconds: float
    fast: float | None
    """None if its sessions say nothing."""
    same_epoch: bool
    due: bool
    """Whether it is dead, and to be swept again."""


class Suspect(NamedTuple):
    """A worker that is dead, if its beat is still that one."""

    id: str
    beat: str
    silence: float


class HeldQueue(NamedTuple):
    """A serial queue that somebody has locked."""

    id: int
    name: str
    locked_by: str


async def meet(connection: Connection, schema: Schema) -> Met:
    """Look who is at the other end."""
    [row] = await connection.fetch(statements_for(schema, _FILE)["meet"])
    transport = getattr(connection, "_transport", None)  # the driver has no other way to ask
    sock = transport.get_extra_info("socket") if transport is not None else None
    is_session = row["pid"] == connection.get_server_pid()
    is_direct = is_session and sock is not None and _is_direct(sock, row["address"], row["port"])
    return Met(row["epoch"], is_session, is_direct)


def _is_direct(sock: socket.socket, address: str | None, port: int | None) -> bool:
    if sock.family == getattr(socket, "AF_UNIX", None):
        return True
    return list(sock.getpeername()[:2]) == [address, port]


async def hold_session(connection: Connection, schema: Schema, worker_id: str) -> bool:
    """Let others see that this session of the worker is there; False if another session has the lock."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["hold_session"], worker_id))


async def limit_waits(
    connection: Connection, schema: Schema, seconds: float, *, in_transaction: bool = False
) -> None:
    """Let statements fail that wait for a lock for so long; in this session, or in this transaction."""
    statement = statements_for(schema, _FILE)["do_not_wait_long"]
    await connection.execute(statement, str(round(seconds * 1000)), in_transaction)


async def register(
    connection: Connection, schema: Schema, worker_id: str, metadata: Mapping[str, object]
) -> None:
    """The worker lives; also if it was declared dead."""
    statement = statements_for(schema, _FILE)["register"]
    await connection.execute(statement, worker_id, _as_json(connection, metadata))


async def beat(connection: Connection, schema: Schema, worker_id: str, changes: Mapping[str, object]) -> bool:
    """The worker still lives; False if it is registered no more, or as dead."""
    statement = statements_for(schema, _FILE)["beat"]
    return bool(await connection.fetchval(statement, worker_id, _as_json(connection, changes)))


async def deregister(connection: Connection, schema: Schema, worker_id: str) -> None:
    """The worker is gone, and holds nothing."""
    await connection.execute(statements_for(schema, _FILE)["deregister"], worker_id)


async def read_beats(connection: Connection, schema: Schema) -> list[Beat]:
    """All workers of ours."""
    return [Beat(*row) for row in await connection.fetch(statements_for(schema, _FILE)["read_beats"])]


async def find_lost_sessions(
    connection: Connection, schema: Schema, worker_ids: Sequence[str]
) -> frozenset[str]:
    """Of these workers, those that have no session."""
    rows = await connection.fetch(statements_for(schema, _FILE)["find_lost_sessions"], worker_ids)
    return frozenset(row["id"] for row in rows)


async def take_dead(
    connection: Connection,
    schema: Schema,
    suspects: Sequence[Suspect],
    sweeper: str,
    *,
    all_dead: bool,
    busy: float = 0.0,
) -> list[str]:
    """Declare these dead, and return all whose jobs are to be freed now; none if somebody else is at it.

    For `busy` seconds, and some more, nobody else is to sweep them.
    """
    statements = statements_for(schema, _FILE)
    async with read_committed(connection, duration=DURATION):
        await connection.execute(statements["do_not_dawdle"])
        if not await connection.fetchval(statements["become_sweeper"]):
            return []
        # First, so that those we declare dead now are not among them.
        taken = [row["id"] for row in await connection.fetch(statements["take_dead"], all_dead, busy)]
        if suspects:
            ids, beats, silences = zip(*suspects, strict=True)
            declared = await connection.fetch(statements["declare_dead"], ids, beats, silences, sweeper, busy)
            taken += [row["id"] for row in declared]
    return taken


async def read_workers(connection: Connection, schema: Schema, worker_ids: Sequence[str]) -> list[WorkerInfo]:
    """What is known of these."""
    rows = await connection.fetch(statements_for(schema, _FILE)["read_workers"], worker_ids)
    return [_read_worker(row) for row in rows]


async def keeps_heartbeats(connection: Connection, schema: Schema) -> bool:
    """Whether there is a table in which workers say that they live: not on a schema that only Node knows."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["keeps_heartbeats"], schema.quoted))


async def list_workers(connection: Connection, schema: Schema, *, and_locks: bool) -> list[WorkerInfo]:
    """All workers, and what they hold; or only those with a row, which need no pass over the jobs."""
    statements = statements_for(schema, _FILE)
    known = await keeps_heartbeats(connection, schema)
    if and_locks:
        rows = await connection.fetch(statements["list_workers" if known else "list_holders"])
    else:
        rows = await connection.fetch(statements["read_workers"], None) if known else []
    return [_read_worker(row) for row in rows]


async def read_held(
    connection: Connection, schema: Schema, worker_ids: Sequence[str]
) -> tuple[list[Job], list[HeldQueue]]:
    """Jobs and queues that these hold."""
    statement = statements_for(schema, _FILE)["read_held_queues"]
    queues = [HeldQueue(*row) for row in await fetch(connection, statement, worker_ids)]
    rows = await queries.fetch_jobs(connection, schema, having_locked_by_any=worker_ids)
    return [queries.read_job(row) for row in rows], queues


class Freed(NamedTuple):
    """What was freed, by ids; and what the server refuses to free, with the reasons."""

    jobs: set[int]
    queues: set[int]
    refused_jobs: Mapping[int, str]
    refused_queues: Mapping[int, str]


async def free(
    connection: Connection, schema: Schema, worker_ids: Sequence[str], changes: Sequence[Mapping[str, object]]
) -> Freed:
    """Free these jobs, and queues that have no locked job then.

    A job that the server refuses to free, because of a trigger as a rule, stays locked. The others do not.
    """
    statements = statements_for(schema, _FILE)

    async def free_jobs(some: Sequence[Mapping[str, object]]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["free_jobs"], _as_json(connection, some))

    async def free_queues(ids: Sequence[int]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["free_queues"], dead, ids)

    async with read_committed(connection, duration=DURATION):
        await connection.execute(statements["do_not_dawdle"])
        dead = [row["id"] for row in await connection.fetch(statements["lock_dead"], worker_ids)]
        ours = [change for change in changes if change["locked_by"] in dead]
        # Jobs before queues, as everybody does who locks both.
        jobs = await all_or_each(connection, schema, ours, free_jobs)
        if jobs.rows:
            await connection.execute(statements["note_taken"], *zip(*jobs.rows, strict=True))
            # Before anybody can claim them again.
            await settle(connection, schema)
        idle = [row["id"] for row in await connection.fetch(statements["find_idle_queues"], dead)]
        queues = await all_or_each(connection, schema, idle, free_queues)
        if jobs.rows or queues.rows:
            await connection.execute(statements["tell_of_jobs"], len(jobs.rows) or 1)
        await connection.execute(statements["forget_dead"], dead)
    return Freed(
        {row["id"] for row in jobs.rows},
        {row["id"] for row in queues.rows},
        {cast("int", change["id"]): why for change, why in jobs.refused},
        dict(queues.refused),
    )


async def unlock_stale(connection: Connection, schema: Schema) -> Freed:
    """Free what has been locked for more than four hours, whoever locked it."""
    statements = statements_for(schema, _FILE)

    async def unlock_jobs(ids: Sequence[int]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["unlock_stale_jobs"], ids)

    async def unlock_queues(ids: Sequence[int]) -> list[asyncpg.Record]:
        return await connection.fetch(statements["unlock_stale_queues"], ids)

    async with read_committed(connection):
        ids = [row["id"] for row in await connection.fetch(statements["find_stale_jobs"])]
        jobs = await all_or_each(connection, schema, ids, unlock_jobs)
        ids = [row["id"] for row in await connection.fetch(statements["find_stale_queues"])]
        queues = await all_or_each(connection, schema, ids, unlock_queues)
        await connection.execute(statements["forget_old_sessions"])
    return Freed(
        {row["id"] for row in jobs.rows},
        {row["id"] for row in queues.rows},
        dict(jobs.refused),
        dict(queues.refused),
    )


def _as_json(connection: Connection, value: object) -> str:
    return json.dumps(value if knows_all_characters(connection) else _in_ascii(value), ensure_ascii=False)


def _in_ascii(value: object) -> object:
    match value:
        case str():
            return value.encode("ascii", "backslashreplace").decode()
        case list():
            return [_in_ascii(item) for item in value]
        case dict():
            # But for what is compared: it comes from the database, so that has all its characters.
            return {
                name: item if name in {"key", "locked_by"} else _in_ascii(item)
                for name, item in value.items()
            }
        case _:
            return value


def _read_worker(row: asyncpg.Record) -> WorkerInfo:
    try:
        found = json.loads(row["metadata"] or "{}")
    except (ValueError, RecursionError):
        found = {}
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    lease = known.get("lease") if isinstance(known.get("lease"), dict) else None
    died_at, state = _moment(known.get("died_at")), known.get("state")
    if died_at is not None:
        state = "dead"
    elif lease is not None and (row["silence"] or 0.0) > (lease.get("fast") or lease.get("seconds") or 0.0):
        state = "silent"
    language = known.get("language") or ("node" if row["id"].startswith(("pool-", "worker-")) else None)
    if language is None and known.keys() == {"pid"}:
        language = "rust"
    return WorkerInfo(
        id=row["id"],
        language=language,
        version=known.get("version"),
        host=known.get("host"),
        pid=known.get("pid"),
        concurrency=known.get("concurrency"),
        tasks=known.get("tasks"),
        started_at=row["started_at"],
        last_heartbeat_at=row["last_heartbeat_at"],
        silence=row["silence"],
        state=state,
        died_at=died_at,
        lease=lease,
        reason=known.get("reason"),
        jobs=row["jobs"],
        queues=row["queues"],
    )


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
