"""What is measured, once, of one contender: each function gives its figures by name."""

from __future__ import annotations

import asyncio
import math
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders import once_command
from benchmarks.server import environment
from benchmarks.watch import watching

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from typing import TypeAlias

    from benchmarks.arena import Arena
    from benchmarks.contenders import Contender
    from benchmarks.driver import Answer, DriverProcess

    Figures: TypeAlias = dict[str, float]

_POLLING = 0.02
_WARM_UP = 20
_LATENCY_CONCURRENCY = 10
_FEEDING_RATE = 1000.0
_FEEDING_SECONDS = 3.0
_FIRST_DELAY, _LAST_DELAY = 0.3, 2.3
_CHUNK = 100_000
_FRESH = 100  # a driver that nothing else uses
_NODE_TASK = "module.exports = async () => {};\n"


class GaveUp(Exception):  # noqa: N818 - an outcome
    """It took too long."""


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs, and the workers to run them."""

    concurrency: int = 24
    processes: int = 1
    task: str = "trivial"
    queues: int = 0
    seconds: float = 0.0
    """How long each job sleeps, if that is its task."""


async def enqueueing(how: str, arena: Arena, contender: Contender, count: int) -> Figures:
    """How many jobs per second are added; `how` as drivers are told."""
    driver = await arena.driver(contender)
    await driver.ask("enqueue", task="trivial", count=_WARM_UP, how=how)
    await arena.fill(contender)
    seconds = (await driver.ask("enqueue", task="trivial", count=count, how=how, limit=arena.limit)).seconds
    return {"rate": count / seconds}


async def throughput(load: Load, arena: Arena, contender: Contender, count: int) -> Figures:
    """How many jobs per second run: from the start of workers on a full queue to the last completion."""
    await arena.fill(contender, task=load.task, count=count, queues=load.queues, seconds=load.seconds)
    drivers = await arena.drivers(contender, load.processes)
    return await drain(load, arena, contender, drivers, count)


async def costs(load: Load, arena: Arena, contender: Contender, count: int) -> Figures:
    """The same, with what it took of workers and server."""
    await arena.fill(contender, task=load.task, count=count, queues=load.queues, seconds=load.seconds)
    drivers = await arena.drivers(contender, load.processes)
    async with watching(arena.gauge, arena.database(contender), drivers) as spent:
        figures = await drain(load, arena, contender, drivers, count)
    return {**figures, **spent.figures(count)}


async def drain(
    load: Load, arena: Arena, contender: Contender, drivers: list[DriverProcess], count: int
) -> Figures:
    """Work until so many jobs are complete."""
    begin = time.monotonic()
    try:
        await start(drivers, load.concurrency, tuned=contender.tuned)
        done, last = await completion(drivers, count, arena.limit)
    finally:
        await arena.stop(drivers)
    return {"rate": done / (last - begin), "seconds": last - begin}


async def start(drivers: Sequence[DriverProcess], concurrency: int, *, tuned: bool) -> None:
    """Have them all begin to work at once."""
    await _together(*(driver.ask("start", concurrency=concurrency, tuned=tuned) for driver in drivers))


async def _together(*asked: Awaitable[Answer]) -> list[Answer]:
    """All answers; a bad one is not to keep the others from being read."""
    answers = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def completion(drivers: Sequence[DriverProcess], count: int, limit: float) -> tuple[int, float]:
    """Wait until so many jobs are complete; how many are, and the time of the last."""
    deadline = time.monotonic() + limit
    while True:
        done, last = await completed(drivers)
        if done >= count:
            return done, last
        if time.monotonic() > deadline:
            raise GaveUp(f"gave up after {done:,} of {count:,} jobs in {limit:.0f} s")
        await asyncio.sleep(_POLLING)


async def completed(drivers: Sequence[DriverProcess]) -> tuple[int, float]:
    """How many jobs are complete, and the time of the last."""
    answers = [(await driver.ask("completed")).value for driver in drivers]
    return sum(done for done, _ in answers), max(last for _, last in answers)


async def idle_latency(arena: Arena, contender: Contender, samples: int) -> Figures:
    """Milliseconds from adding a job to the first line of its task, when there is nothing else to do."""
    driver = await arena.driver(contender)
    await arena.fill(contender)
    try:
        await start([driver], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        await driver.ask("probe", samples=_WARM_UP)
        answer = await driver.ask("probe", samples=samples, limit=arena.limit)
    finally:
        await arena.stop([driver])
    return _distribution(answer.value)


async def loaded_latency(
    reference: tuple[str, str], arena: Arena, contender: Contender, _count: int
) -> Figures:
    """The same while another process adds jobs: at half of the best rate of a case and contender, for 3 s."""
    rate = arena.best.get(reference, 2 * _FEEDING_RATE) / 2
    count = round(rate * _FEEDING_SECONDS)
    worker, feeder = await arena.drivers(contender, 2)
    await arena.fill(contender)
    try:
        await start([worker], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        _, heard = await _together(
            feeder.ask("feed", rate=rate, count=count, limit=arena.limit),
            worker.ask("heard", count=count, limit=arena.limit),
        )
    finally:
        await arena.stop([worker])
    return _distribution(heard.value)


async def punctuality(arena: Arena, contender: Contender, count: int) -> Figures:
    """How many milliseconds after they are due jobs begin."""
    span = _LAST_DELAY - _FIRST_DELAY
    delays = [_FIRST_DELAY + span * number / count for number in range(count)]
    driver = await arena.driver(contender)
    await arena.fill(contender)
    try:
        await start([driver], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        await driver.ask("schedule", delays=delays)
        answer = await driver.ask("heard", count=count, limit=arena.limit)
    finally:
        await arena.stop([driver])
    return _distribution(answer.value)


async def start_up(arena: Arena, contender: Contender, count: int) -> Figures:
    """Seconds that a process takes to start, find no jobs and end; of so many the one in the middle."""
    await arena.fill(contender)
    command, variables = once_command(contender.program), environment(arena.dsn(contender))
    with tempfile.TemporaryDirectory() as name:
        tasks = Path(name) / "tasks"
        tasks.mkdir()
        (tasks / "trivial.js").write_text(_NODE_TASK)
        (tasks / "trivial.py").write_text("async def trivial(payload): ...\n")

        def run() -> float:
            begin = time.monotonic()
            subprocess.run(
                command, cwd=name, env=variables, check=True, capture_output=True, timeout=arena.limit
            )
            return time.monotonic() - begin

        taken = [await asyncio.to_thread(run) for _ in range(count)]
    return {"seconds": statistics.median(taken)}


async def memory(arena: Arena, contender: Contender, count: int) -> Figures:
    """Megabytes that the worker has after its first jobs, and after all of them."""
    chunk = min(_CHUNK, count // 2)
    await arena.fill(contender, task="trivial", count=chunk)
    feeder = await arena.feeder(contender)
    driver = await arena.driver(contender, _FRESH)
    try:
        await start([driver], Load().concurrency, tuned=contender.tuned)
        await completion([driver], chunk, arena.limit)
        first = driver.memory()
        for _ in range(chunk, count, chunk):
            await feeder.ask("enqueue", task="trivial", count=chunk, limit=arena.limit)
        await completion([driver], count, 3 * arena.limit)
        last = driver.memory()
    finally:
        await arena.stop([driver])
    return {"first": first / 1e6, "last": last / 1e6}


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _distribution(seconds: Sequence[float]) -> Figures:
    return {
        "p50": percentile(seconds, 0.5) * 1000,
        "p99": percentile(seconds, 0.99) * 1000,
        "mean": statistics.fmean(seconds) * 1000,
    }
