"""The idle latency of the worker, compared with a new worker on a new database.

Other load on the machine changes such figures more than the effects that the test looks for. So the probes of
both workers alternate, and the load affects both.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.soak.result import FEW_DEAD, FEWEST_CYCLES, Pair
from benchmarks.soak.tables import table_states

if TYPE_CHECKING:
    import asyncpg

    from benchmarks.driver import DriverProcess

_WARM_UP, _TURNS, _PROBES = 50, 20, 10


async def warm_up(worker: DriverProcess) -> int:
    """Run some probes to warm up a worker. Return their number."""
    await worker.request("probe", samples=_WARM_UP)
    return _WARM_UP


async def idle_latencies(worker: DriverProcess) -> list[float]:
    """Return the latencies of as many probes as a pair has, in milliseconds."""
    return milliseconds((await worker.request("probe", samples=_TURNS * _PROBES)).value)


async def compare(soaked: DriverProcess, fresh: DriverProcess) -> Pair:
    """Send probes to both workers in turns."""
    pair = Pair([], [])
    for _ in range(_TURNS):
        pair.soaked.extend(milliseconds((await soaked.request("probe", samples=_PROBES)).value))
        pair.fresh.extend(milliseconds((await fresh.request("probe", samples=_PROBES)).value))
    return pair


async def settle(connection: asyncpg.Connection, naptime: float) -> None:
    """Wait until autovacuum has run, for some cycles at most."""
    deadline = time.monotonic() + FEWEST_CYCLES * naptime
    while time.monotonic() < deadline:
        jobs, _ = await table_states(connection)
        if jobs.dead <= FEW_DEAD:
            break
        await asyncio.sleep(1)


def milliseconds(seconds: list[float]) -> list[float]:
    """Convert seconds to rounded milliseconds."""
    return [round(value * 1000, 3) for value in seconds]
