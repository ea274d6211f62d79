"""The parts of a run that faults can hit, and the ledger that records the faults."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.ledger import Fault, now
from chaos.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chaos.feeder import Feeder
    from chaos.fleet import Fleet, Slot
    from chaos.ledger import Ledger
    from chaos.schedule import PlannedFault
    from chaos.server import Server

_TARGET_TIMEOUT = 5.0


@dataclass
class ActiveFault:
    """A fault that has started and is not over."""

    kind: str
    slots: list[Slot]
    pids: list[int]
    at: float = field(default_factory=now)
    locks: dict[str, list[int]] = field(default_factory=dict)
    note: str = ""


@dataclass
class Harness:
    """The server, the workers and the feeder of a run, and the ledger of faults."""

    server: Server
    fleet: Fleet
    feeder: Feeder
    ledger: Ledger
    programs: frozenset[str]
    """The programs of the workers to hit: Python; Node in the comparison; or both."""
    releasing_node_locks: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the locks of dead Node workers are released, so that each lock is counted once."""

    async def target(self, planned: PlannedFault) -> Slot | None:
        """Return the worker to hit: the planned one, or the next one without an active fault."""
        slots = self.fleet.of(*self.programs)
        ordered = [*slots[planned.slot :], *slots[: planned.slot]]

        def free() -> Slot | None:
            return next((slot for slot in ordered if slot.ready and not slot.faulted), None)

        await until(free, _TARGET_TIMEOUT)
        return free()

    @asynccontextmanager
    async def inject(self, planned: PlannedFault, *slots: Slot) -> AsyncIterator[ActiveFault]:
        """Start a fault, which is over at the end of the block. Without slots it hits the server."""
        for slot in slots:
            slot.faulted = True
        strike = ActiveFault(planned.kind, list(slots), [slot.pid for slot in slots])
        try:
            yield strike
        finally:
            for slot in slots:
                slot.faulted = False
            self.write(strike)

    def write(self, strike: ActiveFault) -> None:
        """Record a fault that is over."""
        fault = Fault(
            at=strike.at,
            until=now(),
            kind=strike.kind,
            pids=strike.pids,
            slots=[slot.number for slot in strike.slots],
            locks=strike.locks,
            note=strike.note,
        )
        self.ledger.write(fault)
