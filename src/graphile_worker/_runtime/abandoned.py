"""Threads that a worker goes on without, and how many of them it puts up with."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphile_worker.logs import library_logger as logger

if TYPE_CHECKING:
    from collections.abc import Callable

_FEWEST = 4


class AbandonedThreads:
    """Counts the threads that still run although the timeouts of their jobs are over.

    Each of them keeps its memory, and whatever else its task holds, until the process ends. So there is a
    limit: the worker's concurrency, and at least 4. A task with that many claims no jobs. A worker with that
    many is not live, because only a restart is sure to end them.

    Args:
        concurrency: How many jobs the worker runs at once.
    """

    def __init__(self, concurrency: int = 1) -> None:
        self.limit = max(concurrency, _FEWEST)
        self.total = 0
        """How many there are. Any thread may read it."""
        self.exhausted: frozenset[str] = frozenset()
        """The tasks that have as many as the limit."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the exhausted tasks have changed."""
        self._by_task: Counter[str] = Counter()

    @property
    def too_many(self) -> bool:
        """Whether there are as many as the limit, all tasks together. Any thread may ask."""
        return self.total >= self.limit

    @property
    def reason(self) -> str:
        """What is wrong, for people."""
        counts = dict(self._by_task)  # another thread may ask
        tasks = ", ".join(f"{task} ({count})" for task, count in sorted(counts.items()) if count)
        return f"{self.total} threads still run after the timeouts of their jobs, of the tasks: {tasks}."

    def add(self, task: str) -> None:
        """Count a thread of that task."""
        self._by_task[task] += 1
        self.total += 1
        self._update(task)
        if self.total == self.limit:
            logger.error(
                "%s This worker is not live any more: restart it, and let these tasks look at ctx.stopping. "
                "No more jobs are claimed of a task that has %d",
                *(self.reason, self.limit),
            )

    def remove(self, task: str) -> None:
        """Count one less: a thread of that task has ended after all."""
        self._by_task[task] -= 1
        self.total -= 1
        self._update(task)
        if self.total == self.limit - 1:
            logger.warning("Fewer than %d abandoned threads are left: this worker is live again", self.limit)

    def _update(self, task: str) -> None:
        is_exhausted = self._by_task[task] >= self.limit
        if is_exhausted != (task in self.exhausted):
            self.exhausted ^= {task}
            self.on_change()
