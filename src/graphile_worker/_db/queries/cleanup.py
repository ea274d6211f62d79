"""Remove failed jobs, and the names of tasks and queues that no job uses."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connection.connect import read_committed
from graphile_worker._db.queries.failures import can_write_failures
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker.errors import ConfigurationError, DatabaseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker._db.connection.connect import Connection

# Sessions that add or claim jobs queue up behind this lock request. So each wait is short, and repeated.
_LOCK_TIMEOUT = "250ms"
_LOCK_ATTEMPTS = 20


async def delete_permafailed_jobs(connection: Connection, schema: Schema) -> int:
    """Delete jobs without attempts left, and return their number."""
    statements = statements_for(schema, "cleanup.sql")
    if not await can_write_failures(connection, schema):
        return _int(await connection.fetchval(statements["delete_permafailed_jobs"]))
    return _int(await connection.fetchval(statements["delete_permafailed_jobs_and_failures"]))


async def delete_unused(connection: Connection, schema: Schema, what: str, *arguments: Sequence[str]) -> int:
    """Delete ``task_identifiers`` or ``queues`` that no job uses, and return their number.

    A transaction that is adding a job may use a name whose job is not visible yet. The lock waits until
    no such transaction is open.
    """
    statements = statements_for(schema, "cleanup.sql")
    lock = statements["lock_tasks" if what == "task_identifiers" else "lock_queues"]
    names = ("read_isolation", "read_lock_timeout", "set_lock_timeout", f"delete_{what}")
    prepare = [statements[name] for name in names]
    for _ in range(_LOCK_ATTEMPTS):
        try:
            async with read_committed(connection, prepare=prepare):
                # At any other level the delete would not see the jobs that the lock waited for.
                isolation = await connection.fetchval(statements["read_isolation"])
                if isolation != "read committed":
                    raise ConfigurationError(
                        "cleanup needs the isolation level read committed, and this transaction has "
                        f"{isolation}. Call it outside this transaction."
                    )
                before = await connection.fetchval(statements["read_lock_timeout"])
                await connection.execute(statements["set_lock_timeout"], _LOCK_TIMEOUT)
                await connection.execute(lock)
                await connection.execute(statements["set_lock_timeout"], before)
                return _int(await connection.fetchval(statements[f"delete_{what}"], *arguments))
        except asyncpg.LockNotAvailableError:
            await asyncio.sleep(random.uniform(0.05, 0.25))  # noqa: S311 - jitter, not security
    raise DatabaseError(
        f"No {what.replace('_', ' ')} were removed: transactions that add jobs kept the lock. "
        "Try again when fewer long transactions are open."
    )


def _int(value: object) -> int:
    return int(str(value))
