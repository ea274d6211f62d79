"""Where the faults of a run happen, and how they are written down."""

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
    from chaos.schedule import Planned
    from chaos.server import Server

_PATIENCE = 5.0


@dataclass
class Strike:
    """A fault that is going on."""

    kind: str
    slots: list[Slot]
    pids: list[int]
    at: float = field(default_factory=now)
    locks: dict[str, list[int]] = field(default_factory=dict)
    note: str = ""


@dataclass
class Scene:
    """What a fault can hit, and the ledger of faults."""

    server: Server
    fleet: Fleet
    feeder: Feeder
    ledger: Ledger
    programs: frozenset[str]
    """Which workers are hit: ours; npm's in the comparison; or both."""
    freeing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever frees what npm's workers left, so that it is counted once."""

    async def target(self, planned: Planned) -> Slot | None:
        """The worker to hit: the one that was planned, or one after it that has no trouble now."""
        slots = self.fleet.of(*self.programs)
        ordered = [*slots[planned.slot :], *slots[: planned.slot]]

        def free() -> Slot | None:
            return next((slot for slot in ordered if slot.ready and not slot.troubled), None)

        await until(free, _PATIENCE)
        return free()

    @asynccontextmanager
    async def strike(self, planned: Planned, *slots: Slot) -> AsyncIterator[Strike]:
        """A fault begins, and is over at the end of this; without slots it hits the server."""
        for slot in slots:
            slot.troubled = True
        strike = Strike(planned.kind, list(slots), [slot.pid for slot in slots])
        try:
            yield strike
        finally:
            for slot in slots:
                slot.troubled = False
            self.write(strike)

    def write(self, strike: Strike) -> None:
        """Write down a fault that is over."""
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
