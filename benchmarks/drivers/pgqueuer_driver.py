"""The driver of pgqueuer."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.errors import FailingListenerError
from pgqueuer.queries import Queries
from protocol import Completions, Driver, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pgqueuer.models import Job

    Task = Callable[[Job], Awaitable[None]]

_BATCH = 10  # pgqueuer's default
_TUNED_BATCH = 250  # pgqueuer holds up to two batches: as many jobs as the tuned python driver
_LANES = 10
_SERIAL = " queue "


async def trivial(_job: Job) -> None:
    """Do nothing."""


async def sync(_job: Job) -> None:
    """Do nothing, on a thread. pgqueuer takes no plain functions, and its documentation advises this."""
    await asyncio.to_thread(lambda: None)


async def sleep(job: Job) -> None:
    """Wait."""
    await asyncio.sleep(json.loads(job.payload or b"")["seconds"])


async def fail(_job: Job) -> None:
    """Raise. pgqueuer deletes and logs a failed job, and does not retry it."""
    raise RuntimeError("on purpose")


def _limited(task: Task, running: asyncio.Semaphore, completions: Completions) -> Task:
    async def limited(job: Job) -> None:
        async with running:
            try:
                await task(job)
            finally:
                completions.note()

    return limited


class PgQueuerDriver(Driver):
    """The driver of pgqueuer."""

    def __init__(self) -> None:
        super().__init__()
        self._client: Queries | None = None
        self._connection: asyncpg.Connection | None = None
        self._worker: PgQueuer | None = None
        self._running: asyncio.Task[None] | None = None
        self._tasks: dict[str, Task] = {
            "trivial": trivial,
            "sync": sync,
            "sleep": sleep,
            "fail": fail,
            "probe": self._probe,
        }

    async def _probe(self, job: Job) -> None:
        self.probes.note(json.loads(job.payload or b""))

    async def _queries(self) -> Queries:
        # "Use AsyncpgPoolDriver for producers; a single connection for QueueManager"
        if self._client is None:
            self._client = Queries.from_asyncpg_pool(await asyncpg.create_pool(min_size=1, max_size=_LANES))
        return self._client

    async def install(self) -> None:
        """Create the tables, and tune autovacuum as pgqueuer's installation checklist advises."""
        queries = await self._queries()
        if not await queries.schema_is_installed():
            await queries.install()
        await queries.optimize_autovacuum()

    async def clear(self) -> None:
        """Remove all jobs and their logs."""
        queries = await self._queries()
        await queries.clear_queue()
        await queries.clear_queue_log()
        await queries.clear_statistics_log()

    async def enqueue(
        self, task: str, count: int, how: str = "bulk", queues: int = 0, seconds: float = 0.0
    ) -> None:
        """Add jobs."""
        queries = await self._queries()
        payloads = [json.dumps({"id": number, "seconds": seconds}).encode() for number in range(count)]
        if how == "bulk":
            # pgqueuer can only serialize the jobs of one entrypoint, so each queue is an entrypoint.
            names = [f"{task}{_SERIAL}{number % queues}" if queues else task for number in range(count)]
            await queries.enqueue(names, payloads, [0] * count)
            return
        lanes = _LANES if how == "ten" else 1

        async def lane() -> None:
            for number in range(count // lanes):
                await queries.enqueue(task, payloads[number])

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def _prepare(
        self, connection: asyncpg.Connection, concurrency: int, *, tuned: bool
    ) -> tuple[PgQueuer, dict[str, Any]]:
        """Return a worker and the options to run it with."""
        worker = PgQueuer.from_asyncpg_connection(connection)
        # pgqueuer claims jobs in batches, and its own concurrency limit must be at least two batches. So the
        # driver limits the concurrency itself, and a batch can be larger: "Increase batch_size when jobs are
        # short-lived".
        limits = asyncio.Semaphore(concurrency), self.completions
        for name, task in self._tasks.items():
            worker.entrypoint(name)(_limited(task, *limits))
        batch = _TUNED_BATCH if tuned else _BATCH
        sizes = await (await self._queries()).queue_size()
        if serial := {size.entrypoint for size in sizes if _SERIAL in size.entrypoint}:
            for name in serial:
                task = self._tasks[name.partition(_SERIAL)[0]]
                worker.entrypoint(name, concurrency_limit=1)(_limited(task, *limits))
            # Results are written when a batch is full, or after 0.1 s. Only one job of each queue runs at a
            # time, so a larger batch would never be full and every result would wait 0.1 s.
            batch = max(1, min(batch, len(serial) // 2))
        return worker, {"batch_size": batch, "max_concurrent_tasks": max(concurrency, 2 * batch)}

    async def start(self, concurrency: int, *, tuned: bool = False) -> None:
        """Start a worker, and wait until it listens."""
        self.completions = Completions()
        self._connection = await asyncpg.connect()
        self._worker, options = await self._prepare(self._connection, concurrency, tuned=tuned)
        self._running = asyncio.create_task(self._worker.run(**options))
        while not self._running.done():
            with suppress(FailingListenerError):
                await self._worker.qm.listener_healthy(timedelta(seconds=0.1))
                break

    async def stop(self) -> None:
        """Stop the worker."""
        assert self._worker is not None
        assert self._running is not None
        assert self._connection is not None
        self._worker.shutdown.set()
        await self._running
        await self._connection.close()

    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add a probe."""
        later = None if delay is None else timedelta(seconds=delay)
        await (await self._queries()).enqueue("probe", json.dumps(payload).encode(), execute_after=later)


if __name__ == "__main__":
    logging.getLogger("pgqueuer").setLevel(logging.CRITICAL)
    serve(PgQueuerDriver)
