"""Texts that fit the terminal: in few lines, or in as many as they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from graphile_worker.cli.printing import clean_lines, console

if TYPE_CHECKING:
    from collections.abc import Iterable


def packed(parts: Iterable[Text], width: int, *, gap: int, most: int) -> list[Text]:
    """The parts one after the other, in so many lines at most; none is broken that fits a line.

    >>> [line.plain for line in packed([Text("one"), Text("two"), Text("three")], 9, gap=2, most=2)]
    ['one  two', 'three']
    """
    lines: list[Text] = []
    for part in parts:
        fits = bool(lines) and lines[-1].cell_len + gap + part.cell_len <= width
        if fits or len(lines) == most:
            lines[-1].append(" " * gap).append_text(part)
        else:
            lines.append(Text(no_wrap=True, overflow="ellipsis").append_text(part))
    return lines


def wrapped(text: str, width: int, style: str = "") -> list[Text]:
    """All of a text, in lines that are no wider; it does nothing else to the terminal.

    >>> [line.plain for line in wrapped("how now brown cow", 9)]
    ['how now', 'brown cow']
    """
    lines = Text(clean_lines(text), style=style).wrap(console(), max(1, width), overflow="fold")
    for line in lines:
        line.rstrip()
    return list(lines)
