"""The verbs `stats`, `queues`, `workers`, `unlock`, `sweep`, `cleanup` and `migrate`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import pytest

from graphile_worker import run
from graphile_worker._db.schema.migrate import migrate
from graphile_worker._db.sql_files import Schema
from graphile_worker.embedded.binaries import Binaries
from graphile_worker.testing import Databases
from support.commands import INTERRUPTED, Cli
from support.jobs import add, count, existing, lock, put_in_state


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


async def register(db: asyncpg.Connection, worker_id: str, metadata: object) -> None:
    """Insert a worker with a heartbeat."""
    await db.execute(
        """insert into graphile_worker._private_workers (id, last_heartbeat_at, metadata)
        values ($1, now(), $2::text::jsonb)""",
        worker_id,
        json.dumps(metadata),
    )


class TestStats:
    async def test_stats_count_jobs_by_task_and_state(self, db: asyncpg.Connection, cli: Cli) -> None:
        for state in ("new", "failed", "locked", "retrying"):
            await put_in_state(db, state, (await add(db, "mail"))["id"])
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

    async def test_stats_watch_refreshes_on_a_terminal(self, db: asyncpg.Connection, cli: Cli) -> None:
        with cli.terminal("stats", "--watch", "--interval", "100ms") as terminal:
            await terminal.until("Press Ctrl-C to quit.")
            await add(db, "late")
            await terminal.until("late")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        assert "Traceback" not in terminal.text

    async def test_stats_watch_fits_many_tasks(self, db: asyncpg.Connection, cli: Cli) -> None:
        for number in range(1, 44):
            await add(db, f"task-{number:02}")
        await db.execute("select graphile_worker.add_job('task-43') from generate_series(1, 6)")
        options = ("--watch", "--interval", "100ms")
        with cli.terminal("stats", *options, columns=80, lines=24) as terminal:
            await terminal.until("Press Ctrl-C to quit.")
        lines = terminal.text.split("Press Ctrl-C to quit.")[0].splitlines()
        assert [line.split()[:2] for line in lines[-4:-1]] == [
            ["task-43", "7"],
            ["(23", "others)"],
            ["(all)", "49"],
        ]
        assert lines[-3].split()[2] == "23"
        assert len(lines) == 24

    @pytest.mark.parametrize("more", [(), ("--json",)])
    async def test_stats_watch_survives_an_outage(
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

    async def test_stats_watch_json_prints_an_object_per_line(self, cli: Cli) -> None:
        with cli.terminal("stats", "--watch", "--interval", "100ms", "--json") as terminal:
            await terminal.until("}\n{")
        assert json.loads(terminal.text.splitlines()[0])["total"] == 0

    @pytest.mark.parametrize("interval", ["0s", "often", "50ms"])
    async def test_invalid_stats_arguments_are_rejected(self, cli: Cli, interval: str) -> None:
        done = await cli("stats", "--watch", "--interval", interval)
        assert (done.returncode, "Invalid value for '--interval'" in done.stderr) == (2, True)


class TestQueues:
    async def test_queues_show_lock_and_waiting_jobs(self, db: asyncpg.Connection, cli: Cli) -> None:
        running = await add(db, queue_name="a")
        await lock(db, running["id"], by="pool-1")
        for _ in range(2):
            await add(db, queue_name="a")
        await put_in_state(db, "failed", (await add(db, queue_name="b", max_attempts=1))["id"])
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
    async def test_python_node_and_rust_workers_are_listed(
        self, db: asyncpg.Connection, cli: Cli, database: str
    ) -> None:
        started = asyncio.Event()

        async def slow(_: object) -> None:
            started.set()
            await asyncio.sleep(60)

        own = await add(db, "slow", queue_name="q")
        runner = await run({"slow": slow}, dsn=database, heartbeat_interval=0.2)
        try:
            await started.wait()
            nodes = await add(db, "theirs")
            await lock(db, nodes["id"], by="pool-0123456789abcdef01")
            await register(db, "rust", {"pid": 7})
            found = {worker["language"]: worker for worker in await cli.json("workers")}
            assert found.keys() == {"python", "node", "rust"}
            assert [job["id"] for job in found["python"]["runs"]] == [own["id"]]
            assert (found["python"]["jobs"], found["python"]["queues"], found["python"]["is_alive"]) == (
                1,
                1,
                True,
            )
            assert [job["task_identifier"] for job in found["node"]["runs"]] == ["theirs"]
            assert (found["node"]["state"], found["rust"]["state"]) == ("unknown", "alive")
            assert len((await cli.out("workers")).splitlines()) == 3
            with cli.terminal("workers") as terminal:
                assert await terminal.end() == 0
            assert f"{own['id']} slow" in terminal.text
            done = await cli("unlock", found["python"]["id"])
            assert done.returncode == 1
            assert "is alive: last heartbeat" in done.stderr
            assert (await existing(db, own["id"]))["locked_at"] is not None
        finally:
            await runner.stop(grace=0)

    async def test_rust_worker_without_heartbeat_is_silent(self, db: asyncpg.Connection, cli: Cli) -> None:
        for name in ("early", "late"):
            await register(db, name, {"pid": 7})
        await db.execute(
            "update graphile_worker._private_workers "
            "set last_heartbeat_at = now() - interval '3 days' where id = 'late'"
        )
        states = {worker["id"]: (worker["state"], worker["is_alive"]) for worker in await cli.json("workers")}
        assert states == {"early": ("alive", True), "late": ("silent", False)}

    async def test_workers_verb_prints_an_empty_list_without_workers(self, cli: Cli) -> None:
        assert await cli.json("workers") == []
        with cli.terminal("workers") as terminal:
            assert await terminal.end() == 0
        assert "No workers found" in terminal.text


class TestUnlock:
    async def test_live_rust_worker_is_not_unlocked(self, db: asyncpg.Connection, cli: Cli) -> None:
        job = await add(db)
        await register(db, "rust", {"pid": 7})
        await lock(db, job["id"], by="rust")
        done = await cli("unlock", "rust")
        assert done.returncode == 1
        assert "rust is alive: last heartbeat" in done.stderr
        assert (await existing(db, job["id"]))["locked_by"] == "rust"
        assert await cli.out("unlock", "rust", "--force") == "Released 1 job and 0 queues.\n"

    async def test_unlock_releases_jobs_and_queues(self, db: asyncpg.Connection, cli: Cli) -> None:
        for name in ("a", "a", "b"):
            await lock(db, (await add(db, queue_name=f"q-{name}"))["id"], by=name)
        done = await cli("unlock", "a", "b")
        assert done.returncode == 1
        assert done.stderr == (
            "Error: This would release 3 jobs and 2 queues. "
            "There is no terminal to confirm on: use --yes to proceed.\n"
        )
        with cli.terminal("unlock", "a", "b") as terminal:
            await terminal.until("This would release 3 jobs and 2 queues. Continue? [y/N]: ")
            terminal.type("n\n")
            assert await terminal.end() == 1
        assert await cli.out("unlock", "b") == "Released 1 job and 1 queue.\n"
        assert await cli.json("unlock", "-", "--yes", given="a\n") == {
            "workers": ["a"],
            "jobs": 2,
            "queues": 1,
            "missing": [],
        }
        locked = "select count(*) from graphile_worker._private_jobs where locked_at is not null"
        assert await db.fetchval(locked) == 0
        done = await cli("unlock", "unknown")
        assert (done.returncode, done.stderr) == (
            1,
            "There is no worker 'unknown': it has no heartbeat and no locks.\n",
        )

    async def test_unlocking_a_live_worker_needs_force(self, db: asyncpg.Connection, cli: Cli) -> None:
        await register(
            db, "alive", {"language": "python", "state": "ready", "lease": {"seconds": 38, "fast": 8}}
        )
        await lock(db, (await add(db))["id"], by="alive")
        done = await cli("unlock", "alive")
        assert (done.returncode, "Stop it first; if it is stopped, use --force." in done.stderr) == (1, True)
        assert await cli.out("unlock", "alive", "--force") == "Released 1 job and 0 queues.\n"


class TestSweep:
    async def test_sweep_releases_jobs_of_a_dead_worker(self, db: asyncpg.Connection, cli: Cli) -> None:
        dead = {"language": "python", "lease": {"seconds": 1, "fast": 1}, "died_at": "2020-01-01T00:00:00Z"}
        await register(db, "dead", dead)
        job = await add(db, queue_name="q")
        await lock(db, job["id"], by="dead")
        [found] = await cli.json("sweep", "--dry-run")
        assert (found["worker"], found["jobs"], found["queues"]) == ("dead", [job["id"]], ["q"])
        assert (await existing(db, job["id"]))["locked_at"] is not None
        done = await cli("sweep", "--recovery-delay", "1h", "--refund")
        assert done.stderr == "1 worker is dead; 1 job was released.\n"
        assert done.stdout.split("\t")[0] == "dead"
        row = await existing(db, job["id"])
        assert (row["locked_at"], row["attempts"]) == (None, 0)
        assert (row["run_at"] - row["created_at"]).total_seconds() > 3500
        assert await cli.json("sweep") == []

    async def test_sweep_prints_the_watched_workers(self, db: asyncpg.Connection, cli: Cli) -> None:
        await register(db, "gone", {"language": "python", "lease": {"seconds": 1}})
        await register(db, "rust", {"pid": 7})
        done = await cli("sweep", "--json")
        assert done.stderr == "Watching the heartbeats of 1 worker for up to 1 s: gone\n"
        assert [recovered["worker"] for recovered in json.loads(done.stdout)] == ["gone"]

    async def test_invalid_sweep_arguments_are_rejected(self, cli: Cli) -> None:
        done = await cli("sweep", "--recovery-delay", "late")
        assert (done.returncode, "a number with a unit" in done.stderr) == (2, True)


class TestCleanup:
    async def test_cleanup_removes_queues_by_default(self, db: asyncpg.Connection, cli: Cli) -> None:
        await put_in_state(db, "failed", (await add(db, max_attempts=1))["id"])
        await db.execute("insert into graphile_worker._private_job_queues (queue_name) values ('empty')")
        await db.execute("insert into graphile_worker._private_tasks (identifier) values ('unused')")
        assert await cli.out("cleanup") == "Removed 0 jobs, 0 task identifiers and 1 queue.\n"
        assert await count(db) == 1
        kept = await cli.json("cleanup", "GC_TASK_IDENTIFIERS", "--keep", "unused")
        assert kept == {"jobs": 0, "task_identifiers": 0, "queues": 0}
        assert await cli.out("cleanup", "failed-jobs,task-identifiers") == (
            "Removed 1 job, 2 task identifiers and 0 queues.\n"
        )

    async def test_cleanup_keeps_tasks_of_live_workers(self, db: asyncpg.Connection, cli: Cli) -> None:
        lease = {"seconds": 38, "fast": 8}
        await register(db, "w", {"language": "python", "state": "ready", "lease": lease, "tasks": ["mine"]})
        await db.execute("insert into graphile_worker._private_tasks (identifier) values ('mine'), ('old')")
        assert (await cli.json("cleanup", "task-identifiers"))["task_identifiers"] == 1
        assert await db.fetchval("select identifier from graphile_worker._private_tasks") == "mine"

    async def test_cleanup_of_failed_jobs_needs_confirmation(self, db: asyncpg.Connection, cli: Cli) -> None:
        for _ in range(2):
            await put_in_state(db, "failed", (await add(db))["id"])
        done = await cli("cleanup", "DELETE_PERMAFAILED_JOBS")
        assert done.returncode == 1
        assert "This would remove 2 jobs that failed permanently." in done.stderr
        with cli.terminal("cleanup", "failed-jobs") as terminal:
            await terminal.until("This would remove 2 jobs that failed permanently. Continue? [y/N]: ")
            terminal.type("y\n")
            assert await terminal.end() == 0
        assert "Removed 2 jobs" in terminal.text

    async def test_unknown_cleanup_is_rejected(self, cli: Cli) -> None:
        done = await cli("cleanup", "everything")
        assert done.returncode == 2
        assert "Unknown cleanup 'everything': must be one of failed-jobs" in done.stderr


def pg_dump(dsn: str) -> str:
    import subprocess  # noqa: PLC0415

    command = [Binaries.from_extra().program("pg_dump"), "--schema-only", "--schema=graphile_worker", dsn]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "\n".join(line for line in text.splitlines() if not line.startswith(("\\", "--")))


class TestMigrate:
    async def test_migrate_installs_and_reports_steps(self, empty_database: str, tmp_path: Path) -> None:
        cli = Cli(empty_database, tmp_path)
        done = await cli("migrate", "--check")
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith(
            "Schema graphile_worker is not up to date. graphile-worker migrate would:\n"
            "create the schema graphile_worker\ninstall revision 20 of Graphile Worker\n"
        )
        assert (await cli("migrate", "--check", "--json")).returncode == 1
        out = await cli.out("migrate")
        assert out.startswith("Done:\ncreate the schema")
        assert out.endswith("Schema graphile_worker is up to date\n")
        assert await cli.out("migrate", "--check") == "Schema graphile_worker is up to date\n"
        assert await cli.json("migrate") == {"schema": "graphile_worker", "up_to_date": True, "steps": []}
        assert await cli.out("migrate", "--sql") == "-- Nothing to do.\n"

    async def test_migrate_sql_can_be_run_by_psql(self, databases: Databases, tmp_path: Path) -> None:
        async with databases.fresh(empty=True) as by_script, databases.fresh() as by_command:
            cli = Cli(by_script, tmp_path)
            script = await cli.out("migrate", "--sql")
            connection = await asyncpg.connect(by_script)
            assert await connection.fetchval("select to_regnamespace('graphile_worker')") is None
            await connection.execute(script)
            migrations = "select id, name from graphile_worker._private_python_migrations order by id"
            rows = await connection.fetch(migrations)
            other = await asyncpg.connect(by_command)
            assert rows == await other.fetch(migrations)
            await other.close()
            await connection.close()
            assert await cli.out("migrate", "--check") == "Schema graphile_worker is up to date\n"
            assert await asyncio.to_thread(pg_dump, by_script) == await asyncio.to_thread(pg_dump, by_command)

    async def test_indexes_are_built_first_on_a_schema_in_use(self, db: asyncpg.Connection, cli: Cli) -> None:
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

    async def test_migrate_sql_quotes_an_unusual_schema_name(
        self, empty_database: str, tmp_path: Path
    ) -> None:
        cli = Cli(empty_database, tmp_path)
        name = 'o\'dd "name"'
        script = await cli.out("migrate", "--sql", "-s", name)
        connection = await asyncpg.connect(empty_database)
        await connection.execute(script)
        assert not (await migrate(connection, Schema(name))).changed
        await connection.close()

    async def test_foreign_schema_is_not_adopted(self, db: asyncpg.Connection, cli: Cli) -> None:
        await db.execute("insert into graphile_worker.migrations (id, breaking) values (21, true)")
        for flags in ([], ["--check"], ["--sql"]):
            done = await cli("migrate", *flags)
            assert (done.returncode, "Upgrade graphile-worker." in done.stderr) == (1, True)

    async def test_invalid_migrate_arguments_are_rejected(self, cli: Cli) -> None:
        done = await cli("migrate", "--check", "--sql")
        assert (done.returncode, "cannot be combined" in done.stderr) == (2, True)


async def test_connection_flags_may_precede_the_verb(cli: Cli, database: str) -> None:
    del cli.environment["DATABASE_URL"]
    assert "No database was specified." in (await cli("stats")).stderr
    assert await cli.out("-c", database, "stats", "--json") == await cli.out(
        "stats", "-c", database, "--json"
    )
