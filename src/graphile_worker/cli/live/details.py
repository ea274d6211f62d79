"""All of one job, as much of it as there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from graphile_worker.cli import times
from graphile_worker.cli.live.layout import wrapped
from graphile_worker.cli.printing import as_json_text, shortened
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from graphile_worker.job import Job

_MOST = 20_000
"""Characters of a payload or an error; for all of it there is ``graphile-worker show``."""
_PAGE = 10


@dataclass
class Details:
    """One job, and how far down somebody has read."""

    job: Job
    is_gone: bool = False
    """Whether it is not there any more, and this is how it last was."""
    _top: int = 0

    def move(self, key: str) -> bool:
        """Go up or down, if that is what the key means."""
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -_PAGE, "page down": _PAGE}
        if key in {"home", "end"}:
            self._top = 0 if key == "home" else 2 * _MOST
        elif key in steps:
            self._top += steps[key]
        else:
            return False
        return True

    def render(self, width: int, room: int) -> list[Text]:
        """What is to be seen of it, in so many lines at most."""
        lines = [line for text in self._texts() for line in wrapped(text, width)]
        self._top = max(0, min(self._top, len(lines) - room))
        below = len(lines) - self._top - room
        if below <= 0 or room == 1:
            return lines[self._top : self._top + room]
        more = Text(f"↓ {counted(below + 1, 'more line')}", style="dim", no_wrap=True, overflow="ellipsis")
        return [*lines[self._top : self._top + room - 1], more]

    def _texts(self) -> list[str]:
        job = self.job
        return [
            *(["It is gone: completed, or removed. So it was:"] if self.is_gone else []),
            f"Job {job.id}, {job.task_identifier}: {job.state}, attempt {job.attempts} of {job.max_attempts}",
            f"run at {times.both(job.run_at)}, priority {job.priority}",
            f"queue {job.queue_name or 'none'}, key {job.key or 'none'}, worker {job.locked_by or 'none'}",
            f"payload {shortened(as_json_text(job.payload), _MOST)}",
            *shortened(job.last_error or "", _MOST).split("\n"),
        ]
