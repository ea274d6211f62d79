"""Examining a queue: what is wrong with it, how bad that is, and what to do about it.

A check is a function that looks at one thing and says what it found. Whatever happens to one does not keep
the others from looking.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.connect import Pool
from graphile_worker._db.sql import DEFAULT_SCHEMA, Schema
from graphile_worker._db.symptoms import MayNotLookError
from graphile_worker.doctor import schema as schema_checks
from graphile_worker.doctor import server, upkeep, work
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.doctor.subject import Limits, Subject
from graphile_worker.errors import DatabaseError, GraphileWorkerError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Look = Callable[[Subject], Awaitable[Finding | list[Finding]]]

__all__ = ["CHECKS", "Finding", "Level", "Limits", "examine"]


class Check(NamedTuple):
    """One thing to look at."""

    name: str
    look: Look
    needs_schema: bool = False
    needs_rows: bool = False
    """Whether it says nothing if row level security hides the rows."""


CHECKS = (
    Check("server", server.check_server),
    Check("pooler", server.check_pooler),
    Check("rights", schema_checks.check_rights),
    Check("schema", schema_checks.check_schema),
    Check("search path", schema_checks.check_search_path, needs_schema=True),
    Check("triggers", schema_checks.check_triggers, needs_schema=True),
    Check("notifications", server.check_notifications),
    Check("notification queue", server.check_notification_queue),
    Check("connections", server.check_connections),
    Check("clock", server.check_clock),
    Check("autovacuum", upkeep.check_autovacuum, needs_schema=True),
    Check("dead rows", upkeep.check_dead_rows, needs_schema=True),
    Check("oldest transaction", upkeep.check_transactions),
    Check("workers", work.check_workers, needs_schema=True),
    Check("queues", work.check_queues, needs_schema=True, needs_rows=True),
    Check("locks", work.check_locks, needs_schema=True, needs_rows=True),
    Check("tasks", work.check_tasks, needs_schema=True, needs_rows=True),
)


async def examine(
    dsn: str | None,
    *,
    schema: str = DEFAULT_SCHEMA,
    listen: bool = True,
    listen_dsn: str | None = None,
    prepared_statements: bool = True,
    limits: Limits | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> AsyncIterator[Finding]:
    """Look at everything, and tell each finding when it is known."""
    # Without prepared statements, whatever workers do: it must be able to look through any pooler.
    pool = Pool(dsn, max_size=2, prepared_statements=False)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(pool.close)
        listen_on = pool
        if listen_dsn is not None:
            listen_on = Pool(listen_dsn, max_size=1, prepared_statements=False)
            closing.push_async_callback(listen_on.close)
        subject = Subject(
            pool=pool,
            listen_on=listen_on,
            schema=Schema(schema),
            listens=listen,
            prepares=prepared_statements,
            limits=limits or Limits(),
            clock=clock,
        )
        try:
            async with pool.connection():
                pass
        except DatabaseError as error:
            yield server.unreachable(error)
            return
        for check in CHECKS:
            for finding in await _made(check, subject):
                yield finding


async def _made(check: Check, subject: Subject) -> list[Finding]:
    rights = subject.rights
    if check.needs_schema and rights is not None and not rights.schema_exists:
        return []  # one finding says that it is not installed; there is no more to say
    if check.needs_rows and rights is not None and rights.hidden_tables:
        return [_unseen(check, "Row level security hides the rows from this role.")]
    try:
        found = await check.look(subject)
    except MayNotLookError as error:
        return [_unseen(check, str(error))]
    except SchemaMissingError:
        return [_unseen(check, "Something of the schema is missing.")]
    except GraphileWorkerError as error:
        return [_failed(check, error)]
    return found if isinstance(found, list) else [found]


def _failed(check: Check, error: GraphileWorkerError) -> Finding:
    advice = "Examine it again. If that stays, mend what the other findings say, and see the server's log."
    return Finding(check=check.name, level=Level.WARNING, says=f"Could not look: {error}", advice=advice)


def _unseen(check: Check, why: str) -> Finding:
    advice = "See the findings about rights and schema; or examine it as the owner of the schema."
    return Finding(check=check.name, level=Level.NOTE, says=f"May not look: {why}", advice=advice)
