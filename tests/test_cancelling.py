"""Jobs that somebody cancels, before they begin and while they run."""

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
    Drained,
    InvalidJobError,
    JobContext,
    JobState,
    SchemaMissingError,
    WorkerUtils,
    run,
    run_once,
    task,
)
from graphile_worker._db import workers as database_workers
from graphile_worker._db.cancellations import CHANNEL
from graphile_worker._db.sql import Schema
from graphile_worker._runtime import cancelling
from graphile_worker.executable import Executable
from graphile_worker.outcome import describe_error
from support.jobs import STATES, add, bring_to, count, existing, get, lock
from support.waiting import until
from support.workers import DEADLINE, Gate, Heard, locked, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker.testing import Databases

once = functools.partial(run_once, handle_signals=False)
REQUESTS = "select count(*) from graphile_worker._private_python_cancellations"
OFF = "Cancelled: called off"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


async def is_cancelled(db: asyncpg.Connection, job_id: int, error: str = OFF) -> bool:
    """Whether it will not run again, for that reason, and is in nobody's hands."""
    job = await existing(db, job_id)
    return (job["attempts"], job["locked_at"], job["last_error"]) == (job["max_attempts"], None, error)


async def until_forgotten(db: asyncpg.Connection) -> None:
    async def forgotten() -> bool:
        return bool(await db.fetchval(REQUESTS) == 0)

    await until(forgotten, "nothing is left to be cancelled")


async def unlock(db: asyncpg.Connection, job_id: int) -> None:
    """As a Node worker that ran it and failed."""
    await db.execute(
        """update graphile_worker._private_jobs set locked_at = null, locked_by = null, last_error = 'oops'
        where id = $1""",
        job_id,
    )


class TestBeforeItBegins:
    async def test_it_has_failed_for_good_with_the_reason(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        assert await utils.cancel_job(job.id, reason="called off") == "cancelled"
        found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.state, found.last_error) == (JobState.FAILED, OFF)
        assert await once({"task": nothing}, database) == Drained(0, 0)
        assert await db.fetchval(REQUESTS) == 0

    @pytest.mark.parametrize("reason", [None, "called off", "with: colons"])
    async def test_last_error_has_the_words_of_a_task_that_raises_cancel(
        self, db: asyncpg.Connection, utils: WorkerUtils, reason: str | None
    ) -> None:
        job = await add(db)
        await utils.cancel_job(job["id"], reason)
        assert (await existing(db, job["id"]))["last_error"] == describe_error(Cancel(reason or ""))

    @pytest.mark.parametrize("state", STATES)
    async def test_the_answer_says_what_it_came_to(
        self, db: asyncpg.Connection, utils: WorkerUtils, state: str
    ) -> None:
        job = await add(db)
        await bring_to(db, state, job["id"])
        before = await existing(db, job["id"])
        answers = {"failed": None, "locked": "requested"}
        assert await utils.cancel_job(job["id"], "called off") == answers.get(state, "cancelled")
        after = await existing(db, job["id"])
        assert (before == after) == (state in answers)
        assert await db.fetchval(REQUESTS) == (state == "locked")
        assert after["attempts"] == (1 if state == "locked" else 25)

    async def test_a_job_that_is_not_there_is_none(self, db: asyncpg.Connection, utils: WorkerUtils) -> None:
        assert await utils.cancel_job(7) is None
        assert await db.fetchval(REQUESTS) == 0

    async def test_a_second_time_there_is_nothing_to_cancel(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        job = await add(db)
        assert await utils.cancel_job(job["id"], "called off") == "cancelled"
        assert await utils.cancel_job(job["id"], "again") is None
        assert await is_cancelled(db, job["id"])

    async def test_on_a_connection_of_the_callers_it_holds_if_that_commits(
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

    async def test_it_may_be_added_and_cancelled_in_one_transaction(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        async with db.transaction():
            job = await utils.add_job("task", connection=db)
            assert await utils.cancel_job(job.id, "called off", connection=db) == "cancelled"
        assert await is_cancelled(db, job.id)

    async def test_its_key_can_be_used_again(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task", job_key="k")
        assert await utils.cancel_job(job.id, "called off") == "cancelled"
        assert (await utils.add_job("task", job_key="k")).id != job.id
        assert await once({"task": nothing}, database) == Drained(1, 0)
        assert await is_cancelled(db, job.id)

    async def test_of_a_queue_the_next_one_goes_on(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        first, _ = [await utils.add_job("task", queue_name="q") for _ in range(2)]
        assert await utils.cancel_job(first.id) == "cancelled"
        assert await once({"task": nothing}, database) == Drained(1, 0)
        assert await count(db) == 1

    async def test_of_another_schema_it_is_another_job(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        async with WorkerUtils(database, schema="other") as other:
            await other.migrate()
            job, twin = await utils.add_job("task"), await other.add_job("task")
            assert job.id == twin.id
            assert await other.cancel_job(twin.id) == "cancelled"
        assert (await existing(db, job.id))["attempts"] == 0

    async def test_code_without_an_event_loop_can_too(self, database: str) -> None:
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
    async def test_what_cannot_be_is_refused(self, utils: WorkerUtils, arguments: tuple[Any, ...]) -> None:
        with pytest.raises((InvalidJobError, TypeError)):
            await utils.cancel_job(*arguments)

    async def test_without_prepared_statements_too(self, db: asyncpg.Connection, database: str) -> None:
        job = await add(db)
        async with WorkerUtils(database, prepared_statements=False) as utils:
            assert await utils.cancel_job(job["id"], "called off") == "cancelled"
        assert await is_cancelled(db, job["id"])


class TestWhileItRuns:
    async def test_it_is_stopped_and_does_not_run_again(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, poll_interval=3600):
            job = await utils.add_job("task", 1)
            await gate.until_begun()
            assert await utils.cancel_job(job.id, "called off") == "requested"
            complete = await heard.until("job:complete")
            assert isinstance(complete.error, Cancel)
            assert heard.named("job:cancelled")[0].reason == "called off"
            assert await is_cancelled(db, job.id)
            assert gate.cancelled == [1]
            assert heard.counts["job:interrupted"] == heard.counts["job:error"] == 0

    async def test_a_worker_that_hears_nothing_sees_it_at_its_next_look(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, poll_interval=0.05, listen=False):
            job = await utils.add_job("task")
            await gate.until_begun()
            assert await utils.cancel_job(job.id, "called off") == "requested"
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)
            await until_forgotten(db)

    async def test_one_that_works_sees_it_long_before_it_polls(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()

        async def again(_payload: object, ctx: JobContext) -> None:
            await ctx.add_job("again")

        job = await utils.add_job("task")
        await utils.add_job("again")
        tasks: dict[str, Any] = {"task": gate, "again": again}
        async with running(tasks, database, heard=heard, concurrency=2, poll_interval=3600, listen=False):
            await gate.until_begun()
            assert await utils.cancel_job(job.id, "called off") == "requested"
            await heard.until("job:cancelled")

            async def recorded() -> bool:
                return await is_cancelled(db, job.id)

            await until(recorded, "it is cancelled")

    async def test_what_was_told_while_it_did_not_listen_is_seen_when_it_does_again(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, poll_interval=3600):
            job = await utils.add_job("task")
            await gate.until_begun()
            [ear] = heard.named("pool:listen:success")
            async with db.transaction():
                await db.execute("select pg_terminate_backend($1)", ear.client.get_server_pid())
                await heard.until("pool:listen:error")
                assert await utils.cancel_job(job.id, "called off", connection=db) == "requested"
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)

    async def test_it_is_told_when_the_callers_transaction_commits(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        told = asyncio.Event()
        ear = await asyncpg.connect(database)
        await ear.add_listener(CHANNEL, lambda *_: told.set())
        async with running({"task": gate}, database, heard=heard, poll_interval=3600):
            job = await utils.add_job("task")
            await gate.until_begun()
            async with db.transaction():
                assert await utils.cancel_job(job.id, "called off", connection=db) == "requested"
                await ear.execute("select 1")
                assert not told.is_set()
            await heard.until("job:complete")
            async with asyncio.timeout(DEADLINE):  # the worker may be told before we are
                await told.wait()
        assert await is_cancelled(db, job.id)
        await ear.close()

    async def test_whoever_cancels_it_in_a_long_transaction_does_not_hold_up_its_result(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard):
            job = await utils.add_job("task")
            await gate.until_begun()
            async with db.transaction():
                assert await utils.cancel_job(job.id, connection=db) == "requested"
                gate.open()
                await heard.until("job:complete")
                assert await utils.get_job(id=job.id) is None
            await until_forgotten(db)

    async def test_if_it_ends_well_all_the_same_it_is_complete(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard, begun = Heard(), asyncio.Event()

        async def stubborn(_payload: object) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)  # it is told once

        async with running({"task": stubborn}, database, heard=heard, poll_interval=0.01):
            job = await utils.add_job("task")
            await begun.wait()
            assert await utils.cancel_job(job.id) == "requested"
            await heard.until("job:complete")
            assert heard.counts["job:success"] == 1
            assert heard.counts["job:cancelled"] == 0
            assert await get(db, job.id) is None
            await until_forgotten(db)

    async def test_an_error_while_it_stops_is_the_cause(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard, begun = Heard(), asyncio.Event()

        async def clumsy(_payload: object) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("and the file is gone")

        async with running({"task": clumsy}, database, heard=heard):
            job = await utils.add_job("task")
            await begun.wait()
            await utils.cancel_job(job.id, "called off")
            complete = await heard.until("job:complete")
            assert isinstance(complete.error.__cause__, ValueError)
            assert await is_cancelled(db, job.id)

    async def test_the_first_reason_counts(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, poll_interval=0.02):
            job = await utils.add_job("task")
            await gate.until_begun()
            async with db.transaction():
                for reason in ("called off", "for another reason"):
                    assert await utils.cancel_job(job.id, reason, connection=db) == "requested"
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)
            await until_forgotten(db)

    async def test_many_at_once_are_as_one(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, concurrency=2, poll_interval=0.02):
            job, idle = await utils.add_job("task"), await utils.add_job("other")
            await gate.until_begun()
            answers = await asyncio.gather(
                *(utils.cancel_job(one, "called off") for one in (job.id, idle.id) * 10)
            )
            assert answers.count("cancelled") == 1
            assert "requested" in answers
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)
            assert await is_cancelled(db, idle.id)
            await until_forgotten(db)

    async def test_of_a_queue_the_next_one_goes_on(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, poll_interval=3600):
            first = await utils.add_job("task", 1, queue_name="q")
            await utils.add_job("task", 2, queue_name="q")
            await gate.until_begun()
            await utils.cancel_job(first.id, "called off")
            await gate.until_begun(2)
            assert gate.begun == [1, 2]
            gate.open()
            await heard.until("job:success")
            assert await is_cancelled(db, first.id)
            await heard.until("job:complete", 2)
            assert await locked(db) == []

    async def test_a_worker_of_another_schema_is_not_concerned(
        self, database: str, utils: WorkerUtils
    ) -> None:
        ours, others, heard = Gate(), Gate(), Heard()
        async with (
            running({"task": ours}, database, heard=heard),
            running({"task": others}, database, schema="other", poll_interval=0.01),
            WorkerUtils(database, schema="other") as other,
        ):
            job, twin = await utils.add_job("task"), await other.add_job("task")
            assert job.id == twin.id
            await ours.until_begun()
            await others.until_begun()
            await utils.cancel_job(job.id)
            await heard.until("job:complete")
            assert others.cancelled == []

    async def test_a_batch_keeps_what_is_left_of_it(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard, begun = Heard(), threading.Event()

        @task(batch=True)
        def work(items: list[int], ctx: JobContext) -> list[Exception | None]:
            begun.set()
            assert ctx.stopping.wait(DEADLINE)
            return [None if item < 3 else ValueError("not begun") for item in items]

        async with running({"task": work}, database, heard=heard):
            job = await utils.add_job("task", [1, 2, 3, 4])
            await asyncio.to_thread(begun.wait)
            await utils.cancel_job(job.id, "called off")
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)
            assert (await existing(db, job.id))["payload"] == "[3, 4]"

    async def test_a_program_is_ended(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, tmp_path: Path
    ) -> None:
        program, heard = tmp_path / "program", Heard()
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nsleep 600\n")
        program.chmod(0o755)
        async with running({"task": Executable(program)}, database, heard=heard):
            job = await utils.add_job("task")
            await until(lambda: asyncio.to_thread((tmp_path / "begun").exists), "the program begins")
            await utils.cancel_job(job.id, "called off")
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)

    async def test_one_that_was_not_begun_is_not(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        jobs = [await utils.add_job("task", number) for number in range(3)]
        async with running({"task": gate}, database, heard=heard, concurrency=1, prefetch=10):
            await gate.until_begun()
            assert len(await locked(db)) == 3
            assert await utils.cancel_job(jobs[1].id, "called off") == "requested"
            await heard.until("job:complete")
            assert await is_cancelled(db, jobs[1].id)
            assert heard.counts["job:cancelled"] == heard.counts["job:start"] == 1
            gate.open()
            await heard.until("job:complete", 3)
        assert gate.ended == [0, 2]
        assert await count(db) == 1

    @pytest.mark.parametrize("first_queue", ["q", None])
    @pytest.mark.parametrize("cancelled", [{1}, {2}, {3}, {1, 2}, {1, 2, 3}])
    async def test_one_of_a_queue_that_was_not_begun_is_not(
        self,
        db: asyncpg.Connection,
        database: str,
        utils: WorkerUtils,
        first_queue: str | None,
        cancelled: set[int],
    ) -> None:
        gate, heard = Gate(), Heard()
        jobs = [await utils.add_job("task", 0, queue_name=first_queue)]
        jobs += [await utils.add_job("task", number, queue_name="q") for number in (1, 2, 3)]
        async with running({"task": gate}, database, heard=heard, concurrency=1, prefetch=10):
            await gate.until_begun()
            assert len(await locked(db)) == 5
            async with db.transaction():
                for number in cancelled:
                    await utils.cancel_job(jobs[number].id, "called off", connection=db)
            await heard.until("job:complete", len(cancelled))
            gate.open()
            await heard.until("job:complete", 4)
        assert gate.ended == [number for number in range(4) if number not in cancelled]
        for number in cancelled:
            assert await is_cancelled(db, jobs[number].id)
        assert await locked(db) == []


class TestOnAThread:
    async def test_it_is_told_alone(self, db: asyncpg.Connection, database: str, utils: WorkerUtils) -> None:
        heard, begun = Heard(), threading.Semaphore(0)
        others: list[bool] = []
        told = threading.Event()

        def work(payload: int, ctx: JobContext) -> None:
            stopping = ctx.stopping
            begun.release()
            if payload == 1:
                assert stopping.wait(DEADLINE)
                assert stopping is ctx.stopping
                assert stopping.cancelled
                raise ValueError("I was told")
            assert told.wait(DEADLINE)
            others.append(bool(ctx.stopping))

        async with running({"task": work}, database, heard=heard, concurrency=3):
            jobs = [await utils.add_job("task", number) for number in (1, 2, 3)]
            for _ in jobs:
                await asyncio.to_thread(begun.acquire)
            await utils.cancel_job(jobs[0].id, "called off")
            await heard.until("job:complete")
            told.set()
            await heard.until("job:complete", 3)
        assert others == [False, False]
        assert await is_cancelled(db, jobs[0].id)
        assert await count(db) == 1

    @pytest.mark.parametrize("timeout", [None, 600])
    async def test_it_is_waited_for_and_complete_if_it_ends_well(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, timeout: float | None
    ) -> None:
        gate, heard, begun, go_on = Gate(), Heard(), threading.Event(), threading.Event()
        stopping = []

        @task(timeout=timeout)
        def work(ctx: JobContext) -> None:
            begun.set()
            go_on.wait(DEADLINE)
            stopping.append(bool(ctx.stopping))  # also if it is asked for only now

        async with running({"task": work, "gate": gate}, database, heard=heard, concurrency=2):
            job, other = await utils.add_job("task"), await utils.add_job("gate")
            await asyncio.to_thread(begun.wait)
            await gate.until_begun()
            async with db.transaction():
                await utils.cancel_job(job.id, connection=db)
                await utils.cancel_job(other.id, connection=db)
            await heard.until("job:complete")
            assert gate.cancelled
            assert (await existing(db, job.id))["locked_at"] is not None
            go_on.set()
            await heard.until("job:complete", 2)
            assert stopping == [True]
            assert heard.counts["job:success"] == 1
            assert await get(db, job.id) is None

    @pytest.mark.parametrize("timeout", [None, 600])
    async def test_what_it_returns_to_be_awaited_is_not_begun(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, timeout: float | None
    ) -> None:
        heard, thread_begun, begun = Heard(), threading.Event(), asyncio.Event()

        async def rest() -> None:
            begun.set()

        @task(timeout=timeout)
        def work(ctx: JobContext) -> Any:
            stopping = ctx.stopping
            thread_begun.set()
            assert stopping.wait(DEADLINE)
            return rest()

        async with running({"task": work}, database, heard=heard):
            job = await utils.add_job("task")
            await asyncio.to_thread(thread_begun.wait)
            await utils.cancel_job(job.id, "called off")
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)
            assert not begun.is_set()

    async def test_with_a_timeout_it_is_told_before_that_is_over(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard, begun = Heard(), threading.Event()

        @task(timeout=600)
        def work(ctx: JobContext) -> None:
            begun.set()
            assert ctx.stopping.wait(DEADLINE)
            raise ValueError("I was told")

        async with running({"task": work}, database, heard=heard):
            job = await utils.add_job("task")
            await asyncio.to_thread(begun.wait)
            await utils.cancel_job(job.id, "called off")
            await heard.until("job:complete")
            assert await is_cancelled(db, job.id)


class TestWhatSomebodyElseHas:
    async def test_it_waits_for_nobodys_transaction_and_is_done_when_that_ends(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard = Heard()
        job = await utils.add_job("other")
        async with running({"task": nothing}, database, heard=heard, poll_interval=0.02):
            async with db.transaction():
                await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job.id)
                async with asyncio.timeout(DEADLINE):
                    assert await utils.cancel_job(job.id, "called off") == "requested"
            await until_forgotten(db)
        assert await is_cancelled(db, job.id)

    async def test_a_job_of_a_node_worker_is_not_tried_again(
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
            await until_forgotten(db)
            assert await is_cancelled(db, job.id)
            assert gate.begun == []

    @pytest.mark.parametrize("how", ["delete from", "update"])
    async def test_a_request_for_what_is_over_is_forgotten(
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
            await until_forgotten(db)
        assert how != "update" or await is_cancelled(db, job.id, "oops")

    async def test_what_is_added_anew_or_rescheduled_after_it_was_cancelled_runs(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        keyed, plain = await utils.add_job("task", job_key="k"), await utils.add_job("task")
        for job in (keyed, plain):
            await lock(db, job.id, by="pool-1")
            assert await utils.cancel_job(job.id) == "requested"
            await unlock(db, job.id)
        assert (await utils.add_job("task", job_key="k")).id == keyed.id
        await utils.reschedule_jobs([plain.id], attempts=0)
        assert await once({"task": nothing}, database) == Drained(2, 0)
        assert await db.fetchval(REQUESTS) == 0

    async def test_what_takes_over_its_key_while_it_runs_runs(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        gate, heard = Gate(), Heard()
        async with running({"task": gate}, database, heard=heard, concurrency=2):
            old = await utils.add_job("task", "old", job_key="k")
            await gate.until_begun()
            new = await utils.add_job("task", "new", job_key="k")
            assert new.id != old.id
            await gate.until_begun(2)
            await utils.cancel_job(old.id, "called off")
            await heard.until("job:complete")
            assert gate.cancelled == ["old"]
            assert await is_cancelled(db, old.id)
            gate.open()
            await heard.until("job:complete", 2)

    @pytest.mark.parametrize("ends_well", [True, False])
    async def test_a_result_that_is_on_its_way_is_recorded(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils, *, ends_well: bool
    ) -> None:
        heard, go_on = Heard(), asyncio.Event()

        async def waits(_payload: object) -> None:
            await go_on.wait()
            if not ends_well:
                raise ValueError("no")

        async with running({"task": waits}, database, heard=heard, poll_interval=0.02):
            job = await utils.add_job("task")
            await heard.until("job:start")
            async with db.transaction():
                # So that its result cannot be recorded yet.
                await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job.id)
                go_on.set()
                await heard.until("job:success" if ends_well else "job:error")
                assert await utils.cancel_job(job.id, "called off") == "requested"
            await heard.until("job:complete")
            await until_forgotten(db)
            assert heard.counts["job:cancelled"] == 0
            if ends_well:
                assert await get(db, job.id) is None
            else:  # what it failed with was recorded; and then it is not to be tried again
                assert await is_cancelled(db, job.id)

    async def test_a_job_that_was_lost_meanwhile_is_not_touched(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard, told, go_on = Heard(), asyncio.Event(), asyncio.Event()

        async def slow_to_stop(_payload: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                told.set()
                await go_on.wait()

        async with running({"task": slow_to_stop}, database, heard=heard):
            job = await utils.add_job("task")
            await heard.until("job:start")
            await utils.cancel_job(job.id)
            await told.wait()
            await lock(db, job.id, by="somebody")
            before = await existing(db, job.id)
            go_on.set()
            await heard.until("job:lost")
            assert await existing(db, job.id) == before


class TestAcrossWorkers:
    async def test_if_its_worker_stops_before_it_has_seen_the_request_nobody_runs_it(
        self,
        db: asyncpg.Connection,
        database: str,
        utils: WorkerUtils,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cancelling, "_BETWEEN_EXCHANGES", 3600)  # it has just claimed it
        gate = Gate()
        job = await utils.add_job("task")
        async with running({"task": gate}, database, listen=False, poll_interval=3600):
            await gate.until_begun()
            assert await utils.cancel_job(job.id, "called off") == "requested"
        assert (await existing(db, job.id))["attempts"] == 0, "it was given back"
        assert await once({"task": nothing}, database) == Drained(0, 0)
        assert await is_cancelled(db, job.id)
        assert await db.fetchval(REQUESTS) == 0

    async def test_if_it_stops_after_that_it_is_cancelled(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        heard, begun, told = Heard(), asyncio.Event(), asyncio.Event()

        async def slow_to_stop(_payload: object) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.set()
                await asyncio.Event().wait()

        async with running({"task": slow_to_stop}, database, heard=heard):
            job = await utils.add_job("task")
            await begun.wait()
            await utils.cancel_job(job.id, "called off")
            await told.wait()
        assert heard.counts["job:interrupted"] == 0
        assert await is_cancelled(db, job.id)

    async def test_if_its_worker_dies_nobody_runs_it(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        await lock(db, job.id, by="w")
        epoch = (await database_workers.meet(db, Schema())).epoch
        lease = {"seconds": 38, "fast": 1, "tasks": {}, "epoch": epoch}
        await database_workers.register(db, Schema(), "w", {"lease": lease})
        assert await utils.cancel_job(job.id, "called off") == "requested"
        [recovered] = await utils.sweep()
        assert [one.id for one in recovered.jobs] == [job.id]
        assert await is_cancelled(db, job.id)
        assert await db.fetchval(REQUESTS) == 0

    async def test_a_worker_that_starts_looks_before_it_claims(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        job = await utils.add_job("task")
        await lock(db, job.id, by="w")
        await utils.cancel_job(job.id, "called off")
        await utils.force_unlock_workers(["w"])
        assert await once({"task": nothing}, database) == Drained(0, 0)
        assert await is_cancelled(db, job.id)

    async def test_whatever_it_meets_a_job_runs_or_is_cancelled_and_never_both(
        self, db: asyncpg.Connection, database: str, utils: WorkerUtils
    ) -> None:
        """Jobs are cancelled while they are claimed, run and recorded."""
        heard = Heard()
        ran: list[int] = []

        async def work(payload: int) -> None:
            await asyncio.sleep(0)
            ran.append(payload)

        async with (
            running({"task": work}, database, heard=heard, concurrency=3, prefetch=5, poll_interval=0.02),
            running({"task": work}, database, heard=heard, concurrency=3, poll_interval=0.02),
        ):
            answers: dict[int, tuple[Any, str | None]] = {}
            for round_ in range(30):
                jobs = [await utils.add_job("task", round_ * 4 + n, queue_name=f"q{n}") for n in range(4)]
                found = await asyncio.gather(*(utils.cancel_job(job.id, "called off") for job in jobs))
                answers |= {job.id: (job.payload, answer) for job, answer in zip(jobs, found, strict=True)}

            async def quiet() -> bool:
                busy = "select count(*) from graphile_worker._private_jobs where attempts < max_attempts"
                return await db.fetchval(busy) == 0 and await locked(db) == []

            await until(quiet, "all have come to an end")
            await until_forgotten(db)
        assert len(ran) == len(set(ran)), "nothing ran twice"
        for job_id, (payload, answer) in answers.items():
            if answer == "cancelled":
                assert payload not in ran
            if answer is None:
                assert payload in ran
            assert (await get(db, job_id) is None) == (payload in ran)


async def test_a_worker_says_so_if_the_table_is_missing(db: asyncpg.Connection, database: str) -> None:
    await db.execute("drop table graphile_worker._private_python_cancellations")
    with pytest.raises(SchemaMissingError, match=r"lacks something that this release needs\. Complete it"):
        await run({"task": nothing}, database, handle_signals=False, migrate=False)


async def test_a_schema_of_an_earlier_release_gets_the_table(
    db: asyncpg.Connection, utils: WorkerUtils
) -> None:
    await db.execute("drop table graphile_worker._private_python_cancellations")
    await db.execute("delete from graphile_worker._private_python_migrations where id > 3")
    await utils.migrate()
    job = await add(db)
    await lock(db, job["id"])
    assert await utils.cancel_job(job["id"]) == "requested"
