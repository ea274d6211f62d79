"""Run statements on a caller's connection, from whatever driver or ORM, in the caller's transaction.

An *operation* is a generator without I/O. It yields calls, each a statement with its one text parameter,
receives the text that the statement returns, and returns its result. `run` and `run_sync` drive an operation
on a connection. They put a savepoint around it, so that the caller's transaction can go on if the server
refuses the operation. A *guarded* statement needs no savepoint, which saves two round trips: it calls a
function that returns an empty text if the server refuses. Then the statement itself runs, in a savepoint.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import asyncpg
import msgspec

from graphile_worker._base.checked_connection import CheckedConnection
from graphile_worker._db.connection.driver_errors import as_known_error
from graphile_worker._db.connection.drivers import (
    AsyncDriver,
    Asyncpg,
    BridgedDriver,
    SyncDriver,
    find_driver,
)
from graphile_worker._db.connection.error_mapping import statement_failed
from graphile_worker._db.sql_files import (
    OneTextStatement,
    Schema,
    one_text_statement,
    read_statements,
    rows_statement,
)
from graphile_worker.errors import DatabaseError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from graphile_worker._db.connection.connect import Connection

T = TypeVar("T")


class Call(NamedTuple):
    """A statement to run, and its parameter."""

    statement: OneTextStatement
    parameter: str
    guarded: OneTextStatement | None = None
    """A statement that does the same, but returns an empty text instead of an error.

    It calls a function that may not be installed. Only the first call of an operation may have it.
    """


Operation: TypeAlias = Generator[Call, str, T]
_Steps: TypeAlias = Generator[Call | str, str, T]
"""An operation, and the commands around it, such as ``savepoint``."""


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in this thread without an event loop, and return its result.

    Operations in it run on sync connections. Nothing in it may wait for anything else.

    Raises:
        SuspendedError: The coroutine waits for something.
    """
    token = _BLOCKING.set(True)
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        _BLOCKING.reset(token)
    raise SuspendedError(coroutine)


class SuspendedError(Exception):
    """A coroutine that should run without an event loop waits for something: `coroutine` is still open."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        super().__init__(coroutine)
        self.coroutine = coroutine


_BLOCKING: ContextVar[bool] = ContextVar("blocking", default=False)


def is_blocking() -> bool:
    """Return whether this code runs in `run_blocking`."""
    return _BLOCKING.get()


async def run(connection: Any, schema: Schema, operation: Operation[T]) -> T:
    """Run an operation on an async connection, and return its result. Inside `run_blocking`, on a sync one.

    Args:
        connection: The caller's connection or session.
        schema: The schema, for error messages.
        operation: The operation.

    Raises:
        ConfigurationError: The object is not a connection that can be awaited.
    """
    if _BLOCKING.get():
        return run_sync(connection, schema, operation)
    checked = CheckedConnection(connection) if not isinstance(connection, CheckedConnection) else connection
    driver = find_driver(checked.connection, is_async=True)
    with translate_driver_errors(schema, checked):
        if isinstance(driver, BridgedDriver):
            result: T = await driver.run(lambda sync: _drive_sync(sync, _protected(operation, sync, checked)))
            return result
        assert isinstance(driver, AsyncDriver)  # noqa: S101 - for the type checker
        return await _drive(driver, _protected(operation, driver, checked))


def run_sync(connection: Any, schema: Schema, operation: Operation[T]) -> T:
    """Run an operation on a sync connection, in this thread. The arguments are those of `run`.

    Raises:
        ConfigurationError: The object is not a sync connection.
    """
    checked = CheckedConnection(connection) if not isinstance(connection, CheckedConnection) else connection
    driver = find_driver(checked.connection, is_async=False)
    assert isinstance(driver, SyncDriver)  # noqa: S101 - for the type checker
    with translate_driver_errors(schema, checked):
        return _drive_sync(driver, _protected(operation, driver, checked))


async def run_own(connection: Connection, operation: Operation[T]) -> T:
    """Run an operation on a connection of the library. The caller opens a transaction, if one is needed."""
    return await _drive(Asyncpg(connection), operation)


async def fetch_text(connection: Any, schema: Schema, statement: OneTextStatement, parameter: str) -> str:
    """Run one statement on an async connection, and return the text that it returns."""
    return await run(connection, schema, one_call(statement, parameter))


def fetch_text_sync(connection: Any, schema: Schema, statement: OneTextStatement, parameter: str) -> str:
    """Run one statement on a sync connection, and return the text that it returns."""
    return run_sync(connection, schema, one_call(statement, parameter))


def one_call(statement: OneTextStatement, parameter: str) -> Operation[str]:
    """Return the operation that consists of one statement."""
    return (yield Call(statement, parameter))


def fetching_rows(schema: Schema, path: str, name: str, *, times: Sequence[str]) -> Operation[list[Any]]:
    """Return the rows of a statement without parameters, each as a dictionary by column.

    Args:
        schema: The schema.
        path: The file of the statement.
        name: The statement's name in the file.
        times: The columns that are points in time.
    """
    rows: list[dict[str, Any]] = msgspec.json.decode(
        (yield Call(rows_statement(schema, path, name), "")), type=list[dict[str, Any]]
    )
    for row in rows:
        for column in times:
            if row[column] is not None:
                row[column] = datetime.fromisoformat(row[column]).astimezone(UTC)
    return rows


def _protected(
    operation: Operation[T], driver: AsyncDriver | SyncDriver, checked: CheckedConnection
) -> _Steps[T]:
    """Put a savepoint around an operation; or a transaction, if the connection is not in one."""
    driver.check_usable()
    checked.check(driver)
    call = next(operation)
    if driver.in_transaction and (text := (yield from _try_guarded(call, driver))):
        try:
            call = operation.send(text)
        except StopIteration as end:
            result: T = end.value
            return result
    return (yield from _in_savepoint(_resume(operation, call), driver))


def _try_guarded(call: Call, driver: AsyncDriver | SyncDriver) -> _Steps[str]:
    """Run the guarded statement of a call, if it has one and the function is installed.

    Returns an empty text if nothing has happened. The first time on a connection, the statement runs in a
    savepoint, because a function that does not exist would abort the caller's transaction.
    """
    guarded, known = call.guarded, driver.installed
    if guarded is None or known is None:
        return ""
    if not call.parameter.isascii() and not (yield from _has_every_character(known)):
        return ""  # the server refuses a parameter before the function is called
    if guarded in known:
        known.discard(guarded)  # unless it succeeds: the function may have been dropped
        text = yield Call(guarded, call.parameter)
        known.add(guarded)
        return _unless_stopped(text)
    if _MISSING_UNTIL.get(guarded, 0.0) > monotonic():
        return ""
    try:
        text = yield from _in_savepoint(one_call(guarded, call.parameter), driver)
    except Exception as error:
        if getattr(as_known_error(error), "sqlstate", None) not in _NOT_CALLABLE:
            raise
        _MISSING_UNTIL[guarded] = monotonic() + _CHECK_AGAIN
        return ""
    known.add(guarded)
    return _unless_stopped(text)


def _has_every_character(known: set[OneTextStatement]) -> _Steps[bool]:
    """Return whether the database is UTF8. It is read once for each connection."""
    is_utf8 = one_text_statement(Schema(), "any_bytes.sql", "is_utf8")
    if is_utf8 in known:
        return True
    if (yield Call(is_utf8, "")) == "true":
        known.add(is_utf8)
        return True
    return False


def _unless_stopped(text: str) -> str:
    """Raise the error of a guarded statement that was cancelled or reached a time limit: see 009_add.sql."""
    if text.startswith("!"):
        sqlstate, _, message = text[1:].partition(" ")
        raise asyncpg.PostgresError.new({"S": "ERROR", "V": "ERROR", "C": sqlstate, "M": message})
    return text


_NOT_CALLABLE = (asyncpg.UndefinedFunctionError.sqlstate, asyncpg.InsufficientPrivilegeError.sqlstate)
_CHECK_AGAIN = 60.0
"""How long, in seconds, new connections don't try a function that was not installed."""
_MISSING_UNTIL: dict[OneTextStatement, float] = {}


def _resume(operation: Operation[T], call: Call) -> Operation[T]:
    """Continue an operation that waits for the text of a call."""
    try:
        while True:
            try:
                text = yield call
            except BaseException as error:  # noqa: BLE001 - the operation handles it
                call = operation.throw(error)
            else:
                call = operation.send(text)
    except StopIteration as end:
        result: T = end.value
        return result


def _in_savepoint(operation: Operation[T], driver: AsyncDriver | SyncDriver) -> _Steps[T]:
    commands = read_statements("transactions.sql")
    if not driver.in_transaction:
        try:
            yield commands["begin"]
            result = yield from operation
            yield commands["commit"]
        except BaseException:
            # Also if it was cancelled while it began: the caller expects a connection without a transaction.
            with suppress(Exception):  # the connection may be lost; the first error says so
                yield commands["roll_back"]
            raise
        return result
    yield commands["savepoint"]
    try:
        result = yield from operation
    except BaseException:
        with suppress(Exception):
            yield commands["roll_back_to_savepoint"]
            yield commands["release_savepoint"]
        raise
    yield commands["release_savepoint"]
    return result


async def _drive(driver: AsyncDriver, steps: _Steps[T] | Operation[T]) -> T:
    try:
        step = next(steps)
        while True:
            try:
                text = await (
                    driver.execute(step)
                    if isinstance(step, str)
                    else driver.fetch_text(step.statement, step.parameter)
                )
            except BaseException as error:  # noqa: BLE001 - the steps handle it
                step = steps.throw(error)
            else:
                step = steps.send(text or "")
    except StopIteration as end:
        result: T = end.value
        return result


def _drive_sync(driver: SyncDriver, steps: _Steps[T]) -> T:
    try:
        step = next(steps)
        while True:
            try:
                text = (
                    driver.execute(step)
                    if isinstance(step, str)
                    else driver.fetch_text(step.statement, step.parameter)
                )
            except BaseException as error:  # noqa: BLE001 - the steps handle it
                step = steps.throw(error)
            else:
                step = steps.send(text or "")
    except StopIteration as end:
        result: T = end.value
        return result


@contextmanager
def translate_driver_errors(schema: Schema, checked: CheckedConnection | None = None) -> Iterator[None]:
    """Translate errors of any driver into the library's errors. The driver's error is the cause.

    Args:
        schema: The schema, for error messages.
        checked: The connection, which knows whether it is in a transaction; None if it certainly is.
    """
    try:
        yield
    except GraphileWorkerError:
        raise
    except UnicodeEncodeError as error:
        raise DatabaseError(
            f"The connection cannot send the character {error.object[error.start]!a}, because its client "
            f"encoding is {error.encoding}. Nothing was sent. Set client_encoding to UTF8; if the database "
            "has another encoding, it must have the character too."
        ) from error
    except Exception as error:
        known = as_known_error(error)
        if known is None:
            raise
        in_transaction = checked is None or checked.in_transaction
        raise statement_failed(known, schema, in_transaction=in_transaction) from error
