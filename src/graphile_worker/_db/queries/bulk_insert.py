"""Add many jobs in a few statements, with constant memory, in the order of the specs.

The specs are sent in chunks, with one array per column. While the server works on one chunk, the next is
encoded. The `add_jobs` function that this package installs returns rows in the order of the specs, so it
only returns values that the caller does not know. The npm package's function does not keep the order, and
may skip a keyed spec whose job is locked. There, whole rows come back and are matched with the specs by
their content, and skipped specs are sent again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from graphile_worker._base.payload import decode_or_raw, encode_payload
from graphile_worker._db.connection.transactions import COMPUTING, transaction
from graphile_worker._db.queries.jobs import read_job, split_instant
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.errors import DatabaseError, InvalidJobError
from graphile_worker.job import Job, JobKeyMode, JobSpec, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator

    import asyncpg

    from graphile_worker._db.connection.connect import Connection

T = TypeVar("T")
_CHUNK = 10_000
_CHUNK_BYTES = 8_000_000
"""JSON per chunk: a statement's parameters must stay below 1 GB, and a few chunks are in memory at once."""
_YIELD_EVERY = 500
"""After so many specs, other tasks on the event loop get a turn."""
_SPEC_BYTES = 1000
"""A larger payload counts as several specs."""
_DEFAULT_PAYLOAD = "{}"
_DEFAULT_MAX_ATTEMPTS = 25
_NO_FLAGS: frozenset[str] = frozenset()


class IterationError(Exception):
    """The caller's iterator raised; `__cause__` is its exception."""


class Chunk(NamedTuple):
    """Jobs that one call can add."""

    specs: list[JobSpec]
    payloads: list[str]
    preserve_run_at: bool

    def filter(self, keep: Callable[[JobSpec], bool]) -> Chunk:
        """Return the chunk with some of its jobs."""
        kept = [pair for pair in zip(self.specs, self.payloads, strict=True) if keep(pair[0])]
        return Chunk([spec for spec, _ in kept], [payload for _, payload in kept], self.preserve_run_at)


async def add_jobs(
    connection: Connection,
    schema: Schema,
    specs: Iterable[JobSpec],
    *,
    read: bool = True,
    max_payload_size: int | None = None,
    idle: float = COMPUTING,
) -> list[Job]:
    """Add all jobs, or none if one of them is rejected.

    Args:
        connection: The connection to use.
        schema: The schema that holds the queue.
        specs: The jobs to add.
        read: Whether to return the jobs. Without them, adding is faster.
        max_payload_size: The largest payload to accept, in bytes.
        idle: How long the transaction may wait for the next specs, in seconds.
    """
    statements = statements_for(schema, "jobs.sql")
    async with transaction(connection, idle=idle, prepare=adding(schema, read=read)):
        [(now, keeps_order)] = await connection.fetch(statements["prepare_bulk"], schema.quoted)
        async with aclosing(_chunks(specs, max_payload_size)) as chunks:
            if keeps_order:
                statement = statements["add_jobs" if read else "add_unread_jobs"]
                return await _add_in_order(connection, statement, chunks, now, read=read)
            jobs: list[Job] = []
            async for chunk in chunks:
                jobs += await _add_and_pair(connection, schema, chunk, now)
            return jobs


def adding(schema: Schema, *, read: bool) -> list[str]:
    """Return the statements of `add_jobs`, to prepare them before the transaction that it is a part of."""
    in_order = "add_jobs" if read else "add_unread_jobs"
    names = ("prepare_bulk", in_order, "add_jobs_in_any_order", "read_names")
    return [statements_for(schema, "jobs.sql")[name] for name in names]


async def _add_in_order(
    connection: Connection, statement: str, chunks: AsyncIterator[Chunk], now: datetime, *, read: bool
) -> list[Job]:
    """Add chunks; encode the next one, and decode the previous reply, while the server works."""
    jobs: list[Job] = []
    sent: Chunk | None = None
    pending: asyncio.Task[list[asyncpg.Record]] | None = None
    try:
        while True:
            chunk = await anext(chunks, None)
            arguments = None if chunk is None else _arguments(chunk)
            rows = [] if pending is None else await pending
            pending = None
            if arguments is not None:
                pending = asyncio.create_task(connection.fetch(statement, *arguments))
            if sent is not None and not read and rows[0]["count"] != len(sent.specs):
                raise _unexpected_rows()
            if sent is not None and read:
                async for part in _yielding(zip(sent.specs, sent.payloads, rows, strict=True)):
                    jobs += [added_job(spec, payload, row, now) for spec, payload, row in part]
            if chunk is None:
                return jobs
            sent = chunk
    finally:
        # An exception or a cancellation must not leave a statement running on the caller's connection.
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.wait([pending])


async def _yielding(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield the items in short lists, and give other tasks on the event loop a turn in between."""
    iterator = iter(items)
    while part := list(islice(iterator, _YIELD_EVERY)):
        yield part
        await asyncio.sleep(0)


async def _chunks(specs: Iterable[JobSpec], max_payload_size: int | None) -> AsyncGenerator[Chunk]:
    """Yield chunks, and give other tasks on the event loop a turn in between."""
    for chunk in make_chunks(specs, max_payload_size):
        if chunk is None:
            await asyncio.sleep(0)
        else:
            yield chunk


def make_chunks(
    specs: Iterable[JobSpec], max_payload_size: int | None, max_jobs: int = _CHUNK
) -> Iterator[Chunk | None]:
    """Yield runs of specs that one call can add: its keyed specs must all treat run_at the same way.

    Now and then, yields None to give other tasks a turn.
    """
    keys: set[str] = set()
    chunk: list[JobSpec] = []
    payloads: list[str] = []
    preserve: bool | None = None
    size = since_yield = 0
    for spec in _checked_specs(specs):
        if spec.job_key is not None:
            _check_key(spec, keys)
            preserves = spec.job_key_mode == JobKeyMode.PRESERVE_RUN_AT
            if preserve is not None and preserves != preserve:
                yield Chunk(chunk, payloads, preserve)
                chunk, payloads, size = [], [], 0
            preserve = preserves
        payload = _DEFAULT_PAYLOAD
        if spec.payload is not None:
            payload = encode_payload(spec.payload, max_size=max_payload_size)
        chunk.append(spec)
        payloads.append(payload)
        size += len(payload)
        since_yield += 1 + len(payload) // _SPEC_BYTES
        if len(chunk) == max_jobs or size >= _CHUNK_BYTES:
            yield Chunk(chunk, payloads, bool(preserve))
            chunk, payloads, preserve, size = [], [], None, 0
        if since_yield >= _YIELD_EVERY:
            since_yield = 0
            yield None
    if chunk:
        yield Chunk(chunk, payloads, bool(preserve))


def _check_key(spec: JobSpec, keys: set[str]) -> None:
    """Reject a key that the database cannot handle in one call; remember the others."""
    if spec.job_key in keys:
        raise InvalidJobError(
            f"Duplicate job_key {spec.job_key!r}: each job_key may occur once in an add_jobs call.",
            argument="job_key",
        )
    if spec.job_key_mode == JobKeyMode.UNSAFE_DEDUPE:
        raise InvalidJobError(
            "add_jobs does not support unsafe_dedupe. Use add_job, or another job_key_mode.",
            argument="job_key_mode",
            code="GWBKM",
        )
    keys.add(str(spec.job_key))


def _checked_specs(specs: Iterable[JobSpec]) -> Iterator[JobSpec]:
    """Yield the specs; wrap an error from the caller's iterator to tell it from a database error."""
    iterator = iter(specs)
    while True:
        try:
            spec = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise IterationError from error
        if not isinstance(spec, JobSpec):
            raise InvalidJobError(f"add_jobs accepts JobSpec values, not {type(spec).__name__}.")
        yield spec


def _arguments(chunk: Chunk) -> list[Any]:
    """Return one array per column; None for a column that no spec sets."""
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


def added_job(spec: JobSpec, payload: str, row: Iterable[Any], now: datetime) -> Job:
    """Build the job of a spec: it was just added or replaced, so it has no attempts and no lock."""
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


async def _add_and_pair(connection: Connection, schema: Schema, chunk: Chunk, now: datetime) -> list[Job]:
    jobs: dict[object, list[Job]] = defaultdict(list)
    missing = chunk
    while missing.specs:
        for job, payload in await _send_in_any_order(connection, schema, missing):
            jobs[_content_of_job(job, payload)].append(job)
        missing = missing.filter(lambda spec: spec.job_key is not None and spec.job_key not in jobs)
    pairs = zip(chunk.specs, chunk.payloads, strict=True)
    found = [jobs[_content_of_spec(spec, payload, now)] for spec, payload in pairs]
    if sum(map(len, jobs.values())) != len(chunk.specs) or not all(found):
        raise _unexpected_rows()
    return [same.pop() for same in found]


def _unexpected_rows() -> DatabaseError:
    return DatabaseError(
        "The function add_jobs in the database returned other jobs than requested. Was it changed?"
    )


async def _send_in_any_order(connection: Connection, schema: Schema, chunk: Chunk) -> list[tuple[Job, str]]:
    """Return the jobs that were added, with their payloads as they are stored."""
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
    """Return what identifies a job among the others: its key, or else every value that a spec sets."""
    if job.key is not None:
        return job.key
    return (
        job.task_identifier,
        job.queue_name,
        payload,
        job.priority,
        job.run_at,
        job.max_attempts,
        job.flags,
    )


def _content_of_spec(spec: JobSpec, payload: str, now: datetime) -> object:
    if spec.job_key is not None:
        return spec.job_key
    if isinstance(spec.run_at, datetime):
        # In UTC: Python never finds an hour that a zone repeats equal to the same hour in another zone.
        run_at = spec.run_at.astimezone(UTC)
    else:
        run_at = now + (spec.run_at or timedelta(0))
    return (
        spec.identifier,
        spec.queue_name,
        payload,
        spec.priority or 0,
        run_at,
        spec.max_attempts or _DEFAULT_MAX_ATTEMPTS,
        frozenset(spec.flags or ()),
    )


def _array_literal(values: Iterable[str]) -> str:
    """Format a text array for PostgreSQL: asyncpg cannot encode nested arrays of different lengths."""
    quoted = ('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values)
    return "{" + ",".join(quoted) + "}"
