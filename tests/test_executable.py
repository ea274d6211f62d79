"""Tasks that are programs."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker import Drained, WorkerUtils, run_once
from graphile_worker.executable import Executable
from graphile_worker.testing import Databases
from support.jobs import existing
from support.programs import lives
from support.waiting import until
from support.workers import Heard, locked, running

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def script(folder: Path, text: str, name: str = "job.sh") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


async def test_it_gets_the_job_in_its_environment_and_the_payload_on_its_input(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    script(folder, f"env | grep ^GRAPHILE_WORKER_ | sort > {folder}/../env; cat > {folder}/../input")
    run_at = datetime(2020, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    async with WorkerUtils(database) as utils:
        job = await utils.add_job(
            "job", {"a": ["ü", 1]}, job_key="k", priority=-3, max_attempts=7, run_at=run_at
        )
        keyless = await utils.add_job("job")
    assert await run_once(task_directory=folder, dsn=database) == Drained(2, 0)
    assert keyless.id != job.id
    seen = (folder.parent / "env").read_text()
    assert "GRAPHILE_WORKER_JOB_KEY" not in seen, "that of the last one, which has no key"
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


async def test_what_it_prints_is_logged_line_by_line(
    database: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "graphile_worker")
    script(folder, "printf 'one\\ntw'; sleep 0.05; printf 'o\\nthree'; echo oh no >&2")
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")
    await run_once(task_directory=folder, dsn=database)
    said = [(r.levelname, r.message) for r in caplog.records if getattr(r, "job_id", None) == job.id]
    assert sorted(said)[:1] == [("ERROR", "oh no")]
    assert [text for level, text in said if level == "INFO"][:3] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit 3", "Process exited with code 3"),
        ("echo first >&2; echo second >&2; exit 1", "Process exited with code 1: first\nsecond"),
        ("kill -9 $$", "Process was killed by SIGKILL"),
        ("yes error | head -n 5000 >&2; exit 1", "error\nerror"),
    ],
)
async def test_its_exit_code_and_the_end_of_its_complaints_are_the_last_error(
    db: asyncpg.Connection, database: str, folder: Path, text: str, says: str
) -> None:
    script(folder, text)
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job", max_attempts=1)
    assert await run_once(task_directory=folder, dsn=database) == Drained(0, 1)
    error = (await existing(db, job.id))["last_error"]
    assert says in error
    assert len(error) < 2200


async def test_a_program_that_cannot_be_started_fails_the_job(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    path = folder / "job"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")
    await run_once(task_directory=folder, dsn=database)
    assert "cannot be run: No such file or directory." in (await existing(db, job.id))["last_error"]


async def test_it_need_not_read_its_input(database: str, folder: Path) -> None:
    script(folder, "exit 0")
    async with WorkerUtils(database) as utils:
        await utils.add_job("job", "x" * 1_000_000)
    assert await run_once(task_directory=folder, dsn=database) == Drained(1, 0)


async def test_at_shutdown_it_is_killed_with_all_that_it_started_and_runs_again(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    pids = folder.parent / "pids"
    script(
        folder, f"trap '' TERM; sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait; sleep 1000"
    )
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")

    async def started() -> bool:
        return pids.exists()

    async with running({"job": Executable(folder / "job.sh")}, database, heard=Heard()) as runner:
        await until(started, "the program runs")
        await runner.stop(grace=0)
    numbers = [int(number) for number in pids.read_text().split()]

    async def gone() -> bool:
        return not any(lives(number) for number in numbers)

    await until(gone, "the whole group is gone")
    row = await existing(db, job.id)
    assert (row["locked_by"], row["attempts"]) == (None, 0)


async def test_what_it_started_is_killed_also_if_it_goes_quietly_itself(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    pid = folder.parent / "pid"
    child = f"trap '' TERM; echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000"
    script(folder, f"trap 'exit 3' TERM\nsh -c \"{child.replace('$', chr(92) + '$')}\" &\nwait; wait")
    async with WorkerUtils(database) as utils:
        await utils.add_job("job")

    async def started() -> bool:
        return pid.exists()

    async with running({"job": Executable(folder / "job.sh")}, database, heard=Heard()) as runner:
        await until(started, "it has started something")
        await runner.stop(grace=0)

    async def gone() -> bool:
        return not lives(int(pid.read_text()))

    await until(gone, "what it started is gone")
    assert await locked(db) == []


async def test_a_payload_that_is_no_text_for_python_reaches_it_all_the_same(
    db: asyncpg.Connection, database: str, folder: Path
) -> None:
    script(folder, f"cat > {folder}/../input")
    await db.execute("select graphile_worker.add_job('job', $1::text::json)", '"\\ud800 \\u0000"')
    assert await run_once(task_directory=folder, dsn=database) == Drained(1, 0)
    assert (folder.parent / "input").read_text() == '{"payload": "\\ud800 \\u0000"}'


async def test_after_its_time_it_is_killed(db: asyncpg.Connection, database: str, folder: Path) -> None:
    path = script(folder, "sleep 1000")
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("job")
    async with asyncio.timeout(20):
        await run_once({"job": Executable(path, longest=0.2)}, database)
    assert "was killed after 0.2 s." in (await existing(db, job.id))["last_error"]


async def test_something_left_in_the_background_does_not_keep_the_job(database: str, folder: Path) -> None:
    script(folder, "sleep 30 & exit 0")
    async with WorkerUtils(database) as utils:
        await utils.add_job("job")
    async with asyncio.timeout(15):
        assert await run_once(task_directory=folder, dsn=database) == Drained(1, 0)
