"""Workers run by tests."""

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


class EventRecorder:
    """Record a worker's events and wait for them."""

    def __init__(self) -> None:
        self.events = Events()
        self.all: list[Event] = []
        self._changed = asyncio.Event()
        self.events.on("*", self._record)

    def _record(self, event: Event) -> None:
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
        """Return the `count`-th event of that name, once it has arrived."""
        async with asyncio.timeout(DEADLINE):
            while len(self.named(name)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.named(name)[count - 1]


class Gate:
    """A task that reports when it starts, and blocks until the test opens it."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.cancelled: list[Any] = []
        self._open = asyncio.Event()
        self._changed = asyncio.Event()

    async def __call__(self, payload: Any) -> None:
        self.started.append(payload)
        self._changed.set()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(payload)
            raise
        self.ended.append(payload)

    def open(self) -> None:
        self._open.set()

    async def until_started(self, count: int = 1) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.started) < count:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def running(
    tasks: dict[str, Callable[..., Any]],
    dsn: str | None,
    *,
    recorder: EventRecorder | None = None,
    **options: Any,
) -> AsyncIterator[Runner]:
    """Run a worker, and stop it without a grace period at the end."""
    options = {"handle_signals": False, **options}
    runner = await run(tasks, dsn, events=recorder.events if recorder else None, **options)
    try:
        yield runner
    finally:
        async with asyncio.timeout(DEADLINE):
            await runner.stop(grace=0)


async def nothing(_payload: object) -> None:
    """Do nothing, successfully."""


async def drop_schema(db: asyncpg.Connection) -> None:
    """Drop the schema while a worker is running.

    A worker that claims jobs locks the tables in another order, so the drop might lose a deadlock.
    The schema is renamed first: no session finds its tables any more.
    """
    await db.execute("alter schema graphile_worker rename to dropped")

    async def idle() -> bool:
        return not await db.fetchval(
            """select exists (select from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle')"""
        )

    await until(idle, "every other session is idle")
    await db.execute("drop schema dropped cascade")


async def locked(db: asyncpg.Connection) -> list[tuple[str, int]]:
    """Return the kind and id of every locked job and queue."""
    rows = await db.fetch("""
        select 'job' as kind, id::int from graphile_worker._private_jobs where locked_at is not null
        union all
        select 'queue', id from graphile_worker._private_job_queues where locked_at is not null
        order by kind, id
    """)
    return [(row["kind"], row["id"]) for row in rows]
