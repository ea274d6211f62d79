"""What the schema is to be: read from ``contract.json``, which ``make db-dump`` writes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_PARTS = ("column", "constraint", "index", "trigger")


class Difference(NamedTuple):
    """An object that is not as our installer makes it."""

    how: Literal["missing", "changed", "extra"]
    name: str
    """With its kind, such as ``column _private_jobs.flags``."""
    is_: str = ""
    to_be: str = ""


@cache
def _contract() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        files(__package__).joinpath("contract.json").read_text(encoding="utf-8")
    )
    return content


def own_revision() -> int:
    """How far our own ledger is, where all is installed."""
    revision: int = _contract()["own_revision"]
    return revision


def function_names() -> frozenset[str]:
    """The functions of the schema, without their arguments."""
    return frozenset(_owner(name) for name in _contract()["objects"] if name.startswith("function "))


def differences(found: Mapping[str, str]) -> list[Difference]:
    """Where a schema is not as it is to be; of what else is in it, only what is part of our tables."""
    wanted: Mapping[str, str] = _contract()["objects"]
    missing = [Difference("missing", name, to_be=wanted[name]) for name in wanted if name not in found]
    gone = {one.name for one in missing}
    return [
        # What is gone need not be told column by column.
        *(one for one in missing if not (_is_part(one.name) and gone & _wholes(one.name))),
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
    """The table that something is part of, or the bare name of a function."""
    _, _, rest = name.partition(" ")
    return rest.partition("(")[0].partition(".")[0]


def _wholes(name: str) -> set[str]:
    """What it may be part of."""
    return {f"{kind} {_owner(name)}" for kind in ("table", "view", "type")}


def _concerns(name: str, wanted: Mapping[str, str]) -> bool:
    if name.startswith("function "):
        # Another function of the same name may be called in place of the right one.
        return any(_owner(other) == _owner(name) for other in wanted if other.startswith("function "))
    return _is_part(name) and f"table {_owner(name)}" in wanted
