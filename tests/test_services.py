"""Services go on, whatever the code of users does to them; and none of them stops other workers."""

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

from graphile_worker import CronItem, JobSpec, Middleware, Recovery, parse_crontab
from graphile_worker._db import transactions
from graphile_worker._db.connect import Pool
from graphile_worker._db.session import Session
from graphile_worker._db.sql import Schema
from graphile_worker._runtime import health as health_module
from graphile_worker._runtime.relay import Relay
from graphile_worker._runtime.service import Service
from graphile_worker._runtime.sidecar import Sidecar, SidecarEndedError
from graphile_worker.logs import ScopedLogger
from support.jobs import add, existing, lock
from support.proxy import proxied
from support.waiting import until
from support.workers import Heard, nothing, running
from test_heartbeat import victim
from test_recovery import enroll
from test_scheduler import MINUTE, NEW_YEAR, Desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

EXITS: list[type[BaseException]] = [asyncio.CancelledError, SystemExit, KeyboardInterrupt]
variable: ContextVar[str] = ContextVar("variable")
ON: dict[str, Any] = {"heartbeat_interval": 0.3, "fast_lease": 1.2, "lease": 4.0}


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database, max_size=4)
    yield Session(Schema(), pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def desk(session: Session, db: asyncpg.Connection) -> Desk:
    return Desk(session, db)


async def holds(condition: Callable[[], object], what: str) -> None:
    async def found() -> bool:
        return bool(condition())

    await until(found, what)


class Counting(Service):
    """A service whose ticks do what a test says."""

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


class TestAService:
    @pytest.mark.parametrize("error", [*EXITS, OSError])
    async def test_survives_what_a_tick_raises(
        self, error: type[BaseException], caplog: pytest.LogCaptureFixture
    ) -> None:
        service = Counting()
        service.error = error
        service.start()
        await holds(lambda: service.ticks > 3, "it ticks on")
        assert service.failing is not None
        assert "from a tick" in service.failing.why
        assert "The counter failed; again in" in caplog.text
        service.error = None
        await holds(lambda: service.failing is None, "it works again")
        await service.stop()
        assert not service.has_ended

    async def test_ends_when_its_task_is_cancelled_and_says_so(self) -> None:
        service = Counting()
        service.start()
        assert service._task is not None
        service._task.cancel()
        await holds(lambda: service.has_ended, "it has ended")

    async def test_that_swallows_its_cancellation_ends_all_the_same(self) -> None:
        class Swallows(Counting):
            async def tick(self) -> float:
                self.ticks += 1
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    return 0.0
                return 0.0

        service = Swallows()
        service.start()
        await holds(lambda: service.ticks, "it ticks")
        async with asyncio.timeout(10):
            await service.stop()


class Stray(Middleware):
    """Fails in its own way as often as it is told to."""

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
    async def test_goes_on_after_middleware_that_is_cancelled(
        self, desk: Desk, database: str, how: type[BaseException] | str, caplog: pytest.LogCaptureFixture
    ) -> None:
        past = datetime.now(UTC).replace(second=0, microsecond=0) - 5 * MINUTE
        await desk.know("t", since=past - MINUTE, last=past)
        options: dict[str, Any] = {
            "middleware": [Stray(how)],
            "cron_items": parse_crontab("* * * * * t ?fill=1h"),
        }
        async with running({"other": nothing}, database, **options) as runner:

            async def added() -> bool:
                return len(await desk.jobs()) >= 4

            await until(added, "what was missed is added")
            assert runner.health().ready
        assert "No job of the cron item 't' is added, but will be later" in caplog.text

    async def test_of_others_goes_on_while_a_middleware_hangs(self, desk: Desk) -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()
        called: list[list[str]] = []

        class Hangs(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                called.append([spec.identifier for spec in specs])
                asked.set()
                await go_on.wait()
                return await proceed()

        hanging = desk.scheduler("* * * * * t\n* * * * * u", middleware=[Hangs()])
        desk.clock.time = NEW_YEAR
        tick = asyncio.create_task(hanging.tick())
        await asked.wait()
        assert hanging.failing is not None
        async with asyncio.timeout(10):
            await desk.scheduler("* * * * * t").tick()
        assert [job["identifier"] for job in await desk.jobs()] == ["t"]
        go_on.set()
        await tick
        assert hanging.failing is None
        assert sorted(job["identifier"] for job in await desk.jobs()) == ["t", "u"]
        assert called == [["t", "u"], ["u"]], "it is not asked about what others have added"

    @pytest.mark.parametrize(
        ("prepared_statements", "begins", "replies", "statement", "state"),
        [
            # With the locks it needs, and idle; or in the middle of a statement, whose values do not come.
            pytest.param(True, "begin", 2, "for update", "idle in transaction", id="idle"),
            pytest.param(False, "for update", 2, "for update", "idle in transaction", id="idle, in a pooler"),
            pytest.param(True, "set last_execution", 1, "set last_execution", "active", id="active"),
            pytest.param(
                False, "set last_execution", 1, "set last_execution", "active", id="active, in a pooler"
            ),
        ],
    )
    async def test_of_others_goes_on_when_a_scheduler_freezes_in_its_transaction(
        self,
        desk: Desk,
        database: str,
        monkeypatch: pytest.MonkeyPatch,
        prepared_statements: bool,
        begins: str,
        replies: int,
        statement: str,
        state: str,
    ) -> None:
        if state == "active" and not prepared_statements and desk.db.get_server_version().major < 17:
            pytest.skip("only transaction_timeout of PostgreSQL 17 ends it there")
        monkeypatch.setattr(transactions, "SHORT", 0.5)
        monkeypatch.setattr(transactions, "DURATION", 1.0)
        async with proxied(database) as (proxy, through):
            pool = Pool(through, max_size=1, prepared_statements=prepared_statements)
            frozen = desk.scheduler(
                "* * * * * t",
                session=Session(Schema(), pool, logging.getLogger("graphile_worker")),
            )
            desk.clock.time = NEW_YEAR - MINUTE / 2
            await frozen.tick()  # it has begun
            seen: list[str] = []

            def cut_off(direction: str, data: bytes) -> bool:
                if seen or begins.encode() in data:
                    seen.append(direction)
                if seen.count("reply") == replies:
                    proxy.go_dark()
                return False

            proxy.cut_when = cut_off
            desk.clock.time = NEW_YEAR
            tick = asyncio.create_task(frozen.tick())

            async def stands_still() -> bool:
                return bool(
                    await desk.db.fetchval(
                        "select exists (select from pg_stat_activity where datname = current_database() "
                        "and state = $1 and wait_event = 'ClientRead' and strpos(query, $2) > 0 "
                        "and pid <> pg_backend_pid())",
                        *(state, statement),
                    )
                )

            await until(stands_still, "it holds its locks")
            monkeypatch.setattr(transactions, "DURATION", 60.0)  # the other one waits for it
            async with asyncio.timeout(15):
                await desk.scheduler("* * * * * t").tick()
            assert await desk.times() == [NEW_YEAR]
            proxy.cut_when = lambda _direction, _data: False
            proxy.light_up()
            await tick
            await frozen.tick()
            await pool.close()
        assert await desk.times() == [NEW_YEAR]

    async def test_middleware_may_add_in_several_steps(self, desk: Desk) -> None:
        class Splits(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                return [job for spec in specs for job in await proceed([spec])]

        scheduler = desk.scheduler("* * * * * t\n* * * * * u", middleware=[Splits()])
        for _ in range(2):
            await desk.at(scheduler, NEW_YEAR)
        assert [job["identifier"] for job in await desk.jobs()] == ["t", "u"]

    async def test_middleware_that_adds_nothing_is_asked_once_a_minute(self, desk: Desk) -> None:
        asked: list[int] = []

        class Drops(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], _proceed: Any) -> Any:
                asked.append(len(specs))
                return []

        for scheduler in [desk.scheduler("* * * * * t", middleware=[Drops()]) for _ in range(2)]:
            await desk.at(scheduler, NEW_YEAR)
        assert asked == [1]
        assert await desk.known() == {"t": (NEW_YEAR, NEW_YEAR)}

    async def test_middleware_that_fails_after_adding_adds_nothing_twice(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        class FailsLate(Middleware):
            async def enqueue(self, _specs: Sequence[JobSpec], proceed: Any) -> Any:
                await proceed()
                raise ValueError("too late")

        scheduler = desk.scheduler("* * * * * t", middleware=[FailsLate()])
        for minute in range(2):
            await desk.at(scheduler, NEW_YEAR + minute * MINUTE)
        assert await desk.times() == [NEW_YEAR, NEW_YEAR + MINUTE]
        assert "too late" in caplog.text

    async def test_overlap_is_checked_again_when_jobs_are_added(self, desk: Desk) -> None:
        calls: list[int] = []

        class Slow(Middleware):
            async def enqueue(self, specs: Sequence[JobSpec], proceed: Any) -> Any:
                calls.append(len(specs))
                if len(calls) == 1:  # meanwhile another client adds a job with the same key
                    await add(desk.db, "t", job_key=specs[0].job_key, payload={})
                return await proceed()

        scheduler = desk.scheduler([CronItem("t", "* * * * *", overlap="skip")], middleware=[Slow()])
        await desk.at(scheduler, NEW_YEAR)
        [job] = await desk.jobs()
        assert job["payload"] == "{}"
        assert await desk.known() == {"t": (NEW_YEAR, NEW_YEAR)}


class TestRecovery:
    @pytest.mark.parametrize("error", EXITS)
    @pytest.mark.parametrize("kind", ["def", "async def"])
    async def test_goes_on_after_a_hook_that_is_cancelled(
        self, db: asyncpg.Connection, database: str, error: type[BaseException], kind: str
    ) -> None:
        def decide(_job: object, _worker: object) -> Recovery | None:
            raise error("from on_recovery")

        async def decide_async(_job: object, _worker: object) -> Recovery | None:
            raise error("from on_recovery")

        hook = decide if kind == "def" else decide_async
        async with running({"other": nothing}, database, on_recovery=hook, **ON) as runner:
            for number in range(2):
                await enroll(db, f"w{number}", seconds=4, fast=0.5)
                job = (await add(db))["id"]
                await lock(db, job, by=f"w{number}")

                async def freed(job: int = job) -> bool:
                    return (await existing(db, job))["locked_by"] is None

                await until(freed, "the job is freed")
            assert runner.health().ready

    async def test_of_a_dead_worker_goes_on_while_a_task_blocks_the_event_loop(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with victim(database, lease=60.0) as blocked:
            blocking = (await add(db, "block_loop", payload=25))["id"]
            await blocked.until("begun")
            async with victim(database) as dying:
                job = (await add(db, "sleep", payload=60))["id"]
                await dying.until("begun")
                dying.send(signal.SIGKILL)

                async def freed() -> bool:
                    return (await existing(db, job))["locked_by"] is None

                await until(freed, "the job of the dead worker is freed")
            assert (await existing(db, blocking))["locked_by"] is not None, "the loop is blocked"

    async def test_does_not_wait_for_ever_for_a_hook_on_a_blocked_event_loop(self) -> None:
        called: list[int] = []
        relay, sidecar = Relay(), Sidecar()
        sidecar.start()

        async def ask() -> str:
            try:
                async with asyncio.timeout(0.05):
                    await relay.run(called.append, 1)
            except TimeoutError:
                return "gave up"
            return "answered"

        asking = sidecar.submit(ask())
        assert asking.result(timeout=20) == "gave up"  # which blocks this event loop
        await asyncio.sleep(0)
        assert called == [], "its answer would come too late"
        assert await sidecar.run(ask()) == "answered"
        assert called == [1]
        await sidecar.stop()

    async def test_calls_the_hook_on_the_event_loop_of_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        variable.set("of the caller that started the worker")
        asked: list[object] = []

        async def decide(_job: object, _worker: object) -> Recovery:
            asked.extend([asyncio.get_running_loop(), variable.get()])
            return Recovery.fail("it may have been paid already")

        heard = Heard()
        async with running({"other": nothing}, database, heard=heard, on_recovery=decide, **ON):
            await enroll(db, "w", seconds=4, fast=0.5)
            job = (await add(db))["id"]
            await lock(db, job, by="w")
            await heard.until("worker:recovered")
        assert asked == [asyncio.get_running_loop(), "of the caller that started the worker"]
        assert (await existing(db, job))["last_error"] == "it may have been paid already"


class TestHealth:
    async def test_a_service_that_has_ended_is_named_and_started_again(self, database: str) -> None:
        async with running({"task": nothing}, database) as runner:
            health, ended = runner._parts.health, runner._parts._stale_locks
            revive, health._revive = health._revive, lambda: None
            assert ended._task is not None
            ended._task.cancel()
            await holds(lambda: runner.health().state == "incomplete", "the worker is not ready")
            found = runner.health()
            assert (found.ready, found.live) == (False, True)
            assert found.reason == "Services that have ended: stale locks."
            assert found.failing == {"stale locks": "It has ended."}
            health._revive = revive
            await holds(lambda: runner.health().ready, "the worker is ready again")

    async def test_a_service_that_fails_for_long_is_named(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(health_module, "_FAILING", 0.0)
        past = datetime.now(UTC) - 5 * MINUTE
        await db.execute("insert into graphile_worker._private_known_crontabs values ('t', $1, $1)", past)
        options: dict[str, Any] = {
            "middleware": [Stray(OSError, times=10**6)],
            "cron_items": parse_crontab("* * * * * t ?fill=1h"),
        }
        async with running({"task": nothing}, database, **options) as runner:
            await holds(
                lambda: runner.health().failing.get("scheduler", "").endswith(" s: from middleware"),
                "it is named",
            )
            assert runner.health().ready, "jobs run without cron"


class TestTheSidecar:
    async def test_coroutine_submitted_after_the_end_is_refused(self) -> None:
        sidecar = Sidecar()
        sidecar.start()
        await sidecar.stop()

        with pytest.raises(SidecarEndedError):
            await sidecar.run(asyncio.sleep(0))

    async def test_coroutine_that_comes_too_late_to_begin_is_refused(self) -> None:
        sidecar, ends = Sidecar(), threading.Event()
        sidecar.start()

        def end() -> None:
            sidecar.end()
            ends.wait(10)  # in the last turn of its loop

        sidecar.call(end)

        waiting = [sidecar.submit(asyncio.sleep(0)) for _ in range(3)]
        ends.set()
        await sidecar.stop()

        outcomes = await asyncio.gather(*map(asyncio.wrap_future, waiting), return_exceptions=True)
        assert {type(one) for one in outcomes} <= {SidecarEndedError, type(None), asyncio.CancelledError}
