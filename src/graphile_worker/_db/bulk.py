"""Adding many jobs: in a few statements, with flat memory, in the order of the specs.

The specs go as one array per column, chunk by chunk; while the server works on one chunk the next is made.
Our own `add_jobs` returns rows in the order of the specs, so only what the caller does not know is sent
back. npm's does not, and may skip a keyed spec that met a worker: there whole rows come back and are paired
with the specs by what they contain, and skipped specs are asked for again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._db.queries import aware, read_job, split_instant
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.errors import InvalidJobError
from graphile_worker.job import Job, JobKeyMode, JobSpec, JobState
from graphile_worker.payload import decode_payload, encode_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import asyncpg

    from graphile_worker._db.connect import Connection

_CHUNK = 5_000
_DEFAULT_PAYLOAD = "{}"
_DEFAULT_MAX_ATTEMPTS = 25
_NO_FLAGS: frozenset[str] = frozenset()


class _Chunk(NamedTuple):
    specs: list[JobSpec]
    payloads: list[str]
    preserve_run_at: bool

    def only(self, wanted: Callable[[JobSpec], bool]) -> _Chunk:
        kept = [pair for pair in zip(self.specs, self.payloads, strict=True) if wanted(pair[0])]
        return _Chunk([spec for spec, _ in kept], [payload for _, payload in kept], self.preserve_run_at)


async def add_jobs(connection: Connection, schema: Schema, specs: Iterable[JobSpec]) -> list[Job]:
    """Add all or, if one cannot be added, none."""
    jobs: list[Job] = []
    async with connection.transaction():
        statement = statements_for(schema, "jobs.sql")["keeps_order"]
        send = _send_in_order if await connection.fetchval(statement, schema.quoted) else _send_and_pair
        under_way: asyncio.Task[list[Job]] | None = None
        try:
            for chunk in _chunks(specs):
                if under_way is not None:
                    jobs += await under_way
                under_way = asyncio.create_task(send(connection, schema, chunk))
                await asyncio.sleep(0)  # lets the request go out before the next chunk is made
            if under_way is not None:
                jobs += await under_way
        finally:
            # Whatever ends us early must not leave a statement running on the caller's connection.
            if under_way is not None and not under_way.done():
                under_way.cancel()
                await asyncio.wait([under_way])
    return jobs


def _chunks(specs: Iterable[JobSpec]) -> Iterator[_Chunk]:
    """Runs of specs that one call can add: keyed ones must agree on what happens to run_at."""
    keys: set[str] = set()
    chunk: list[JobSpec] = []
    payloads: list[str] = []
    preserve: bool | None = None
    for spec in specs:
        if spec.job_key is not None:
            if spec.job_key in keys:
                raise InvalidJobError(
                    f"Two jobs of one add_jobs call have the job_key {spec.job_key!r}.", argument="job_key"
                )
            keys.add(spec.job_key)
            if spec.job_key_mode == JobKeyMode.UNSAFE_DEDUPE:
                raise InvalidJobError(
                    "unsafe_dedupe is not possible in bulk. Use add_job, or another job_key_mode.",
                    argument="job_key_mode",
                    code="GWBKM",
                )
            wish = spec.job_key_mode == JobKeyMode.PRESERVE_RUN_AT
            if preserve is not None and wish != preserve:
                yield _Chunk(chunk, payloads, preserve)
                chunk, payloads = [], []
            preserve = wish
        chunk.append(spec)
        payloads.append(_DEFAULT_PAYLOAD if spec.payload is None else encode_payload(spec.payload))
        if len(chunk) == _CHUNK:
            yield _Chunk(chunk, payloads, bool(preserve))
            chunk, payloads, preserve = [], [], None
    if chunk:
        yield _Chunk(chunk, payloads, bool(preserve))


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


async def _send_in_order(connection: Connection, schema: Schema, chunk: _Chunk) -> list[Job]:
    statement = statements_for(schema, "jobs.sql")["add_jobs"]
    rows = await connection.fetch(statement, *_arguments(chunk))
    return [_job(*pair) for pair in zip(chunk.specs, chunk.payloads, rows, strict=True)]


def _job(spec: JobSpec, payload: str, row: asyncpg.Record) -> Job:
    """The job that a spec became: just added or replaced, so neither tried nor locked."""
    merged_payload = row["merged_payload"]
    return Job(
        id=row["id"],
        task_identifier=spec.identifier,
        queue_name=spec.queue_name,
        payload=decode_payload(payload if merged_payload is None else merged_payload),
        priority=spec.priority or 0,
        run_at=aware(row["run_at"]),
        attempts=0,
        max_attempts=row["max_attempts"],
        last_error=None,
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        key=spec.job_key,
        locked_at=None,
        locked_by=None,
        revision=row["revision"],
        flags=frozenset(spec.flags) if spec.flags else _NO_FLAGS,
        is_available=True,
        task_id=row["task_id"],
        job_queue_id=row["job_queue_id"],
        state=JobState.SCHEDULED if row["is_scheduled"] else JobState.READY,
    )


async def _send_and_pair(connection: Connection, schema: Schema, chunk: _Chunk) -> list[Job]:
    jobs: dict[object, list[Job]] = defaultdict(list)
    missing = chunk
    while missing.specs:
        for job, payload in await _send_in_any_order(connection, schema, missing):
            jobs[_content_of_job(job, payload)].append(job)
        missing = missing.only(lambda spec: spec.job_key is not None and spec.job_key not in jobs)
    # The time of the transaction, which jobs without a time of their own got.
    now = next((job.created_at for found in jobs.values() for job in found if job.key is None), None)
    return [
        jobs[_content_of_spec(spec, payload, now)].pop()
        for spec, payload in zip(chunk.specs, chunk.payloads, strict=True)
    ]


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


def _content_of_spec(spec: JobSpec, payload: str, now: datetime | None) -> object:
    if spec.job_key is not None:
        return spec.job_key
    run_at = spec.run_at
    if now is not None and not isinstance(run_at, datetime):
        run_at = now + (run_at or timedelta(0))
    return (
        *(spec.identifier, spec.queue_name, payload, spec.priority or 0, run_at),
        *(spec.max_attempts or _DEFAULT_MAX_ATTEMPTS, frozenset(spec.flags or ())),
    )


def _array_literal(values: Iterable[str]) -> str:
    """A text array as PostgreSQL reads it: arrays of the driver's cannot differ in length."""
    quoted = ('"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values)
    return "{" + ",".join(quoted) + "}"
