"""From what became of jobs to what the exchange is to change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from graphile_worker.durations import LONGEST
from graphile_worker.errors import TaskError
from graphile_worker.outcome import (
    Cancelled,
    Completed,
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

    from graphile_worker._db.exchange import Held, Result
    from graphile_worker.job import Job

_UNSAYABLE = "It failed, and what it failed with cannot be stored"


def as_changes(results: Sequence[Result], *, unicode: bool) -> str | None:
    """What is to be done to those that did not complete.

    Args:
        results: What became of jobs.
        unicode: Whether the database has every character.
    """
    others = [result for result in results if type(result.outcome) is not Completed]
    if not others:
        return None
    changes = [
        _plain(result) if result.plain else _change(result.held, result.outcome, unicode=unicode)
        for result in others
    ]
    # Not as escapes, which an old server takes only if its encoding is UTF-8.
    return json.dumps(changes, ensure_ascii=False)


def _change(held: Held, outcome: Outcome, *, unicode: bool) -> dict[str, object]:
    job = held.job
    change: dict[str, object] = {"id": job.id, "locked_at": held.locked_at.isoformat()}
    text = _text_of(outcome, job)
    if text is not None:
        # The database may not have every character.
        change["error"] = text if unicode else text.encode("ascii", "backslashreplace").decode()
    match outcome:
        case Failed():
            change |= {"action": "fail", "delay": _bounded(outcome.delay), "final": outcome.final}
            if outcome.at is not None:
                change["at"] = outcome.at.isoformat()
            return change | _left(outcome)
        case Cancelled():
            return change | {"action": "fail", "final": True} | _left(outcome)
        case Snoozed() | Interrupted() | Returned():
            attempts = None if held.superseded else job.attempts
            change |= {"action": "return", "attempts": attempts, "key": job.key}
            if isinstance(outcome, Snoozed):
                change |= {"action": "snooze", "delay": _bounded(outcome.choice.delay)}
            elif isinstance(outcome, Interrupted):
                # Without a delay it keeps its run_at, and with it its place among the others.
                change["delay"] = _bounded(outcome.delay) or None
            return change
        case Completed():
            raise AssertionError("completed jobs are not changed but deleted")


def _left(outcome: Failed | Cancelled) -> dict[str, object]:
    """Items of a batch by their places, so that they stay as they are stored, whatever it made of them."""
    return {} if outcome.left is None else {"left": [place + 1 for place in outcome.left]}


def _plain(result: Result) -> dict[str, object]:
    outcome = result.outcome
    if isinstance(outcome, Failed | Cancelled):
        is_final = isinstance(outcome, Cancelled) or outcome.final
        # Places are of our own making.
        outcome = Failed(TaskError(_UNSAYABLE), final=is_final, left=outcome.left)
    elif isinstance(outcome, Snoozed):
        outcome = Interrupted(Snooze.delay)
    return _change(result.held, outcome, unicode=False)


def _text_of(outcome: Outcome, job: Job) -> str | None:
    """What is kept as the job's last_error."""
    match outcome:
        case Failed(error=Retry() as choice) if outcome.is_last_of(job):
            return storable(choice.why) or "To be tried again, but that was the last attempt"
        case Failed(error=error) | Snoozed(choice=error) | Cancelled(choice=error):
            return describe_error(error)
    return None


def _bounded(delay: float | None) -> float | None:
    return None if delay is None else min(delay, LONGEST)
