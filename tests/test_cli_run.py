"""Workers run from the command line, as people run them."""

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
    print("begun", os.getpid(), flush=True)
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


class TestRunning:
    @pytest.mark.parametrize("verb", [[], ["run"]])
    async def test_it_runs_the_tasks_of_the_folder_until_it_is_told_to_stop(
        self, db: asyncpg.Connection, database: str, folder: Path, verb: list[str]
    ) -> None:
        async with worker(folder, database, *verb) as running:
            await running.until("Worker connected, and looking for jobs of: hello, slow")
            await add(db, "hello", payload={"name": "Ann"})
            await running.until("Hello, Ann")
            await running.until("Completed job")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM
        assert await count(db) == 0

    def test_once_runs_what_there_is(self, database: str, folder: Path) -> None:
        async def prepare() -> None:
            connection = await asyncpg.connect(database)
            await add(connection, "hello", payload={"name": "Ann"})
            await connection.close()

        asyncio.run(prepare())
        done = command(folder, "-c", database, "--once")
        assert (done.returncode, done.stdout) == (0, "Hello, Ann\n")
        assert "Completed job" in done.stderr

    async def test_a_module_can_have_the_tasks(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        (tmp_path / "shop.py").write_text("tasks = {'greet': lambda payload: print('Hi,', payload)}\n")
        await add(db, "greet", payload="Bo")
        done = await asyncio.to_thread(command, tmp_path, "run", "shop:tasks", "--once", "-c", database)
        assert (done.returncode, done.stdout) == (0, "Hi, Bo\n"), done.stderr

    async def test_jobs_is_the_concurrency(self, db: asyncpg.Connection, database: str, folder: Path) -> None:
        for _ in range(3):
            await add(db, "slow", payload=60)
        async with worker(folder, database, "-j", "3", "--shutdown-grace", "0s") as running:
            await running.until("begun", 3)
            running.send(signal.SIGTERM)
            await running.end()
        assert await locked(db) == []

    async def test_log_lines_can_be_json(self, db: asyncpg.Connection, database: str, folder: Path) -> None:
        job = await add(db, "hello", payload={}, max_attempts=1)
        done = await asyncio.to_thread(
            command, folder, "-c", database, "--once", "--log-format", "json", "--log-level", "error"
        )
        [line] = done.stderr.splitlines()
        entry = json.loads(line)
        assert (entry["level"], entry["job_id"], entry["task_identifier"]) == ("error", job["id"], "hello")
        assert "KeyError: 'name'" in entry["error"]

    async def test_the_crontab_beside_the_tasks_is_read(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "crontab").write_text("* * * * * hello ?id=often\n")
        (folder / "other").write_text("* * * * * hello ?id=other\n")
        known = "select identifier from graphile_worker._private_known_crontabs order by identifier"
        for more, expected in ([], ["often"]), (["--crontab", "other"], ["often", "other"]):
            async with worker(folder, database, *more):

                async def has_them(expected: list[str] = expected) -> bool:
                    return [row["identifier"] for row in await db.fetch(known)] == expected

                await until(has_them, "the items are known")

    async def test_the_crontab_beside_the_folder_of_the_tasks_comes_before_the_one_here(
        self, db: asyncpg.Connection, database: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        here = tmp_path_factory.mktemp("here")
        (here / "crontab").write_text("* * * * * hello ?id=here\n")
        known = "select identifier from graphile_worker._private_known_crontabs order by identifier"

        async def some_are_known() -> bool:
            return bool(await db.fetch(known))

        for expected in ("here", "beside"):
            await db.execute("delete from graphile_worker._private_known_crontabs")
            async with worker(here, database, "--tasks", str(folder / "tasks")) as running:
                where = folder if expected == "beside" else Path()
                await running.until(f"The crontab is {where / 'crontab'}")
                await until(some_are_known, "the items are known")
            assert [row["identifier"] for row in await db.fetch(known)] == [expected]
            (folder / "crontab").write_text("* * * * * hello ?id=beside\n")

    async def test_a_crontab_that_was_asked_for_must_be_there_and_good(
        self, database: str, folder: Path
    ) -> None:
        done = await asyncio.to_thread(command, folder, "-c", database, "--crontab", "nowhere")
        assert done.returncode == 1
        assert "The crontab 'nowhere' cannot be read" in done.stderr
        (folder / "crontab").write_text("* * * * hello\n60 * * * * hello\n")
        done = await asyncio.to_thread(command, folder, "-c", database)
        assert done.returncode == 1
        assert "crontab:1:1: '* * * * hello' is too short; expected five fields" in done.stderr
        assert "crontab:2:1: the minute '60' is too large" in done.stderr


STUBBORN = "import time\ndef stubborn(payload):\n    print('begun', flush=True)\n    time.sleep(600)\n"
BREAKING = """
    insert into graphile_worker.migrations (id, breaking) values (1000001, true);
    select pg_notify('worker:migrate', '{"migrationNumber": 1000001, "breaking": true}')"""


class TestExitCodes:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    async def test_it_dies_of_the_signal_that_stopped_it(
        self, database: str, folder: Path, number: signal.Signals
    ) -> None:
        async with worker(folder, database) as running:
            await running.until("Worker connected")
            running.send(number)
            assert await running.end() == -number
        assert "Traceback" not in running.text

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    async def test_a_thread_that_does_not_end_does_not_keep_the_process(
        self, db: asyncpg.Connection, database: str, folder: Path, number: signal.Signals
    ) -> None:
        """Others take its jobs, so it must not go on with them."""
        (folder / "tasks/stubborn.py").write_text(STUBBORN)
        async with worker(folder, database, "--shutdown-grace", "10ms") as running:
            await running.until("Worker connected")
            await add(db, "stubborn")
            await running.until("begun")
            running.send(number)
            await running.until("The worker stopped before the outcome of 1 of its jobs was recorded")
            assert await running.end() in {-number, 1}

    async def test_it_says_what_the_next_signal_would_do(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "tasks/stubborn.py").write_text(STUBBORN)
        async with worker(folder, database, "--shutdown-grace", "1h") as running:
            await running.until("Worker connected")
            await add(db, "stubborn")
            await running.until("begun")
            running.send(signal.SIGINT)
            await running.until("SIGINT: stopping; running jobs have 3600.0 s, or until the next signal")
            running.send(signal.SIGINT)
            await running.until(
                "SIGINT: stopping; running jobs have 0.0 s; the next signal kills this process"
            )
            running.send(signal.SIGINT)
            assert await running.end() == -signal.SIGINT

    async def test_a_breaking_migration_ends_it_with_57(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with worker(folder, database) as running:
            await running.until("Worker connected")
            await db.execute(BREAKING)
            assert await running.end() == 57
        assert "Traceback" not in running.text

    async def test_also_if_a_thread_does_not_end(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "tasks/stubborn.py").write_text(STUBBORN)
        async with worker(folder, database, "--shutdown-grace", "10ms") as running:
            await running.until("Worker connected")
            await add(db, "stubborn")
            await running.until("begun")
            await db.execute(BREAKING)
            await running.until("Waiting for jobs that cannot be interrupted: 1")
            assert await running.end() == 57

    def test_to_begin_on_such_a_schema_is_an_error(self, empty_database: str, folder: Path) -> None:
        assert command(folder, "-c", empty_database, "--schema-only").returncode == 0

        async def break_it() -> None:
            connection = await asyncpg.connect(empty_database)
            await connection.execute(
                "insert into graphile_worker.migrations (id, breaking) values (1000001, true)"
            )
            await connection.close()

        asyncio.run(break_it())
        done = command(folder, "-c", empty_database, "--once")
        assert done.returncode == 1
        assert done.stderr.startswith("Error: ")


async def test_the_readme_word_for_word(database: str, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    [task] = re.findall(r"`tasks/hello.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    [start, add_a_job] = re.findall(r"^\$ (.* postgresql://localhost/mine.*)$", text, re.MULTILINE)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/hello.py").write_text(task)
    if not shutil.which("psql"):
        pytest.skip("there is no psql")
    start, add_a_job = (line.replace("postgresql://localhost/mine", database) for line in (start, add_a_job))
    _, *arguments = shlex.split(start)
    async with program(
        COMMAND, *arguments, folder=tmp_path, environment=environment(), with_errors=True
    ) as running:
        await running.until("Worker connected")
        await asyncio.to_thread(subprocess.run, shlex.split(add_a_job), check=True, capture_output=True)
        await running.until("Hello, Bobby Tables")
        running.send(signal.SIGINT)
        assert await running.end() == -signal.SIGINT


def test_the_page_on_the_command_line_has_every_setting_and_flag() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    for setting in SETTINGS:
        assert f"`{setting.name}`" in text
        assert not setting.flags or f"`{setting.flags[0]}`" in text


MISTAKES = [
    (["-c", "postgresql://localhost:1/x"], 1, "Cannot reach the database"),
    (["--tasks", "nowhere"], 1, "nowhere does not exist. Make that folder"),
    (["--once", "--watch"], 2, "--once and --watch cannot be combined."),
    (["--schema-only", "--watch"], 2, "--watch and --schema-only cannot be combined."),
    (["--once", "--schema-only"], 2, "--once and --schema-only cannot be combined."),
    (["--jbos", "3"], 2, "Did you mean '--jobs'?"),
    (["--concurrency", "3"], 2, "Did you mean '--jobs'?"),
    (["run", "--concurrency=3"], 2, "Did you mean '--jobs'?"),
    (["-j", "0"], 2, "it must be an integer from 1 to 100,000."),
    (["--poll-interval", "soon"], 2, "it must be milliseconds, or a number with a unit"),
    (["shop.jobs:app"], 2, "Did you mean: graphile-worker run shop.jobs:app?"),
    (["lsit"], 2, "There is no command 'lsit'. Did you mean list?"),
    (["--once", "config"], 2, "--once is about running a worker; it does nothing with config."),
    (["--tasks", "tasks/hello.txt"], 1, "hello.txt does not exist"),
    (
        ["run", "shop:tasks", "--tasks", "tasks"],
        2,
        "by shop:tasks or by --tasks, not by both.",
    ),
    (["-j", "3", "list"], 2, "--jobs is about running a worker; it does nothing with list."),
    (["list", "-j", "3"], 2, "No such option '-j'"),
    (["--cleanup", "EVERYTHING"], 2, "There is no cleanup 'EVERYTHING'. There are: DELETE_PERMAFAILED_JOBS"),
    (["-C", "nowhere.toml"], 1, "nowhere.toml cannot be read: No such file or directory."),
    (["run", "shop:tasks"], 1, "There is no module shop."),
]


@pytest.mark.parametrize(("arguments", "code", "says"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_a_sentence_and_no_traceback(
    folder: Path, database: str, arguments: list[str], code: int, says: str
) -> None:
    done = command(folder, *arguments, DATABASE_URL=database)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_file_that_does_not_load_stops_the_start(database: str, folder: Path) -> None:
    (folder / "tasks/bad.py").write_text("\nimport nowhere\n")
    done = await asyncio.to_thread(command, folder, "-c", database)
    assert (done.returncode, done.stderr) == (
        1,
        "Error: tasks/bad.py, line 2: ModuleNotFoundError: No module named 'nowhere'\n",
    )


async def test_cleanup_removes_and_says_how_much(db: asyncpg.Connection, database: str, folder: Path) -> None:
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
    assert [row["identifier"] for row in left] == ["hello"], "the names of our own tasks stay"


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


def test_the_help_of_every_command_fits_a_screen_and_has_an_example(tmp_path: Path) -> None:
    for verb in ([], *([name] for name in root.commands)):
        text = command(tmp_path, *verb, "--help").stdout
        assert re.search(r"^  Examples?:", text, re.MULTILINE), verb
        # There are more commands than fit one screen; what each has, does.
        assert len(text.splitlines()) <= (42 if verb else 55), verb
        assert max(map(len, text.splitlines())) <= 80, verb


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_it(tmp_path: Path, shell: str) -> None:
    script = command(tmp_path, "completion", shell).stdout
    [variable] = set(re.findall(r"(_\w+)=(?:bash|zsh|fish)_complete", script))
    word = "--po" if shell == "fish" else "1"
    asked = {variable: f"{shell}_complete", "COMP_WORDS": "graphile-worker --po", "COMP_CWORD": word}
    assert "--poll-interval" in command(tmp_path, **asked).stdout


def test_shells_can_complete_verbs_and_their_values(tmp_path: Path) -> None:
    for words, number, found in (
        ("graphile-worker retr", "1", "retry"),
        ("graphile-worker retry --sta", "2", "--state"),
        ("graphile-worker retry --state f", "3", "failed"),
        ("graphile-worker add x --key-mode u", "4", "unsafe_dedupe"),
    ):
        asked = {"_GRAPHILE_WORKER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
        assert found in command(tmp_path, **asked).stdout, words


class TestHealth:
    @pytest.fixture
    def port(self) -> Iterator[str]:
        """Kept for whoever may use an address again, as a server may; nobody else is given it meanwhile."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", 0))
            yield str(probe.getsockname()[1])

    async def test_a_worker_is_asked_at_its_address(self, folder: Path, database: str, port: str) -> None:
        async with worker(folder, database, "--health", port) as running:
            await running.until("Worker connected")  # and in a moment it is ready

            async def is_ready() -> bool:
                async with worker(folder, database, "health", "--health", port) as asked:
                    return await asked.end() == 0 and "ready, 0 of 1 slots busy" in asked.text

            await until(is_ready, "it is ready")
            async with worker(folder, database, "--health", port, "health", "--live", "--json") as asked:
                assert await asked.end() == 0
            assert json.loads(asked.text)["live"] is True
        async with worker(folder, database, "health", "--health", port) as asked:
            assert await asked.end() == 1
        assert f"No worker answers at 127.0.0.1:{port}" in asked.text

    async def test_or_the_database_knows_of_the_workers_of_this_machine(
        self, folder: Path, database: str
    ) -> None:
        async with worker(folder, database, "--schema-only") as installed:
            await installed.end()
        async with worker(folder, database, "health") as asked:
            assert await asked.end() == 1
        assert "No worker of this machine has a heartbeat" in asked.text
        async with worker(folder, database, GRAPHILE_WORKER_HEARTBEAT_INTERVAL="200ms") as running:
            await running.until("Worker connected")

            async def healthy() -> bool:
                async with worker(folder, database, "health", "--any-host") as asked:
                    return await asked.end() == 0 and ": ready, last heard" in asked.text

            await until(healthy, "it is ready")
            async with worker(folder, database, "health", "--json") as asked:
                assert await asked.end() == 0
            [found] = json.loads(asked.text)
            assert found["state"] == "ready"

    @pytest.mark.parametrize("flags", [["--processes", "2"], ["--watch"]])
    async def test_one_address_is_for_one_process(
        self, folder: Path, database: str, flags: list[str]
    ) -> None:
        async with worker(folder, database, "--health", "8080", *flags) as refused:
            assert await refused.end() == 2
        assert "--health is about one process" in refused.text
