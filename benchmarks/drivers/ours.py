"""graphile_worker, as a benchmark uses it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import asyncpg
from protocol import Completions, Driver, serve

from graphile_worker import App, Events, JobSpec, task
from graphile_worker.events import JobComplete

_PREFETCH = 500


@task
async def trivial(id: int, seconds: float) -> None:
    """Nothing."""


@task
def sync(id: int, seconds: float) -> None:
    """Nothing, on a thread."""


@task
async def sleep(id: int, seconds: float) -> None:  # noqa: ARG001
    """Wait."""
    await asyncio.sleep(seconds)


@task
async def fail(id: int, seconds: float) -> None:  # noqa: ARG001
    """Raise."""
    raise RuntimeError("on purpose")


class Ours(Driver):
    """graphile_worker."""

    def __init__(self) -> None:
        super().__init__()
        self._app = App(events=Events())
        self._app.include(trivial, sync, sleep, fail)
        self._running = AsyncExitStack()

        @self._app.task
        async def probe(payload: dict[str, float]) -> None:
            self.probes.note(payload)

        self._app.events.on(JobComplete, lambda _event: self.completions.note())

    async def install(self) -> None:
        """Run the migrations."""
        await self._app.utils.migrate()

    async def clear(self) -> None:
        """Remove all jobs and queues."""
        connection = await asyncpg.connect()
        await connection.execute(
            "truncate graphile_worker._private_jobs, graphile_worker._private_job_queues"
        )
        await connection.close()

    async def enqueue(
        self, task: str, count: int, how: str = "bulk", queues: int = 0, seconds: float = 0.0
    ) -> None:
        """Add jobs."""
        most = 1 if task == "fail" else None
        if how == "bulk":
            await self._app.utils.add_jobs(
                JobSpec(
                    task,
                    {"id": number, "seconds": seconds},
                    queue_name=f"queue {number % queues}" if queues else None,
                    max_attempts=most,
                )
                for number in range(count)
            )
            return
        lanes = 10 if how == "ten" else 1

        async def lane() -> None:
            for number in range(count // lanes):
                await self._app.utils.add_job(task, {"id": number, "seconds": seconds}, max_attempts=most)

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def start(self, concurrency: int, *, tuned: bool = False) -> None:
        """Begin to work."""
        self.completions = Completions()
        await self._running.enter_async_context(
            self._app.running(concurrency=concurrency, prefetch=_PREFETCH if tuned else 0, migrate=False)
        )

    async def stop(self) -> None:
        """Stop working."""
        await self._running.aclose()

    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add a probe."""
        run_at = None if delay is None else datetime.now(UTC) + timedelta(seconds=delay)
        await self._app.utils.add_job("probe", payload, run_at=run_at)


if __name__ == "__main__":
    serve(Ours)
