"""Translate driver errors into the library's errors, which say what to do."""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.connection.dsn import invalid_dsn
from graphile_worker._db.connection.user_functions import explain, function_that_raised
from graphile_worker.errors import (
    ConfigurationError,
    DatabaseError,
    GraphileWorkerError,
    InvalidJobError,
    SchemaMissingError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphile_worker._db.connection.dsn import Target
    from graphile_worker._db.sql_files import Schema

_BY_CONSTRAINT = {
    "tasks_identifier_check": ("identifier", "GWBID"),
    "job_queues_queue_name_check": ("queue_name", "GWBQN"),
    "jobs_key_check": ("job_key", "GWBJK"),
    "jobs_max_attempts_check": ("max_attempts", "GWBMA"),
}
_PYTHON_OBJECTS = ("_private_python_", "_private_workers")
_BAD_KEY_MODE = "GWBKM"
_NOT_ABOUT_A_ROW = frozenset({"08", "25", "26", "28", "3D", "3F", "40", "53", "55", "57", "58"})
"""SQLSTATE classes that are not about a row: connections, transactions, locks, resources, shutdowns."""
_NOT_ABOUT_A_FUNCTION = frozenset({"40", "53", "55", "57", "58"})
"""SQLSTATE classes that no user function causes, even if one raised the error. The exchange uses the same."""
_CONFLICTS = frozenset({"40", "55"})
_STALE_SESSION = "GWGUP"
_CREDENTIALS_HINT = " No password is given, neither in the connection string nor as PGPASSWORD."


@contextmanager
def translate_connect_errors(target: Target) -> Iterator[None]:
    """Translate errors of an attempt to connect into the library's errors."""
    where = target.description
    try:
        yield
    except asyncpg.InvalidCatalogNameError as error:
        raise DatabaseError(f"{sentence(error)} Create it, or use another database.") from error
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        hint = "" if target.has_password or os.environ.get("PGPASSWORD") else _CREDENTIALS_HINT
        raise DatabaseError(f"The server ({where}) rejects the user: {sentence(error)}{hint}") from error
    except asyncpg.UndefinedObjectError as error:
        raise ConfigurationError(
            f"The server does not know an option in the connection string: {sentence(error)} Remove it."
        ) from error
    except asyncpg.PostgresError as error:
        raise DatabaseError(f"The server ({where}) does not accept connections: {sentence(error)}") from error
    except (OSError, asyncpg.InternalClientError) as error:
        raise DatabaseError(
            f"Cannot reach the database ({where}): {str(error) or 'no answer in time'}. "
            "Is the server running, and are the host and port correct?"
        ) from None  # the driver's chained errors add nothing
    except KeyError as error:
        raise ConfigurationError(
            "The operating system has no name for the current user. Add a user to the connection string: "
            "postgresql://user@host/database"
        ) from error
    except asyncpg.InterfaceError as error:
        if isinstance(error, asyncpg.ClientConfigurationError):
            raise _misconfigured(error, target) from None
        raise DatabaseError(f"Cannot connect ({where}): {sentence(error)}") from error
    except ValueError as error:
        raise _misconfigured(error, target) from None


def _misconfigured(error: Exception, target: Target) -> ConfigurationError:
    # Never chained, because the original error may quote the password.
    if any(secret in str(error) for secret in target.secrets):
        return invalid_dsn()
    return ConfigurationError(f"Invalid connection settings: {sentence(error)}")


@contextmanager
def translate_errors(schema: Schema) -> Iterator[None]:
    """Translate errors of statements into the library's errors."""
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise statement_failed(error, schema) from error


def statement_failed(  # noqa: C901, PLR0911 - one for each kind of error
    error: Exception, schema: Schema, *, in_transaction: bool = False
) -> GraphileWorkerError:
    """Return the library's error for a failed statement.

    Args:
        error: The error of the driver.
        schema: The schema.
        in_transaction: Whether the statement was part of a transaction of the caller.
    """
    match error:
        case asyncpg.PostgresError() if function_that_raised(error) is not None:
            return DatabaseError(f"The database refused the statement: {sentence(error)}")
        case (
            asyncpg.InvalidSchemaNameError()
            | asyncpg.UndefinedTableError()
            | asyncpg.UndefinedFunctionError()
            | asyncpg.UndefinedObjectError()
        ):
            what = "is not installed in this database. Install"
            # An older release or the npm package installed the schema, so only Python's own objects are
            # missing.
            if any(name in str(error) for name in _PYTHON_OBJECTS):
                what = "lacks objects that this release needs. Upgrade"
            return SchemaMissingError(
                f"The schema {schema.name!r} {what} it with `await "
                "app.migrate()`, `await run_migrations()` or `graphile-worker migrate`. A worker also does "
                "this when it starts."
            )
        case asyncpg.CheckViolationError(constraint_name=str(name)) if name in _BY_CONSTRAINT:
            argument, code = _BY_CONSTRAINT[name]
            return InvalidJobError(
                f"The database rejected {argument}: {sentence(error)}", argument=argument, code=code
            )
        case asyncpg.InsufficientPrivilegeError():
            return DatabaseError(
                f"The role may not use the schema {schema.name!r}: {sentence(error)} "
                "Connect as the schema's owner, or as a member of the owner."
            )
        case asyncpg.PostgresConnectionError() | asyncpg.AdminShutdownError() | asyncpg.CrashShutdownError():
            return _lost(error, in_transaction=in_transaction)
        case asyncpg.InFailedSQLTransactionError():
            return DatabaseError(
                "An earlier statement of the transaction has failed, so the server ignores all others. Roll "
                "back the transaction, or roll it back to a savepoint, and repeat it."
            )
        case asyncpg.PostgresError(sqlstate="GWBKM"):
            return InvalidJobError(sentence(error), argument="job_key_mode", code=_BAD_KEY_MODE)
        case asyncpg.PostgresError():
            return DatabaseError(f"The database refused the statement: {sentence(error)}")
        case OSError():
            return _lost(error, in_transaction=in_transaction)
        case _:
            return DatabaseError(f"The statement was not sent to the database: {sentence(error)}")


class ErrorKind(Enum):
    """The meaning of an error for a caller that can try again later."""

    REFUSED = auto()
    """The server rejected the statement, and may accept it later."""
    LOST = auto()
    """The connection was lost, and the outcome of the statement is unknown."""
    FATAL = auto()
    """Trying again will not help."""


def classify_error(error: BaseException) -> ErrorKind:
    """Classify an error of a statement, or of an attempt to connect."""
    match error:
        case asyncpg.PostgresError() if function_that_raised(error) is not None:
            return ErrorKind.REFUSED  # whatever the error is: with dblink, it can be a lost connection
        case (
            asyncpg.InsufficientPrivilegeError()
            | asyncpg.InvalidSchemaNameError()
            | asyncpg.UndefinedTableError()
            | asyncpg.UndefinedFunctionError()
            | asyncpg.UndefinedColumnError()
            | ConfigurationError()
        ):
            return ErrorKind.FATAL
        case (
            asyncpg.PostgresConnectionError()
            | asyncpg.AdminShutdownError()
            | asyncpg.CrashShutdownError()
            | asyncpg.CannotConnectNowError()
            | asyncpg.ReadOnlySQLTransactionError()  # after a failover, the connection is to the old primary
            | asyncpg.InvalidCachedStatementError()  # its prepared statements are invalid
        ):
            return ErrorKind.LOST
        case asyncpg.PostgresError():
            return ErrorKind.REFUSED
        case _:
            return ErrorKind.LOST


def is_refusal(error: BaseException | None) -> bool:
    """Return whether the server rejects what the statement does to some row, not the statement itself.

    The usual cause is a user's constraint or trigger, which may raise any SQLSTATE. Repeating the statement
    does not help then, but the server may accept the other rows.
    """
    if not isinstance(error, asyncpg.PostgresError):
        return False
    kind = (error.sqlstate or "")[:2]
    if function_that_raised(error) is not None:
        return kind not in _NOT_ABOUT_A_FUNCTION
    return (
        not isinstance(error, asyncpg.InsufficientPrivilegeError)
        and classify_error(error) is not ErrorKind.LOST
        and kind not in _NOT_ABOUT_A_ROW
    )


def is_timeout(error: BaseException | None) -> bool:
    """Return whether the server cancelled the statement, usually because of a timeout."""
    return isinstance(error, asyncpg.QueryCanceledError)


def is_stale_session(error: BaseException | None) -> bool:
    """Return whether the worker has opened a newer session, so that it has to connect again."""
    return isinstance(error, StaleSessionError) or (
        isinstance(error, asyncpg.PostgresError) and error.sqlstate == _STALE_SESSION
    )


class StaleSessionError(Exception):
    """The worker has opened a newer session, so this one may no longer change anything."""


def is_conflict(error: BaseException | None) -> bool:
    """Return whether the statement conflicted with other transactions.

    That is usually transient, but not if a trigger raises the error.
    """
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "")[:2] in _CONFLICTS


def is_about_content(error: BaseException | None) -> bool:
    """Return whether a type, constraint or trigger rejects the values, rather than the role."""
    sqlstate = error.sqlstate or "" if isinstance(error, asyncpg.PostgresError) else ""
    return sqlstate[:2] in {"22", "23", "P0"}


def is_about_data(error: BaseException | None) -> bool:
    """Return whether a value is invalid, so that repeating the statement does not help."""
    return isinstance(error, asyncpg.DataError)


def server_is_down(error: BaseException, *, is_direct: bool) -> bool:
    """Return whether an attempt to connect failed because the server is down or still starting.

    Args:
        error: The error of the attempt.
        is_direct: Whether there is no proxy in between that might reject only this client.
    """
    match error:
        case asyncpg.CannotConnectNowError():
            # Not during a shutdown, when existing sessions may continue. Messages in other languages don't
            # match.
            return "starting up" in str(error) or "recovery mode" in str(error)
        case _ if not is_direct:
            return False
        case ConnectionRefusedError() | FileNotFoundError():
            return True
        case OSError():
            # For a host name with several addresses, asyncio puts all errors into one message.
            numbers = re.findall(r"\[Errno (\d+)\]", str(error))
            return bool(numbers) and all(int(number) == errno.ECONNREFUSED for number in numbers)
        case _:
            return False


def _lost(error: Exception, *, in_transaction: bool) -> DatabaseError:
    effect = "The statement may have been committed; check before you repeat it."
    if in_transaction:
        effect = "Nothing of your transaction is committed. Repeat it on a new connection."
    return DatabaseError(f"The connection to the database was lost: {sentence(error)} {effect}")


def message_of(error: BaseException) -> str:
    """Return the error's message without the server's details, which may quote a row with its payload."""
    if isinstance(error, asyncpg.PostgresError) and error.args:
        text = str(error.args[0]).strip()
        return explain(text, error.sqlstate, function_that_raised(error)) or type(error).__name__
    return str(error).strip() or type(error).__name__


def without_details(error: BaseException) -> None:
    """Remove the server's details from an error, and from all errors that led to it, before it is logged."""
    seen: set[int] = set()
    remaining: list[BaseException | None] = [error]
    while remaining:
        current = remaining.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, asyncpg.PostgresError):
            current.detail = None
        remaining += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            remaining += current.exceptions


def sentence(error: Exception) -> str:
    """Return the error's message as a sentence, without the server's details."""
    text = message_of(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
