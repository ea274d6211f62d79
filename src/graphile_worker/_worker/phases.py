"""The phases of a worker, and whether it was declared dead."""

from __future__ import annotations

from enum import Enum, IntEnum, auto


class Phase(IntEnum):
    """The phases of a worker, in their order. A worker never returns to an earlier phase."""

    RUNNING = auto()
    STOPPING = auto()
    """Nothing more is claimed, and jobs that were not started are returned."""
    INTERRUPTING = auto()
    """Running jobs are interrupted."""
    SAVING = auto()
    """The event loop is being closed. The worker records as many outcomes as it can."""
    ENDED = auto()


class Standing(Enum):
    """Whether another worker has declared this one dead."""

    ALIVE = auto()
    DECLARED_DEAD = auto()
    """Another worker declared this one dead. The worker has to read which jobs it still has locked."""
    RECONCILED = auto()
    """The worker has read which jobs it still has locked. No heartbeat has been recorded since."""
