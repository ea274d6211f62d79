"""Read the errors of any driver or ORM, without importing it.

They become errors of asyncpg, which `error_mapping` knows. An ORM wraps the driver's error, so the error that
has the server's fields may be the cause of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from collections.abc import Iterator

_DRIVERS = frozenset({"django", "pg8000", "psycopg", "psycopg2", "sqlalchemy", "tortoise"})
_PG8000_LOST = ("network error",)
"""The arguments of pg8000's error for a connection that the server has closed. It has no class of its own."""
_KNOWN = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_FIELDS = {
    "severity_nonlocalized": "V",
    "severity": "S",
    "message_primary": "M",
    "message_detail": "D",
    "context": "W",
    "constraint_name": "n",
    "table_name": "t",
}
"""The attributes of diagnostics in psycopg, and the letters of these fields in PostgreSQL's protocol."""


def as_known_error(error: Exception) -> Exception | None:
    """Return the error of a statement as an error of asyncpg, or an `OSError` if the connection was lost.

    Returns None for an error that does not come from a driver.
    """
    if isinstance(error, _KNOWN):
        return error
    if type(error).__module__.partition(".")[0] not in _DRIVERS:
        return None
    for one in _with_causes(error):
        if (known := _as_known(one)) is not None:
            return known
    # SQLAlchemy's own text has the statement and its parameters, and so the payload.
    source = next((one for one in _with_causes(error) if not _has_statement(one)), error)
    text = type(error).__name__ if _has_statement(source) else str(source).strip() or type(source).__name__
    # The server sends an SQLSTATE with all its errors, so this one comes from the client.
    return OSError(text) if type(error).__name__ == "OperationalError" else asyncpg.InterfaceError(text)


def _as_known(error: BaseException) -> Exception | None:
    if isinstance(error, _KNOWN):
        return error
    if (fields := _fields(error)) is not None:
        known: Exception = asyncpg.PostgresError.new(fields)
        return known
    if type(error).__name__ == "PendingRollbackError":  # its text has the statement that failed earlier
        return asyncpg.InFailedSQLTransactionError("the session must be rolled back first")
    return OSError(*_PG8000_LOST) if error.args == _PG8000_LOST else None


def _has_statement(error: BaseException) -> bool:
    return getattr(error, "statement", None) is not None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and the errors that led to it."""
    seen: list[BaseException] = []
    remaining: list[Any] = [error]
    while remaining:
        one = remaining.pop()
        if isinstance(one, BaseException) and one not in seen:
            seen.append(one)
            yield one
            first = one.args[0] if one.args else None  # Tortoise passes the driver's error as an argument
            remaining += [first, one.__cause__, getattr(one, "orig", None)]


def _fields(error: BaseException) -> dict[str, Any] | None:
    """Return the fields that the server sent, by their letters; None if the error has none."""
    root = type(error).__module__.partition(".")[0]
    if root == "pg8000" and error.args and isinstance(error.args[0], dict) and "C" in error.args[0]:
        return dict(error.args[0])
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    diagnostics = getattr(error, "diag", None)
    if root not in {"psycopg", "psycopg2"} or sqlstate is None or diagnostics is None:
        return None
    read = {letter: getattr(diagnostics, name, None) for name, letter in _FIELDS.items()}
    return {**read, "C": sqlstate, "M": read["M"] or str(error)}
