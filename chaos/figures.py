"""The figures of a run: throughput, counts, and the times until jobs ran again."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chaos.causes import Causes
from chaos.history import DIED
from chaos.ledger import CANCELLED, NODE_LOCKS_RELEASED, OK, RAISED, Fault, encode_line

if TYPE_CHECKING:
    from chaos.history import History, Run
    from chaos.leases import Leases

_HARMLESS = frozenset({"clock", "idle transaction", "fork"})
_MOMENT = 1.0


class JobRecovery(NamedTuple):
    """A job that a fault took from its worker, and its next run."""

    fault: Fault
    rerun: Run
    repeated: bool
    """Whether the job was lost before. Then it waits as after a failure."""
    alone: bool
    """Whether no other fault interfered."""

    @property
    def seconds(self) -> float:
        """The time from the fault to the next run."""
        return self.rerun.at - self.fault.at


def recoveries(history: History, leases: Leases) -> list[JobRecovery]:
    """Return the recoveries from all faults that hit a worker and not the server."""
    by_job: dict[int, list[Run]] = defaultdict(list)
    for run in history.all_runs:
        by_job[run.started.job].append(run)
    for runs in by_job.values():
        runs.sort(key=lambda run: run.at)
    causes = Causes(history, leases)
    found: dict[str, JobRecovery] = {}
    # Several faults may have lost a job. The first of them that is known to cost jobs counts.
    for fault in sorted(history.faults, key=lambda fault: (not causes.costs_a_run(fault), fault.at)):
        for job in _held(history, fault):
            rerun = _run_again(by_job[job], fault)
            if rerun is not None and rerun.started.run not in found:
                repeated = _lost_before(by_job[job], fault, rerun)
                alone = _alone(history, fault, rerun)
                found[rerun.started.run] = JobRecovery(fault, rerun, repeated, alone)
    return list(found.values())


def recovery_limit(recovery: JobRecovery, history: History, leases: Leases) -> float:
    """Return the number of seconds within which the job should have started again."""
    fault = recovery.fault
    # A child that a task forked holds the dead worker's sockets open, so to the server the worker is alive.
    lives_on = any(
        other.kind == "fork" and set(other.pids) & set(fault.pids) and other.at <= fault.at <= other.until
        for other in history.faults
    )
    if fault.kind in {"kill", "term"} and not lives_on:
        return leases.recovery_limit_after_death
    return leases.recovery_limit_after_silence


class Throughput(NamedTuple):
    """The throughput in one phase of a run."""

    phase: str
    seconds: float
    added: float
    """Jobs per second."""
    succeeded: float
    failed: float


def throughput(history: History) -> list[Throughput]:
    """Return the throughput of each phase of the run."""
    added = Counter(history.phase_at(result.at) for result in history.added.values())
    ended = Counter((run.outcome, history.phase_at(run.end)) for run in history.all_runs)
    found = []
    for phase, after in pairwise(history.phases):
        seconds, name = max(after.at - phase.at, 0.001), phase.name
        counts = added[name], ended[OK, name], ended[RAISED, name]
        found.append(Throughput(name, seconds, *(count / seconds for count in counts)))
    return found


def evidence_of(recovery: JobRecovery) -> list[str]:
    """Return the ledger lines of the fault and of the rerun."""
    return [encode_line(recovery.fault), *recovery.rerun.lines]


def _held(history: History, fault: Fault) -> set[int]:
    """Return the jobs that the fault's workers held."""
    workers = {line.worker for line in history.ready if line.pid in fault.pids and line.at <= fault.at}
    held = {job for worker in workers for job in fault.locks.get(worker, [])}
    return held | {
        run.started.job
        for run in history.all_runs
        if run.started.pid in fault.pids and run.at <= fault.at < run.end
    }


def _run_again(runs: list[Run], fault: Fault) -> Run | None:
    """Return the next run, if the fault is its cause."""
    later = next((run for run in runs if run.at > fault.at), None)
    before = next((run for run in reversed(runs) if run.at <= fault.at), None)
    if later is None:
        return None
    if before is None or before.end <= fault.at:  # claimed, but not started
        return later if later.started.pid not in fault.pids else None
    unfinished = before.outcome in {DIED, CANCELLED} or before.end > later.at
    return later if unfinished or before.outcome != RAISED else None


def _lost_before(runs: list[Run], fault: Fault, rerun: Run) -> bool:
    """Return whether an earlier attempt was lost too: while it ran, or claimed and never started."""
    earlier = [run for run in runs if run.at < rerun.at]
    lost = any(run.outcome not in {RAISED, CANCELLED} for run in earlier[:-1])
    had_started = any(run.at <= fault.at < run.end for run in earlier)
    return lost or rerun.started.attempt - len(earlier) > (1 if had_started else 2)


def _alone(history: History, fault: Fault, rerun: Run) -> bool:
    """Return whether the server and at least one other Python worker were unaffected meanwhile."""
    since, until = fault.at - _MOMENT, rerun.at
    others = [
        other
        for other in history.faults
        if other is not fault and other.kind not in _HARMLESS and other.at <= until and other.until >= since
    ]
    affected = {slot for other in [fault, *others] for slot in other.slots}
    on_server = any(not other.pids and other.kind != NODE_LOCKS_RELEASED for other in others)
    unaffected = {line.slot for line in history.ready if line.worker.startswith("python-")} - affected
    same_worker = any(set(other.pids) & set(fault.pids) for other in others)
    return not on_server and bool(unaffected) and not same_worker
