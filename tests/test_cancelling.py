"""Cancelling jobs before they start and while they run."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    App,
    Cancel,
    InvalidJobError,
    JobContext,
    JobState,
    RunSummary,
    SchemaMissingError,
    WorkerUtils,
    run,
    run_once,
    task,
)
from graphile_worker._db.queries import workers as database_workers
from graphile_worker._db.queries.cancellations import CHANNEL
from graphile_worker._db.sql_files import Schema
from graphile_worker._tasks.executable import Executable
from graphile_worker._worker.maintenance import cancellations
from graphile_worker.outcome import describe_error
from support.jobs import STATES, add, count, existing, get, lock, put_in_state
from support.waiting import until
from support.workers import DEADLINE, EventRecorder, Gate, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)
REQUESTS = "select count(*) from graphile_worker._private_python_cancellations"
CANCELLED = "Cancelled: called off"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


async def is_cancelled(db: asyncpg.Connection, job_id: int, error: str = CANCELLED) -> bool:
    """Return whether a job is released, has that error, and has no attempts left."""
    job = await existing(db, job_id)
    return (job["attempts"], job["locked_at"], job["last_error"]) == (job["max_attempts"], None, error)


async def until_no_requests_are_left(db: asyncpg.Connection) -> None:
    async def none_left() -> bool:
        return bool(await db.fetchval(REQUESTS) == 0)

    await until(none_left, "no cancellation requests are left")


async def unlock(db: asyncpg.Connection, job_id: int) -> None:
    """Release a job as a Node worker does after a failed run."""
    await db.execute(
        """update graphile_worker._private_jobs set locked_at = null, locked_by = null, last_error = 'oops'
        where id = $1""",
        job_id,
    )


class TestWaitingJobs:
    async def test_cancelled_job_has_failed_permanently_with_the_reason(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        assert await utils.cancel_job(job.id, reason="called off") == "cancelled"
        found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.state, found.last_error) == (JobState.FAILED, CANCELLED)
        assert await once({"task": nothing}, database) == RunSummary(0, 0)
        assert await db.fetchval(REQUESTS) == 0

    @pytest.mark.parametrize("reason", [None, "called off", "with: colons"])
    async def test_last_error_is_that_of_a_task_that_raises_cancel(
        self, db: asyncpg.Connection, utils: WorkerUtils, reason: str | None
    ) -> None:
        job = await add(db)
        await utils.cancel_job(job["id"], reason)
        assert (await existing(db, job["id"]))["last_error"] == describe_error(Cancel(reason or ""))

    @pytest.mark.parametrize("state", STATES)
    async def test_cancel_job_returns_the_effect_in_each_state(
        self, db: asyncpg.Connection, utils: WorkerUtils, state: str
    ) -> None:
        job = await add(db)
        await put_in_state(db, state, job["id"])
        before = await existing(db, job["id"])
        answers = {"failed": None, "locked": "requested"}
        assert await utils.cancel_job(job["id"], "called off") == answers.get(state, "cancelled")
        after = await existing(db, job["id"])
        assert (before == after) == (state in answers)
        assert await db.fetchval(REQUESTS) == (state == "locked")
        assert after["attempts"] == (1 if state == "locked" else 25)

    async def test_cancelling_an_unknown_job_returns_none(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        assert await utils.cancel_job(7) is None
        assert await db.fetchval(REQUESTS) == 0

    async def test_cancelling_a_cancelled_job_returns_none(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        job = await add(db)
        assert await utils.cancel_job(job["id"], "called off") == "cancelled"
        assert await utils.cancel_job(job["id"], "again") is None
        assert await is_cancelled(db, job["id"])

    async def test_cancellation_on_the_callers_connection_needs_its_commit(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        job = await add(db)
        transaction = db.transaction()
        await transaction.start()
        assert await utils.cancel_job(job["id"], connection=db) == "cancelled"
        await transaction.rollback()
        assert (await existing(db, job["id"]))["attempts"] == 0
        async with db.transaction():
            assert await utils.cancel_job(job["id"], "called off", connection=db) == "cancelled"
        assert await is_cancelled(db, job["id"])

    async def test_job_may_be_added_and_cancelled_in_one_transaction(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        async with db.transaction():
            job = await utils.add_job("task", connection=db)
            assert await utils.cancel_job(job.id, "called off", connection=db) == "cancelled"
        assert await is_cancelled(db, job.id)

    async def test_key_of_a_cancelled_job_can_be_used_again(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task", job_key="k")
        assert await utils.cancel_job(job.id, "called off") == "cancelled"
        assert (await utils.add_job("task", job_key="k")).id != job.id
        assert await once({"task": nothing}, database) == RunSummary(1, 0)
        assert await is_cancelled(db, job.id)

    async def test_next_job_of_the_queue_runs_after_a_cancelled_one(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        first, _ = [await utils.add_job("task", queue_name="q") for _ in range(2)]
        assert await utils.cancel_job(first.id) == "cancelled"
        assert await once({"task": nothing}, database) == RunSummary(1, 0)
        assert await count(db) == 1

    async def test_cancellation_affects_only_its_schema(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        async with WorkerUtils(database, schema="other") as other:
            await other.migrate()
            job, twin = await utils.add_job("task"), await other.add_job("task")
            assert job.id == twin.id
            assert await other.cancel_job(twin.id) == "cancelled"
        assert (await existing(db, job.id))["attempts"] == 0

    async def test_cancel_job_sync_needs_no_event_loop(self, database: str) -> None:
        app = App(database)

        def cancel() -> list[str | None]:
            job = app.add_job_sync("task")
            answers: list[str | None] = [
                app.cancel_job_sync(job.id, "called off"),
                app.cancel_job_sync(job.id),
            ]
            app.close_sync()
            return answers

        assert await asyncio.to_thread(cancel) == ["cancelled", None]

    @pytest.mark.parametrize("arguments", [("1",), (None,), (-1,), (1, None, "x"), (1, 5), (1, "a\0b")])
    async def test_invalid_arguments_of_cancel_job_are_rejected(
        self, utils: WorkerUtils, arguments: tuple[Any, ...]
    ) -> None:
        with pytest.raises((InvalidJobError, TypeError)):
            await utils.cancel_job(*arguments)

    async def test_cancel_job_works_without_prepared_statements(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db)
        async with WorkerUtils(database, prepared_statements=False) as utils:
            assert await utils.cancel_job(job["id"], "called off") == "cancelled"
        assert await is_cancelled(db, job["id"])


class TestRunningJobs:
    async def test_cancelled_running_job_is_interrupted_and_not_retried(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, poll_interval=3600):
            job = await utils.add_job("task", 1)
            await gate.until_started()
            assert await utils.cancel_job(job.id, "called off") == "requested"
            complete = await recorder.until("job:complete")
            assert isinstance(complete.error, Cancel)
            assert recorder.named("job:cancelled")[0].reason == "called off"
            assert await is_cancelled(db, job.id)
            assert gate.cancelled == [1]
            assert recorder.counts["job:interrupted"] == recorder.counts["job:error"] == 0

    async def test_worker_without_listen_sees_the_request_at_its_next_poll(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, poll_interval=0.05, listen=False):
            job = await utils.add_job("task")
            await gate.until_started()
            assert await utils.cancel_job(job.id, "called off") == "requested"
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)
            await until_no_requests_are_left(db)

    async def test_busy_worker_sees_the_request_before_it_polls(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()

        async def again(_payload: object, ctx: JobContext) -> None:
            await ctx.add_job("again")

        job = await utils.add_job("task")
        await utils.add_job("again")
        tasks: dict[str, Any] = {"task": gate, "again": again}
        async with running(
            tasks, database, recorder=recorder, concurrency=2, poll_interval=3600, listen=False
        ):
            await gate.until_started()
            assert await utils.cancel_job(job.id, "called off") == "requested"
            await recorder.until("job:cancelled")

            async def recorded() -> bool:
                return await is_cancelled(db, job.id)

            await until(recorded, "it is cancelled")

    async def test_request_during_a_lost_listener_is_seen_after_reconnecting(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, poll_interval=3600):
            job = await utils.add_job("task")
            await gate.until_started()
            [listener] = recorder.named("pool:listen:success")
            async with db.transaction():
                await db.execute("select pg_terminate_backend($1)", listener.client.get_server_pid())
                await recorder.until("pool:listen:error")
                assert await utils.cancel_job(job.id, "called off", connection=db) == "requested"
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)

    async def test_worker_is_notified_when_the_callers_transaction_commits(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        notified = asyncio.Event()
        listener = await asyncpg.connect(database)
        await listener.add_listener(CHANNEL, lambda *_: notified.set())
        async with running({"task": gate}, database, recorder=recorder, poll_interval=3600):
            job = await utils.add_job("task")
            await gate.until_started()
            async with db.transaction():
                assert await utils.cancel_job(job.id, "called off", connection=db) == "requested"
                await listener.execute("select 1")
                assert not notified.is_set()
            await recorder.until("job:complete")
            async with asyncio.timeout(DEADLINE):  # the worker may be notified before this listener
                await notified.wait()
        assert await is_cancelled(db, job.id)
        await listener.close()

    async def test_cancelling_in_a_long_transaction_does_not_delay_the_result(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder):
            job = await utils.add_job("task")
            await gate.until_started()
            async with db.transaction():
                assert await utils.cancel_job(job.id, connection=db) == "requested"
                gate.open()
                await recorder.until("job:complete")
                assert await utils.get_job(id=job.id) is None
            await until_no_requests_are_left(db)

    async def test_task_that_succeeds_despite_cancellation_is_completed(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, started = EventRecorder(), asyncio.Event()

        async def stubborn(_payload: object) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)  # it is interrupted only once

        async with running({"task": stubborn}, database, recorder=recorder, poll_interval=0.01):
            job = await utils.add_job("task")
            await started.wait()
            assert await utils.cancel_job(job.id) == "requested"
            await recorder.until("job:complete")
            assert recorder.counts["job:success"] == 1
            assert recorder.counts["job:cancelled"] == 0
            assert await get(db, job.id) is None
            await until_no_requests_are_left(db)

    async def test_error_during_the_interruption_becomes_the_cause(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, started = EventRecorder(), asyncio.Event()

        async def fails_to_clean_up(_payload: object) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("cannot remove the file")

        async with running({"task": fails_to_clean_up}, database, recorder=recorder):
            job = await utils.add_job("task")
            await started.wait()
            await utils.cancel_job(job.id, "called off")
            complete = await recorder.until("job:complete")
            assert isinstance(complete.error.__cause__, ValueError)
            assert await is_cancelled(db, job.id)

    async def test_first_cancellation_reason_is_recorded(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, poll_interval=0.02):
            job = await utils.add_job("task")
            await gate.until_started()
            async with db.transaction():
                for reason in ("called off", "for another reason"):
                    assert await utils.cancel_job(job.id, reason, connection=db) == "requested"
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)
            await until_no_requests_are_left(db)

    async def test_concurrent_cancellations_have_the_effect_of_one(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, concurrency=2, poll_interval=0.02):
            job, idle = await utils.add_job("task"), await utils.add_job("other")
            await gate.until_started()
            answers = await asyncio.gather(
                *(utils.cancel_job(one, "called off") for one in (job.id, idle.id) * 10)
            )
            assert answers.count("cancelled") == 1
            assert "requested" in answers
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)
            assert await is_cancelled(db, idle.id)
            await until_no_requests_are_left(db)

    async def test_next_job_of_the_queue_runs_after_the_running_one_is_cancelled(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, poll_interval=3600):
            first = await utils.add_job("task", 1, queue_name="q")
            await utils.add_job("task", 2, queue_name="q")
            await gate.until_started()
            await utils.cancel_job(first.id, "called off")
            await gate.until_started(2)
            assert gate.started == [1, 2]
            gate.open()
            await recorder.until("job:success")
            assert await is_cancelled(db, first.id)
            await recorder.until("job:complete", 2)
            assert await locked(db) == []

    async def test_cancellation_does_not_affect_a_worker_of_another_schema(
        self, database: str, utils: WorkerUtils
    ) -> None:
        gate, other_gate, recorder = Gate(), Gate(), EventRecorder()
        async with (
            running({"task": gate}, database, recorder=recorder),
            running({"task": other_gate}, database, schema="other", poll_interval=0.01),
            WorkerUtils(database, schema="other") as other,
        ):
            job, twin = await utils.add_job("task"), await other.add_job("task")
            assert job.id == twin.id
            await gate.until_started()
            await other_gate.until_started()
            await utils.cancel_job(job.id)
            await recorder.until("job:complete")
            assert other_gate.cancelled == []

    async def test_cancelled_batch_keeps_its_unfinished_items(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, started = EventRecorder(), threading.Event()

        @task(batch=True)
        def work(items: list[int], ctx: JobContext) -> list[Exception | None]:
            started.set()
            assert ctx.stop_requested.wait(DEADLINE)
            return [None if item < 3 else ValueError("not started") for item in items]

        async with running({"task": work}, database, recorder=recorder):
            job = await utils.add_job("task", [1, 2, 3, 4])
            await asyncio.to_thread(started.wait)
            await utils.cancel_job(job.id, "called off")
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)
            assert (await existing(db, job.id))["payload"] == "[3, 4]"

    async def test_cancelled_executable_is_terminated(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, tmp_path: Path
    ) -> None:
        program, recorder = tmp_path / "program", EventRecorder()
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nsleep 600\n")
        program.chmod(0o755)
        async with running({"task": Executable(program)}, database, recorder=recorder):
            job = await utils.add_job("task")
            await until(lambda: asyncio.to_thread((tmp_path / "started").exists), "the program starts")
            await utils.cancel_job(job.id, "called off")
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)

    async def test_cancelled_prefetched_job_never_starts(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        jobs = [await utils.add_job("task", number) for number in range(3)]
        async with running({"task": gate}, database, recorder=recorder, concurrency=1, prefetch=10):
            await gate.until_started()
            assert len(await locked(db)) == 3
            assert await utils.cancel_job(jobs[1].id, "called off") == "requested"
            await recorder.until("job:complete")
            assert await is_cancelled(db, jobs[1].id)
            assert recorder.counts["job:cancelled"] == recorder.counts["job:start"] == 1
            gate.open()
            await recorder.until("job:complete", 3)
        assert gate.ended == [0, 2]
        assert await count(db) == 1

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("first_queue", ["q", None])
    @pytest.mark.parametrize("cancelled", [{1}, {2}, {3}, {1, 2}, {1, 2, 3}])
    async def test_cancelled_prefetched_jobs_of_a_queue_never_start(
        self,
        db: asyncpg.Connection,
        database: str,
        utils: WorkerUtils,
        first_queue: str | None,
        cancelled: set[int],
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        jobs = [await utils.add_job("task", 0, queue_name=first_queue)]
        jobs += [await utils.add_job("task", number, queue_name="q") for number in (1, 2, 3)]
        async with running({"task": gate}, database, recorder=recorder, concurrency=1, prefetch=10):
            await gate.until_started()
            assert len(await locked(db)) == 5
            async with db.transaction():
                for number in cancelled:
                    await utils.cancel_job(jobs[number].id, "called off", connection=db)
            await recorder.until("job:complete", len(cancelled))
            gate.open()
            await recorder.until("job:complete", 4)
        assert gate.ended == [number for number in range(4) if number not in cancelled]
        for number in cancelled:
            assert await is_cancelled(db, jobs[number].id)
        assert await locked(db) == []


class TestJobsOnThreads:
    async def test_only_the_cancelled_job_gets_a_stop_request(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, started = EventRecorder(), threading.Semaphore(0)
        others: list[bool] = []
        others_may_end = threading.Event()

        def work(payload: int, ctx: JobContext) -> None:
            stop_requested = ctx.stop_requested
            started.release()
            if payload == 1:
                assert stop_requested.wait(DEADLINE)
                assert stop_requested is ctx.stop_requested
                assert stop_requested.cancelled
                raise ValueError("stopped")
            assert others_may_end.wait(DEADLINE)
            others.append(bool(ctx.stop_requested))

        async with running({"task": work}, database, recorder=recorder, concurrency=3):
            jobs = [await utils.add_job("task", number) for number in (1, 2, 3)]
            for _ in jobs:
                await asyncio.to_thread(started.acquire)
            await utils.cancel_job(jobs[0].id, "called off")
            await recorder.until("job:complete")
            others_may_end.set()
            await recorder.until("job:complete", 3)
        assert others == [False, False]
        assert await is_cancelled(db, jobs[0].id)
        assert await count(db) == 1

    @pytest.mark.parametrize("timeout", [None, 600])
    async def test_cancelled_thread_may_finish_and_complete_its_job(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, timeout: float | None
    ) -> None:
        gate, recorder, started, go_on = Gate(), EventRecorder(), threading.Event(), threading.Event()
        stop_requested = []

        @task(timeout=timeout)
        def work(ctx: JobContext) -> None:
            started.set()
            go_on.wait(DEADLINE)
            stop_requested.append(bool(ctx.stop_requested))  # even if it is read for the first time

        async with running({"task": work, "gate": gate}, database, recorder=recorder, concurrency=2):
            job, other = await utils.add_job("task"), await utils.add_job("gate")
            await asyncio.to_thread(started.wait)
            await gate.until_started()
            async with db.transaction():
                await utils.cancel_job(job.id, connection=db)
                await utils.cancel_job(other.id, connection=db)
            await recorder.until("job:complete")
            assert gate.cancelled
            assert (await existing(db, job.id))["locked_at"] is not None
            go_on.set()
            await recorder.until("job:complete", 2)
            assert stop_requested == [True]
            assert recorder.counts["job:success"] == 1
            assert await get(db, job.id) is None

    @pytest.mark.parametrize("timeout", [None, 600])
    async def test_coroutine_returned_after_cancellation_never_starts(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, timeout: float | None
    ) -> None:
        recorder, thread_started, started = EventRecorder(), threading.Event(), asyncio.Event()

        async def rest() -> None:
            started.set()

        @task(timeout=timeout)
        def work(ctx: JobContext) -> Any:
            stop_requested = ctx.stop_requested
            thread_started.set()
            assert stop_requested.wait(DEADLINE)
            return rest()

        async with running({"task": work}, database, recorder=recorder):
            job = await utils.add_job("task")
            await asyncio.to_thread(thread_started.wait)
            await utils.cancel_job(job.id, "called off")
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)
            assert not started.is_set()

    async def test_thread_with_a_timeout_gets_the_stop_request_before_it_expires(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, started = EventRecorder(), threading.Event()

        @task(timeout=600)
        def work(ctx: JobContext) -> None:
            started.set()
            assert ctx.stop_requested.wait(DEADLINE)
            raise ValueError("stopped")

        async with running({"task": work}, database, recorder=recorder):
            job = await utils.add_job("task")
            await asyncio.to_thread(started.wait)
            await utils.cancel_job(job.id, "called off")
            await recorder.until("job:complete")
            assert await is_cancelled(db, job.id)


class TestJobsHeldElsewhere:
    async def test_cancel_job_does_not_wait_for_a_locked_row(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder = EventRecorder()
        job = await utils.add_job("other")
        async with running({"task": nothing}, database, recorder=recorder, poll_interval=0.02):
            async with db.transaction():
                await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job.id)
                async with asyncio.timeout(DEADLINE):
                    assert await utils.cancel_job(job.id, "called off") == "requested"
            await until_no_requests_are_left(db)
        assert await is_cancelled(db, job.id)

    async def test_cancelled_job_of_a_node_worker_is_not_retried(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        await lock(db, job.id, by="pool-1")
        gate = Gate()
        async with running({"task": gate}, database, poll_interval=0.02):
            assert await utils.cancel_job(job.id, "called off") == "requested"
            async with db.transaction():
                await unlock(db, job.id)
                await db.execute(
                    "update graphile_worker._private_jobs set run_at = now() + interval '1 h' where id = $1",
                    job.id,
                )
            await until_no_requests_are_left(db)
            assert await is_cancelled(db, job.id)
            assert gate.started == []

    @pytest.mark.parametrize("how", ["delete from", "update"])
    async def test_request_for_a_finished_job_is_removed(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, how: str
    ) -> None:
        job = await utils.add_job("task", max_attempts=1)
        await lock(db, job.id, by="pool-1")
        async with running({"task": nothing}, database, poll_interval=0.02):
            assert await utils.cancel_job(job.id) == "requested"
            if how == "update":
                await unlock(db, job.id)
            else:
                await db.execute("delete from graphile_worker._private_jobs")
            await until_no_requests_are_left(db)
        assert how != "update" or await is_cancelled(db, job.id, "oops")

    async def test_job_added_again_or_rescheduled_after_the_request_runs(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        keyed, plain = await utils.add_job("task", job_key="k"), await utils.add_job("task")
        for job in (keyed, plain):
            await lock(db, job.id, by="pool-1")
            assert await utils.cancel_job(job.id) == "requested"
            await unlock(db, job.id)
        assert (await utils.add_job("task", job_key="k")).id == keyed.id
        await utils.reschedule_jobs([plain.id], attempts=0)
        assert await once({"task": nothing}, database) == RunSummary(2, 0)
        assert await db.fetchval(REQUESTS) == 0

    async def test_job_that_takes_over_the_key_of_a_cancelled_job_runs(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, recorder = Gate(), EventRecorder()
        async with running({"task": gate}, database, recorder=recorder, concurrency=2):
            old = await utils.add_job("task", "old", job_key="k")
            await gate.until_started()
            new = await utils.add_job("task", "new", job_key="k")
            assert new.id != old.id
            await gate.until_started(2)
            await utils.cancel_job(old.id, "called off")
            await recorder.until("job:complete")
            assert gate.cancelled == ["old"]
            assert await is_cancelled(db, old.id)
            gate.open()
            await recorder.until("job:complete", 2)

    @pytest.mark.parametrize("ends_well", [True, False])
    async def test_result_reported_before_the_request_is_recorded(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, *, ends_well: bool
    ) -> None:
        recorder, go_on = EventRecorder(), asyncio.Event()

        async def waits(_payload: object) -> None:
            await go_on.wait()
            if not ends_well:
                raise ValueError("no")

        async with running({"task": waits}, database, recorder=recorder, poll_interval=0.02):
            job = await utils.add_job("task")
            await recorder.until("job:start")
            async with db.transaction():
                # The lock prevents the worker from recording the result.
                await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job.id)
                go_on.set()
                await recorder.until("job:success" if ends_well else "job:error")
                assert await utils.cancel_job(job.id, "called off") == "requested"
            await recorder.until("job:complete")
            await until_no_requests_are_left(db)
            assert recorder.counts["job:cancelled"] == 0
            if ends_well:
                assert await get(db, job.id) is None
            else:  # the failure was recorded first, then the cancellation, so there is no retry
                assert await is_cancelled(db, job.id)

    async def test_cancelled_job_claimed_by_another_worker_is_not_changed(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, interrupted, go_on = EventRecorder(), asyncio.Event(), asyncio.Event()

        async def slow_to_stop(_payload: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                interrupted.set()
                await go_on.wait()

        async with running({"task": slow_to_stop}, database, recorder=recorder):
            job = await utils.add_job("task")
            await recorder.until("job:start")
            await utils.cancel_job(job.id)
            await interrupted.wait()
            await lock(db, job.id, by="other")
            before = await existing(db, job.id)
            go_on.set()
            await recorder.until("job:lost")
            assert await existing(db, job.id) == before


class TestSeveralWorkers:
    async def test_request_unseen_by_a_stopped_worker_still_cancels_the_job(
        self,
        db: asyncpg.Connection,
        database: str,
        utils: WorkerUtils,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # The worker must not see the request.
        monkeypatch.setattr(cancellations, "_EXCHANGE_CHECK_INTERVAL", 3600)
        gate = Gate()
        job = await utils.add_job("task")
        async with running({"task": gate}, database, listen=False, poll_interval=3600):
            await gate.until_started()
            assert await utils.cancel_job(job.id, "called off") == "requested"
        assert (await existing(db, job.id))["attempts"] == 0, "it was released"
        assert await once({"task": nothing}, database) == RunSummary(0, 0)
        assert await is_cancelled(db, job.id)
        assert await db.fetchval(REQUESTS) == 0

    async def test_job_interrupted_by_cancellation_stays_cancelled_when_the_worker_stops(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        recorder, started, interrupted = EventRecorder(), asyncio.Event(), asyncio.Event()

        async def slow_to_stop(_payload: object) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                interrupted.set()
                await asyncio.Event().wait()

        async with running({"task": slow_to_stop}, database, recorder=recorder):
            job = await utils.add_job("task")
            await started.wait()
            await utils.cancel_job(job.id, "called off")
            await interrupted.wait()
        assert recorder.counts["job:interrupted"] == 0
        assert await is_cancelled(db, job.id)

    async def test_cancelled_job_of_a_dead_worker_does_not_run_again(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        await lock(db, job.id, by="w")
        epoch = (await database_workers.identify_server(db, Schema())).epoch
        lease = {"seconds": 38, "fast": 1, "tasks": {}, "epoch": epoch}
        await database_workers.register(db, Schema(), "w", {"lease": lease})
        assert await utils.cancel_job(job.id, "called off") == "requested"
        [recovered] = await utils.sweep()
        assert [one.id for one in recovered.jobs] == [job.id]
        assert await is_cancelled(db, job.id)
        assert await db.fetchval(REQUESTS) == 0

    async def test_starting_worker_applies_requests_before_it_claims(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        await lock(db, job.id, by="w")
        await utils.cancel_job(job.id, "called off")
        await utils.force_unlock_workers(["w"])
        assert await once({"task": nothing}, database) == RunSummary(0, 0)
        assert await is_cancelled(db, job.id)

    async def test_job_either_runs_or_is_cancelled_but_never_both(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        """Jobs are cancelled while they are claimed, run and recorded."""
        recorder = EventRecorder()
        ran: list[int] = []

        async def work(payload: int) -> None:
            await asyncio.sleep(0)
            ran.append(payload)

        async with (
            running(
                {"task": work}, database, recorder=recorder, concurrency=3, prefetch=5, poll_interval=0.02
            ),
            running({"task": work}, database, recorder=recorder, concurrency=3, poll_interval=0.02),
        ):
            answers: dict[int, tuple[Any, str | None]] = {}
            for round_ in range(30):
                jobs = [await utils.add_job("task", round_ * 4 + n, queue_name=f"q{n}") for n in range(4)]
                found = await asyncio.gather(*(utils.cancel_job(job.id, "called off") for job in jobs))
                answers |= {job.id: (job.payload, answer) for job, answer in zip(jobs, found, strict=True)}

            async def quiet() -> bool:
                busy = "select count(*) from graphile_worker._private_jobs where attempts < max_attempts"
                return await db.fetchval(busy) == 0 and await locked(db) == []

            await until(quiet, "all jobs have finished")
            await until_no_requests_are_left(db)
        assert len(ran) == len(set(ran)), "no job ran twice"
        for job_id, (payload, answer) in answers.items():
            if answer == "cancelled":
                assert payload not in ran
            if answer is None:
                assert payload in ran
            assert (await get(db, job_id) is None) == (payload in ran)


async def test_worker_reports_a_missing_cancellations_table(db: asyncpg.Connection, database: str) -> None:
    await db.execute("drop table graphile_worker._private_python_cancellations")
    with pytest.raises(SchemaMissingError, match="graphile_worker"):
        await run({"task": nothing}, database, handle_signals=False, migrate=False)


async def test_migrate_adds_the_cancellations_table_to_an_older_schema(
    db: asyncpg.Connection, utils: WorkerUtils
) -> None:
    await db.execute("drop table graphile_worker._private_python_cancellations")
    await db.execute("delete from graphile_worker._private_python_migrations where id > 3")
    await utils.migrate()
    job = await add(db)
    await lock(db, job["id"])
    assert await utils.cancel_job(job["id"]) == "requested"
