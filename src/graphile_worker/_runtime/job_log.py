"""A line when a worker connects, and one for each job that ends."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from graphile_worker import events as event
from graphile_worker._runtime.carried import RemoteTraceback
from graphile_worker.durations import shown
from graphile_worker.errors import BatchError
from graphile_worker.outcome import ControlFlow, Retry, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker.emitter import Events
    from graphile_worker.logs import ScopedLogger

    _ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_MOST_PER_SECOND = 50
_MOST_TRACEBACKS = 3
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class JobLog:
    """Listens to what becomes of jobs. At high rates not every success has a line; every failure has."""

    def __init__(self, events: Events, logger: ScopedLogger) -> None:
        self._logger = logger.scope(label="job")
        self._second = 0
        self._said = 0
        self._unsaid = 0
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
        """The worker begins."""
        if not self._silent:
            self._logger.scope(label="worker").info(
                "Worker connected, and looking for jobs of: %s (%s)", ", ".join(tasks), worker_id
            )

    def close(self) -> None:
        """Say what was not said, and listen no more: the emitter may be the caller's."""
        self._catch_up()
        for kind, listener in self._listeners.items():
            self._events.off(kind, listener)

    def _complete(self, done: event.JobComplete) -> None:
        if done.error is not None:
            return
        second = int(monotonic())
        if second != self._second:
            self._catch_up()
            self._second, self._said = second, 0
        if self._said >= _MOST_PER_SECOND:
            self._unsaid += 1
            return
        self._said += 1
        job = done.job
        tries = f", attempt {job.attempts} of {job.max_attempts}" if job.attempts > 1 else ""
        self._logger.info(
            "Completed job %d (%s, %.2f ms%s)",
            job.id,
            job.task_identifier,
            done.duration * 1000,
            tries,
            extra=_about(done),
        )

    def _catch_up(self) -> None:
        if self._unsaid:
            self._logger.info("Completed %d more jobs", self._unsaid)
        self._unsaid = 0

    def _failure(self, failed: event.JobFailure) -> None:
        job, error = failed.job, failed.error
        told = _told(error)
        again = failed.retry_in
        then = ": no more attempts" if again is None else f"; again in {shown(again)}"
        self._logger.log(
            logging.WARNING if isinstance(error, Retry) and again is not None else logging.ERROR,
            "Job %d failed (%s, %.2f ms, attempt %d of %d%s)%s",
            job.id,
            job.task_identifier,
            failed.duration * 1000,
            job.attempts,
            job.max_attempts,
            then,
            "" if told is not None and told[1] is error else f": {describe_error(error)}",
            exc_info=told,
            extra=_about(failed),
        )

    def _snoozed(self, snoozed: event.JobSnoozed) -> None:
        job = snoozed.job
        self._logger.info(
            "Job %d was snoozed for %s (%s)%s",
            job.id,
            shown(snoozed.delay),
            job.task_identifier,
            f": {snoozed.reason}" if snoozed.reason else "",
            extra=_about(snoozed),
        )

    def _cancelled(self, cancelled: event.JobCancelled) -> None:
        job = cancelled.job
        self._logger.info(
            "Job %d was cancelled (%s)%s",
            job.id,
            job.task_identifier,
            f": {cancelled.reason}" if cancelled.reason else "",
            extra=_about(cancelled),
        )

    def _interrupted(self, interrupted: event.JobInterrupted) -> None:
        job = interrupted.job
        self._logger.warning(
            "Job %d was interrupted (%s, %.2f ms); it will run again",
            job.id,
            job.task_identifier,
            interrupted.duration * 1000,
            extra=_about(interrupted),
        )

    def _lost(self, lost: event.JobLost) -> None:
        job = lost.job
        self._logger.warning(
            "Job %d (%s) was not ours any more when it ended: somebody freed it, and it may have run twice",
            job.id,
            job.task_identifier,
            extra=_about(lost),
        )


def _told(error: BaseException) -> _ExcInfo | None:
    """The exception whose traceback tells most, from the task on; None if there is none."""
    if isinstance(error, BatchError):
        if not any(one.__traceback__ or _is_remote(one) for one in error.errors):
            return None
        group = BaseExceptionGroup("items that failed", error.errors[:_MOST_TRACEBACKS])
        return type(group), group, None
    # What the task chose needs no traceback, but what made it choose has one.
    cause = error.__cause__ if isinstance(error, ControlFlow) else error
    traceback = None if cause is None else without_frames_in((_PACKAGE,), cause.__traceback__)
    if cause is None or (traceback is None and not _is_remote(cause)):
        return None
    return type(cause), cause, traceback


def without_frames_in(paths: tuple[str, ...], traceback: TracebackType | None) -> TracebackType | None:
    """The steps that are not in these files: the task's, and those of the user's middleware around it."""
    theirs: list[TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(paths):
            theirs.append(traceback)
        traceback = traceback.tb_next
    for step in reversed(theirs):
        traceback = TracebackType(traceback, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return traceback


def _is_remote(error: BaseException) -> bool:
    return isinstance(error.__cause__, RemoteTraceback)


def _about(
    about: event.JobComplete
    | event.JobFailure
    | event.JobSnoozed
    | event.JobCancelled
    | event.JobInterrupted
    | event.JobLost,
) -> dict[str, object]:
    return {
        "task_identifier": about.job.task_identifier,
        "job_id": about.job.id,
    }
