"""Which fault explains that a job ran again, or beside another."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chaos.ledger import NODE_FREED, PAUSED

if TYPE_CHECKING:
    from chaos.history import History, Run
    from chaos.leases import Leases
    from chaos.ledger import Fault

# A worker whose beat gets no answer ends that connection by itself, so silence on the line is among them.
_SESSIONS_LOST = frozenset(
    {"cut", "terminate", "restart fast", "restart immediate", "restart long", "stall", "dark", "long dark"}
)
_SILENCES = frozenset(
    {"freeze", "long freeze", "dark", "long dark", "stall", "restart long", "restart fast"}
    | {"restart immediate", "hold gil", PAUSED}
)
_PAUSES = frozenset({"freeze", "long freeze", "hold gil", PAUSED})
"""In these a process does nothing at all, and cannot notice that it has lost its jobs."""
_RIGHT_AFTER = 2.0
"""Seconds within which an outcome is recorded, unless something keeps it from that."""
_INSTRUCTIONS = 2.0
"""Seconds for which a process that was frozen may go on with what is no longer its own."""


class Cause(NamedTuple):
    """Why a job ran again."""

    kind: str
    fault: Fault
    expected: bool
    """Whether such a fault is known to cost a run. Others should not, even if they explain it."""


class Causes:
    """The faults of a run, and what follows from them."""

    def __init__(self, history: History, leases: Leases) -> None:
        self._faults = history.faults
        self._leases = leases

    def of_rerun(self, earlier: Run, later: Run) -> Cause | None:
        """The fault by which the earlier run did not count; the most certain one if there are some."""
        found = [
            Cause(fault.kind, fault, self.costs_a_run(fault))
            for fault in self._faults
            if _may_cost_a_run(fault, earlier)
            and self._counts(fault)
            and _meets(fault, earlier.at, self._settled(earlier, later))
        ]
        found.sort(key=lambda cause: (not cause.expected, abs(cause.fault.at - earlier.end)))
        return found[0] if found else None

    def of_claim_without_run(self, after: float, before: float) -> Fault | None:
        """A fault by which a worker may have lost a job that it had claimed and not begun."""
        return next(
            (
                fault
                for fault in self._faults
                if fault.kind in _SESSIONS_LOST | _SILENCES | {"kill", "term", NODE_FREED}
                and self._counts(fault)
                and _meets(fault, after, before)
            ),
            None,
        )

    def of_overlap(self, earlier: Run) -> Fault | None:
        """The pause in which the earlier run lost its job without being able to notice."""
        for fault in self._faults:
            if (
                fault.kind in _PAUSES
                and earlier.begun.pid in fault.pids
                and _meets(fault, earlier.at, earlier.end)
                # A thread cannot be stopped, but its process can end.
                and earlier.end <= fault.until + _INSTRUCTIONS
                and self._loses_jobs(fault)
            ):
                return fault
        return None

    def during(self, run: Run) -> list[Fault]:
        """What hit the run's worker while it ran."""
        return [
            fault for fault in self._faults if run.begun.pid in fault.pids and _meets(fault, run.at, run.end)
        ]

    def _settled(self, earlier: Run, later: Run) -> float:
        """Until when something could keep the outcome of a run from being recorded."""
        settled = earlier.end + _RIGHT_AFTER
        for fault in self._faults:
            if fault.kind == "refuse" and _meets(fault, earlier.at, settled):
                # A refused result is sent again after pauses that double.
                settled = max(settled, fault.until + fault.seconds + _RIGHT_AFTER)
        return min(settled, later.at)

    def of_lost_lease(self, pid: int, moment: float) -> Fault | None:
        """The silence by which that worker may have lost its jobs, or have given them up, by then."""
        return next(
            (
                fault
                for fault in self._faults
                if fault.at <= moment <= fault.until + _RIGHT_AFTER
                and (not fault.pids or pid in fault.pids)
                and self._loses_jobs(fault)
            ),
            None,
        )

    def costs_a_run(self, fault: Fault) -> bool:
        """Whether such a fault is known to."""
        return fault.kind in {"kill", "term", NODE_FREED} or self._loses_jobs(fault)

    def _counts(self, fault: Fault) -> bool:
        """A pause that nobody planned is an excuse only for what it must cost."""
        return fault.kind != PAUSED or self._loses_jobs(fault)

    def _loses_jobs(self, fault: Fault) -> bool:
        """Whether it silenced a worker for so long that others may take its jobs."""
        if fault.kind not in _SILENCES:
            return False
        if fault.seconds >= self._leases.long_silence:
            return True
        lost = any(
            other.kind in _SESSIONS_LOST
            and (not other.pids or set(other.pids) & set(fault.pids) or not fault.pids)
            and _meets(other, fault.at, fault.until)
            for other in self._faults
        )
        return lost and fault.seconds >= self._leases.short_silence


def _may_cost_a_run(fault: Fault, run: Run) -> bool:
    if fault.kind == NODE_FREED:
        return any(run.begun.job in jobs for jobs in fault.locks.values())
    if fault.kind not in _SESSIONS_LOST | _SILENCES | {"kill", "term"}:
        return False
    return not fault.pids or run.begun.pid in fault.pids


def _meets(fault: Fault, since: float, until: float) -> bool:
    return fault.at <= until and fault.until >= since
