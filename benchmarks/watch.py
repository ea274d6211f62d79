"""The resource usage of workers and server while jobs run."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.driver import DriverProcess
    from benchmarks.server import UsageMeter


class Costs:
    """The resource usage of a measurement, available after its end."""

    def __init__(self) -> None:
        self.connections = 0
        self.sums: dict[str, float] = {}

    def figures(self, jobs: int) -> dict[str, float]:
        """Return the figures by name. Sums are per 1,000 jobs."""
        shares = {name: value / jobs * 1000 for name, value in self.sums.items()}
        return {"connections": float(self.connections), **shares}


@asynccontextmanager
async def watching(
    meter: UsageMeter, database: str, drivers: Sequence[DriverProcess]
) -> AsyncIterator[Costs]:
    """Measure the usage during the block. Workers must stop inside it, or not everything is counted."""
    costs, stopping = Costs(), asyncio.Event()
    before, cpu = await meter.usage(database), sum(driver.cpu() for driver in drivers)
    connections = asyncio.create_task(meter.most_connections(database, await meter.now(), stopping))
    try:
        yield costs
    finally:
        stopping.set()
        costs.connections = await connections
    cpu = sum(driver.cpu() for driver in drivers) - cpu
    spent = await meter.usage(database) - before
    costs.sums = {
        "worker cpu": cpu,
        "server cpu": spent.cpu,
        "transactions": spent.transactions,
        "wal": spent.wal / 1024,
    }
    if spent.statements is not None:
        costs.sums["statements"] = spent.statements
