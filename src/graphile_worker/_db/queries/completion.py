"""Complete a job in a transaction of its task, and find out whether such a transaction was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from graphile_worker._db.connection.any_connection import translate_driver_errors
from graphile_worker._db.connection.drivers import (
    AsyncDriver,
    Asyncpg,
    BridgedDriver,
    SyncDriver,
    find_driver,
)
from graphile_worker._db.sql_files import one_text_statement, statements_for
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import datetime

    from graphile_worker._db.connection.connect import Connection
    from graphile_worker._db.queries.exchange import AttemptRecord
    from graphile_worker._db.sql_files import OneTextStatement, Schema

D = TypeVar("D", AsyncDriver, SyncDriver)
_FILE = "completion.sql"


class Fence(NamedTuple):
    """What identifies a worker's claim of a job in the database."""

    id: int
    locked_by: str
    locked_at: datetime
    attempt: AttemptRecord | None = None
    """The attempt, if the history keeps it."""
    before: int | None = None
    """The id of the transaction in which the task has already completed the job."""


class AlreadyCompletedError(Exception):
    """The task has already completed the job: `where` says in which transaction."""

    def __init__(self, where: Literal["this", "open", "committed"]) -> None:
        super().__init__(where)
        self.where = where


class _Answer(msgspec.Struct):
    completed: int
    transaction: int
    before: str | None
    """The state of the transaction that has completed the job before."""
    is_gone: bool


async def complete(
    connection: Connection, schema: Schema, fence: Fence, *, idle: float | None = None
) -> int | None:
    """Delete the job in a transaction of the library.

    Args:
        connection: The connection to use.
        schema: The schema of the queue.
        fence: The worker's claim of the job.
        idle: Seconds that the transaction may be idle from now on; None to leave its limit as it is.

    Returns:
        The id of the transaction; None if the worker does not hold the job any more.

    Raises:
        AlreadyCompletedError: The task has already completed the job.
    """
    return _read(await Asyncpg(connection).fetch_text(*_call(schema, fence, idle)))


async def complete_for_caller(connection: Any, schema: Schema, fence: Fence) -> int | None:
    """Do what `complete` does, in the transaction of the caller's async connection.

    There is no savepoint around it: if the server refuses, the caller's transaction must not be committed.

    Raises:
        ConfigurationError: The connection is not in a transaction, or has to be used in another way.
    """
    driver, call = find_driver(connection, is_async=True), _call(schema, fence)
    with translate_driver_errors(schema):
        if isinstance(driver, BridgedDriver):
            return _read(await driver.run(lambda sync: _checked(sync).fetch_text(*call)))
        assert isinstance(driver, AsyncDriver)  # noqa: S101 - for the type checker
        return _read(await _checked(driver).fetch_text(*call))


def complete_for_caller_sync(connection: Any, schema: Schema, fence: Fence) -> int | None:
    """Do what `complete_for_caller` does, on a connection that blocks."""
    driver = find_driver(connection, is_async=False)
    assert isinstance(driver, SyncDriver)  # noqa: S101 - for the type checker
    with translate_driver_errors(schema):
        return _read(_checked(driver).fetch_text(*_call(schema, fence)))


def _checked(driver: D) -> D:
    """Return the driver, if its connection is in a transaction."""
    driver.check_usable()
    if not driver.in_transaction:
        raise ConfigurationError(
            "connection= is not in a transaction, so the job would be completed apart from what the task "
            "writes. Begin a transaction first, and commit it after the job is completed."
        )
    return driver


def _call(schema: Schema, fence: Fence, idle: float | None = None) -> tuple[OneTextStatement, str]:
    limit = None if idle is None else f"{round(idle * 1000)}ms"
    given: dict[str, object] = {
        "id": fence.id,
        "locked_by": fence.locked_by,
        "locked_at": fence.locked_at,
        "idle": limit,
        "before": fence.before,
    }
    statement = "complete"
    if fence.attempt is not None:
        statement = "complete_and_record"
        given |= {"started_at": fence.attempt.started_at, "duration": fence.attempt.duration}
        given["details"] = fence.attempt.details and msgspec.Raw(fence.attempt.details.encode())
    return one_text_statement(schema, _FILE, statement), msgspec.json.encode(given).decode()


def _read(text: str) -> int | None:
    answer = msgspec.json.decode(text, type=_Answer)
    if answer.completed:
        return answer.transaction
    match answer.before:
        case "this transaction":
            raise AlreadyCompletedError("this")
        case "in progress":
            raise AlreadyCompletedError("open")
        case "committed" if answer.is_gone:
            raise AlreadyCompletedError("committed")
    return None


async def was_completed(
    connection: Connection, schema: Schema, job_id: int, transaction: int | None
) -> bool | None:
    """Return whether a transaction has completed the job; None while that is undecided.

    Args:
        connection: A connection of the library.
        schema: The schema of the queue.
        job_id: The job's id.
        transaction: The id of the transaction that deleted the job, if it is known.
    """
    [row] = await connection.fetch(statements_for(schema, _FILE)["find_out"], job_id, transaction)
    match row["status"], row["job"]:
        case ("aborted", _):
            return False
        case ("committed" | None, "gone"):
            return True
        case ("committed" | None, "left"):
            return False
        case _:
            return None
