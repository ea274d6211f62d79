"""Latency when there is nothing else to do, beside that of a worker and a database that are new.

Other work on the machine moves such figures more than anything that we look for. It meets both of a pair,
whose probes take turns.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.soak.course import FEW_DEAD, FEWEST_TURNS, Pair
from benchmarks.soak.tables import state_of_tables

if TYPE_CHECKING:
    import asyncpg

    from benchmarks.driver import DriverProcess

_WARM_UP, _TURNS, _PROBES = 50, 20, 10


async def warm_up(worker: DriverProcess) -> int:
    """Have it run some probes; how many."""
    await worker.ask("probe", samples=_WARM_UP)
    return _WARM_UP


async def idle_latencies(worker: DriverProcess) -> list[float]:
    """Milliseconds, of as many probes as a pair has."""
    return milliseconds((await worker.ask("probe", samples=_TURNS * _PROBES)).value)


async def compare(soaked: DriverProcess, fresh: DriverProcess) -> Pair:
    """Some probes to the one, some to the other, and so on."""
    pair = Pair([], [])
    for _ in range(_TURNS):
        pair.soaked.extend(milliseconds((await soaked.ask("probe", samples=_PROBES)).value))
        pair.fresh.extend(milliseconds((await fresh.ask("probe", samples=_PROBES)).value))
    return pair


async def settle(connection: asyncpg.Connection, naptime: float) -> None:
    """Wait until autovacuum has been there, for which it gets some turns."""
    deadline = time.monotonic() + FEWEST_TURNS * naptime
    while time.monotonic() < deadline:
        jobs, _ = await state_of_tables(connection)
        if jobs.dead <= FEW_DEAD:
            break
        await asyncio.sleep(1)


def milliseconds(seconds: list[float]) -> list[float]:
    """As they are written."""
    return [round(value * 1000, 3) for value in seconds]
