"""A Django connection with the methods of an asyncpg connection that the library's statements use.

Migrations and tests run the code that workers run, but in the transaction of the caller's Django connection.
Nothing here suspends: a statement blocks the thread that awaits it. The psycopg connection below Django's may
be used by any thread, one after the other.
"""

from __future__ import annotations

import re
import sys
from datetime import date, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from asyncpg.transaction import Transaction

from graphile_worker._db.connection.driver_errors import as_known_error
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PARAMETER = re.compile(r"\$(\d+)")
_JSON = 114
"""The OID of the type json. asyncpg returns its text."""


class _Row(tuple[Any, ...]):
    """A row that behaves like an asyncpg record: values by position or by column, iterating yields values."""

    __slots__ = ()
    _names: ClassVar[dict[str, int]]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._names[key] if isinstance(key, str) else key)

    def keys(self) -> Iterator[str]:
        return iter(self._names)

    def values(self) -> Iterator[Any]:
        return iter(self)

    def items(self) -> Iterator[tuple[str, Any]]:
        return zip(self._names, self, strict=True)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._names else default


class AdaptedConnection:
    """A Django connection that awaited code can use like one from asyncpg.

    Args:
        connection: Django's connection, of the current thread.

    Raises:
        ConfigurationError: The connection is not connected to PostgreSQL.
    """

    _pool_release_ctr = 0
    """asyncpg's transactions read it."""

    def __init__(self, connection: Any) -> None:
        if connection.vendor != "postgresql":
            raise ConfigurationError(
                f"The database {connection.alias!r} is {connection.vendor}, and the queue needs PostgreSQL."
            )
        connection.ensure_connection()
        self._django = connection
        self._opened: Any = None
        self._savepoints = 0

    @property
    def _top_xact(self) -> Any:
        """The outermost transaction; any object if it is Django's."""
        return (
            _DJANGO_TRANSACTION if self._opened is None and self._is_in_django_transaction else self._opened
        )

    @_top_xact.setter
    def _top_xact(self, transaction: Any) -> None:
        self._opened = None if transaction is _DJANGO_TRANSACTION else transaction

    @property
    def _is_in_django_transaction(self) -> bool:
        return bool(self._django.in_atomic_block or not self._django.autocommit)

    def _get_unique_id(self, prefix: str) -> str:
        self._savepoints += 1
        return f"graphile_worker_{prefix}_{self._savepoints}"

    def is_in_transaction(self) -> bool:
        """Return whether statements are part of a transaction."""
        return self._top_xact is not None

    def is_closed(self) -> bool:
        """Return whether the connection is closed."""
        return self._django.connection is None or bool(self._django.connection.closed)

    def transaction(self) -> Transaction:
        """Return a transaction, or a savepoint inside one."""
        connection: Any = self
        return Transaction(connection, None, readonly=False, deferrable=False)

    def get_settings(self) -> Any:
        """Return the settings that the server has reported."""
        raw = self._django.connection
        read = raw.info.parameter_status if hasattr(raw, "info") else raw.get_parameter_status
        return SimpleNamespace(server_encoding=read("server_encoding"))

    def get_server_version(self) -> Any:
        """Return the server's version."""
        return SimpleNamespace(major=self._django.pg_version // 10_000)

    async def execute(self, statement: str, *arguments: object, **_options: object) -> str:
        """Run a statement, or several if there are no arguments."""
        self._run(statement, arguments)
        return ""

    async def executemany(self, statement: str, rows: Any, **_options: object) -> None:
        """Run a statement for each row of arguments."""
        for arguments in rows:
            self._run(statement, tuple(arguments))

    async def fetch(self, statement: str, *arguments: object, **_options: object) -> list[_Row]:
        """Return the rows of a statement."""
        return self._run(statement, arguments)

    async def fetchrow(self, statement: str, *arguments: object, **_options: object) -> _Row | None:
        """Return the first row of a statement."""
        return next(iter(self._run(statement, arguments)), None)

    async def fetchval(self, statement: str, *arguments: object, **_options: object) -> Any:
        """Return the first value of the first row of a statement."""
        return next((row[0] for row in self._run(statement, arguments)), None)

    def _run(self, statement: str, arguments: tuple[object, ...]) -> list[_Row]:
        """Run a statement, whose arguments become literals of a type that the server infers."""

        def literal(match: re.Match[str]) -> str:
            # A space, because a keyword may precede the parameter.
            return f" {_literal(arguments[int(match[1]) - 1])}"

        sql = _PARAMETER.sub(literal, statement) if arguments else statement
        try:
            with _cursor(self._django.connection) as cursor:
                cursor.execute(sql)
                if cursor.description is None:
                    return []
                kind = type(
                    "Row", (_Row,), {"_names": {one[0]: i for i, one in enumerate(cursor.description)}}
                )
                return [kind(row) for row in cursor.fetchall()]
        except Exception as error:
            known = as_known_error(error)
            if known is None:
                raise
            raise known from error


_DJANGO_TRANSACTION = SimpleNamespace(_isolation=None)


def _cursor(raw: Any) -> Any:
    """Return a cursor of the driver itself, because Django's may have been changed by settings."""
    if type(raw).__module__.startswith("psycopg2"):
        psycopg2 = sys.modules["psycopg2"]
        cursor = raw.cursor(cursor_factory=psycopg2.extensions.cursor)
        as_text = psycopg2.extensions.new_type((_JSON,), "JSON", lambda value, _cursor: value)
        psycopg2.extensions.register_type(as_text, cursor)
        return cursor
    psycopg = sys.modules["psycopg"]
    cursor = psycopg.Cursor(raw, row_factory=psycopg.rows.tuple_row)
    cursor.adapters.register_loader("json", psycopg.types.string.TextLoader)
    return cursor


def _literal(value: object) -> str:
    """Return a literal without a type, so that the server infers it as for a parameter."""
    return "null" if value is None else _quoted(_text(value))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, list | tuple | set | frozenset):
        return "{" + ",".join("null" if one is None else _element(_text(one)) for one in value) + "}"
    return str(value)


def _element(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quoted(text: str) -> str:
    """Quote a text, whatever the session's standard_conforming_strings is."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
