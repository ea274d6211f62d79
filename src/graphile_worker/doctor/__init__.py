"""Diagnosis of a queue: problems, how severe they are, and how to fix them.

Each check is a function that examines one aspect and returns findings. An error of one check does not stop
the others. `server` has the checks of the connection and the server, `schema` those of rights and schema,
`upkeep` those of vacuum and transactions, and `work` those of workers, queues, locks and tasks.

``graphile-worker doctor`` and users call `examine`. The checks only read, through `_db.queries.diagnostics`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.queries.diagnostics import NotPermittedError
from graphile_worker._db.sql_files import DEFAULT_SCHEMA, Schema
from graphile_worker.doctor import schema as schema_checks, server, upkeep, work
from graphile_worker.doctor.finding import Finding, Level
from graphile_worker.doctor.subject import Limits, Subject
from graphile_worker.errors import DatabaseError, GraphileWorkerError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    CheckFunction = Callable[[Subject], Awaitable[Finding | list[Finding]]]

__all__ = ["CHECKS", "Finding", "Level", "Limits", "examine"]


class Check(NamedTuple):
    """A check, and what it needs."""

    name: str
    run: CheckFunction
    needs_schema: bool = False
    needs_rows: bool = False
    """Whether the check is skipped if row level security hides the rows."""


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
    Check("history", upkeep.check_history, needs_schema=True),
    Check("workers", work.check_workers, needs_schema=True),
    Check("pauses", work.check_pauses, needs_schema=True),
    Check("limits", work.check_limits, needs_schema=True, needs_rows=True),
    Check("queues", work.check_queues, needs_schema=True, needs_rows=True),
    Check("locks", work.check_locks, needs_schema=True, needs_rows=True),
    Check("tasks", work.check_tasks, needs_schema=True, needs_rows=True),
    Check("backlog", work.check_backlog, needs_schema=True),
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
    """Run all checks, and yield each finding as soon as it is known.

    Args:
        dsn: Connection string of the database; None for the PG* variables.
        schema: Schema of the queue.
        listen: Whether workers use LISTEN.
        listen_dsn: Connection string that workers use for LISTEN, if it is another one.
        prepared_statements: Whether workers use prepared statements.
        limits: Thresholds of warnings and errors.
        clock: Returns the time of this machine.
    """
    # Without prepared statements, whatever workers use: the checks must work through any pooler.
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
            for finding in await _run_check(check, subject):
                yield finding


async def _run_check(check: Check, subject: Subject) -> list[Finding]:
    rights = subject.rights
    if check.needs_schema and rights is not None and not rights.schema_exists:
        return []  # the check of the schema reports that it is not installed
    if check.needs_rows and rights is not None and rights.hidden_tables:
        return [_not_permitted(check, "Row level security hides the rows from this role.")]
    try:
        found = await check.run(subject)
    except NotPermittedError as error:
        return [_not_permitted(check, str(error))]
    except SchemaMissingError:
        return [_not_permitted(check, "A part of the schema is missing.")]
    except GraphileWorkerError as error:
        return [_failed(check, error)]
    return found if isinstance(found, list) else [found]


def _failed(check: Check, error: GraphileWorkerError) -> Finding:
    advice = "Run the doctor again. If the error persists, fix the other findings, and see the server's log."
    return Finding(check=check.name, level=Level.WARNING, message=f"The check failed: {error}", advice=advice)


def _not_permitted(check: Check, reason: str) -> Finding:
    advice = "See the findings about rights and schema, or run the doctor as the owner of the schema."
    return Finding(
        check=check.name, level=Level.NOTE, message=f"The check was skipped: {reason}", advice=advice
    )
