"""One run: workers, load, faults, and a quiet end; what happened is in the ledgers of its folder."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from chaos.faults import FAULTS
from chaos.feeder import NODE_TASKS, OFTEN_QUEUED, PYTHON_TASKS, ROLE, Feeder
from chaos.fleet import NODE, PYTHON, Fleet, role_of
from chaos.ledger import NODE_FREED, Fault, Ledger, LeftJob, LeftLock, Phase, now
from chaos.scene import Scene
from chaos.schedule import KINDS, schedule
from chaos.server import Server, Unreachable, running_server
from graphile_worker import GraphileWorkerError, WorkerUtils

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from chaos.leases import Leases
    from chaos.schedule import Planned

BEFORE, DURING, AFTER, DRAINING, OVER = "before", "during", "after", "draining", "over"
_LOOK = 0.2
_REPLACEMENT = 1.0
_STOPPING = 40.0
_LONGEST_DRAIN = 60.0
_LONG_JOB = 6.0
_VERY_LONG = 1.2
"""Times the lease."""
_MOST_LISTED = 10_000
_OFTEN_QUEUED_IF_MIXED = 0.5
_UNFINISHED = """
    select count(*) from graphile_worker._private_jobs
    where locked_by is not null or attempts < max_attempts"""
_NODES = """
    select distinct locked_by from (
      select locked_by from graphile_worker._private_jobs
      union all select locked_by from graphile_worker._private_job_queues
    ) as locks where locked_by not like 'python-%'"""


@dataclass(frozen=True)
class Campaign:
    """What to do."""

    seed: int
    seconds: float
    """Of faults; a quiet time comes before and after."""
    kinds: list[str]
    leases: Leases
    workers: int = 3
    node: bool = False
    """Whether there is one of npm's workers among them."""
    only_node: bool = False
    """Whether there are only npm's workers, for the comparison."""
    mixed: bool = False
    """Whether there are as many of npm's workers as of ours, and are hit as well."""
    concurrency: int = 8
    rate: float = 40.0
    """Jobs that are added in a second."""

    @property
    def programs(self) -> list[str]:
        """What runs in which slot."""
        if self.only_node:
            return [NODE] * self.workers
        return [PYTHON] * self.workers + [NODE] * (self.workers if self.mixed else int(self.node))

    @property
    def hit(self) -> list[str]:
        """Which of them are hit by themselves: npm's only if that is what the run is about."""
        return self.programs if self.mixed else [self.programs[0]] * self.workers

    @property
    def quiet(self) -> float:
        """Seconds without faults, before and after."""
        return min(max(self.seconds / 10, 2.0), 20.0)

    @property
    def long_job(self) -> float:
        """Seconds that a long job takes at most."""
        return _LONG_JOB * min(self.leases.scale, 1.0)

    @property
    def very_long_job(self) -> float:
        """Seconds that a job takes which outlasts a lease; in a short run there is no room for one."""
        seconds = self.leases.lease * _VERY_LONG
        return seconds if seconds <= self.seconds / 4 else self.long_job

    @property
    def tasks(self) -> list[str]:
        """Those of the jobs; npm's workers have one of them."""
        if self.only_node:
            return NODE_TASKS
        return NODE_TASKS + PYTHON_TASKS if self.mixed else PYTHON_TASKS

    @property
    def planned(self) -> list[Planned]:
        """The faults; for npm's workers alone those of them that can be done to such."""
        faults = schedule(
            self.seed, self.seconds, self.kinds, slots=len(self.hit), scale=min(self.leases.scale, 1.0)
        )
        return [fault for fault in faults if KINDS[fault.kind].hits_node or NODE not in self.hit]


async def run_campaign(campaign: Campaign, folder: Path, tell: Callable[[str], None]) -> str:
    """Do it; returns the server's version."""
    with Ledger(folder / "phases.ledger") as phases:
        return await _run(campaign, folder, phases, tell)


async def _run(campaign: Campaign, folder: Path, phases: Ledger, tell: Callable[[str], None]) -> str:
    async with _assembled(campaign, folder) as scene:
        version = await scene.server.version()
        feeding = asyncio.create_task(scene.feeder.feed())
        try:
            tell(f"{len(scene.fleet.slots)} workers, nothing breaks")
            phases.write(Phase(at=now(), name=BEFORE))
            await asyncio.sleep(campaign.quiet)
            phases.write(Phase(at=now(), name=DURING))
            await _break(scene, campaign.planned, tell)
            tell("nothing breaks any more")
            phases.write(Phase(at=now(), name=AFTER))
            await asyncio.sleep(campaign.quiet)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
        if not feeding.cancelled() and (problem := feeding.exception()):
            raise problem
        phases.write(Phase(at=now(), name=DRAINING))
        tell("no more jobs; what is left runs")
        await _end(scene, campaign)
        phases.write(Phase(at=now(), name=OVER))
        await _write_what_is_left(scene.server, folder)
    return version


@asynccontextmanager
async def _assembled(campaign: Campaign, folder: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_server())
        await server.prepare([ROLE, *map(role_of, range(len(campaign.programs)))])
        faults, processes, adds = (
            stack.enter_context(Ledger(folder / f"{name}.ledger")) for name in ("faults", "processes", "adds")
        )
        fleet = Fleet(processes, _REPLACEMENT * min(campaign.leases.scale, 1.0))
        stack.push_async_callback(fleet.close)
        for program in campaign.programs:
            # npm's as it comes, unless the run is about both.
            ahead = program == PYTHON or campaign.mixed
            await fleet.add(program, server, folder, campaign.leases, campaign.concurrency, ahead=ahead)
        feeder = Feeder(
            server,
            adds,
            seed=campaign.seed,
            tasks=campaign.tasks,
            rate=campaign.rate,
            long=campaign.long_job,
            very_long=campaign.very_long_job,
            often_queued=_OFTEN_QUEUED_IF_MIXED if campaign.mixed else OFTEN_QUEUED,
        )
        stack.push_async_callback(feeder.close)
        await fleet.until_ready()
        scene = Scene(server, fleet, feeder, faults, programs=frozenset(campaign.hit))
        if not campaign.only_node:
            fleet.on_node_exit = lambda worker: _free_what_node_held(scene, worker)
        fleet.watch()
        yield scene


async def _break(scene: Scene, planned: list[Planned], tell: Callable[[str], None]) -> None:
    """All faults at their times; they may overlap."""
    begin = now()
    async with asyncio.TaskGroup() as group:
        for fault in planned:
            await asyncio.sleep(max(begin + fault.at - now(), 0))
            tell(fault.kind)
            group.create_task(_inject(scene, fault))


async def _inject(scene: Scene, fault: Planned) -> None:
    await FAULTS[fault.kind](scene, fault)


async def _free_what_node_held(scene: Scene, worker: str | None = None) -> None:
    """What npm's worker held when it died would wait for four hours: do what an operator does.

    Also if nothing hit it: when the server is away it may end, or lose the answer to its question.
    Without the name of one all are gone.
    """
    async with scene.freeing:
        while True:
            begun, locks = now(), await scene.server.locks()
            with suppress(*Unreachable, GraphileWorkerError):
                holding = [row["locked_by"] for row in await scene.server.ask(_NODES)]
                workers = [name for name in holding if worker in {None, name}]
                async with WorkerUtils(scene.server.dsn()) as utils:
                    await utils.force_unlock_workers(workers)
                break
            await asyncio.sleep(_LOOK)
        held = {name: jobs for name, jobs in locks.items() if name in workers}
        if held:
            scene.ledger.write(Fault(at=begun, until=now(), kind=NODE_FREED, pids=[], locks=held))


async def _end(scene: Scene, campaign: Campaign) -> None:
    """Let the rest run, and stop all workers in order."""
    fleet = scene.fleet
    if campaign.only_node:
        await _drain(scene, limit=15.0)
    else:
        if nodes := fleet.of(NODE):
            await fleet.stop(nodes, _STOPPING)
            await _free_what_node_held(scene)
        await _drain(
            scene, limit=_LONGEST_DRAIN * min(campaign.leases.scale, 1.0) + 2 * campaign.leases.lease
        )
    await fleet.stop(fleet.slots, _STOPPING)


async def _drain(scene: Scene, limit: float) -> None:
    """Until no job is left that could run, or for so long. None has to wait for its next attempt."""
    deadline = now() + limit
    async with WorkerUtils(scene.server.dsn()) as utils:
        while now() < deadline:
            if (await scene.server.ask_patiently(_UNFINISHED))[0]["count"] == 0:
                return
            waiting = await utils.list_jobs(state="scheduled", limit=_MOST_LISTED)
            await utils.reschedule_jobs([job.id for job in waiting], run_at=timedelta(0))
            await asyncio.sleep(_LOOK)


async def _write_what_is_left(server: Server, folder: Path) -> None:
    with Ledger(folder / "left.ledger") as ledger:
        for job in await server.left_jobs():
            ledger.write(LeftJob(**job))
        for lock in await server.left_locks():
            ledger.write(LeftLock(**lock))
