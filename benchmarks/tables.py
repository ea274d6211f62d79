"""Tables and lists, for a terminal and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Table(NamedTuple):
    """The contents of a table."""

    header: list[str]
    rows: list[list[str]]
    left: frozenset[int]
    """The left-aligned columns. Figures are right-aligned."""


def plain(table: Table) -> str:
    """Format a table for a terminal."""
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
    """Format a table as Markdown."""
    marks = ["---" if place in table.left else "--:" for place in range(len(table.header))]
    lines = [table.header, marks, *table.rows]
    return "".join(f"| {' | '.join(map(safe, line))} |\n" for line in lines)


def safe(text: str) -> str:
    """Escape the text of a table cell or a list item."""
    return one_line(text).replace("|", r"\|").replace("<", "&lt;")


def bullets(lines: Iterable[str]) -> str:
    """Format a Markdown list."""
    return "".join(f"- {safe(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Replace line breaks with spaces."""
    return " ".join(text.split())


def duration(seconds: float) -> str:
    """Format a number of seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
