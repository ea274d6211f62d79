"""Outcomes and errors of runs, in the words of metrics and traces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from graphile_worker._base.tracebacks import error_type
from graphile_worker.outcome import Cancel, ControlFlow, Fail, Snooze, unwrap_control_flow

if TYPE_CHECKING:
    from graphile_worker.job import Job


def outcome_of(error: BaseException | None, job: Job) -> str:
    """Return the outcome of a run, where no event tells it. A retry policy may still decide otherwise."""
    if error is None:
        return "completed"
    if isinstance(error, asyncio.CancelledError):
        return "interrupted"
    choice = unwrap_control_flow(error)
    if isinstance(choice, Snooze):
        return "snoozed"
    if isinstance(choice, Cancel):
        return "cancelled"
    return "failed" if isinstance(choice, Fail) or job.attempts >= job.max_attempts else "retried"


def reported_error(error: BaseException) -> BaseException:
    """Return the error to report: the cause of `Retry` or `Fail`, if it has one."""
    choice = unwrap_control_flow(error)
    return choice.__cause__ or choice if isinstance(choice, ControlFlow) else error


def reported_type(error: BaseException) -> str:
    """Return the name of the class of the error to report."""
    return error_type(reported_error(error))
