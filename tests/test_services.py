"""Services survive errors in user code, and never block other workers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import CronItem, JobSpec, Middleware, RecoveryAction, parse_crontab
from graphile_worker._base.background_thread import BackgroundThread, BackgroundThreadEndedError
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._db.connection import transactions
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._db.sql_files import Schema
from graphile_worker._worker.liveness import health_server as health_module
from graphile_worker._worker.liveness.loop_relay import LoopRelay
from graphile_worker._worker.service import Service
from support.jobs import add, existing, lock
from support.proxy import proxied
from support.waiting import until
from support.workers import EventRecorder, nothing, running
from test_heartbeat import victim
from test_recovery import register_worker
from test_scheduler import MINUTE, NEW_YEAR, SchedulerHarness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

EXITS: list[type[BaseException]] = [asyncio.CancelledError, SystemExit, KeyboardInterrupt]
context_variable: ContextVar[str] = ContextVar("context_variable")
LEASE_OPTIONS: dict[str, Any] = {"heartbeat_interval": 0.3, "fast_lease": 1.2, "lease": 4.0}


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database, max_size=4)
    yield Session(Schema(), pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def harness(session: Session, db: asyncpg.Connection) -> SchedulerHarness:
    return SchedulerHarness(session, db)


async def until_true(condition: Callable[[], object], what: str) -> None:
    async def found() -> bool:
        return bool(condition())

    await until(found, what)


class CountingService(Service):
    """A service that counts its ticks and raises the error that the test sets."""

    name = "counter"

    def __init__(self) -> None:
        super().__init__(ScopedLogger(logging.getLogger("graphile_worker"), {}))
        self.ticks = 0
        self.error: type[BaseException] | None = None

    async def tick(self) -> float:
        self.ticks += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error("from a tick")
        return 0.001


class TestService:
    @pytest.mark.parametrize("error", [*EXITS, OSError])
    async def test_service_survives_any_error_in_a_tick(
        self, error: type[BaseException], caplog: pytest.LogCaptureFixture
    ) -> None:
        service = CountingService()
        service.error = error
        service.start()
        await until_true(lambda: service.ticks > 3, "the service ticks again")
        assert service.failing is not None
        assert "from a tick" in service.failing.reason
        assert "counter failed" in caplog.text
        service.error = None
        await until_true(lambda: service.failing is None, "the service recovers")
        await service.stop()
        assert not service.has_ended

    async def test_service_has_ended_when_its_task_is_cancelled(self) -> None:
        service = CountingService()
        service.start()
        assert service._task is not None
        service._task.cancel()
        await until_true(lambda: service.has_ended, "the service has ended")

    async def test_service_that_swallows_its_cancellation_still_stops(self) -> None:
        class SwallowsCancellation(CountingService):
            async def tick(self) -> float:
                self.ticks += 1
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    return 0.0
                return 0.0

        service = SwallowsCancellation()
        service.start()
        await until_true(lambda: service.ticks, "the service ticks")
        async with asyncio.timeout(10):
            await service.stop()


class FailingMiddleware(Middleware):
    """Middleware that fails so many times, by raising an error or by cancelling its task."""

    def __init__(self, how: type[BaseException] | str, times: int = 1) -> None:
        self.how, self.times = how, times

    async def enqueue(self, _specs: Sequence[JobSpec], proceed: Any) -> Any:
        if self.times > 0:
            self.times -= 1
            if isinstance(self.how, type):
                raise self.how("from middleware")
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return await proceed()


class TestCron:
    @pytest.mark.parametrize("how", [*EXITS, "cancels its task"])
    async def test_cron_continues_after_middleware_raises_or_cancels(
        self,
        harness: SchedulerHarness,
        database: str,
        how: type[BaseException] | str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        past = datetime.now(UTC).replace(second=0, microsecond=0) - 5 * MINUTE
        await harness.register_item("t", since=past - MINUTE, last=past)
        options: dict[str, Any] = {
            "middleware": [FailingMiddleware(how)],
            "cron_items": parse_crontab("* * * * * t ?fill=1h"),
        }
        async with running({"other": nothing}, database, **options) as runner:

            async def added() -> bool:
                return len(await harness.jobs()) >= 4

            await until(added, "the missed minutes are added")
            assert runner.health().ready
        assert "Cannot add the jobs of the cron item 't'" in caplog.text

    async def test_hanging_middleware_does_not_block_other_schedulers(
        self, harness: SchedulerHarness
    ) -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()
        called: list[list[str]] = []

        class Hangs(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                called.append([spec.identifier for spec in specs])
                asked.set()
                await go_on.wait()
                return await proceed()

        hanging = harness.scheduler("* * * * * t\n* * * * * u", middleware=[Hangs()])
        harness.clock.time = NEW_YEAR
        tick = asyncio.create_task(hanging.tick())
        await asked.wait()
        assert hanging.failing is not None
        async with asyncio.timeout(10):
            await harness.scheduler("* * * * * t").tick()
        assert [job["identifier"] for job in await harness.jobs()] == ["t"]
        go_on.set()
        await tick
        assert hanging.failing is None
        assert sorted(job["identifier"] for job in await harness.jobs()) == ["t", "u"]
        assert called == [["t", "u"], ["u"]], "middleware must not see items that other workers have added"

    @pytest.mark.parametrize(
        ("prepared_statements", "begins", "replies", "statement", "state"),
        [
            # It freezes idle with its locks held, or during a statement whose parameters never arrive.
            pytest.param(True, "begin", 2, "for update", "idle in transaction", id="idle"),
            pytest.param(False, "for update", 2, "for update", "idle in transaction", id="idle, in a pooler"),
            pytest.param(True, "set last_execution", 1, "set last_execution", "active", id="active"),
            pytest.param(
                False, "set last_execution", 1, "set last_execution", "active", id="active, in a pooler"
            ),
        ],
    )
    async def test_scheduler_frozen_in_a_transaction_does_not_block_others(
        self,
        harness: SchedulerHarness,
        database: str,
        monkeypatch: pytest.MonkeyPatch,
        prepared_statements: bool,
        begins: str,
        replies: int,
        statement: str,
        state: str,
    ) -> None:
        if state == "active" and not prepared_statements and harness.db.get_server_version().major < 17:
            pytest.skip("only transaction_timeout (PostgreSQL 17) ends such a transaction")
        monkeypatch.setattr(transactions, "SHORT", 0.5)
        monkeypatch.setattr(transactions, "DURATION", 1.0)
        async with proxied(database) as (proxy, through):
            pool = Pool(through, max_size=1, prepared_statements=prepared_statements)
            frozen = harness.scheduler(
                "* * * * * t",
                session=Session(Schema(), pool, logging.getLogger("graphile_worker")),
            )
            harness.clock.time = NEW_YEAR - MINUTE / 2
            await frozen.tick()  # The scheduler has started.
            seen: list[str] = []

            def cut_off(direction: str, data: bytes) -> bool:
                if seen or begins.encode() in data:
                    seen.append(direction)
                if seen.count("reply") == replies:
                    proxy.start_blackhole()
                return False

            proxy.cut_when = cut_off
            harness.clock.time = NEW_YEAR
            tick = asyncio.create_task(frozen.tick())

            async def is_frozen() -> bool:
                return bool(
                    await harness.db.fetchval(
                        "select exists (select from pg_stat_activity where datname = current_database() "
                        "and state = $1 and wait_event = 'ClientRead' and strpos(query, $2) > 0 "
                        "and pid <> pg_backend_pid())",
                        *(state, statement),
                    )
                )

            await until(is_frozen, "the frozen scheduler holds its locks")
            monkeypatch.setattr(transactions, "DURATION", 60.0)  # The other scheduler waits for its locks.
            async with asyncio.timeout(15):
                await harness.scheduler("* * * * * t").tick()
            assert await harness.run_times() == [NEW_YEAR]
            proxy.cut_when = lambda _direction, _data: False
            proxy.end_blackhole()
            await tick
            await frozen.tick()
            await pool.close()
        assert await harness.run_times() == [NEW_YEAR]

    async def test_middleware_may_add_cron_jobs_in_several_steps(self, harness: SchedulerHarness) -> None:
        class Splits(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                return [job for spec in specs for job in await proceed([spec])]

        scheduler = harness.scheduler("* * * * * t\n* * * * * u", middleware=[Splits()])
        for _ in range(2):
            await harness.tick_at(scheduler, NEW_YEAR)
        assert [job["identifier"] for job in await harness.jobs()] == ["t", "u"]

    async def test_middleware_that_adds_nothing_is_called_once_per_minute(
        self, harness: SchedulerHarness
    ) -> None:
        asked: list[int] = []

        class Drops(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], _proceed: Any) -> Any:
                asked.append(len(specs))
                return []

        for scheduler in [harness.scheduler("* * * * * t", middleware=[Drops()]) for _ in range(2)]:
            await harness.tick_at(scheduler, NEW_YEAR)
        assert asked == [1]
        assert await harness.known_items() == {"t": (NEW_YEAR, NEW_YEAR)}

    async def test_middleware_that_fails_after_adding_causes_no_duplicate(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        class FailsLate(Middleware):
            async def enqueue(self, _specs: Sequence[JobSpec], proceed: Any) -> Any:
                await proceed()
                raise ValueError("too late")

        scheduler = harness.scheduler("* * * * * t", middleware=[FailsLate()])
        for minute in range(2):
            await harness.tick_at(scheduler, NEW_YEAR + minute * MINUTE)
        assert await harness.run_times() == [NEW_YEAR, NEW_YEAR + MINUTE]
        assert "too late" in caplog.text

    async def test_overlap_is_checked_again_after_middleware(self, harness: SchedulerHarness) -> None:
        calls: list[int] = []

        class Slow(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                calls.append(len(specs))
                if len(calls) == 1:  # Another client adds a job with the same key.
                    await add(harness.db, "t", job_key=specs[0].job_key, payload={})
                return await proceed()

        scheduler = harness.scheduler([CronItem("t", "* * * * *", overlap="skip")], middleware=[Slow()])
        await harness.tick_at(scheduler, NEW_YEAR)
        [job] = await harness.jobs()
        assert job["payload"] == "{}"
        assert await harness.known_items() == {"t": (NEW_YEAR, NEW_YEAR)}


class TestRecovery:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("error", EXITS)
    @pytest.mark.parametrize("kind", ["def", "async def"])
    async def test_recovery_continues_after_a_hook_raises_base_exceptions(
        self, db: asyncpg.Connection, database: str, error: type[BaseException], kind: str
    ) -> None:
        def decide(_job: object, _worker: object) -> RecoveryAction | None:
            raise error("from on_recovery")

        async def decide_async(_job: object, _worker: object) -> RecoveryAction | None:
            raise error("from on_recovery")

        hook = decide if kind == "def" else decide_async
        async with running({"other": nothing}, database, on_recovery=hook, **LEASE_OPTIONS) as runner:
            for number in range(2):
                await register_worker(db, f"w{number}", seconds=4, fast=0.5)
                job = (await add(db))["id"]
                await lock(db, job, by=f"w{number}")

                async def is_released(job: int = job) -> bool:
                    return (await existing(db, job))["locked_by"] is None

                await until(is_released, "the job is released")
            assert runner.health().ready

    async def test_worker_recovers_jobs_while_a_task_blocks_its_event_loop(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with victim(database, lease=60.0) as blocked:
            blocking = (await add(db, "block_loop", payload=25))["id"]
            await blocked.until("begun")
            async with victim(database) as dying:
                job = (await add(db, "sleep", payload=60))["id"]
                await dying.until("begun")
                dying.send(signal.SIGKILL)

                async def is_released() -> bool:
                    return (await existing(db, job))["locked_by"] is None

                await until(is_released, "the job of the dead worker is released")
            assert (await existing(db, blocking))["locked_by"] is not None, (
                "the blocked worker must keep its job"
            )

    async def test_relay_gives_up_on_a_blocked_event_loop(self) -> None:
        called: list[int] = []
        relay, background_thread = LoopRelay(), BackgroundThread()
        background_thread.start()

        async def ask() -> str:
            try:
                async with asyncio.timeout(0.05):
                    await relay.run(called.append, 1)
            except TimeoutError:
                return "gave up"
            return "answered"

        future = background_thread.submit(ask())
        assert future.result(timeout=20) == "gave up"  # This blocks the event loop of the test.
        await asyncio.sleep(0)
        assert called == [], "a call that was given up must not run later"
        assert await background_thread.run(ask()) == "answered"
        assert called == [1]
        await background_thread.stop()

    async def test_recovery_hook_runs_on_the_event_loop_of_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        context_variable.set("of the caller that started the worker")
        asked: list[object] = []

        async def decide(_job: object, _worker: object) -> RecoveryAction:
            asked.extend([asyncio.get_running_loop(), context_variable.get()])
            return RecoveryAction.fail("it may have been paid already")

        recorder = EventRecorder()
        async with running(
            {"other": nothing}, database, recorder=recorder, on_recovery=decide, **LEASE_OPTIONS
        ):
            await register_worker(db, "w", seconds=4, fast=0.5)
            job = (await add(db))["id"]
            await lock(db, job, by="w")
            await recorder.until("worker:recovered")
        assert asked == [asyncio.get_running_loop(), "of the caller that started the worker"]
        assert (await existing(db, job))["last_error"] == "it may have been paid already"


class TestHealth:
    async def test_ended_service_is_named_in_health_and_restarted(self, database: str) -> None:
        async with running({"task": nothing}, database) as runner:
            health, ended = runner._parts.health, runner._parts._stale_locks
            revive, health._restart_services = health._restart_services, lambda: None
            assert ended._task is not None
            ended._task.cancel()
            await until_true(lambda: runner.health().state == "incomplete", "the worker is not ready")
            found = runner.health()
            assert (found.ready, found.live) == (False, True)
            assert "stale locks" in (found.reason or "")
            assert list(found.failing) == ["stale locks"]
            health._restart_services = revive
            await until_true(lambda: runner.health().ready, "the worker is ready again")

    async def test_persistently_failing_service_is_named_in_health(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "_FAILING_AFTER", 0.0)
        past = datetime.now(UTC) - 5 * MINUTE
        await db.execute("insert into graphile_worker._private_known_crontabs values ('t', $1, $1)", past)
        options: dict[str, Any] = {
            "middleware": [FailingMiddleware(OSError, times=10**6)],
            "cron_items": parse_crontab("* * * * * t ?fill=1h"),
        }
        async with running({"task": nothing}, database, **options) as runner:
            await until_true(
                lambda: runner.health().failing.get("scheduler", "").endswith(" s: from middleware"),
                "health names the service",
            )
            assert runner.health().ready, "a failing cron scheduler must not make the worker unready"


class TestBackgroundThread:
    async def test_background_thread_rejects_coroutines_after_its_end(self) -> None:
        background_thread = BackgroundThread()
        background_thread.start()
        await background_thread.stop()

        with pytest.raises(BackgroundThreadEndedError):
            await background_thread.run(asyncio.sleep(0))

    async def test_background_thread_rejects_coroutines_that_arrive_during_its_end(self) -> None:
        background_thread, ends = BackgroundThread(), threading.Event()
        background_thread.start()

        def end() -> None:
            background_thread.end()
            ends.wait(10)  # Hold the last iteration of the loop.

        background_thread.call(end)

        futures = [background_thread.submit(asyncio.sleep(0)) for _ in range(3)]
        ends.set()
        await background_thread.stop()

        outcomes = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        assert {type(one) for one in outcomes} <= {
            BackgroundThreadEndedError,
            type(None),
            asyncio.CancelledError,
        }
