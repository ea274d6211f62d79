"""The driver of procrastinate."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from procrastinate import App, PsycopgConnector
from protocol import Completions, Driver, serve
from psycopg_pool import AsyncConnectionPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from procrastinate.jobs import JobDeferrer
    from psycopg import AsyncConnection

# Successful jobs are deleted, as in the other queues. A failed job stays: by default it has one attempt.
_OPTIONS: dict[str, Any] = {"delete_jobs": "successful", "install_signal_handlers": False}
# Listening connections have this name too, so that the driver can find its own.
_NAME = f"benchmark {os.getpid()}"
_LANES = 10
_MOST_CONNECTIONS = 150  # the server allows 200; jobs share the connections of a pool
# procrastinate has no notification for a released lock. It polls every 5 s unless configured otherwise.
_TUNED_POLLING = 0.02


async def trivial(**_payload: object) -> None:
    """Do nothing."""


def sync(**_payload: object) -> None:
    """Do nothing, on a thread."""


async def sleep(seconds: float, **_payload: object) -> None:
    """Wait."""
    await asyncio.sleep(seconds)


async def fail(**_payload: object) -> None:
    """Raise."""
    raise RuntimeError("on purpose")


async def _autocommit(connection: AsyncConnection) -> None:
    await connection.set_autocommit(True)


def _unchecked(**options: Any) -> AsyncConnectionPool:
    del options["check"]
    return AsyncConnectionPool(**options)


class Procrastinate(Driver):
    """The driver of procrastinate."""

    def __init__(self) -> None:
        super().__init__()
        self._client = self._app(_LANES)
        self._worker: App | None = None
        self._running: asyncio.Task[None] | None = None

    async def _probe(self, **payload: float) -> None:
        self.probes.note(payload)

    def _app(self, concurrency: int, *, tuned: bool = False) -> App:
        # "The shorter your average job execution time, the more your pool will need to contain as many
        # connections as your concurrency (plus one)."
        size = min(concurrency + 1, _MOST_CONNECTIONS)
        options: dict[str, Any] = {"min_size": min(4, size), "max_size": size}
        if tuned:
            # By default each query begins and commits a transaction, after the pool has checked the
            # connection: four round trips. These options reduce them to one. The connector offers but does
            # not advise them.
            options |= {"pool_factory": _unchecked, "configure": _autocommit}
        app = App(connector=PsycopgConnector(kwargs={"application_name": _NAME}, **options))
        for name, task in (
            ("trivial", trivial),
            ("sync", sync),
            ("sleep", sleep),
            ("fail", fail),
            ("probe", self._probe),
        ):
            app.task(name=name)(task)
        return app

    async def _task(self, name: str, **options: Any) -> JobDeferrer:
        await self._client.open_async()  # does nothing if it is open
        return self._client.configure_task(name, **options)

    async def install(self) -> None:
        """Apply the schema, unless it is installed."""
        await self._client.open_async()
        if not await self._client.check_connection_async():
            await self._client.schema_manager.apply_schema_async()

    async def clear(self) -> None:
        """Remove all jobs and their events."""
        await self._client.open_async()
        await self._client.connector.execute_query_async("truncate procrastinate_jobs cascade")

    async def enqueue(
        self, task: str, count: int, how: str = "bulk", queues: int = 0, seconds: float = 0.0
    ) -> None:
        """Add jobs."""
        deferrer = await self._task(task)
        if how == "bulk" and queues:
            # A task's batch has one lock. Create the jobs here, so that the jobs of the queues alternate.
            jobs = [
                deferrer.make_new_job(id=number, seconds=seconds).evolve(lock=f"queue {number % queues}")
                for number in range(count)
            ]
            await self._client.job_manager.batch_defer_jobs_async(jobs)
            return
        if how == "bulk":
            await deferrer.batch_defer_async(*({"id": number, "seconds": seconds} for number in range(count)))
            return
        lanes = _LANES if how == "ten" else 1

        async def lane() -> None:
            for number in range(count // lanes):
                await deferrer.defer_async(id=number, seconds=seconds)

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def start(self, concurrency: int, *, tuned: bool = False) -> None:
        """Start a worker, and poll until it listens, because procrastinate does not report that."""
        self._worker = await self._app(concurrency, tuned=tuned).open_async()
        completions = self.completions = Completions()

        async def note(process: Callable[[], Awaitable[Any]], *_context: object) -> Any:
            try:
                return await process()
            finally:
                completions.note()

        options: dict[str, Any] = {"worker_middleware": [note]}
        if tuned:
            options["fetch_job_polling_interval"] = _TUNED_POLLING
        work = self._worker.run_worker_async(concurrency=concurrency, **_OPTIONS, **options)
        self._running = asyncio.create_task(work)
        listening = False
        while not listening and not self._running.done():
            await asyncio.sleep(0.01)
            row = await self._worker.connector.execute_query_one_async(
                "select exists (select from pg_stat_activity where application_name = %(name)s"
                " and query ilike 'listen %%' and state = 'idle') as listening",
                name=_NAME,
            )
            listening = row["listening"]

    async def stop(self) -> None:
        """Stop the worker."""
        assert self._worker is not None
        assert self._running is not None
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        await self._worker.close_async()

    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add a probe."""
        later = {} if delay is None else {"schedule_in": {"seconds": delay}}
        await (await self._task("probe", **later)).defer_async(**payload)


if __name__ == "__main__":
    logging.getLogger("procrastinate").setLevel(logging.CRITICAL)
    serve(Procrastinate)
