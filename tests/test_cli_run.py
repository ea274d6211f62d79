"""The verb `run`: workers, exit codes, usage errors, helps, completion and health."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from click.testing import CliRunner

from graphile_worker.cli.command import root
from graphile_worker.cli.settings import SETTINGS
from graphile_worker.testing import Databases
from support.jobs import add, count
from support.postgres import ROOT
from support.programs import Program, program
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))
HELLO = "async def hello(payload):\n    print('Hello,', payload['name'], flush=True)\n"
SLOW = """
import asyncio, os, time
async def slow(payload):
    print("started", os.getpid(), flush=True)
    await asyncio.sleep(payload)
    print("ended", os.getpid(), flush=True)
"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/hello.py").write_text(HELLO)
    (tmp_path / "tasks/slow.py").write_text(SLOW)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", **more}


def command(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        check=False, capture_output=True, text=True, cwd=folder, env=environment(**more), timeout=60,
    )  # fmt: skip


@asynccontextmanager
async def worker(folder: Path, dsn: str, *arguments: str, **more: str) -> AsyncIterator[Program]:
    async with program(
        COMMAND, "-c", dsn, *arguments, folder=folder, environment=environment(**more), with_errors=True
    ) as running:
        yield running


class TestRun:
    @pytest.mark.parametrize("verb", [[], ["run"]])
    async def test_run_serves_the_tasks_folder_until_a_signal(
        self, db: asyncpg.Connection, database: str, folder: Path, verb: list[str]
    ) -> None:
        async with worker(folder, database, *verb) as running:
            await running.until("Worker connected; tasks: hello, slow")
            await add(db, "hello", payload={"name": "Ann"})
            await running.until("Hello, Ann")
            await running.until("Completed job")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM
        assert await count(db) == 0

    def test_once_runs_due_jobs_and_exits(self, database: str, folder: Path) -> None:
        async def prepare() -> None:
            connection = await asyncpg.connect(database)
            await add(connection, "hello", payload={"name": "Ann"})
            await connection.close()

        asyncio.run(prepare())
        done = command(folder, "-c", database, "--once")
        assert (done.returncode, done.stdout) == (0, "Hello, Ann\n")
        assert "Completed job" in done.stderr

    async def test_run_takes_tasks_from_a_module(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        (tmp_path / "shop.py").write_text("tasks = {'greet': lambda payload: print('Hi,', payload)}\n")
        await add(db, "greet", payload="Bo")
        done = await asyncio.to_thread(command, tmp_path, "run", "shop:tasks", "--once", "-c", database)
        assert (done.returncode, done.stdout) == (0, "Hi, Bo\n"), done.stderr

    async def test_jobs_flag_sets_concurrency(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        for _ in range(3):
            await add(db, "slow", payload=60)
        async with worker(folder, database, "-j", "3", "--shutdown-grace", "0s") as running:
            await running.until("started", 3)
            running.send(signal.SIGTERM)
            await running.end()
        assert await locked(db) == []

    async def test_json_log_lines_have_job_task_and_error(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        job = await add(db, "hello", payload={}, max_attempts=1)
        done = await asyncio.to_thread(
            command, folder, "-c", database, "--once", "--log-format", "json", "--log-level", "error"
        )
        [line] = done.stderr.splitlines()
        entry = json.loads(line)
        assert (entry["level"], entry["job_id"], entry["task_identifier"]) == ("error", job["id"], "hello")
        assert "KeyError: 'name'" in entry["error"]

    async def test_crontab_next_to_the_tasks_is_used(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "crontab").write_text("* * * * * hello ?id=often\n")
        (folder / "other").write_text("* * * * * hello ?id=other\n")
        known = "select identifier from graphile_worker._private_known_crontabs order by identifier"
        for more, expected in ([], ["often"]), (["--crontab", "other"], ["often", "other"]):
            async with worker(folder, database, *more):

                async def items_are_known(expected: list[str] = expected) -> bool:
                    return [row["identifier"] for row in await db.fetch(known)] == expected

                await until(items_are_known, "the items are known")

    async def test_crontab_next_to_the_tasks_folder_precedes_the_current_one(
        self, db: asyncpg.Connection, database: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        here = tmp_path_factory.mktemp("here")
        (here / "crontab").write_text("* * * * * hello ?id=here\n")
        known = "select identifier from graphile_worker._private_known_crontabs order by identifier"

        async def some_are_known() -> bool:
            return bool(await db.fetch(known))

        for expected in ("here", "next_to_tasks"):
            await db.execute("delete from graphile_worker._private_known_crontabs")
            async with worker(here, database, "--tasks", str(folder / "tasks")) as running:
                where = folder if expected == "next_to_tasks" else Path()
                await running.until(f"Using the crontab {where / 'crontab'}")
                await until(some_are_known, "the items are known")
            assert [row["identifier"] for row in await db.fetch(known)] == [expected]
            (folder / "crontab").write_text("* * * * * hello ?id=next_to_tasks\n")

    async def test_named_crontab_must_exist_and_be_valid(self, database: str, folder: Path) -> None:
        done = await asyncio.to_thread(command, folder, "-c", database, "--crontab", "nowhere")
        assert done.returncode == 1
        assert "The crontab 'nowhere' cannot be read" in done.stderr
        (folder / "crontab").write_text("* * * * hello\n60 * * * * hello\n")
        done = await asyncio.to_thread(command, folder, "-c", database)
        assert done.returncode == 1
        assert "crontab:1:1: '* * * * hello' is too short; expected five fields" in done.stderr
        assert "crontab:2:1: the minute '60' is too large" in done.stderr


ENDLESS = "import time\ndef endless(payload):\n    print('started', flush=True)\n    time.sleep(600)\n"
BREAKING = """
    insert into graphile_worker.migrations (id, breaking) values (1000001, true);
    select pg_notify('worker:migrate', '{"migrationNumber": 1000001, "breaking": true}')"""


class TestExitCodes:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    async def test_exit_by_the_signal_that_stopped_the_worker(
        self, database: str, folder: Path, number: signal.Signals
    ) -> None:
        async with worker(folder, database) as running:
            await running.until("Worker connected")
            running.send(number)
            assert await running.end() == -number
        assert "Traceback" not in running.text

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    async def test_endless_thread_does_not_keep_the_process(
        self, db: asyncpg.Connection, database: str, folder: Path, number: signal.Signals
    ) -> None:
        """Other workers run its jobs again, so the process must end."""
        (folder / "tasks/endless.py").write_text(ENDLESS)
        async with worker(folder, database, "--shutdown-grace", "10ms") as running:
            await running.until("Worker connected")
            await add(db, "endless")
            await running.until("started")
            running.send(number)
            await running.until("The worker stopped before it could record the outcomes of 1 job: ")
            assert await running.end() in {-number, 1}

    async def test_log_says_what_the_next_signal_does(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "tasks/endless.py").write_text(ENDLESS)
        async with worker(folder, database, "--shutdown-grace", "1h") as running:
            await running.until("Worker connected")
            await add(db, "endless")
            await running.until("started")
            running.send(signal.SIGINT)
            await running.until("SIGINT: stopping; running jobs have 3600.0 s, or until the next signal")
            running.send(signal.SIGINT)
            await running.until(
                "SIGINT: stopping; running jobs have 0.0 s; the next signal kills this process"
            )
            running.send(signal.SIGINT)
            assert await running.end() == -signal.SIGINT

    async def test_breaking_migration_exits_with_57(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with worker(folder, database) as running:
            await running.until("Worker connected")
            await db.execute(BREAKING)
            assert await running.end() == 57
        assert "Traceback" not in running.text

    @pytest.mark.slow
    async def test_breaking_migration_exits_with_57_despite_an_endless_thread(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "tasks/endless.py").write_text(ENDLESS)
        async with worker(folder, database, "--shutdown-grace", "10ms") as running:
            await running.until("Worker connected")
            await add(db, "endless")
            await running.until("started")
            await db.execute(BREAKING)
            await running.until("Waiting for jobs that cannot be interrupted: 1")
            assert await running.end() == 57

    def test_start_on_a_newer_schema_is_an_error(self, empty_database: str, folder: Path) -> None:
        assert command(folder, "-c", empty_database, "--schema-only").returncode == 0

        async def add_breaking_migration() -> None:
            connection = await asyncpg.connect(empty_database)
            await connection.execute(
                "insert into graphile_worker.migrations (id, breaking) values (1000001, true)"
            )
            await connection.close()

        asyncio.run(add_breaking_migration())
        done = command(folder, "-c", empty_database, "--once")
        assert done.returncode == 1
        assert done.stderr.startswith("Error: ")


async def test_command_line_page_example_runs_word_for_word(database: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "cli" / "index.md").read_text()
    [task] = re.findall(r"`tasks/hello.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    [start, add_job] = re.findall(r"^\$ (.* postgresql://localhost/mine.*)$", text, re.MULTILINE)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/hello.py").write_text(task)
    if not shutil.which("psql"):
        pytest.skip("needs psql")
    start, add_job = (line.replace("postgresql://localhost/mine", database) for line in (start, add_job))
    _, *arguments = shlex.split(start)
    async with program(
        COMMAND, *arguments, folder=tmp_path, environment=environment(), with_errors=True
    ) as running:
        await running.until("Worker connected")
        await asyncio.to_thread(subprocess.run, shlex.split(add_job), check=True, capture_output=True)
        await running.until("Hello, Bobby Tables")
        running.send(signal.SIGINT)
        assert await running.end() == -signal.SIGINT


def test_settings_page_lists_every_setting_flag_and_variable() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    table = text.partition("<!-- settings:begin -->")[2].partition("<!-- settings:end -->")[0]
    rows = [row.strip("|").split(" | ") for row in table.strip().splitlines()[2:]]
    assert [(name.strip(), flags.strip(), variable) for name, flags, variable, *_ in rows] == [
        (f"`{setting.name}`", ", ".join(f"`{flag}`" for flag in setting.flags), f"`{setting.environment}`")
        for setting in SETTINGS
    ]


USAGE_ERRORS = [
    (["-c", "postgresql://localhost:1/x"], 1, "Cannot reach the database"),
    (["--tasks", "nowhere"], 1, "nowhere does not exist"),
    (["--once", "--watch"], 2, "--once and --watch cannot be combined."),
    (["--schema-only", "--watch"], 2, "--watch and --schema-only cannot be combined."),
    (["--once", "--schema-only"], 2, "--once and --schema-only cannot be combined."),
    (["--jbos", "3"], 2, "Did you mean '--jobs'?"),
    (["--concurrency", "3"], 2, "Did you mean '--jobs'?"),
    (["run", "--concurrency=3"], 2, "Did you mean '--jobs'?"),
    (["-j", "0"], 2, "must be an integer from 1 to 100,000."),
    (["--poll-interval", "soon"], 2, "must be milliseconds, or a number with a unit"),
    (["shop.jobs:app"], 2, "Did you mean: graphile-worker run shop.jobs:app?"),
    (["lsit"], 2, "Unknown command 'lsit'. Did you mean list?"),
    (["--once", "config"], 2, "--once is an option for running a worker: it has no effect on config."),
    (["--tasks", "tasks/hello.txt"], 1, "hello.txt does not exist"),
    (
        ["run", "shop:tasks", "--tasks", "tasks"],
        2,
        "shop:tasks and --tasks cannot be combined",
    ),
    (["-j", "3", "list"], 2, "--jobs is an option for running a worker: it has no effect on list."),
    (["list", "-j", "3"], 2, "No such option '-j'"),
    (["--cleanup", "EVERYTHING"], 2, "Unknown cleanup 'EVERYTHING': must be one of DELETE_PERMAFAILED_JOBS"),
    (["-C", "nowhere.toml"], 1, "Cannot read nowhere.toml: No such file or directory."),
    (["run", "shop:tasks"], 1, "module shop"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("arguments", "code", "message"), USAGE_ERRORS, ids=lambda value: str(value)[:40])
def test_usage_error_is_a_sentence_without_traceback(
    folder: Path, database: str, arguments: list[str], code: int, message: str
) -> None:
    done = command(folder, *arguments, DATABASE_URL=database)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


async def test_task_file_that_does_not_load_stops_the_start(database: str, folder: Path) -> None:
    (folder / "tasks/bad.py").write_text("\nimport nowhere\n")
    done = await asyncio.to_thread(command, folder, "-c", database)
    assert (done.returncode, done.stderr) == (
        1,
        "Error: tasks/bad.py, line 2: ModuleNotFoundError: No module named 'nowhere'\n",
    )


async def test_cleanup_reports_what_it_removed(db: asyncpg.Connection, database: str, folder: Path) -> None:
    await add(db, "hello", queue_name="q", max_attempts=1)
    await db.execute("update graphile_worker._private_jobs set attempts = 1")
    await add(db, "unknown")
    await db.execute("delete from graphile_worker._private_jobs where attempts = 0")
    done = await asyncio.to_thread(
        command, folder, "-c", database,
        "--cleanup", "DELETE_PERMAFAILED_JOBS,GC_JOB_QUEUES", "--cleanup", "GC_TASK_IDENTIFIERS",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "Removed 1 job, 1 task identifier and 1 queue.\n")
    left = await db.fetch("select identifier from graphile_worker._private_tasks")
    assert [row["identifier"] for row in left] == ["hello"], "identifiers of the loaded tasks are kept"


async def test_list_prints_every_job_as_json(db: asyncpg.Connection, database: str, tmp_path: Path) -> None:
    nothing = await asyncio.to_thread(command, tmp_path, "-c", database, "list", "--json")
    assert json.loads(nothing.stdout) == []
    job = await add(
        db,
        "hello",
        payload={"n": 2**70},
        queue_name="q",
        priority=3,
        job_key="k",
        flags=["b", "a"],
        max_attempts=4,
    )
    await db.execute("select graphile_worker.add_job('x') from generate_series(1, 1500)")
    done = await asyncio.to_thread(command, tmp_path, "list", "--json", "-c", database)
    jobs: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(jobs) == 1501
    assert jobs[0] == {
        "id": job["id"],
        "task_identifier": "hello",
        "queue_name": "q",
        "state": "ready",
        "payload": {"n": 2**70},
        "priority": 3,
        "run_at": jobs[0]["run_at"],
        "attempts": 0,
        "max_attempts": 4,
        "last_error": None,
        "failed_at": None,
        "error_type": None,
        "key": "k",
        "locked_by": None,
        "locked_at": None,
        "flags": ["a", "b"],
        "revision": 0,
        "created_at": jobs[0]["created_at"],
        "updated_at": jobs[0]["updated_at"],
    }
    await db.execute("select graphile_worker.add_job('odd', $1::text::json)", '"\\ud800"')
    done = await asyncio.to_thread(command, tmp_path, "list", "--json", "-c", database)
    assert json.loads(done.stdout)[-1]["payload"] == "\ud800"
    plain = await asyncio.to_thread(command, tmp_path, "list", "-c", database)
    assert plain.stdout.splitlines()[0].split()[:2] == [str(job["id"]), "ready"]


def test_every_help_fits_a_screen_and_has_an_example() -> None:
    # In this process, as each command of its own would take most of a second.
    for verb in ([], *([name] for name in root.commands)):
        text = CliRunner().invoke(root, [*verb, "--help"], prog_name="graphile-worker", color=False).output
        assert re.search(r"^  Examples?:", text, re.MULTILINE), verb
        # The list of commands is longer than a screen; the help of each command is not.
        assert len(text.splitlines()) <= (42 if verb else len(root.commands) + 26), verb
        assert max(map(len, text.splitlines())) <= 80, verb


@pytest.mark.sample(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_asks_the_command_for_suggestions(tmp_path: Path, shell: str) -> None:
    script = command(tmp_path, "completion", shell).stdout
    [variable] = set(re.findall(r"(_\w+)=(?:bash|zsh|fish)_complete", script))
    word = "--po" if shell == "fish" else "1"
    request = {variable: f"{shell}_complete", "COMP_WORDS": "graphile-worker --po", "COMP_CWORD": word}
    assert "--poll-interval" in command(tmp_path, **request).stdout


def test_completion_suggests_verbs_flags_and_values(tmp_path: Path) -> None:
    for words, number, found in (
        ("graphile-worker retr", "1", "retry"),
        ("graphile-worker retry --sta", "2", "--state"),
        ("graphile-worker retry --state f", "3", "failed"),
        ("graphile-worker add x --key-mode u", "4", "unsafe_dedupe"),
    ):
        request = {"_GRAPHILE_WORKER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
        assert found in command(tmp_path, **request).stdout, words


class TestHealth:
    @pytest.fixture
    def port(self) -> Iterator[str]:
        """Reserve a port that a server with SO_REUSEADDR can bind, so that no other process gets it."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            yield str(probe.getsockname()[1])

    async def test_health_asks_the_worker_at_its_address(
        self, folder: Path, database: str, port: str
    ) -> None:
        async with worker(folder, database, "--health", port) as running:
            await running.until("Worker connected")  # it is ready soon after

            async def is_ready() -> bool:
                async with worker(folder, database, "health", "--health", port) as check:
                    return await check.end() == 0 and "ready, 0 of 1 slots busy" in check.text

            await until(is_ready, "the worker is ready")
            async with worker(folder, database, "--health", port, "health", "--live", "--json") as check:
                assert await check.end() == 0
            assert json.loads(check.text)["live"] is True
        async with worker(folder, database, "health", "--health", port) as check:
            assert await check.end() == 1
        assert f"No worker answers at 127.0.0.1:{port}" in check.text

    async def test_health_reads_workers_of_this_machine_from_the_database(
        self, folder: Path, database: str
    ) -> None:
        async with worker(folder, database, "--schema-only") as installed:
            await installed.end()
        async with worker(folder, database, "health") as check:
            assert await check.end() == 1
        assert "No worker on this machine has a heartbeat" in check.text
        async with worker(folder, database, GRAPHILE_WORKER_HEARTBEAT_INTERVAL="200ms") as running:
            await running.until("Worker connected")

            async def is_healthy() -> bool:
                async with worker(folder, database, "health", "--any-host") as check:
                    return await check.end() == 0 and ": ready, last heartbeat" in check.text

            await until(is_healthy, "the worker is ready")
            async with worker(folder, database, "health", "--json") as check:
                assert await check.end() == 0
            [found] = json.loads(check.text)
            assert found["state"] == "ready"
