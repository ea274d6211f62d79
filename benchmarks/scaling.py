"""The curves of `make bench-scaling`: how the figures of graphile-worker for Python change with size."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from benchmarks.backlog import UNRUNNABLE, Backlog
from benchmarks.contenders import CONTENDERS
from benchmarks.measure import Load, completed, drain, start, throughput
from benchmarks.results import Curve, Line, Point

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from typing import TypeAlias

    from benchmarks.workbench import Workbench

    CurveFunction: TypeAlias = Callable[[Workbench, bool], Awaitable[list[Curve]]]

_PYTHON_CONTENDERS = [CONTENDERS["python"], CONTENDERS["python tuned"]]
_RATE, _CLAIM = "jobs/s", "ms to claim 10 jobs"
_MOST_RUN = 20_000
_RATE_POINTS = 20
_RATE_POLL_INTERVAL = 0.05
_RATE_LIMIT = 120.0


async def _backlog(workbench: Workbench, quick: bool) -> list[Curve]:
    sizes = [1_000, 10_000, 100_000] if quick else [1_000, 10_000, 100_000, 1_000_000]
    rates: dict[str, list[Point]] = {contender.name: [] for contender in _PYTHON_CONTENDERS}
    claims = []
    async with Backlog.open(workbench) as backlog:
        for size in sizes:
            await backlog.fill(size)
            claims.append(Point(size, await backlog.claim_time()))
            for contender in _PYTHON_CONTENDERS:
                # Only a part of a large backlog is run, so it stays large and need not be filled again.
                if size <= _MOST_RUN:
                    await backlog.fill(size)
                drivers = await workbench.drivers(contender, 1)
                figures = await drain(Load(), workbench, contender, drivers, min(size, _MOST_RUN))
                rates[contender.name].append(Point(size, figures["rate"]))
    return [
        Curve("backlog", "Throughput by backlog", "waiting jobs", _RATE, _lines(rates)),
        Curve("backlog-claim", "Claim time by backlog", "waiting jobs", _CLAIM, [Line("python", claims)]),
    ]


async def _ahead(workbench: Workbench, quick: bool) -> list[Curve]:
    sizes = [0, 1_000, 10_000] if quick else [0, 1_000, 10_000, 100_000, 300_000]
    lines: dict[str, list[Point]] = {name: [] for name in UNRUNNABLE}
    async with Backlog.open(workbench) as backlog:
        for name, kind in UNRUNNABLE.items():
            for size in sizes:
                await backlog.fill(size, kind)
                lines[name].append(Point(max(size, 1), await backlog.claim_time()))
    title = "Claim time behind jobs that cannot run"
    return [Curve("ahead", title, "jobs ahead", _CLAIM, _lines(lines))]


async def _queues(workbench: Workbench, quick: bool) -> list[Curve]:
    sizes = [1, 10, 100, 1_000] if quick else [1, 10, 100, 1_000, 10_000, 100_000]
    lines: dict[str, list[Point]] = {contender.name: [] for contender in _PYTHON_CONTENDERS}
    for size in sizes:
        for contender in _PYTHON_CONTENDERS:
            load, jobs = Load(queues=size), max(size, 2_000 if quick or size == 1 else 10_000)
            figures = await throughput(load, workbench, contender, jobs)
            lines[contender.name].append(Point(size, figures["rate"]))
    return [Curve("queues", "Throughput by serial queues", "queues", _RATE, _lines(lines))]


async def _processes(workbench: Workbench, quick: bool) -> list[Curve]:
    counts = {"python": 40_000, "python tuned": 100_000}
    lines: dict[str, list[Point]] = {contender.name: [] for contender in _PYTHON_CONTENDERS}
    for processes in (1, 2) if quick else (1, 2, 4):
        for contender in _PYTHON_CONTENDERS:
            jobs = counts[contender.name] // (10 if quick else 1)
            figures = await throughput(Load(processes=processes), workbench, contender, jobs)
            lines[contender.name].append(Point(processes, figures["rate"]))
    return [Curve("processes", "Throughput by processes", "processes", _RATE, _lines(lines))]


async def _old_transaction(workbench: Workbench, quick: bool) -> list[Curve]:
    jobs = 20_000 if quick else 200_000
    lines = {"without an old transaction": await _rate_over_time(workbench, jobs)}
    async with open_transaction(workbench.dsn(_PYTHON_CONTENDERS[0])):
        lines["with an old transaction"] = await _rate_over_time(workbench, jobs)
    title = "Throughput with a long-running transaction"
    return [Curve("old-transaction", title, "jobs done", _RATE, _lines(lines), log_x=False)]


async def _rate_over_time(workbench: Workbench, jobs: int) -> list[Point]:
    """Return the rate over the time in which a number of jobs run."""
    contender = _PYTHON_CONTENDERS[0]
    await workbench.fill(contender, task="trivial", count=jobs)
    drivers = await workbench.drivers(contender, 1)
    points: list[Point] = []
    step = jobs // _RATE_POINTS
    done, last = 0, time.monotonic()
    deadline = last + _RATE_LIMIT
    try:
        await start(drivers, Load().concurrency, tuned=False)
        while done < jobs and time.monotonic() < deadline:
            await asyncio.sleep(_RATE_POLL_INTERVAL)
            now_done, now = await completed(drivers)
            if now_done // step > done // step:
                # Both lines need the same positions on the axis.
                points.append(Point(now_done // step * step, (now_done - done) / (now - last)))
                done, last = now_done, now
    finally:
        await workbench.stop(drivers)
    if done < jobs:
        workbench.remarks.append(f"Only {done:,} of {jobs:,} jobs were done after {_RATE_LIMIT:.0f} s.")
    return points


@asynccontextmanager
async def open_transaction(dsn: str) -> AsyncIterator[None]:
    """Keep a transaction open whose snapshot prevents the removal of deleted rows."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.execute("select 1")
            yield
    finally:
        await connection.close()


async def _analysed(workbench: Workbench, quick: bool) -> list[Curve]:
    sizes = [1_000, 10_000] if quick else [1_000, 10_000, 100_000, 1_000_000]
    lines: dict[str, list[Point]] = {"never analysed": [], "analysed": []}
    async with Backlog.open(workbench) as backlog:
        for size in sizes:
            await backlog.forget_statistics()
            await backlog.fill(size, analyse=False)
            lines["never analysed"].append(Point(size, await backlog.claim_time()))
            await backlog.fill(size)
            lines["analysed"].append(Point(size, await backlog.claim_time()))
    title = "Claim time from a table that was never analysed"
    return [Curve("analysed", title, "waiting jobs", _CLAIM, _lines(lines))]


def _lines(points: dict[str, list[Point]]) -> list[Line]:
    return [Line(name, found) for name, found in points.items()]


CURVES: dict[str, CurveFunction] = {
    "backlog": _backlog,
    "jobs that cannot run": _ahead,
    "serial queues": _queues,
    "processes": _processes,
    "a long-running transaction": _old_transaction,
    "a table that was never analysed": _analysed,
}


def selected(texts: Sequence[str]) -> dict[str, CurveFunction]:
    """Return the curves whose name contains one of the texts, or all curves."""
    return {name: draw for name, draw in CURVES.items() if not texts or any(text in name for text in texts)}
