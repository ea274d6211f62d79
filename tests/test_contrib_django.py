"""The Django app: a project's own tests under two versions of Django, and its worker from manage.py.

The project is in tests/django_project. Its tests run as those of any Django project do: with `manage.py test`
on the Django of this environment, and with pytest-django on Django 6, which tools/fetch_peers.py installs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import asyncpg
import pytest
from psycopg.conninfo import conninfo_to_dict

from graphile_worker import WorkerUtils
from graphile_worker._db.connection.dsn import parse_dsn
from graphile_worker._db.schema.steps import OWN_MIGRATIONS
from graphile_worker.contrib.django.configuration import as_dsn
from support import stacks
from support.node import missing
from support.postgres import ROOT
from support.programs import Program, program
from support.waiting import until


@pytest.fixture
def database(empty_database: str) -> str:
    stacks.skip_old_server_for_django(empty_database)
    return empty_database


PROJECT = ROOT / "tests" / "django_project"
DJANGO_6 = ROOT / ".cache" / "peers" / "django-6"


@asynccontextmanager
async def run(
    dsn: str, *command: str, python: Path | None = None, folder: Path = PROJECT, **environment: Any
) -> AsyncIterator[Program]:
    """Run Python in the project."""
    given = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": dsn,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{DJANGO_6 / 'django_tests'}",
        "PYTHONUNBUFFERED": "1",
        **environment,
    }
    async with program(
        python or Path(sys.executable), *command, folder=folder, environment=given, with_errors=True
    ) as running:
        yield running


async def manage(dsn: str, *command: str, **environment: Any) -> str:
    """Run manage.py to its end, and return its output."""
    async with run(dsn, "manage.py", *command, **environment) as running:
        assert await running.end_at_any_time() == 0, running.text
        return running.text


async def add_job(dsn: str, identifier: str, payload: str = "{}") -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("select graphile_worker.add_job($1, $2::json)", identifier, payload)
    await connection.close()


async def test_project_passes_its_tests_with_the_test_runner_of_django(database: str) -> None:
    output = await manage(database, "test", "--noinput")
    assert "\nOK" in output


@pytest.mark.slow
async def test_test_database_without_migrations_gets_the_schema(database: str) -> None:
    assert "\nOK" in await manage(database, "test", "--noinput", "shop.tests.test_django_tasks", MIGRATE="no")


@pytest.mark.slow
async def test_project_and_djangos_own_task_tests_pass_on_django_6_with_pytest(database: str) -> None:
    if not (DJANGO_6 / ".done").exists():
        missing("Django 6 is not installed: run tools/fetch_peers.py, with Python 3.12 or newer")
    command = ("-m", "pytest", "-q", "conformance.py", "shop")
    async with run(database, *command, python=DJANGO_6 / "bin" / "python") as running:
        assert await running.end_at_any_time() == 0, running.text
        assert " passed" in running.text
        assert " skipped" not in running.text


async def test_command_uses_the_database_of_the_settings_and_runs_tasks_in_processes(
    database: str,
) -> None:
    await manage(database, "migrate")
    await add_job(database, "in_a_process")
    assert "2 succeeded" in await manage(database, "graphile_worker", "run", "--once")
    db = await asyncpg.connect(database)
    assert await db.fetchval("select notes::text from shop_order") == '["made in a process", "receipt"]'
    await db.close()
    assert "shop/tasks/add" not in await manage(database, "graphile_worker", "stats")
    assert "manage.py graphile_worker list" in await manage(database, "graphile_worker", "list", "--help")


async def test_queue_may_be_in_another_database_than_the_default_one(database: str) -> None:
    await manage(database, "migrate", QUEUE="jobs")
    db = await asyncpg.connect(database)
    assert await db.fetchval("select to_regnamespace('graphile_worker')") is None
    await manage(database, "migrate", "--database", "jobs", QUEUE="jobs")
    added = "from shop.tasks import fail; print(fail.enqueue_sync('x').id)"
    await manage(database, "shell", "-c", added, QUEUE="jobs")
    assert await db.fetchval("select count(*) from graphile_worker._private_jobs") == 1
    await db.close()
    assert "fail" in await manage(database, "graphile_worker", "stats", QUEUE="jobs")
    mistake = ("graphile_worker", "--database", "nope", "stats")
    async with run(database, "manage.py", *mistake) as running:
        assert await running.end() == 2
    assert "settings.DATABASES has no 'nope'" in running.text
    assert "Traceback" not in running.text


@pytest.mark.slow
async def test_supervisor_starts_processes_with_the_settings_of_the_project(database: str) -> None:
    await manage(database, "migrate")
    command = ("manage.py", "graphile_worker", "run", "--processes", "2")
    async with run(database, *command) as running:
        await running.until("Worker connected", count=2)
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM


@pytest.mark.slow
async def test_dev_restarts_the_worker_when_a_file_changes_and_waits_out_a_syntax_error(
    database: str, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    copied = [path for path in PROJECT.rglob("*.py") if "tests" not in path.relative_to(PROJECT).parts]
    for path in copied:
        target = project / path.relative_to(PROJECT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    await manage(database, "migrate")
    tasks = project / "shop" / "tasks.py"
    text = tasks.read_text()
    # A file that changes twice in a second would still have the bytecode of before.
    fresh: dict[str, Any] = {"PYTHONDONTWRITEBYTECODE": "1"}
    async with run(database, "manage.py", "graphile_worker", "dev", folder=project, **fresh) as running:
        await running.until("Worker connected")
        tasks.write_text(text + "\n\n@app.task\ndef added() -> None:\n    print('first version')\n")
        await running.until("restarting")
        await running.until("Worker connected", count=2)
        await add_job(database, "added")
        await running.until("first version")
        tasks.write_text("this is not Python")
        await running.until("Waiting for a change")
        tasks.write_text(text + "\n\n@app.task\ndef other() -> None:\n    print('other version')\n")
        await running.until("Worker connected", count=3)
        await add_job(database, "other")
        await running.until("other version")
        running.send(signal.SIGTERM)
        assert await running.end() == -signal.SIGTERM

    async def no_worker() -> bool:
        db = await asyncpg.connect(database)
        try:
            return not await db.fetchval("select count(*) from graphile_worker._private_workers")
        finally:
            await db.close()

    await until(no_worker, "the workers have deregistered")


def test_djangos_migrations_install_the_newest_schema() -> None:
    folder = ROOT / "src" / "graphile_worker" / "contrib" / "django" / "migrations"
    newest = max(folder.glob("[0-9]*.py")).read_text()
    assert f"InstallSchema({OWN_MIGRATIONS[-1].id})" in newest, "add a migration: see ARCHITECTURE.md"


@pytest.mark.parametrize(
    ("database", "expected"),
    [
        ({"NAME": "shop"}, "postgresql:///shop"),
        ({"NAME": "shop", "HOST": "db", "PORT": 5433}, "postgresql://db:5433/shop"),
        ({"NAME": "a b", "USER": "me@x", "PASSWORD": "p/?#%:", "HOST": "db"}, None),
        ({"NAME": "shop", "USER": "me", "PASSWORD": "no&t?", "HOST": "/run/pg", "PORT": "5433"}, None),
        ({"NAME": "shop", "USER": "me", "HOST": "::1", "PORT": 1}, "postgresql://me@[::1]:1/shop"),
        (
            {
                "NAME": "",
                "OPTIONS": {"service": "shop", "pool": True, "isolation_level": 4, "sslmode": "require"},
            },
            "postgresql:///?service=shop&sslmode=require",
        ),
        (
            {"NAME": "shop", "OPTIONS": {"options": "-c search_path=x,y", "assume_role": "owner"}},
            "postgresql:///shop?options=-c+search_path%3Dx%2Cy&role=owner",
        ),
    ],
)
def test_connection_string_has_the_parameters_of_the_settings(
    database: dict[str, Any], expected: str | None
) -> None:
    given = as_dsn(database)
    assert expected is None or given == expected
    if "service" not in given:
        parsed = connection_parameters(given)
        assert parsed["database"] == database["NAME"]
        assert parsed["user"] == database.get("USER", parsed["user"])
        assert parsed["password"] == database.get("PASSWORD", parsed["password"])


def connection_parameters(dsn: str) -> dict[str, Any]:
    """Return what asyncpg reads from the connection string, without connecting."""
    target = parse_dsn(dsn).arguments["dsn"]
    parts = urlsplit(target)
    query = dict(parse_qsl(parts.query))
    return {
        "database": unquote(parts.path[1:]),
        "user": query.get("user", unquote(parts.username or "")),
        "password": query.get("password", unquote(parts.password or "")),
    }


async def test_worker_connects_with_a_role_and_options_of_the_settings(database: str) -> None:
    given = conninfo_to_dict(database)
    settings = {
        "NAME": given["dbname"],
        "USER": given.get("user", ""),
        "HOST": given.get("host", ""),
        "PORT": given.get("port", ""),
        "OPTIONS": {"assume_role": "pg_monitor", "options": "-c work_mem=5MB"},
    }
    async with WorkerUtils(as_dsn(settings)) as utils, utils.connection() as connection:
        row = await connection.fetchrow("select current_user, current_setting('work_mem')")
        assert tuple(row or ()) == ("pg_monitor", "5MB")
