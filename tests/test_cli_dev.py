"""The verbs `init` and `dev`, adding jobs through an app, and log formats."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import asyncpg
import pytest

from graphile_worker._base.logs import ScopedLogger
from graphile_worker.cli import logs
from graphile_worker.embedded.binaries import ServerUser
from graphile_worker.testing import Databases
from support.commands import COMMAND
from support.jobs import add
from support.postgres import ROOT
from support.programs import program
from support.workers import Gate, running

FILES = {"jobs.py", "crontab", "graphile-worker.toml", "test_jobs.py"}


ERROR = """
import os, time

@app.task
async def fails(payload: object) -> None:
    helper()

def helper() -> None:
    raise ValueError("broken")

@app.task
async def blocks(payload: object) -> None:
    while not os.path.exists("go"):
        time.sleep(0.01)
"""


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
    def test_init_writes_a_project_and_next_steps(self, tmp_path: Path) -> None:
        done = run(tmp_path, COMMAND, "init", "my shop")
        assert (done.returncode, done.stderr) == (0, "")
        assert {path.name for path in (tmp_path / "my shop").iterdir()} == FILES
        assert "\n  cd 'my shop'\n  graphile-worker dev " in done.stdout

    def test_init_writes_into_the_current_folder_by_default(self, tmp_path: Path) -> None:
        done = run(tmp_path, COMMAND, "init")
        assert {path.name for path in tmp_path.iterdir()} == FILES
        assert "cd " not in done.stdout

    def test_init_overwrites_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "crontab").write_text("mine")
        done = run(tmp_path, COMMAND, "init")
        assert done.returncode == 1
        assert f"crontab already exists in {tmp_path}, so nothing was written." in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["crontab"]
        assert (tmp_path / "crontab").read_text() == "mine"

    def test_init_reports_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run(tmp_path, COMMAND, "init", "file/shop")
        assert (done.returncode, done.stderr) == (
            1,
            "Error: Cannot write to file/shop: Not a directory.\n",
        )
        done = run(tmp_path, COMMAND, "init", "file")
        assert (done.returncode, done.stderr) == (
            1,
            "Error: file is not a folder. Choose another one: graphile-worker init FOLDER\n",
        )

    def test_init_json_lists_folder_and_files(self, tmp_path: Path) -> None:
        done = json.loads(run(tmp_path, COMMAND, "init", "shop", "--json").stdout)
        assert done["folder"] == str(tmp_path / "shop")
        assert {Path(name).name for name in done["files"]} == FILES

    @pytest.mark.slow
    def test_each_project_has_its_own_queue(self, short_folder: Path) -> None:
        parent = short_folder.parent
        for name in ("one", "other"):
            assert run(parent, COMMAND, "init", name).returncode == 0
            assert run(parent / name, COMMAND, "migrate").returncode == 0
        added = run(parent / "one", COMMAND, "add", "hello", '{"name": "Ann"}')
        assert (added.returncode, added.stdout) == (0, "1\n")
        assert len(json.loads(run(parent / "one", COMMAND, "list", "--json").stdout)) == 1
        assert json.loads(run(parent / "other", COMMAND, "list", "--json").stdout) == []
        assert (parent / "one" / ".postgres" / ".gitignore").read_text() == "*\n"

    def test_server_data_is_elsewhere_if_the_project_is_unreachable(self, tmp_path: Path) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        run(closed, COMMAND, "init")
        connection = tomllib.loads((closed / "graphile-worker.toml").read_text())["connection"]
        assert f'"{connection}"' in (closed / "jobs.py").read_text()
        path = Path(connection.removeprefix("embedded:"))
        assert ServerUser.find().closed_folder_above((closed / path / "data").resolve()) is None
        assert ServerUser.find().drops_root is path.is_absolute()

    @pytest.mark.slow
    def test_starter_tests_pass(self, project: Path) -> None:
        done = run(
            project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("name", ["DATABASE_URL", "OTHER"])
    async def test_starter_app_and_command_use_the_same_database(
        self, project: Path, short_folder: Path, name: str
    ) -> None:
        dsn = f"embedded:{short_folder}"
        if name == "OTHER":  # neither the program nor the command gets the database from the environment
            for file in ("jobs.py", "graphile-worker.toml"):
                text = (project / file).read_text()
                (project / file).write_text(re.sub('embedded:[^"]+', dsn, text))
        assert run(project, COMMAND, "migrate", **{name: dsn}).returncode == 0
        program = 'from jobs import hello; hello.enqueue_sync(name="Ann")'
        added = run(project, sys.executable, "-c", program, **{name: dsn})
        assert (added.returncode, added.stderr) == (0, "")
        [job] = json.loads(run(project, COMMAND, "list", "--json", **{name: dsn}).stdout)
        assert job["payload"] == {"name": "Ann"}

    def test_starter_crontab_is_valid(self, project: Path) -> None:
        assert run(project, COMMAND, "cron", "check", "crontab").returncode == 0

    @pytest.mark.slow
    def test_starter_code_passes_the_linter(self, project: Path) -> None:
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
    async def test_starter_project_runs_and_restarts_on_changes(
        self, project: Path, short_folder: Path
    ) -> None:
        dsn = f"embedded:{short_folder}"
        async with program(
            COMMAND, "dev", folder=project, environment=environment(DATABASE_URL=dsn), with_errors=True
        ) as running:
            await running.until("Worker connected; tasks: hello, report, tidy_up")
            [shown] = re.findall(r'psql "(.*)"', running.text)
            db = await asyncpg.connect(shown)
            try:
                await db.execute("select graphile_worker.add_job('hello', '{\"name\": \"Ann\"}')")
                await running.until("Hello, Ann")
                added = await asyncio.to_thread(
                    run, project, COMMAND, "add", "report", '{"day": "2030-01-01"}', DATABASE_URL=dsn
                )
                assert added.returncode == 0, added.stderr
                await running.until("Wrote the report for 2030-01-01")

                text = (project / "jobs.py").read_text()
                (project / "jobs.py").write_text(text.replace("Hello,", "Good morning,"))
                await running.until("Worker connected", 2)
                await running.until("A new worker process has started")
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

    async def test_dev_uses_the_named_database(self, project: Path, database: str) -> None:
        for name in ("jobs.py", "graphile-worker.toml"):
            text = (project / name).read_text()
            (project / name).write_text(re.sub('embedded:[^"]+', database, text))
        async with program(
            COMMAND, "dev", folder=project, environment=environment(), with_errors=True
        ) as running:
            await running.until("Worker connected")
            assert "Database from graphile-worker.toml" in running.text
            assert f'psql "{database}"' in running.text

    async def test_dev_uses_the_database_of_the_app(self, tmp_path: Path, database: str) -> None:
        (tmp_path / "shop.py").write_text(
            f"from graphile_worker import App\napp = App(dsn={database!r})\n"
            "@app.task\nasync def hello() -> None: ...\n"
        )
        async with program(
            COMMAND, "dev", "shop:app", folder=tmp_path, environment=environment(), with_errors=True
        ) as running:
            await running.until("Worker connected; tasks: hello")
            assert "Database from shop:app" in running.text

    @pytest.mark.slow
    async def test_dev_runs_an_app_that_adds_a_job_on_import(self, tmp_path: Path, database: str) -> None:
        (tmp_path / "shop.py").write_text(
            f"from graphile_worker import App\napp = App(dsn={database!r})\n"
            "@app.task\nasync def hello() -> None: ...\n"
            "hello.enqueue_sync()\n"
        )
        async with program(
            COMMAND, "dev", "shop:app", folder=tmp_path, environment=environment(), with_errors=True
        ) as running:
            await running.until("Completed job")

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("named", [("shop:app",), ()], ids=["app", "folder"])
    async def test_dev_reports_failures_blocked_loop_and_unserved_jobs(
        self, tmp_path: Path, database: str, db: asyncpg.Connection, named: tuple[str, ...]
    ) -> None:
        if named:
            (tmp_path / "shop.py").write_text(
                f"from graphile_worker import App\napp = App(dsn={database!r})\n{ERROR}"
            )
        else:
            (tmp_path / "tasks.py").write_text(f"from graphile_worker import task as app\n{ERROR}")
            (tmp_path / "tasks.py").write_text((tmp_path / "tasks.py").read_text().replace("app.task", "app"))
        await add(db, "blokcs")
        async with program(
            COMMAND, "dev", *named,
            folder=tmp_path, environment=environment(DATABASE_URL=database), with_errors=True,
        ) as running:  # fmt: skip
            await running.until(
                "1 job is waiting for the task 'blokcs', which no Python worker has. Did you mean 'blocks'?"
            )
            await add(db, "fails")
            await running.until("ValueError: broken")
            await add(db, "blocks")
            await running.until("(blocks) is blocking the event loop")
            (tmp_path / "go").touch()
            await running.until("Completed job")
            running.send(signal.SIGINT)
            assert await running.end() == -signal.SIGINT, running.text
        text = running.text
        assert "(fails, " in text
        assert "in helper" in text
        assert "graphile_worker/_worker" not in text, "no frames of the library"
        assert text.count("blokcs") == 1, "the warning is logged once"

    @pytest.mark.slow
    async def test_jobs_served_by_another_worker_are_not_reported(
        self, tmp_path: Path, database: str, db: asyncpg.Connection
    ) -> None:
        gate = Gate()
        (tmp_path / "tasks.py").write_text("async def hello(payload): ...\n")
        async with running({"elsewhere": gate}, database):
            for _ in range(3):
                await add(db, "elsewhere")
            await add(db, "xyz")
            async with program(
                COMMAND,
                "dev",
                folder=tmp_path,
                environment=environment(DATABASE_URL=database),
                with_errors=True,
            ) as dev:
                await dev.until("1 job is waiting for the task 'xyz'")
                assert "'elsewhere'" not in dev.text

    def test_dev_without_tasks_suggests_init(self, tmp_path: Path) -> None:
        done = run(tmp_path, COMMAND, "dev")
        assert done.returncode == 1
        assert "tasks does not exist. Create a project: graphile-worker init" in done.stderr
        assert "Traceback" not in done.stderr


class TestAppSetting:
    async def test_run_uses_the_app_setting(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(run, project, COMMAND, "--once", DATABASE_URL=database)
        assert (done.returncode, "No jobs left to run" in done.stderr) == (0, True)

    async def test_tasks_flag_overrides_the_app_setting(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(
            run, project, COMMAND, "--once", "--tasks", "nowhere", DATABASE_URL=database
        )
        assert "nowhere does not exist" in done.stderr

    async def test_cron_lists_tasks_of_the_app_setting(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(run, project, COMMAND, "cron", DATABASE_URL=database)
        assert "tidy_up" in done.stdout


class TestAddThroughApp:
    async def added(self, project: Path, database: str, *arguments: str) -> dict[str, object]:
        done = await asyncio.to_thread(
            run, project, COMMAND, "add", *arguments, "--json", DATABASE_URL=database
        )
        assert done.returncode == 0, done.stderr
        job: dict[str, object] = json.loads(done.stdout)
        return job

    async def test_options_of_the_task_apply(self, project: Path, database: str) -> None:
        job = await self.added(project, database, "report", '{"day": "2030-01-01"}')
        assert (job["queue_name"], job["max_attempts"]) == ("reports", 5)
        assert job["payload"] == {"day": "2030-01-01"}

    async def test_flags_override_options_of_the_task(self, project: Path, database: str) -> None:
        payload = '{"day": "2030-01-01"}'
        flags = ("--queue", "mine", "--max-attempts", "2", "--priority", "0")
        job = await self.added(project, database, "report", payload, *flags)
        assert (job["queue_name"], job["max_attempts"], job["priority"]) == ("mine", 2, 0)

    async def test_invalid_payload_is_rejected(self, project: Path, database: str) -> None:
        done = await asyncio.to_thread(
            run, project, COMMAND, "add", "report", '{"day": "soon"}', DATABASE_URL=database
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: ")
        assert "day" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.slow
    async def test_key_mode_flag_applies_to_a_task_with_its_own_key(
        self, project: Path, database: str
    ) -> None:
        with (project / "jobs.py").open("a") as file:
            file.write('\n\n@app.task(job_key="k:{name}")\nasync def keyed(name: str) -> None: ...\n')
        arguments = ("keyed", '{"name": "a"}', "--key-mode", "unsafe_dedupe")
        first, again = [await self.added(project, database, *arguments) for _ in range(2)]
        assert (first["key"], first["id"]) == ("k:a", again["id"])

    async def test_no_app_flag_adds_the_job_unchanged(self, project: Path, database: str) -> None:
        job = await self.added(project, database, "report", '{"day": "soon"}', "--no-app")
        assert (job["queue_name"], job["max_attempts"]) == (None, 25)

    async def test_unknown_task_is_added(self, project: Path, database: str) -> None:
        job = await self.added(project, database, "of/node", '{"any": "thing"}')
        assert (job["task_identifier"], job["payload"]) == ("of/node", {"any": "thing"})

    async def test_unknown_task_is_warned_about(self, project: Path, database: str) -> None:
        for name, hint in (
            ("repport", "Did you mean 'report'?"),
            ("xyz", "Its tasks: hello, report, tidy_up."),
        ):
            done = await asyncio.to_thread(run, project, COMMAND, "add", name, DATABASE_URL=database)
            assert done.returncode == 0
            assert done.stdout.strip().isdigit(), "standard output has only the id"
            assert f"Warning: the app has no task '{name}'" in done.stderr
            assert done.stderr.endswith(f"{hint}\n")
        known = await asyncio.to_thread(
            run, project, COMMAND, "add", "hello", '{"name": "Ann"}', DATABASE_URL=database
        )
        assert (known.returncode, known.stderr) == (0, "")

    async def test_app_that_does_not_load_is_reported_with_the_no_app_flag(
        self, project: Path, database: str
    ) -> None:
        (project / "jobs.py").write_text("print('here')\nimport nowhere\n")
        arguments = ("add", "report", "--max-attempts", "3")
        done = await asyncio.to_thread(run, project, COMMAND, *arguments, DATABASE_URL=database)
        assert (done.returncode, done.stdout) == (1, "")
        assert "No module named 'nowhere'. No job was added." in done.stderr
        assert "To add it without the app, use --no-app." in done.stderr
        job = await self.added(project, database, *arguments[1:], "--no-app")
        assert job["max_attempts"] == 3


class TestPrettyLog:
    def record(self, level: int, text: str, **extra: object) -> logging.LogRecord:
        return logging.makeLogRecord(
            {"levelno": level, "levelname": logging.getLevelName(level), "msg": text, **extra}
        )

    def test_pretty_log_has_colours(self) -> None:
        formatter = logs.PrettyFormatter()
        line = formatter.format(self.record(logging.WARNING, "Notice"))
        assert re.fullmatch(r"\x1b\[2m[\d:.]+\x1b\[0m \x1b\[33m\x1b\[1mWARNING\x1b\[0m .*Notice", line)
        of_task = formatter.format(self.record(logging.INFO, "hello", job_id=7, task_identifier="hello"))
        assert "\x1b[36m[hello 7] \x1b[0mhello" in of_task

    def test_scope_and_extra_are_logged(self) -> None:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        plain = logging.Logger("shop")  # noqa: LOG001 - kept out of the hierarchy
        plain.addHandler(handler)
        scope = {"label": "job", "worker_id": "python-1", "task_identifier": "hello", "job_id": 7}
        log = ScopedLogger(plain, scope).scope(order=9)
        handler.setFormatter(logs.TextFormatter(with_process=False))
        log.info("Sent", extra={"to": "Ann Lee", "tries": 2})
        assert stream.getvalue().endswith(' INFO  [hello 7] Sent order=9 to="Ann Lee" tries=2\n')
        stream.truncate(0)
        handler.setFormatter(logs.JsonFormatter())
        log.info("Sent", extra={"items": [1, {"b": 2}], "level": "high"})
        entry = json.loads(stream.getvalue().strip("\0"))
        assert {**entry, "time": 0, "process": 0} == {
            "time": 0, "process": 0, "level": "info", "logger": "shop", "message": "Sent",
            **scope, "order": 9, "items": [1, {"b": 2}], "level_": "high",
        }  # fmt: skip

    def test_values_without_json_are_logged_as_text(self) -> None:
        itself: list[object] = []
        itself.append(itself)
        extras = {"itself": itself, "keys": {(1, 2): 3}, "ratio": math.nan, "job_id": 7, "good": [1, None]}
        line = logs.JsonFormatter().format(self.record(logging.INFO, "Notice", **extras))
        found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        written = {"itself": "[[...]]", "keys": "{(1, 2): 3}", "ratio": "nan", "job_id": 7, "good": [1, None]}
        assert {name: found[name] for name in extras} == written

    def test_value_without_text_does_not_lose_the_record(self) -> None:
        class Unprintable:
            def __str__(self) -> str:
                raise AttributeError("not loaded")

        record = self.record(logging.INFO, "Notice", order=Unprintable())
        assert json.loads(logs.JsonFormatter().format(record))["order"] == "<Unprintable>"
        assert logs.TextFormatter(with_process=False).format(record).endswith("Notice order=<Unprintable>")

    def test_pretty_log_is_plain_without_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        formatter = logs._formatter("pretty", with_process=True)
        assert re.fullmatch(r"[\d:.]+ INFO  Notice", formatter.format(self.record(logging.INFO, "Notice")))


def test_starter_files_are_in_the_package() -> None:
    folder = ROOT / "src" / "graphile_worker" / "cli" / "starter"
    assert {path.name.removesuffix(".txt") for path in folder.iterdir()} == FILES
