"""The rules that a run must obey whatever faults were injected. Each violation carries its evidence."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.causes import Causes
from chaos.history import DIED
from chaos.ledger import CANCELLED, OK, RAISED, encode_line
from chaos.tasks import PROCESS

if TYPE_CHECKING:
    from chaos.causes import Cause
    from chaos.history import History, Run
    from chaos.leases import Leases
    from chaos.ledger import AddRequest, KeptAttempt, RemainingJob

_TOLERANCE = 0.005
"""Seconds by which lines of two processes may be written in the wrong order."""
_ORPHANED_STATEMENT = 60.0
"""Seconds for which a statement may still run after its client is gone."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A breach of a rule."""

    rule: str
    message: str
    evidence: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the message and its evidence, one line each."""
        return "\n".join([f"{self.rule}: {self.message}", *(f"    {line}" for line in self.evidence)])


@dataclass
class Audit:
    """The verdict on a run."""

    violations: list[Violation] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    """The cause of each extra run."""
    frozen: set[str] = field(default_factory=set)
    """Runs that were frozen past their lease, and continued briefly after another worker took over."""
    gave_up: int = 0
    """Workers that exited because they could not stop a job that another worker might run by then."""
    superseded: int = 0
    """Jobs that remain because a newer job took their key while they ran, and that then failed."""


class Auditor:
    """Checks a run, rule by rule."""

    def __init__(self, history: History, leases: Leases) -> None:
        self._history = history
        self._causes = Causes(history, leases)
        self._audit = Audit()
        self._remaining: dict[str, list[RemainingJob]] = defaultdict(list)
        for job in history.remaining:
            self._remaining[job.token].append(job)
        self._last_of_key = _last_of_keys(history)

    def audit(self) -> Audit:
        """Check all rules."""
        self._check_jobs_succeeded()
        self._check_keyed_jobs_succeeded()
        self._check_removed_jobs()
        self._check_reruns()
        self._check_completed_jobs()
        self._check_overlaps()
        self._check_remaining()
        self._check_attempts()
        self._check_exits()
        self._check_declared_dead()
        if self._history.kept is not None:
            self._check_kept(self._history.kept)
        return self._audit

    def _violation(self, rule: str, message: str, *evidence: str) -> None:
        self._audit.violations.append(Violation(rule, message, list(evidence)))

    def _check_jobs_succeeded(self) -> None:
        for token, added in self._history.added.items():
            request, runs = self._history.requests[token], self._history.runs.get(token, [])
            done = any(run.outcome == OK for run in runs)
            remaining = self._remaining[token]
            evidence = [encode_line(request), *_lines(runs), *map(encode_line, remaining)]
            if request.doomed:
                if done or not any(job.attempts >= job.max_attempts for job in remaining):
                    message = f"job {added.job} was meant to fail permanently, and did not"
                    self._violation("failed", message, *evidence)
            elif not done and request.key is None:
                self._violation("lost", f"job {added.job} was added and never succeeded", *evidence)

    def _check_keyed_jobs_succeeded(self) -> None:
        for key, token in self._last_of_key.items():
            if self._may_be_removed(key, token):
                continue
            # A job that may have been added later may have replaced it.
            candidates = [token, *self._requests_after(key, token)]
            if not any(run.outcome == OK for one in candidates for run in self._history.runs.get(one, [])):
                lines = [encode_line(self._history.requests[one]) for one in candidates]
                lines += [line for one in candidates for line in _lines(self._history.runs.get(one, []))]
                self._violation("lost", f"the last job with {key!r} never succeeded", *lines)

    def _requests_after(self, key: str, token: str) -> list[str]:
        at = self._history.requests[token].at
        return [
            other.token for other in self._history.requests.values() if other.key == key and other.at > at
        ]

    def _may_be_removed(self, key: str, token: str) -> bool:
        """Return whether a removal was requested later; or shortly before, with an unknown outcome."""
        at = self._history.requests[token].at
        return any(
            request.key == key
            and (
                request.at > at
                or (request.token not in self._history.removed and request.at > at - _ORPHANED_STATEMENT)
            )
            for request in self._history.removing
        )

    def _check_removed_jobs(self) -> None:
        removed_waiting = {
            removed.job: removed
            for removed in self._history.removed.values()
            if removed.job is not None and not removed.running
        }
        for run in self._history.all_runs:
            removed = removed_waiting.get(run.started.job)
            if removed is not None and run.at > removed.at + _TOLERANCE:
                message = f"job {run.started.job} was removed before it ran"
                self._violation("removed", message, encode_line(removed), *run.lines)

    def _check_reruns(self) -> None:
        for earlier, later in self._history.reruns():
            if earlier.outcome == RAISED and self._was_to_raise(earlier):
                continue
            cause = self._causes.of_rerun(earlier, later)
            if cause is None:
                message = f"job {later.started.job} ran again although no fault hit its worker"
                self._violation("extra run", message, *earlier.lines, *later.lines, *self._events_of(earlier))
            else:
                self._audit.causes.append(cause)

    def _check_completed_jobs(self) -> None:
        """Check that no job ran again after its `job:complete` event, which means that it was recorded."""
        complete = {
            (event.pid, event.job, event.attempt): encode_line(event)
            for event in self._history.events
            if event.name == "job:complete"
        }
        for earlier, later in self._history.reruns():
            run = earlier.started
            event = complete.get((run.pid, run.job, run.attempt))
            if earlier.outcome == OK and event is not None:
                message = f"job {run.job} was reported complete, and ran again"
                self._violation("complete", message, *earlier.lines, event, *later.lines)

    def _was_to_raise(self, run: Run) -> bool:
        request = self._history.requests.get(run.started.token)
        return request is not None and run.started.attempt <= request.fails

    def _events_of(self, run: Run) -> list[str]:
        return [
            encode_line(event)
            for event in self._history.events
            if event.job == run.started.job and event.worker == run.started.worker
        ]

    def _check_overlaps(self) -> None:
        lanes: dict[str, list[Run]] = defaultdict(list)
        for run in self._history.all_runs:
            queue = run.started.queue
            lanes[f"{queue!r}" if queue is not None else f"job {run.started.job}"].append(run)
        for lane, runs in lanes.items():
            runs.sort(key=lambda run: run.at)
            latest: Run | None = None
            for run in runs:
                if latest is not None and run.at < latest.end - _TOLERANCE:
                    self._overlap(lane, latest, run)
                if latest is None or run.end > latest.end:
                    latest = run

    def _overlap(self, lane: str, earlier: Run, later: Run) -> None:
        if self._causes.of_overlap(earlier) is not None:
            self._audit.frozen.add(earlier.started.run)
        else:
            message = f"two runs at once in {lane}, and no freeze explains it"
            faults = [encode_line(fault) for fault in self._causes.during(earlier)]
            self._violation("overlap", message, *earlier.lines, *later.lines, *faults)

    def _check_remaining(self) -> None:
        for job in self._history.remaining:
            request = self._history.requests.get(job.token)
            if job.locked_by is not None:
                self._violation("locked", f"job {job.job} is locked at the end", encode_line(job))
            elif request is not None and job.attempts >= job.max_attempts and self._superseded(request):
                self._audit.superseded += 1
            elif request is None or not request.doomed or job.attempts < job.max_attempts:
                self._violation("left", f"job {job.job} is left at the end", encode_line(job))
        for queue in self._history.locked_queues:
            self._violation("locked", f"{queue.queue!r} is locked at the end", encode_line(queue))

    def _superseded(self, request: AddRequest) -> bool:
        return request.key is not None and (
            bool(self._requests_after(request.key, request.token))
            or self._may_be_removed(request.key, request.token)
        )

    def _check_attempts(self) -> None:
        for token, runs in self._history.runs.items():
            request = self._history.requests.get(token)
            since = request.at if request is not None else 0.0
            if len({run.started.job for run in runs}) > 1:
                self._violation("attempts", f"{token} ran under two ids", *_lines(runs))
            self._check_growth(runs[0].started.attempt - 1, since, runs[0], [])
            for earlier, later in pairwise(runs):
                growth = later.started.attempt - earlier.started.attempt
                given_back = growth == 0 and earlier.outcome == CANCELLED
                if not given_back:
                    self._check_growth(growth - 1, earlier.at, later, earlier.lines)

    def _check_growth(self, surplus: int, since: float, run: Run, before: list[str]) -> None:
        """Check that each attempt without a run was claimed, and lost before the run started."""
        lost = surplus > 0 and self._causes.of_claim_without_run(since, run.at) is not None
        if surplus and not lost:
            message = (
                f"job {run.started.job} has attempt {run.started.attempt}, {surplus:+} from the expected"
            )
            self._violation("attempts", message, *before, *run.lines)

    def _check_exits(self) -> None:
        started = {line.pid for line in self._history.ready}
        for exited in self._history.exits:
            # A worker that cannot connect at its start may give up. The audit does not judge Node workers.
            if exited.intended or exited.program == "node" or exited.pid not in started:
                continue
            # A worker that cannot stop a job's thread exits before another worker runs the same job.
            if self._causes.of_lost_lease(exited.pid, exited.at) is not None:
                self._audit.gave_up += 1
            else:
                self._violation("ended", f"worker {exited.slot} exited by itself", encode_line(exited))

    def _check_declared_dead(self) -> None:
        pids = {line.worker: line.pid for line in self._history.ready}
        for event in self._history.events:
            pid = pids.get(event.about)
            if pid is None or any(gone.pid == pid and gone.at <= event.at for gone in self._history.exits):
                continue
            if self._causes.of_lost_lease(pid, event.at) is None:
                message = f"{event.about} was alive, and its heartbeats had been recorded"
                self._violation("declared dead", message, encode_line(event))

    def _check_kept(self, kept: list[KeptAttempt]) -> None:
        """Check that the history has each attempt that ran to its end and was recorded once, and no other."""
        rows = Counter((row.job, row.attempt, row.worker, row.outcome) for row in kept)
        runs: dict[tuple[int, int, str], list[Run]] = defaultdict(list)
        for run in self._history.all_runs:
            runs[run.started.job, run.started.attempt, run.started.worker].append(run)
        for (job, attempt, worker, outcome), count in rows.items():
            found = [run for run in runs[job, attempt, worker] if _may_end_as(run, outcome)]
            if outcome in {"completed", "failed"} and count > len(found):
                message = (
                    f"the history has {count} attempts {attempt} of job {job} that {outcome} on {worker}"
                )
                self._violation("history", message, *_lines(runs[job, attempt, worker]))
        recorded = Counter(
            (event.job, event.attempt, event.worker)
            for event in self._history.events
            if event.name == "job:complete"
        )
        for key, count in recorded.items():
            total = sum(rows[*key, outcome] for outcome in ("completed", "failed"))
            if total != count:
                message = (
                    f"job {key[0]} ended {count} times in attempt {key[1]}, and has {total} in the history"
                )
                self._violation("history", message, *_lines(runs[key]))
        self._check_kept_jobs(Counter(row.job for row in kept if row.outcome == "completed"))

    def _check_kept_jobs(self, completed: Counter[int]) -> None:
        """Check that each job that Python workers completed is in the history, whatever they reported."""
        for token, added in self._history.added.items():
            runs = self._history.runs.get(token, [])
            by_python = all(run.started.worker.startswith("python-") for run in runs)
            is_done = any(run.outcome == OK for run in runs) and not self._remaining[token]
            # A job that replaces another one by its key may have its id.
            if (
                is_done
                and by_python
                and self._history.requests[token].key is None
                and completed[added.job or 0] != 1
            ):
                message = f"job {added.job} is done, and has {completed[added.job or 0]} completed attempts"
                self._violation("history", f"{message} in the history", *_lines(runs))


def _may_end_as(run: Run, outcome: str) -> bool:
    """Return whether a worker may have recorded this outcome for a run."""
    if outcome == "completed":
        return run.outcome == OK
    # A process may have been killed after its task had ended.
    return run.outcome in {RAISED, DIED} or run.started.task == PROCESS


def crashes(history: History, program: str) -> int:
    """Count the workers of a program that exited by themselves, after they were ready."""
    started = {line.pid for line in history.ready}
    gone = Counter(
        exited.program for exited in history.exits if not exited.intended and exited.pid in started
    )
    return gone[program]


def _last_of_keys(history: History) -> dict[str, str]:
    """Map each key to the token of the last job that was added for certain."""
    last: dict[str, str] = {}
    for token in sorted(history.added, key=lambda token: history.requests[token].at):
        key = history.requests[token].key
        if key is not None:
            last[key] = token
    return last


def _lines(runs: list[Run]) -> list[str]:
    return [line for run in runs for line in run.lines]
