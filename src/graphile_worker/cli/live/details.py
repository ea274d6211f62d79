"""The view of one job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from graphile_worker._base.text import pluralize
from graphile_worker.cli import times
from graphile_worker.cli.live.layout import wrap_lines
from graphile_worker.cli.printing import describe_progress, to_json, truncate

if TYPE_CHECKING:
    from graphile_worker.job import Job, Progress

_MAX_LENGTH = 20_000
"""Characters of a payload or an error to show; ``graphile-worker show`` prints all of it."""
_PAGE_LINES = 10


@dataclass
class Details:
    """One job, and the scroll position."""

    job: Job
    progress: Progress | None = None
    """What its task has reported last."""
    is_gone: bool = False
    """Whether the job no longer exists, so that this is its last known state."""
    _top: int = 0

    def move(self, key: str) -> bool:
        """Scroll if the key is for scrolling, and return whether it is."""
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -_PAGE_LINES, "page down": _PAGE_LINES}
        if key in {"home", "end"}:
            self._top = 0 if key == "home" else 2 * _MAX_LENGTH
        elif key in steps:
            self._top += steps[key]
        else:
            return False
        return True

    def render(self, width: int, height: int) -> list[Text]:
        """Return the visible part, in at most `height` lines."""
        lines = [line for text in self._texts() for line in wrap_lines(text, width)]
        self._top = max(0, min(self._top, len(lines) - height))
        below = len(lines) - self._top - height
        if below <= 0 or height == 1:
            return lines[self._top : self._top + height]
        more = Text(f"↓ {pluralize(below + 1, 'more line')}", style="dim", no_wrap=True, overflow="ellipsis")
        return [*lines[self._top : self._top + height - 1], more]

    def _texts(self) -> list[str]:
        job = self.job
        return [
            *(
                ["This job no longer exists: it was completed or removed. Its last state:"]
                if self.is_gone
                else []
            ),
            f"Job {job.id}, {job.task_identifier}: {job.state}, attempt {job.attempts} of {job.max_attempts}",
            f"run at {times.format_time(job.run_at)}, priority {job.priority}",
            f"queue {job.queue_name or 'none'}, key {job.key or 'none'}, worker {job.locked_by or 'none'}",
            *(
                [f"progress {truncate(describe_progress(self.progress), _MAX_LENGTH)}"]
                if self.progress is not None
                else []
            ),
            f"payload {truncate(to_json(job.payload), _MAX_LENGTH)}",
            *([f"failed {times.format_time(job.failed_at)}"] if job.failed_at is not None else []),
            *([f"error {job.error_type}"] if job.error_type else []),
            *truncate(job.last_error or "", _MAX_LENGTH).split("\n"),
            *(truncate(job.traceback, _MAX_LENGTH).split("\n") if job.traceback else []),
        ]
