"""The measurements. Each function measures one contender once, and returns its figures by name."""

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
    from typing import Any, TypeAlias

    from benchmarks.contenders import Contender
    from benchmarks.driver import Answer, DriverProcess
    from benchmarks.workbench import Workbench

    Figures: TypeAlias = dict[str, float]

_POLL_INTERVAL = 0.02
_WARM_UP = 20
_LATENCY_CONCURRENCY = 10
_IDLE_RATE = 100.0
_FEEDING_RATE = 1000.0
_WAIT = 0.005
_FEEDING_SECONDS = 3.0
_FIRST_DELAY, _LAST_DELAY = 0.3, 2.3
_CHUNK = 100_000
_UNUSED_DRIVER = 100  # the number of a driver that no other measurement uses
_NODE_TASK = "module.exports = async () => {};\n"


class MeasurementTimeoutError(Exception):
    """A measurement took too long."""


@dataclass(frozen=True, slots=True)
class Load:
    """The kind of jobs, and the workers that run them."""

    concurrency: int = 24
    processes: int = 1
    task: str = "trivial"
    queues: int = 0
    seconds: float = 0.0
    """The duration of each job of the task `sleep`."""


async def enqueueing(how: str, workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure how many jobs per second are added. `how` is passed to the driver."""
    driver = await workbench.driver(contender)
    await driver.request("enqueue", task="trivial", count=_WARM_UP, how=how)
    await workbench.fill(contender)
    seconds = (
        await driver.request("enqueue", task="trivial", count=count, how=how, limit=workbench.limit)
    ).seconds
    return {"rate": count / seconds}


async def enqueueing_through_sqlalchemy(workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure the same for jobs that are added in a SQLAlchemy session, by the library or by hand."""
    driver = await workbench.driver(contender)
    by_hand = contender.name == "by hand"
    await driver.request("enqueue_through_sqlalchemy", count=_WARM_UP, by_hand=by_hand)
    await workbench.fill(contender)
    answer = await driver.request(
        "enqueue_through_sqlalchemy", count=count, by_hand=by_hand, limit=workbench.limit
    )
    return {"rate": count / answer.seconds}


async def throughput(load: Load, workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure the jobs per second, from the start of workers on a full queue to the last completion."""
    await workbench.fill(contender, task=load.task, count=count, queues=load.queues, seconds=load.seconds)
    drivers = await workbench.drivers(contender, load.processes)
    return await drain(load, workbench, contender, drivers, count)


async def costs(load: Load, workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure the throughput, and the resources that workers and server use."""
    await workbench.fill(contender, task=load.task, count=count, queues=load.queues, seconds=load.seconds)
    drivers = await workbench.drivers(contender, load.processes)
    async with watching(workbench.meter, workbench.database(contender), drivers) as spent:
        figures = await drain(load, workbench, contender, drivers, count)
    used = spent.figures(count)
    return {**figures, **used, "cpu per job": (used["worker cpu"] + used["server cpu"]) * 1e3}


async def drain(
    load: Load, workbench: Workbench, contender: Contender, drivers: list[DriverProcess], count: int
) -> Figures:
    """Run workers until a number of jobs are complete."""
    begin = time.monotonic()
    try:
        await start(drivers, load.concurrency, tuned=contender.tuned, history=contender.history)
        done, last = await completion(drivers, count, workbench.limit)
    finally:
        await workbench.stop(drivers)
    seconds = last - begin
    return {"rate": done / seconds, "seconds": seconds, "time per job": seconds / done * 1e6}


async def start(
    drivers: Sequence[DriverProcess], concurrency: int, *, tuned: bool, history: str | None = None
) -> None:
    """Start the workers of all drivers at once."""
    options: dict[str, Any] = {"concurrency": concurrency, "tuned": tuned}
    if history is not None:
        options["history"] = history
    await _together(*(driver.request("start", **options) for driver in drivers))


async def _together(*requests: Awaitable[Answer]) -> list[Answer]:
    """Return all answers. Read every answer before an error is raised."""
    answers = []
    for answer in await asyncio.gather(*requests, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def completion(drivers: Sequence[DriverProcess], count: int, limit: float) -> tuple[int, float]:
    """Wait until a number of jobs are complete. Return the actual number, and the time of the last."""
    deadline = time.monotonic() + limit
    while True:
        done, last = await completed(drivers)
        if done >= count:
            return done, last
        if time.monotonic() > deadline:
            raise MeasurementTimeoutError(f"gave up after {done:,} of {count:,} jobs in {limit:.0f} s")
        await asyncio.sleep(_POLL_INTERVAL)


async def completed(drivers: Sequence[DriverProcess]) -> tuple[int, float]:
    """Return the number of complete jobs, and the time of the last completion."""
    answers = [(await driver.request("completed")).value for driver in drivers]
    return sum(done for done, _ in answers), max(last for _, last in answers)


async def idle_latency(workbench: Workbench, contender: Contender, samples: int) -> Figures:
    """Measure the milliseconds from adding a job to the first line of its task, with an idle worker.

    Another process adds the jobs.
    """
    return await _fed_latency(workbench, contender, rate=_IDLE_RATE, count=samples)


async def call_latency(workbench: Workbench, contender: Contender, samples: int) -> Figures:
    """Measure the milliseconds that a call of a task takes, or the latency of a job, with an idle worker."""
    if contender.name == "python":
        return await idle_latency(workbench, contender, samples)
    worker, caller = await workbench.drivers(contender, 2)
    await workbench.fill(contender)
    try:
        await start([worker], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        await caller.request("call", samples=_WARM_UP)
        answer = await caller.request("call", samples=samples, limit=workbench.limit)
    finally:
        await workbench.stop([worker])
    return _distribution(answer.value)


async def own_latency(workbench: Workbench, contender: Contender, samples: int) -> Figures:
    """Measure the same for jobs that the worker's own process adds."""
    driver = await workbench.driver(contender)
    await workbench.fill(contender)
    try:
        await start([driver], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        await driver.request("probe", samples=_WARM_UP)
        answer = await driver.request("probe", samples=samples, limit=workbench.limit)
    finally:
        await workbench.stop([driver])
    return _distribution(answer.value)


async def loaded_latency(
    reference: tuple[str, str], workbench: Workbench, contender: Contender, _count: int
) -> Figures:
    """Measure the same while another process adds jobs, at half the best rate of a reference, for 3 s."""
    rate = workbench.best.get(reference, 2 * _FEEDING_RATE) / 2
    return await _fed_latency(workbench, contender, rate=rate, count=round(rate * _FEEDING_SECONDS))


async def _fed_latency(workbench: Workbench, contender: Contender, *, rate: float, count: int) -> Figures:
    worker, feeder = await workbench.drivers(contender, 2)
    await workbench.fill(contender)
    try:
        await start([worker], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        _, received = await _together(
            feeder.request("feed", rate=rate, count=count, limit=workbench.limit),
            worker.request("received", count=count, limit=workbench.limit),
        )
    finally:
        await workbench.stop([worker])
    return _distribution(received.value)


async def half_load_latency(workbench: Workbench, contender: Contender, _count: int) -> Figures:
    """Measure the same while another process adds jobs of 5 ms, half of what the slots can run, for 3 s."""
    rate = Load().concurrency / _WAIT / 2
    count = round(rate * _FEEDING_SECONDS)
    options = {} if contender.prefetch is None else {"prefetch": contender.prefetch}
    worker, feeder = await workbench.drivers(contender, 2)
    await workbench.fill(contender)
    try:
        await worker.request("start", concurrency=Load().concurrency, **options)
        _, received = await _together(
            feeder.request("feed_waits", rate=rate, count=count, seconds=_WAIT, limit=workbench.limit),
            worker.request("received", count=count, limit=workbench.limit),
        )
    finally:
        await workbench.stop([worker])
    return _distribution(received.value)


async def scheduled_latency(workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure how many milliseconds after their due time scheduled jobs start."""
    span = _LAST_DELAY - _FIRST_DELAY
    delays = [_FIRST_DELAY + span * number / count for number in range(count)]
    driver = await workbench.driver(contender)
    await workbench.fill(contender)
    try:
        await start([driver], _LATENCY_CONCURRENCY, tuned=contender.tuned)
        await driver.request("schedule", delays=delays)
        answer = await driver.request("received", count=count, limit=workbench.limit)
    finally:
        await workbench.stop([driver])
    return _distribution(answer.value)


async def start_up(workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure the seconds that a process takes to start, find no jobs and exit: the median of several."""
    await workbench.fill(contender)
    command, variables = once_command(contender.program), environment(workbench.dsn(contender))
    with tempfile.TemporaryDirectory() as name:
        tasks = Path(name) / "tasks"
        tasks.mkdir()
        (tasks / "trivial.js").write_text(_NODE_TASK)
        (tasks / "trivial.py").write_text("async def trivial(payload): ...\n")

        def run() -> float:
            begin = time.monotonic()
            subprocess.run(
                command, cwd=name, env=variables, check=True, capture_output=True, timeout=workbench.limit
            )
            return time.monotonic() - begin

        durations = [await asyncio.to_thread(run) for _ in range(count)]
    return {"seconds": statistics.median(durations)}


async def memory(workbench: Workbench, contender: Contender, count: int) -> Figures:
    """Measure the worker's memory after its first jobs and after all jobs, in megabytes."""
    chunk = min(_CHUNK, count // 2)
    await workbench.fill(contender, task="trivial", count=chunk)
    feeder = await workbench.feeder(contender)
    driver = await workbench.driver(contender, _UNUSED_DRIVER)
    try:
        await start([driver], Load().concurrency, tuned=contender.tuned)
        await completion([driver], chunk, workbench.limit)
        first = driver.memory()
        for _ in range(chunk, count, chunk):
            await feeder.request("enqueue", task="trivial", count=chunk, limit=workbench.limit)
        await completion([driver], count, 3 * workbench.limit)
        last = driver.memory()
    finally:
        await workbench.stop([driver])
    return {"first": first / 1e6, "last": last / 1e6}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed.

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
