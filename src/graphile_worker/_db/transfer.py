"""Jobs as lines of JSON: out of one database, and into another.

A line has all of a job but its lock. Payloads are not read on the way, so that they arrive as they are.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

import asyncpg
import msgspec

from graphile_worker._db.any_bytes import fetch
from graphile_worker._db.failures import sentence
from graphile_worker._db.many import in_order
from graphile_worker._db.queries import composed
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker._db.transactions import STREAMING, transaction
from graphile_worker.errors import InvalidJobError
from graphile_worker.job import (
    MOST_IDENTIFIER,
    MOST_JOB_KEY,
    MOST_QUEUE_NAME,
    SMALLINT,
    check_integer,
    check_text,
)
from graphile_worker.payload import encode_stored, stored_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

    from graphile_worker._db.connect import Connection

_FILE = "transfer.sql"
_BATCH = 1000
_BATCH_BYTES = 16_000_000
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
_MEMBER = re.compile(r'\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*(.*)', re.DOTALL)
_OPENING = frozenset("[{")
_CLOSING = frozenset("]}")


class Line(msgspec.Struct, kw_only=True):
    """A job, as a line has it."""

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


class Imported(NamedTuple):
    """How far an import came."""

    jobs: int
    is_all: bool
    """Whether there are no more, so that all that is left is to commit."""


_decode = msgspec.json.Decoder(Line).decode


async def export_page(
    connection: Connection, schema: Schema, filters: Mapping[str, object]
) -> list[tuple[int, bytes]]:
    """The first jobs for which the filters hold: their ids, and their lines."""
    statement, values = composed(schema, statements_for(schema, _FILE)["export_jobs"], filters)
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
) -> AsyncIterator[Imported]:
    """Put the jobs in, in one transaction; yields how far it came."""
    jobs = 0
    batches = _batches(lines)
    async with transaction(connection, idle=STREAMING):
        batch = next(batches, None)
        while batch:
            read = [(number, _read(number, line, new_ids=new_ids)) for number, line in batch]
            await _insert(connection, schema, read, new_ids=new_ids)
            jobs += len(batch)
            batch = next(batches, None)
            yield Imported(jobs, is_all=not batch)
        if jobs:
            await connection.execute(statements_for(schema, _FILE)["tell_of_jobs"], jobs)


def _batches(lines: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Lines and their numbers, as many as one statement can take: it must not have a GB of parameters."""
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
        # Halves of surrogate pairs: legal in PostgreSQL's json, and Node makes them.
        if b"\\u" not in line:
            raise
    except RecursionError:
        pass  # PostgreSQL's json may be nested more deeply than Python can follow
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
    """What a JSON object has, by name and as it is written, however deeply it is nested.

    Only the marks around the members are looked at: whether a value is JSON, PostgreSQL says.

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
        raise ValueError("it is not a JSON object")
    return members


def _read(number: int, line: bytes, *, new_ids: bool) -> Line:
    try:
        line.decode()  # it may come from a database that takes any bytes
        job = _parse(line)
        check_text("task_identifier", job.task_identifier, most=MOST_IDENTIFIER)
        if job.queue_name is not None:
            check_text("queue_name", job.queue_name, most=MOST_QUEUE_NAME)
        if job.key is not None:
            check_text("key", job.key, most=MOST_JOB_KEY)
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
        raise InvalidJobError(f"Line {number} is no exported job: {error}. Nothing was imported.") from None
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
    await _refuse_taken(connection, schema, numbered, new_ids=new_ids)
    columns: list[list[object]] = [[getattr(job, name) for job in jobs] for name in Line.__struct_fields__]
    for place, name in enumerate(Line.__struct_fields__):
        if name == "payload":
            columns[place] = [bytes(job.payload).decode() for job in jobs]
        elif name == "flags":
            columns[place] = [
                None if job.flags is None else encode_stored(job.flags).decode() for job in jobs
            ]
    statement = statements["import_anew" if new_ids else "import_with_ids"]
    try:
        rows = await connection.fetch(statement, *columns)
    except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError) as error:
        first, last = numbered[0][0], numbered[-1][0]
        raise InvalidJobError(
            f"Between line {first} and {last}: {sentence(error)} Nothing was imported."
        ) from None
    if len(rows) < len(jobs):
        raise InvalidJobError(
            "Somebody has just added a job with the same id, or key. Nothing was imported: try again."
        )


async def _refuse_taken(
    connection: Connection, schema: Schema, numbered: Sequence[tuple[int, Line]], *, new_ids: bool
) -> None:
    """Raise if there is one with the same id, or the same key, already."""
    keys = [job.key for _, job in numbered if job.key is not None]
    ids = [] if new_ids else [job.id for _, job in numbered]
    taken = await connection.fetch(statements_for(schema, _FILE)["find_taken"], ids, keys)
    by_id, by_key = {row["id"] for row in taken}, {row["key"] for row in taken}
    seen_ids: set[int | None] = set()
    seen_keys: set[str] = set()
    for number, job in numbered:
        if job.key is not None and (job.key in by_key or job.key in seen_keys):
            raise InvalidJobError(
                f"Line {number}: there is a job with the key {job.key!r} already. Nothing was imported. "
                "Remove one of them first."
            )
        if not new_ids and (job.id in by_id or job.id in seen_ids):
            raise InvalidJobError(
                f"Line {number}: there is a job {job.id} already. Nothing was imported. If it is "
                "another job, import with new ids: --new-ids."
            )
        seen_ids.add(job.id)
        if job.key is not None:
            seen_keys.add(job.key)
