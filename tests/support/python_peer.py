"""A Python worker with the same methods as `Peer`, and the same tasks as peer.mjs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from graphile_worker import JobContext, WorkerUtils, run_once
from support.jobs import add
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from graphile_worker import Runner

DEADLINE = 60.0
LEDGER = """create table ledger (
  run serial primary key, job_id bigint, worker text, who text,
  started timestamptz default clock_timestamp(), ended timestamptz)"""
_BEGIN = "insert into ledger (job_id, worker, who) values ($1, $2, 'python') returning run"
_END = "update ledger set ended = clock_timestamp() where run = $1"


class IntendedError(Exception):
    """The failure of a job that is meant to fail."""


class PythonPeer:
    """A Python worker in this process."""

    def __init__(self, dsn: str, utils: WorkerUtils) -> None:
        self._dsn = dsn
        self._utils = utils
        self._held: dict[int, asyncio.Future[None]] = {}
        self._started = asyncio.Condition()
        self._stack = AsyncExitStack()
        self.recorder = EventRecorder()
        self.runner: Runner | None = None
        self.ran: list[tuple[str, Any]] = []
        """Tasks and payloads, in the order in which they started."""

    async def add(self, task: str, payload: Any = None, **options: Any) -> int:
        return (await self._utils.add_job(task, payload, **options)).id

    async def start(self, *tasks: str, **options: Any) -> str:
        options = {"poll_interval": 0.1, **options}
        self.runner = await self._stack.enter_async_context(
            running(self.tasks(*tasks), self._dsn, recorder=self.recorder, **options)
        )
        return self.runner.id

    async def once(self, *tasks: str, **options: Any) -> None:
        await run_once(self.tasks(*tasks), self._dsn, handle_signals=False, **options)

    async def until_started(self, job_id: int) -> None:
        async with asyncio.timeout(DEADLINE), self._started:
            await self._started.wait_for(lambda: job_id in self._held)

    async def release(self, job_id: int, error: str | None = None) -> None:
        held = self._held.pop(job_id)
        held.set_exception(IntendedError(error)) if error else held.set_result(None)

    async def stop(self) -> None:
        await self._stack.aclose()

    def tasks(self, *names: str) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, f"_{name}") for name in names}

    async def _see(self, payload: Any) -> None:
        self.ran.append(("see", payload))

    async def _hold(self, payload: Any, ctx: JobContext) -> None:
        self.ran.append(("hold", payload))
        end = asyncio.get_running_loop().create_future()
        async with self._started:
            self._held[ctx.job.id] = end
            self._started.notify_all()
        await end

    async def _fail(self, payload: Any) -> None:
        raise IntendedError(payload["error"])

    async def _record(self, payload: Any, ctx: JobContext) -> None:
        [(run,)] = await ctx.query(_BEGIN, ctx.job.id, ctx.worker_id)
        await asyncio.sleep(payload.get("ms", 0) / 1000)
        await ctx.query(_END, run)

    async def _batch(self, payload: Any) -> list[Exception | None]:
        return [
            IntendedError(f"{item['n']} fails in Python") if "python" in item.get("fails", ()) else None
            for item in payload
        ]


class Sql:
    """A client that adds jobs in SQL."""

    def __init__(self, db: asyncpg.Connection) -> None:
        self._db = db

    async def add(self, task: str, payload: Any = None, **options: Any) -> int:
        return int((await add(self._db, task, payload=payload, **options))["id"])
