"""The driver of graphile_worker."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
from protocol import PAUSE, Completions, Driver, serve

from graphile_worker import App, Events, JobSpec, task
from graphile_worker._db.sql_files import Schema, one_text_statement
from graphile_worker.events import JobComplete

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Session

_PREFETCH = 500
_FEEDING_INTERVAL = 0.001
_TRANSACTION_SIZE = 100
_CALL_LIMIT = 20.0


@task
async def trivial(id: int, seconds: float) -> None:
    """Do nothing."""


@task
def sync(id: int, seconds: float) -> None:
    """Do nothing, on a thread."""


@task
async def sleep(id: int, seconds: float) -> None:  # noqa: ARG001
    """Wait."""
    await asyncio.sleep(seconds)


@task
async def fail(id: int, seconds: float) -> None:  # noqa: ARG001
    """Raise."""
    raise RuntimeError("on purpose")


@task
async def echo(value: int) -> int:
    """Return the argument."""
    return value


class PythonDriver(Driver):
    """The driver of graphile_worker."""

    def __init__(self) -> None:
        super().__init__()
        self._app = self._make_app()
        self._running = AsyncExitStack()

    def _make_app(self, **settings: Any) -> App:
        app = App(events=Events(), **settings)
        app.include(trivial, sync, sleep, fail, echo)

        @app.task
        async def probe(payload: dict[str, float]) -> None:
            self.probes.note(payload)

        @app.task
        async def wait(sent: float, seconds: float) -> None:
            self.probes.note({"sent": sent})
            await asyncio.sleep(seconds)

        app.events.on(JobComplete, lambda _event: self.completions.note())
        return app

    async def install(self) -> None:
        """Run the migrations."""
        await self._app.utils.migrate()

    async def clear(self) -> None:
        """Remove all jobs, queues and attempts."""
        connection = await asyncpg.connect()
        await connection.execute(
            "truncate graphile_worker._private_jobs, graphile_worker._private_job_queues, "
            "graphile_worker._private_python_runs"
        )
        await connection.close()

    async def enqueue(
        self, task: str, count: int, how: str = "bulk", queues: int = 0, seconds: float = 0.0
    ) -> None:
        """Add jobs."""
        max_attempts = 1 if task == "fail" else None
        if how == "bulk":
            await self._app.utils.add_jobs(
                JobSpec(
                    task,
                    {"id": number, "seconds": seconds},
                    queue_name=f"queue {number % queues}" if queues else None,
                    max_attempts=max_attempts,
                )
                for number in range(count)
            )
            return
        lanes = 10 if how == "ten" else 1

        async def lane() -> None:
            for number in range(count // lanes):
                await self._app.utils.add_job(
                    task, {"id": number, "seconds": seconds}, max_attempts=max_attempts
                )

        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def enqueue_through_sqlalchemy(self, count: int, *, by_hand: bool) -> None:
        """Add jobs one at a time in the transactions of a session, or execute the same statement there."""
        add = _add_by_hand if by_hand else _add_through_library
        await asyncio.to_thread(_enqueue_in_sessions, add, count)

    async def start(
        self,
        concurrency: int,
        *,
        tuned: bool = False,
        prefetch: int | None = None,
        history: str | None = None,
    ) -> None:
        """Start a worker: with the defaults unless it is tuned, or with this prefetch or history."""
        self.completions = Completions()
        options: dict[str, Any] = {"prefetch": _PREFETCH} if tuned else {}
        if prefetch is not None:
            options["prefetch"] = prefetch
        app = self._app if history is None else self._make_app(history=history)
        await self._running.enter_async_context(
            app.running(concurrency=concurrency, migrate=False, **options)
        )

    async def stop(self) -> None:
        """Stop the worker."""
        await self._running.aclose()

    async def send(self, payload: dict[str, float], *, delay: float | None = None) -> None:
        """Add a probe."""
        run_at = None if delay is None else datetime.now(UTC) + timedelta(seconds=delay)
        await self._app.utils.add_job("probe", payload, run_at=run_at)

    async def call(self, samples: int) -> list[float]:
        """Return the seconds that each of some calls takes. Each begins shortly after the last one ended."""
        durations = []
        for number in range(samples):
            await asyncio.sleep(PAUSE)
            started = time.monotonic()
            await echo.using(wait=_CALL_LIMIT).call(number)
            durations.append(time.monotonic() - started)
        return durations

    async def feed_waits(self, rate: float, count: int, seconds: float) -> None:
        """Add jobs that take this long, at an even rate per second."""
        start, sent = time.monotonic(), 0
        while sent < count:
            now = time.monotonic()
            due = min(count, int((now - start) * rate))
            if due > sent:
                spec = JobSpec("wait", {"sent": now, "seconds": seconds})
                await self._app.utils.add_jobs([spec] * (due - sent))
                sent = due
            await asyncio.sleep(_FEEDING_INTERVAL)


def _enqueue_in_sessions(add: Any, count: int) -> None:
    for session, size in _sessions(count):
        for number in range(size):
            add(session, number)


def _sessions(count: int) -> Iterator[tuple[Session, int]]:
    """Yield sessions in a transaction, each with the number of jobs to add in it."""
    from sqlalchemy import create_engine  # noqa: PLC0415 - not for every measurement
    from sqlalchemy.orm import Session  # noqa: PLC0415

    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}
    arguments = {name: os.environ[variable] for name, variable in names.items()}
    engine = create_engine("postgresql+psycopg://", connect_args=arguments)
    for begin in range(0, count, _TRANSACTION_SIZE):
        with Session(engine) as session, session.begin():
            yield session, min(_TRANSACTION_SIZE, count - begin)
    engine.dispose()


def _add_through_library(session: Session, number: int) -> None:
    trivial.using(connection=session).enqueue_sync(id=number, seconds=0.0)


def _add_by_hand(session: Session, number: int) -> None:
    from sqlalchemy import text  # noqa: PLC0415

    statement = one_text_statement(Schema(), "caller_jobs.sql", "try_to_add")
    document = json.dumps([{"identifier": "trivial", "payload": json.dumps({"id": number, "seconds": 0.0})}])
    rendered = text(statement.render(":document", escaped=":", escape="\\:"))
    json.loads(session.execute(rendered, {"document": document}).scalar_one())


if __name__ == "__main__":
    serve(PythonDriver)
