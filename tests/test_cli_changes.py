"""Changing jobs from the command line: one, many, and more than fit into a transaction."""

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
from graphile_worker.many_jobs import BATCH, Change, JobFilter
from graphile_worker.testing import Databases
from support.commands import INTERRUPTED, Cli, Terminal
from support.jobs import add, bring_to, count, existing, get, lock
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
    """New jobs, brought to these states."""
    ids = []
    for state in states:
        job = await add(db, task)
        await bring_to(db, state, job["id"])
        ids.append(int(job["id"]))
    return ids


async def fill(db: asyncpg.Connection, number: int, task: str = "many") -> None:
    """So many jobs that have failed for good."""
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
    async def test_by_id(self, db: asyncpg.Connection, cli: Cli) -> None:
        one, other = await jobs(db, "new", "failed")
        assert await cli.out("complete", str(one)) == f"Completed 1 job: {one}.\n"
        assert await get(db, one) is None
        assert await get(db, other) is not None

    async def test_those_that_run_or_are_not_there_are_named(self, db: asyncpg.Connection, cli: Cli) -> None:
        new, running = await jobs(db, "new", "locked")
        done = await cli("complete", "--yes", str(new), str(running), "777")
        assert (done.returncode, done.stdout) == (1, f"Completed 1 job: {new}.\n")
        assert done.stderr == (f"There is no job 777.\nJob {running} is run by w; it was left alone.\n")
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

    async def test_a_job_whose_row_somebody_has_is_not_waited_for(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        [job] = await jobs(db, "new")
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("select from graphile_worker._private_jobs where id = $1 for update", job)
            done = await cli("complete", str(job))
        await other.close()
        assert (done.returncode, done.stderr) == (
            1,
            f"Job {job} is ready; it could not be changed at this moment: try again.\n",
        )

    async def test_ids_come_from_standard_input(self, db: asyncpg.Connection, cli: Cli) -> None:
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

    async def test_none_matches(self, cli: Cli) -> None:
        assert await cli.out("complete", "--task", "nothing") == "Completed 0 jobs.\n"

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "Name jobs by their ids, with - for ids from standard input"),
            (["1", "--task", "x"], "by their ids, by a filter or by --all, one of these."),
            (["--all", "--task", "x"], "by their ids, by a filter or by --all, one of these."),
            (["x"], "'x' is no id of a job"),
            (["-5"], "No such option '-5'"),
            (["--state", "running"], "Jobs that run are left alone. Cancel them, or stop their worker"),
        ],
    )
    async def test_mistakes(self, cli: Cli, arguments: list[str], says: str) -> None:
        done = await cli("complete", *arguments, given="1 2")
        assert done.returncode == 2
        assert says in done.stderr


class TestAsking:
    @pytest.mark.parametrize("verb", ["complete", "fail", "remove", "cancel", "retry"])
    async def test_where_nobody_can_be_asked_more_than_one_is_refused(
        self, db: asyncpg.Connection, cli: Cli, verb: str
    ) -> None:
        await jobs(db, "failed" if verb == "retry" else "new", "failed" if verb == "retry" else "new")
        before = await db.fetch("select * from graphile_worker._private_jobs")
        done = await cli(verb, "--task", "task")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"Error: This would {verb} 2 jobs. There is nobody to ask here: say --yes to do it.\n"
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
    async def test_on_a_terminal_it_asks(
        self, db: asyncpg.Connection, cli: Cli, answer: str, left: int, code: int
    ) -> None:
        await jobs(db, "new", "new", "new")
        with cli.terminal("complete", "--all") as terminal:
            await terminal.until("This would complete 3 jobs. Do it? [y/N]: ")
            terminal.type(f"{answer}\n")
            assert await terminal.end() == code
        assert ("Completed 3 jobs: 1, 2, 3." if code == 0 else "Nothing was changed.") in terminal.text
        assert await count(db) == left

    async def test_ctrl_c_is_an_answer_too(self, db: asyncpg.Connection, cli: Cli) -> None:
        await jobs(db, "new", "new")
        with cli.terminal("complete", "--all") as terminal:
            await terminal.until("[y/N]: ")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        assert await count(db) == 2

    async def test_one_job_is_not_asked_about(self, db: asyncpg.Connection, cli: Cli) -> None:
        await jobs(db, "new")
        with cli.terminal("complete", "--all") as terminal:
            assert await terminal.end() == 0
        assert terminal.text == "Completed 1 job: 1.\n"


class TestJobsThatAreNotThere:
    VERBS = (
        ["complete"], ["fail"], ["reschedule", "--now"], ["retry"], ["remove"], ["cancel"],
    )  # fmt: skip

    @pytest.mark.parametrize("verb", VERBS, ids=" ".join)
    async def test_there_is_a_document_for_a_key_that_no_job_has(self, cli: Cli, verb: list[str]) -> None:
        for more in ([], ["--dry-run"]):
            done = await cli(*verb, "--key", "nope", "--json", *more)
            assert (done.returncode, done.stderr) == (1, "There is no job with the key 'nope'.\n")
            assert json.loads(done.stdout) == {
                **NOTHING_CHANGED,
                "dry_run": bool(more),
                "missing": ["nope"],
            }

    @pytest.mark.parametrize("verb", VERBS, ids=" ".join)
    async def test_they_are_not_counted(self, db: asyncpg.Connection, cli: Cli, verb: list[str]) -> None:
        running, there = await jobs(db, "locked", "retrying")
        named = [str(there), "7777", "8888"]
        done = await cli(*verb, *named, "--dry-run")
        assert (done.returncode, done.stdout) == (1, f"This would {verb[0]} 1 job.\n")
        assert done.stderr == "There is no job 7777.\nThere is no job 8888.\n"
        if verb != ["cancel"]:
            done = await cli(*verb, str(running), "--dry-run")
            assert (done.returncode, done.stdout) == (1, f"This would {verb[0]} 0 jobs.\n")
            assert f"Job {running} is run by w" in done.stderr
        done = await cli(*verb, *named)
        assert done.returncode == 1
        assert f" 1 job: {there}." in done.stdout, "and one job is not asked about"


class TestFail:
    async def test_it_fails_for_good(self, db: asyncpg.Connection, cli: Cli) -> None:
        [one, other] = await jobs(db, "new", "retrying")
        assert await cli.out("fail", str(one), "-r", "no such customer") == f"Failed 1 job: {one}.\n"
        job = await existing(db, one)
        assert (job["last_error"], job["attempts"]) == ("no such customer", 25)
        await cli.out("fail", str(other))
        assert (await existing(db, other))["last_error"] == "Manually marked as failed"

    async def test_an_empty_reason(self, cli: Cli) -> None:
        done = await cli("fail", "1", "--reason", "")
        assert (done.returncode, "--reason is empty" in done.stderr) == (2, True)


class TestReschedule:
    async def test_each_option(self, db: asyncpg.Connection, cli: Cli) -> None:
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

    async def test_workers_are_told(self, db: asyncpg.Connection, cli: Cli) -> None:
        heard: list[str] = []
        await db.add_listener("jobs:insert", lambda *arguments: heard.append(str(arguments[3])))
        [job] = await jobs(db, "failed")
        heard.clear()
        await cli.out("reschedule", str(job), "--now", "--attempts", "0")
        await db.execute("select 1")
        assert [json.loads(text)["count"] for text in heard] == [1]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["1"], "Say what to change: --run-at, --now, --priority, --attempts or --max-attempts."),
            (["1", "--now", "--run-at", "2h"], "--now and --run-at cannot be combined."),
            (["1", "--attempts", "-1"], "is not in the range"),
            (["1", "--run-at", "never"], "'never' does not do"),
        ],
    )
    async def test_mistakes(self, cli: Cli, arguments: list[str], says: str) -> None:
        done = await cli("reschedule", *arguments)
        assert done.returncode == 2
        assert says in done.stderr


class TestRetry:
    async def test_failed_jobs_run_again(self, db: asyncpg.Connection, cli: Cli) -> None:
        failed, retrying, new, running, stale = await jobs(db, "failed", "retrying", "new", "locked", "stale")
        before = {job: await existing(db, job) for job in (retrying, new, running, stale)}
        assert await cli.out("retry", "--task", "task") == f"Will retry 1 job: {failed}.\n"
        row = await existing(db, failed)
        assert (row["attempts"], row["is_available"], row["last_error"]) == (0, True, "oops")
        assert abs(row["run_at"] - datetime.now(UTC)) < NOW
        assert before == {job: await existing(db, job) for job in before}

    async def test_what_was_not_tried_or_runs_is_named(self, db: asyncpg.Connection, cli: Cli) -> None:
        ids = await jobs(db, "failed", "retrying", "new", "locked", "stale")
        failed, retrying, new, running, stale = ids
        done = await cli("retry", "--yes", *map(str, ids))
        assert (done.returncode, done.stdout) == (1, f"Will retry 2 jobs: {failed}, {retrying}.\n")
        assert done.stderr == (
            f"Job {running} is run by w; it was left alone.\nJob {stale} is run by w; it was left alone.\n"
            f"Job {new} is ready; it has not been tried yet: reschedule --now lets it run now.\n"
        )

    async def test_a_job_that_waits_for_its_next_attempt(self, db: asyncpg.Connection, cli: Cli) -> None:
        retrying, _ = await jobs(db, "retrying", "new")
        later = await add(db, run_at=datetime(2040, 1, 1, tzinfo=UTC))
        assert await cli.out("retry", "--state", "scheduled") == f"Will retry 1 job: {retrying}.\n"
        assert (await existing(db, later["id"]))["run_at"].year == 2040

    async def test_a_worker_runs_them_at_once(self, db: asyncpg.Connection, cli: Cli) -> None:
        heard: list[object] = []
        [_] = await jobs(db, "failed")
        await db.add_listener("jobs:insert", lambda *arguments: heard.append(arguments[3]))
        await cli.out("retry", "--all")
        await db.execute("select 1")
        assert len(heard) == 1


class TestRemove:
    async def test_by_id_and_by_filter(self, db: asyncpg.Connection, cli: Cli) -> None:
        one, failed, running = await jobs(db, "new", "failed", "locked")
        assert await cli.out("remove", str(one)) == f"Removed 1 job: {one}.\n"
        assert await cli.out("remove", "--state", "failed") == f"Removed 1 job: {failed}.\n"
        assert await cli.out("remove", "--all") == "Removed 0 jobs.\n"
        assert await get(db, running) is not None

    async def test_by_key(self, db: asyncpg.Connection, cli: Cli) -> None:
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

    async def test_one_that_runs_is_told(self, db: asyncpg.Connection, cli: Cli) -> None:
        await lock(db, (await add(db, job_key="b"))["id"])
        assert await cli.out("remove", "--key", "b") == (
            "Removed 0 jobs. 1 runs: it has lost its key, and will not be tried again.\n"
        )

    async def test_by_a_key_whose_row_somebody_has_is_not_waited_for(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        job = await add(db, job_key="k")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs for update")
            done = await cli("remove", "--key", "k")
        assert (done.returncode, done.stdout, done.stderr) == (
            1, "", f"Job {job['id']} is ready; it could not be changed at this moment: try again.\n",
        )  # fmt: skip


class TestCancel:
    async def test_a_job_that_waits(self, db: asyncpg.Connection, cli: Cli) -> None:
        new, failed = await jobs(db, "new", "failed")
        assert await cli.out("cancel", str(new), "--reason", "why not") == f"Cancelled 1 job: {new}.\n"
        row = await existing(db, new)
        assert (row["last_error"], row["is_available"]) == ("Cancelled: why not", False)
        done = await cli("cancel", str(failed), "999")
        assert done.returncode == 1
        done = await cli("cancel", "--yes", str(failed), "999")
        assert (done.returncode, done.stderr) == (
            1,
            f"There is no job 999.\nJob {failed} is failed; it has failed for good already.\n",
        )

    async def test_the_worker_of_one_that_runs_is_asked(self, db: asyncpg.Connection, cli: Cli) -> None:
        _, running, _ = await jobs(db, "new", "locked", "failed")
        assert await cli.out("cancel", "--all", "--yes") == (
            "Cancelled 1 job. Asked for 1 that run; workers of Node or Rust do not hear it.\n"
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

    async def test_of_one_that_somebody_has_locked_it_is_not_said_that_it_runs(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        [job] = await jobs(db, "new")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs for update")
            assert await cli.out("cancel", str(job)) == (
                "Cancelled 0 jobs. Asked for 1 that somebody's transaction has locked: when that ends, a "
                "worker of this library does it.\n"
            )

    async def test_a_running_worker_cancels_it(self, db: asyncpg.Connection, cli: Cli, database: str) -> None:
        from graphile_worker import run  # noqa: PLC0415

        async def sleep(_: object) -> None:
            await asyncio.sleep(60)

        runner = await run({"sleep": sleep}, dsn=database)
        job = await add(db, "sleep")

        async def runs() -> object:
            return (await existing(db, job["id"]))["locked_at"]

        async def over() -> bool:
            row = await existing(db, job["id"])
            return row["last_error"] == "Cancelled: enough" and row["locked_at"] is None

        await until(runs, "it runs")
        await cli.out("cancel", str(job["id"]), "-r", "enough")
        await until(over, "it is cancelled")
        await runner.stop()


class TestMany:
    async def test_batch_by_batch(self, db: asyncpg.Connection, cli: Cli) -> None:
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

    async def test_jobs_that_come_meanwhile_are_not_chased(
        self, db: asyncpg.Connection, database: str
    ) -> None:
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
        """Whoever deletes the many jobs waits in the third batch, until that connection lets go."""
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

    async def until_it_waits(self, db: asyncpg.Connection) -> None:
        async def waits() -> bool:
            statement = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
            return bool(await db.fetchval(statement))

        await until(waits, "the third batch waits")

    @asynccontextmanager
    async def stuck(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> AsyncIterator[tuple[Terminal, asyncpg.Connection]]:
        """A verb whose third batch waits, until the connection lets go."""
        async with self.third_batch_held(db, database) as holder:
            with cli.terminal("complete", "--task", "many", "--yes") as terminal:
                await self.until_it_waits(db)
                yield terminal, holder

    async def test_if_the_connection_is_lost_it_says_how_far_it_came(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        async with self.third_batch_held(db, database), proxied(database) as (proxy, dsn):
            arguments = ("complete", "--task", "many", "--yes", "--json")
            running = asyncio.create_task(Cli(dsn, tmp_path)(*arguments))
            await self.until_it_waits(db)
            proxy.refusing = True
            proxy.cut_all()
            done = await running
        assert done.returncode == 1
        told = json.loads(done.stdout)
        assert (told["jobs"], told["changed"]) == (5 * BATCH, 2 * BATCH)
        assert told["ids"] == list(range(1, 2 * BATCH + 1))
        assert "Stopped by an error: 2,000 jobs of 5,000 changed" in done.stderr
        assert "Error: " in done.stderr
        assert "__aexit__" not in done.stderr

    async def test_interrupted_it_ends_the_batch_and_says_how_far_it_came(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        async with self.stuck(db, cli, database) as (terminal, holder):
            terminal.interrupt()
            await holder.execute("select pg_advisory_unlock(7)")
            assert await terminal.end() == INTERRUPTED
        assert "Completed 3,000 jobs." in terminal.text
        assert "Interrupted: 3,000 jobs of 5,000 changed, the others are as they were." in terminal.text
        assert await count(db) == 2 * BATCH

    async def test_interrupted_again_it_ends_at_once(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        async with self.stuck(db, cli, database) as (terminal, _):
            terminal.interrupt()
            await terminal.until("Ctrl-C again")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        assert "Traceback" not in terminal.text
        assert "Interrupted: 2,000 jobs of 5,000 changed" in terminal.text
        assert await count(db) == 3 * BATCH, "the batch under way is undone"

    async def test_two_at_once(self, db: asyncpg.Connection, cli: Cli) -> None:
        await fill(db, 10 * BATCH)
        answers = await asyncio.gather(*(cli.json("complete", "--task", "many", "--yes") for _ in range(2)))
        ids = [job for answer in answers for job in answer["ids"]]
        assert len(set(ids)) == len(ids), "no job is counted by both"
        assert len(ids) + await count(db) == 10 * BATCH

    async def test_what_somebody_else_has_removed_is_not_said_to_be_left(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        async with self.third_batch_held(db, database) as holder:
            running = asyncio.create_task(cli("remove", "--task", "many", "--yes"))
            await self.until_it_waits(db)
            await db.execute("delete from graphile_worker._private_jobs where id > $1", 3 * BATCH)
            await holder.execute("select pg_advisory_unlock(7)")
            done = await running
        assert (done.returncode, done.stdout) == (0, "Removed 3,000 jobs.\n")
        assert done.stderr == "2,000 jobs were gone, or run by somebody, before it came to them.\n"

    async def test_a_bar_on_a_terminal_and_none_elsewhere(self, db: asyncpg.Connection, cli: Cli) -> None:
        await fill(db, 2 * BATCH)
        done = await cli("fail", "--task", "many", "--yes")
        assert done.stderr == ""
        with cli.terminal("complete", "--task", "many", "--yes") as terminal:
            assert await terminal.end() == 0
        assert "100%" in terminal.text
        assert "Completed 2,000 jobs." in terminal.text


class TestWhatWouldBeAMistake:
    @pytest.mark.parametrize("flag", ["--text", "--task", "--key", "--queue", "--worker"])
    async def test_an_empty_filter_is_refused(self, db: asyncpg.Connection, cli: Cli, flag: str) -> None:
        await add(db, "t")
        done = await cli("remove", flag, "", "--yes")
        assert done.returncode == 2
        assert f"{flag} is empty: say which." in done.stderr
        assert await db.fetchval("select count(*) from graphile_worker.jobs") == 1

    async def test_a_number_that_is_no_id(self, cli: Cli) -> None:
        done = await cli("retry", "-", given="9" * 5000)
        assert done.returncode == 2
        assert "is no id of a job" in done.stderr
        assert "Traceback" not in done.stderr

    async def test_those_that_somebody_has_locked_are_told(self, db: asyncpg.Connection, cli: Cli) -> None:
        held = await add(db, "t")
        await add(db, "t")
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", held["id"])
            done = await cli("fail", "--task", "t", "--yes")
        assert done.stdout.startswith("Failed 1 job")
        assert "1 job of 2 not changed: locked by somebody at that moment" in done.stderr

    async def test_a_role_that_does_not_see_the_jobs_is_not_told_that_there_are_none(
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

    async def test_a_key_that_no_job_has_and_one_of_a_job_that_runs_are_told(
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
        assert f"Job {job['id']} is run by me" in done.stderr
