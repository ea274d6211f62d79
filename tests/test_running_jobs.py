"""Behaviour of running jobs that the test suites of the Node and Rust workers assert too."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import CleanupTask, JobContext, JobSpec, RunSummary, WorkerUtils, run_once
from support.jobs import add, count, existing, fetch_one, put_in_state
from support.workers import EventRecorder, Gate, locked, nothing, running

if TYPE_CHECKING:
    import asyncpg

once = functools.partial(run_once, handle_signals=False)
LATER = datetime(2100, 1, 1, tzinfo=UTC)


class TestKeys:
    async def test_pending_job_replaced_by_key_runs_once_with_the_new_values(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        ran: list[Any] = []
        first = await add(db, payload={"n": 1}, job_key="k", run_at=LATER)
        assert await once({"task": ran.append}, database) == RunSummary(0, 0)
        second = await add(db, payload={"n": 2}, job_key="k", run_at=datetime.now(UTC))
        assert second["id"] == first["id"]
        assert await once({"task": ran.append}, database) == RunSummary(1, 0)
        assert ran == [{"n": 2}]

    async def test_adding_by_key_resets_omitted_options_and_sets_given_ones(
        self, db: asyncpg.Connection
    ) -> None:
        first = await add(
            db, "task", payload={"n": 1}, queue_name="q", max_attempts=3, run_at=LATER, priority=5,
            flags=["x"], job_key="k",
        )  # fmt: skip
        bare = await add(db, "task", job_key="k")
        assert bare["id"] == first["id"]
        assert (bare["payload"], bare["max_attempts"], bare["job_queue_id"]) == ("{}", 25, None)
        assert (bare["priority"], bare["flags"]) == (0, None)
        assert bare["run_at"] < LATER
        full = await add(
            db, "other", payload={"n": 3}, queue_name="r", max_attempts=7, run_at=LATER, job_key="k"
        )
        assert full["id"] == first["id"]
        assert full["task_id"] != first["task_id"]
        assert (full["max_attempts"], full["run_at"], full["payload"]) == (7, LATER, '{"n": 3}')
        assert full["job_queue_id"] not in {None, first["job_queue_id"]}

    async def test_key_of_a_completed_job_adds_a_new_job(self, db: asyncpg.Connection, database: str) -> None:
        ran: list[Any] = []
        for n in (1, 2):
            await add(db, payload=n, job_key="k")
            assert await once({"task": ran.append}, database) == RunSummary(1, 0)
        assert ran == [1, 2]

    async def test_key_of_a_running_job_adds_a_second_job(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        ran: list[Any] = []

        async def task(payload: int) -> None:
            ran.append(payload)
            if payload == 1:
                await add(db, payload=2, job_key="k")
                assert await count(db) == 2

        await add(db, payload=1, job_key="k")
        assert await once({"task": task}, database) == RunSummary(2, 0)
        assert ran == [1, 2]

    async def test_adding_by_key_resets_attempts_of_a_job_waiting_for_its_retry(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async def task(payload: str) -> None:
            if payload == "bad":
                raise ValueError("bad")

        first = await add(db, payload="bad", job_key="k")
        assert await once({"task": task}, database) == RunSummary(0, 1)
        again = await add(db, payload="good", job_key="k")
        assert (again["id"], again["attempts"], again["last_error"]) == (first["id"], 0, None)
        assert await once({"task": task}, database) == RunSummary(1, 0)

    async def test_removing_a_running_job_by_key_lets_it_complete(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        ran: list[Any] = []

        async def task(payload: Any) -> None:
            ran.append(payload)
            await db.execute("select graphile_worker.remove_job('k')")
            assert await count(db) == 1

        await add(db, payload=1, job_key="k")
        assert await once({"task": task}, database) == RunSummary(1, 0)
        assert ran == [1]
        assert await count(db) == 0


class TestLocks:
    async def test_running_job_and_its_queue_are_locked_by_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        seen: list[tuple[Any, ...]] = []

        async def task(_payload: Any, ctx: JobContext) -> None:
            row = await fetch_one(
                db,
                """select job.attempts, job.locked_by, queue.locked_by, queue.locked_at = job.locked_at,
                now() - queue.locked_at < interval '1 minute'
                from graphile_worker._private_jobs as job
                join graphile_worker._private_job_queues as queue on queue.id = job_queue_id""",
            )
            seen.append((*row, ctx.worker_id))

        await add(db, queue_name="q")
        await once({"task": task}, database)
        [(attempts, job_locker, queue_locker, together, recent, worker_id)] = seen
        assert (attempts, together, recent) == (1, True, True)
        assert job_locker == queue_locker == worker_id
        assert await locked(db) == []

    async def test_five_workers_run_five_queues_concurrently(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        gate = Gate()
        for n in range(5):
            await add(db, payload=n, queue_name=f"q{n}")
        workers = [asyncio.create_task(once({"task": gate}, database)) for _ in range(5)]
        await gate.until_started(5)
        lockers = await db.fetch("select distinct locked_by from graphile_worker._private_job_queues")
        gate.open()
        summaries = await asyncio.gather(*workers)
        assert len(lockers) == 5
        assert sum(found.succeeded for found in summaries) == 5

    async def test_queue_is_never_run_by_two_workers_concurrently(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        running_now = maximum = 0

        async def task(_payload: Any) -> None:
            nonlocal running_now, maximum
            running_now += 1
            maximum = max(maximum, running_now)
            await asyncio.sleep(0.005)
            running_now -= 1

        for n in range(5):
            await add(db, payload=n, queue_name="q")
        await asyncio.gather(*(once({"task": task}, database) for _ in range(3)))
        await once({"task": task}, database)
        assert maximum == 1
        assert await count(db) == 0

    async def test_one_worker_runs_five_queues_concurrently(self, database: str) -> None:
        recorder, gate = EventRecorder(), Gate()
        async with running({"task": gate}, database, recorder=recorder, concurrency=10) as runner:
            await runner.utils.add_jobs(JobSpec("task", n, queue_name=f"q{n}") for n in range(5))
            await gate.until_started(5)
            gate.open()
            await recorder.until("job:complete", 5)


class TestAttempts:
    async def test_failing_job_runs_max_attempts_times_and_stays(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        ran = 0

        def task(_payload: Any) -> None:
            nonlocal ran
            ran += 1
            raise ValueError("never works")

        job = await add(db, max_attempts=3)
        for _ in range(5):
            await once({"task": task}, database)
            await db.execute("update graphile_worker._private_jobs set run_at = now()")
        row = await existing(db, job["id"])
        assert (ran, row["attempts"], row["last_error"], row["is_available"]) == (3, 3, "never works", False)

    async def test_several_failures_are_recorded_in_one_run(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async def task(payload: int) -> None:
            raise ValueError(f"error {payload}")

        for n in range(20):
            await add(db, payload=n, queue_name=[None, "q"][n % 2], max_attempts=1 + n % 3)
        assert await once({"task": task}, database, concurrency=8) == RunSummary(0, 20)
        rows = await db.fetch("select * from graphile_worker._private_jobs order by id")
        assert [row["last_error"] for row in rows] == [f"error {n}" for n in range(20)]
        assert {row["attempts"] for row in rows} == {1}
        assert await locked(db) == []


class TestBatchPayloads:
    async def test_list_payload_reaches_the_task_whole(self, db: asyncpg.Connection, database: str) -> None:
        ran: list[Any] = []
        await add(db, payload=[1, {"a": 2}])
        assert await once({"task": ran.append}, database) == RunSummary(1, 0)
        assert ran == [[1, {"a": 2}]]

    async def test_failed_list_payload_is_kept_whole(self, db: asyncpg.Connection, database: str) -> None:
        def task(_payload: Any) -> None:
            raise ValueError

        await add(db, payload=[1, 2])
        assert await once({"task": task}, database) == RunSummary(0, 1)
        row = await fetch_one(db, "select payload, attempts from graphile_worker._private_jobs")
        assert tuple(row) == ("[1, 2]", 1)


class TestInsideAJob:
    async def test_task_can_administer_jobs_through_its_context(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        jobs = [await add(db, "other", job_key=f"k{n}") for n in range(4)]
        stuck = await add(db, "other", queue_name="q")
        await put_in_state(db, "locked", stuck["id"])

        async def task(_payload: Any, ctx: JobContext) -> None:
            utils = ctx.utils
            await utils.migrate()
            assert await utils.remove_job("k0")
            assert await utils.complete_jobs([jobs[1]["id"]])
            assert await utils.permanently_fail_jobs([jobs[2]["id"]], "no")
            assert await utils.reschedule_jobs([jobs[3]["id"]], run_at=LATER)
            await utils.force_unlock_workers(["w"])
            await ctx.add_jobs([JobSpec("other", run_at=LATER)])

        await add(db)
        assert await once({"task": task}, database) == RunSummary(1, 0)
        assert await count(db) == 4
        assert await locked(db) == []

    async def test_cleanup_in_a_task_keeps_the_tasks_of_the_worker(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()

        async def clean(_payload: Any, ctx: JobContext) -> None:
            await ctx.utils.cleanup(CleanupTask, keep_task_identifiers=["clean", "task"])

        async with running({"clean": clean, "task": nothing}, database, recorder=recorder) as runner:
            before = await db.fetchval(
                "select id from graphile_worker._private_tasks where identifier = 'task'"
            )
            await runner.add_job("clean")
            await recorder.until("job:complete")
            await runner.add_job("task")
            await recorder.until("job:complete", 2)
            after = await db.fetchval(
                "select id from graphile_worker._private_tasks where identifier = 'task'"
            )
        assert before == after
        assert recorder.counts["job:success"] == 2

    async def test_jobs_of_many_tasks_added_together_all_run(self, database: str) -> None:
        async with WorkerUtils(database) as utils:
            jobs = await utils.add_jobs(JobSpec(f"t{n % 4}", n) for n in range(40))
        assert [job.task_identifier for job in jobs[:4]] == ["t0", "t1", "t2", "t3"]
        ran: list[int] = []
        tasks = {f"t{n}": ran.append for n in range(4)}
        assert await once(tasks, database, concurrency=5, prefetch=7) == RunSummary(40, 0)
        assert sorted(ran) == list(range(40))


class TestStart:
    async def test_only_two_coroutines_are_around_an_async_task(self, database: str) -> None:
        """Each further one would cost time in every job."""
        around = 0

        async def task(_payload: object) -> None:
            nonlocal around
            frame = sys._getframe(1)
            while frame.f_code.co_flags & inspect.CO_COROUTINE and frame.f_back is not None:
                around, frame = around + 1, frame.f_back

        async with WorkerUtils(database) as utils:
            await utils.add_job("task")
        assert await once({"task": task}, database) == RunSummary(1, 0)
        assert around == 2

    @pytest.mark.parametrize("is_eager", [False, True])
    async def test_job_interrupted_in_its_first_step_is_cancelled(
        self, database: str, *, is_eager: bool
    ) -> None:
        if is_eager:
            factory = getattr(asyncio, "eager_task_factory", None)
            if factory is None:
                pytest.skip("new in Python 3.12")
            asyncio.get_running_loop().set_task_factory(factory)
        recorder, runs = EventRecorder(), 0

        async def task(_payload: object) -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                runner._worker._slots.interrupt()
                await asyncio.Event().wait()

        async with running({"task": task}, database, recorder=recorder) as runner:
            await runner.add_job("task")
            await recorder.until("job:complete")
        assert runs == 2
        assert recorder.counts["job:interrupted"] == 1
