"""Running workers in tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from graphile_worker import Events, Runner, run
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import asyncpg

    from graphile_worker.events import Event

DEADLINE = 20.0


class Heard:
    """All events of a worker, and waiting for them."""

    def __init__(self) -> None:
        self.events = Events()
        self.all: list[Event] = []
        self._changed = asyncio.Event()
        self.events.on("*", self._hear)

    def _hear(self, event: Event) -> None:
        self.all.append(event)
        self._changed.set()

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.all]

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.names)

    def named(self, name: str) -> list[Any]:
        return [event for event in self.all if event.name == name]

    async def until(self, name: str, count: int = 1) -> Any:
        """The event that makes it so many of that name."""
        async with asyncio.timeout(DEADLINE):
            while len(self.named(name)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.named(name)[count - 1]


class Gate:
    """A task that tells when it begins, and ends when it is let."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.cancelled: list[Any] = []
        self._open = asyncio.Event()
        self._changed = asyncio.Event()

    async def __call__(self, payload: Any) -> None:
        self.begun.append(payload)
        self._changed.set()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(payload)
            raise
        self.ended.append(payload)

    def open(self) -> None:
        self._open.set()

    async def until_begun(self, count: int = 1) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.begun) < count:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def running(
    tasks: dict[str, Callable[..., Any]], dsn: str | None, *, heard: Heard | None = None, **options: Any
) -> AsyncIterator[Runner]:
    """A worker that is stopped at the end, quickly."""
    options = {"handle_signals": False, **options}
    runner = await run(tasks, dsn, events=heard.events if heard else None, **options)
    try:
        yield runner
    finally:
        async with asyncio.timeout(DEADLINE):
            await runner.stop(grace=0)


async def nothing(_payload: object) -> None:
    """A task."""


async def drop_schema(db: asyncpg.Connection) -> None:
    """Under a worker that works.

    Whoever looks for jobs locks the tables in another order, and of a deadlock the drop might be the victim.
    So first nobody finds them any more.
    """
    await db.execute("alter schema graphile_worker rename to dropped")

    async def idle() -> bool:
        return not await db.fetchval(
            """select exists (select from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle')"""
        )

    await until(idle, "nobody is in the middle of something")
    await db.execute("drop schema dropped cascade")


async def locked(db: asyncpg.Connection) -> list[tuple[str, int]]:
    """What is locked: jobs and queues by id."""
    rows = await db.fetch("""
        select 'job' as kind, id::int from graphile_worker._private_jobs where locked_at is not null
        union all
        select 'queue', id from graphile_worker._private_job_queues where locked_at is not null
        order by kind, id
    """)
    return [(row["kind"], row["id"]) for row in rows]
