"""Tables and lists: for a terminal, and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Table(NamedTuple):
    """What stands in it."""

    header: list[str]
    rows: list[list[str]]
    left: frozenset[int]
    """The columns of words; figures stand to the right."""


def plain(table: Table) -> str:
    """For a terminal."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.header, ["─" * width for width in widths], *table.rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in table.left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(table: Table) -> str:
    """For a page."""
    marks = ["---" if place in table.left else "--:" for place in range(len(table.header))]
    lines = [table.header, marks, *table.rows]
    return "".join(f"| {' | '.join(map(safe, line))} |\n" for line in lines)


def safe(text: str) -> str:
    """For a cell, or a line of a list."""
    return one_line(text).replace("|", r"\|").replace("<", "&lt;")


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "".join(f"- {safe(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


def duration(seconds: float) -> str:
    """For people."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
