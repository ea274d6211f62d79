"""`AttemptRecorder`: what the history keeps about the attempts of a worker."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._base.payload import encode_payload
from graphile_worker._db.queries.exchange import AttemptRecord
from graphile_worker.errors import InvalidJobError
from graphile_worker.history import CALLED_FLAG, MAX_RESULT_SIZE, Keep, caller_of
from graphile_worker.outcome import Cancelled, Completed, Failed, Snoozed
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphile_worker._db.queries.exchange import ClaimedJob
    from graphile_worker._worker.claiming.clock import Clock
    from graphile_worker._worker.execution.job_events import JobRun
    from graphile_worker.history import History
    from graphile_worker.job import Job
    from graphile_worker.outcome import Outcome

_NO_DETAILS = "{}"
_IN_TRANSACTION = "the task completed its job in a transaction, before it returned"


class _Rule(NamedTuple):
    """What is kept about the attempts of one task."""

    keep: Keep
    result: bool


_CALLED = _Rule("all", result=True)


class AttemptRecorder:
    """Decides which attempts the history keeps, and with what.

    Args:
        history: The worker's history.
        tasks: The worker's functions by task identifier.
        clock: The database's clock.
    """

    def __init__(self, history: History, tasks: Mapping[str, Callable[..., Any]], clock: Clock) -> None:
        self._history = history
        self._clock = clock
        self._rules = {identifier: _read_rule(history, function) for identifier, function in tasks.items()}
        self._default = _Rule(history.keep, history.results)
        self.is_active = any(rule.keep != "none" for rule in self._rules.values())
        """Whether the history keeps attempts of jobs that no caller waits for."""
        self.has_recorded = False
        """Whether an attempt was kept, of any job."""
        self.on_first: Callable[[], None] = lambda: None
        """Called when the first attempt is kept."""

    def record(self, run: JobRun, outcome: Outcome) -> AttemptRecord | None:
        """Return what to keep about an attempt that has ended; None for nothing."""
        job, value = run.claimed.job, run.value
        run.value = None  # it may be large
        if not (self.is_active or job.flags) or not _keeps(rule := self._rule(job), outcome):
            return None
        details = self._details(job, rule)
        if rule.result and isinstance(outcome, Completed):
            details |= _result(job, value)
        if not self.has_recorded:
            self.has_recorded = True
            self.on_first()
        return AttemptRecord(self._started_at(run.since), run.duration, _encoded(details))

    def record_unstarted(self, job: Job, outcome: Outcome) -> AttemptRecord | None:
        """Return what to keep about a job that was claimed, but cancelled before it started."""
        if not (self.is_active or job.flags) or not _keeps(rule := self._rule(job), outcome):
            return None
        return AttemptRecord(None, None, _encoded(self._details(job, rule)) or _NO_DETAILS)

    def record_completion(self, claimed: ClaimedJob) -> AttemptRecord | None:
        """Return what to keep about an attempt that completes its job in a transaction of its task."""
        job = claimed.job
        if not (self.is_active or job.flags) or (rule := self._rule(job)).keep != "all":
            return None
        details = self._details(job, rule)
        if rule.result:
            details["no_result"] = _IN_TRANSACTION
        duration = monotonic() - claimed.since
        return AttemptRecord(self._started_at(claimed.since), duration, _encoded(details))

    def record_death(self, job: Job) -> dict[str, object] | None:
        """Return the details to keep about an attempt whose worker died; None to keep nothing."""
        rule = self._rule(job)
        if rule.keep == "none":
            return None
        details = self._details(job, rule)
        if isinstance(raw := details.get("payload"), msgspec.Raw):
            details["payload"] = msgspec.json.decode(raw)  # the sweeper encodes it together with the change
        return details

    def _rule(self, job: Job) -> _Rule:
        if CALLED_FLAG in job.flags:
            return _CALLED
        # A dead worker may have had tasks that this one does not have.
        return self._rules.get(job.task_identifier, self._default)

    def _started_at(self, since: float) -> Any:
        return self._clock.database_now() - timedelta(seconds=monotonic() - since)

    def _details(self, job: Job, rule: _Rule) -> dict[str, object]:
        details: dict[str, object] = {}
        if job.key is not None:
            # Another job may take over the key while this one runs. Then the row has neither of these.
            details |= {"key": job.key, "attempt": job.attempts}
        if self._history.payload:
            details |= self._payload(job)
        if rule is _CALLED:
            details["called"] = True
            if (caller := caller_of(job.flags)) is not None:
                details["caller"] = caller
        return details

    def _payload(self, job: Job) -> dict[str, object]:
        redact = self._history.redact
        if redact is None:
            return {"keep_payload": True}
        try:
            return {"payload": msgspec.Raw(encode_payload(redact(job.task_identifier, job.payload)).encode())}
        except Exception:
            logger.exception(
                "History(redact=...) failed for job %d (%s), so its payload is not kept",
                job.id,
                job.task_identifier,
            )
            return {}


def _read_rule(history: History, function: Callable[..., Any]) -> _Rule:
    task = task_of(function)
    keep = history.keep if task is None or task.history is None else task.history
    result = history.results if task is None or task.keep_result is None else task.keep_result
    if task is not None and task.keep_result and task.history is None:
        keep = "all"  # there is no result without a row
    return _Rule(keep, result)


def _keeps(rule: _Rule, outcome: Outcome) -> bool:
    match outcome:
        case Completed() | Snoozed():
            return rule.keep == "all"
        case Failed() | Cancelled():
            return rule.keep != "none"
        case _:  # it did not run to its end
            return False


def _result(job: Job, value: object) -> dict[str, object]:
    """Return the result, or the reason why it is not kept."""
    try:
        encoded = encode_payload(value).encode()
    except InvalidJobError as error:
        reason = f"it is not JSON: {error}".replace("The payload", "the result").replace("payload", "result")
    except Exception as error:  # noqa: BLE001 - a method of the value may raise anything
        reason = f"it cannot be converted to JSON: {type(error).__name__}: {error}"
    else:
        if len(encoded) <= MAX_RESULT_SIZE:
            return {"result": msgspec.Raw(encoded)}
        reason = f"it has {len(encoded):,} bytes of JSON, and at most {MAX_RESULT_SIZE:,} are kept"
    logger.warning(
        "The result of job %d (%s) is not kept: %s", job.id, job.task_identifier, reason.rstrip(".")
    )
    return {"no_result": reason}


def _encoded(details: dict[str, object]) -> str | None:
    return msgspec.json.encode(details).decode() if details else None
