"""Translate the outcomes of jobs into the changes that the exchange applies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from graphile_worker._base.durations import LONGEST
from graphile_worker._base.tracebacks import error_type, format_traceback
from graphile_worker.errors import TaskError
from graphile_worker.outcome import (
    Cancelled,
    Completed,
    ControlFlow,
    Failed,
    Interrupted,
    Outcome,
    Retry,
    Returned,
    Snooze,
    Snoozed,
    describe_error,
    storable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker._db.queries.exchange import ClaimedJob, Result
    from graphile_worker.job import Job

_UNSTORABLE_ERROR = "The job failed with an error that cannot be stored"


def as_changes(results: Sequence[Result], *, unicode: bool) -> str | None:
    """Return the changes to jobs that did not complete, as JSON; None if all completed.

    Args:
        results: The outcomes of jobs.
        unicode: Whether the database's encoding has every character.
    """
    others = [result for result in results if type(result.outcome) is not Completed]
    if not others:
        return None
    changes = [
        _plain(result) if result.plain else _change(result.held, result.outcome, unicode=unicode)
        for result in others
    ]
    # Not as escapes: an old server accepts them only if its encoding is UTF-8.
    return json.dumps(changes, ensure_ascii=False)


def _change(held: ClaimedJob, outcome: Outcome, *, unicode: bool) -> dict[str, object]:
    job = held.job
    change: dict[str, object] = {"id": job.id, "locked_at": held.locked_at.isoformat()}
    texts = {"error": _text_of(outcome, job), **_facts(outcome)}
    for name, text in texts.items():
        if text is not None:
            # The database's encoding may lack some characters.
            change[name] = text if unicode else text.encode("ascii", "backslashreplace").decode()
    match outcome:
        case Failed():
            change |= {"action": "fail", "delay": _bounded(outcome.delay), "final": outcome.final}
            if outcome.at is not None:
                change["at"] = outcome.at.isoformat()
            return change | _left(outcome)
        case Cancelled():
            return change | {"action": "fail", "final": True, "cancelled": True} | _left(outcome)
        case Snoozed() | Interrupted() | Returned():
            attempts = None if held.superseded else job.attempts
            change |= {"action": "return", "attempts": attempts, "key": job.key}
            if isinstance(outcome, Snoozed):
                change |= {"action": "snooze", "delay": _bounded(outcome.choice.delay)}
            elif isinstance(outcome, Interrupted):
                # Without a delay the job keeps its run_at, and so its place in the queue.
                change["delay"] = _bounded(outcome.delay) or None
            return change
        case Completed():
            raise AssertionError("completed jobs are deleted, not changed")


def _left(outcome: Failed | Cancelled) -> dict[str, object]:
    """Name the items of a batch to retry by index, so that they keep the values that are stored."""
    return {} if outcome.left is None else {"left": [index + 1 for index in outcome.left]}


def _facts(outcome: Outcome) -> dict[str, str | None]:
    """Return the type and the traceback of the error that the job failed with."""
    if not isinstance(outcome, Failed | Cancelled):
        return {}
    error = outcome.error if isinstance(outcome, Failed) else outcome.choice
    if isinstance(outcome, Cancelled) and error.__cause__ is None:
        return {}  # it is not a failure
    traceback = format_traceback(error)
    if isinstance(error, ControlFlow) and error.__cause__ is not None:
        error = error.__cause__  # the task chose the outcome because of this error
    return {"type": storable(error_type(error)), "traceback": traceback and storable(traceback)}


def _plain(result: Result) -> dict[str, object]:
    outcome = result.outcome
    if isinstance(outcome, Failed | Cancelled):
        is_final = isinstance(outcome, Cancelled) or outcome.final
        # Indexes of batch items do not come from the task's text, so they can be stored.
        outcome = Failed(TaskError(_UNSTORABLE_ERROR), final=is_final, left=outcome.left)
    elif isinstance(outcome, Snoozed):
        outcome = Interrupted(Snooze.delay)
    change = _change(result.held, outcome, unicode=False)
    return {name: value for name, value in change.items() if name not in {"type", "traceback"}}


def _text_of(outcome: Outcome, job: Job) -> str | None:
    """Return the text to store as the job's last_error."""
    match outcome:
        case Failed(error=Retry() as choice) if outcome.is_last_of(job):
            return storable(choice.why) or "The task requested a retry, but this was the last attempt"
        case Failed(error=error) | Snoozed(choice=error) | Cancelled(choice=error):
            return describe_error(error)
    return None


def _bounded(delay: float | None) -> float | None:
    return None if delay is None else min(delay, LONGEST)
