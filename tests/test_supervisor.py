"""Several worker processes, and new ones for new code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import psutil
import pytest

from graphile_worker import JobSpec, WorkerUtils
from graphile_worker.testing import Databases
from support.jobs import add, count
from support.programs import Program, program
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMMAND = str(Path(sys.executable).with_name("graphile-worker"))
SLOW = r"""\
import asyncio, os, sys
async def slow(payload):
    sys.stdout.write(f"begun {os.getpid()}\n")
    try:
        while isinstance(payload, str) and not os.path.exists(payload):
            await asyncio.sleep(0.02)  # until there is such a file: how long that takes is up to the test
        await asyncio.sleep(0 if isinstance(payload, str) else payload)
    except asyncio.CancelledError:
        sys.stdout.write(f"cancelled {os.getpid()}\n")
        raise
    sys.stdout.write(f"ended {os.getpid()}\n")
"""
VERSION = "import sys\nasync def version(payload):\n    sys.stdout.write('version {}\\n')\n"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/slow.py").write_text(SLOW)
    (tmp_path / "tasks/version.py").write_text(VERSION.format(1))
    return tmp_path


@asynccontextmanager
async def command(folder: Path, dsn: str, *arguments: str) -> AsyncIterator[Program]:
    environment = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "DATABASE_URL": dsn}
    async with program(
        COMMAND, *arguments, folder=folder, environment=environment, with_errors=True
    ) as running:
        try:
            yield running
        finally:
            for child in children(running):
                child.kill()


def children(running: Program) -> list[psutil.Process]:
    try:
        return psutil.Process(running.process.pid).children()
    except psutil.NoSuchProcess:
        return []


async def test_so_many_processes_share_the_work(db: asyncpg.Connection, database: str, folder: Path) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("slow", "go")] * 3)
    async with command(folder, database, "--processes", "3") as running:
        await running.until("begun", 3)
        (folder / "go").touch()
        await running.until("ended", 3)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM
    assert len({line for line in running.lines if line.startswith("begun")}) == 3, "each in its own"
    assert await count(db) == 0


async def test_a_signal_reaches_all_and_what_runs_gets_its_grace(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    await add(db, "slow", payload=0.5)
    await add(db, "slow", payload=1000)
    async with command(folder, database, "--processes", "2", "--shutdown-grace", "2s") as running:
        await running.until("begun", 2)
        running.send(signal.SIGINT)
        assert await running.end() == -signal.SIGINT
    assert sum(line.startswith("ended") for line in running.lines) == 1
    assert sum(line.startswith("cancelled") for line in running.lines) == 1
    assert await locked(db) == []


async def test_one_that_dies_is_started_again(db: asyncpg.Connection, database: str, folder: Path) -> None:
    async with command(folder, database, "--processes", "2") as running:
        await running.until("Worker connected", 2)
        children(running)[0].kill()
        await running.until("A worker process was killed by SIGKILL; another one in")
        await running.until("Worker connected", 3)
        await add(db, "version")
        await running.until("version 1")
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM


async def test_a_start_that_fails_is_not_repeated(database: str, folder: Path) -> None:
    (folder / "tasks/bad.py").write_text("import nowhere")
    async with command(folder, database, "--processes", "2") as running:
        assert await running.end() == 1
    assert "tasks/bad.py, line 1: ModuleNotFoundError" in running.text
    assert "another one" not in running.text


FIRST_FAILS = """\
import os, time
async def task(payload): ...
try:
    os.close(os.open("first", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    while not os.path.exists("go"):
        time.sleep(0.02)
else:
    raise OSError("not this time")
"""


async def test_a_failed_start_does_not_end_the_command_while_another_process_starts(
    database: str, folder: Path
) -> None:
    (folder / "tasks/task.py").write_text(FIRST_FAILS)
    async with command(folder, database, "--processes", "2") as running:
        await running.until("not this time")

        async def one_is_left() -> bool:
            return len(children(running)) == 1

        await until(one_is_left, "the process that could not start is gone")
        (folder / "go").touch()
        await running.until("A worker process ended with exit code 1; another one in")
        await running.until("Worker connected", 2)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM


async def test_a_signal_ends_a_command_whose_processes_have_not_started(database: str, folder: Path) -> None:
    (folder / "tasks/task.py").write_text(FIRST_FAILS)
    async with command(folder, database, "--processes", "2") as running:
        await running.until("not this time")
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM
    assert "another one" not in running.text


async def test_a_breaking_migration_ends_them_all_with_57(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    async with command(folder, database, "--processes", "2") as running:
        await running.until("Worker connected", 2)
        await db.execute("insert into graphile_worker.migrations (id, breaking) values (1000001, true)")
        await db.execute("select pg_notify('worker:migrate', $1)", '{"breaking": true}')
        assert await running.end() == 57


async def test_once_ends_when_all_have_ended(db: asyncpg.Connection, database: str, folder: Path) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("version")] * 20)
    async with command(folder, database, "--processes", "2", "--once") as running:
        assert await running.end() == 0
    assert running.text.count("version 1") == 20
    assert await count(db) == 0


async def test_workers_whose_supervisor_was_killed_finish_and_end(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    await add(db, "slow", payload=0.5)
    async with command(folder, database, "--processes", "2") as running:
        await running.until("begun")
        orphans = children(running)
        running.send(signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, orphans, 60)
        assert alive == []
        await running.end()
    assert any(line.startswith("ended") for line in running.lines)
    assert await locked(db) == []


async def test_so_do_those_that_run_what_there_is(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("slow", 1)] * 400)
    async with command(folder, database, "--processes", "2", "--once") as running:
        await running.until("begun", 2)
        orphans = children(running)
        running.send(signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, orphans, 60)
        assert alive == []
    assert await count(db) > 200
    assert await locked(db) == []


class TestWatch:
    async def test_new_code_takes_jobs_at_once_while_the_old_finishes_its_own(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        await add(db, "slow", payload="go")
        async with command(folder, database, "--watch", "-j", "2") as running:
            await running.until("begun")
            (folder / "tasks/version.py").write_text(VERSION.format(2))
            await running.until("version.py changed")
            await running.until("Worker connected", 2)
            await running.until("There is newer code: finishing what runs")
            await add(db, "version")
            await running.until("version 2")
            assert not any(line.startswith("ended") for line in running.lines), "the old one is not done"
            (folder / "go").touch()
            await running.until("ended")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM
        assert "version 1" not in running.text
        assert "cancelled" not in running.text
        assert await count(db) == 0

    async def test_code_that_does_not_load_is_reported_and_the_old_goes_on(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with command(folder, database, "--watch") as running:
            await running.until("Worker connected")
            (folder / "tasks/version.py").write_text("def version(payload:")
            await running.until("tasks/version.py, line 1: SyntaxError")
            await running.until("The new code does not start; the old one goes on")
            await add(db, "version")
            await running.until("version 1")
            (folder / "tasks/version.py").write_text(VERSION.format(3))
            await running.until("There is newer code: finishing what runs")
            await add(db, "version")
            await running.until("version 3")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    async def test_code_that_does_not_load_at_the_start_is_waited_for(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "tasks/version.py").write_text("def version(payload:")
        async with command(folder, database, "--watch") as running:
            await running.until("The new code does not start; waiting for a change")
            (folder / "tasks/version.py").write_text(VERSION.format(4))
            await running.until("Worker connected")
            await add(db, "version")
            await running.until("version 4")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    async def test_files_that_are_replaced_and_folders_made_anew_are_still_seen(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        async def save(number: int) -> None:
            (tmp_path / "new").write_text(VERSION.format(number))
            (tmp_path / "new").rename(tmp_path / "tasks.py")

        await save(1)
        async with command(tmp_path, database, "--watch") as running:
            await running.until("Worker connected")
            for number in (2, 3, 4):
                await save(number)
                await running.until("There is newer code: finishing what runs", number - 1)
                await add(db, "version")
                await running.until(f"version {number}")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    async def test_code_that_hangs_is_given_up_at_the_next_change(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with command(folder, database, "--watch") as running:
            await running.until("Worker connected")
            (folder / "tasks/version.py").write_text(
                "print('hangs', flush=True)\nimport time\ntime.sleep(1000)"
            )
            await running.until("hangs")
            (folder / "tasks/version.py").write_text(VERSION.format(5))
            await running.until("There is newer code: finishing what runs")
            await add(db, "version")
            await running.until("version 5")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM


async def test_the_third_signal_kills_what_does_not_listen(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    (folder / "tasks/deaf.py").write_text(
        "import signal, time\n"
        "async def deaf(payload):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('does not care', flush=True))\n"
        "    print('hears nothing', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    await add(db, "deaf")
    async with command(folder, database, "--processes", "2") as running:
        await running.until("hears nothing")
        for number in (1, 2):  # one after the other: two at once would be one
            running.send(signal.SIGTERM)
            await running.until("does not care", number)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM
