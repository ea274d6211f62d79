"""What a worker says by itself: a blocked event loop, jobs that no worker runs, and jobs that pile up."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from msgspec import structs

from graphile_worker import Runner
from graphile_worker._db.queries import statistics as database_statistics
from graphile_worker._db.sql_files import Schema
from graphile_worker._worker.liveness import health_server
from graphile_worker._worker.maintenance import queue_watch, statistics_service
from graphile_worker._worker.maintenance.queue_watch import MIN_BACKLOG, QueueWatch
from graphile_worker.middleware import BlockedLoop
from support.jobs import add
from support.waiting import until
from support.workers import Gate, nothing, running

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = Schema("graphile_worker")


def watch_of(runner: Runner) -> QueueWatch:
    """Return a watch that only the test calls. The worker has none, because its statistics are off."""
    return QueueWatch(
        pool=runner._pool,
        session=runner._parts.session,
        now=lambda: datetime.now(UTC),
        logger=runner.logger,
    )


async def sample_and_check(db: asyncpg.Connection, *watches: QueueWatch) -> None:
    assert await database_statistics.sample_depths(db, SCHEMA, 60.0)
    for watch in watches:
        await watch.check()


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for record in caplog.records if text in (message := record.getMessage())]


@pytest.fixture(autouse=True)
def captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphile_worker")


class TestUnservedTasks:
    async def test_jobs_without_a_worker_are_one_warning_and_one_line_when_they_are_gone(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await add(db, "send_emial")
        async with running({"send_email": nothing}, database, statistics=False) as runner:
            watch = watch_of(runner)
            await sample_and_check(db, watch)
            assert said(caplog, "no Python worker has") == [], "a worker may be about to start"
            for _ in range(3):
                await sample_and_check(db, watch)
            [line] = said(caplog, "no Python worker has")
            assert line.startswith(
                "1 job is due, but no Python worker has the task 'send_emial'. Did you mean"
            )
            await db.execute("delete from graphile_worker._private_jobs")
            await sample_and_check(db, watch)
            assert len(said(caplog, "have gone or have a worker")) == 1
            await add(db, "send_emial")
            for _ in range(3):
                await sample_and_check(db, watch)
            assert len(said(caplog, "no Python worker has")) == 1, "at most once an hour"

    async def test_running_worker_warns_by_itself(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(statistics_service, "FLUSH_INTERVAL", 0.05)
        monkeypatch.setattr(statistics_service, "SAMPLE_INTERVAL", 0.05)
        monkeypatch.setattr(queue_watch, "SAMPLE_INTERVAL", 0.05)
        await add(db, "unknown")
        async with running({"task": nothing}, database):

            async def has_warned() -> bool:
                return bool(said(caplog, "no Python worker has the task 'unknown'"))

            await until(has_warned, "the worker warns")

    async def test_only_one_of_several_workers_warns(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        await add(db, "unknown")
        async with (
            running({"task": nothing}, database, statistics=False) as first,
            running({"task": nothing}, database, statistics=False) as second,
        ):
            await until_alive(db, 2)
            watches = watch_of(first), watch_of(second)
            for _ in range(3):
                await sample_and_check(db, *watches)
        assert len(said(caplog, "no Python worker has")) == 1

    async def test_tasks_of_another_worker_are_not_reported(
        self, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate = Gate()
        async with (
            running({"task": nothing}, database, statistics=False) as runner,
            running({"other": gate}, database, statistics=False, concurrency=1, prefetch=0),
        ):
            for _ in range(3):
                await add(db, "other")
            await gate.until_started()
            await until_alive(db, 2)
            watch = watch_of(runner)
            for _ in range(3):
                await sample_and_check(db, watch)
            gate.open()
        assert said(caplog, "no Python worker has") == []


async def until_alive(db: asyncpg.Connection, count: int) -> None:
    async def are_alive() -> bool:
        found: int = await db.fetchval("select count(*) from graphile_worker._private_workers")
        return found == count

    await until(are_alive, "the workers are registered")


async def test_jobs_that_pile_up_are_one_warning_and_one_line_when_they_become_fewer(
    db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with running({"task": gate}, database, statistics=False, concurrency=1, prefetch=0) as runner:
        await add(db)
        await gate.until_started()
        await db.execute(
            "select graphile_worker.add_job('task') from generate_series(1, $1::int)", MIN_BACKLOG
        )
        watch = watch_of(runner)
        for _ in range(6):
            await add(db)
            await sample_and_check(db, watch)
        [line] = said(caplog, "do not become fewer")
        assert "'task' do not become fewer: 104 jobs are due, 3 more than" in line
        assert "The workers have 1 slot." in line
        await db.execute("delete from graphile_worker._private_jobs where locked_at is null")
        await sample_and_check(db, watch)
        assert said(caplog, "become fewer again") == [
            "The jobs of the task 'task' become fewer again: 0 jobs are due"
        ]
        gate.open()


async def test_jobs_added_at_once_that_are_being_run_do_not_pile_up(
    db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running({"other": nothing}, database, statistics=False) as runner:
        watch = QueueWatch(
            pool=structs.replace(runner._pool, tasks=("task",)),
            session=runner._parts.session,
            now=lambda: datetime.now(UTC),
            logger=runner.logger,
        )
        add_many = "select graphile_worker.add_job('task') from generate_series(1, $1::int)"
        await db.execute(add_many, MIN_BACKLOG)
        await sample_and_check(db, watch)
        await db.execute(add_many, 3 * MIN_BACKLOG)
        for _ in range(6):
            await sample_and_check(db, watch)
            await db.execute(
                """delete from graphile_worker._private_jobs where id in
                (select id from graphile_worker._private_jobs order by id limit 20)"""
            )
    assert said(caplog, "do not become fewer") == []


class TestBlockedLoop:
    @pytest.fixture(autouse=True)
    def fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health_server, "_PING_INTERVAL", 0.02)
        monkeypatch.setattr(health_server, "_CALLS_UNTIL_BLOCKED", 5)

    @pytest.fixture
    def warned(self) -> Iterator[threading.Event]:
        """Set when the warning is logged, on whatever thread."""
        seen = threading.Event()

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "in block_until_warned" in record.getMessage():
                    seen.set()

        handler = Listener()
        logging.getLogger("graphile_worker").addHandler(handler)
        yield seen
        logging.getLogger("graphile_worker").removeHandler(handler)

    async def test_worker_warns_while_its_event_loop_is_blocked_and_says_when_it_is_over(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        warned: threading.Event,
    ) -> None:
        done = asyncio.Event()

        async def block_until_warned(_payload: object) -> None:
            warned.wait(20)
            done.set()

        async with running({"task": block_until_warned}, database):
            await add(db)
            async with asyncio.timeout(30):
                await done.wait()

            async def is_over() -> bool:
                return bool(said(caplog, "The event loop runs again, after"))

            await until(is_over, "the worker says that the loop runs again")
        warnings = said(caplog, "The event loop has been blocked for")
        assert len([line for line in warnings if "in block_until_warned" in line]) == 1

    async def test_worker_leaves_the_warning_to_the_middleware_that_names_the_job(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        warned: threading.Event,
    ) -> None:
        done = asyncio.Event()

        async def block_until_warned(_payload: Any) -> None:
            warned.wait(20)
            done.set()

        async with running({"task": block_until_warned}, database, middleware=[BlockedLoop(0.2)]):
            await add(db)
            async with asyncio.timeout(30):
                await done.wait()
        assert said(caplog, "(task) is blocking the event loop")
        assert said(caplog, "The event loop has been blocked for") == []
