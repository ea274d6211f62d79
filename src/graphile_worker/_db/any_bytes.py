r"""Reading texts of a SQL_ASCII database, whatever bytes they hold.

Such a database keeps bytes as they come, for example Latin-1. The server refuses to send one that is not
UTF-8, and fails the whole statement: one job would hide all others. So here a statement is wrapped in one
that sends its texts as bytes, and a byte that is not UTF-8 is read as the escape \xe9. In databases with
another encoding nothing is wrapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker._db.sql import quote_identifier, read_statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import asyncpg

    from graphile_worker._db.connect import Connection

_WRAPPED: dict[str, tuple[str, tuple[str, ...]]] = {}
"""Statements by those that they wrap, and the names of their columns."""


class _Row(dict[str, Any]):
    """As the driver's rows: iterating gives the values."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def keeps_any_bytes(connection: Connection) -> bool:
    """Whether texts of the database need not be UTF-8."""
    return bool(connection.get_settings().server_encoding.upper() == "SQL_ASCII")


async def fetch(
    connection: Connection,
    statement: str,
    *arguments: object,
    timeout: float | None = None,  # noqa: ASYNC109 - the driver's
) -> list[asyncpg.Record]:
    """The rows of a statement."""
    if not keeps_any_bytes(connection):
        return await connection.fetch(statement, *arguments, timeout=timeout)
    if statement not in _WRAPPED:
        _WRAPPED[statement] = await _wrap(connection, statement)
    wrapped, names = _WRAPPED[statement]
    rows = await connection.fetch(wrapped, *arguments, timeout=timeout)
    return [_Row(zip(names, map(_as_text, row), strict=True)) for row in rows]  # type: ignore[misc]


async def _wrap(connection: Connection, statement: str) -> tuple[str, tuple[str, ...]]:
    parts = read_statements("any_bytes.sql")
    attributes: Sequence[asyncpg.Attribute] = (await connection.prepare(statement)).get_attributes()
    names = [quote_identifier(f"column {place}") for place, _ in enumerate(attributes)]
    columns = [
        parts["as_bytes"].replace("{column}", name) if attribute.type.name == "text" else name
        for name, attribute in zip(names, attributes, strict=True)
    ]
    # The statement last: it may contain anything.
    wrapped = (
        parts["wrapped"]
        .replace("{names}", ", ".join(names))
        .replace("{columns}", ", ".join(columns))
        .replace("{statement}", statement)
    )
    return wrapped, tuple(attribute.name for attribute in attributes)


def _as_text(value: Any) -> Any:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
