"""Functions and operators in ``public`` that match calls in the package's SQL as well as the built-in ones.

Every planted overload records that it was called, and raises. The overloads are derived from the text of the
SQL files, so that new SQL is covered without a change here.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import graphile_worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import asyncpg

SQL = Path(graphile_worker.__file__).parent / "_db" / "sql"

SYNTAX = frozenset({
    "all", "always", "and", "any", "array", "as", "best", "btree", "bucket", "by", "candidate",
    "case", "cast", "change", "check", "chosen", "coalesce", "conflict", "document", "done", "else",
    "executed", "exists", "extract", "filter", "flagged", "flush", "found", "from", "generated",
    "given", "greatest", "group", "if", "in", "include", "index", "input", "interval", "item", "job",
    "join", "key", "known", "lateral", "latest", "least", "level", "limit", "materialized", "not",
    "nullif", "on", "or", "other", "over", "pair", "position", "queue", "quota", "range", "recursive",
    "return", "row", "select", "spec", "stored", "table", "taken", "task", "then", "to", "union",
    "values", "visited", "wanted", "when", "where", "with", "with_flags", "with_queue", "without_flags",
    "worker",
})  # fmt: skip
"""Words before a parenthesis that do not call a function which can be replaced."""
BY_THE_DRIVER = frozenset({"pg_advisory_unlock_all"})
"""Functions that asyncpg calls without a schema when a connection returns to a caller's pool."""
SYNTAX_OPERATORS = {"nullif": "=", "in": "=", "distinct": "=", "like": "~~", "ilike": "~~*"}
"""Words for which PostgreSQL looks up an operator by its name."""
COMPARING = frozenset({"=", "<>", "<", ">", "<=", ">=", "~~", "~~*", "?", "?|"})
TYPES = (
    "smallint", "integer", "bigint", "double precision", "numeric", "text", "name", "boolean", "json",
    "jsonb",
    "timestamp with time zone", "timestamp without time zone", "interval", "oid", '"char"', "xid",
)  # fmt: skip
ELEMENTS = ("smallint", "integer", "bigint", "text", "timestamp with time zone", "double precision", "name")
DOMAINS = ("text", "json", "jsonb", "timestamptz", "float8", "regclass", "regprocedure", "name")
POLYMORPHIC = frozenset({
    '"any"', "anyelement", "anynonarray", "anyarray", "anycompatible", "anycompatiblearray",
    "anycompatiblenonarray",
})  # fmt: skip
_TOKEN = re.compile(
    r"--[^\n]*|'(?:[^']|'')*'|\{\w+\}|\$body\$|(?P<word>\w+)(?P<call>\s*\()?|(?P<operator>[-+*/<>=~!@#%^&|`?]+)"
)


class Used(NamedTuple):
    """The names of functions and operators in the package's SQL."""

    calls: frozenset[str]
    operators: frozenset[str]


def used_in(text: str) -> Used:
    """Collect the words before parentheses, and the operators, outside of comments and literals."""
    calls, operators = set(), set()
    text = re.sub(r"operator\(pg_catalog\.(\S+?)\)", r" \1 ", text)
    for token in _TOKEN.finditer(re.sub(r"\{([-+*/<>=~!@#%^&|`?]+)\}", r" \1 ", text)):
        if word := token["word"]:
            operators |= {SYNTAX_OPERATORS[word]} if word in SYNTAX_OPERATORS else set()
            calls |= {word} if token["call"] else set()
        elif token["operator"] and token["operator"] not in {"=>", "#"}:  # #variable_conflict
            operators.add(token["operator"])
    return Used(frozenset(calls), frozenset(operators))


def sql_files() -> list[Path]:
    return sorted(SQL.rglob("*.sql"))


def used() -> Used:
    """Return all names in the package's SQL."""
    found = [used_in(path.read_text()) for path in sql_files()]
    return Used(
        frozenset().union(*(one.calls for one in found)), frozenset().union(*(one.operators for one in found))
    )


class Planted(NamedTuple):
    """The names of the planted overloads."""

    functions: frozenset[str]
    operators: frozenset[str]
    signatures: list[str]


async def plant(db: asyncpg.Connection, names: Used) -> Planted:
    """Plant overloads as the session's role, which must be allowed to create in ``public``."""
    overloads = [*await _functions(db, names.calls - BY_THE_DRIVER), *await _operators(db, names.operators)]
    await db.execute("create sequence public.calls; grant all on public.calls to public")
    statements, signatures, known = [], list[str](), set[str]()
    for one in overloads:
        if one.key in known:
            continue
        known.add(one.key)
        signatures.append(one.key)
        statements.append(one.create(len(signatures)))
    statements += [
        f"create domain public.{name} as pg_catalog.{name} "
        "check (public.planted_check(value::pg_catalog.text))"
        for name in DOMAINS
    ]
    check = _Overload("function", "planted_check", ("text",), "boolean")
    signatures.append("a domain")
    await db.execute(check.create(len(signatures)))
    await db.execute(";\n".join(statements))
    return Planted(
        frozenset(one.name for one in overloads if one.kind != "operator"),
        frozenset(one.name for one in overloads if one.kind == "operator"),
        signatures,
    )


async def called(db: asyncpg.Connection, planted: Planted) -> str | None:
    """Return the overload that was called last, or None."""
    [(value, is_called)] = await db.fetch("select last_value, is_called from public.calls")
    return planted.signatures[value - 1] if is_called else None


class _Overload(NamedTuple):
    kind: str
    name: str
    arguments: tuple[str, ...]
    result: str
    returns_set: bool = False

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name}({', '.join(self.arguments)})"

    def create(self, number: int) -> str:
        """Return the statement. The body writes to a sequence, because a rollback does not undo that."""
        body = (
            f"begin perform pg_catalog.setval('public.calls', {number}); raise exception "
            f"'planted: % was called', {_literal(self.key)}; end"
        )
        arguments = ", ".join(map(_catalog, self.arguments))
        result = ("setof " if self.returns_set else "") + _catalog(self.result)
        name = f'public."{self.name}"'
        if self.kind == "function":
            return f"create function {name}({arguments}) returns {result} language plpgsql as $x${body}$x$"
        helper = f"public.planted_{number}"
        if self.kind == "operator":
            left, right = map(_catalog, self.arguments)
            return (
                f"create function {helper}({arguments}) returns {result} language plpgsql as $x${body}$x$;"
                f"create operator public.{self.name} "
                f"(leftarg = {left}, rightarg = {right}, function = {helper})"
            )
        state = ", ".join([result, *map(_catalog, self.arguments)])
        return (
            f"create function {helper}({state}) returns {result} language plpgsql as $x${body}$x$;"
            f"create aggregate {name}({arguments or '*'}) (sfunc = {helper}, stype = {result})"
        )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _catalog(type_: str) -> str:
    """The type under a name that no domain in ``public`` can take."""
    base = type_.removesuffix("[]")
    keyword = {
        "smallint",
        "integer",
        "bigint",
        "double precision",
        "numeric",
        "boolean",
        "interval",
        "record",
    }
    if base in keyword or base.startswith("timestamp"):
        return type_ if base != "record" else "pg_catalog.record"
    return f"pg_catalog.{type_}"


async def _functions(db: asyncpg.Connection, names: Iterable[str]) -> list[_Overload]:
    rows = await db.fetch(
        """
        select proname::text as name, prokind::text as kind, proretset, provariadic <> 0 as variadic,
          array(
            select format_type(type, null)
            from unnest(proargtypes::oid[]) with ordinality as a (type, place) order by place
          ) as arguments,
          format_type(prorettype, null) as result
        from pg_catalog.pg_proc where pronamespace = 'pg_catalog'::regnamespace and proname = any ($1::text[])
        """,
        list(names),
    )
    made = []
    for row in rows:
        kind = "aggregate" if row["kind"] == "a" else "function"
        arguments = tuple(row["arguments"])
        if row["variadic"] and arguments[-1] == '"any"':
            shapes: Iterable[tuple[str, ...]] = _spread(arguments[:-1])
        elif set(arguments) & POLYMORPHIC:
            shapes = (_concrete(arguments, element) for element in ELEMENTS)
        else:
            shapes = [arguments]
        for shape in [*shapes, *_better(arguments, kind)]:
            result = _result(row["result"], arguments, shape)
            if result is not None and _is_plain(shape):
                made.append(_Overload(kind, row["name"], shape, result, row["proretset"]))
    return made


def _spread(first: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield argument types for variadic functions, as the package's SQL calls them."""
    moment = "timestamp with time zone"
    values = ("text", "integer", "bigint", "double precision", moment)
    if first:  # concat_ws, format
        yield from ((*first, *["text"] * count) for count in range(1, 5))
        yield (*first, "regprocedure")
        return
    for one in values:
        yield ("text", one)
        yield from (("text", one, "text", two) for two in values)
    yield ("text", moment, "text", "text", "text", "double precision", "text", moment)


def _concrete(arguments: tuple[str, ...], element: str) -> tuple[str, ...]:
    return tuple(
        (f"{element}[]" if "array" in one and "nonarray" not in one else element)
        if one in POLYMORPHIC
        else one
        for one in arguments
    )


def _better(arguments: tuple[str, ...], kind: str) -> Iterator[tuple[str, ...]]:
    """Yield signatures with other types, which may match a call better than a conversion does."""
    if len(arguments) == 1:
        yield from ((one,) for one in (*TYPES, *(f"{element}[]" for element in ELEMENTS)))
    elif len(arguments) == 2 and kind == "aggregate":
        yield from product(["text"], TYPES)
    elif len(arguments) == 2:
        few = (
            "smallint",
            "integer",
            "bigint",
            "text",
            "name",
            "double precision",
            "timestamp with time zone",
        )
        yield from product((*few, *(f"{one}[]" for one in ("integer", "bigint", "text"))), few)


def _result(result: str, arguments: tuple[str, ...], shape: tuple[str, ...]) -> str | None:
    if result not in POLYMORPHIC:
        return result if result in {*TYPES, "record", "void"} or result.startswith("reg") else "text"
    element = next(
        (new.removesuffix("[]") for old, new in zip(arguments, shape, strict=False) if old in POLYMORPHIC),
        shape[0].removesuffix("[]") if shape else "text",
    )
    return f"{element}[]" if "array" in result and "nonarray" not in result else element


def _is_plain(shape: tuple[str, ...]) -> bool:
    known = {*TYPES, "void"}
    return all(one.removesuffix("[]") in known or one.startswith("reg") for one in shape)


async def _operators(db: asyncpg.Connection, names: Iterable[str]) -> list[_Overload]:
    rows = await db.fetch(
        """
        select oprname::text as name, format_type(oprleft, null) as "left",
          format_type(oprright, null) as "right", format_type(oprresult, null) as result
        from pg_catalog.pg_operator
        where oprnamespace = 'pg_catalog'::regnamespace and oprname = any ($1::text[]) and oprleft <> 0
        """,
        list(names),
    )
    exact = {(row["name"], row["left"], row["right"]): row["result"] for row in rows}
    arrays = [f"{one}[]" for one in ELEMENTS]
    pairs = [*product(TYPES, TYPES), *zip(arrays, arrays, strict=True), *product(["jsonb"], ["text[]"])]
    pairs += [*zip(arrays, ELEMENTS, strict=True), *zip(ELEMENTS, arrays, strict=True)]
    made = []
    for name in sorted({row["name"] for row in rows}):
        for left, right in pairs:
            array = next((one for one in (left, right) if one.endswith("[]")), None)
            guess = "boolean" if name in COMPARING else array if name == "||" and array else "text"
            guess = left if name in {"+", "-", "*", ">>", "&"} else guess
            made.append(_Overload("operator", name, (left, right), exact.get((name, left, right), guess)))
    return made
