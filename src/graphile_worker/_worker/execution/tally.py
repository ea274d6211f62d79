"""`Tally`: counts what a worker's jobs did, by minute and task, until the statistics service writes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from graphile_worker._base.histogram import LAST, SQUARED, trimmed
from graphile_worker.outcome import Cancelled, Completed, Failed, Interrupted, Snoozed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker._worker.execution.job_events import JobRun
    from graphile_worker.outcome import Outcome

_MINUTE = timedelta(minutes=1)
_NEVER = datetime.max.replace(tzinfo=UTC)
_BITS = 128
"""More than the square of any duration has, so that counting needs no comparison."""
_EXACT = 1024
"""Successful jobs of a task in a minute whose times are all counted."""
_SAMPLED = 8
"""Of further jobs, the times of one in this many are counted, with this weight. It is a power of two."""
_OTHERS: dict[str, type[Outcome]] = {
    "failed": Failed,
    "snoozed": Snoozed,
    "cancelled": Cancelled,
    "interrupted": Interrupted,
}


class _Counts:
    """The counts of one task in one minute."""

    __slots__ = ("done", "others", "run_seconds", "runs", "wait_seconds", "waits")

    def __init__(self) -> None:
        self.done = 0
        self.others: dict[type[Outcome], int] = dict.fromkeys(_OTHERS.values(), 0)
        self.run_seconds = self.wait_seconds = 0.0
        self.runs, self.waits = [0] * _BITS, [0] * _BITS

    def as_row(self, minute: datetime, task: str) -> dict[str, Any]:
        return {
            "at": minute.timestamp(),
            "task": task,
            "done": self.done,
            **{name: self.others[kind] for name, kind in _OTHERS.items()},
            "run_seconds": self.run_seconds,
            "wait_seconds": self.wait_seconds,
            "runs": _histogram(self.runs),
            "waits": _histogram(self.waits),
        }


class Tally:
    """Counts recorded outcomes.

    An outcome belongs to the minute in which the worker learned that it is recorded, by the database's clock.

    Args:
        database_now: Returns an estimate of the database's time.
        now: Returns the time of the queue's clock, with which jobs become due.
    """

    def __init__(self, database_now: Callable[[], datetime], now: Callable[[], datetime]) -> None:
        self._database_now = database_now
        self._now = now
        self._minutes: dict[datetime, dict[str, _Counts]] = {}
        self._tasks: dict[str, _Counts] = {}
        self._begins = self._ends = _NEVER  # of the current minute

    def __bool__(self) -> bool:
        """Return whether there is something to write."""
        return bool(self._minutes)

    def add(self, runs: Iterable[JobRun]) -> None:
        """Count runs whose outcomes are recorded.

        This is the only code of the statistics that runs for each job. Outcomes are counted exactly. Run and
        wait times cost more, so of a task with very many jobs only some are counted.
        """
        database_now = self._database_now()
        if not self._begins <= database_now < self._ends:
            self._begin_minute(database_now)
        now, at, tasks = self._now(), monotonic(), self._tasks
        for run in runs:
            job, weight = run.claimed.job, 1
            try:
                counts = tasks[job.task_identifier]
            except KeyError:
                counts = tasks[job.task_identifier] = _Counts()
            if run.outcome is Completed:
                counts.done = done = counts.done + 1
                if done > _EXACT:
                    if done & _SAMPLED - 1:
                        continue
                    weight = _SAMPLED
            else:
                counts.others[run.outcome] += 1  # type: ignore[index]  # the caller knows that it is set
            duration = run.duration
            counts.run_seconds += duration * weight
            counts.runs[int(duration * duration * SQUARED).bit_length()] += weight
            due = max(job.created_at, job.run_at)
            wait = (now - due).total_seconds() - (at - run.since)
            if wait > 0:
                counts.wait_seconds += wait * weight
                counts.waits[int(wait * wait * SQUARED).bit_length()] += weight
            else:
                counts.waits[0] += weight

    def _begin_minute(self, now: datetime) -> None:
        # After a failover, the database's clock may go back to a minute that is not written yet.
        self._begins = now.replace(second=0, microsecond=0)
        self._ends = self._begins + _MINUTE
        self._tasks = self._minutes.setdefault(self._begins, {})

    def take(self) -> list[dict[str, Any]]:
        """Remove and return the counts, a row per minute and task."""
        minutes, self._minutes = self._minutes, {}
        self._begins = self._ends = _NEVER
        return [
            counts.as_row(minute, task) for minute, tasks in minutes.items() for task, counts in tasks.items()
        ]


def _histogram(counts: list[int]) -> list[int]:
    return trimmed([*counts[:LAST], sum(counts[LAST:])])
