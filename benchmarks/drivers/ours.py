"""graphile_worker, as a benchmark uses it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
from protocol import Completions, Driver, serve

from graphile_worker import Events, JobSpec, Runner, WorkerUtils, run
from graphile_worker.events import JobComplete

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFETCH = 500


async def trivial(_payload: object) -> None:
    """Nothing."""


def sync(_payload: object) -> None:
    """Nothing, on a thread."""


async def sleep(payload: dict[str, float]) -> None:
    """Wait."""
    await asyncio.sleep(payload["seconds"])


async def fail(_payload: object) -> None:
    """Raise."""
    raise RuntimeError("on purpose")


class Ours(Driver):
    """graphile_worker."""

    def __init__(self) -> None:
        super().__init__()
        self._utils = WorkerUtils()
        self._runner: Runner | None = None
        self._tasks: dict[str, Callable[..., Any]] = {
            "trivial": trivial,
            "sync": sync,
            "sleep": sleep,
            "fail": fail,
            "probe": self._probe,
        }

    async def _probe(self, payload: dict[str, float]) -> None:
        self.probes.note(payload)

    async def install(self) -> None:
        """Run the migrations."""
        await self._utils.migrate()

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
            await self._utils.add_jobs(
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
                await self._utils.add_job(task, {"id": number, "seconds": seconds}, max_attempts=most)

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def start(self, concurrency: int, *, tuned: bool = False) -> None:
        """Begin to work."""
        completions = self.completions = Completions()
        events = Events()
        events.on(JobComplete, lambda _event: completions.note())
        self._runner = await run(
            self._tasks,
            concurrency=concurrency,
            prefetch=_PREFETCH if tuned else 0,
            migrate=False,
            events=events,
        )

    async def stop(self) -> None:
        """Stop working."""
        assert self._runner is not None
        await self._runner.stop()

    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add a probe."""
        run_at = None if delay is None else datetime.now(UTC) + timedelta(seconds=delay)
        await self._utils.add_job("probe", payload, run_at=run_at)


if __name__ == "__main__":
    serve(Ours)
