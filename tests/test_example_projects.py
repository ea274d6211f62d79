"""The example projects run as their READMEs say: a web server, and a worker in another process."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import asyncpg
import httpx
import pytest

from graphile_worker.testing import Databases
from support import stacks
from support.jobs import count
from support.postgres import ROOT
from support.programs import Program, program
from support.waiting import until

ORDER = {"item": "tea", "email": "ann@example.com", "card": "4242"}


class Project(NamedTuple):
    """An example project: the commands of its README, with ports that are free."""

    name: str
    prepare: tuple[str, ...]
    serve: str
    work: str
    port_option: str

    @property
    def folder(self) -> Path:
        return ROOT / "examples" / self.name

    @property
    def commands(self) -> list[str]:
        return [*self.prepare, self.serve, self.work]


PROJECTS = {
    project.name: project
    for project in [
        Project("fastapi_sqlalchemy", (), "uvicorn shop:web", "graphile-worker run shop:app", "--port 0"),
        Project(
            "flask_sqlalchemy",
            ("flask --app shop:web create-tables",),
            "flask --app shop:web run",
            "flask --app shop:web graphile-worker run",
            "--port 0",
        ),
        Project(
            "litestar_sqlalchemy",
            (),
            "uvicorn shop:web",
            "litestar --app shop:web workers run",
            "--port 0",
        ),
        Project(
            "django_shop",
            ("python manage.py migrate",),
            "python manage.py runserver",
            "python manage.py graphile_worker run",
            "--noreload 0",
        ),
    ]
}


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(params=PROJECTS)
def project(request: pytest.FixtureRequest) -> Project:
    return PROJECTS[request.param]


# Shorter than by default, so that the jobs of a killed worker run again within a second.
LEASES = {"GRAPHILE_WORKER_HEARTBEAT_INTERVAL": "0.2s", "GRAPHILE_WORKER_FAST_LEASE": "1s"}


@asynccontextmanager
async def run(
    project: Project, command: str, dsn: str, variables: Mapping[str, str] | None = None
) -> AsyncIterator[Program]:
    """Run a command of the environment of the tests, in the folder of the project."""
    scripts = Path(sys.executable).parent
    environment = {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "DATABASE_URL": dsn,
        **(variables or {}),
    }
    async with program(
        scripts / shlex.split(command)[0],
        *shlex.split(command)[1:],
        folder=project.folder,
        environment=environment,
        with_errors=True,
    ) as running:
        yield running


@asynccontextmanager
async def web_server(project: Project, dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """Prepare the database, run the server, and yield a client for it."""
    for command in project.prepare:
        async with run(project, command, dsn) as preparing:
            assert await preparing.end() == 0, preparing.text
    async with run(project, f"{project.serve} {project.port_option}", dsn) as running:
        await running.until("http://")
        [address, *_] = re.findall(r"http://[\d.]+:\d+", running.text)
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            yield client


@asynccontextmanager
async def connect(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


def test_readme_has_the_commands_that_the_tests_run(project: Project) -> None:
    lines = (project.folder / "README.md").read_text().splitlines()
    typed = [line.removeprefix("$ ").partition("  #")[0].rstrip() for line in lines]
    assert [line for line in typed if line in project.commands] == project.commands


@pytest.mark.sample(1)
async def test_request_adds_a_job_that_a_worker_runs_and_a_rolled_back_request_adds_none(
    project: Project, empty_database: str
) -> None:
    async with web_server(project, empty_database) as client, connect(empty_database) as db:
        declined = await client.post("/orders", json={**ORDER, "card": "expired"})
        assert declined.status_code == 402, declined.text
        assert await db.fetchval("select count(*) from orders") == 0
        assert await count(db) == 0

        placed = await client.post("/orders", json=ORDER)
        assert placed.status_code == 201, placed.text
        order, job = placed.json()["order"], placed.json()["job"]
        assert await db.fetchval("select invoiced from orders where id = $1", order) is False
        assert await db.fetchval("select id from graphile_worker._private_jobs") == job

        async with run(project, project.work, empty_database) as worker:
            await worker.until(f"Sent the receipt for order {order} to ann@example.com")
            assert await db.fetchval("select invoiced from orders where id = $1", order)

            async def is_empty() -> bool:
                return await count(db) == 0

            await until(is_empty, "both jobs are complete")
            worker.process.terminate()
            await worker.end()
            assert "Traceback" not in worker.text
            assert worker.text.count("Sent the receipt") == 1


@pytest.mark.sample(1)
async def test_invoice_of_a_killed_worker_is_written_once(project: Project, empty_database: str) -> None:
    """The worker is killed in the transaction of its job. Nothing of it stays, and another worker runs it."""
    async with web_server(project, empty_database) as client, connect(empty_database) as db:
        placed = await client.post("/orders", json=ORDER)
        assert placed.status_code == 201, placed.text
        [order, job] = [placed.json()[name] for name in ("order", "job")]

        async def is_writing() -> bool:
            return bool(
                await db.fetchval(
                    "select exists (select from pg_stat_activity "
                    "where datname = current_database() and wait_event_type = 'Lock')"
                )
            )

        async with connect(empty_database) as other, other.transaction():
            await other.execute("select from orders where id = $1 for update", order)
            async with run(project, project.work, empty_database, LEASES) as killed:
                await until(is_writing, "the worker waits for the order in its transaction", within=60)
                killed.send(signal.SIGKILL)
                await killed.end()
        [left] = await db.fetch("select id, attempts from graphile_worker._private_jobs")
        assert tuple(left) == (job, 1)

        async def is_invoiced() -> bool:
            return bool(await db.fetchval("select invoiced from orders where id = $1", order))

        async with run(project, project.work, empty_database, LEASES) as worker:
            await until(is_invoiced, "another worker has written the invoice", within=60)
            await worker.until(f"Sent the receipt for order {order}")
            worker.send(signal.SIGTERM)
            await worker.end()
            assert worker.text.count("Sent the receipt") == 1
        assert await count(db) == 0


async def test_migrations_of_the_django_example_are_current(empty_database: str) -> None:
    command = "python manage.py makemigrations --check --dry-run"
    async with run(PROJECTS["django_shop"], command, empty_database) as checking:
        assert await checking.end() == 0, checking.text


async def test_django_example_passes_its_own_tests(empty_database: str) -> None:
    stacks.skip_old_server_for_django(empty_database)
    async with run(PROJECTS["django_shop"], "python manage.py test --noinput", empty_database) as testing:
        assert await testing.end() == 0, testing.text
