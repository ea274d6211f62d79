"""Removing failed jobs, and names that no job uses."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connect import read_committed
from graphile_worker._db.sql import Schema, statements_for
from graphile_worker.errors import ConfigurationError, DatabaseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker._db.connect import Connection

# Whoever adds or takes jobs waits behind us while we wait for a lock: rather briefly, and more than once.
_LOCK_TIMEOUT = "250ms"
_LOCK_ATTEMPTS = 20


async def delete_permafailed_jobs(connection: Connection, schema: Schema) -> int:
    """Delete jobs that are out of attempts; how many."""
    return _int(await connection.fetchval(statements_for(schema, "cleanup.sql")["delete_permafailed_jobs"]))


async def delete_unused(connection: Connection, schema: Schema, what: str, *arguments: Sequence[str]) -> int:
    """Delete ``task_identifiers`` or ``queues`` that no job uses; how many.

    A job that is just being added uses a name that we cannot see yet. The lock makes sure that there is none.
    """
    statements = statements_for(schema, "cleanup.sql")
    lock = statements["lock_tasks" if what == "task_identifiers" else "lock_queues"]
    for _ in range(_LOCK_ATTEMPTS):
        try:
            async with read_committed(connection):
                # Under any other level the delete would not see the jobs that the lock waited for.
                if await connection.fetchval(statements["read_isolation"]) != "read committed":
                    raise ConfigurationError(
                        "cleanup needs the isolation level read committed. Call it in another transaction."
                    )
                before = await connection.fetchval(statements["read_lock_timeout"])
                await connection.execute(statements["set_lock_timeout"], _LOCK_TIMEOUT)
                await connection.execute(lock)
                await connection.execute(statements["set_lock_timeout"], before)
                return _int(await connection.fetchval(statements[f"delete_{what}"], *arguments))
        except asyncpg.LockNotAvailableError:
            await asyncio.sleep(random.uniform(0.05, 0.25))  # noqa: S311 - to get out of step
    raise DatabaseError(
        f"No {what.replace('_', ' ')} were removed: transactions that add jobs stayed open all the time. "
        "Try again when fewer of them are open for long."
    )


def _int(value: object) -> int:
    return int(str(value))
