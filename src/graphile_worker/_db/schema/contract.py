"""The expected schema, read from ``contract.json``, which ``make db-dump`` writes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_PARTS = ("column", "constraint", "index", "trigger")


class Difference(NamedTuple):
    """An object that differs from the one that this library installs."""

    kind: Literal["missing", "changed", "extra"]
    name: str
    """The kind and the name, such as ``column _private_jobs.flags``."""
    actual: str = ""
    expected: str = ""


@cache
def _contract() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        files(__package__).joinpath("contract.json").read_text(encoding="utf-8")
    )
    return content


def own_revision() -> int:
    """Return the last revision in the library's own ledger after a complete installation."""
    revision: int = _contract()["own_revision"]
    return revision


def function_names() -> frozenset[str]:
    """Return the names of the schema's functions, without arguments."""
    return frozenset(_owner(name) for name in _contract()["objects"] if name.startswith("function "))


def differences(found: Mapping[str, str]) -> list[Difference]:
    """Compare a schema with the contract.

    Objects that the contract does not have are reported only if they concern the library's tables or
    functions.
    """
    wanted: Mapping[str, str] = _contract()["objects"]
    missing = [Difference("missing", name, expected=wanted[name]) for name in wanted if name not in found]
    missing_names = {one.name for one in missing}
    return [
        # The columns of a missing table are not reported one by one.
        *(one for one in missing if not (_is_part(one.name) and missing_names & _containers(one.name))),
        *(
            Difference("changed", name, found[name], definition)
            for name, definition in wanted.items()
            if found.get(name, definition) != definition
        ),
        *(
            Difference("extra", name, definition)
            for name, definition in found.items()
            if name not in wanted and _concerns(name, wanted)
        ),
    ]


def _is_part(name: str) -> bool:
    return name.startswith(_PARTS)


def _owner(name: str) -> str:
    """Return the table that an object is part of, or the name of a function without arguments."""
    _, _, rest = name.partition(" ")
    return rest.partition("(")[0].partition(".")[0]


def _containers(name: str) -> set[str]:
    """Return the objects that a part may belong to."""
    return {f"{kind} {_owner(name)}" for kind in ("table", "view", "type")}


def _concerns(name: str, wanted: Mapping[str, str]) -> bool:
    if name.startswith("function "):
        # PostgreSQL may call an overload instead of the library's function.
        return any(_owner(other) == _owner(name) for other in wanted if other.startswith("function "))
    return _is_part(name) and f"table {_owner(name)}" in wanted
