"""What the live view shows, and what keys do to it. Nothing here knows of a database or of a keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Group
from rich.text import Text

from graphile_worker.cli import times
from graphile_worker.cli.live.layout import packed, wrapped
from graphile_worker.cli.live.tabs import TABS, Tab, arranged
from graphile_worker.cli.printing import STATES, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from graphile_worker.cli.live.details import Details
    from graphile_worker.cli.live.snapshot import Snapshot

_LOW, _ROOMY = 10, 16
"""With fewer lines than that nothing is folded; and the parts are not set apart."""
# What leads out stands first, where it is never cut.
_HELP = (
    *("q quit", "Tab other table", "↑↓ choose", "s sort", "o order", "/ filter", "Enter look", "t retry"),
    *("c cancel", "space stop"),
)
_HELP_ON_DETAILS = ("q quit", "Esc back", "↑↓ scroll", "t retry", "c cancel", "space stop")


def _folds(height: int) -> int:
    """How many lines a part may take that could be cut."""
    return 1 if height < _LOW else 2


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
        self.detail: Details | None = None
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
        elif self.detail is None or not self.detail.move(key):
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
            case "home" | "end":
                self._cursor = 0 if key == "home" else max(0, len(self._rows()) - 1)
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
        job_id = self.detail.job.id if self.detail is not None else self._chosen_job()
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

    def render(self, width: int, height: int) -> RenderableType:
        """The screen. Whatever its size, the foot is on it, for that may ask something."""
        foot = self._foot(width, height)
        gap = [Text()] if height >= _ROOMY else []
        head = [*self._head(width, _folds(height)), *gap][: max(0, height - len(foot) - len(gap) - 1)]
        room = height - len(head) - len(foot) - len(gap)
        body: list[RenderableType] = []
        if room > 0:
            body = [self._table(room)] if self.detail is None else [*self.detail.render(width, room)]
        return Group(*head, *body, *gap, *foot)

    def _head(self, width: int, most: int) -> list[Text]:
        """Each of its parts in so many lines at most."""
        seen = self.snapshot
        title = Text(self._title, style="bold")
        if seen is None:
            return [*packed([title], width, gap=3, most=1), Text("Looking…"), *self._tabs(width, most)]
        looks = f"a look takes {seen.took * 1000:.0f} ms, the next comes after {self.pause:.0f} s"
        looks = f"{seen.at.astimezone():%H:%M:%S}, {looks}"
        counts = [
            Text.assemble((f"{getattr(seen.stats, state):,} ", "bold"), (state, colour))
            for state, colour in STATES.items()
        ]
        if seen.stats.oldest_due is not None:
            counts.append(Text(f"oldest due {times.from_now(seen.stats.oldest_due)}"))
        for what, rate in (("added", seen.added), ("done", seen.removed)):
            counts.append(Text(f"{what} {'…' if rate is None else f'{rate:,.1f}/s'}"))
        return [
            *packed([title, Text(looks, style="dim")], width, gap=3, most=most),
            *packed(counts, width, gap=3, most=most),
            *self._tabs(width, most),
        ]

    def _tabs(self, width: int, most: int) -> list[Text]:
        parts = [
            Text(f" {place + 1} {tab.title} ", style="reverse" if place == self._tab else "dim")
            for place, tab in enumerate(TABS)
        ]
        by, descending = self._orders[self._tab]
        order = f"  by {self._tab_shown.columns[by].title.lower()} {'↓' if descending else '↑'}"
        parts.append(Text(order, style="dim"))
        if self._filter or self._types:
            parts.append(Text(f" with {self._filter!r}", style="yellow"))
        return packed(parts, width, gap=1, most=most)

    def _table(self, room: int) -> RenderableType:
        rows = self._rows()
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        if not rows:
            return Text("" if self.snapshot is None else "Nothing", style="dim")
        headings = 1 if room > 1 else 0
        room -= headings
        start = max(0, min(self._cursor - room // 2, len(rows) - room))
        made = table(self._tab_shown.columns, rows[start : start + room])
        made.show_header = bool(headings)
        made.rows[self._cursor - start].style = "reverse"
        return made

    def _foot(self, width: int, height: int) -> list[Text]:
        if notice := self._notice():
            return wrapped(notice, width, "bold yellow")[: max(1, height // 2)]
        parts = [Text(part, style="dim") for part in (_HELP if self.detail is None else _HELP_ON_DETAILS)]
        if self.stands_still:
            parts.insert(0, Text("It stands still; space goes on.", style="dim"))
        return packed(parts, width, gap=2, most=_folds(height))

    def _notice(self) -> str:
        """What is to be said instead of what keys do."""
        if self._types:
            return f"Show what contains: {self._filter}▏ (Enter keeps it, Esc shows all)"
        if self._asked is None:
            return self.message or self.trouble
        again = self._asked.what == "retry"
        what = "Run job {} again, with all its attempts?" if again else "Cancel job {}?"
        return f"{what.format(self._asked.job_id)} y/n"
