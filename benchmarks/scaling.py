"""What `make bench-scaling` draws: how our own figures change with size."""

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

    from benchmarks.arena import Arena

    Drawing: TypeAlias = Callable[[Arena, bool], Awaitable[list[Curve]]]

_OURS = [CONTENDERS["ours"], CONTENDERS["ours tuned"]]
_RATE, _CLAIM = "jobs/s", "ms for claiming 10 jobs"
_WORKED_OFF = 20_000
_COURSE_POINTS = 20
_COURSE_POLLING = 0.05
_COURSE_LIMIT = 120.0


async def _backlog(arena: Arena, quick: bool) -> list[Curve]:
    sizes = [1_000, 10_000, 100_000] if quick else [1_000, 10_000, 100_000, 1_000_000]
    rates: dict[str, list[Point]] = {contender.name: [] for contender in _OURS}
    claims = []
    async with Backlog.open(arena) as backlog:
        for size in sizes:
            await backlog.fill(size)
            claims.append(Point(size, await backlog.claim_time()))
            for contender in _OURS:
                # Of a large backlog a part is worked off, which leaves it large.
                if size <= _WORKED_OFF:
                    await backlog.fill(size)
                drivers = await arena.drivers(contender, 1)
                figures = await drain(Load(), arena, contender, drivers, min(size, _WORKED_OFF))
                rates[contender.name].append(Point(size, figures["rate"]))
    return [
        Curve("backlog", "Throughput and backlog", "jobs that wait", _RATE, _lines(rates)),
        Curve("backlog-claim", "Claiming and backlog", "jobs that wait", _CLAIM, [Line("ours", claims)]),
    ]


async def _ahead(arena: Arena, quick: bool) -> list[Curve]:
    sizes = [0, 1_000, 10_000] if quick else [0, 1_000, 10_000, 100_000, 300_000]
    lines: dict[str, list[Point]] = {name: [] for name in UNRUNNABLE}
    async with Backlog.open(arena) as backlog:
        for name, kind in UNRUNNABLE.items():
            for size in sizes:
                await backlog.fill(size, kind)
                lines[name].append(Point(max(size, 1), await backlog.claim_time()))
    title = "Claiming past jobs that cannot run"
    return [Curve("ahead", title, "jobs ahead", _CLAIM, _lines(lines))]


async def _queues(arena: Arena, quick: bool) -> list[Curve]:
    sizes = [1, 10, 100, 1_000] if quick else [1, 10, 100, 1_000, 10_000, 100_000]
    lines: dict[str, list[Point]] = {contender.name: [] for contender in _OURS}
    for size in sizes:
        for contender in _OURS:
            load, jobs = Load(queues=size), max(size, 2_000 if quick or size == 1 else 10_000)
            figures = await throughput(load, arena, contender, jobs)
            lines[contender.name].append(Point(size, figures["rate"]))
    return [Curve("queues", "Throughput and serial queues", "queues", _RATE, _lines(lines))]


async def _processes(arena: Arena, quick: bool) -> list[Curve]:
    counts = {"ours": 40_000, "ours tuned": 100_000}
    lines: dict[str, list[Point]] = {contender.name: [] for contender in _OURS}
    for processes in (1, 2) if quick else (1, 2, 4):
        for contender in _OURS:
            jobs = counts[contender.name] // (10 if quick else 1)
            figures = await throughput(Load(processes=processes), arena, contender, jobs)
            lines[contender.name].append(Point(processes, figures["rate"]))
    return [Curve("processes", "Throughput and processes", "processes", _RATE, _lines(lines))]


async def _old_transaction(arena: Arena, quick: bool) -> list[Curve]:
    jobs = 20_000 if quick else 200_000
    lines = {"nothing else": await _course(arena, jobs)}
    async with open_transaction(arena.dsn(_OURS[0])):
        lines["beside an old transaction"] = await _course(arena, jobs)
    title = "Throughput beside a transaction that stays open"
    return [Curve("old-transaction", title, "jobs done", _RATE, _lines(lines), log_x=False)]


async def _course(arena: Arena, jobs: int) -> list[Point]:
    """The rate over the course of working off so many jobs."""
    contender = _OURS[0]
    await arena.fill(contender, task="trivial", count=jobs)
    drivers = await arena.drivers(contender, 1)
    points: list[Point] = []
    step = jobs // _COURSE_POINTS
    done, last = 0, time.monotonic()
    deadline = last + _COURSE_LIMIT
    try:
        await start(drivers, Load().concurrency, tuned=False)
        while done < jobs and time.monotonic() < deadline:
            await asyncio.sleep(_COURSE_POLLING)
            now_done, now = await completed(drivers)
            if now_done // step > done // step:
                # Both lines are to have the same places on the axis.
                points.append(Point(now_done // step * step, (now_done - done) / (now - last)))
                done, last = now_done, now
    finally:
        await arena.stop(drivers)
    if done < jobs:
        arena.remarks.append(f"{done:,} of {jobs:,} jobs were done when {_COURSE_LIMIT:.0f} s were over.")
    return points


@asynccontextmanager
async def open_transaction(dsn: str) -> AsyncIterator[None]:
    """A transaction that sees the database as it is now, and so keeps all that is deleted from going."""
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.execute("select 1")
            yield
    finally:
        await connection.close()


async def _analysed(arena: Arena, quick: bool) -> list[Curve]:
    sizes = [1_000, 10_000] if quick else [1_000, 10_000, 100_000, 1_000_000]
    lines: dict[str, list[Point]] = {"never analysed": [], "analysed": []}
    async with Backlog.open(arena) as backlog:
        for size in sizes:
            await backlog.forget_statistics()
            await backlog.fill(size, analyse=False)
            lines["never analysed"].append(Point(size, await backlog.claim_time()))
            await backlog.fill(size)
            lines["analysed"].append(Point(size, await backlog.claim_time()))
    title = "Claiming from a table that was never analysed"
    return [Curve("analysed", title, "jobs that wait", _CLAIM, _lines(lines))]


def _lines(points: dict[str, list[Point]]) -> list[Line]:
    return [Line(name, found) for name, found in points.items()]


DRAWINGS: dict[str, Drawing] = {
    "backlog": _backlog,
    "jobs ahead that cannot run": _ahead,
    "serial queues": _queues,
    "processes": _processes,
    "a transaction that stays open": _old_transaction,
    "a table that was never analysed": _analysed,
}


def selected(texts: Sequence[str]) -> dict[str, Drawing]:
    """The drawings whose name contains one of the texts, or all."""
    return {name: draw for name, draw in DRAWINGS.items() if not texts or any(text in name for text in texts)}
