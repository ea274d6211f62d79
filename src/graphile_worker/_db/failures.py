"""From an exception of the driver's to one of ours that says what to do."""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

import asyncpg

from graphile_worker._db.dsn import unreadable
from graphile_worker._db.user_functions import explain, function_that_raised
from graphile_worker.errors import (
    ConfigurationError,
    DatabaseError,
    GraphileWorkerError,
    InvalidJobError,
    SchemaMissingError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphile_worker._db.dsn import Target
    from graphile_worker._db.sql import Schema

_BY_CONSTRAINT = {
    "tasks_identifier_check": ("identifier", "GWBID"),
    "job_queues_queue_name_check": ("queue_name", "GWBQN"),
    "jobs_key_check": ("job_key", "GWBJK"),
    "jobs_max_attempts_check": ("max_attempts", "GWBMA"),
}
_NOT_OF_NODE = ("_private_python_", "_private_workers")
_BAD_KEY_MODE = "GWBKM"
_NOT_ABOUT_A_ROW = frozenset({"08", "25", "26", "28", "3D", "3F", "40", "53", "55", "57", "58"})
"""Classes of SQLSTATEs: connections, transactions, locks, resources, shutdowns."""
_NOT_ABOUT_A_FUNCTION = frozenset({"40", "53", "55", "57", "58"})
"""The same, where a function of the user's raised the error: as the exchange does it."""
_CONFLICTS = frozenset({"40", "55"})
_GIVEN_UP = "GWGUP"
_NONE_GIVEN = " No password is given, neither in the connection string nor as PGPASSWORD."


@contextmanager
def connecting(target: Target) -> Iterator[None]:
    """Errors of the attempt to connect, as errors of ours."""
    where = target.description
    try:
        yield
    except asyncpg.InvalidCatalogNameError as error:
        raise DatabaseError(f"{sentence(error)} Create it, or name another.") from error
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        hint = "" if target.has_password or os.environ.get("PGPASSWORD") else _NONE_GIVEN
        raise DatabaseError(f"The server ({where}) refuses the user: {sentence(error)}{hint}") from error
    except asyncpg.UndefinedObjectError as error:
        raise ConfigurationError(
            f"An option of the connection string is not known to the server: {sentence(error)} Remove it."
        ) from error
    except asyncpg.PostgresError as error:
        raise DatabaseError(f"The server ({where}) accepts no connection: {sentence(error)}") from error
    except (OSError, asyncpg.InternalClientError) as error:
        raise DatabaseError(
            f"Cannot reach the database ({where}): {str(error) or 'no answer in time'}. "
            "Is the server running, and are host and port right?"
        ) from None  # the driver's attempts, one inside the other, say no more than that
    except KeyError as error:
        raise ConfigurationError(
            "This process runs as a user without a name, so name one in the connection string: "
            "postgresql://user@host/database"
        ) from error
    except asyncpg.InterfaceError as error:
        if isinstance(error, asyncpg.ClientConfigurationError):
            raise _misconfigured(error, target) from None
        raise DatabaseError(f"There is no connection ({where}): {sentence(error)}") from error
    except ValueError as error:
        raise _misconfigured(error, target) from None


def _misconfigured(error: Exception, target: Target) -> ConfigurationError:
    # Never chained, and not quoted if it quotes the password.
    if any(secret in str(error) for secret in target.secrets):
        return unreadable()
    return ConfigurationError(f"The connection cannot be made like that: {sentence(error)}")


@contextmanager
def translated(schema: Schema) -> Iterator[None]:
    """Errors of statements on the schema, as errors of ours."""
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise statement_failed(error, schema) from error


def statement_failed(error: Exception, schema: Schema) -> GraphileWorkerError:  # noqa: PLR0911 - one a kind
    """Why a statement on the schema failed."""
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
            if any(
                name in str(error) for name in _NOT_OF_NODE
            ):  # not there in the beginning, or if Node made it
                what = "lacks something that this release needs. Complete"
            return SchemaMissingError(
                f"The schema {schema.name!r} {what} it with `await "
                "app.migrate()`, `await run_migrations()` or `graphile-worker migrate`; a worker does "
                "so when it starts."
            )
        case asyncpg.CheckViolationError(constraint_name=str(name)) if name in _BY_CONSTRAINT:
            argument, code = _BY_CONSTRAINT[name]
            return InvalidJobError(
                f"{argument} is refused by the database: {sentence(error)}", argument=argument, code=code
            )
        case asyncpg.InsufficientPrivilegeError():
            return DatabaseError(
                f"The role may not use the schema {schema.name!r}: {sentence(error)} "
                "Connect as the schema's owner, or as a member of it."
            )
        case asyncpg.PostgresConnectionError() | asyncpg.AdminShutdownError() | asyncpg.CrashShutdownError():
            return _lost(error)
        case asyncpg.PostgresError(sqlstate="GWBKM"):
            return InvalidJobError(sentence(error), argument="job_key_mode", code=_BAD_KEY_MODE)
        case asyncpg.PostgresError():
            return DatabaseError(f"The database refused the statement: {sentence(error)}")
        case OSError():
            return _lost(error)
        case _:
            return DatabaseError(f"The statement was not sent to the database: {sentence(error)}")


class Trouble(Enum):
    """What an error means for somebody who can wait."""

    REFUSED = auto()
    """The server did nothing; later it may."""
    LOST = auto()
    """The connection is gone, and what became of the statement is not known."""
    FATAL = auto()
    """It will not get better by waiting."""


def trouble_of(error: BaseException) -> Trouble:
    """What the error of a statement, or of an attempt to connect, means."""
    match error:
        case asyncpg.PostgresError() if function_that_raised(error) is not None:
            return Trouble.REFUSED  # whatever it says: with dblink, for example, that a connection is lost
        case (
            asyncpg.InsufficientPrivilegeError()
            | asyncpg.InvalidSchemaNameError()
            | asyncpg.UndefinedTableError()
            | asyncpg.UndefinedFunctionError()
            | asyncpg.UndefinedColumnError()
            | ConfigurationError()
        ):
            return Trouble.FATAL
        case (
            asyncpg.PostgresConnectionError()
            | asyncpg.AdminShutdownError()
            | asyncpg.CrashShutdownError()
            | asyncpg.CannotConnectNowError()
            | asyncpg.ReadOnlySQLTransactionError()  # after a failover: the connection is to the old primary
            | asyncpg.InvalidCachedStatementError()  # what was prepared on it is of no use any more
        ):
            return Trouble.LOST
        case asyncpg.PostgresError():
            return Trouble.REFUSED
        case _:
            return Trouble.LOST


def is_refusal(error: BaseException | None) -> bool:
    """Whether the server refuses what a statement does to some row, and not the statement as such.

    As a rule it was a constraint or a trigger of the user's, with whatever SQLSTATE that raises. To repeat
    the statement is of no use then, but the server may accept a part of it.
    """
    if not isinstance(error, asyncpg.PostgresError):
        return False
    kind = (error.sqlstate or "")[:2]
    if function_that_raised(error) is not None:
        return kind not in _NOT_ABOUT_A_FUNCTION
    return (
        not isinstance(error, asyncpg.InsufficientPrivilegeError)
        and trouble_of(error) is not Trouble.LOST
        and kind not in _NOT_ABOUT_A_ROW
    )


def is_timeout(error: BaseException | None) -> bool:
    """Whether the server stopped the statement, because it took too long as a rule."""
    return isinstance(error, asyncpg.QueryCanceledError)


def is_given_up(error: BaseException | None) -> bool:
    """Whether the exchange is closed for this session: then the worker has to connect again."""
    return isinstance(error, GivenUpError) or (
        isinstance(error, asyncpg.PostgresError) and error.sqlstate == _GIVEN_UP
    )


class GivenUpError(Exception):
    """The worker has connected again since, so this session may not change anything any more."""


def is_conflict(error: BaseException | None) -> bool:
    """Whether other transactions were in the way. As a rule that passes, but not if a trigger says it."""
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "")[:2] in _CONFLICTS


def is_about_content(error: BaseException | None) -> bool:
    """Whether a type, a constraint or a trigger refuses what a statement brings, and not who brings it."""
    sqlstate = error.sqlstate or "" if isinstance(error, asyncpg.PostgresError) else ""
    return sqlstate[:2] in {"22", "23", "P0"}


def is_about_data(error: BaseException | None) -> bool:
    """Whether a value cannot be what it is to be: then to repeat the statement is of no use."""
    return isinstance(error, asyncpg.DataError)


def server_is_down(error: BaseException, *, is_direct: bool) -> bool:
    """Whether an attempt to connect failed because nobody is there, or lets anybody in yet.

    Args:
        error: What it failed with.
        is_direct: Whether nothing is in between that might refuse us alone.
    """
    match error:
        case asyncpg.CannotConnectNowError():
            # Not if it is shutting down, for then sessions that are there may go on; nor in another language.
            return "starting up" in str(error) or "recovery mode" in str(error)
        case _ if not is_direct:
            return False
        case ConnectionRefusedError() | FileNotFoundError():
            return True
        case OSError():
            # A name with several addresses: asyncio tells of all in one text.
            numbers = re.findall(r"\[Errno (\d+)\]", str(error))
            return bool(numbers) and all(int(number) == errno.ECONNREFUSED for number in numbers)
        case _:
            return False


def _lost(error: Exception) -> DatabaseError:
    return DatabaseError(
        f"The connection to the database was lost: {sentence(error)} Whether the statement was done "
        "is not known; look before repeating it."
    )


def message_of(error: BaseException) -> str:
    """What the error says. Without the server's details, which may quote a whole row with its payload."""
    if isinstance(error, asyncpg.PostgresError) and error.args:
        text = str(error.args[0]).strip()
        return explain(text, error.sqlstate, function_that_raised(error)) or type(error).__name__
    return str(error).strip() or type(error).__name__


def without_details(error: BaseException) -> None:
    """Remove the server's details from an error, and from those that led to it, before it is logged."""
    known: set[int] = set()
    open_ones: list[BaseException | None] = [error]
    while open_ones:
        one = open_ones.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        if isinstance(one, asyncpg.PostgresError):
            one.detail = None
        open_ones += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            open_ones += one.exceptions


def sentence(error: Exception) -> str:
    """What the error says, without details, as a sentence."""
    text = message_of(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
