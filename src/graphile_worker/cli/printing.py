"""Output of verbs: tables on a terminal, lines with tabs into a pipe, and JSON with ``--json``.

JSON output is always one document: an array for lists, and an object otherwise. Each element is on its own
line, printed as soon as it is known. Output into a pipe is complete and has neither headings nor colours;
each row is one line.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from graphile_worker._base.payload import encode_stored
from graphile_worker._base.text import pluralize
from graphile_worker.cli import times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from graphile_worker.job import Progress

T = TypeVar("T")
# Characters that a terminal may interpret as commands; any client can put them into a job's texts.
# The second line has those that change the direction of the surrounding text, and so what people read.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029"
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_BREAKS = {ord("\t"): "\\t", ord("\n"): "\\n"}
_GAP = 2
STATES = {"ready": "green", "scheduled": "cyan", "running": "yellow", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class Column(Generic[T]):
    """A column of a table."""

    title: str
    value: Callable[[T], object]
    terminal_value: Callable[[T], object] | None = None
    """The value on a terminal, if it differs."""
    align_right: bool = False
    style: Callable[[T], str] | None = None
    min_width: int | None = None
    """Number of characters to which a narrow terminal may cut the column; None if it may not."""
    drop_order: int = 0
    """Order in which columns are dropped if the terminal is even narrower, highest first; 0 is never."""
    wraps: bool = False
    """Whether the column wraps instead of being cut."""


def describe_progress(progress: Progress) -> str:
    """Return the progress of a job in one line.

    >>> from graphile_worker.job import Progress
    >>> describe_progress(Progress(value=0.4, message="page 4 of 10", at=datetime.max))
    '40 % page 4 of 10'
    """
    percent = "" if progress.value is None else f"{math.floor(progress.value * 100)} %"
    return " ".join(part for part in (percent, progress.message) if part)


def cleanup_summary(jobs: int, identifiers: int, queues: int) -> str:
    """Return a sentence about what a cleanup removed.

    >>> cleanup_summary(0, 2, 1)
    'Removed 0 jobs, 2 task identifiers and 1 queue.'
    """
    names = pluralize(identifiers, "task identifier")
    return f"Removed {pluralize(jobs, 'job')}, {names} and {pluralize(queues, 'queue')}."


def on_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def console(*, errors: bool = False) -> Console:
    """Return a console for tables, or for messages about them if `errors`."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=errors, highlight=False, soft_wrap=False)


def escape(value: object) -> str:
    r"""Return a value as one line of text without control characters.

    >>> escape("a\x1b[2J\tb\nc")
    'a\\x1b[2J\\tb\\nc'
    """
    return escape_lines(value).translate(_BREAKS)


def escape_lines(value: object) -> str:
    """Return a value as text without control characters, except line breaks."""
    text = "" if value is None else str(value)
    if text.isascii() and text.isprintable():
        return text  # the most frequent case, and much faster
    text = text.encode(errors="backslashreplace").decode()
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def truncate(text: str, max_length: int = 60) -> str:
    """Return the beginning of a text.

    >>> truncate("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def to_json(value: object) -> str:
    """Return a value as JSON, which escapes control characters."""
    return encode_stored(value).decode()


class RowPrinter(Generic[T]):
    """Prints rows as they become known."""

    def __init__(
        self, columns: list[Column[T]], as_object: Callable[[T], Mapping[str, object]], *, as_json: bool
    ) -> None:
        self._columns = columns
        self._as_object = as_object
        self._as_json = as_json
        self.count = 0

    def add(self, rows: Iterable[T]) -> None:
        """Print some rows."""
        rows = list(rows)
        if self._as_json:
            if rows:
                text = ",\n ".join(to_json(self._as_object(row)) for row in rows)
                click.echo((",\n " if self.count else "[") + text, nl=False)
            self.count += len(rows)
            return
        self.count += len(rows)
        if on_terminal():
            if rows:
                console().print(table(self._columns, rows))
            return
        lines = ["\t".join(_plain(column.value(row)) for column in self._columns) for row in rows]
        if lines:
            click.echo("\n".join(lines))  # in one call, because each call is a write to the system

    def end(self) -> None:
        """Print the end of the document."""
        if self._as_json:
            click.echo("]" if self.count else "[]")


@contextmanager
def row_printer(
    columns: list[Column[T]], as_object: Callable[[T], Mapping[str, object]], *, as_json: bool
) -> Iterator[RowPrinter[T]]:
    """Yield a printer for rows, and end the document after the block."""
    rows = RowPrinter(columns, as_object, as_json=as_json)
    yield rows
    rows.end()


def table(columns: list[Column[T]], rows: Iterable[T]) -> Table:
    """Return a table that fits the terminal."""
    from rich.cells import cell_len  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    rows = list(rows)
    cells = [[escape((column.terminal_value or column.value)(row)) for row in rows] for column in columns]
    natural = [
        max(map(cell_len, [column.title, *texts])) for column, texts in zip(columns, cells, strict=True)
    ]
    widths = fit_columns(columns, natural, console().width)
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, _GAP, 0, 0))
    for index, width in widths.items():
        column = columns[index]
        made.add_column(
            column.title,
            justify="right" if column.align_right else "left",
            overflow="fold" if column.wraps else "ellipsis",
            no_wrap=not column.wraps,
            width=width,
        )
    for number, row in enumerate(rows):
        styles = [columns[index].style for index in widths]
        texts = [cells[index][number] for index in widths]
        made.add_row(
            *(Text(text, style(row) if style else "") for text, style in zip(texts, styles, strict=True))
        )
    return made


def fit_columns(columns: Sequence[Column[Any]], natural_widths: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column to show, by its index. Columns are dropped by their `drop_order`."""
    minimum = [
        natural if column.min_width is None else min(natural, max(column.min_width, len(column.title)))
        for column, natural in zip(columns, natural_widths, strict=True)
    ]
    shown = list(range(len(columns)))

    def needed() -> int:
        return sum(minimum[index] for index in shown) + _GAP * (len(shown) - 1)

    while needed() > width and any(columns[index].drop_order for index in shown):
        shown.remove(max(shown, key=lambda index: columns[index].drop_order))
    widths = {index: minimum[index] for index in shown}
    spare = max(0, width - needed())
    for index in shown:
        more = min(spare, natural_widths[index] - widths[index])
        widths[index], spare = widths[index] + more, spare - more
    return widths


def _plain(value: object) -> str:
    return times.format_iso(value) if isinstance(value, datetime) else escape(value)


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print one object: a line for each field, with further lines of a text indented."""
    width = max(map(len, fields))
    for name, value in fields.items():
        shown = value
        if isinstance(value, datetime):
            shown = times.format_time(value) if on_terminal() else times.format_iso(value)
        lines = escape_lines(shown).split("\n")
        title = click.style(f"{name:{width}}", bold=True)
        click.echo(f"{title}  " + f"\n{'':{width}}  ".join(lines))


def print_object(value: Mapping[str, object]) -> None:
    """Print one object as JSON."""
    click.echo(to_json(value))


def print_note(sentence: str) -> None:
    """Print a sentence to standard error, apart from the output that scripts read."""
    click.echo(escape_lines(sentence), err=True)
