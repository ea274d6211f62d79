"""Pauses of tasks, queues and everything: obeyed, kept, ended, and never a second job of a queue at once."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    App,
    ConfigurationError,
    InvalidJobError,
    Runner,
    RunSummary,
    WorkerUtils,
    run_once,
)
from graphile_worker._db.queries import exchange as database
from graphile_worker._db.queries.pauses import end_expired
from graphile_worker._db.queries.workers import unlock_stale
from graphile_worker._db.sql_files import Schema, read_script
from graphile_worker.doctor import Level, examine
from graphile_worker.limits import PAUSED
from graphile_worker.outcome import Completed, Failed
from support.commands import Cli
from support.jobs import add, count, existing, get
from support.pages import Page
from support.postgres import ROOT
from support.waiting import until, until_blocked
from support.workers import Gate, locked, nothing, running
from test_exchange import ExchangeWorker, claim_ids, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SCHEMA = Schema()
PAUSE = "select graphile_worker._private_python_pause('queue', 'q')"
RESUME = "select graphile_worker._private_python_resume('queue', 'q')"


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(database) as utils:
        yield utils


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def worker(database: str) -> AsyncIterator[ExchangeWorker]:
    connection = await asyncpg.connect(database)
    yield ExchangeWorker(connection, "python-worker")
    await connection.close()


async def lock_of_queue(db: asyncpg.Connection) -> tuple[str | None, datetime | None]:
    row = await db.fetchrow(
        "select locked_by, locked_at from graphile_worker._private_job_queues where queue_name = 'q'"
    )
    assert row is not None
    return row["locked_by"], row["locked_at"]


class TestObeying:
    async def test_run_once_leaves_a_paused_task_and_runs_the_others(
        self, database: str, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        paused, other = await add(db, "charge"), await add(db, "mail")
        await utils.pause(task="charge")
        done = await run_once({"charge": nothing, "mail": nothing}, database, handle_signals=False)
        assert done == RunSummary(succeeded=1)
        assert await get(db, other["id"]) is None
        assert (await existing(db, paused["id"]))["attempts"] == 0

        assert await utils.resume(task="charge")
        done = await run_once({"charge": nothing, "mail": nothing}, database, handle_signals=False)
        assert done == RunSummary(succeeded=1)

    async def test_run_once_runs_nothing_while_everything_is_paused(
        self, database: str, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        await add(db)
        await utils.pause()
        assert await run_once({"task": nothing}, database, handle_signals=False) == RunSummary()
        await utils.resume()
        assert await run_once({"task": nothing}, database, handle_signals=False) == RunSummary(succeeded=1)

    async def test_running_worker_obeys_pauses_and_continues_at_once_after_them(
        self,
        database: str,
        db: asyncpg.Connection,
        utils: WorkerUtils,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        gate = Gate()
        # Without notifications, this worker would look for jobs only after an hour.
        async with running({"task": gate, "mail": nothing}, database, poll_interval=3600) as runner:
            await until(lambda: _listens(runner), "the worker listens")
            await utils.pause(task="task")
            await until(lambda: _has(caplog, "Paused by"), "the worker knows the pause")
            await add(db)
            await add(db, "mail")

            async def mail_is_done() -> bool:
                return await count(db) == 1

            await until(mail_is_done, "the other task's job runs")
            assert gate.started == []
            await utils.resume(task="task")
            await gate.until_started()
            gate.open()

    async def test_pause_returns_prefetched_jobs_of_its_task_and_lets_the_running_one_end(
        self, database: str, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        gate = Gate()
        jobs = [(await add(db))["id"] for _ in range(4)]
        async with running({"task": gate}, database, concurrency=1, prefetch=10):
            await gate.until_started()

            async def locked_jobs() -> int:
                return len(await locked(db))

            await until(lambda: _equals(locked_jobs, 4), "all jobs are claimed")
            await utils.pause(task="task")
            await until(lambda: _equals(locked_jobs, 1), "the jobs that wait are returned")
            gate.open()
            await until(lambda: _equals(locked_jobs, 0), "the running job ends")
            assert await get(db, jobs[0]) is None
            assert [(await existing(db, job))["attempts"] for job in jobs[1:]] == [0, 0, 0]

    async def test_pause_ends_by_itself_and_frees_its_queue(
        self, database: str, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        for name in ("task", "mail"):
            await add(db, name, queue_name="q" if name == "mail" else None)
        await utils.pause(task="task", until=timedelta(milliseconds=300))
        await utils.pause(queue="q", until=timedelta(milliseconds=300))
        async with running({"task": nothing, "mail": nothing}, database, poll_interval=3600):

            async def is_empty() -> bool:
                return await count(db) == 0

            await until(is_empty, "both jobs run")
        assert await utils.pauses() == []
        assert await locked(db) == []

    async def test_stale_lock_rule_and_garbage_collection_leave_a_paused_queue(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        await utils.pause(queue="q")
        await unlock_stale(db, SCHEMA)
        await utils.cleanup("GC_JOB_QUEUES")
        assert (await lock_of_queue(db))[0] == PAUSED
        assert await utils.workers() == []
        [queue] = await utils.many.queues(["q"])
        assert queue.locked_by == PAUSED


async def _equals(read: Any, wanted: object) -> bool:
    return bool(await read() == wanted)


async def _listens(runner: Runner) -> bool:
    return runner.health().listening


async def _has(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


class TestQueues:
    """A pause replaces the lock of a queue, whose job may be running."""

    async def test_job_that_ends_leaves_its_queue_paused(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for _ in range(2):
            await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute(PAUSE)
        assert (await worker.exchange([result_of(held)])).claimed == []
        assert (await lock_of_queue(db))[0] == PAUSED
        assert await db.fetchval(RESUME) == ""
        assert len(await worker.claim()) == 1

    async def test_resume_gives_the_lock_back_to_a_worker_that_still_runs_a_job(
        self, db: asyncpg.Connection, worker: ExchangeWorker, other: asyncpg.Connection
    ) -> None:
        for _ in range(2):
            await add(db, queue_name="q")
        [held] = await worker.claim()
        before = await lock_of_queue(db)
        await db.execute(PAUSE)
        await db.execute(PAUSE)  # a second time changes nothing
        assert await db.fetchval(RESUME) == "python-worker"
        assert await lock_of_queue(db) == before
        second = ExchangeWorker(other, "second")
        assert await second.claim() == []
        await worker.exchange([result_of(held)], wanted=0)
        assert len(await second.claim()) == 1

    async def test_job_that_fails_while_its_queue_is_paused_is_recorded(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute(PAUSE)
        await worker.exchange([result_of(held, Failed(error=ValueError("oops"), delay=0.0))])
        row = await existing(db, job["id"])
        assert ("oops" in row["last_error"], row["locked_at"]) == (True, None)
        assert await db.fetchval(RESUME) == ""

    @pytest.mark.parametrize("outcome", [Completed(), Failed(error=ValueError("oops"), delay=60.0)])
    async def test_resume_waits_for_an_exchange_that_records_the_running_job(
        self, db: asyncpg.Connection, worker: ExchangeWorker, other: asyncpg.Connection, outcome: Any
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute(PAUSE)
        async with worker.connection.transaction():
            await worker.exchange([result_of(held, outcome)], wanted=0)
            resuming = asyncio.create_task(other.fetchval(RESUME))
            await until_blocked(db, other.get_server_pid())
        assert await resuming == ""
        assert await locked(db) == []

    @pytest.mark.parametrize("outcome", [Completed(), Failed(error=ValueError("oops"), delay=60.0)])
    async def test_exchange_waits_with_a_job_whose_queue_is_being_resumed(
        self, db: asyncpg.Connection, worker: ExchangeWorker, other: asyncpg.Connection, outcome: Any
    ) -> None:
        assert await _resume_during_an_exchange(db, worker, other, outcome)

    @pytest.mark.parametrize(
        ("outcome", "name"),
        [(Completed(), "given"), (Failed(error=ValueError("oops"), delay=60.0), "change")],
        ids=["completed", "failed"],
    )
    async def test_queue_stays_locked_without_the_guard_of_the_exchange(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
        other: asyncpg.Connection,
        outcome: Any,
        name: str,
    ) -> None:
        text = read_script("own/012_exchange.sql")
        guard = f"""queue.locked_by = worker and queue.locked_at = {name}.queue_locked_at
                or queue.locked_by = 'python:paused'"""
        assert text.count(guard) == 1, "the guard has changed"
        weakened = text.replace(guard, guard.replace("'python:paused'", "'nobody'"))
        await db.execute(SCHEMA.render(weakened))
        assert not await _resume_during_an_exchange(db, worker, other, outcome)

    async def test_worker_that_reconnects_knows_the_lock_that_it_gets_back(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for _ in range(2):
            await add(db, queue_name="q")
        [first] = await worker.claim(1)
        [held] = (await worker.exchange([result_of(first)], wanted=1)).claimed
        before = await lock_of_queue(db)
        assert held.locked_at != before[1], "the queue was kept, so it was locked earlier than the job"
        await db.execute(PAUSE)
        tasks = await database.read_tasks(db, SCHEMA, ["task"])
        known = await database.read_locked(db, SCHEMA, "python-worker", tasks)
        [adopted] = known.jobs
        await db.execute(RESUME)
        await worker.exchange([result_of(adopted)], wanted=0)
        assert await locked(db) == []

    async def test_queue_of_a_dead_workers_job_is_free_after_the_pause(
        self, db: asyncpg.Connection, worker: ExchangeWorker, utils: WorkerUtils
    ) -> None:
        await add(db, queue_name="q")
        await worker.claim()
        await utils.pause(queue="q")
        await utils.force_unlock_workers(["python-worker"])
        await utils.resume(queue="q")
        assert len(await worker.claim()) == 1

    async def test_pause_waits_for_a_claim_and_keeps_its_lock_in_mind(
        self, db: asyncpg.Connection, worker: ExchangeWorker, other: asyncpg.Connection
    ) -> None:
        await add(db, queue_name="q")
        async with worker.connection.transaction():
            [held] = await worker.claim()
            pausing = asyncio.create_task(other.execute(PAUSE))
            await until_blocked(db, other.get_server_pid())
        await pausing
        assert (await lock_of_queue(db))[0] == PAUSED
        assert await db.fetchval(RESUME) == "python-worker"
        await worker.exchange([result_of(held)], wanted=0)
        assert await locked(db) == []

    async def test_queue_is_released_if_another_librarys_worker_did_not_see_its_lock_come_back(
        self, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        node = ExchangeWorker(db, "pool-1")
        job = await add(db, queue_name="q")
        await node.claim()
        await utils.pause(queue="q")
        # As if a statement of Node, which began before, deleted the job and did not see the queue's new lock.
        resuming = asyncio.create_task(utils.resume(queue="q"))

        async def is_back() -> bool:
            return (await lock_of_queue(db))[0] == "pool-1"

        await until(is_back, "the lock is given back")
        await db.execute("delete from graphile_worker._private_jobs where id = $1", job["id"])
        assert await resuming
        assert await locked(db) == []

    async def test_queue_is_released_if_its_pause_expired_and_node_did_not_see_its_lock_come_back(
        self, database: str, db: asyncpg.Connection, utils: WorkerUtils
    ) -> None:
        node = ExchangeWorker(db, "pool-1")
        job = await add(db, queue_name="q")
        await node.claim()
        await utils.pause(queue="q", until=timedelta(milliseconds=300))
        # As if a statement of Node, which began earlier, deleted the job and did not see the queue's lock.
        await db.execute("""
            create function end_job() returns trigger language plpgsql as $$
            begin
              delete from graphile_worker._private_jobs where job_queue_id = new.id;
              return null;
            end $$;
            create trigger end_job after update on graphile_worker._private_job_queues
            for each row when (new.locked_by = 'pool-1') execute function end_job()""")
        async with running({"other": nothing}, database, poll_interval=3600):

            async def is_free() -> bool:
                return await get(db, job["id"]) is None and await locked(db) == []

            await until(is_free, "the queue is released")

    async def test_end_of_an_expired_pause_does_not_wait_for_the_row_of_its_queue(
        self, db: asyncpg.Connection, utils: WorkerUtils, other: asyncpg.Connection
    ) -> None:
        await utils.pause(queue="q", until=timedelta(milliseconds=1))

        async def is_over() -> bool:
            return bool(await db.fetchval("select until < now() from graphile_worker._private_python_pauses"))

        await until(is_over, "the pause is over")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_job_queues for update")
            await other.execute("set lock_timeout = 1000")
            assert await end_expired(other, SCHEMA) == []
            assert (await lock_of_queue(other))[0] == PAUSED
            assert await other.fetchval("select count(*) from graphile_worker._private_python_pauses") == 1
        await end_expired(other, SCHEMA)
        assert await locked(db) == []
        assert await utils.pauses() == []


async def _resume_during_an_exchange(
    db: asyncpg.Connection, worker: ExchangeWorker, other: asyncpg.Connection, outcome: Any
) -> bool:
    """Resume while a job of the queue runs. Returns whether nothing stays locked when the job has ended."""
    await add(db, queue_name="q")
    [held] = await worker.claim()
    await db.execute(PAUSE)
    async with other.transaction():
        assert await other.fetchval(RESUME) == "python-worker"
        reply = await worker.exchange([result_of(held, outcome)], wanted=0)
    if claim_ids(reply.busy) == {held.job.id}:
        await worker.exchange([result_of(held, outcome)], wanted=0)
    return await locked(db) == []


class TestTable:
    async def test_pause_is_returned_listed_and_changed(self, utils: WorkerUtils) -> None:
        end = datetime(2090, 1, 1, tzinfo=UTC)
        first = await utils.pause(task="charge", until=end, reason="the bank is down", paused_by="Ann")
        assert (first.kind, first.name, first.until, first.reason, first.paused_by) == (
            *("task", "charge", end, "the bank is down"),
            "Ann",
        )
        changed = await utils.pause(task="charge")
        assert (changed.paused_at, changed.until, changed.reason) == (first.paused_at, None, None)
        assert await utils.pauses() == [changed]
        assert [await utils.resume(task="charge") for _ in range(2)] == [True, False]
        assert not await utils.resume()

    async def test_pause_in_a_transaction_counts_from_its_commit(
        self, utils: WorkerUtils, other: asyncpg.Connection
    ) -> None:
        async with other.transaction():
            await utils.pause(queue="q", connection=other)
            assert await utils.pauses() == []
        assert [pause.name for pause in await utils.pauses()] == ["q"]

    async def test_app_pauses_tasks_with_and_without_an_event_loop(self, database: str) -> None:
        app = App(dsn=database)

        @app.task
        async def charge() -> None: ...

        await app.pause(task=charge)
        assert [pause.name for pause in await app.utils.pauses()] == ["charge"]
        assert await app.resume(task=charge)
        assert (await asyncio.to_thread(app.pause_sync)).kind == "all"
        assert await asyncio.to_thread(app.resume_sync)
        await app.close()
        await asyncio.to_thread(app.close_sync)

    async def test_invalid_arguments_are_refused_with_what_to_do(self, utils: WorkerUtils) -> None:
        with pytest.raises(ConfigurationError, match="not both"):
            await utils.pause(task="a", queue="b")
        for wrong in ({"task": ""}, {"queue": "x" * 129}, {"task": "a", "reason": "\0"}):
            with pytest.raises(InvalidJobError):
                await utils.pause(**wrong)
        with pytest.raises(InvalidJobError, match="until"):
            await utils.pause(until=datetime(2030, 1, 1))  # noqa: DTZ001 - the test is about it


class TestCommand:
    async def test_command_pauses_lists_and_resumes(self, cli: Cli, db: asyncpg.Connection) -> None:
        await add(db, "charge")
        done = await cli("pause", "--task", "charge", "--queue", "q", "--until", "2h", "--reason", "why")
        assert done.returncode == 0
        assert "Node and Rust workers obey only the pause of a queue" in done.stderr
        listed = await cli.json("pauses")
        assert [(row["kind"], row["name"], row["reason"]) for row in listed] == [
            ("queue", "q", "why"),
            ("task", "charge", "why"),
        ]
        assert "Paused: queue 'q', task 'charge'." in (await cli("stats")).stderr
        assert len((await cli.json("stats"))["pauses"]) == 2
        done = await cli("resume", "--task", "charge", "--queue", "q", "--task", "unknown")
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "The task 'charge' is resumed.",
            "The task 'unknown' is not paused.",
            "The queue 'q' is resumed.",
        ]

    async def test_pause_of_a_misspelt_task_warns_and_suggests_the_name(
        self, cli: Cli, database: str
    ) -> None:
        async with running({"send_welcome": nothing}, database):
            done = await cli("pause", "--task", "send_welcom")
            assert (done.returncode, "no Python worker has a task 'send_welcom'" in done.stderr) == (0, True)
            assert "Did you mean 'send_welcome'?" in done.stderr
            assert "Warning" not in (await cli("pause", "--task", "send_welcome")).stderr

    @pytest.mark.parametrize("arguments", [(), ("--all", "--task", "x")])
    async def test_command_asks_what_to_pause(self, cli: Cli, arguments: tuple[str, ...]) -> None:
        for verb in ("pause", "resume"):
            done = await cli(verb, *arguments)
            assert (done.returncode, "--task, --queue or --all" in done.stderr) == (2, True)

    async def test_doctor_names_pauses_and_the_command_that_ends_them(
        self, database: str, utils: WorkerUtils
    ) -> None:
        await utils.pause(reason="maintenance", paused_by="Ann")
        await utils.pause(queue="q")
        found = [finding async for finding in examine(database) if finding.level is not Level.OK]
        pauses = [finding for finding in found if finding.check == "pauses"]
        assert "everything (maintenance)" in pauses[0].message
        assert "Paused by Ann" in pauses[0].message
        assert "resume --all" in str(pauses[0].advice)
        assert "resume --queue q" in str(pauses[1].advice)
        assert not [finding for finding in found if finding.check in {"queues", "locks"}]


async def test_pausing_guide_examples_run(
    database: str, db: asyncpg.Connection, utils: WorkerUtils, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App(dsn=database)
    page = Page("guides/pausing.md", app=app)
    await page.run()
    page.assert_done()
    await app.close()
    assert capsys.readouterr().out.startswith("queue tenant:7 ")
    await utils.resume(queue="tenant:7")
    [statements] = re.findall(r"```sql\n(.*?)```", (ROOT / "docs/guides/pausing.md").read_text(), re.DOTALL)
    await db.execute(statements)
    assert [pause.subject for pause in await utils.pauses()] == ["everything", "queue 'tenant:7'"]
