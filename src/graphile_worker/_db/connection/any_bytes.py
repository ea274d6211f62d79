r"""Read text from a SQL_ASCII database, whatever bytes it contains.

Such a database stores any bytes, for example Latin-1. The server refuses to send bytes that are not UTF-8,
and the whole statement fails: one job would hide all others. So `fetch` wraps the statement in another one,
which sends text columns as bytes. A byte that is not UTF-8 is decoded as an escape such as \xe9. In databases
with any other encoding, statements are not wrapped.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from graphile_worker._db.sql_files import quote_identifier, read_statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import asyncpg

    from graphile_worker._db.connection.connect import Connection

INSIDE_JSON = "graphile_worker.escape_inside_json"
"""How to decode a JSON document: the backslash of an escape is escaped itself. Only texts have such bytes."""
_WRAPPED: dict[str, tuple[str, tuple[str, ...]]] = {}
"""The wrapped statements and the names of their columns, by the original statement."""


class _Row(dict[str, Any]):
    """A row that behaves like an asyncpg record: iterating yields the values."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def is_sql_ascii(connection: Connection) -> bool:
    """Return whether the database stores text without checking its encoding."""
    return bool(connection.get_settings().server_encoding.upper() == "SQL_ASCII")


async def fetch(
    connection: Connection,
    statement: str,
    *arguments: object,
    timeout: float | None = None,  # noqa: ASYNC109 - passed on to the driver
    errors: str = "backslashreplace",
) -> list[asyncpg.Record]:
    """Return the rows of a statement."""
    sent = await as_sent(connection, statement)
    rows = await connection.fetch(sent, *arguments, timeout=timeout)
    if not is_sql_ascii(connection):
        return rows
    _, names = _WRAPPED[statement]
    return [
        _Row(zip(names, (_as_text(value, errors) for value in row), strict=True))  # type: ignore[misc]
        for row in rows
    ]


async def as_sent(connection: Connection, statement: str) -> str:
    """Return the statement that `fetch` sends, to prepare it before a transaction."""
    if not is_sql_ascii(connection):
        return statement
    if statement not in _WRAPPED:
        _WRAPPED[statement] = await _wrap(connection, statement)
    return _WRAPPED[statement][0]


async def _wrap(connection: Connection, statement: str) -> tuple[str, tuple[str, ...]]:
    parts = read_statements("any_bytes.sql")
    attributes: Sequence[asyncpg.Attribute] = (await connection.prepare(statement)).get_attributes()
    names = [quote_identifier(f"column {position}") for position, _ in enumerate(attributes)]
    columns = [
        parts["as_bytes"].replace("{column}", name) if attribute.type.name == "text" else name
        for name, attribute in zip(names, attributes, strict=True)
    ]
    # The statement is inserted last, because it may contain any of the placeholders.
    wrapped = (
        parts["wrapped"]
        .replace("{names}", ", ".join(names))
        .replace("{columns}", ", ".join(columns))
        .replace("{statement}", statement)
    )
    return wrapped, tuple(attribute.name for attribute in attributes)


def _as_text(value: Any, errors: str) -> Any:
    return value.decode(errors=errors) if isinstance(value, bytes) else value


def _escape_inside_json(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(rf"\\x{byte:02x}" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(INSIDE_JSON, _escape_inside_json)
