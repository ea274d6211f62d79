"""The fault that explains why a job ran again, or overlapped with another run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chaos.ledger import NODE_LOCKS_RELEASED, PAUSED

if TYPE_CHECKING:
    from chaos.history import History, Run
    from chaos.leases import Leases
    from chaos.ledger import Fault

# A worker whose heartbeat gets no answer closes that connection itself, so a silent connection counts too.
_SESSIONS_LOST = frozenset(
    {
        "cut",
        "terminate",
        "restart fast",
        "restart immediate",
        "restart long",
        "stall",
        "blackhole",
        "long blackhole",
    }
)
_SILENCES = frozenset(
    {"freeze", "long freeze", "blackhole", "long blackhole", "stall", "restart long", "restart fast"}
    | {"restart immediate", "hold gil", PAUSED}
)
_PAUSES = frozenset({"freeze", "long freeze", "hold gil", PAUSED})
"""Faults during which a process does not run at all, and cannot notice that it lost its jobs."""
_RECORDING = 2.0
"""Seconds within which an outcome is recorded, unless a fault prevents it."""
_THAWING = 2.0
"""Seconds for which a frozen process may continue a job that another worker has claimed."""


class Cause(NamedTuple):
    """The fault that made a job run again."""

    kind: str
    fault: Fault
    expected: bool
    """Whether such a fault is known to cost a run. Other faults should not, even if they explain one."""


class Causes:
    """The faults of a run, and the effects that each may have."""

    def __init__(self, history: History, leases: Leases) -> None:
        self._faults = history.faults
        self._leases = leases

    def of_rerun(self, earlier: Run, later: Run) -> Cause | None:
        """Return the most certain fault that kept the earlier run from being recorded."""
        found = [
            Cause(fault.kind, fault, self.costs_a_run(fault))
            for fault in self._faults
            if _may_cost_a_run(fault, earlier)
            and self._is_excuse(fault)
            and _overlaps(fault, earlier.at, self._settled(earlier, later))
        ]
        found.sort(key=lambda cause: (not cause.expected, abs(cause.fault.at - earlier.end)))
        return found[0] if found else None

    def of_claim_without_run(self, after: float, before: float) -> Fault | None:
        """Return a fault by which a worker may have lost a job that it had claimed and not started."""
        return next(
            (
                fault
                for fault in self._faults
                if fault.kind in _SESSIONS_LOST | _SILENCES | {"kill", "term", NODE_LOCKS_RELEASED}
                and self._is_excuse(fault)
                and _overlaps(fault, after, before)
            ),
            None,
        )

    def of_overlap(self, earlier: Run) -> Fault | None:
        """Return the pause in which the earlier run lost its job without being able to notice."""
        for fault in self._faults:
            if (
                fault.kind in _PAUSES
                and earlier.started.pid in fault.pids
                and _overlaps(fault, earlier.at, earlier.end)
                # A thread cannot be stopped, but its process can exit.
                and earlier.end <= fault.until + _THAWING
                and self._loses_jobs(fault)
            ):
                return fault
        return None

    def during(self, run: Run) -> list[Fault]:
        """Return the faults that hit the run's worker while the job ran."""
        return [
            fault
            for fault in self._faults
            if run.started.pid in fault.pids and _overlaps(fault, run.at, run.end)
        ]

    def _settled(self, earlier: Run, later: Run) -> float:
        """Return the time until which a fault could keep the outcome of a run from being recorded."""
        settled = earlier.end + _RECORDING
        for fault in self._faults:
            if fault.kind == "refuse" and _overlaps(fault, earlier.at, settled):
                # A rejected result is sent again after delays that double.
                settled = max(settled, fault.until + fault.seconds + _RECORDING)
        return min(settled, later.at)

    def of_lost_lease(self, pid: int, moment: float) -> Fault | None:
        """Return the fault by which a worker may have lost its jobs, or given them up, at a moment."""
        return next(
            (
                fault
                for fault in self._faults
                if fault.at <= moment <= fault.until + _RECORDING
                and (not fault.pids or pid in fault.pids)
                and self._loses_jobs(fault)
            ),
            None,
        )

    def costs_a_run(self, fault: Fault) -> bool:
        """Return whether a fault is known to cost a run."""
        return fault.kind in {"kill", "term", NODE_LOCKS_RELEASED} or self._loses_jobs(fault)

    def _is_excuse(self, fault: Fault) -> bool:
        """Return whether a fault can explain an extra run. An unplanned pause only can if it loses jobs."""
        return fault.kind != PAUSED or self._loses_jobs(fault)

    def _loses_jobs(self, fault: Fault) -> bool:
        """Return whether a fault silenced a worker for so long that other workers may claim its jobs."""
        if fault.kind not in _SILENCES:
            return False
        if fault.seconds >= self._leases.long_silence:
            return True
        lost = any(
            other.kind in _SESSIONS_LOST
            and (not other.pids or set(other.pids) & set(fault.pids) or not fault.pids)
            and _overlaps(other, fault.at, fault.until)
            for other in self._faults
        )
        return lost and fault.seconds >= self._leases.short_silence


def _may_cost_a_run(fault: Fault, run: Run) -> bool:
    if fault.kind == NODE_LOCKS_RELEASED:
        return any(run.started.job in jobs for jobs in fault.locks.values())
    if fault.kind not in _SESSIONS_LOST | _SILENCES | {"kill", "term"}:
        return False
    return not fault.pids or run.started.pid in fault.pids


def _overlaps(fault: Fault, since: float, until: float) -> bool:
    return fault.at <= until and fault.until >= since
