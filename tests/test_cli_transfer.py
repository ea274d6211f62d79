"""The verbs `export` and `import`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest

from graphile_worker.testing import Databases
from support.commands import COMMAND, INTERRUPTED, Cli
from support.jobs import add, count, lock, put_in_state
from support.waiting import until

ALL_COLUMNS = """select job.id, payload::text, priority, run_at, attempts, max_attempts, last_error, key,
  flags, revision, created_at, updated_at, identifier, queue_name
from graphile_worker._private_jobs as job
join graphile_worker._private_tasks as task on task.id = job.task_id
left join graphile_worker._private_job_queues as queue on queue.id = job.job_queue_id order by job.id"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


async def varied_jobs(db: asyncpg.Connection) -> None:
    """Add jobs with every kind of value."""
    await add(db, "plain")
    await add(
        db, "full", payload={"ä": [1, 2.50, None]}, queue_name="q/ü", run_at=datetime(2040, 1, 1, tzinfo=UTC),
        max_attempts=3, job_key="k:1", priority=-7, flags=["b", "a"],
    )  # fmt: skip
    await put_in_state(db, "failed", (await add(db, "failed"))["id"])
    await put_in_state(db, "retrying", (await add(db, "retrying", queue_name="r"))["id"])
    odd = [
        '{ "b" : 1.10,\n\t"a":\r\n 123456789012345678901234567890, "b": "\\u0000\\ud800" }',
        '"text"', "null", "[]",
    ]  # fmt: skip
    for payload in odd:
        await db.execute("select graphile_worker.add_job('odd', $1::text::json)", payload)
    await db.execute(
        """update graphile_worker._private_jobs set run_at = 'infinity', revision = 3,
        last_error = E'line\\nline\\t"quoted" \\\\ \\x1b' where id = 5;
        update graphile_worker._private_jobs set run_at = '-infinity', flags = '{"x": {"y": 1}}' where id = 6;
        update graphile_worker._private_jobs set run_at = '20000-01-01 00:00:00.000001+00' where id = 7;
        set datestyle = 'SQL, DMY'; set timezone = 'Asia/Kolkata';"""
    )


class TestExportAndImport:
    async def test_export_and_import_preserve_every_column(
        self, db: asyncpg.Connection, cli: Cli, databases: Databases, tmp_path: Path
    ) -> None:
        await varied_jobs(db)
        done = await cli("export", "-o", "jobs.jsonl")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "Exported 8 jobs.\n")
        lines = (tmp_path / "jobs.jsonl").read_text().splitlines()
        assert len(lines) == 8
        assert json.loads(lines[1])["payload"] == {"ä": [1, 2.5, None]}
        async with databases.fresh() as dsn:
            other, other_cli = await asyncpg.connect(dsn), Cli(dsn, tmp_path)
            assert await other_cli.out("import", "jobs.jsonl") == "Imported 8 jobs.\n"
            without_breaks = str.maketrans("\n\r", "  ")
            query = ALL_COLUMNS.replace("run_at,", "run_at::text,")
            await other.execute("set datestyle = 'SQL, DMY'; set timezone = 'Asia/Kolkata';")
            before = [
                {**dict(row), "payload": row["payload"].translate(without_breaks)}
                for row in await db.fetch(query)
            ]
            assert [dict(row) for row in await other.fetch(query)] == before
            again = (await other_cli("export")).stdout
            assert again.splitlines() == lines, "the export of the import is the same"
            new = await add(other)
            assert new["id"] > 8, "new jobs get other ids"
            await other.close()

    async def test_filtered_export_can_be_imported(self, db: asyncpg.Connection, cli: Cli) -> None:
        await varied_jobs(db)
        exported = await cli.out("export", "--state", "failed")
        assert [json.loads(line)["task_identifier"] for line in exported.splitlines()] == ["failed"]
        await cli.out("remove", "--state", "failed")
        assert await cli.json("import", "-", given=exported) == {"imported": 1}
        assert await count(db) == 8
        assert (await cli.json("import", "-", given="")) == {"imported": 0}

    async def test_running_job_is_imported_without_lock(self, db: asyncpg.Connection, cli: Cli) -> None:
        await lock(db, (await add(db, queue_name="q"))["id"])
        exported = await cli.out("export")
        await cli.out("import", "-", "--new-ids", given=exported)
        [copy] = await cli.json("list", "--after", "1")
        assert (copy["locked_by"], copy["attempts"], copy["queue_name"]) == (None, 1, "q")

    async def test_import_notifies_workers(self, db: asyncpg.Connection, cli: Cli) -> None:
        exported = await cli.out("export", "-o", "-")
        assert exported == ""
        received: list[str] = []
        await db.add_listener("jobs:insert", lambda *arguments: received.append(str(arguments[3])))
        await cli.out(
            "import", "-", "--new-ids", given='{"task_identifier": "x"}\n\n{"task_identifier": "y"}\n'
        )
        await db.execute("select 1")
        assert [json.loads(text)["count"] for text in received] == [2]

    async def test_export_and_import_of_several_batches_lose_no_job(
        self, db: asyncpg.Connection, cli: Cli
    ) -> None:
        await db.execute("select graphile_worker.add_job('x') from generate_series(1, 2500)")
        exported = await cli.out("export")
        assert len(exported.splitlines()) == 2500
        await db.execute("delete from graphile_worker._private_jobs")
        assert await cli.json("import", "-", given=exported) == {"imported": 2500}
        assert await db.fetchval("select max(id) from graphile_worker._private_jobs") == 2500


class TestConcurrentImport:
    async def test_two_imports_of_one_file_import_it_once(self, db: asyncpg.Connection, cli: Cli) -> None:
        given = "\n".join(
            json.dumps({"id": n, "task_identifier": "x", "key": f"k{n}"}) for n in range(1, 3000)
        )
        first, second = await asyncio.gather(*(cli("import", "-", given=given) for _ in range(2)))
        assert sorted([first.returncode, second.returncode]) == [0, 1]
        assert "Nothing was imported" in first.stderr + second.stderr
        assert await count(db) == 2999

    async def test_interrupted_import_imports_nothing(
        self, db: asyncpg.Connection, cli: Cli, database: str, tmp_path: Path
    ) -> None:
        await db.execute(
            """create function wait() returns trigger language plpgsql as
            'begin perform pg_advisory_xact_lock(7); return new; end';
            create trigger wait before insert on graphile_worker._private_jobs for each row
            when (new.id = 2500) execute function wait()"""
        )
        (tmp_path / "jobs.jsonl").write_text(
            "\n".join(json.dumps({"id": n, "task_identifier": "x"}) for n in range(1, 5000))
        )
        holder = await asyncpg.connect(database)
        await holder.execute("select pg_advisory_lock(7)")

        async def is_waiting() -> bool:
            statement = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
            return bool(await db.fetchval(statement))

        with cli.terminal("import", "jobs.jsonl") as terminal:
            await until(is_waiting, "the third batch waits")
            await terminal.until("Import jobs: ")
            terminal.interrupt()
            assert await terminal.end() == INTERRUPTED
        await holder.close()
        assert "Traceback" not in terminal.text
        assert "Interrupted: nothing was imported." in terminal.text
        assert await count(db) == 0


class TestImportErrors:
    async def test_existing_jobs_are_not_imported_twice(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add(db)
        exported = await cli.out("export")
        done = await cli("import", "-", given=exported)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(
            "Error: Line 1: a job with the id 1 already exists. Nothing was imported."
        )
        assert "--new-ids" in done.stderr
        await cli.out("import", "-", "--new-ids", given=exported)
        assert await count(db) == 2

    async def test_existing_key_is_rejected(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add(db, job_key="k")
        given = '{"task_identifier": "x"}\n{"task_identifier": "x", "key": "k"}'
        done = await cli("import", "-", "--new-ids", given=given)
        assert done.returncode == 1
        assert "Line 2: a job with the key 'k' already exists. Nothing was imported." in done.stderr
        given = '{"task_identifier": "x", "key": "l"}\n{"task_identifier": "y", "key": "l"}'
        done = await cli("import", "-", "--new-ids", given=given)
        assert "Line 2: a job with the key 'l' already exists." in done.stderr
        assert await count(db) == 1, "all or nothing"

    async def test_import_is_all_or_nothing_over_many_batches(self, db: asyncpg.Connection, cli: Cli) -> None:
        lines = [json.dumps({"id": n, "task_identifier": "x"}) for n in range(1, 2500)]
        done = await cli("import", "-", given="\n".join([*lines, lines[3]]))
        assert "Line 2500: a job with the id 4 already exists." in done.stderr
        assert await count(db) == 0

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "Input data was truncated"),
            ('{"id": 2, "key": "\\ud800" "x"}', "key is not JSON"),
            ('{"id": 2, "task_identifier": "\\ud800"}', "PostgreSQL cannot store it as text"),
            ("[]", "Expected `object`, got `array`"),
            ("{}", "Object missing required field `task_identifier`"),
            ('{"id": 2, "task_identifier": ""}', "Line 2: task_identifier is ''"),
            ('{"task_identifier": "x"}', "Line 2: id is None; it must be an integer."),
            ('{"id": 2, "task_identifier": "x", "max_attempts": 0}', "Line 2: max_attempts is 0"),
            ('{"id": 2, "task_identifier": "x", "priority": 40000}', "Line 2: priority is 40000"),
            (
                '{"id": 2, "task_identifier": "x", "run_at": "soon"}',
                "Invalid input syntax for type timestamp",
            ),
            ('{"id": 2, "task_identifier": "x", "key": ""}', "Line 2: key is ''"),
        ],
    )
    async def test_invalid_line_is_rejected(
        self, db: asyncpg.Connection, cli: Cli, line: str, message: str
    ) -> None:
        done = await cli("import", "-", given=f'{{"id": 1, "task_identifier": "x"}}\n{line}\n')
        assert done.returncode == 1, done.stderr
        if "run_at" not in line:  # PostgreSQL parses it, for the whole batch
            assert "Line 2" in done.stderr
        assert message in done.stderr
        assert "Nothing was imported." in done.stderr
        assert "Traceback" not in done.stderr
        assert await count(db) == 0

    async def test_invalid_import_arguments_are_rejected(self, cli: Cli) -> None:
        done = await cli("import", "nowhere.jsonl")
        assert (done.returncode, "No such file or directory" in done.stderr) == (2, True)
        done = await cli("import")
        assert done.returncode == 2


async def test_export_file_appears_when_complete(db: asyncpg.Connection, cli: Cli, tmp_path: Path) -> None:
    await varied_jobs(db)
    await cli.out("export", "-o", "jobs.jsonl")
    complete = (tmp_path / "jobs.jsonl").read_bytes()
    assert complete
    done = await cli("export", "-o", "jobs.jsonl", "-s", "nosuch")
    assert done.returncode == 1
    assert "jobs.jsonl was not written" in done.stderr
    assert (tmp_path / "jobs.jsonl").read_bytes() == complete
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]
    done = await cli("export", "-o", "nowhere/jobs.jsonl")
    assert (done.returncode, "Cannot write nowhere/jobs.jsonl: No such file" in done.stderr) == (1, True)


class TestExportTargets:
    async def test_export_writes_into_a_named_pipe(
        self, db: asyncpg.Connection, cli: Cli, tmp_path: Path
    ) -> None:
        await add(db)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            await cli.out("export", "-o", "pipe")
            assert json.loads(os.read(reader, 65536))["id"] == 1
        finally:
            os.close(reader)
        assert pipe.is_fifo()

    async def test_export_through_a_symbolic_link_keeps_the_link(
        self, db: asyncpg.Connection, cli: Cli, tmp_path: Path
    ) -> None:
        await add(db)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "link").symlink_to(elsewhere / "jobs.jsonl")
        for _ in range(2):  # without and with an existing target
            await cli.out("export", "-o", "link")
            assert (tmp_path / "link").is_symlink()
            assert json.loads((elsewhere / "jobs.jsonl").read_text())["id"] == 1
        assert [path.name for path in elsewhere.iterdir()] == ["jobs.jsonl"]

    async def test_export_writes_to_a_file_descriptor(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add(db)
        assert json.loads(await cli.out("export", "-o", "/dev/fd/1"))["id"] == 1

    async def test_export_keeps_file_permissions(
        self, db: asyncpg.Connection, cli: Cli, tmp_path: Path
    ) -> None:
        await add(db)
        path = tmp_path / "jobs.jsonl"
        path.touch(mode=0o600)
        await cli.out("export", "-o", "jobs.jsonl")
        assert path.stat().st_mode & 0o777 == 0o600

    async def test_export_to_dev_stdout_does_not_truncate(self, db: asyncpg.Connection, cli: Cli) -> None:
        await add(db, "t")
        file = cli.folder / "all.jsonl"
        file.write_text("old\n")
        with file.open("ab") as appended:
            command = [COMMAND, "export", "-o", "/dev/stdout"]
            await asyncio.to_thread(
                subprocess.run,
                command,
                check=True,
                stdout=appended,
                stderr=subprocess.PIPE,
                env=cli.environment,
            )
        old, job = file.read_text().splitlines()
        assert (old, json.loads(job)["task_identifier"]) == ("old", "t")

    async def test_loop_of_symbolic_links_is_reported(self, cli: Cli) -> None:
        (cli.folder / "a").symlink_to("b")
        (cli.folder / "b").symlink_to("a")
        done = await cli("export", "-o", "a")
        assert (done.returncode, "Cannot write a: " in done.stderr) == (1, True)
        assert "Traceback" not in done.stderr

    async def test_two_exports_into_one_file_leave_one_complete_export(
        self, db: asyncpg.Connection, cli: Cli, database: str, tmp_path: Path
    ) -> None:
        for task in ("a", "b"):
            await add(db, task)
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("lock table graphile_worker._private_jobs in access exclusive mode")
            exports = [
                asyncio.create_task(cli("export", "--task", task, "-o", "jobs.jsonl")) for task in ("a", "b")
            ]

            async def both_wait() -> bool:
                in_database = "database = (select oid from pg_database where datname = current_database())"
                waiting = f"select count(*) from pg_locks where not granted and {in_database}"
                return int(await db.fetchval(waiting)) == 2

            await until(both_wait, "both have opened their files, and wait for jobs")
        await other.close()
        assert [done.returncode for done in await asyncio.gather(*exports)] == [0, 0]
        assert json.loads((tmp_path / "jobs.jsonl").read_text())["task_identifier"] in {"a", "b"}
        assert [path.name for path in tmp_path.iterdir()] == ["jobs.jsonl"]
