"""Executable files as tasks."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker import RunSummary, WorkerUtils, run_once
from graphile_worker._tasks.executable import Executable
from graphile_worker.testing import Databases
from support.jobs import existing
from support.programs import is_alive
from support.waiting import until
from support.workers import EventRecorder, locked, running

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def write_script(folder: Path, text: str, name: str = "job.sh") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


async def test_program_gets_the_job_in_environment_variables_and_the_payload_on_stdin(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    write_script(folder, f"env | grep ^GRAPHILE_WORKER_ | sort > {folder}/../env; cat > {folder}/../input")
    run_at = datetime(2020, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    async with WorkerUtils(database) as utils:
        job = await utils.add_job(
            "job", {"a": ["ü", 1]}, job_key="k", priority=-3, max_attempts=7, run_at=run_at
        )
        keyless = await utils.add_job("job")
    assert await run_once(task_directory=folder, dsn=database) == RunSummary(2, 0)
    assert keyless.id != job.id
    seen = (folder.parent / "env").read_text()
    assert "GRAPHILE_WORKER_JOB_KEY" not in seen, "the last job has no key"
    await db.execute(
        "select graphile_worker.add_job('job', '{\"a\": [\"ü\", 1]}', job_key := 'k', priority := -3)"
    )
    await run_once(task_directory=folder, dsn=database)
    lines = dict(line.split("=", 1) for line in (folder.parent / "env").read_text().splitlines())
    assert lines.pop("GRAPHILE_WORKER_JOB_RUN_AT").endswith("Z")
    assert int(lines.pop("GRAPHILE_WORKER_JOB_ID")) > keyless.id
    assert lines == {
        "GRAPHILE_WORKER_PAYLOAD_FORMAT": "json",
        "GRAPHILE_WORKER_TASK_IDENTIFIER": "job",
        "GRAPHILE_WORKER_JOB_KEY": "k",
        "GRAPHILE_WORKER_JOB_ATTEMPTS": "1",
        "GRAPHILE_WORKER_JOB_MAX_ATTEMPTS": "25",
        "GRAPHILE_WORKER_JOB_PRIORITY": "-3",
    }
    assert (folder.parent / "input").read_text() == '{"payload":{"a":["ü",1]}}'


async def test_program_output_is_logged_line_by_line(
    database: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "graphile_worker")
    write_script(folder, "printf 'one\\ntw'; sleep 0.05; printf 'o\\nthree'; echo oh no >&2")
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")
    await run_once(task_directory=folder, dsn=database)
    logged = [(r.levelname, r.message) for r in caplog.records if getattr(r, "job_id", None) == job.id]
    assert sorted(logged)[:1] == [("ERROR", "oh no")]
    assert [text for level, text in logged if level == "INFO"][:3] == ["one", "two", "three"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", "Process exited with code 3"),
        ("echo first >&2; echo second >&2; exit 1", "Process exited with code 1: first\nsecond"),
        ("kill -9 $$", "Process was killed by SIGKILL"),
        ("yes error | head -n 5000 >&2; exit 1", "error\nerror"),
    ],
)
async def test_exit_code_and_end_of_stderr_are_the_last_error(
    db: asyncpg.Connection, database: str, folder: Path, text: str, message: str
) -> None:
    write_script(folder, text)
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job", max_attempts=1)
    assert await run_once(task_directory=folder, dsn=database) == RunSummary(0, 1)
    error = (await existing(db, job.id))["last_error"]
    assert message in error
    assert len(error) < 2200


async def test_program_that_cannot_start_fails_the_job(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    path = folder / "job"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")
    await run_once(task_directory=folder, dsn=database)
    assert "No such file or directory" in (await existing(db, job.id))["last_error"]


async def test_program_may_ignore_its_stdin(database: str, folder: Path) -> None:
    write_script(folder, "exit 0")
    async with WorkerUtils(database) as utils:
        await utils.add_job("job", "x" * 1_000_000)
    assert await run_once(task_directory=folder, dsn=database) == RunSummary(1, 0)


async def test_shutdown_kills_the_process_group_and_releases_the_job(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    pids = folder.parent / "pids"
    write_script(
        folder, f"trap '' TERM; sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait; sleep 1000"
    )
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")

    async def started() -> bool:
        return pids.exists()

    async with running({"job": Executable(folder / "job.sh")}, database, recorder=EventRecorder()) as runner:
        await until(started, "the program runs")
        await runner.stop(grace=0)
    numbers = [int(number) for number in pids.read_text().split()]

    async def gone() -> bool:
        return not any(is_alive(number) for number in numbers)

    await until(gone, "the whole process group is gone")
    row = await existing(db, job.id)
    assert (row["locked_by"], row["attempts"]) == (None, 0)


async def test_shutdown_kills_child_processes_even_if_the_program_exits(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    pid = folder.parent / "pid"
    child = f"trap '' TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000"
    write_script(folder, f"trap 'exit 3' TERM\nsh -c \"{child.replace('$', chr(92) + '$')}\" &\nwait; wait")
    async with WorkerUtils(database) as utils:
        await utils.add_job("job")

    async def started() -> bool:
        return pid.exists()

    async with running({"job": Executable(folder / "job.sh")}, database, recorder=EventRecorder()) as runner:
        await until(started, "the program has started a child process")
        await runner.stop(grace=0)

    async def gone() -> bool:
        return not is_alive(int(pid.read_text()))

    await until(gone, "the child process is gone")
    assert await locked(db) == []


async def test_payload_that_python_cannot_store_as_text_reaches_the_program(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    write_script(folder, f"cat > {folder}/../input")
    await db.execute("select graphile_worker.add_job('job', $1::text::json)", '"\\ud800 \\u0000"')
    assert await run_once(task_directory=folder, dsn=database) == RunSummary(1, 0)
    assert (folder.parent / "input").read_text() == '{"payload": "\\ud800 \\u0000"}'


async def test_program_is_killed_after_its_timeout(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    path = write_script(folder, "sleep 1000")
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")
    async with asyncio.timeout(20):
        await run_once({"job": Executable(path, timeout=0.2)}, database)
    assert "killed after 0.2 s" in (await existing(db, job.id))["last_error"]


async def test_background_process_does_not_delay_the_end_of_the_job(database: str, folder: Path) -> None:
    write_script(folder, "sleep 30 & exit 0")
    async with WorkerUtils(database) as utils:
        await utils.add_job("job")
    async with asyncio.timeout(15):
        assert await run_once(task_directory=folder, dsn=database) == RunSummary(1, 0)
