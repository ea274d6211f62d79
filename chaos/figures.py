"""What a run shows in numbers: how fast, how often, and how long until jobs ran again."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chaos.causes import Causes
from chaos.history import DIED
from chaos.ledger import CANCELLED, NODE_FREED, OK, RAISED, Fault, text_of

if TYPE_CHECKING:
    from chaos.history import History, Run
    from chaos.leases import Leases

_HARMLESS = frozenset({"clock", "idle transaction", "fork"})
_MOMENT = 1.0


class Recovery(NamedTuple):
    """A job that its worker did not finish began again elsewhere."""

    fault: Fault
    again: Run
    repeated: bool
    """Whether it was not the first time; then it waits as after a failure."""
    alone: bool
    """Whether nothing else was broken meanwhile."""

    @property
    def seconds(self) -> float:
        """From the fault to the next run."""
        return self.again.at - self.fault.at


def recoveries(history: History, leases: Leases) -> list[Recovery]:
    """All of them, for the faults that hit a worker and not the server."""
    by_job: dict[int, list[Run]] = defaultdict(list)
    for run in history.all_runs:
        by_job[run.begun.job].append(run)
    for runs in by_job.values():
        runs.sort(key=lambda run: run.at)
    causes = Causes(history, leases)
    found: dict[str, Recovery] = {}
    # A job may have been lost by several faults: then by the first that is known to cost jobs.
    for fault in sorted(history.faults, key=lambda fault: (not causes.costs_a_run(fault), fault.at)):
        for job in _held(history, fault):
            again = _run_again(by_job[job], fault)
            if again is not None and again.begun.run not in found:
                repeated = _lost_before(by_job[job], fault, again)
                alone = _alone(history, fault, again)
                found[again.begun.run] = Recovery(fault, again, repeated, alone)
    return list(found.values())


def promised(recovery: Recovery, history: History, leases: Leases) -> float:
    """Within how many seconds it should have begun again."""
    fault = recovery.fault
    # A child that a task forked has the dead worker's sockets: to the server it lives.
    lives_on = any(
        other.kind == "fork" and set(other.pids) & set(fault.pids) and other.at <= fault.at <= other.until
        for other in history.faults
    )
    if fault.kind in {"kill", "term"} and not lives_on:
        return leases.promise_after_death
    return leases.promise_after_silence


class Throughput(NamedTuple):
    """How much went through in a part of a run."""

    phase: str
    seconds: float
    added: float
    """Jobs in a second."""
    succeeded: float
    failed: float


def throughput(history: History) -> list[Throughput]:
    """For each part of the run."""
    added = Counter(history.phase_at(answered.at) for answered in history.added.values())
    ended = Counter((run.outcome, history.phase_at(run.end)) for run in history.all_runs)
    found = []
    for phase, after in pairwise(history.phases):
        seconds, name = max(after.at - phase.at, 0.001), phase.name
        counts = added[name], ended[OK, name], ended[RAISED, name]
        found.append(Throughput(name, seconds, *(count / seconds for count in counts)))
    return found


def evidence_of(recovery: Recovery) -> list[str]:
    """The lines of the fault and of the run."""
    return [text_of(recovery.fault), *recovery.again.lines]


def _held(history: History, fault: Fault) -> set[int]:
    """The jobs that the workers held that it hit."""
    workers = {line.worker for line in history.ready if line.pid in fault.pids and line.at <= fault.at}
    held = {job for worker in workers for job in fault.locks.get(worker, [])}
    return held | {
        run.begun.job
        for run in history.all_runs
        if run.begun.pid in fault.pids and run.at <= fault.at < run.end
    }


def _run_again(runs: list[Run], fault: Fault) -> Run | None:
    """The next run, if the fault is why there is one."""
    later = next((run for run in runs if run.at > fault.at), None)
    before = next((run for run in reversed(runs) if run.at <= fault.at), None)
    if later is None:
        return None
    if before is None or before.end <= fault.at:  # it was claimed, and had not begun
        return later if later.begun.pid not in fault.pids else None
    unfinished = before.outcome in {DIED, CANCELLED} or before.end > later.at
    return later if unfinished or before.outcome != RAISED else None


def _lost_before(runs: list[Run], fault: Fault, again: Run) -> bool:
    """Whether another attempt was lost too: in a run, or claimed by a worker that never began."""
    earlier = [run for run in runs if run.at < again.at]
    lost = any(run.outcome not in {RAISED, CANCELLED} for run in earlier[:-1])
    had_begun = any(run.at <= fault.at < run.end for run in earlier)
    return lost or again.begun.attempt - len(earlier) > (1 if had_begun else 2)


def _alone(history: History, fault: Fault, again: Run) -> bool:
    """Whether the server was well meanwhile, and another worker too."""
    since, until = fault.at - _MOMENT, again.at
    others = [
        other
        for other in history.faults
        if other is not fault and other.kind not in _HARMLESS and other.at <= until and other.until >= since
    ]
    troubled = {slot for other in [fault, *others] for slot in other.slots}
    on_server = any(not other.pids and other.kind != NODE_FREED for other in others)
    well = {line.slot for line in history.ready if line.worker.startswith("python-")} - troubled
    return not on_server and bool(well) and not any(set(other.pids) & set(fault.pids) for other in others)
