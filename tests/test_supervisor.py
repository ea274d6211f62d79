"""Supervision of worker processes: restarts, signals, and new code with `--watch`."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import psutil
import pytest

from graphile_worker import JobSpec, WorkerUtils
from graphile_worker.testing import Databases
from support.jobs import add, count
from support.supervising import children, command
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW = r"""\
import asyncio, os, sys
async def slow(payload):
    sys.stdout.write(f"started {os.getpid()}\n")
    try:
        while isinstance(payload, str) and not os.path.exists(payload):
            await asyncio.sleep(0.02)  # Until the test creates the file.
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


async def test_worker_processes_share_the_jobs(db: asyncpg.Connection, database: str, folder: Path) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("slow", "go")] * 3)
    async with command(folder, database, "--processes", "3") as running:
        await running.until("started", 3)
        (folder / "go").touch()
        await running.until("ended", 3)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM
    assert len({line for line in running.lines if line.startswith("started")}) == 3, (
        "each job must run in another process"
    )
    assert await count(db) == 0


async def test_signal_stops_all_processes_with_grace(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    await add(db, "slow", payload=0.5)
    await add(db, "slow", payload=1000)
    async with command(folder, database, "--processes", "2", "--shutdown-grace", "2s") as running:
        await running.until("started", 2)
        running.send(signal.SIGINT)
        assert await running.end() == -signal.SIGINT
    assert sum(line.startswith("ended") for line in running.lines) == 1
    assert sum(line.startswith("cancelled") for line in running.lines) == 1
    assert await locked(db) == []


async def test_killed_process_is_restarted(db: asyncpg.Connection, database: str, folder: Path) -> None:
    async with command(folder, database, "--processes", "2") as running:
        await running.until("Worker connected", 2)
        children(running)[0].kill()
        await running.until("killed by SIGKILL; restarting in")
        await running.until("Worker connected", 3)
        await add(db, "version")
        await running.until("version 1")
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM


@pytest.mark.slow
async def test_failed_start_ends_the_command(database: str, folder: Path) -> None:
    (folder / "tasks/bad.py").write_text("import nowhere")
    async with command(folder, database, "--processes", "2") as running:
        assert await running.end() == 1
    assert "tasks/bad.py, line 1: ModuleNotFoundError" in running.text
    assert "restarting" not in running.text


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


@pytest.mark.slow
async def test_failed_start_is_retried_if_another_process_starts(database: str, folder: Path) -> None:
    (folder / "tasks/task.py").write_text(FIRST_FAILS)
    async with command(folder, database, "--processes", "2") as running:
        await running.until("not this time")

        async def one_process_is_left() -> bool:
            return len(children(running)) == 1

        await until(one_process_is_left, "the process that failed to start has ended")
        (folder / "go").touch()
        await running.until("exit code 1; restarting in")
        await running.until("Worker connected", 2)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM


@pytest.mark.slow
async def test_signal_ends_the_command_during_the_start(database: str, folder: Path) -> None:
    (folder / "tasks/task.py").write_text(FIRST_FAILS)
    async with command(folder, database, "--processes", "2") as running:
        await running.until("not this time")
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM
    assert "restarting" not in running.text


@pytest.mark.slow
async def test_breaking_migration_exits_with_57(db: asyncpg.Connection, database: str, folder: Path) -> None:
    async with command(folder, database, "--processes", "2") as running:
        await running.until("Worker connected", 2)
        await db.execute("insert into graphile_worker.migrations (id, breaking) values (1000001, true)")
        await db.execute("select pg_notify('worker:migrate', $1)", '{"breaking": true}')
        assert await running.end() == 57


async def test_once_ends_when_all_processes_have_ended(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("version")] * 20)
    async with command(folder, database, "--processes", "2", "--once") as running:
        assert await running.end() == 0
    assert running.text.count("version 1") == 20
    assert await count(db) == 0


async def test_orphaned_workers_finish_and_exit(db: asyncpg.Connection, database: str, folder: Path) -> None:
    await add(db, "slow", payload=0.5)
    async with command(folder, database, "--processes", "2") as running:
        await running.until("started")
        orphans = children(running)
        running.send(signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, orphans, 60)
        assert alive == []
        await running.end()
    assert any(line.startswith("ended") for line in running.lines)
    assert await locked(db) == []


@pytest.mark.slow
async def test_orphaned_workers_with_once_finish_and_exit(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    async with WorkerUtils(database) as utils:
        await utils.add_jobs([JobSpec("slow", 1)] * 400)
    async with command(folder, database, "--processes", "2", "--once") as running:
        await running.until("started", 2)
        orphans = children(running)
        running.send(signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, orphans, 60)
        assert alive == []
    assert await count(db) > 200
    assert await locked(db) == []


class TestWatch:
    async def test_new_code_starts_while_old_code_finishes_its_jobs(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        await add(db, "slow", payload="go")
        async with command(folder, database, "--watch", "-j", "2") as running:
            await running.until("started")
            (folder / "tasks/version.py").write_text(VERSION.format(2))
            await running.until("version.py changed")
            await running.until("Worker connected", 2)
            await running.until("A new worker process has started")
            await add(db, "version")
            await running.until("version 2")
            assert not any(line.startswith("ended") for line in running.lines), "the old job is still running"
            (folder / "go").touch()
            await running.until("ended")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM
        assert "version 1" not in running.text
        assert "cancelled" not in running.text
        assert await count(db) == 0

    @pytest.mark.slow
    async def test_old_code_keeps_running_if_new_code_does_not_load(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with command(folder, database, "--watch") as running:
            await running.until("Worker connected")
            (folder / "tasks/version.py").write_text("def version(payload:")
            await running.until("tasks/version.py, line 1: SyntaxError")
            await running.until("the old code keeps running")
            await add(db, "version")
            await running.until("version 1")
            (folder / "tasks/version.py").write_text(VERSION.format(3))
            await running.until("A new worker process has started")
            await add(db, "version")
            await running.until("version 3")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    @pytest.mark.slow
    async def test_watch_waits_for_a_change_if_code_does_not_load_at_start(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        (folder / "tasks/version.py").write_text("def version(payload:")
        async with command(folder, database, "--watch") as running:
            await running.until("waiting for a change")
            (folder / "tasks/version.py").write_text(VERSION.format(4))
            await running.until("Worker connected")
            await add(db, "version")
            await running.until("version 4")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    @pytest.mark.slow
    async def test_replaced_files_and_recreated_folders_are_watched(
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
                await running.until("A new worker process has started", number - 1)
                await add(db, "version")
                await running.until(f"version {number}")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    @pytest.mark.slow
    async def test_hanging_code_is_stopped_at_the_next_change(
        self, db: asyncpg.Connection, database: str, folder: Path
    ) -> None:
        async with command(folder, database, "--watch") as running:
            await running.until("Worker connected")
            (folder / "tasks/version.py").write_text(
                "print('hangs', flush=True)\nimport time\ntime.sleep(1000)"
            )
            await running.until("hangs")
            (folder / "tasks/version.py").write_text(VERSION.format(5))
            await running.until("A new worker process has started")
            await add(db, "version")
            await running.until("version 5")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM


@pytest.mark.slow
async def test_third_signal_kills_processes(db: asyncpg.Connection, database: str, folder: Path) -> None:
    (folder / "tasks/endless.py").write_text(
        "import signal, time\n"
        "async def endless(payload):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('ignored', flush=True))\n"
        "    print('running', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    await add(db, "endless")
    async with command(folder, database, "--processes", "2") as running:
        await running.until("running")
        for number in (1, 2):  # One after the other, because two signals at once would be merged.
            running.send(signal.SIGTERM)
            await running.until("ignored", number)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM


@pytest.fixture
def port() -> Iterator[int]:
    """A free port. It stays bound, so other programs do not get it, but a server may reuse the address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


async def request(port: int, path: str) -> tuple[int, dict[str, Any]]:
    def send() -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    return await asyncio.to_thread(send)


async def until_answer(port: int, path: str, status: int, state: str) -> dict[str, Any]:
    """Wait until the supervisor answers with this status and state, and return the answer."""
    answers: list[dict[str, Any]] = []

    async def found() -> bool:
        try:
            answered, answer = await request(port, path)
        except ConnectionRefusedError:
            return False
        answers.append(answer)
        return (answered, answer["state"]) == (status, state)

    await until(found, f"{path} answers {status} {state}")
    return answers[-1]


class TestHealth:
    async def test_supervisor_serves_the_health_of_all_processes_on_one_port(
        self, database: str, folder: Path, port: int
    ) -> None:
        async with command(folder, database, "--processes", "2", "-j", "3", "--health", str(port)) as running:
            health = await until_answer(port, "/ready", 200, "ready")
            assert (health["processes"], health["concurrency"], health["reason"]) == (2, 6, None)
            pids = {worker["pid"] for worker in health["workers"]}
            assert pids == {child.pid for child in children(running)}
            assert len({worker["worker_id"] for worker in health["workers"]}) == 2
            assert (await request(port, "/live"))[0] == 200
            assert (await request(port, "/nowhere"))[0] == 404
            async with command(folder, database, "health", "--health", str(port)) as check:
                assert await check.end() == 0
            assert check.text.count(": ready, 0 of 3 slots busy.") == 2

            stopped, killed = children(running)
            stopped.suspend()
            health = await until_answer(port, "/live", 503, "silent")
            assert f"1 of 2 processes are ready. {stopped.pid}: The process has not" in health["reason"]
            stopped.resume()
            await until_answer(port, "/live", 200, "ready")

            killed.kill()
            await running.until("killed by SIGKILL; restarting in")
            health = await until_answer(port, "/ready", 200, "ready")
            assert killed.pid not in {worker["pid"] for worker in health["workers"]}
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM

    async def test_port_in_use_ends_the_command_before_a_process_starts(
        self, database: str, folder: Path
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with command(folder, database, "--processes", "2", "--health", str(port)) as running:
                assert await running.end() == 1
        assert f"Cannot listen on the health address 127.0.0.1:{port}" in running.text
        assert "Worker connected" not in running.text

    @pytest.mark.slow
    async def test_port_stays_open_while_new_code_replaces_old_code(
        self, database: str, folder: Path, port: int
    ) -> None:
        async with command(folder, database, "--watch", "--health", str(port)) as running:
            [old] = (await until_answer(port, "/ready", 200, "ready"))["workers"]
            (folder / "tasks/version.py").write_text(VERSION.format(2))
            await running.until("Worker connected", 2)

            async def is_new() -> bool:
                _, health = await request(port, "/ready")
                return [worker["pid"] for worker in health["workers"]] not in ([], [old["pid"]])

            await until(is_new, "the new process is reported")
            running.send(signal.SIGTERM)
            assert await running.end() == -signal.SIGTERM
