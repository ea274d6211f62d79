"""One run: workers, load, faults, and a quiet end. The ledgers in its folder record what happened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from chaos.faults import FAULTS
from chaos.feeder import NODE_TASKS, PYTHON_TASKS, QUEUED_SHARE, ROLE, Feeder
from chaos.fleet import NODE, PYTHON, Fleet, role_of
from chaos.harness import Harness
from chaos.ledger import (
    NODE_LOCKS_RELEASED,
    Fault,
    HistoryRead,
    KeptAttempt,
    Ledger,
    LockedQueue,
    Phase,
    RemainingJob,
    now,
)
from chaos.schedule import KINDS, schedule
from chaos.server import Server, Unreachable, running_server
from graphile_worker import GraphileWorkerError, WorkerUtils

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from chaos.leases import Leases
    from chaos.schedule import PlannedFault

BEFORE, DURING, AFTER, DRAINING, OVER = "before", "during", "after", "draining", "over"
_POLL_INTERVAL = 0.2
_REPLACEMENT = 1.0
_STOPPING = 40.0
_LONGEST_DRAIN = 60.0
_LONG_JOB = 6.0
_VERY_LONG = 1.2
"""The length of a very long job, as a multiple of the lease."""
_MOST_LISTED = 10_000
_MIXED_QUEUED_SHARE = 0.5
_UNFINISHED = """
    select count(*) from graphile_worker._private_jobs
    where locked_by is not null or attempts < max_attempts"""
_NODE_LOCK_HOLDERS = """
    select distinct locked_by from (
      select locked_by from graphile_worker._private_jobs
      union all select locked_by from graphile_worker._private_job_queues
    ) as locks where locked_by not like 'python-%'"""


@dataclass(frozen=True)
class Campaign:
    """The settings of a run."""

    seed: int
    seconds: float
    """Seconds of faults. A quiet period comes before and after."""
    kinds: list[str]
    leases: Leases
    workers: int = 3
    node: bool = False
    """Whether one Node worker takes part."""
    only_node: bool = False
    """Whether only Node workers take part, for the comparison."""
    mixed: bool = False
    """Whether as many Node workers take part as Python workers, and faults hit both."""
    history: bool = True
    """Whether Python workers keep all attempts in the history. Then the audit compares it with what ran."""
    concurrency: int = 8
    rate: float = 40.0
    """Jobs added per second."""

    @property
    def programs(self) -> list[str]:
        """The program of each slot."""
        if self.only_node:
            return [NODE] * self.workers
        return [PYTHON] * self.workers + [NODE] * (self.workers if self.mixed else int(self.node))

    @property
    def hit(self) -> list[str]:
        """The programs that faults target. Node workers are among them only if the run is about them."""
        return self.programs if self.mixed else [self.programs[0]] * self.workers

    @property
    def quiet(self) -> float:
        """The length of each quiet period, in seconds."""
        return min(max(self.seconds / 10, 2.0), 20.0)

    @property
    def long_job(self) -> float:
        """The longest duration of a long job, in seconds."""
        return _LONG_JOB * min(self.leases.scale, 1.0)

    @property
    def very_long_job(self) -> float:
        """The duration of a job that outlasts a lease, in seconds. A short run has no room for such a job."""
        seconds = self.leases.lease * _VERY_LONG
        return seconds if seconds <= self.seconds / 4 else self.long_job

    @property
    def tasks(self) -> list[str]:
        """The tasks of the jobs. Node workers have one of them."""
        if self.only_node:
            return NODE_TASKS
        return NODE_TASKS + PYTHON_TASKS if self.mixed else PYTHON_TASKS

    @property
    def planned(self) -> list[PlannedFault]:
        """The faults to inject. If Node workers are hit, only the kinds that apply to them."""
        faults = schedule(
            self.seed, self.seconds, self.kinds, slots=len(self.hit), scale=min(self.leases.scale, 1.0)
        )
        return [fault for fault in faults if KINDS[fault.kind].hits_node or NODE not in self.hit]


async def run_campaign(campaign: Campaign, folder: Path, tell: Callable[[str], None]) -> str:
    """Run a campaign. Return the server's version."""
    with Ledger(folder / "phases.ledger") as phases:
        return await _run(campaign, folder, phases, tell)


async def _run(campaign: Campaign, folder: Path, phases: Ledger, tell: Callable[[str], None]) -> str:
    async with _assembled(campaign, folder) as harness:
        version = await harness.server.version()
        feeding = asyncio.create_task(harness.feeder.feed())
        try:
            tell(f"{len(harness.fleet.slots)} workers, no faults yet")
            phases.write(Phase(at=now(), name=BEFORE))
            await asyncio.sleep(campaign.quiet)
            phases.write(Phase(at=now(), name=DURING))
            await _inject_faults(harness, campaign.planned, tell)
            tell("no more faults")
            phases.write(Phase(at=now(), name=AFTER))
            await asyncio.sleep(campaign.quiet)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
        if not feeding.cancelled() and (problem := feeding.exception()):
            raise problem
        phases.write(Phase(at=now(), name=DRAINING))
        tell("no more jobs are added; the remaining jobs run")
        await _end(harness, campaign)
        phases.write(Phase(at=now(), name=OVER))
        await _record_remaining(harness.server, folder, history=campaign.history)
    return version


@asynccontextmanager
async def _assembled(campaign: Campaign, folder: Path) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_server())
        await server.prepare([ROLE, *map(role_of, range(len(campaign.programs)))])
        faults, processes, adds = (
            stack.enter_context(Ledger(folder / f"{name}.ledger")) for name in ("faults", "processes", "adds")
        )
        fleet = Fleet(processes, _REPLACEMENT * min(campaign.leases.scale, 1.0))
        stack.push_async_callback(fleet.close)
        for program in campaign.programs:
            await fleet.add(program, server, folder, campaign)
        feeder = Feeder(
            server,
            adds,
            seed=campaign.seed,
            tasks=campaign.tasks,
            rate=campaign.rate,
            long=campaign.long_job,
            very_long=campaign.very_long_job,
            queued_share=_MIXED_QUEUED_SHARE if campaign.mixed else QUEUED_SHARE,
        )
        stack.push_async_callback(feeder.close)
        await fleet.until_ready()
        harness = Harness(server, fleet, feeder, faults, programs=frozenset(campaign.hit))
        if not campaign.only_node:
            fleet.on_node_exit = lambda worker: _release_node_locks(harness, worker)
        fleet.watch()
        yield harness


async def _inject_faults(harness: Harness, planned: list[PlannedFault], tell: Callable[[str], None]) -> None:
    """Inject all faults at their times. They may overlap."""
    begin = now()
    async with asyncio.TaskGroup() as group:
        for fault in planned:
            await asyncio.sleep(max(begin + fault.at - now(), 0))
            tell(fault.kind)
            group.create_task(_inject(harness, fault))


async def _inject(harness: Harness, fault: PlannedFault) -> None:
    await FAULTS[fault.kind](harness, fault)


async def _release_node_locks(harness: Harness, worker: str | None = None) -> None:
    """Release the locks that a dead Node worker left, as an operator would.

    Otherwise its jobs would stay locked for four hours. A Node worker may also leave locks without being hit:
    during an outage it may exit, or lose the reply to a query.

    Args:
        harness: The run.
        worker: The dead worker, or None if all Node workers have exited.
    """
    async with harness.releasing_node_locks:
        while True:
            started, locks = now(), await harness.server.locks()
            with suppress(*Unreachable, GraphileWorkerError):
                holding = [row["locked_by"] for row in await harness.server.fetch(_NODE_LOCK_HOLDERS)]
                workers = [name for name in holding if worker in {None, name}]
                async with WorkerUtils(harness.server.dsn()) as utils:
                    await utils.force_unlock_workers(workers)
                break
            await asyncio.sleep(_POLL_INTERVAL)
        held = {name: jobs for name, jobs in locks.items() if name in workers}
        if held:
            harness.ledger.write(
                Fault(at=started, until=now(), kind=NODE_LOCKS_RELEASED, pids=[], locks=held)
            )


async def _end(harness: Harness, campaign: Campaign) -> None:
    """Let the remaining jobs run, and stop all workers gracefully."""
    fleet = harness.fleet
    if campaign.only_node:
        await _drain(harness, limit=15.0)
    else:
        if nodes := fleet.of(NODE):
            await fleet.stop(nodes, _STOPPING)
            await _release_node_locks(harness)
        await _drain(
            harness, limit=_LONGEST_DRAIN * min(campaign.leases.scale, 1.0) + 2 * campaign.leases.lease
        )
    await fleet.stop(fleet.slots, _STOPPING)


async def _drain(harness: Harness, limit: float) -> None:
    """Wait until no job remains that could run, or until the limit. Retries are rescheduled to now."""
    deadline = now() + limit
    async with WorkerUtils(harness.server.dsn()) as utils:
        while now() < deadline:
            if (await harness.server.fetch_with_retries(_UNFINISHED))[0]["count"] == 0:
                return
            waiting = await utils.list_jobs(state="scheduled", limit=_MOST_LISTED)
            await utils.reschedule_jobs([job.id for job in waiting], run_at=timedelta(0))
            await asyncio.sleep(_POLL_INTERVAL)


async def _record_remaining(server: Server, folder: Path, *, history: bool) -> None:
    with Ledger(folder / "left.ledger") as ledger:
        for job in await server.remaining_jobs():
            ledger.write(RemainingJob(**job))
        for lock in await server.locked_queues():
            ledger.write(LockedQueue(**lock))
        if not history:
            return
        attempts = await server.kept_attempts()
        for attempt in attempts:
            ledger.write(KeptAttempt(**attempt))
        ledger.write(HistoryRead(attempts=len(attempts)))
