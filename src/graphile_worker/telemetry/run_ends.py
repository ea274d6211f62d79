"""`RunEnds`: reports the end of a run with its true outcome.

Middleware around a run sees what the task raised, but a retry policy may still turn that into another
outcome. The worker's events tell the outcome right after. Where no worker emits events to the middleware, as
in tests that drain a queue, the outcome is derived from the exception.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphile_worker import events as event
from graphile_worker.telemetry.outcomes import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from graphile_worker.context import JobContext
    from graphile_worker.job import Job
    from graphile_worker.middleware import AttachedWorker

    Report: TypeAlias = Callable[[str, BaseException | None], object]
    """Takes the outcome, and the error of a failed run."""


class RunEnds:
    """Keeps the reports of runs until their outcomes are known."""

    def __init__(self) -> None:
        self._workers: set[str] = set()
        self._waiting: dict[tuple[str, int], tuple[Report, Job, BaseException | None]] = {}

    def attach(self, worker: AttachedWorker) -> None:
        """Listen to the outcomes of a worker's jobs."""
        self._workers.add(worker.worker_pool.id)
        worker.on(event.JobSuccess, lambda run: self._finish(run, "completed"))
        worker.on(event.JobSnoozed, lambda run: self._finish(run, "snoozed"))
        worker.on(event.JobCancelled, lambda run: self._finish(run, "cancelled"))
        worker.on(event.JobInterrupted, lambda run: self._finish(run, "interrupted"))
        worker.on(event.JobFailure, self._finish_failed)
        worker.on_end(partial(self._leave, worker.worker_pool.id))

    def add(self, ctx: JobContext[Any], error: BaseException | None, report: Report) -> None:
        """Call `report` when the outcome of a run is known, which has ended with the error or without one."""
        key = (ctx.worker_id, ctx.job.id)
        if (earlier := self._waiting.pop(key, None)) is not None:  # middleware has run the job again
            _report_now(*earlier)
        if ctx.worker_id in self._workers:
            self._waiting[key] = (report, ctx.job, error)
        else:
            _report_now(report, ctx.job, error)

    def _finish_failed(self, failed: event.JobFailure) -> None:
        self._finish(failed, "failed" if failed.retry_in is None else "retried", failed.error)

    def _finish(self, run: event.JobEvent, outcome: str, error: BaseException | None = None) -> None:
        waiting = self._waiting.pop((run.worker.worker_id, run.job.id), None)
        if waiting is not None:
            waiting[0](outcome, error)

    def _leave(self, worker_id: str) -> None:
        self._workers.discard(worker_id)
        for key in [key for key in self._waiting if key[0] == worker_id]:
            _report_now(*self._waiting.pop(key))


def _report_now(report: Report, job: Job, error: BaseException | None) -> None:
    outcome = outcome_of(error, job)
    report(outcome, error if outcome in {"retried", "failed"} else None)
