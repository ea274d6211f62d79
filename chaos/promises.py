"""Whether jobs began again as soon as was promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.audit import Violation
from chaos.figures import evidence_of, promised, recoveries

if TYPE_CHECKING:
    from chaos.history import History
    from chaos.leases import Leases

_ALLOWANCE = 5.0
"""Seconds for a slot to become free, and for a machine that has other things to do."""


def late_recoveries(history: History, leases: Leases) -> list[Violation]:
    """Those that came late though nothing else was broken, and though it was their first time."""
    found = []
    for recovery in recoveries(history, leases):
        limit = promised(recovery, history, leases)
        if recovery.alone and not recovery.repeated and recovery.seconds > limit + _ALLOWANCE:
            what = (
                f"job {recovery.again.begun.job} began again {recovery.seconds:.1f} s after "
                f"{recovery.fault.kind!r}; promised are {limit:.1f} s"
            )
            found.append(Violation("late", what, evidence_of(recovery)))
    return found
