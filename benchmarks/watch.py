"""What workers and server spend while jobs run."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.driver import DriverProcess
    from benchmarks.server import Gauge


class Costs:
    """What it was, once it is over."""

    def __init__(self) -> None:
        self.connections = 0
        self.sums: dict[str, float] = {}

    def figures(self, jobs: int) -> dict[str, float]:
        """By name; what adds up is for 1,000 jobs."""
        shares = {name: value / jobs * 1000 for name, value in self.sums.items()}
        return {"connections": float(self.connections), **shares}


@asynccontextmanager
async def watching(gauge: Gauge, database: str, drivers: Sequence[DriverProcess]) -> AsyncIterator[Costs]:
    """Watch as long as this lasts; workers must have stopped by then, for only then all is counted."""
    costs, enough = Costs(), asyncio.Event()
    before, cpu = await gauge.spent(database), sum(driver.cpu() for driver in drivers)
    connections = asyncio.create_task(gauge.most_connections(database, await gauge.now(), enough))
    try:
        yield costs
    finally:
        enough.set()
        costs.connections = await connections
    cpu = sum(driver.cpu() for driver in drivers) - cpu
    spent = await gauge.spent(database) - before
    costs.sums = {
        "worker cpu": cpu,
        "server cpu": spent.cpu,
        "transactions": spent.transactions,
        "wal": spent.wal / 1024,
    }
    if spent.statements is not None:
        costs.sums["statements"] = spent.statements
