"""What the live view shows, and what keys do to it. Nothing here knows of a database or of a keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Group
from rich.text import Text

from graphile_worker.cli import times
from graphile_worker.cli.live.tabs import TABS, Tab, arranged
from graphile_worker.cli.printing import STATES, as_json_text, clean_lines, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphile_worker.cli.live.snapshot import Snapshot
    from graphile_worker.job import Job

_AROUND = 6
_HELP = (
    "Tab other table  ↑↓ choose  s sort  o order  / filter  Enter look  t retry  c cancel  space stop  q quit"
)


class Wish(NamedTuple):
    """Something to be done outside of the view."""

    what: Literal["quit", "look", "retry", "cancel"]
    job_id: int = 0


class View:
    """The tables, and where somebody is in them."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._tab = 0
        self._orders = [(tab.sorted_by, tab.descending) for tab in TABS]
        self._cursor = 0
        self._filter = ""
        self._types = False
        self._asked: Wish | None = None
        self.snapshot: Snapshot | None = None
        self.detail: Job | None = None
        self.pause = 0.0
        """Seconds to the next look."""
        self.message = ""
        self.trouble = ""
        """Why the last look failed, if it did."""
        self.stands_still = False

    @property
    def _tab_shown(self) -> Tab:
        return TABS[self._tab]

    def _rows(self) -> list[object]:
        if self.snapshot is None:
            return []
        by, descending = self._orders[self._tab]
        tab = self._tab_shown
        return arranged(tab, tab.rows(self.snapshot), by=by, descending=descending, having=self._filter)

    def press(self, key: str) -> Wish | None:
        """Do what the key means; what cannot be done here is returned."""
        self.message = ""
        if self._types:
            self._type(key)
            return None
        if self._asked is not None:
            wish, self._asked = self._asked, None
            return wish if key in {"y", "Y"} else None
        if key == "q":
            return Wish("quit")
        if self.detail is not None and key in {"escape", "enter", "left"}:
            self.detail = None
        elif key in {"enter", "t", "c"}:
            return self._of_job(key)
        else:
            self._move(key)
        return None

    def _type(self, key: str) -> None:
        if key in {"enter", "escape"}:
            self._types = False
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
            case "home":
                self._cursor = 0
            case "s":
                self._orders[self._tab] = ((by + 1) % len(self._tab_shown.columns), descending)
            case "o":
                self._orders[self._tab] = (by, not descending)
            case "/":
                self._types, self._filter = True, ""
            case "escape":
                self._filter = ""
            case " ":
                self.stands_still = not self.stands_still

    def _of_job(self, key: str) -> Wish | None:
        job_id = self.detail.id if self.detail is not None else self._chosen_job()
        if job_id is None:
            self.message = "Choose a job first, in the table of those that run or of those that failed."
            return None
        if key == "enter":
            return Wish("look", job_id)
        self._asked = Wish("retry" if key == "t" else "cancel", job_id)
        return None

    def _chosen_job(self) -> int | None:
        rows, job_id = self._rows(), self._tab_shown.job_id
        if job_id is None or not rows:
            return None
        return job_id(rows[min(self._cursor, len(rows) - 1)])

    def render(self, height: int) -> RenderableType:
        """The screen, that many lines high."""
        room = max(1, height - _AROUND)
        body = self._table(room) if self.detail is None else self._details(self.detail, room)
        return Group(*self._head(), Text(), body, Text(), self._foot())

    def _head(self) -> list[Text]:
        seen = self.snapshot
        first = Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        if seen is None:
            return [first, Text("Looking…"), self._tabs()]
        looks = f"a look takes {seen.took * 1000:.0f} ms, the next comes after {self.pause:.0f} s"
        first.append(f"   {seen.at.astimezone():%H:%M:%S}, {looks}", style="not bold dim")
        second = Text(no_wrap=True, overflow="ellipsis")
        for state, colour in STATES.items():
            second.append(f"{getattr(seen.stats, state):,} ", style="bold").append(
                f"{state}   ", style=colour
            )
        if seen.stats.oldest_due is not None:
            second.append(f"oldest due {times.from_now(seen.stats.oldest_due)}   ")
        for what, rate in (("added", seen.added), ("done", seen.removed)):
            second.append(f"{what} {'…' if rate is None else f'{rate:,.1f}/s'}   ")
        return [first, second, self._tabs()]

    def _tabs(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        for place, tab in enumerate(TABS):
            text.append(
                f" {place + 1} {tab.title} ", style="reverse" if place == self._tab else "dim"
            ).append(" ")
        by, descending = self._orders[self._tab]
        text.append(
            f"  by {self._tab_shown.columns[by].title.lower()} {'↓' if descending else '↑'}", style="dim"
        )
        if self._filter or self._types:
            text.append(f"  with {self._filter!r}", style="yellow")
        return text

    def _table(self, room: int) -> RenderableType:
        rows = self._rows()
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        if not rows:
            return Text("" if self.snapshot is None else "Nothing", style="dim")
        room = max(1, room - 1)  # the headings
        start = max(0, min(self._cursor - room // 2, len(rows) - room))
        made = table(self._tab_shown.columns, rows[start : start + room])
        made.rows[self._cursor - start].style = "reverse"
        return made

    def _details(self, job: Job, room: int) -> Text:
        lines = [
            f"Job {job.id}, {job.task_identifier}: {job.state}, attempt {job.attempts} of {job.max_attempts}",
            f"run at {times.both(job.run_at)}, priority {job.priority}",
            f"queue {job.queue_name or 'none'}, key {job.key or 'none'}, worker {job.locked_by or 'none'}",
            f"payload {as_json_text(job.payload)}",
            *(job.last_error or "").splitlines(),
        ]
        shown = "\n".join(clean_lines(line) for line in lines[:room])
        return Text(shown, no_wrap=True, overflow="ellipsis")

    def _foot(self) -> Text:
        if self._types:
            text = f"Show what contains: {self._filter}▏ (Enter keeps it, Esc shows all)"
        elif self._asked is not None:
            what = (
                "Run job {} again, with all its attempts?"
                if self._asked.what == "retry"
                else "Cancel job {}?"
            )
            text = f"{what.format(self._asked.job_id)} y/n"
        else:
            text = (
                self.message
                or self.trouble
                or ("It stands still; space goes on. " if self.stands_still else "") + _HELP
            )
        style = "bold yellow" if self.message or self.trouble or self._asked or self._types else "dim"
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")
