"""Export jobs as lines of JSON, and import them into another database.

A line contains everything about a job except its lock. Payloads are not decoded, so that they arrive
unchanged.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import asyncpg
import msgspec

from graphile_worker._base.payload import encode_stored, stored_bytes
from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.connection.error_mapping import sentence
from graphile_worker._db.connection.transactions import STREAMING, transaction
from graphile_worker._db.queries.bulk_update import in_order
from graphile_worker._db.queries.jobs import compose
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.errors import InvalidJobError
from graphile_worker.job import (
    MAX_IDENTIFIER_LENGTH,
    MAX_JOB_KEY_LENGTH,
    MAX_QUEUE_NAME_LENGTH,
    SMALLINT,
    check_integer,
    check_text,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

    from graphile_worker._db.connection.connect import Connection

_FILE = "transfer.sql"
_BATCH = 1000
_BATCH_BYTES = 16_000_000
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_MEMBER = re.compile(r'\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*(.*)', re.DOTALL)
_OPENING = frozenset("[{")
_CLOSING = frozenset("]}")


class Line(msgspec.Struct, kw_only=True):
    """A job, with the fields of a line."""

    id: int | None = None
    task_identifier: str
    queue_name: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    priority: int = 0
    run_at: str = "now"
    attempts: int = 0
    max_attempts: int = 25
    last_error: str | None = None
    key: str | None = None
    flags: dict[str, object] | None = None
    revision: int = 0
    created_at: str = "now"
    updated_at: str = "now"


class ImportProgress(NamedTuple):
    """The progress of an import."""

    jobs: int
    is_all: bool
    """Whether all jobs were sent, so that only the commit is left."""


_decode = msgspec.json.Decoder(Line).decode


async def export_page(
    connection: Connection, schema: Schema, filters: Mapping[str, object]
) -> list[tuple[int, bytes]]:
    """Return the ids and lines of the first jobs that match the filters."""
    statement, values = compose(schema, statements_for(schema, _FILE)["export_jobs"], filters)
    async with in_order(connection, schema, filters):
        rows = await fetch(connection, statement, *values)
    return [(row["id"], _line(row)) for row in rows]


def _line(row: asyncpg.Record) -> bytes:
    raw = {
        name: msgspec.Raw(stored_bytes(row[name])) for name in ("payload", "flags") if row[name] is not None
    }
    return encode_stored({**dict(row), **raw})


async def import_lines(
    connection: Connection, schema: Schema, lines: Iterable[bytes], *, new_ids: bool
) -> AsyncIterator[ImportProgress]:
    """Import the jobs in one transaction, and yield the progress."""
    jobs = 0
    batches = _batches(lines)
    statements = statements_for(schema, _FILE)
    names = ("add_tasks", "add_queues", "reserve_ids", "find_existing", "notify_jobs")
    insert = "import_with_new_ids" if new_ids else "import_with_ids"
    prepare = [statements[name] for name in (*names, insert)]
    async with transaction(connection, idle=STREAMING, prepare=prepare):
        batch = next(batches, None)
        while batch:
            read = [(number, _read(number, line, new_ids=new_ids)) for number, line in batch]
            await _insert(connection, schema, read, new_ids=new_ids)
            jobs += len(batch)
            batch = next(batches, None)
            yield ImportProgress(jobs, is_all=not batch)
        if jobs:
            await connection.execute(statements["notify_jobs"], jobs)


def _batches(lines: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield numbered lines in batches, because the parameters of a statement must stay below 1 GB."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if batch and (len(batch) == _BATCH or size + len(line) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((number, line))
        size += len(line)
    if batch:
        yield batch


def _parse(line: bytes) -> Line:
    try:
        return _decode(line)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Lone surrogates are legal in PostgreSQL's json, and Node writes them.
        if b"\\u" not in line:
            raise
    except RecursionError:
        pass  # PostgreSQL allows deeper nesting than Python's decoder
    members = _members(line.decode().strip())
    payload = members.pop("payload", "{}")
    fields = {name: _read_member(name, value) for name, value in members.items()}
    return msgspec.structs.replace(msgspec.convert(fields, Line), payload=msgspec.Raw(payload.encode()))


def _read_member(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply for Python") from None


def _members(text: str) -> dict[str, str]:
    """Return the raw text of each member of a JSON object, however deeply it is nested.

    Only the punctuation around the members is parsed. PostgreSQL checks whether a value is valid JSON.

    >>> _members('{"id": 7, "payload": {"list": [1e999, "}"]}}')
    {'id': '7', 'payload': '{"list": [1e999, "}"]}'}
    """
    members: dict[str, str] = {}
    depth = begin = end = 0
    for found in _MARK.finditer(text):
        mark = found[0]
        if mark in _OPENING:
            depth += 1
        elif mark in _CLOSING:
            depth -= 1
        if depth == 1 and mark in _OPENING:
            begin = found.end()
        elif (depth == 1 and mark == ",") or (depth == 0 and mark in _CLOSING):
            if member := _MEMBER.fullmatch(text, begin, found.start()):
                members[json.loads(member[1])] = member[2].rstrip()
            begin = end = found.end()
    if depth or end != len(text) or not text.startswith("{"):
        raise ValueError("not a JSON object")
    return members


def _read(number: int, line: bytes, *, new_ids: bool) -> Line:
    try:
        line.decode()  # a SQL_ASCII database may have exported other bytes
        job = _parse(line)
        check_text("task_identifier", job.task_identifier, max_length=MAX_IDENTIFIER_LENGTH)
        if job.queue_name is not None:
            check_text("queue_name", job.queue_name, max_length=MAX_QUEUE_NAME_LENGTH)
        if job.key is not None:
            check_text("key", job.key, max_length=MAX_JOB_KEY_LENGTH)
        for name in ("priority", "attempts", "max_attempts"):
            check_integer(
                name, getattr(job, name), SMALLINT if name != "max_attempts" else range(1, SMALLINT.stop)
            )
        check_integer("revision", job.revision, range(2**31))
        if not new_ids:
            check_integer("id", job.id, range(2**62))
    except InvalidJobError as error:
        raise InvalidJobError(f"Line {number}: {error} Nothing was imported.") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidJobError(
            f"Line {number} is not an exported job: {error}. Nothing was imported."
        ) from None
    return job


async def _insert(
    connection: Connection, schema: Schema, numbered: Sequence[tuple[int, Line]], *, new_ids: bool
) -> None:
    statements = statements_for(schema, _FILE)
    jobs = [job for _, job in numbered]
    await connection.execute(statements["add_tasks"], [job.task_identifier for job in jobs])
    await connection.execute(statements["add_queues"], [job.queue_name for job in jobs])
    if not new_ids:
        newest = max(job.id or 0 for job in jobs)
        await connection.execute(statements["reserve_ids"], f"{schema.quoted}._private_jobs", newest)
    await _reject_existing(connection, schema, numbered, new_ids=new_ids)
    columns: list[list[object]] = [[getattr(job, name) for job in jobs] for name in Line.__struct_fields__]
    for index, name in enumerate(Line.__struct_fields__):
        if name == "payload":
            columns[index] = [bytes(job.payload).decode() for job in jobs]
        elif name == "flags":
            columns[index] = [
                None if job.flags is None else encode_stored(job.flags).decode() for job in jobs
            ]
    statement = statements["import_with_new_ids" if new_ids else "import_with_ids"]
    try:
        rows = await connection.fetch(statement, *columns)
    except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError) as error:
        first, last = numbered[0][0], numbered[-1][0]
        raise InvalidJobError(
            f"Between lines {first} and {last}: {sentence(error)} Nothing was imported."
        ) from None
    if len(rows) < len(jobs):
        raise InvalidJobError(
            "A job with the same id or key was added during the import. Nothing was imported. Try again."
        )


async def _reject_existing(
    connection: Connection, schema: Schema, numbered: Sequence[tuple[int, Line]], *, new_ids: bool
) -> None:
    """Raise an error if a job with the same id or key exists."""
    keys = [job.key for _, job in numbered if job.key is not None]
    ids = [] if new_ids else [job.id for _, job in numbered]
    taken = await connection.fetch(statements_for(schema, _FILE)["find_existing"], ids, keys)
    by_id, by_key = {row["id"] for row in taken}, {row["key"] for row in taken}
    seen_ids: set[int | None] = set()
    seen_keys: set[str] = set()
    for number, job in numbered:
        if job.key is not None and (job.key in by_key or job.key in seen_keys):
            raise InvalidJobError(
                f"Line {number}: a job with the key {job.key!r} already exists. Nothing was imported. "
                "Remove one of the two first."
            )
        if not new_ids and (job.id in by_id or job.id in seen_ids):
            raise InvalidJobError(
                f"Line {number}: a job with the id {job.id} already exists. Nothing was imported. If it is "
                "a different job, import with --new-ids."
            )
        seen_ids.add(job.id)
        if job.key is not None:
            seen_keys.add(job.key)
