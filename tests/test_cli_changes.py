"""Verbs that change jobs: selection, confirmation, batches and reports."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker import WorkerUtils
from graphile_worker._client.bulk import BATCH, Change, JobFilter
from graphile_worker.testing import Databases
from support.commands import INTERRUPTED, Cli, Terminal
from support.jobs import add, count, existing, get, lock, put_in_state
from support.proxy import proxied
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NOW = timedelta(seconds=30)
NOTHING_CHANGED = {
    "dry_run": False,
    "jobs": 0,
    "changed": 0,
    "requested": 0,
    "ids": [],
    "missing": [],
    "running": [],
    "unchanged": [],
}


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


async def jobs(db: asyncpg.Connection, *states: str, task: str = "task") -> list[int]:
    """Add jobs in these states, and return their ids."""
    ids = []
    for state in states:
        job = await add(db, task)
        await put_in_state(db, state, job["id"])
        ids.append(int(job["id"]))
    return ids


async def fill(db: asyncpg.Connection, number: int, task: str = "many") -> None:
    """Insert permanently failed jobs."""
    await db.execute(
        """with task as (
          insert into graphile_worker._private_tasks (identifier) values ($2) returning id
        )
        insert into graphile_worker._private_jobs (task_id, attempts, max_attempts, last_error)
        select task.id, 25, 25, 'oops' from task, generate_series(1, $1::integer)""",
        number,
        task,
    )


class TestComplete:
    async def test_complete_by_id_deletes_the_job(self, db: asyncpg.Connection, cli: Cli) -> None:
        one, other = await jobs(db, "new", "failed")
        assert await cli.out("complete", str(one)) == f"Completed 1 job: {one}.\n"
        assert await get(db, one) is None
        assert await get(db, other) is not None

    async def test_running_and_missing_jobs_are_listed(self, db: asyncpg.Connection, cli: Cli) -> None:
        new, running = await jobs(db, "new", "locked")
        done = await cli("complete", "--yes", str(new), str(running), "777")
        assert (done.returncode, done.stdout) == (1, f"Completed 1 job: {new}.\n")
        assert done.stderr == (
            f"There is no job 777.\nJob {running} is being run by w: it was not changed.\n"
        )
        done = await cli("complete", "--yes", str(running), "777", "--json")
        assert json.loads(done.stdout) == {
            "dry_run": False,
            "jobs": 0,
            "changed": 0,
            "requested": 0,
            "ids": [],
            "missing": [777],
            "running": [{"id": running, "locked_by": "w", "state": "running"}],
            "unchanged": [],
        }

    async def test_locked_row_is_skipped(self, db: asyncpg.Connection, cli: Cli, database: str) -> None:
        [job] = await jobs(db, "new")
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("select from graphile_worker._private_jobs where id = $1 for update", job)
            done = await cli("complete", str(job))
        await other.close()
        assert (done.returncode, done.stderr) == (
            1,
            f"Job {job} is ready: it could not be changed at the moment; try again.\n",
        )

    async def test_ids_are_read_from_standard_input(self, db: asyncpg.Connection, cli: Cli) -> None:
        ids = await jobs(db, "new", "new", "new")
        given = f"{ids[0]} {ids[1]}\n\n{ids[0]}\n"
        assert await cli.json("complete", "-", "--yes", given=given) == {
            "dry_run": False,
            "jobs": 2,
            "changed": 2,
            "requested": 0,
            "ids": ids[:2],
            "missing": [],
            "running": [],
            "unchanged": [],
        }
        assert await count(db) == 1

    async def test_filter_without_match_completes_nothing(self, cli: Cli) -> None:
        assert await cli.out("complete", "--task", "nothing") == "Completed 0 jobs.\n"

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "No jobs selected. Give their ids, or -"),
            (["1", "--task", "x"], "by their ids, by a filter or by --all, but only by one"),
            (["--all", "--task", "x"], "by their ids, by a filter or by --all, but only by one"),
            (["x"], "'x' is not a job id"),
            (["-5"], "No such option '-5'"),
            (["--state", "running"], "Running jobs cannot be changed. Cancel them, or stop their worker"),
        ],
    )
    async def test_invalid_selection_is_a_usage_error(
        self, cli: Cli, arguments: list[str], message: str
    ) -> None:
        done = await cli("complete", *arguments, given="1 2")
        assert done.returncode == 2
        assert message in done.stderr


class TestConfirmation:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("verb", ["complete", "fail", "remove", "cancel", "retry"])
    async def test_without_terminal_several_jobs_need_yes(
        self, db: asyncpg.Connection, cli: Cli, verb: str
    ) -> None:
        await jobs(db, "failed" if verb == "retry" else "new", "failed" if verb == "retry" else "new")
        before = await db.fetch("select * from graphile_worker._private_jobs")
        done = await cli(verb, "--task", "task")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"Error: This would {verb} 2 jobs. There is no terminal to confirm on: use --yes to proceed.\n"
        )
        assert await db.fetch("select * from graphile_worker._private_jobs") == before
        assert await cli.out(verb, "--task", "task", "--dry-run") == f"This would {verb} 2 jobs.\n"
        assert await cli.json(verb, "--task", "task", "--dry-run") == {
            **NOTHING_CHANGED,
            "dry_run": True,
            "jobs": 2,
        }
        assert await db.fetch("select * from graphile_worker._private_jobs") == before

    @pytest.mark.parametrize(("answer", "left", "code"), [("y", 0, 0), ("n", 3, 1), ("", 3, 1)])
    async def test_terminal_asks_for_confirmation(
        self, db: asyncpg.Connection, cli: Cli, answer: str, left: int, code: int
    ) -> None:
        await jobs(db, "new", "new", "new")
        with cli.terminal("complete", "--all") as terminal:
            await terminal.until("This would complete 3 jobs. Continue? [y/N]: ")
            terminal.type(f"{answer}\n")
            assert await terminal.end() == code
        assert ("Completed 3 jobs: 1, 2, 3." if code == 0 else "Nothing was changed.") in terminal.text
        assert await count(db) == left

    async def test_ctrl_c_at_the_confirmation_changes_nothing(self, db: asyncpg.Connection, cli: Cli) -> None:
        await jobs(db, "new", "new")
        with cli.terminal("complete", "--all") as terminal:
            await terminal.until("[y/N]: ")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        assert await count(db) == 2

    async def test_single_job_needs_no_confirmation(self, db: asyncpg.Connection, cli: Cli) -> None:
        await jobs(db, "new")
        with cli.terminal("complete", "--all") as terminal:
            assert await terminal.end() == 0
        assert terminal.text == "Completed 1 job: 1.\n"


class TestMissingJobs:
    VERBS = (
        ["complete"], ["fail"], ["reschedule", "--now"], ["retry"], ["remove"], ["cancel"],
    )  # fmt: skip

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("verb", VERBS, ids=" ".join)
    async def test_unknown_key_prints_a_json_document(self, cli: Cli, verb: list[str]) -> None:
        for more in ([], ["--dry-run"]):
            done = await cli(*verb, "--key", "nope", "--json", *more)
            assert (done.returncode, done.stderr) == (1, "There is no job with the key 'nope'.\n")
            assert json.loads(done.stdout) == {
                **NOTHING_CHANGED,
                "dry_run": bool(more),
                "missing": ["nope"],
            }

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("verb", VERBS, ids=" ".join)
    async def test_missing_jobs_are_not_counted(
        self, db: asyncpg.Connection, cli: Cli, verb: list[str]
    ) -> None:
        running, waiting = await jobs(db, "locked", "retrying")
        ids = [str(waiting), "7777", "8888"]
        done = await cli(*verb, *ids, "--dry-run")
        assert (done.returncode, done.stdout) == (1, f"This would {verb[0]} 1 job.\n")
        assert done.stderr == "There is no job 7777.\nThere is no job 8888.\n"
        if verb != ["cancel"]:
            done = await cli(*verb, str(running), "--dry-run")
            assert (done.returncode, done.stdout) == (1, f"This would {verb[0]} 0 jobs.\n")
            assert f"Job {running} is being run by w" in done.stderr
        done = await cli(*verb, *ids)
        assert done.returncode == 1
        assert f" 1 job: {waiting}." in done.stdout, "a single job needs no confirmation"


class TestFail:
    async def test_job_fails_permanently_with_reason(self, db: asyncpg.Connection, cli: Cli) -> None:
        [one, other] = await jobs(db, "new", "retrying")
        assert await cli.out("fail", str(one), "-r", "no such customer") == f"Failed 1 job: {one}.\n"
        job = await existing(db, one)
        assert (job["last_error"], job["attempts"]) == ("no such customer", 25)
        await cli.out("fail", str(other))
        assert (await existing(db, other))["last_error"] == "Manually marked as failed"

    async def test_empty_reason_is_rejected(self, cli: Cli) -> None:
        done = await cli("fail", "1", "--reason", "")
        assert (done.returncode, "--reason is empty" in done.stderr) == (2, True)


class TestReschedule:
    async def test_reschedule_options_change_the_job(self, db: asyncpg.Connection, cli: Cli) -> None:
        [job] = await jobs(db, "failed")
        await cli.out("reschedule", str(job), "--run-at", "2040-01-01T00:00Z", "--priority", "-3")
        row = await existing(db, job)
        assert (row["run_at"], row["priority"]) == (datetime(2040, 1, 1, tzinfo=UTC), -3)
        assert (row["attempts"], row["max_attempts"]) == (25, 25)
        await cli.out("reschedule", str(job), "--now", "--attempts", "0", "--max-attempts", "7")
        row = await existing(db, job)
        assert abs(row["run_at"] - datetime.now(UTC)) < NOW
        assert (row["attempts"], row["max_attempts"], row["priority"]) == (0, 7, -3)
        await cli.out("reschedule", str(job), "--run-at", "2h")
        row = await existing(db, job)
        assert row["run_at"] - row["updated_at"] == timedelta(hours=2)

    async def test_rescheduling_notifies_workers(self, db: asyncpg.Connection, cli: Cli) -> None:
        received: list[str] = []
        await db.add_listener("jobs:insert", lambda *arguments: received.append(str(arguments[3])))
        [job] = await jobs(db, "failed")
        received.clear()
        await cli.out("reschedule", str(job), "--now", "--attempts", "0")
        await db.execute("select 1")
        assert [json.loads(text)["count"] for text in received] == [1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["1"], "Nothing to change. Give --run-at, --now, --priority, --attempts or --max-attempts."),
            (["1", "--now", "--run-at", "2h"], "--now and --run-at cannot be combined."),
            (["1", "--attempts", "-1"], "is not in the range"),
            (["1", "--run-at", "never"], "'never' is not valid"),
        ],
    )
    async def test_invalid_reschedule_options_are_rejected(
        self, cli: Cli, arguments: list[str], message: str
    ) -> None:
        done = await cli("reschedule", *arguments)
        assert done.returncode == 2
        assert message in done.stderr


class TestRetry:
    async def test_failed_jobs_are_retried(self, db: asyncpg.Connection, cli: Cli) -> None:
        failed, retrying, new, running, stale = await jobs(db, "failed", "retrying", "new", "locked", "stale")
        before = {job: await existing(db, job) for job in (retrying, new, running, stale)}
        assert await cli.out("retry", "--task", "task") == f"Will retry 1 job: {failed}.\n"
        row = await existing(db, failed)
        assert (row["attempts"], row["is_available"], row["last_error"]) == (0, True, "oops")
        assert abs(row["run_at"] - datetime.now(UTC)) < NOW
        assert before == {job: await existing(db, job) for job in before}

    async def test_unattempted_and_running_jobs_are_listed(self, db: asyncpg.Connection, cli: Cli) -> None:
        ids = await jobs(db, "failed", "retrying", "new", "locked", "stale")
        failed, retrying, new, running, stale = ids
        done = await cli("retry", "--yes", *map(str, ids))
        assert (done.returncode, done.stdout) == (1, f"Will retry 2 jobs: {failed}, {retrying}.\n")
        assert done.stderr == (
            f"Job {running} is being run by w: it was not changed.\n"
            f"Job {stale} is being run by w: it was not changed.\n"
            f"Job {new} is ready: it has not been attempted yet; to run it now, use reschedule --now.\n"
        )

    async def test_scheduled_retry_runs_now(self, db: asyncpg.Connection, cli: Cli) -> None:
        retrying, _ = await jobs(db, "retrying", "new")
        later = await add(db, run_at=datetime(2040, 1, 1, tzinfo=UTC))
        assert await cli.out("retry", "--state", "scheduled") == f"Will retry 1 job: {retrying}.\n"
        assert (await existing(db, later["id"]))["run_at"].year == 2040

    async def test_retrying_notifies_workers(self, db: asyncpg.Connection, cli: Cli) -> None:
        received: list[object] = []
        [_] = await jobs(db, "failed")
        await db.add_listener("jobs:insert", lambda *arguments: received.append(arguments[3]))
        await cli.out("retry", "--all")
        await db.execute("select 1")
        assert len(received) == 1


class TestRemove:
    async def test_remove_by_id_and_by_filter_deletes_jobs_except_running_ones(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        one, failed, running = await jobs(db, "new", "failed", "locked")
        assert await cli.out("remove", str(one)) == f"Removed 1 job: {one}.\n"
        assert await cli.out("remove", "--state", "failed") == f"Removed 1 job: {failed}.\n"
        assert await cli.out("remove", "--all") == "Removed 0 jobs.\n"
        assert await get(db, running) is not None

    async def test_remove_by_key_removes_waiting_and_detaches_running_jobs(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        await add(db, job_key="a")
        running = (await add(db, job_key="b"))["id"]
        await lock(db, running)
        assert await cli.out("remove", "--key", "a", "--dry-run") == "This would remove 1 job.\n"
        assert await cli.out("remove", "--key", "a") == "Removed 1 job: 1.\n"
        assert (await cli("remove", "--key", "b", "--dry-run")).stdout == "This would remove 1 job.\n"
        assert await cli.json("remove", "--key", "b") == {
            **NOTHING_CHANGED,
            "jobs": 1,
            "requested": 1,
            "ids": [running],
        }
        row = await existing(db, running)
        assert (row["key"], row["attempts"]) == (None, 25)
        done = await cli("remove", "--key", "c")
        assert (done.returncode, done.stderr) == (1, "There is no job with the key 'c'.\n")

    async def test_removing_a_running_job_by_key_is_reported(self, db: asyncpg.Connection, cli: Cli) -> None:
        await lock(db, (await add(db, job_key="b"))["id"])
        assert await cli.out("remove", "--key", "b") == (
            "Removed 0 jobs. 1 is running: it has lost its key, and will not be retried.\n"
        )

    async def test_remove_by_key_skips_a_locked_row(self, db: asyncpg.Connection, cli: Cli) -> None:
        job = await add(db, job_key="k")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs for update")
            done = await cli("remove", "--key", "k")
        assert (done.returncode, done.stdout, done.stderr) == (
            1, "", f"Job {job['id']} is ready: it could not be changed at the moment; try again.\n",
        )  # fmt: skip


class TestCancel:
    async def test_waiting_job_is_cancelled(self, db: asyncpg.Connection, cli: Cli) -> None:
        new, failed = await jobs(db, "new", "failed")
        assert await cli.out("cancel", str(new), "--reason", "why not") == f"Cancelled 1 job: {new}.\n"
        row = await existing(db, new)
        assert (row["last_error"], row["is_available"]) == ("Cancelled: why not", False)
        done = await cli("cancel", str(failed), "999")
        assert done.returncode == 1
        done = await cli("cancel", "--yes", str(failed), "999")
        assert (done.returncode, done.stderr) == (
            1,
            f"There is no job 999.\nJob {failed} is failed: it has already failed permanently.\n",
        )

    async def test_worker_of_a_running_job_is_asked(self, db: asyncpg.Connection, cli: Cli) -> None:
        _, running, _ = await jobs(db, "new", "locked", "failed")
        assert await cli.out("cancel", "--all", "--yes") == (
            "Cancelled 1 job. Requested it for 1 running; Node and Rust workers ignore the request.\n"
        )
        requests = await db.fetch("select job_id, reason from graphile_worker._private_python_cancellations")
        assert [tuple(row) for row in requests] == [(running, "")]
        assert await cli.json("cancel", "--state", "running") == {
            "dry_run": False,
            "jobs": 1,
            "changed": 0,
            "requested": 1,
            "ids": [running],
            "missing": [],
            "running": [],
            "unchanged": [],
        }

    async def test_locked_row_is_not_reported_as_running(self, db: asyncpg.Connection, cli: Cli) -> None:
        [job] = await jobs(db, "new")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs for update")
            assert await cli.out("cancel", str(job)) == (
                "Cancelled 0 jobs. Requested it for 1 job that another transaction has locked: a Python "
                "worker completes the request when that transaction ends.\n"
            )

    async def test_python_worker_cancels_the_running_job(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        from graphile_worker import run  # noqa: PLC0415

        async def sleep(_: object) -> None:
            await asyncio.sleep(60)

        runner = await run({"sleep": sleep}, dsn=database)
        job = await add(db, "sleep")

        async def is_running() -> object:
            return (await existing(db, job["id"]))["locked_at"]

        async def is_cancelled() -> bool:
            row = await existing(db, job["id"])
            return row["last_error"] == "Cancelled: enough" and row["locked_at"] is None

        await until(is_running, "the job runs")
        await cli.out("cancel", str(job["id"]), "-r", "enough")
        await until(is_cancelled, "the job is cancelled")
        await runner.stop()


class TestManyJobs:
    async def test_many_jobs_are_changed_in_batches(self, db: asyncpg.Connection, cli: Cli) -> None:
        await fill(db, 3 * BATCH + 7)
        await jobs(db, "new", "failed", "locked")
        assert await cli.out("retry", "--task", "many", "--yes") == "Will retry 3,007 jobs.\n"
        done = await cli.json("complete", "--task", "many", "--yes")
        assert done["changed"] == len(done["ids"]) == 3007
        assert await count(db) == 3
        transactions = await db.fetch("select xmin from graphile_worker._private_jobs")
        assert len(transactions) == 3

    async def test_each_batch_is_a_transaction(self, db: asyncpg.Connection, database: str) -> None:
        await fill(db, 2 * BATCH + 1)
        async with WorkerUtils(database) as utils:
            sizes = [
                len(batch.changed)
                async for batch in utils.many.change(Change.retry(), JobFilter(state="failed"))
            ]
        assert sizes == [BATCH, BATCH, 1]
        written = await db.fetchval("select count(distinct xmin::text) from graphile_worker._private_jobs")
        assert written == 3

    async def test_jobs_added_meanwhile_are_not_changed(self, db: asyncpg.Connection, database: str) -> None:
        await fill(db, BATCH + 1)
        changed: list[int] = []
        async with WorkerUtils(database) as utils:
            async for batch in utils.many.change(Change.complete(), JobFilter()):
                await add(db)
                changed += batch.changed
        assert changed == list(range(1, BATCH + 2))
        assert await count(db) == 2

    @asynccontextmanager
    async def third_batch_held(
        self, db: asyncpg.Connection, database: str
    ) -> AsyncIterator[asyncpg.Connection]:
        """Make deletes wait in the third batch, until the connection releases its lock."""
        await fill(db, 5 * BATCH)
        await db.execute(
            """create function wait() returns trigger language plpgsql as
            'begin perform pg_advisory_xact_lock(7); return old; end';
            create trigger wait before delete on graphile_worker._private_jobs for each row
            when (old.id = 2500) execute function wait()"""
        )
        holder = await asyncpg.connect(database)
        await holder.execute("select pg_advisory_lock(7)")
        yield holder
        await holder.close()

    async def until_third_batch_waits(self, db: asyncpg.Connection) -> None:
        async def is_waiting() -> bool:
            statement = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
            return bool(await db.fetchval(statement))

        await until(is_waiting, "the third batch waits")

    @asynccontextmanager
    async def stuck(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> AsyncIterator[tuple[Terminal, asyncpg.Connection]]:
        """Run a verb whose third batch waits, until the connection releases its lock."""
        async with self.third_batch_held(db, database) as holder:
            with cli.terminal("complete", "--task", "many", "--yes") as terminal:
                await self.until_third_batch_waits(db)
                yield terminal, holder

    async def test_lost_connection_reports_progress(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        async with self.third_batch_held(db, database), proxied(database) as (proxy, dsn):
            arguments = ("complete", "--task", "many", "--yes", "--json")
            running = asyncio.create_task(Cli(dsn, tmp_path)(*arguments))
            await self.until_third_batch_waits(db)
            proxy.refusing = True
            proxy.cut_all()
            done = await running
        assert done.returncode == 1
        document = json.loads(done.stdout)
        assert (document["jobs"], document["changed"]) == (5 * BATCH, 2 * BATCH)
        assert document["ids"] == list(range(1, 2 * BATCH + 1))
        assert "Stopped by an error: 2,000 jobs of 5,000 changed" in done.stderr
        assert "Error: " in done.stderr
        assert "__aexit__" not in done.stderr

    async def test_interrupt_finishes_the_batch_and_reports_progress(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        async with self.stuck(db, cli, database) as (terminal, holder):
            terminal.interrupt()
            await holder.execute("select pg_advisory_unlock(7)")
            assert await terminal.end() == INTERRUPTED
        assert "Completed 3,000 jobs." in terminal.text
        assert "Interrupted: 3,000 jobs of 5,000 changed, the others were not." in terminal.text
        assert await count(db) == 2 * BATCH

    async def test_second_interrupt_ends_at_once(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        async with self.stuck(db, cli, database) as (terminal, _):
            terminal.interrupt()
            await terminal.until("Ctrl-C again")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        assert "Traceback" not in terminal.text
        assert "Interrupted: 2,000 jobs of 5,000 changed" in terminal.text
        assert await count(db) == 3 * BATCH, "the current batch is rolled back"

    async def test_two_commands_at_once_share_the_jobs(self, db: asyncpg.Connection, cli: Cli) -> None:
        await fill(db, 10 * BATCH)
        answers = await asyncio.gather(*(cli.json("complete", "--task", "many", "--yes") for _ in range(2)))
        ids = [job for answer in answers for job in answer["ids"]]
        assert len(set(ids)) == len(ids), "no job is counted by both"
        assert len(ids) + await count(db) == 10 * BATCH

    async def test_jobs_removed_meanwhile_are_not_reported_as_remaining(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        async with self.third_batch_held(db, database) as holder:
            running = asyncio.create_task(cli("remove", "--task", "many", "--yes"))
            await self.until_third_batch_waits(db)
            await db.execute("delete from graphile_worker._private_jobs where id > $1", 3 * BATCH)
            await holder.execute("select pg_advisory_unlock(7)")
            done = await running
        assert (done.returncode, done.stdout) == (0, "Removed 3,000 jobs.\n")
        assert (
            done.stderr == "2,000 jobs were not changed: completed, removed or running before their batch.\n"
        )

    async def test_progress_bar_appears_only_on_a_terminal(self, db: asyncpg.Connection, cli: Cli) -> None:
        await fill(db, 2 * BATCH)
        done = await cli("fail", "--task", "many", "--yes")
        assert done.stderr == ""
        with cli.terminal("complete", "--task", "many", "--yes") as terminal:
            assert await terminal.end() == 0
        assert "100%" in terminal.text
        assert "Completed 2,000 jobs." in terminal.text


class TestSafeguards:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("flag", ["--search", "--task", "--key", "--queue", "--worker"])
    async def test_empty_filter_is_rejected(self, db: asyncpg.Connection, cli: Cli, flag: str) -> None:
        await add(db, "t")
        done = await cli("remove", flag, "", "--yes")
        assert done.returncode == 2
        assert f"{flag} is empty: give a value" in done.stderr
        assert await db.fetchval("select count(*) from graphile_worker.jobs") == 1

    async def test_out_of_range_id_is_rejected(self, cli: Cli) -> None:
        done = await cli("retry", "-", given="9" * 5000)
        assert done.returncode == 2
        assert "is not a job id" in done.stderr
        assert "Traceback" not in done.stderr

    async def test_locked_jobs_are_reported(self, db: asyncpg.Connection, cli: Cli) -> None:
        held = await add(db, "t")
        await add(db, "t")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", held["id"])
            done = await cli("fail", "--task", "t", "--yes")
        assert done.stdout.startswith("Failed 1 job")
        assert "1 job of 2 not changed: locked at the moment" in done.stderr

    async def test_role_without_access_to_rows_gets_an_error(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        await add(db, "t")
        role = f"reader_{uuid.uuid4().hex[:8]}"
        await db.execute(f"""
            create role {role} login;
            grant usage on schema graphile_worker to {role};
            grant select on all tables in schema graphile_worker to {role};
        """)
        try:
            for verb in (["list"], ["stats"], ["export"], ["queues"]):
                done = await cli(*verb, "-c", database.replace("postgres@", f"{role}@"))
                assert done.returncode == 1
                assert "Row level security hides the jobs" in done.stderr
        finally:
            await db.execute(f"drop owned by {role}; drop role {role}")

    async def test_unknown_key_and_key_of_running_job_are_reported(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        done = await cli("fail", "--key", "nokey")
        assert (done.returncode, done.stderr) == (1, "There is no job with the key 'nokey'.\n")
        job = await add(db, "t", job_key="k")
        await db.execute(
            "update graphile_worker._private_jobs set locked_at = now(), locked_by = 'me' where id = $1",
            job["id"],
        )
        done = await cli("fail", "--key", "k")
        assert done.returncode == 1
        assert f"Job {job['id']} is being run by me" in done.stderr
