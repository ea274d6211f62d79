"""Threads that a worker has abandoned, and the limit for them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphile_worker._base.logs import library_logger as logger

if TYPE_CHECKING:
    from collections.abc import Callable

_MIN_LIMIT = 4


class AbandonedThreads:
    """Counts the threads that still run after the timeouts of their jobs.

    Each of them keeps its memory and its task's resources until the process ends. So there is a limit: the
    worker's concurrency, and at least 4. Jobs of a task with that many abandoned threads are
    not claimed. A worker with that many is not live, because only a restart is sure to end them.

    Args:
        concurrency: The number of jobs that the worker runs at once.
    """

    def __init__(self, concurrency: int = 1) -> None:
        self.limit = max(concurrency, _MIN_LIMIT)
        self.total = 0
        """The number of abandoned threads. Any thread may read it."""
        self.exhausted: frozenset[str] = frozenset()
        """The tasks whose abandoned threads have reached the limit."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `exhausted` has changed."""
        self._by_task: Counter[str] = Counter()

    @property
    def too_many(self) -> bool:
        """Whether the abandoned threads of all tasks have reached the limit. Any thread may read it."""
        return self.total >= self.limit

    @property
    def reason(self) -> str:
        """A message with the number of abandoned threads per task."""
        counts = dict(self._by_task)  # a copy, because another thread may read this property
        tasks = ", ".join(f"{task} ({count})" for task, count in sorted(counts.items()) if count)
        return f"{self.total} threads still run after the timeouts of their jobs. Tasks: {tasks}."

    def add(self, task: str) -> None:
        """Count an abandoned thread of the task."""
        self._by_task[task] += 1
        self.total += 1
        self._update(task)
        if self.total == self.limit:
            logger.error(
                "%s This worker is no longer live. Restart it, and make these tasks check "
                "ctx.stop_requested. Jobs of a task with %d such threads are not claimed",
                self.reason,
                self.limit,
            )

    def remove(self, task: str) -> None:
        """Record that an abandoned thread of the task has ended."""
        self._by_task[task] -= 1
        self.total -= 1
        self._update(task)
        if self.total == self.limit - 1:
            logger.warning("Fewer than %d abandoned threads still run. This worker is live again", self.limit)

    def _update(self, task: str) -> None:
        is_exhausted = self._by_task[task] >= self.limit
        if is_exhausted != (task in self.exhausted):
            self.exhausted ^= {task}
            self.on_change()
