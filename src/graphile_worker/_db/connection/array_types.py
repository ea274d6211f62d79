"""The array types that own statements use, so that the driver need not look them up."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import asyncpg

# PostgreSQL never changes the numbers of its own types.
ELEMENT_TYPES = {
    # array: (name, element)
    1005: ("int2", 21),
    1007: ("int4", 23),
    1016: ("int8", 20),
    1021: ("float4", 700),
    1022: ("float8", 701),
    1185: ("timestamptz", 1184),
}


def register_array_types(connection: asyncpg.Connection) -> None:
    """Tell the driver about the array types.

    It knows only arrays of text. For any other it asks the server, once per connection, with queries that
    take as long as ten exchanges.
    """
    # A driver that expects more about a type asks the server as before.
    with suppress(AttributeError, KeyError, TypeError):
        connection.get_settings().register_data_types(list(_describe_types()))


def _describe_types() -> Iterator[dict[str, Any]]:
    """Describe the types as the driver's own query does."""
    for array, (name, element) in ELEMENT_TYPES.items():
        yield {
            "oid": array,
            "ns": "pg_catalog",
            "name": f"_{name}",
            "kind": b"b",
            "basetype": None,
            "elemtype": element,
            "elemdelim": b",",
            "range_subtype": None,
            "attrtypoids": None,
            "attrnames": None,
            "depth": 0,
            "basetype_name": None,
            "elemtype_name": name,
            "range_subtype_name": None,
        }
