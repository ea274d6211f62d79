"""One scenario: a process that adds jobs, a process that runs them, and the samples of both."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import asyncpg
import msgspec

from benchmarks.contenders import Contender
from benchmarks.measure import MeasurementTimeoutError
from benchmarks.progress import Progress
from benchmarks.scaling import open_transaction
from benchmarks.soak.idle import compare, idle_latencies, milliseconds, settle, warm_up
from benchmarks.soak.result import FEWEST_CYCLES, Sample, ScenarioResult, Spending, Tally
from benchmarks.soak.tables import naptime, remaining, schedule, table_states
from graphile_worker import WorkerUtils

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from benchmarks.driver import DriverProcess
    from benchmarks.soak.result import Pair
    from benchmarks.soak.scenarios import Scenario
    from benchmarks.workbench import Workbench

_SOAK = Contender("soak", "soak")
_CONCURRENCY = 24
_BACKLOG, _CHUNK = 5_000, 500
_POLL_INTERVAL = 0.02
_STALL_TIMEOUT = 120.0
_PROBE_INTERVAL = 0.2
_PROBE_PRIORITY = -1
_STEPS = 20


class Soak:
    """A running scenario."""

    def __init__(
        self,
        workbench: Workbench,
        scenario: Scenario,
        worker: DriverProcess,
        feeder: DriverProcess,
        jobs: int,
    ) -> None:
        self._arena = workbench
        self._dsn = workbench.dsn(_SOAK)
        self._scenario = scenario
        self._worker = worker
        self._feeder = feeder
        self._jobs = jobs
        self._added = 0
        self._done = 0
        self._probes_sent = 0
        self._probes_received = 0
        self._begin = time.monotonic()
        self._samples: list[Sample] = []
        self._transaction_started: float | None = None
        self._transaction_open = False

    async def run(self, connection: asyncpg.Connection, interval: float, *, prefetch: bool) -> ScenarioResult:
        """Run the scenario from start to end."""
        start = {"concurrency": _CONCURRENCY, "tuned": prefetch}
        await self._worker.request("expect", jobs=self._jobs)
        await self._worker.request("start", **start)
        if self._scenario.scheduled:
            await schedule(connection, self._scenario.scheduled)
        warmed_up = await warm_up(self._worker)
        before = await idle_latencies(self._worker)
        meter, database = self._arena.meter, self._arena.database(_SOAK)
        spent, cpu = await meter.usage(database), self._worker.cpu()
        seconds = await self._load(connection, interval)
        cpu = self._worker.cpu() - cpu
        spent = await meter.usage(database) - spent
        idle = await self._final_idle_latencies(connection, seconds, start)
        await self._worker.request("stop")
        tally = msgspec.convert((await self._worker.request("tally")).value, Tally)
        await self._feeder.request("disconnect")
        # Only after they disconnect has the server counted all their statements.
        for driver in (self._worker, self._feeder):
            await driver.close()
        return ScenarioResult(
            name=self._scenario.name,
            settings=self._scenario.settings,
            naptime=await naptime(connection),
            judged=self._scenario.judged,
            seconds=seconds,
            scheduled=self._scenario.scheduled,
            probes=self._probes_sent
            + warmed_up
            + len(before)
            + sum(len(pair.soaked) for pair in idle if pair),
            samples=self._samples,
            idle_before=before,
            idle_after=idle[0],
            idle_settled=idle[1],
            tally=tally,
            left=await remaining(connection),
            spent=Spending(cpu, spent.cpu, spent.wal),
        )

    async def _final_idle_latencies(
        self, connection: asyncpg.Connection, seconds: float, start: dict[str, int]
    ) -> tuple[Pair, Pair | None]:
        """Measure idle latencies right after the load and, after a long run, again after autovacuum."""
        cycle = await naptime(connection)
        async with self._arena.another() as other:
            fresh = await other.driver(_SOAK)
            await fresh.request("start", **start)
            await warm_up(fresh)
            after, settled = await compare(self._worker, fresh), None
            if seconds >= FEWEST_CYCLES * cycle:
                await settle(connection, cycle)
                settled = await compare(self._worker, fresh)
            await other.stop([fresh])
        return after, settled

    async def _load(self, connection: asyncpg.Connection, interval: float) -> float:
        """Add and run all jobs. Return the seconds that it took."""
        self._begin = time.monotonic()
        async with (
            WorkerUtils(self._dsn) as utils,
            _every(_PROBE_INTERVAL, lambda: self._probe(utils)),
            _every(interval, lambda: self._sample(connection)),
            AsyncExitStack() as transaction,
        ):
            await self._feed(transaction)
            seconds = time.monotonic() - self._begin
        self._transaction_open = False
        await self._sample(connection, every_probe=True)
        return seconds

    async def _feed(self, transaction: AsyncExitStack) -> None:
        """Keep a backlog until all jobs are done, so that jobs are added and claimed at the same time."""
        progress = Progress(_STEPS)
        steps, advanced = 0, time.monotonic()
        while self._done < self._jobs:
            done = (await self._worker.request("finished")).value
            if done > self._done:
                advanced = time.monotonic()
            elif time.monotonic() - advanced > _STALL_TIMEOUT:
                raise MeasurementTimeoutError(
                    f"no job was done for {_STALL_TIMEOUT:.0f} s, after {done:,} of {self._jobs:,}"
                )
            self._done = done
            if done * _STEPS >= steps * self._jobs and steps < _STEPS:
                steps += 1
                progress.step(f"{self._scenario.name}, {done:,} jobs done")
            await self._hold_transaction(transaction)
            count = min(_CHUNK, self._jobs - self._added)
            if count and self._added + count - done <= _BACKLOG:
                await self._feeder.request("add", first=self._added, count=count)
                self._added += count
            else:
                await asyncio.sleep(_POLL_INTERVAL)
        progress.end()

    async def _hold_transaction(self, transaction: AsyncExitStack) -> None:
        """Open and close the old transaction at its times."""
        if self._scenario.old_transaction is None:
            return
        share, seconds = self._scenario.old_transaction
        if self._transaction_started is None and self._done >= share * self._jobs:
            await transaction.enter_async_context(open_transaction(self._dsn))
            self._transaction_started = time.monotonic()
            self._transaction_open = True
        elif (
            self._transaction_started is not None and time.monotonic() - self._transaction_started >= seconds
        ):
            await transaction.aclose()
            self._transaction_open = False

    async def _probe(self, utils: WorkerUtils) -> None:
        """Add a job ahead of the backlog, so that it waits for the worker and not for other jobs."""
        self._probes_sent += 1
        await utils.add_job("probe", {"sent": time.monotonic()}, priority=_PROBE_PRIORITY)

    async def _sample(self, connection: asyncpg.Connection, *, every_probe: bool = False) -> None:
        old_transaction = self._transaction_open
        count = self._probes_sent - self._probes_received if every_probe else 0
        received = (await self._worker.request("latencies", count=count)).value
        self._probes_received += len(received)
        jobs, queues = await table_states(connection)
        self._samples.append(
            Sample(
                seconds=time.monotonic() - self._begin,
                done=self._done,
                waiting=self._added - self._done,
                memory=self._worker.memory(),
                jobs=jobs,
                queues=queues,
                latencies=milliseconds(received),
                old_transaction=old_transaction,
            )
        )


async def soak(
    workbench: Workbench, scenario: Scenario, jobs: int, *, interval: float, prefetch: bool = False
) -> ScenarioResult:
    """Run a scenario. The server already has the scenario's settings; its tables get them here."""
    worker, feeder = await workbench.drivers(_SOAK, 2)
    connection = await asyncpg.connect(workbench.dsn(_SOAK))
    try:
        for statement in scenario.tables:
            await connection.execute(statement)
        return await Soak(workbench, scenario, worker, feeder, jobs).run(
            connection, interval, prefetch=prefetch
        )
    finally:
        await connection.close()


@asynccontextmanager
async def _every(seconds: float, do: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call a function repeatedly during the block. Raise its error at the end."""
    stopping = asyncio.Event()

    async def repeat() -> None:
        while not stopping.is_set():
            await do()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), seconds)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        stopping.set()
        await task
