"""How many jobs there are, as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime


class TaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs of one task, or of all tasks, are in each state."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    failed: int = 0
    oldest_due: datetime | None = None
    """Since when the job that waits longest has been due."""

    @property
    def total(self) -> int:
        """Jobs in any state."""
        return self.ready + self.scheduled + self.running + self.failed

    @staticmethod
    def together(tasks: Collection[TaskStats]) -> TaskStats:
        """Of several tasks."""
        return TaskStats(
            ready=sum(task.ready for task in tasks),
            scheduled=sum(task.scheduled for task in tasks),
            running=sum(task.running for task in tasks),
            failed=sum(task.failed for task in tasks),
            oldest_due=min((task.oldest_due for task in tasks if task.oldest_due), default=None),
        )


class Stats(TaskStats, frozen=True, kw_only=True):
    """How many jobs there are, in all and by task."""

    tasks: dict[str, TaskStats]

    @classmethod
    def of_rows(cls, rows: Iterable[Any]) -> Self:
        """From what the database counted, a row a task."""
        tasks = {
            row["identifier"] or f"(unknown task {row['task_id']})": TaskStats(
                ready=row["ready"],
                scheduled=row["scheduled"],
                running=row["running"],
                failed=row["failed"],
                oldest_due=row["oldest_due"],
            )
            for row in rows
        }
        return cls(tasks=tasks, **msgspec.structs.asdict(TaskStats.together(tasks.values())))


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """A serial queue, and what waits in it."""

    queue_name: str
    locked_by: str | None = None
    locked_at: datetime | None = None
    jobs: int = 0
    """In any state."""
    ready: int = 0
    failed: int = 0
    oldest_due: datetime | None = None
    """Since when the job that waits longest has been due."""


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that somebody has locked, without its payload."""

    id: int
    task_identifier: str
    queue_name: str | None
    locked_by: str
    locked_at: datetime


class FailedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that failed, at the last attempt or for good."""

    id: int
    task_identifier: str
    attempts: int
    max_attempts: int
    failed_at: datetime | None
    """When it failed, roughly; None if its row does not tell."""
    written_before: int
    """How many transactions ago its row was written: the fewer, the later it failed."""
    last_error: str
    """Its beginning."""


class Writes(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs were ever added to a table, and removed from it; roughly, and by when."""

    added: int
    removed: int
    at: float
