"""Claiming jobs beyond the free slots: how many, and what it never costs."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from hypothesis import given, strategies as st

from graphile_worker import ConfigurationError, Events, JobSpec, Retry, Snooze, WorkerUtils, run, run_once
from graphile_worker._db.queries.exchange import ExchangeReply
from graphile_worker._db.sql_files import Schema, read_script
from graphile_worker._worker.claiming.claim_planner import Capacity, ClaimPlanner
from graphile_worker._worker.claiming.prefetch import MAX_AUTO, AutoPrefetch
from support.jobs import add, count, existing
from support.programs import program
from support.waiting import until
from support.workers import nothing, running
from test_exchange import ExchangeWorker, ids, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker import Runner


def learn(prefetch: AutoPrefetch, *, run_time: float, exchange_time: float, exchanges: int = 30) -> None:
    """Run jobs in slots that are always busy."""
    now = 0.0
    for _ in range(exchanges):
        for _ in range(100):
            prefetch.record_job(run_time)
        now += 100 * run_time / prefetch.concurrency
        prefetch.record_claim(exchange_time, is_limited=True, queued=1, now=now)


@pytest.fixture
async def worker(database: str) -> AsyncIterator[ExchangeWorker]:
    connection = await asyncpg.connect(database)
    yield ExchangeWorker(connection, "worker")
    await connection.close()


class TestAutoPrefetch:
    def test_claims_nothing_ahead_before_a_job_has_ended(self) -> None:
        prefetch = AutoPrefetch(concurrency=24)
        prefetch.record_claim(0.001, is_limited=True, queued=0, now=0.0)
        assert prefetch.size == 0

    def test_claims_nothing_ahead_of_long_jobs(self) -> None:
        prefetch = AutoPrefetch(concurrency=24)
        learn(prefetch, run_time=0.1, exchange_time=0.001)
        assert prefetch.size == 0

    def test_claims_ahead_what_the_slots_finish_during_two_exchanges(self) -> None:
        prefetch = AutoPrefetch(concurrency=24)
        learn(prefetch, run_time=0.005, exchange_time=0.001)
        assert prefetch.size == 9  # 24 slots, 2 ms, 5 ms a job
        assert prefetch.run_length == 1

    def test_size_is_bounded_for_tiny_jobs(self) -> None:
        prefetch = AutoPrefetch(concurrency=24)
        learn(prefetch, run_time=0.000_02, exchange_time=0.005)
        assert prefetch.size == MAX_AUTO

    def test_size_grows_step_by_step(self) -> None:
        prefetch = AutoPrefetch(concurrency=1)
        prefetch.record_job(0.000_02)
        sizes = []
        for _ in range(5):
            prefetch.record_claim(0.01, is_limited=True, queued=0, now=0.0)
            sizes.append(prefetch.size)
        assert sizes == [4, 8, 16, 32, 64]

    def test_size_does_not_grow_while_claims_find_fewer_jobs_than_wanted(self) -> None:
        prefetch = AutoPrefetch(concurrency=1)
        prefetch.record_job(0.000_02)
        for _ in range(20):
            prefetch.record_claim(0.01, is_limited=False, queued=0, now=0.0)
        assert prefetch.size == 0

    def test_size_is_smaller_if_the_event_loop_is_slower_than_the_jobs(self) -> None:
        prefetch = AutoPrefetch(concurrency=2)
        now = 0.0
        for _ in range(30):
            for _ in range(100):
                prefetch.record_job(0.000_02)
            now += 100 * 0.001
            prefetch.record_claim(0.01, is_limited=True, queued=1, now=now)
        assert prefetch.size == pytest.approx(20, abs=1), "20 ms at 1 ms a job"

    def test_size_falls_at_once_after_a_long_job(self) -> None:
        prefetch = AutoPrefetch(concurrency=1)
        learn(prefetch, run_time=0.000_02, exchange_time=0.001)
        assert prefetch.size > 50
        prefetch.record_job(0.5)
        assert prefetch.size == 0

    def test_size_falls_after_jobs_went_back_unstarted(self) -> None:
        prefetch = AutoPrefetch(concurrency=1)
        learn(prefetch, run_time=0.000_02, exchange_time=0.001)
        prefetch.record_expiry()
        assert prefetch.size == 0

    def test_run_of_a_serial_queue_is_what_one_slot_finishes(self) -> None:
        prefetch = AutoPrefetch(concurrency=10)
        learn(prefetch, run_time=0.000_1, exchange_time=0.001)
        assert prefetch.size == pytest.approx(200, abs=1)
        assert prefetch.run_length == pytest.approx(20, abs=1)

    @given(
        st.integers(1, 1000),
        st.lists(
            st.one_of(
                st.tuples(st.just("job"), st.floats(0, 1e4)),
                st.tuples(st.sampled_from(["full", "short"]), st.floats(0, 1e4)),
                st.tuples(st.just("expiry"), st.just(0.0)),
            )
        ),
    )
    def test_size_stays_within_its_bounds(self, concurrency: int, history: list[tuple[str, float]]) -> None:
        prefetch = AutoPrefetch(concurrency)
        now = 0.0
        for queued, (kind, duration) in enumerate(history):
            now += duration
            if kind == "job":
                prefetch.record_job(duration)
            elif kind == "expiry":
                prefetch.record_expiry()
            else:
                prefetch.record_claim(duration, is_limited=kind == "full", queued=queued, now=now)
            assert 0 <= prefetch.size <= MAX_AUTO
            assert 1 <= prefetch.run_length <= MAX_AUTO


class TestOption:
    @pytest.mark.parametrize("value", ["many", -1, 1.5, None, True])
    async def test_invalid_prefetch_is_rejected(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=f"prefetch is {value!r}.*or auto"):
            await run_once(tasks={"task": print}, dsn="postgresql://unused", prefetch=value)


class TestLastAttempts:
    """A job that does not start at once is not claimed for its last attempt: a crash would use it up."""

    async def test_job_in_its_last_attempt_is_claimed_for_a_free_slot(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
    ) -> None:
        job = await add(db, max_attempts=1)
        reply = await worker.exchange(wanted=5, startable=1)
        assert ids(reply.claimed) == [job["id"]]
        assert not reply.withheld

    async def test_job_in_its_last_attempt_is_not_claimed_ahead(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
    ) -> None:
        jobs = [await add(db, max_attempts=attempts) for attempts in (1, 25, 1, 25, 2)]
        reply = await worker.exchange(wanted=5, startable=2)
        assert ids(reply.claimed) == [jobs[place]["id"] for place in (0, 1, 3, 4)]
        assert reply.withheld
        assert not reply.contended
        withheld = await existing(db, jobs[2]["id"])
        assert (withheld["attempts"], withheld["locked_by"]) == (0, None)

    async def test_retried_job_counts_the_attempts_it_has_left(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
    ) -> None:
        first, second = [await add(db, max_attempts=3) for _ in range(2)]
        await db.execute("update graphile_worker._private_jobs set attempts = 2 where id = $1", first["id"])
        await db.execute("update graphile_worker._private_jobs set attempts = 1 where id = $1", second["id"])
        assert ids(await worker.claim(wanted=2, startable=0)) == [second["id"]]

    async def test_jobs_behind_a_withheld_job_of_their_queue_keep_their_order(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
    ) -> None:
        jobs = [
            await add(db, queue_name="q", max_attempts=attempts, payload={"place": place})
            for place, attempts in enumerate((25, 25, 1, 25))
        ]
        reply = await worker.exchange(wanted=10, startable=1, run_length=10)
        assert ids(reply.claimed) == [jobs[0]["id"], jobs[1]["id"]]
        assert reply.withheld

    async def test_queue_whose_first_job_is_withheld_stays_unlocked(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
    ) -> None:
        await add(db)
        await add(db, queue_name="q", max_attempts=1)
        await add(db, queue_name="q")
        reply = await worker.exchange(wanted=10, startable=1, run_length=10)
        assert len(reply.claimed) == 1
        [queue] = await db.fetch("select * from graphile_worker._private_job_queues")
        assert queue["locked_by"] is None

    async def test_held_queue_continues_without_its_jobs_in_their_last_attempt(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
    ) -> None:
        _, second, _ = [await add(db, queue_name="q", max_attempts=attempts) for attempts in (25, 1, 1)]
        [held] = await worker.claim()
        reply = await worker.exchange(
            [result_of(held)], wanted=5, startable=1, run_length=5, queues_first=True
        )
        assert ids(reply.claimed) == [second["id"]]

    def test_planner_claims_nothing_ahead_for_a_while_after_jobs_were_withheld(self) -> None:
        now = 1000.0
        prefetch = AutoPrefetch(concurrency=1)
        learn(prefetch, run_time=0.000_02, exchange_time=0.001)
        planner = ClaimPlanner(poll_interval=2.0, prefetch=prefetch, clock=lambda: now)
        busy = Capacity(free_slots=0)
        request = planner.plan(busy, has_results=True)
        assert request.wanted > 0
        assert request.startable == 0
        planner.record(now, request, ExchangeReply(datetime.now(UTC), withheld=True))
        assert planner.room(busy) == 0
        assert planner.is_due, "a slot that becomes free gets the withheld job"
        now += 0.2
        assert planner.room(busy) > 0


async def job_in_its_last_attempt_waits_for_a_slot(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    for attempts in (25, 1):
        await add(db, max_attempts=attempts)
    return len(await worker.claim(wanted=2, startable=1)) == 1


async def queued_job_in_its_last_attempt_waits_for_a_slot(
    db: asyncpg.Connection, worker: ExchangeWorker
) -> bool:
    for attempts in (25, 1):
        await add(db, queue_name="q", max_attempts=attempts)
    return len(await worker.claim(wanted=5, startable=4, run_length=5)) == 1


async def continued_queue_leaves_last_attempts(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    for attempts in (25, 25, 1):
        await add(db, queue_name="q", max_attempts=attempts)
    [held] = await worker.claim()
    options = {"wanted": 5, "startable": 4, "run_length": 5, "queues_first": True}
    return len((await worker.exchange([result_of(held)], **options)).claimed) == 1


async def dead_worker_does_not_continue_a_queue(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    for _ in range(2):
        await add(db, queue_name="q")
    [held] = await worker.claim()
    await db.execute("insert into graphile_worker._private_python_dead_workers values ('worker')")
    return not (await worker.exchange([result_of(held)], queues_first=True)).claimed


async def continued_queue_keeps_its_lock(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    for _ in range(2):
        await add(db, queue_name="q")
    [held] = await worker.claim()
    assert held.queue is not None
    [following] = (await worker.exchange([result_of(held)])).claimed
    locked_at = await db.fetchval("select locked_at from graphile_worker._private_job_queues")
    return bool(following.queue is held.queue and locked_at == held.queue.locked_at)


async def continued_queue_waits_until_its_job_is_due(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db, queue_name="q")
    await add(db, queue_name="q", run_at=datetime(2100, 1, 1, tzinfo=UTC))
    [held] = await worker.claim()
    return not (await worker.exchange([result_of(held)], queues_first=True)).claimed


GUARDS: dict[Any, tuple[str, str]] = {
    job_in_its_last_attempt_waits_for_a_slot: ("wanted - missing + ranked.place > startable", "false"),
    queued_job_in_its_last_attempt_waits_for_a_slot: (
        "or (ranked.job_queue_id is not null and ranked.place_in_queue > 1)",
        "",
    ),
    continued_queue_leaves_last_attempts: (
        "and (next.place = 1 or not next.has_last_chance and job.attempts + 1 < job.max_attempts)",
        "",
    ),
    dead_worker_does_not_continue_a_queue: (
        """      ) as job
      where not exists (
        select from {schema}._private_python_dead_workers as dead where dead.worker_id = worker
      );""",
        "      ) as job;",
    ),
    continued_queue_keeps_its_lock: ("as queue (id) where queue.id <> all (released))", "as queue (id))"),
    continued_queue_waits_until_its_job_is_due: (
        "and job.task_id = any (task_ids) and job.run_at <= as_of\n          and (next.place",
        "and job.task_id = any (task_ids)\n          and (next.place",
    ),
}


class TestGuards:
    """Each new guard in the exchange keeps a promise that fails without it."""

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_guard_keeps_its_promise(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
        promise: Any,
    ) -> None:
        assert await promise(db, worker)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_fails_without_its_guard(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
        promise: Any,
    ) -> None:
        text = read_script("own/012_exchange.sql")
        before, after = GUARDS[promise]
        assert text.count(before) == 1, "update GUARDS: the guard has changed"
        await db.execute(Schema().render(text.replace(before, after)))
        assert not await promise(db, worker)


class TestInAWorker:
    async def test_tiny_jobs_are_claimed_ahead_by_default(self, database: str) -> None:
        claims: list[int] = []
        async with WorkerUtils(database) as utils:
            await utils.add_jobs(specs(2000))
        events = Events()
        events.on("localQueue:getJobs:complete", lambda event: claims.append(len(event.jobs)))
        await run_once(tasks={"task": nothing}, dsn=database, concurrency=2, events=events)
        assert sum(claims) >= 2000
        assert max(claims) > 2

    async def test_prefetch_0_claims_for_free_slots_only(self, database: str) -> None:
        most = 0
        async with WorkerUtils(database) as utils:
            await utils.add_jobs(specs(200))

            async def check(_payload: object) -> None:
                nonlocal most
                rows = await utils.list_jobs(state="running", limit=100)
                most = max(most, len(rows))

            await run_once(tasks={"task": check}, dsn=database, concurrency=2, prefetch=0)
        assert 1 <= most <= 2

    async def test_jobs_claimed_ahead_go_back_while_all_slots_are_busy(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_jobs(specs(300))
            gate = asyncio.Event()
            ran = 0

            async def work(_payload: object) -> None:
                nonlocal ran
                ran += 1
                if ran > 200:  # now jobs turn out to be long
                    await gate.wait()

            runner = await run(tasks={"task": work}, dsn=database, concurrency=1)
            await until(lambda: is_(ran == 201), "a long job runs")

            async def only_running_is_locked() -> bool:
                locked = "select count(*) from graphile_worker._private_jobs where locked_by is not null"
                return bool(await db.fetchval(locked) == 1)

            await until(only_running_is_locked, "the jobs claimed ahead went back")
            spent = "select count(*) from graphile_worker._private_jobs where attempts > 0"
            assert await db.fetchval(spent) == 1, "their attempts are refunded"
            gate.set()
            await until(lambda: is_(ran == 300), "all jobs have run")
            await runner.stop()
        assert await count(db) == 0

    @pytest.mark.slow
    async def test_crash_does_not_use_up_the_last_attempt_of_jobs_that_did_not_start(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_jobs(specs(3000, max_attempts=1))
            await utils.add_jobs(specs(3000, max_attempts=2))
        script = tmp_path / "victim.py"
        script.write_text(VICTIM)
        async with program(sys.executable, str(script), database, with_errors=True) as running:
            await running.until("stop here")
            running.send(signal.SIGKILL)
            await running.end()
        started = int(running.text.split("started ")[1].split()[0])
        lost = await db.fetchval(
            "select count(*) from graphile_worker._private_jobs where attempts >= max_attempts"
        )
        done = 6000 - await count(db)
        assert done + lost <= started, "each job without attempts left has started"
        assert await db.fetchval(
            "select count(*) from graphile_worker._private_jobs where locked_by is not null"
        ), "the worker was killed while it held jobs"


class TestClaimsWithoutPolling:
    """Jobs that no notification announces start on time, though the poll interval is long."""

    @pytest.mark.parametrize("choice", [Retry(after=0.2), Snooze(0.2)], ids=["retry", "snooze"])
    async def test_job_that_runs_again_starts_on_time(self, database: str, choice: Exception) -> None:
        runs: list[float] = []

        async def work(_payload: object) -> None:
            runs.append(time.monotonic())
            if len(runs) == 1:
                raise choice

        async with listening_worker(database, {"task": work}) as runner:
            await runner.add_job("task")
            await until(lambda: is_(len(runs) == 2), "the job has run again")
        assert 0.2 <= runs[1] - runs[0] < 5

    async def test_next_job_of_a_serial_queue_follows_at_once(self, database: str) -> None:
        ran = 0

        async def work(_payload: object) -> None:
            nonlocal ran
            ran += 1

        async with listening_worker(database, {"task": work}, prefetch=0) as runner:
            await runner.utils.add_jobs(specs(50, queue_name="q"))
            await until(lambda: is_(ran == 50), "all jobs have run")

    async def test_job_added_while_all_slots_are_busy_starts_when_one_is_free(self, database: str) -> None:
        gate, ran = asyncio.Event(), 0

        async def work(_payload: object) -> None:
            nonlocal ran
            ran += 1
            await gate.wait()

        async with listening_worker(database, {"task": work}, concurrency=2) as runner:
            await runner.utils.add_jobs(specs(2))
            await until(lambda: is_(ran == 2), "all slots are busy")
            await runner.utils.add_jobs(specs(3))
            gate.set()
            await until(lambda: is_(ran == 5), "all jobs have run")

    async def test_idle_worker_runs_all_jobs_of_a_notification_though_it_has_fewer_slots(
        self, database: str
    ) -> None:
        ran = 0

        async def work(_payload: object) -> None:
            nonlocal ran
            ran += 1

        async with listening_worker(database, {"task": work}, concurrency=2, prefetch=0) as runner:
            await runner.utils.add_jobs(specs(10))
            await until(lambda: is_(ran == 10), "all jobs have run")

    async def test_jobs_of_two_notifications_are_claimed_together(self, database: str) -> None:
        ran = 0

        async def work(_payload: object) -> None:
            nonlocal ran
            ran += 1

        async with listening_worker(database, {"task": work}) as runner:
            for _ in range(20):
                await asyncio.gather(*(runner.add_job("task") for _ in range(5)))
            await until(lambda: is_(ran == 100), "all jobs have run")


@asynccontextmanager
async def listening_worker(database: str, tasks: Any, **options: Any) -> AsyncIterator[Runner]:
    """Yield a worker that receives notifications, and practically never polls."""
    async with running(tasks, database, **{"poll_interval": 600, **options}) as runner:
        await until(lambda: is_(runner.health().listening), "the worker receives notifications")
        yield runner


VICTIM = """
import asyncio, sys, time
from graphile_worker import run

started = 0

async def task(payload):
    global started
    started += 1
    if started == 1500:
        print("started", started, "and", "stop here", flush=True)
        time.sleep(1000)

async def main():
    runner = await run(tasks={"task": task}, dsn=sys.argv[1], concurrency=2)
    await runner.wait()

asyncio.run(main())
"""


def specs(number: int, **options: Any) -> list[JobSpec]:
    return [JobSpec("task", {"n": n}, **options) for n in range(number)]


async def is_(value: bool) -> bool:
    return value
