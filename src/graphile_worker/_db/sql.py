"""SQL text: read from the ``.sql`` files beside this module, rendered for one schema.

A file of statements has a ``-- name: ...`` line before each; ``{name}`` stands for the text of another one.
``{schema}`` stands for the quoted name of the schema; ``$body$`` quotes function bodies.

A statement that may run on a caller's connection qualifies the name of every function, type and operator,
because the caller's search_path may lead to others: ``{=}`` stands for ``operator(pg_catalog.=)``. All such
operators bind equally tightly, tighter than ``and``: use parentheses. ``nullif``, ``in (...)``, ``is distinct
from`` and ``like`` look operators up by the path too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from graphile_worker.errors import ConfigurationError

DEFAULT_SCHEMA = "graphile_worker"
_NAMEDATALEN = 63
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_HEADER = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_REFERENCE = re.compile(r"\{(\w+)\}")
_OPERATOR = re.compile(r"\{([-+*/<>=~!@#%^&|`?]+)\}")
_PLACEHOLDER = re.compile(r"\{schema\}|\$body\$")


@cache
def read_script(path: str) -> str:
    """The text of one file, for example ``schema/tables.sql``."""
    text = files(__package__).joinpath("sql", *path.split("/")).read_text(encoding="utf-8")
    return _OPERATOR.sub(r"operator(pg_catalog.\1)", text)


@cache
def read_statements(path: str) -> dict[str, str]:
    """The statements of one file by the names in their headers."""
    _, *parts = _HEADER.split(read_script(path))
    found = dict(zip(parts[::2], (part.strip().removesuffix(";") for part in parts[1::2]), strict=True))

    def expand(text: str) -> str:
        return _REFERENCE.sub(lambda match: expand(found[match[1]]) if match[1] in found else match[0], text)

    return {name: expand(text) for name, text in found.items()}


@cache
def statements_for(schema: Schema, path: str) -> dict[str, str]:
    """The statements of one file, rendered for a schema."""
    return {name: schema.render(text) for name, text in read_statements(path).items()}


def quote_identifier(name: str) -> str:
    """The name as SQL takes it whatever it contains."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """The text as SQL takes it, under standard_conforming_strings."""
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True)
class Schema:
    """The schema that holds the queue: any name that PostgreSQL can store.

    >>> Schema('a"; drop').quoted
    '"a""; drop"'
    """

    name: str = DEFAULT_SCHEMA
    quoted: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigurationError(f"The name of a schema is a str, not a {type(self.name).__name__}.")
        size = len(self.name.encode(errors="surrogatepass"))
        if not self.name or _UNSTORABLE.search(self.name):
            raise ConfigurationError(f"{self.name!r} cannot be the name of a schema.")
        if size > _NAMEDATALEN:
            raise ConfigurationError(
                f"The schema name {self.name!r} has {size} bytes; "
                f"PostgreSQL keeps {_NAMEDATALEN}. Choose a shorter one."
            )
        object.__setattr__(self, "quoted", quote_identifier(self.name))

    def render(self, template: str) -> str:
        """The template as SQL for this schema."""
        # A name may contain anything, the quote of a function body too.
        tag = "$body$"
        while tag in self.name:
            tag = tag[:-1] + "_$"
        replacements = {"{schema}": self.quoted, "$body$": tag}
        return _PLACEHOLDER.sub(lambda match: replacements[match[0]], template)
