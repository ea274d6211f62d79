"""The screen of the live view and the meaning of keys, without access to a database or a keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Group
from rich.text import Text

from graphile_worker.cli import times
from graphile_worker.cli.live.layout import pack_lines, wrap_lines
from graphile_worker.cli.live.tabs import TABS, Tab, filter_and_sort
from graphile_worker.cli.printing import STATES, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphile_worker.cli.live.details import Details
    from graphile_worker.cli.live.snapshot import Snapshot

_MIN_HEIGHT_TO_WRAP, _MIN_HEIGHT_FOR_GAPS = 10, 16
# The keys to quit and go back come first, where they are never cut off.
_HELP = (
    "q quit", "Tab next table", "↑↓ select", "s sort", "o order", "/ filter", "Enter details", "t retry",
    "c cancel", "space pause",
)  # fmt: skip
_HELP_ON_DETAILS = ("q quit", "Esc back", "↑↓ scroll", "t retry", "c cancel", "space pause")


def _max_lines(height: int) -> int:
    """Return how many lines a part of the screen may take before it is cut."""
    return 1 if height < _MIN_HEIGHT_TO_WRAP else 2


class Action(NamedTuple):
    """A request of the user that needs the database, or ends the program."""

    name: Literal["quit", "show", "retry", "cancel"]
    job_id: int = 0


class View:
    """The tables, with the selected table and row, the order and the filter."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._tab = 0
        self._orders = [(tab.sorted_by, tab.descending) for tab in TABS]
        self._cursor = 0
        self._filter = ""
        self._is_typing = False
        self._unconfirmed: Action | None = None
        self.snapshot: Snapshot | None = None
        self.detail: Details | None = None
        self.pause = 0.0
        """Seconds between refreshes."""
        self.message = ""
        self.error = ""
        """The error of the last refresh, if it failed."""
        self.is_paused = False

    @property
    def _current_tab(self) -> Tab:
        return TABS[self._tab]

    def _rows(self) -> list[object]:
        if self.snapshot is None:
            return []
        by, descending = self._orders[self._tab]
        tab = self._current_tab
        return filter_and_sort(
            tab, tab.rows(self.snapshot), column_index=by, descending=descending, search=self._filter
        )

    def press(self, key: str) -> Action | None:
        """Handle a key. Return an action for the caller if the view cannot carry it out."""
        self.message = ""
        if self._is_typing:
            self._type(key)
            return None
        if self._unconfirmed is not None:
            action, self._unconfirmed = self._unconfirmed, None
            return action if key in {"y", "Y"} else None
        if key == "q":
            return Action("quit")
        if self.detail is not None and key in {"escape", "enter", "left"}:
            self.detail = None
        elif key in {"enter", "t", "c"}:
            return self._job_action(key)
        elif self.detail is None or not self.detail.move(key):
            self._move(key)
        return None

    def _type(self, key: str) -> None:
        if key in {"enter", "escape"}:
            self._is_typing = False
            self._filter = "" if key == "escape" else self._filter
        elif key == "backspace":
            self._filter = self._filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self._filter += key
        self._cursor = 0

    def _move(self, key: str) -> None:
        by, descending = self._orders[self._tab]
        match key:
            case "left" | "right":
                self._tab = (self._tab + (1 if key == "right" else -1)) % len(TABS)
                self._cursor, self.detail = 0, None
            case "1" | "2" | "3" | "4" | "5":
                self._tab, self._cursor, self.detail = int(key) - 1, 0, None
            case "up" | "k" | "down" | "j" | "page up" | "page down":
                step = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}[key]
                self._cursor = max(0, min(len(self._rows()) - 1, self._cursor + step))
            case "home" | "end":
                self._cursor = 0 if key == "home" else max(0, len(self._rows()) - 1)
            case "s":
                self._orders[self._tab] = ((by + 1) % len(self._current_tab.columns), descending)
            case "o":
                self._orders[self._tab] = (by, not descending)
            case "/":
                self._is_typing, self._filter = True, ""
            case "escape":
                self._filter = ""
            case " ":
                self.is_paused = not self.is_paused

    def _job_action(self, key: str) -> Action | None:
        job_id = self.detail.job.id if self.detail is not None else self._selected_job()
        if job_id is None:
            self.message = "Select a job first, in the table Running or Failures."
            return None
        if key == "enter":
            return Action("show", job_id)
        self._unconfirmed = Action("retry" if key == "t" else "cancel", job_id)
        return None

    def _selected_job(self) -> int | None:
        rows, job_id = self._rows(), self._current_tab.job_id
        if job_id is None or not rows:
            return None
        return job_id(rows[min(self._cursor, len(rows) - 1)])

    def render(self, width: int, height: int) -> RenderableType:
        """Return the screen. The footer is shown at any size, because it may ask for confirmation."""
        footer = self._footer(width, height)
        gap = [Text()] if height >= _MIN_HEIGHT_FOR_GAPS else []
        header = [*self._header(width, _max_lines(height)), *gap]
        header = header[: max(0, height - len(footer) - len(gap) - 1)]
        remaining = height - len(header) - len(footer) - len(gap)
        body: list[RenderableType] = []
        if remaining > 0:
            body = [self._table(remaining)]
            if self.detail is not None:
                body = [*self.detail.render(width, remaining)]
        return Group(*header, *body, *gap, *footer)

    def _header(self, width: int, max_lines: int) -> list[Text]:
        """Return the header, with at most `max_lines` lines for each of its parts."""
        snapshot = self.snapshot
        title = Text(self._title, style="bold")
        if snapshot is None:
            return [
                *pack_lines([title], width, gap=3, max_lines=1),
                Text("Loading…"),
                *self._tabs(width, max_lines),
            ]
        refresh = f"{snapshot.at.astimezone():%H:%M:%S}, "
        refresh += f"a refresh takes {snapshot.duration * 1000:.0f} ms, the next one in {self.pause:.0f} s"
        counts = [
            Text.assemble((f"{getattr(snapshot.stats, state):,} ", "bold"), (state, colour))
            for state, colour in STATES.items()
        ]
        if snapshot.stats.oldest_due is not None:
            counts.append(Text(f"oldest due {times.format_relative(snapshot.stats.oldest_due)}"))
        for label, rate in (("added", snapshot.added), ("done", snapshot.removed)):
            counts.append(Text(f"{label} {'…' if rate is None else f'{rate:,.1f}/s'}"))
        counts += [
            Text(f"limit {limit.name}: {limit.held}/{limit.concurrency}, {limit.waiting:,} wait")
            for limit in snapshot.limits
            if limit.is_full and limit.waiting
        ]
        if snapshot.pauses:
            paused = ", ".join(pause.subject for pause in snapshot.pauses)
            counts.insert(0, Text(f"paused: {paused}", style="bold yellow"))
        return [
            *pack_lines([title, Text(refresh, style="dim")], width, gap=3, max_lines=max_lines),
            *pack_lines(counts, width, gap=3, max_lines=max_lines),
            *self._tabs(width, max_lines),
        ]

    def _tabs(self, width: int, max_lines: int) -> list[Text]:
        parts = [
            Text(f" {index + 1} {tab.title} ", style="reverse" if index == self._tab else "dim")
            for index, tab in enumerate(TABS)
        ]
        by, descending = self._orders[self._tab]
        order = f"  by {self._current_tab.columns[by].title.lower()} {'↓' if descending else '↑'}"
        parts.append(Text(order, style="dim"))
        if self._filter or self._is_typing:
            parts.append(Text(f" containing {self._filter!r}", style="yellow"))
        return pack_lines(parts, width, gap=1, max_lines=max_lines)

    def _table(self, height: int) -> RenderableType:
        rows = self._rows()
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        if not rows:
            return Text("" if self.snapshot is None else "No rows", style="dim")
        has_headings = height > 1
        visible = height - has_headings
        start = max(0, min(self._cursor - visible // 2, len(rows) - visible))
        shown = table(self._current_tab.columns, rows[start : start + visible])
        shown.show_header = has_headings
        shown.rows[self._cursor - start].style = "reverse"
        return shown

    def _footer(self, width: int, height: int) -> list[Text]:
        if notice := self._notice():
            return wrap_lines(notice, width, "bold yellow")[: max(1, height // 2)]
        parts = [Text(part, style="dim") for part in (_HELP if self.detail is None else _HELP_ON_DETAILS)]
        if self.is_paused:
            parts.insert(0, Text("Paused: space resumes.", style="dim"))
        return pack_lines(parts, width, gap=2, max_lines=_max_lines(height))

    def _notice(self) -> str:
        """Return the message to show instead of the help for keys, if any."""
        if self._is_typing:
            return f"Filter: {self._filter}▏ (Enter applies, Esc shows all)"
        if self._unconfirmed is None:
            return self.message or self.error
        is_retry = self._unconfirmed.name == "retry"
        question = "Retry job {} now, with all its attempts?" if is_retry else "Cancel job {}?"
        return f"{question.format(self._unconfirmed.job_id)} y/n"
