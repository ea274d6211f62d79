"""SQL text: read from the ``.sql`` files in ``sql``, and rendered for one schema.

In a file of statements, a ``-- name: ...`` line precedes each statement. ``{name}`` stands for the text of
another statement, and ``{schema}`` for the quoted name of the schema. ``$body$`` quotes function bodies.
``{parameter}`` stands for the one parameter of a `OneTextStatement`, which any driver can run.

A statement that may run on a caller's connection qualifies the name of every function, type and operator,
because the caller's search_path may resolve names differently. ``{=}`` stands for ``operator(pg_catalog.=)``.
All such operators have the same precedence, higher than ``and``: use parentheses. ``nullif``, ``in (...)``,
``is distinct from`` and ``like`` resolve operators by the search_path too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import NamedTuple

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
    """Return the text of one file, for example ``schema/tables.sql``."""
    text = files(__package__).joinpath("sql", *path.split("/")).read_text(encoding="utf-8")
    return _OPERATOR.sub(r"operator(pg_catalog.\1)", text)


@cache
def read_statements(path: str) -> dict[str, str]:
    """Return the statements of one file, by the names in their headers."""
    _, *parts = _HEADER.split(read_script(path))
    found = dict(zip(parts[::2], (part.strip().removesuffix(";") for part in parts[1::2]), strict=True))

    def expand(text: str) -> str:
        return _REFERENCE.sub(lambda match: expand(found[match[1]]) if match[1] in found else match[0], text)

    return {name: expand(text) for name, text in found.items()}


@cache
def statements_for(schema: Schema, path: str) -> dict[str, str]:
    """Return the statements of one file, rendered for a schema."""
    return {name: schema.render(text) for name, text in read_statements(path).items()}


class OneTextStatement(NamedTuple):
    """A statement with one text parameter, which returns one row with one text column.

    No driver has to adapt anything but text. Only the placeholder differs between drivers.
    """

    before: str
    after: str

    def render(self, placeholder: str, *, escaped: str = "", escape: str = "") -> str:
        """Return the SQL with a driver's placeholder.

        Args:
            placeholder: What stands for the parameter.
            escaped: A character that the driver would take for the start of a placeholder.
            escape: What to write instead of this character.
        """
        parts = (part.replace(escaped, escape) if escaped else part for part in self)
        return placeholder.join(parts)


@cache
def one_text_statement(schema: Schema, path: str, name: str) -> OneTextStatement:
    """Return the statement with this name, rendered for a schema. ``{parameter}`` must occur once in it."""
    before, after = read_statements(path)[name].split("{parameter}")
    return OneTextStatement(schema.render(before), schema.render(after))


@cache
def rows_statement(schema: Schema, path: str, name: str) -> OneTextStatement:
    """Return a statement without parameters as one that returns its rows as a JSON list."""
    return rows_of(schema, read_statements(path)[name])


def rows_of(schema: Schema, text: str) -> OneTextStatement:
    """Return the text of a statement without parameters as one that returns its rows as a JSON list."""
    before, after = read_statements("rows.sql")["rows"].replace("{statement}", text).split("{parameter}")
    return OneTextStatement(schema.render(before), schema.render(after))


def quote_identifier(name: str) -> str:
    """Quote a name for SQL, whatever characters it contains."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote a text for SQL. The session must have standard_conforming_strings on."""
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
            raise ConfigurationError(f"A schema name must be a str, not {type(self.name).__name__}.")
        size = len(self.name.encode(errors="surrogatepass"))
        if not self.name or _UNSTORABLE.search(self.name):
            raise ConfigurationError(f"Invalid schema name {self.name!r}: PostgreSQL cannot store it.")
        if size > _NAMEDATALEN:
            raise ConfigurationError(
                f"The schema name {self.name!r} has {size} bytes, and PostgreSQL allows {_NAMEDATALEN}. "
                "Choose a shorter name."
            )
        object.__setattr__(self, "quoted", quote_identifier(self.name))

    def render(self, template: str) -> str:
        """Return the template as SQL for this schema."""
        # The schema name may contain anything, even the tag that quotes function bodies.
        tag = "$body$"
        while tag in self.name:
            tag = tag[:-1] + "_$"
        replacements = {"{schema}": self.quoted, "$body$": tag}
        return _PLACEHOLDER.sub(lambda match: replacements[match[0]], template)
