"""Adding many jobs: in a few statements, with flat memory, in the order of the specs.

The specs go as one array per column, chunk by chunk; while the server works on one chunk the next is made.
Our own `add_jobs` returns rows in the order of the specs, so only what the caller does not know is sent
back. npm's does not, and may skip a keyed spec that met a worker: there whole rows come back and are paired
with the specs by what they contain, and skipped specs are asked for again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from graphile_worker._db.queries import read_job, split_instant
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker._db.transactions import COMPUTING, transaction
from graphile_worker.errors import DatabaseError, InvalidJobError
from graphile_worker.job import Job, JobKeyMode, JobSpec, JobState
from graphile_worker.payload import decode_or_raw, encode_payload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator

    import asyncpg

    from graphile_worker._db.connect import Connection

T = TypeVar("T")
_CHUNK = 10_000
_CHUNK_BYTES = 8_000_000
"""Of JSON: a statement must not have a GB of parameters, and a few chunks are in memory at once."""
_TURN = 500
_TURN_BYTES = 1000
_DEFAULT_PAYLOAD = "{}"
_DEFAULT_MAX_ATTEMPTS = 25
_NO_FLAGS: frozenset[str] = frozenset()


class IterationError(Exception):
    """The caller's iterator raised; the cause says what."""


class _Chunk(NamedTuple):
    specs: list[JobSpec]
    payloads: list[str]
    preserve_run_at: bool

    def only(self, wanted: Callable[[JobSpec], bool]) -> _Chunk:
        kept = [pair for pair in zip(self.specs, self.payloads, strict=True) if wanted(pair[0])]
        return _Chunk([spec for spec, _ in kept], [payload for _, payload in kept], self.preserve_run_at)


async def add_jobs(
    connection: Connection,
    schema: Schema,
    specs: Iterable[JobSpec],
    *,
    read: bool = True,
    max_payload_size: int | None = None,
    idle: float = COMPUTING,
) -> list[Job]:
    """Add all or, if one cannot be added, none.

    Returns them; it may return none, which is faster, if the caller does not read them. The transaction
    may wait for the next specs for `idle` seconds.
    """
    statements = statements_for(schema, "jobs.sql")
    async with transaction(connection, idle=idle):
        [(now, keeps_order)] = await connection.fetch(statements["prepare_bulk"], schema.quoted)
        async with aclosing(_chunks(specs, max_payload_size)) as chunks:
            if keeps_order:
                statement = statements["add_jobs" if read else "add_unread_jobs"]
                return await _add_in_order(connection, statement, chunks, now, read=read)
            jobs: list[Job] = []
            async for chunk in chunks:
                jobs += await _add_and_pair(connection, schema, chunk, now)
            return jobs


async def _add_in_order(
    connection: Connection, statement: str, chunks: AsyncIterator[_Chunk], now: datetime, *, read: bool
) -> list[Job]:
    """While the server works on one chunk we make the next, and read what it said of the one before."""
    jobs: list[Job] = []
    sent: _Chunk | None = None
    under_way: asyncio.Task[list[asyncpg.Record]] | None = None
    try:
        while True:
            chunk = await anext(chunks, None)
            arguments = None if chunk is None else _arguments(chunk)
            rows = [] if under_way is None else await under_way
            under_way = None
            if arguments is not None:
                under_way = asyncio.create_task(connection.fetch(statement, *arguments))
            if sent is not None and not read and rows[0]["count"] != len(sent.specs):
                raise _not_as_asked()
            if sent is not None and read:
                async for some in _in_turns(zip(sent.specs, sent.payloads, rows, strict=True)):
                    jobs += [_job(*pair, now) for pair in some]
            if chunk is None:
                return jobs
            sent = chunk
    finally:
        # Whatever ends us early must not leave a statement running on the caller's connection.
        if under_way is not None and not under_way.done():
            under_way.cancel()
            await asyncio.wait([under_way])


async def _in_turns(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """The items, some at a time; in between others on the event loop have their turn."""
    iterator = iter(items)
    while some := list(islice(iterator, _TURN)):
        yield some
        await asyncio.sleep(0)


async def _chunks(specs: Iterable[JobSpec], max_payload_size: int | None) -> AsyncGenerator[_Chunk]:
    """Runs of specs that one call can add: keyed ones must agree on what happens to run_at."""
    keys: set[str] = set()
    chunk: list[JobSpec] = []
    payloads: list[str] = []
    preserve: bool | None = None
    size = turn = 0
    for spec in _reading(specs):
        if spec.job_key is not None:
            _check_key(spec, keys)
            wish = spec.job_key_mode == JobKeyMode.PRESERVE_RUN_AT
            if preserve is not None and wish != preserve:
                yield _Chunk(chunk, payloads, preserve)
                chunk, payloads, size = [], [], 0
            preserve = wish
        payload = _DEFAULT_PAYLOAD
        if spec.payload is not None:
            payload = encode_payload(spec.payload, max_size=max_payload_size)
        chunk.append(spec)
        payloads.append(payload)
        size += len(payload)
        turn += 1 + len(payload) // _TURN_BYTES
        if len(chunk) == _CHUNK or size >= _CHUNK_BYTES:
            yield _Chunk(chunk, payloads, bool(preserve))
            chunk, payloads, preserve, size = [], [], None, 0
        if turn >= _TURN:
            turn = 0
            await asyncio.sleep(0)  # others on the event loop have their turn
    if chunk:
        yield _Chunk(chunk, payloads, bool(preserve))


def _check_key(spec: JobSpec, keys: set[str]) -> None:
    """Refuse what the database cannot do in one call; remember the key."""
    if spec.job_key in keys:
        raise InvalidJobError(
            f"Two jobs of one add_jobs call have the job_key {spec.job_key!r}.", argument="job_key"
        )
    if spec.job_key_mode == JobKeyMode.UNSAFE_DEDUPE:
        raise InvalidJobError(
            "unsafe_dedupe is not possible in bulk. Use add_job, or another job_key_mode.",
            argument="job_key_mode",
            code="GWBKM",
        )
    keys.add(str(spec.job_key))


def _reading(specs: Iterable[JobSpec]) -> Iterator[JobSpec]:
    """The specs; an error of the caller's iterator is kept apart from errors of the database."""
    iterator = iter(specs)
    while True:
        try:
            spec = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise IterationError from error
        if not isinstance(spec, JobSpec):
            raise InvalidJobError(f"add_jobs takes JobSpec values, not {type(spec).__name__}.")
        yield spec


def _arguments(chunk: _Chunk) -> list[Any]:
    """One array per column; a column that no spec sets is not sent."""
    instants = [split_instant(spec.run_at) for spec in chunk.specs]
    columns: list[list[Any]] = [
        [spec.identifier for spec in chunk.specs],
        chunk.payloads,
        [spec.queue_name for spec in chunk.specs],
        [moment for moment, _ in instants],
        [delay for _, delay in instants],
        [spec.max_attempts for spec in chunk.specs],
        [spec.job_key for spec in chunk.specs],
        [spec.priority for spec in chunk.specs],
        [None if spec.flags is None else _array_literal(spec.flags) for spec in chunk.specs],
    ]
    used = [column if any(value is not None for value in column) else None for column in columns]
    return [*used, chunk.preserve_run_at]


def _job(spec: JobSpec, payload: str, row: asyncpg.Record, now: datetime) -> Job:
    """The job that a spec became: just added or replaced, so neither tried nor locked."""
    job_id, task_id, job_queue_id, run_at, revision, created_at, merged_payload = row
    run_at = now if run_at is None else run_at
    return Job(
        id=job_id,
        task_identifier=spec.identifier,
        queue_name=spec.queue_name,
        payload=decode_or_raw(payload if merged_payload is None else merged_payload),
        priority=spec.priority or 0,
        run_at=run_at,
        attempts=0,
        max_attempts=spec.max_attempts or _DEFAULT_MAX_ATTEMPTS,
        last_error=None,
        created_at=created_at or now,
        updated_at=now,
        key=spec.job_key,
        locked_at=None,
        locked_by=None,
        revision=revision,
        flags=_NO_FLAGS if spec.flags is None else frozenset(spec.flags),
        is_available=True,
        task_id=task_id,
        job_queue_id=job_queue_id,
        state=JobState.SCHEDULED if run_at > now else JobState.READY,
    )


async def _add_and_pair(connection: Connection, schema: Schema, chunk: _Chunk, now: datetime) -> list[Job]:
    jobs: dict[object, list[Job]] = defaultdict(list)
    missing = chunk
    while missing.specs:
        for job, payload in await _send_in_any_order(connection, schema, missing):
            jobs[_content_of_job(job, payload)].append(job)
        missing = missing.only(lambda spec: spec.job_key is not None and spec.job_key not in jobs)
    pairs = zip(chunk.specs, chunk.payloads, strict=True)
    found = [jobs[_content_of_spec(spec, payload, now)] for spec, payload in pairs]
    if sum(map(len, jobs.values())) != len(chunk.specs) or not all(found):
        raise _not_as_asked()
    return [same.pop() for same in found]


def _not_as_asked() -> DatabaseError:
    return DatabaseError(
        "The function add_jobs in the database returned other jobs than were asked for. Was it changed?"
    )


async def _send_in_any_order(connection: Connection, schema: Schema, chunk: _Chunk) -> list[tuple[Job, str]]:
    """The jobs that were added, with their payloads as they are stored."""
    statements = statements_for(schema, "jobs.sql")
    rows = await connection.fetch(statements["add_jobs_in_any_order"], *_arguments(chunk))
    rows = [row for row in rows if row["id"] is not None]
    named = await connection.fetch(
        statements["read_names"],
        list({row["task_id"] for row in rows}),
        list({row["job_queue_id"] for row in rows} - {None}),
    )
    names = {(row["kind"], row["id"]): row["name"] for row in named}
    return [
        (
            read_job(row, names["task", row["task_id"]], names.get(("queue", row["job_queue_id"]))),
            row["payload"],
        )
        for row in rows
    ]


def _content_of_job(job: Job, payload: str) -> object:
    """What a job can be told from others by: its key, or else all that a spec decides."""
    if job.key is not None:
        return job.key
    return (
        *(job.task_identifier, job.queue_name, payload, job.priority, job.run_at, job.max_attempts),
        job.flags,
    )


def _content_of_spec(spec: JobSpec, payload: str, now: datetime) -> object:
    if spec.job_key is not None:
        return spec.job_key
    if isinstance(spec.run_at, datetime):
        # In UTC, because an hour that exists twice is never equal to the same hour in another zone.
        run_at = spec.run_at.astimezone(UTC)
    else:
        run_at = now + (spec.run_at or timedelta(0))
    return (
        *(spec.identifier, spec.queue_name, payload, spec.priority or 0, run_at),
        *(spec.max_attempts or _DEFAULT_MAX_ATTEMPTS, frozenset(spec.flags or ())),
    )


def _array_literal(values: Iterable[str]) -> str:
    """A text array as PostgreSQL reads it: arrays of the driver's cannot differ in length."""
    quoted = ('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values)
    return "{" + ",".join(quoted) + "}"
