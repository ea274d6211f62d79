"""`JobLog`: logs a line when a worker connects, and one for each job that ends."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphile_worker import events as event
from graphile_worker._base.durations import format_seconds
from graphile_worker._worker.processes.remote_errors import RemoteTraceback
from graphile_worker.context import job_scope
from graphile_worker.errors import BatchError
from graphile_worker.outcome import ControlFlow, Retry, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker.events.emitter import Events

    _ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_MAX_PER_SECOND = 50
_MAX_TRACEBACKS = 3
_PACKAGE = str(Path(__file__).parents[2]) + os.sep


class JobLog:
    """Logs the outcomes of jobs: every failure, and at most 50 successes a second."""

    def __init__(self, events: Events, logger: ScopedLogger) -> None:
        self._logger = logger.scope(label="job")
        self._second = 0
        self._logged = 0
        self._skipped = 0
        self._silent = bool(os.environ.get("NO_LOG_SUCCESS"))
        self._listeners: dict[type[event.Event], Callable[[Any], None]] = {
            event.JobFailure: self._failure,
            event.JobSnoozed: self._snoozed,
            event.JobCancelled: self._cancelled,
            event.JobInterrupted: self._interrupted,
            event.JobLost: self._lost,
        }
        if not self._silent:
            self._listeners[event.JobComplete] = self._complete
        for kind, listener in self._listeners.items():
            events.on(kind, listener)
        self._events = events

    def connected(self, worker_id: str, tasks: Iterable[str]) -> None:
        """Log that the worker has connected."""
        if not self._silent:
            self._logger.scope(label="worker").info(
                "Worker connected; tasks: %s (%s)", ", ".join(tasks), worker_id
            )

    def close(self) -> None:
        """Log the number of skipped successes, and remove all listeners: the caller may keep the emitter."""
        self._log_skipped()
        for kind, listener in self._listeners.items():
            self._events.off(kind, listener)

    def _complete(self, done: event.JobComplete) -> None:
        if done.error is not None:
            return
        second = int(monotonic())
        if second != self._second:
            self._log_skipped()
            self._second, self._logged = second, 0
        if self._logged >= _MAX_PER_SECOND:
            self._skipped += 1
            return
        self._logged += 1
        job = done.job
        tries = f", attempt {job.attempts} of {job.max_attempts}" if job.attempts > 1 else ""
        self._logger.info(
            "Completed job %d (%s, %.2f ms%s)",
            job.id,
            job.task_identifier,
            done.duration * 1000,
            tries,
            extra=_job_fields(done, "completed"),
        )

    def _log_skipped(self) -> None:
        if self._skipped:
            self._logger.info("Completed %d more jobs", self._skipped)
        self._skipped = 0

    def _failure(self, failed: event.JobFailure) -> None:
        job, error = failed.job, failed.error
        exc_info = _exc_info(error)
        retry_in = failed.retry_in
        then = ": no more attempts" if retry_in is None else f"; again in {format_seconds(retry_in)}"
        self._logger.log(
            logging.WARNING if isinstance(error, Retry) and retry_in is not None else logging.ERROR,
            "Job %d failed (%s, %.2f ms, attempt %d of %d%s)%s",
            job.id,
            job.task_identifier,
            failed.duration * 1000,
            job.attempts,
            job.max_attempts,
            then,
            "" if exc_info is not None and exc_info[1] is error else f": {describe_error(error)}",
            exc_info=exc_info,
            extra=_job_fields(failed, "failed" if retry_in is None else "retried"),
        )

    def _snoozed(self, snoozed: event.JobSnoozed) -> None:
        job = snoozed.job
        self._logger.info(
            "Job %d was snoozed for %s (%s)%s",
            job.id,
            format_seconds(snoozed.delay),
            job.task_identifier,
            f": {snoozed.reason}" if snoozed.reason else "",
            extra=_job_fields(snoozed, "snoozed"),
        )

    def _cancelled(self, cancelled: event.JobCancelled) -> None:
        job = cancelled.job
        self._logger.info(
            "Job %d was cancelled (%s)%s",
            job.id,
            job.task_identifier,
            f": {cancelled.reason}" if cancelled.reason else "",
            extra=_job_fields(cancelled, "cancelled"),
        )

    def _interrupted(self, interrupted: event.JobInterrupted) -> None:
        job = interrupted.job
        self._logger.warning(
            "Job %d was interrupted (%s, %.2f ms); it will run again",
            job.id,
            job.task_identifier,
            interrupted.duration * 1000,
            extra=_job_fields(interrupted, "interrupted"),
        )

    def _lost(self, lost: event.JobLost) -> None:
        job = lost.job
        self._logger.warning(
            "Job %d (%s) was no longer locked by this worker when it ended: it was released, and may run "
            "twice",
            job.id,
            job.task_identifier,
            extra=_job_fields(lost, "lost"),
        )


def _exc_info(error: BaseException) -> _ExcInfo | None:
    """Return the exception with the most useful traceback, from the task on; None if there is none."""
    if isinstance(error, BatchError):
        if not any(item.__traceback__ or _is_remote(item) for item in error.errors):
            return None
        group = BaseExceptionGroup("items that failed", error.errors[:_MAX_TRACEBACKS])
        return type(group), group, None
    # An outcome that the task chose needs no traceback, but its cause may have one.
    cause = error.__cause__ if isinstance(error, ControlFlow) else error
    traceback = None if cause is None else without_frames_in((_PACKAGE,), cause.__traceback__)
    if cause is None or (traceback is None and not _is_remote(cause)):
        return None
    return type(cause), cause, traceback


def without_frames_in(paths: tuple[str, ...], traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames in these files, so that the user's code is left."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(paths):
            kept.append(traceback)
        traceback = traceback.tb_next
    for step in reversed(kept):
        traceback = TracebackType(traceback, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return traceback


def _is_remote(error: BaseException) -> bool:
    return isinstance(error.__cause__, RemoteTraceback)


def _job_fields(
    about: event.JobComplete
    | event.JobFailure
    | event.JobSnoozed
    | event.JobCancelled
    | event.JobInterrupted
    | event.JobLost,
    outcome: str,
) -> dict[str, object]:
    return {**job_scope(about.job), "outcome": outcome, "duration": round(about.duration, 6)}
