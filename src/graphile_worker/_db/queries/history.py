"""Read the history, and create and drop its partitions."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

from graphile_worker._base.payload import decode_or_raw
from graphile_worker._db.connection.any_bytes import fetch
from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.sql_files import Schema, quote_identifier, quote_literal, statements_for
from graphile_worker.history import OUTCOMES, AttemptOutcome, HistorySummary, JobAttempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphile_worker._db.connection.connect import Connection

_FILE = "history.sql"
_PARTITION = re.compile(r"_private_python_runs_(\d{4})(\d{2})(\d{2})")
DAYS_AHEAD = 3
"""How many partitions exist for days to come, so that workers have days to create the next one."""
_TRIES = 10
_PAUSE = 0.03


async def can_read(connection: Connection, schema: Schema) -> bool:
    """Return whether the history exists and the role may read it."""
    return bool(await connection.fetchval(statements_for(schema, _FILE)["reads_history"], schema.quoted))


async def list_attempts(
    connection: Connection,
    schema: Schema,
    *,
    task: str | None = None,
    outcomes: Sequence[AttemptOutcome] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    key: str | None = None,
    error_type: str | None = None,
    before: tuple[datetime, int] | None = None,
    limit: int,
) -> list[JobAttempt]:
    """Return the attempts that match all filters that are not None, the latest first."""
    codes = None if outcomes is None else [outcome.code for outcome in outcomes]
    values: list[object] = [since, until, codes, key, error_type, *(before or (None, None)), limit]
    name = "list_attempts"
    if task is not None:
        name = "list_attempts_of_task"
        values.append(task)
    elif codes is not None and AttemptOutcome.COMPLETED.code not in codes:
        name = "list_failed_attempts"
    rows = await fetch(connection, statements_for(schema, _FILE)[name], *values)
    return [_read_attempt(row) for row in rows]


async def list_attempts_of_job(
    connection: Connection, schema: Schema, job_id: int, limit: int
) -> list[JobAttempt]:
    """Return the attempts of one job, the first one first."""
    rows = await fetch(connection, statements_for(schema, _FILE)["list_attempts_of_job"], job_id, limit)
    return [_read_attempt(row) for row in rows]


def _read_attempt(row: Any) -> JobAttempt:
    values = dict(zip(row.keys(), row, strict=True))
    result, payload = values["result"], values["payload"]
    values["outcome"] = OUTCOMES[values["outcome"]]
    values["has_result"] = result is not None
    values["result"] = None if result is None else decode_or_raw(result)
    values["payload"] = None if payload is None else decode_or_raw(payload)
    return JobAttempt(**values)


async def summarize(connection: Connection, schema: Schema, since: datetime | None) -> list[HistorySummary]:
    """Return the numbers of attempts and their durations, by task."""
    rows = await fetch(connection, statements_for(schema, _FILE)["summarize"], since)
    return [HistorySummary(**dict(zip(row.keys(), row, strict=True))) for row in rows]


class Partitions(NamedTuple):
    """The partitions of the history."""

    role: str
    owner: str
    may_create: bool
    """Whether the role may create and drop partitions."""
    names: Sequence[str]
    now: datetime

    @property
    def days(self) -> dict[date, str]:
        """The partitions by their days."""
        return {day: name for name in self.names if (day := _day_of(name)) is not None}

    def missing(self) -> list[date]:
        """Return the days from now on that need a partition."""
        today = self.now.astimezone(UTC).date()
        ahead = (today + timedelta(days=number) for number in range(DAYS_AHEAD + 1))
        return [day for day in ahead if day not in self.days]

    def expired(self, keep_for: float) -> list[str]:
        """Return the partitions whose attempts have all been kept for long enough."""
        limit = self.now - timedelta(seconds=keep_for)
        return [name for day, name in sorted(self.days.items()) if _start(day + timedelta(days=1)) <= limit]


async def inspect_partitions(connection: Connection, schema: Schema) -> Partitions | None:
    """Return the partitions; None if there is no history."""
    row = await connection.fetchrow(statements_for(schema, _FILE)["inspect_partitions"], schema.quoted)
    if row is None:
        return None
    return Partitions(row["role"], row["owner"], row["may_create"], row["partitions"], row["now"])


async def create_partitions(connection: Connection, schema: Schema, found: Partitions) -> bool:
    """Create the missing partitions. Returns whether none is missing now.

    Each has a transaction of its own, which waits 50 ms at most for a lock. A day whose attempts are in the
    default partition already stays there.
    """
    statements = statements_for(schema, _FILE)
    for day in found.missing():
        partition = f"_private_python_runs_{day:%Y%m%d}"
        values = {
            "{partition}": quote_identifier(partition),
            "{first}": quote_literal(_start(day).isoformat()),
            "{last}": quote_literal(_start(day + timedelta(days=1)).isoformat()),
        }
        try:
            async with read_committed(connection, prepare=[statements["take_turn"]]):
                if not await _prepare_change(connection, schema, found):
                    return False
                for name in ("create_partition", "attach_partition"):
                    await connection.execute(_filled(statements[name], values))
        except (asyncpg.CheckViolationError, asyncpg.DuplicateTableError):
            continue
        except asyncpg.LockNotAvailableError:
            return False
    return True


async def analyze(connection: Connection, schema: Schema) -> None:
    """Update the planner's statistics of the whole history."""
    await connection.execute(statements_for(schema, _FILE)["analyze"])


async def drop_partitions(
    connection: Connection, schema: Schema, found: Partitions, names: Iterable[str]
) -> list[str]:
    """Drop partitions, and return the names of those that are gone.

    To drop one, the whole history has to be locked for a moment. No writer may wait behind a reader for that.
    So the lock is first taken only if it is free. Under a load that never leaves it free, the last try waits
    for 50 ms at most.
    """
    dropped = []
    for name in names:
        for number in range(_TRIES):
            lock = "lock_soon" if number == _TRIES - 1 else "lock_at_once"
            if await _drop_partition(connection, schema, found, name, lock):
                dropped.append(name)
                break
            await asyncio.sleep(_PAUSE)
        else:
            break  # a long transaction reads the history
    return dropped


async def _drop_partition(
    connection: Connection, schema: Schema, found: Partitions, name: str, lock: str
) -> bool:
    statements = statements_for(schema, _FILE)
    try:
        async with read_committed(connection, prepare=[statements["take_turn"]]):
            if not await _prepare_change(connection, schema, found):
                return False
            await connection.execute(statements[lock])
            await connection.execute(
                _filled(statements["drop_partition"], {"{partition}": quote_identifier(name)})
            )
    except asyncpg.UndefinedTableError:
        return True  # another worker was faster
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
        return False
    return True


async def _prepare_change(connection: Connection, schema: Schema, found: Partitions) -> bool:
    """Begin a change of partitions. Returns whether it is this worker's turn."""
    statements = statements_for(schema, _FILE)
    if not await connection.fetchval(statements["take_turn"], schema.name):
        return False
    await connection.execute(statements["limit_locks"])
    if found.owner != found.role:
        await connection.execute(statements["act_as"].replace("{owner}", quote_identifier(found.owner)))
    return True


async def delete_old_rows(connection: Connection, schema: Schema, before: datetime) -> int:
    """Delete up to 5,000 old rows of the default partition, and return their number."""
    tag = await connection.execute(statements_for(schema, _FILE)["delete_old_rows"], before)
    return int(tag.rpartition(" ")[2])


class StrayRows(NamedTuple):
    """Rows in the default partition: of days that had no partition."""

    total: int
    """At most 10,000."""
    oldest: datetime | None


async def count_stray_rows(connection: Connection, schema: Schema) -> StrayRows:
    """Count the rows in the default partition."""
    [row] = await connection.fetch(statements_for(schema, _FILE)["count_stray_rows"])
    return StrayRows(row["count"], row["oldest"])


def _day_of(partition: str) -> date | None:
    match = _PARTITION.fullmatch(partition)
    return date(int(match[1]), int(match[2]), int(match[3])) if match else None


def _start(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _filled(statement: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        statement = statement.replace(name, value)
    return statement
