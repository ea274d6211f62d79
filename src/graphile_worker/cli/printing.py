"""What verbs print: tables on a terminal, lines with tabs into a pipe, and JSON if asked for.

JSON is always one document: an array for lists, an object for one thing; each row is a line of its own, and
is printed when it is known. Into a pipe goes everything, without headings and colours, and a row is one line.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from graphile_worker.cli import times
from graphile_worker.payload import encode_stored
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")
# What a terminal might take for a command; texts of jobs are anybody's.
# The second line is what changes the direction of the text around it, and so what people read.
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
    short: Callable[[T], object] | None = None
    """For a terminal, where the value is not what people want to see."""
    right: bool = False
    style: Callable[[T], str] | None = None
    least: int | None = None
    """To how many characters it may be cut where the terminal is narrow; by default it is not."""
    spare: int = 0
    """How soon it is left out where the terminal is narrower still; 0 is never."""
    folds: bool = False
    """Whether it takes several lines then, and is not cut."""


def cleaned_up(jobs: int, identifiers: int, queues: int) -> str:
    """What a cleanup has removed.

    >>> cleaned_up(0, 2, 1)
    'Removed 0 jobs, 2 task identifiers and 1 queue.'
    """
    names = counted(identifiers, "task identifier")
    return f"Removed {counted(jobs, 'job')}, {names} and {counted(queues, 'queue')}."


def on_terminal() -> bool:
    """Whether a person reads it."""
    return sys.stdout.isatty()


def console(*, errors: bool = False) -> Console:
    """For tables, and for what goes beside them."""
    from rich.console import Console  # noqa: PLC0415

    return Console(stderr=errors, highlight=False, soft_wrap=False)


def clean(value: object) -> str:
    r"""A text that does nothing to a terminal, in one line.

    >>> clean("a\x1b[2J\tb\nc")
    'a\\x1b[2J\\tb\\nc'
    """
    return clean_lines(value).translate(_BREAKS)


def clean_lines(value: object) -> str:
    """The same, but lines stay lines."""
    text = "" if value is None else str(value)
    if text.isascii() and text.isprintable():
        return text  # nearly always, and much faster
    text = text.encode(errors="backslashreplace").decode()
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def shortened(text: str, most: int = 60) -> str:
    """The beginning of a text.

    >>> shortened("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def as_json_text(value: object) -> str:
    """The JSON of a value; what a terminal might take for a command is escaped in it anyway."""
    return encode_stored(value).decode()


class Rows(Generic[T]):
    """Prints rows, as many at a time as there are."""

    def __init__(
        self, columns: list[Column[T]], as_object: Callable[[T], Mapping[str, object]], *, as_json: bool
    ) -> None:
        self._columns = columns
        self._as_object = as_object
        self._as_json = as_json
        self.count = 0

    def add(self, rows: Iterable[T]) -> None:
        """Print these."""
        rows = list(rows)
        if self._as_json:
            if rows:
                text = ",\n ".join(as_json_text(self._as_object(row)) for row in rows)
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
            click.echo("\n".join(lines))  # at once, for each call writes through to the system

    def end(self) -> None:
        """Print what ends the document."""
        if self._as_json:
            click.echo("]" if self.count else "[]")


@contextmanager
def printed_rows(
    columns: list[Column[T]], as_object: Callable[[T], Mapping[str, object]], *, as_json: bool
) -> Iterator[Rows[T]]:
    """Something to add rows to."""
    rows = Rows(columns, as_object, as_json=as_json)
    yield rows
    rows.end()


def table(columns: list[Column[T]], rows: Iterable[T]) -> Table:
    """A table for a terminal, as wide as that."""
    from rich.cells import cell_len  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    rows = list(rows)
    cells = [[clean((column.short or column.value)(row)) for row in rows] for column in columns]
    natural = [
        max(map(cell_len, [column.title, *texts])) for column, texts in zip(columns, cells, strict=True)
    ]
    widths = fitted(columns, natural, console().width)
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, _GAP, 0, 0))
    for place, width in widths.items():
        column = columns[place]
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            overflow="fold" if column.folds else "ellipsis",
            no_wrap=not column.folds,
            width=width,
        )
    for number, row in enumerate(rows):
        styles = [columns[place].style for place in widths]
        texts = [cells[place][number] for place in widths]
        made.add_row(
            *(Text(text, style(row) if style else "") for text, style in zip(texts, styles, strict=True))
        )
    return made


def fitted(columns: Sequence[Column[Any]], natural: Sequence[int], width: int) -> dict[int, int]:
    """Which columns to show, by their places, and how wide each: what people need least goes first."""
    least = [
        size if column.least is None else min(size, max(column.least, len(column.title)))
        for column, size in zip(columns, natural, strict=True)
    ]
    shown = list(range(len(columns)))

    def needed() -> int:
        return sum(least[place] for place in shown) + _GAP * (len(shown) - 1)

    while needed() > width and any(columns[place].spare for place in shown):
        shown.remove(max(shown, key=lambda place: columns[place].spare))
    found = {place: least[place] for place in shown}
    rest = max(0, width - needed())
    for place in shown:
        more = min(rest, natural[place] - found[place])
        found[place], rest = found[place] + more, rest - more
    return found


def _plain(value: object) -> str:
    return times.iso(value) if isinstance(value, datetime) else clean(value)


def print_fields(fields: Mapping[str, Any]) -> None:
    """One thing: a line a field; texts of several lines are indented."""
    width = max(map(len, fields))
    for name, value in fields.items():
        shown = value
        if isinstance(value, datetime):
            shown = times.both(value) if on_terminal() else times.iso(value)
        lines = clean_lines(shown).split("\n")
        title = click.style(f"{name:{width}}", bold=True)
        click.echo(f"{title}  " + f"\n{'':{width}}  ".join(lines))


def print_object(value: Mapping[str, object]) -> None:
    """One thing, as JSON."""
    click.echo(as_json_text(value))


def tell(sentence: str) -> None:
    """Something beside what is printed; scripts that read the output do not see it."""
    click.echo(clean_lines(sentence), err=True)
