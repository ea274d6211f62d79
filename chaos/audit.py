"""What must hold of a run, whatever was broken in it; each breach with its evidence."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.causes import Causes
from chaos.ledger import CANCELLED, OK, RAISED, text_of

if TYPE_CHECKING:
    from chaos.causes import Cause
    from chaos.history import History, Run
    from chaos.leases import Leases
    from chaos.ledger import Asked, LeftJob

_TOLERANCE = 0.005
_LINGERS = 60.0
"""Seconds for which a statement whose client is gone may still be under way."""
"""Seconds by which lines of two processes may be written in the wrong order."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be."""

    rule: str
    what: str
    evidence: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """With its evidence."""
        return "\n".join([f"{self.rule}: {self.what}", *(f"    {line}" for line in self.evidence)])


@dataclass
class Audit:
    """The verdict on a run."""

    violations: list[Violation] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    """Of each run that was one too many."""
    frozen: set[str] = field(default_factory=set)
    """The runs that were frozen for so long that others took over, and that went on for a moment."""
    gave_up: int = 0
    """Workers that ended because they could not stop what might be others' by then."""
    superseded: int = 0
    """Jobs that are left because their key was taken from them while they ran, and that did not end well."""


class Auditor:
    """Checks a run, rule by rule."""

    def __init__(self, history: History, leases: Leases) -> None:
        self._history = history
        self._causes = Causes(history, leases)
        self._audit = Audit()
        self._left: dict[str, list[LeftJob]] = defaultdict(list)
        for job in history.left:
            self._left[job.token].append(job)
        self._last_of_key = _last_of_keys(history)

    def audit(self) -> Audit:
        """All rules."""
        self._every_job_ran()
        self._every_key_ran()
        self._what_is_removed_is_gone()
        self._every_rerun_has_a_cause()
        self._what_is_complete_stays_so()
        self._nothing_overlaps()
        self._nothing_is_left()
        self._attempts_add_up()
        self._no_worker_ended_by_itself()
        self._only_the_dead_are_declared_dead()
        return self._audit

    def _breach(self, rule: str, what: str, *evidence: str) -> None:
        self._audit.violations.append(Violation(rule, what, list(evidence)))

    def _every_job_ran(self) -> None:
        for token, answered in self._history.added.items():
            asked, runs = self._history.asked[token], self._history.runs.get(token, [])
            done = any(run.outcome == OK for run in runs)
            evidence = [text_of(asked), *_lines(runs), *(text_of(left) for left in self._left[token])]
            if asked.doomed:
                given_up = [left for left in self._left[token] if left.attempts >= left.max_attempts]
                if done or not given_up:
                    self._breach(
                        "failed", f"job {answered.job} was meant to fail for good, and did not", *evidence
                    )
            elif not done and asked.key is None:
                self._breach("lost", f"job {answered.job} was added and never succeeded", *evidence)

    def _every_key_ran(self) -> None:
        for key, token in self._last_of_key.items():
            if self._may_be_removed(key, token):
                continue
            # What may have been added after it may have replaced it.
            candidates = [token, *self._asked_after(key, token)]
            if not any(run.outcome == OK for one in candidates for run in self._history.runs.get(one, [])):
                lines = [text_of(self._history.asked[one]) for one in candidates]
                lines += [line for one in candidates for line in _lines(self._history.runs.get(one, []))]
                self._breach("lost", f"the last job of {key!r} never succeeded", *lines)

    def _asked_after(self, key: str, token: str) -> list[str]:
        at = self._history.asked[token].at
        return [other.token for other in self._history.asked.values() if other.key == key and other.at > at]

    def _may_be_removed(self, key: str, token: str) -> bool:
        """Whether it was asked for after that; or just before, and nobody knows when it happened."""
        at = self._history.asked[token].at
        return any(
            asked.key == key
            and (asked.at > at or (asked.token not in self._history.removed and asked.at > at - _LINGERS))
            for asked in self._history.removing
        )

    def _what_is_removed_is_gone(self) -> None:
        gone = {
            removed.job: removed
            for removed in self._history.removed.values()
            if removed.job is not None and not removed.running
        }
        for run in self._history.all_runs:
            removed = gone.get(run.begun.job)
            if removed is not None and run.at > removed.at + _TOLERANCE:
                what = f"job {run.begun.job} was removed before it ran"
                self._breach("removed", what, text_of(removed), *run.lines)

    def _every_rerun_has_a_cause(self) -> None:
        for earlier, later in self._history.reruns():
            if earlier.outcome == RAISED and self._was_to_raise(earlier):
                continue
            cause = self._causes.of_rerun(earlier, later)
            if cause is None:
                what = f"job {later.begun.job} ran again, and nothing had happened to its worker"
                self._breach("extra run", what, *earlier.lines, *later.lines, *self._told(earlier))
            else:
                self._audit.causes.append(cause)

    def _what_is_complete_stays_so(self) -> None:
        """To be told so means that it is recorded."""
        complete = {
            (told.pid, told.job, told.attempt): text_of(told)
            for told in self._history.told
            if told.name == "job:complete"
        }
        for earlier, later in self._history.reruns():
            run = earlier.begun
            told = complete.get((run.pid, run.job, run.attempt))
            if earlier.outcome == OK and told is not None:
                what = f"job {run.job} was told to be complete, and ran again"
                self._breach("complete", what, *earlier.lines, told, *later.lines)

    def _was_to_raise(self, run: Run) -> bool:
        asked = self._history.asked.get(run.begun.token)
        return asked is not None and run.begun.attempt <= asked.fails

    def _told(self, run: Run) -> list[str]:
        return [
            text_of(told)
            for told in self._history.told
            if told.job == run.begun.job and told.worker == run.begun.worker
        ]

    def _nothing_overlaps(self) -> None:
        lanes: dict[str, list[Run]] = defaultdict(list)
        for run in self._history.all_runs:
            queue = run.begun.queue
            lanes[f"{queue!r}" if queue is not None else f"job {run.begun.job}"].append(run)
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
            self._audit.frozen.add(earlier.begun.run)
        else:
            what = f"two runs at once in {lane}, and no freeze excuses it"
            faults = [text_of(fault) for fault in self._causes.during(earlier)]
            self._breach("overlap", what, *earlier.lines, *later.lines, *faults)

    def _nothing_is_left(self) -> None:
        for job in self._history.left:
            asked = self._history.asked.get(job.token)
            if job.locked_by is not None:
                self._breach("locked", f"job {job.job} is locked at the end", text_of(job))
            elif asked is not None and job.attempts >= job.max_attempts and self._superseded(asked):
                self._audit.superseded += 1
            elif asked is None or not asked.doomed or job.attempts < job.max_attempts:
                self._breach("left", f"job {job.job} is left at the end", text_of(job))
        for queue in self._history.locked_queues:
            self._breach("locked", f"{queue.queue!r} is locked at the end", text_of(queue))

    def _superseded(self, asked: Asked) -> bool:
        return asked.key is not None and (
            bool(self._asked_after(asked.key, asked.token)) or self._may_be_removed(asked.key, asked.token)
        )

    def _attempts_add_up(self) -> None:
        for token, runs in self._history.runs.items():
            asked = self._history.asked.get(token)
            since = asked.at if asked is not None else 0.0
            if len({run.begun.job for run in runs}) > 1:
                self._breach("attempts", f"{token} ran under two ids", *_lines(runs))
            self._check_growth(runs[0].begun.attempt - 1, since, runs[0], [])
            for earlier, later in pairwise(runs):
                growth = later.begun.attempt - earlier.begun.attempt
                given_back = growth == 0 and earlier.outcome == CANCELLED
                if not given_back:
                    self._check_growth(growth - 1, earlier.at, later, earlier.lines)

    def _check_growth(self, surplus: int, since: float, run: Run, before: list[str]) -> None:
        """An attempt without a run is one that was claimed, and lost before it began."""
        lost = surplus > 0 and self._causes.of_claim_without_run(since, run.at) is not None
        if surplus and not lost:
            what = f"job {run.begun.job} has attempt {run.begun.attempt}, {surplus:+} of what it should"
            self._breach("attempts", what, *before, *run.lines)

    def _no_worker_ended_by_itself(self) -> None:
        started = {line.pid for line in self._history.ready}
        for exited in self._history.exits:
            # One that cannot connect when it starts may give up. Npm's is not ours to judge.
            if exited.wanted or exited.program == "node" or exited.pid not in started:
                continue
            # One whose thread cannot be stopped ends before others run the same job.
            if self._causes.of_lost_lease(exited.pid, exited.at) is not None:
                self._audit.gave_up += 1
            else:
                self._breach("ended", f"worker {exited.slot} ended by itself", text_of(exited))

    def _only_the_dead_are_declared_dead(self) -> None:
        pids = {line.worker: line.pid for line in self._history.ready}
        for told in self._history.told:
            pid = pids.get(told.about)
            if pid is None or any(gone.pid == pid and gone.at <= told.at for gone in self._history.exits):
                continue
            if self._causes.of_lost_lease(pid, told.at) is None:
                self._breach("declared dead", f"{told.about} lived, and had been heard", text_of(told))


def crashes(history: History, program: str) -> int:
    """How many workers of that kind ended without our doing, after they had begun to work."""
    started = {line.pid for line in history.ready}
    gone = Counter(exited.program for exited in history.exits if not exited.wanted and exited.pid in started)
    return gone[program]


def _last_of_keys(history: History) -> dict[str, str]:
    """For each key the last job that was surely added."""
    last: dict[str, str] = {}
    for token in sorted(history.added, key=lambda token: history.asked[token].at):
        key = history.asked[token].key
        if key is not None:
            last[key] = token
    return last


def _lines(runs: list[Run]) -> list[str]:
    return [line for run in runs for line in run.lines]
