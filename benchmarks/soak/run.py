"""Run one scenario: a process that adds jobs, one that runs them, and we who watch."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import asyncpg
import msgspec

from benchmarks.contenders import Contender
from benchmarks.measure import GaveUp
from benchmarks.progress import Progress
from benchmarks.scaling import open_transaction
from benchmarks.soak.course import FEWEST_TURNS, Course, Sample, Spending, Tally
from benchmarks.soak.idle import compare, idle_latencies, milliseconds, settle, warm_up
from benchmarks.soak.tables import naptime, schedule, state_of_tables, what_is_left
from graphile_worker import WorkerUtils

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from benchmarks.arena import Arena
    from benchmarks.driver import DriverProcess
    from benchmarks.soak.course import Pair
    from benchmarks.soak.scenarios import Scenario

_SOAK = Contender("soak", "soak")
_CONCURRENCY = 24
_BACKLOG, _CHUNK = 5_000, 500
_POLLING = 0.02
_STALLED = 120.0
_PROBING = 0.2
_PROBE_PRIORITY = -1
_STEPS = 20


class Soak:
    """One scenario, running."""

    def __init__(
        self, arena: Arena, scenario: Scenario, worker: DriverProcess, feeder: DriverProcess, jobs: int
    ) -> None:
        self._arena = arena
        self._dsn = arena.dsn(_SOAK)
        self._scenario = scenario
        self._worker = worker
        self._feeder = feeder
        self._jobs = jobs
        self._added = 0
        self._done = 0
        self._probes_sent = 0
        self._probes_heard = 0
        self._begin = time.monotonic()
        self._samples: list[Sample] = []
        self._transaction_begun: float | None = None
        self._transaction_open = False

    async def course(self, connection: asyncpg.Connection, interval: float, *, prefetch: bool) -> Course:
        """From the beginning to the end."""
        start = {"concurrency": _CONCURRENCY, "tuned": prefetch}
        await self._worker.ask("expect", jobs=self._jobs)
        await self._worker.ask("start", **start)
        if self._scenario.scheduled:
            await schedule(connection, self._scenario.scheduled)
        warmed_up = await warm_up(self._worker)
        before = await idle_latencies(self._worker)
        gauge, database = self._arena.gauge, self._arena.database(_SOAK)
        spent, cpu = await gauge.spent(database), self._worker.cpu()
        seconds = await self._load(connection, interval)
        cpu = self._worker.cpu() - cpu
        spent = await gauge.spent(database) - spent
        idle = await self._idle_at_the_end(connection, seconds, start)
        await self._worker.ask("stop")
        tally = msgspec.convert((await self._worker.ask("tally")).value, Tally)
        await self._feeder.ask("hang_up")
        # Once they have disconnected, the server has counted all that they did.
        for driver in (self._worker, self._feeder):
            await driver.close()
        return Course(
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
            left=await what_is_left(connection),
            spent=Spending(cpu, spent.cpu, spent.wal),
        )

    async def _idle_at_the_end(
        self, connection: asyncpg.Connection, seconds: float, start: dict[str, int]
    ) -> tuple[Pair, Pair | None]:
        """Right after the load and, if that lasted, when autovacuum has been there."""
        turn = await naptime(connection)
        async with self._arena.another() as other:
            fresh = await other.driver(_SOAK)
            await fresh.ask("start", **start)
            await warm_up(fresh)
            after, settled = await compare(self._worker, fresh), None
            if seconds >= FEWEST_TURNS * turn:
                await settle(connection, turn)
                settled = await compare(self._worker, fresh)
            await other.stop([fresh])
        return after, settled

    async def _load(self, connection: asyncpg.Connection, interval: float) -> float:
        """Add and run all jobs; the seconds that it took."""
        self._begin = time.monotonic()
        async with (
            WorkerUtils(self._dsn) as utils,
            _every(_PROBING, lambda: self._probe(utils)),
            _every(interval, lambda: self._sample(connection)),
            AsyncExitStack() as transaction,
        ):
            await self._feed(transaction)
            seconds = time.monotonic() - self._begin
        self._transaction_open = False
        await self._sample(connection, every_probe=True)
        return seconds

    async def _feed(self, transaction: AsyncExitStack) -> None:
        """Keep a backlog until all is done, so that jobs are added and claimed at the same time."""
        progress = Progress(_STEPS)
        steps, advanced = 0, time.monotonic()
        while self._done < self._jobs:
            done = (await self._worker.ask("finished")).value
            if done > self._done:
                advanced = time.monotonic()
            elif time.monotonic() - advanced > _STALLED:
                raise GaveUp(f"no job was done for {_STALLED:.0f} s, after {done:,} of {self._jobs:,}")
            self._done = done
            if done * _STEPS >= steps * self._jobs and steps < _STEPS:
                steps += 1
                progress.step(f"{self._scenario.name}, {done:,} jobs done")
            await self._hold_transaction(transaction)
            count = min(_CHUNK, self._jobs - self._added)
            if count and self._added + count - done <= _BACKLOG:
                await self._feeder.ask("add", first=self._added, count=count)
                self._added += count
            else:
                await asyncio.sleep(_POLLING)
        progress.end()

    async def _hold_transaction(self, transaction: AsyncExitStack) -> None:
        """Open it and close it when it is time."""
        if self._scenario.old_transaction is None:
            return
        share, seconds = self._scenario.old_transaction
        if self._transaction_begun is None and self._done >= share * self._jobs:
            await transaction.enter_async_context(open_transaction(self._dsn))
            self._transaction_begun = time.monotonic()
            self._transaction_open = True
        elif self._transaction_begun is not None and time.monotonic() - self._transaction_begun >= seconds:
            await transaction.aclose()
            self._transaction_open = False

    async def _probe(self, utils: WorkerUtils) -> None:
        """Add one job ahead of the backlog: what it waits for is the worker, not the other jobs."""
        self._probes_sent += 1
        await utils.add_job("probe", {"sent": time.monotonic()}, priority=_PROBE_PRIORITY)

    async def _sample(self, connection: asyncpg.Connection, *, every_probe: bool = False) -> None:
        old_transaction = self._transaction_open
        count = self._probes_sent - self._probes_heard if every_probe else 0
        heard = (await self._worker.ask("latencies", count=count)).value
        self._probes_heard += len(heard)
        jobs, queues = await state_of_tables(connection)
        self._samples.append(
            Sample(
                seconds=time.monotonic() - self._begin,
                done=self._done,
                waiting=self._added - self._done,
                memory=self._worker.memory(),
                jobs=jobs,
                queues=queues,
                latencies=milliseconds(heard),
                old_transaction=old_transaction,
            )
        )


async def soak(
    arena: Arena, scenario: Scenario, jobs: int, *, interval: float, prefetch: bool = False
) -> Course:
    """Run so many jobs; the server has the scenario's settings already, its tables get them here."""
    worker, feeder = await arena.drivers(_SOAK, 2)
    connection = await asyncpg.connect(arena.dsn(_SOAK))
    try:
        for statement in scenario.tables:
            await connection.execute(statement)
        return await Soak(arena, scenario, worker, feeder, jobs).course(
            connection, interval, prefetch=prefetch
        )
    finally:
        await connection.close()


@asynccontextmanager
async def _every(seconds: float, do: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do something again and again; what goes wrong with it is raised at the end."""
    enough = asyncio.Event()

    async def again() -> None:
        while not enough.is_set():
            await do()
            with suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), seconds)

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        enough.set()
        await task
