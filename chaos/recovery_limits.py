"""The rule that a lost worker's jobs start again within their recovery limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.audit import Violation
from chaos.figures import evidence_of, recoveries, recovery_limit

if TYPE_CHECKING:
    from chaos.history import History
    from chaos.leases import Leases

_ALLOWANCE = 5.0
"""Seconds for a slot to become free, and for a busy machine."""


def late_recoveries(history: History, leases: Leases) -> list[Violation]:
    """Return a violation for each late recovery, if no other fault interfered and it was the job's first."""
    found = []
    for recovery in recoveries(history, leases):
        limit = recovery_limit(recovery, history, leases)
        if recovery.alone and not recovery.repeated and recovery.seconds > limit + _ALLOWANCE:
            message = (
                f"job {recovery.rerun.started.job} started again {recovery.seconds:.1f} s after "
                f"{recovery.fault.kind!r}; the limit is {limit:.1f} s"
            )
            found.append(Violation("late", message, evidence_of(recovery)))
    return found
