"""A project to begin with, and the worker for those who write it."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from graphile_worker.cli import logs
from graphile_worker.testing import Databases
from support.commands import COMMAND
from support.postgres import ROOT
from support.programs import program

FILES = {"jobs.py", "crontab", "graphile-worker.toml", "test_jobs.py"}


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def environment(**more: str) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", **more}


def run(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**more), check=False, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    done = run(tmp_path, COMMAND, "init", "shop")
    assert done.returncode == 0, done.stderr
    return tmp_path / "shop"


class TestInit:
    def test_it_writes_a_project_and_says_what_is_next(self, tmp_path: Path) -> None:
        done = run(tmp_path, COMMAND, "init", "my shop")
        assert (done.returncode, done.stderr) == (0, "")
        assert {path.name for path in (tmp_path / "my shop").iterdir()} == FILES
        assert "\n  cd 'my shop'\n  graphile-worker dev " in done.stdout

    def test_here(self, tmp_path: Path) -> None:
        done = run(tmp_path, COMMAND, "init")
        assert {path.name for path in tmp_path.iterdir()} == FILES
        assert "cd " not in done.stdout

    def test_it_overwrites_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "crontab").write_text("mine")
        done = run(tmp_path, COMMAND, "init")
        assert done.returncode == 1
        assert f"crontab is in {tmp_path} already, so nothing was written." in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["crontab"]
        assert (tmp_path / "crontab").read_text() == "mine"

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run(tmp_path, COMMAND, "init", "file/shop")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr

    def test_its_tests_pass(self, project: Path) -> None:
        done = run(
            project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout

    def test_its_crontab_is_one(self, project: Path) -> None:
        assert run(project, COMMAND, "cron", "check", "crontab").returncode == 0

    def test_its_code_is_neat(self, project: Path) -> None:
        ruff, mypy = ([sys.executable, "-m", name] for name in ("ruff", "mypy"))
        for command in (
            [*ruff, "check", "--isolated", "--no-cache"],
            [*ruff, "format", "--check", "--isolated"],
        ):
            done = run(project, *command, "--line-length", "110", ".")
            assert done.returncode == 0, done.stdout
        done = run(project, *mypy, "--config-file", "", "--cache-dir", os.devnull, "jobs.py")
        assert done.returncode == 0, done.stdout


class TestDev:
    async def test_the_project_works_at_once_and_takes_changes(
        self, project: Path, short_folder: Path
    ) -> None:
        dsn = f"embedded:{short_folder}"
        async with program(
            COMMAND, "dev", folder=project, environment=environment(DATABASE_URL=dsn), with_errors=True
        ) as running:
            await running.until("Worker connected, and looking for jobs of: hello, report, tidy_up")
            [shown] = re.findall(r'psql "(.*)"', running.text)
            db = await asyncpg.connect(shown)
            try:
                await db.execute("select graphile_worker.add_job('hello', '{\"name\": \"Ann\"}')")
                await running.until("Hello, Ann")
                added = await asyncio.to_thread(
                    run, project, COMMAND, "add", "report", '{"day": "2030-01-01"}', DATABASE_URL=dsn
                )
                assert added.returncode == 0, added.stderr
                await running.until("The report of 2030-01-01 is written")

                text = (project / "jobs.py").read_text()
                (project / "jobs.py").write_text(text.replace("Hello,", "Good morning,"))
                await running.until("Worker connected", 2)
                await running.until("There is newer code")
                await db.execute("select graphile_worker.add_job('hello', '{\"name\": \"Bo\"}')")
                await running.until("Good morning, Bo")
                (project / "crontab").write_text("0 0 1 1 * hello {name: 'the year'}\n")
                await running.until("crontab changed")
                await running.until("Worker connected", 3)
            finally:
                await db.close()
            running.send(signal.SIGINT)
            assert await running.end() == -signal.SIGINT, running.text
            assert "Traceback" not in running.text

    async def test_a_database_that_is_named_is_used(self, project: Path, database: str) -> None:
        (project / "graphile-worker.toml").write_text(f'app = "jobs:app"\nconnection = "{database}"\n')
        async with program(
            COMMAND, "dev", folder=project, environment=environment(), with_errors=True
        ) as running:
            await running.until("Worker connected")
            assert "The database is that of graphile-worker.toml" in running.text
            assert f'psql "{database}"' in running.text

    async def test_the_apps_own_database_holds(self, tmp_path: Path, database: str) -> None:
        (tmp_path / "shop.py").write_text(
            f"from graphile_worker import App\napp = App(dsn={database!r})\n"
            "@app.task\nasync def hello() -> None: ...\n"
        )
        async with program(
            COMMAND, "dev", "shop:app", folder=tmp_path, environment=environment(), with_errors=True
        ) as running:
            await running.until("Worker connected, and looking for jobs of: hello")
            assert "The database is that of shop:app" in running.text

    def test_without_tasks(self, tmp_path: Path) -> None:
        done = run(tmp_path, COMMAND, "dev")
        assert done.returncode == 1
        assert (
            "There are no tasks here, for tasks does not exist. Begin with: graphile-worker init"
            in done.stderr
        )
        assert "Traceback" not in done.stderr


class TestTheAppOfTheSettings:
    async def test_it_is_run_where_none_is_named(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(run, project, COMMAND, "--once", DATABASE_URL=database)
        assert (done.returncode, "Nothing is left to run" in done.stderr) == (0, True)

    async def test_a_folder_that_is_named_comes_first(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(
            run, project, COMMAND, "--once", "--tasks", "nowhere", DATABASE_URL=database
        )
        assert "nowhere does not exist" in done.stderr

    async def test_its_recurring_tasks_are_shown(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(run, project, COMMAND, "cron", DATABASE_URL=database)
        assert "tidy_up" in done.stdout


class TestPrettyLog:
    def record(self, level: int, text: str, **extra: object) -> logging.LogRecord:
        return logging.makeLogRecord(
            {"levelno": level, "levelname": logging.getLevelName(level), "msg": text, **extra}
        )

    def test_in_colours(self) -> None:
        formatter = logs.PrettyFormatter()
        line = formatter.format(self.record(logging.WARNING, "Look"))
        assert re.fullmatch(r"\x1b\[2m[\d:.]+\x1b\[0m \x1b\[33m\x1b\[1mWARNING\x1b\[0m .*Look", line)
        of_task = formatter.format(self.record(logging.INFO, "said", job_id=7, task_identifier="hello"))
        assert "\x1b[36m[hello 7] \x1b[0msaid" in of_task

    def test_plain_where_nobody_sees_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        made = logs._formatter("pretty", with_process=True)
        assert re.fullmatch(r"[\d:.]+ INFO  Look", made.format(self.record(logging.INFO, "Look")))


def test_the_starters_stand_in_the_package() -> None:
    folder = ROOT / "src" / "graphile_worker" / "cli" / "starter"
    assert {path.name.removesuffix(".txt") for path in folder.iterdir()} == FILES
