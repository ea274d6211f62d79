"""How a queue is, and what it needs, from the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import pytest

from graphile_worker import run
from graphile_worker._db.migrate import migrate
from graphile_worker._db.sql import Schema
from graphile_worker.embedded.binaries import Binaries
from graphile_worker.testing import Databases
from support.commands import INTERRUPTED, Cli
from support.jobs import add, bring_to, count, existing, lock


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


async def register(db: asyncpg.Connection, worker_id: str, metadata: object) -> None:
    """A worker with a heartbeat."""
    await db.execute(
        """insert into graphile_worker._private_workers (id, last_heartbeat_at, metadata)
        values ($1, now(), $2::text::jsonb)""",
        worker_id,
        json.dumps(metadata),
    )


class TestStats:
    async def test_by_task_and_state(self, db: asyncpg.Connection, cli: Cli) -> None:
        for state in ("new", "failed", "locked", "retrying"):
            await bring_to(db, state, (await add(db, "mail"))["id"])
        await add(db, "report")
        found = await cli.json("stats")
        assert (found["ready"], found["scheduled"], found["running"], found["failed"]) == (2, 1, 1, 1)
        assert found["total"] == 5
        assert {name: task["total"] for name, task in found["tasks"].items()} == {"mail": 4, "report": 1}
        lines = [line.split("\t") for line in (await cli.out("stats")).splitlines()]
        assert [line[:6] for line in lines] == [
            ["mail", "1", "1", "1", "1", "4"],
            ["report", "1", "0", "0", "0", "1"],
            ["(all)", "2", "1", "1", "1", "5"],
        ]

    async def test_a_terminal_can_be_watched(self, db: asyncpg.Connection, cli: Cli) -> None:
        with cli.terminal("stats", "--watch", "--interval", "100ms") as terminal:
            await terminal.until("Ctrl-C ends it.")
            await add(db, "late")
            await terminal.until("late")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        assert "Traceback" not in terminal.text

    async def test_many_tasks_fit_a_terminal_that_is_watched(self, db: asyncpg.Connection, cli: Cli) -> None:
        for number in range(1, 44):
            await add(db, f"task-{number:02}")
        await db.execute("select graphile_worker.add_job('task-43') from generate_series(1, 6)")
        options = ("--watch", "--interval", "100ms")
        with cli.terminal("stats", *options, columns=80, lines=24) as terminal:
            await terminal.until("Ctrl-C ends it.")
        lines = terminal.text.split("Ctrl-C ends it.")[0].splitlines()
        assert [line.split()[:2] for line in lines[-4:-1]] == [
            *(["task-43", "7"], ["(23", "others)"], ["(all)", "49"])
        ]
        assert lines[-3].split()[2] == "23"
        assert len(lines) == 24

    @pytest.mark.parametrize("more", [(), ("--json",)])
    async def test_a_queue_that_goes_away_is_watched_until_it_is_back(
        self, db: asyncpg.Connection, cli: Cli, more: tuple[str, ...]
    ) -> None:
        await add(db, "early")
        with cli.terminal("stats", "--watch", "--interval", "100ms", *more) as terminal:
            await terminal.until("early")
            await db.execute("alter schema graphile_worker rename to away")
            await terminal.until("is not installed in this database")
            await db.execute("alter schema away rename to graphile_worker")
            await add(db, "late")
            await terminal.until("late")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED

    async def test_watched_by_a_program_it_is_an_object_a_line(self, cli: Cli) -> None:
        with cli.terminal("stats", "--watch", "--interval", "100ms", "--json") as terminal:
            await terminal.until("}\n{")
        assert json.loads(terminal.text.splitlines()[0])["total"] == 0

    @pytest.mark.parametrize("interval", ["0s", "often", "50ms"])
    async def test_mistakes(self, cli: Cli, interval: str) -> None:
        done = await cli("stats", "--watch", "--interval", interval)
        assert (done.returncode, "Invalid value for '--interval'" in done.stderr) == (2, True)


class TestQueues:
    async def test_who_has_locked_it_and_what_waits(self, db: asyncpg.Connection, cli: Cli) -> None:
        running = await add(db, queue_name="a")
        await lock(db, running["id"], by="pool-1")
        for _ in range(2):
            await add(db, queue_name="a")
        await bring_to(db, "failed", (await add(db, queue_name="b", max_attempts=1))["id"])
        await add(db)
        a, b = await cli.json("queues")
        assert (a["queue_name"], a["jobs"], a["ready"], a["failed"], a["locked_by"]) == (
            "a",
            3,
            2,
            0,
            "pool-1",
        )
        assert (b["queue_name"], b["jobs"], b["ready"], b["failed"], b["locked_by"]) == ("b", 1, 0, 1, None)
        assert [queue["queue_name"] for queue in await cli.json("queues", "--locked")] == ["a"]
        assert [queue["queue_name"] for queue in await cli.json("queues", "b")] == ["b"]
        assert (await cli.out("queues", "--limit", "1")).split("\t")[:2] == ["a", "3"]
        done = await cli("queues", "b", "nothing")
        assert (done.returncode, done.stderr) == (1, "There is no queue 'nothing'.\n")
        with cli.terminal("queues") as terminal:
            assert await terminal.end() == 0
        assert terminal.text.split("\n")[0].split()[:4] == ["QUEUE", "JOBS", "READY", "FAILED"]
        assert "pool-1" in terminal.text


class TestWorkers:
    async def test_ours_nodes_and_rusts(self, db: asyncpg.Connection, cli: Cli, database: str) -> None:
        begun = asyncio.Event()

        async def slow(_: object) -> None:
            begun.set()
            await asyncio.sleep(60)

        mine = await add(db, "slow", queue_name="q")
        runner = await run({"slow": slow}, dsn=database, heartbeat_interval=0.2)
        try:
            await begun.wait()
            nodes = await add(db, "theirs")
            await lock(db, nodes["id"], by="pool-0123456789abcdef01")
            await register(db, "rust", {"pid": 7})
            found = {worker["language"]: worker for worker in await cli.json("workers")}
            assert found.keys() == {"python", "node", "rust"}
            assert [job["id"] for job in found["python"]["runs"]] == [mine["id"]]
            assert (found["python"]["jobs"], found["python"]["queues"], found["python"]["lives"]) == (
                1,
                1,
                True,
            )
            assert [job["task_identifier"] for job in found["node"]["runs"]] == ["theirs"]
            assert (found["node"]["state"], found["rust"]["state"]) == ("unknown", "beats")
            assert len((await cli.out("workers")).splitlines()) == 3
            with cli.terminal("workers") as terminal:
                assert await terminal.end() == 0
            assert f"{mine['id']} slow" in terminal.text
            done = await cli("unlock", found["python"]["id"])
            assert done.returncode == 1
            assert "lives: it was heard from" in done.stderr
            assert (await existing(db, mine["id"]))["locked_at"] is not None
        finally:
            await runner.stop(grace=0)

    async def test_one_of_rusts_that_has_not_beaten_for_long_is_silent(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        for name in ("early", "late"):
            await register(db, name, {"pid": 7})
        await db.execute(
            "update graphile_worker._private_workers "
            "set last_heartbeat_at = now() - interval '3 days' where id = 'late'"
        )
        states = {worker["id"]: (worker["state"], worker["lives"]) for worker in await cli.json("workers")}
        assert states == {"early": ("beats", True), "late": ("silent", False)}

    async def test_none(self, cli: Cli) -> None:
        assert await cli.json("workers") == []
        with cli.terminal("workers") as terminal:
            assert await terminal.end() == 0
        assert "There is no worker with a heartbeat" in terminal.text


class TestUnlock:
    async def test_one_of_rusts_that_beats_is_not_robbed(self, db: asyncpg.Connection, cli: Cli) -> None:
        job = await add(db)
        await register(db, "rust", {"pid": 7})
        await lock(db, job["id"], by="rust")
        done = await cli("unlock", "rust")
        assert done.returncode == 1
        assert "rust lives: it was heard from" in done.stderr
        assert (await existing(db, job["id"]))["locked_by"] == "rust"
        assert await cli.out("unlock", "rust", "--force") == "Freed 1 job and 0 queues.\n"

    async def test_what_a_worker_holds_is_freed(self, db: asyncpg.Connection, cli: Cli) -> None:
        for name in ("a", "a", "b"):
            await lock(db, (await add(db, queue_name=f"q-{name}"))["id"], by=name)
        done = await cli("unlock", "a", "b")
        assert (done.returncode, done.stderr) == (
            1,
            "Error: This would free 3 jobs and 2 queues. There is nobody to ask here: say --yes to do it.\n",
        )
        with cli.terminal("unlock", "a", "b") as terminal:
            await terminal.until("This would free 3 jobs and 2 queues. Do it? [y/N]: ")
            terminal.type("n\n")
            assert await terminal.end() == 1
        assert await cli.out("unlock", "b") == "Freed 1 job and 1 queue.\n"
        assert await cli.json("unlock", "-", "--yes", given="a\n") == {
            "workers": ["a"],
            "jobs": 2,
            "queues": 1,
            "missing": [],
        }
        locked = "select count(*) from graphile_worker._private_jobs where locked_at is not null"
        assert await db.fetchval(locked) == 0
        done = await cli("unlock", "nobody")
        assert (done.returncode, done.stderr) == (
            1,
            "No worker 'nobody' is known, and none of that name holds anything.\n",
        )

    async def test_a_live_one_only_by_force(self, db: asyncpg.Connection, cli: Cli) -> None:
        await register(
            db, "alive", {"language": "python", "state": "ready", "lease": {"seconds": 38, "fast": 8}}
        )
        await lock(db, (await add(db))["id"], by="alive")
        done = await cli("unlock", "alive")
        assert (done.returncode, "Stop it first; if it is stopped, say --force." in done.stderr) == (1, True)
        assert await cli.out("unlock", "alive", "--force") == "Freed 1 job and 0 queues.\n"


class TestSweep:
    async def test_the_jobs_of_a_dead_worker(self, db: asyncpg.Connection, cli: Cli) -> None:
        dead = {"language": "python", "lease": {"seconds": 1, "fast": 1}, "died_at": "2020-01-01T00:00:00Z"}
        await register(db, "dead", dead)
        job = await add(db, queue_name="q")
        await lock(db, job["id"], by="dead")
        [found] = await cli.json("sweep", "--dry-run")
        assert (found["worker"], found["jobs"], found["queues"]) == ("dead", [job["id"]], ["q"])
        assert (await existing(db, job["id"]))["locked_at"] is not None
        done = await cli("sweep", "--recovery-delay", "1h", "--refund")
        assert done.stderr == "1 worker is dead; 1 job was freed.\n"
        assert done.stdout.split("\t")[0] == "dead"
        row = await existing(db, job["id"])
        assert (row["locked_at"], row["attempts"]) == (None, 0)
        assert (row["run_at"] - row["created_at"]).total_seconds() > 3500
        assert await cli.json("sweep") == []

    async def test_who_is_watched_is_told_and_for_how_long(self, db: asyncpg.Connection, cli: Cli) -> None:
        await register(db, "gone", {"language": "python", "lease": {"seconds": 1}})
        await register(db, "rust", {"pid": 7})
        done = await cli("sweep", "--json")
        assert done.stderr == "Watching, until each was heard from or for 1 s, 1 worker: gone\n"
        assert [one["worker"] for one in json.loads(done.stdout)] == ["gone"]

    async def test_mistakes(self, cli: Cli) -> None:
        done = await cli("sweep", "--recovery-delay", "late")
        assert (done.returncode, "a number with a unit" in done.stderr) == (2, True)


class TestCleanup:
    async def test_queues_by_default(self, db: asyncpg.Connection, cli: Cli) -> None:
        await bring_to(db, "failed", (await add(db, max_attempts=1))["id"])
        await db.execute("insert into graphile_worker._private_job_queues (queue_name) values ('empty')")
        await db.execute("insert into graphile_worker._private_tasks (identifier) values ('unused')")
        assert await cli.out("cleanup") == "Removed 0 jobs, 0 task identifiers and 1 queue.\n"
        assert await count(db) == 1
        kept = await cli.json("cleanup", "GC_TASK_IDENTIFIERS", "--keep", "unused")
        assert kept == {"jobs": 0, "task_identifiers": 0, "queues": 0}
        assert await cli.out("cleanup", "failed-jobs,task-identifiers") == (
            "Removed 1 job, 2 task identifiers and 0 queues.\n"
        )

    async def test_names_that_live_workers_serve_are_kept(self, db: asyncpg.Connection, cli: Cli) -> None:
        lease = {"seconds": 38, "fast": 8}
        await register(db, "w", {"language": "python", "state": "ready", "lease": lease, "tasks": ["mine"]})
        await db.execute("insert into graphile_worker._private_tasks (identifier) values ('mine'), ('old')")
        assert (await cli.json("cleanup", "task-identifiers"))["task_identifiers"] == 1
        assert await db.fetchval("select identifier from graphile_worker._private_tasks") == "mine"

    async def test_failed_jobs_are_asked_about(self, db: asyncpg.Connection, cli: Cli) -> None:
        for _ in range(2):
            await bring_to(db, "failed", (await add(db))["id"])
        done = await cli("cleanup", "DELETE_PERMAFAILED_JOBS")
        assert done.returncode == 1
        assert "This would remove 2 jobs that failed for good." in done.stderr
        with cli.terminal("cleanup", "failed-jobs") as terminal:
            await terminal.until("This would remove 2 jobs that failed for good. Do it? [y/N]: ")
            terminal.type("y\n")
            assert await terminal.end() == 0
        assert "Removed 2 jobs" in terminal.text

    async def test_mistakes(self, cli: Cli) -> None:
        done = await cli("cleanup", "everything")
        assert done.returncode == 2
        assert "There is no cleanup 'everything'. There are: failed-jobs" in done.stderr


def pg_dump(dsn: str) -> str:
    import subprocess  # noqa: PLC0415

    command = [Binaries.of_extra().program("pg_dump"), "--schema-only", "--schema=graphile_worker", dsn]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "\n".join(line for line in text.splitlines() if not line.startswith(("\\", "--")))


class TestMigrate:
    async def test_it_installs_and_says_what_it_did(self, empty_database: str, tmp_path: Path) -> None:
        cli = Cli(empty_database, tmp_path)
        done = await cli("migrate", "--check")
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith(
            "To be done to the schema graphile_worker, by graphile-worker migrate:\n"
            "create the schema graphile_worker\ninstall revision 20 of Graphile Worker\n"
        )
        assert (await cli("migrate", "--check", "--json")).returncode == 1
        out = await cli.out("migrate")
        assert out.startswith("Done:\ncreate the schema")
        assert out.endswith("Schema graphile_worker is up to date\n")
        assert await cli.out("migrate", "--check") == "Schema graphile_worker is up to date\n"
        assert await cli.json("migrate") == {"schema": "graphile_worker", "up_to_date": True, "steps": []}
        assert await cli.out("migrate", "--sql") == "-- There is nothing to do.\n"

    async def test_somebody_else_can_run_the_sql(self, databases: Databases, tmp_path: Path) -> None:
        async with databases.fresh(empty=True) as by_hand, databases.fresh() as by_us:
            cli = Cli(by_hand, tmp_path)
            script = await cli.out("migrate", "--sql")
            connection = await asyncpg.connect(by_hand)
            assert await connection.fetchval("select to_regnamespace('graphile_worker')") is None
            await connection.execute(script)
            ledger = "select id, name from graphile_worker._private_python_migrations order by id"
            rows = await connection.fetch(ledger)
            other = await asyncpg.connect(by_us)
            assert rows == await other.fetch(ledger)
            await other.close()
            await connection.close()
            assert await cli.out("migrate", "--check") == "Schema graphile_worker is up to date\n"
            assert await asyncio.to_thread(pg_dump, by_hand) == await asyncio.to_thread(pg_dump, by_us)

    async def test_on_a_schema_in_use_indexes_come_first(self, db: asyncpg.Connection, cli: Cli) -> None:
        await db.execute(
            """drop index graphile_worker._private_python_jobs_of_queue;
            delete from graphile_worker._private_python_migrations where id >= 2"""
        )
        script = await cli.out("migrate", "--sql")
        assert script.index("create index concurrently if not exists") < script.index("begin;")
        before, transaction = script.split("begin;")
        for statement in before.split(";"):
            if "create" in statement:
                await db.execute(statement)
        await db.execute(f"begin;{transaction}")
        assert await cli.out("migrate", "--check") == "Schema graphile_worker is up to date\n"

    async def test_a_schema_with_an_odd_name(self, empty_database: str, tmp_path: Path) -> None:
        cli = Cli(empty_database, tmp_path)
        name = 'o\'dd "name"'
        script = await cli.out("migrate", "--sql", "-s", name)
        connection = await asyncpg.connect(empty_database)
        await connection.execute(script)
        assert not (await migrate(connection, Schema(name))).changed
        await connection.close()

    async def test_what_cannot_be_adopted(self, db: asyncpg.Connection, cli: Cli) -> None:
        await db.execute("insert into graphile_worker.migrations (id, breaking) values (21, true)")
        for flags in ([], ["--check"], ["--sql"]):
            done = await cli("migrate", *flags)
            assert (done.returncode, "Upgrade graphile-worker." in done.stderr) == (1, True)

    async def test_mistakes(self, cli: Cli) -> None:
        done = await cli("migrate", "--check", "--sql")
        assert (done.returncode, "cannot be combined" in done.stderr) == (2, True)


async def test_flags_of_the_connection_may_stand_before_the_verb(cli: Cli, database: str) -> None:
    del cli.environment["DATABASE_URL"]
    assert "No database was named." in (await cli("stats")).stderr
    assert await cli.out("-c", database, "stats", "--json") == await cli.out(
        "stats", "-c", database, "--json"
    )
