"""JSON that PostgreSQL accepts and Python cannot decode, or only with care."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    import asyncpg

DIGITS = "9" * 5000


def nested(depth: int, inside: str = "") -> str:
    return "[" * depth + inside + "]" * depth


TOO_DEEP = 3000 if sys.version_info < (3, 12) else 12_000
"""More levels than Python decodes, and not too many for PostgreSQL."""
UNDECODABLE = {
    "nested too deeply, with a number that is too large for a float": f"[1e999,{nested(TOO_DEEP)}]",
    "nested too deeply, with half of a surrogate pair": f'["\\ud800",{nested(TOO_DEEP)}]',
    "nested too deeply": nested(TOO_DEEP, "1"),
    "an integer of 5,000 digits": f'{{"n": {DIGITS}}}',
}
UNUSUAL = ["1e999", "-1e999", '"\\ud800"', '{"a": 1, "a": 2}', "\n[ 1 ,\r\n\t2 ]\n", '"\\u0000"', "null"]

_SPACE = st.text(" \t\r\n", max_size=3)
_STRING = st.one_of(
    st.sampled_from(["\\ud800", "\\udfff", "\\u0000", "\\ud83d\\ude00", "\\/", "\u202e", "x" * 100_000]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters='"\\'), max_size=20),
).map(lambda text: f'"{text}"')
_LEAF = st.one_of(
    _STRING,
    st.sampled_from(["null", "true", "1e999", "-1e-999", "0.1e+400", DIGITS, f"-{DIGITS}.{DIGITS}", "-0"]),
    st.integers().map(str),
)


def _inside(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.builds(
        "{}{}{}:{}{}".format, _SPACE, st.sampled_from(['"a"', '"a"', '"b"']), _SPACE, _SPACE, children
    )
    return st.one_of(
        st.builds("{}[{}]{}".format, _SPACE, st.lists(children, max_size=3).map(",".join), _SPACE),
        st.builds("{{{}{}}}".format, st.lists(member, max_size=3).map(",".join), _SPACE),
        st.builds(nested, st.sampled_from([400, 990, 1500, 3000]), children),
    )


RAW_JSON = st.recursive(_LEAF, _inside, max_leaves=5)
"""Text that PostgreSQL's type json accepts."""


async def add_raw(db: asyncpg.Connection, *payloads: str) -> None:
    for payload in payloads:
        await db.execute("select graphile_worker.add_job('odd', payload => $1::text::json)", payload)


def in_one_line(rows: list[asyncpg.Record]) -> list[tuple[int, str]]:
    """Return ids and payloads, with line breaks replaced by spaces as in an export."""
    return [(row["id"], row["payload"].replace("\n", " ").replace("\r", " ").strip()) for row in rows]
