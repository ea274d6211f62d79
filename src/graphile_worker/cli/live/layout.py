"""Layout of texts for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from graphile_worker.cli.printing import console, escape_lines

if TYPE_CHECKING:
    from collections.abc import Iterable


def pack_lines(parts: Iterable[Text], width: int, *, gap: int, max_lines: int) -> list[Text]:
    """Return the parts in at most `max_lines` lines, without breaking a part that fits a line.

    >>> [line.plain for line in pack_lines([Text("one"), Text("two"), Text("three")], 9, gap=2, max_lines=2)]
    ['one  two', 'three']
    """
    lines: list[Text] = []
    for part in parts:
        fits = bool(lines) and lines[-1].cell_len + gap + part.cell_len <= width
        if fits or len(lines) == max_lines:
            lines[-1].append(" " * gap).append_text(part)
        else:
            lines.append(Text(no_wrap=True, overflow="ellipsis").append_text(part))
    return lines


def wrap_lines(text: str, width: int, style: str = "") -> list[Text]:
    """Return a text in lines of at most this width, without control characters.

    >>> [line.plain for line in wrap_lines("how now brown cow", 9)]
    ['how now', 'brown cow']
    """
    lines = Text(escape_lines(text), style=style).wrap(console(), max(1, width), overflow="fold")
    for line in lines:
        line.rstrip()
    return list(lines)
