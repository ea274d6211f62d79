"""Litestar: the plugin with its lifespan, dependency, health checks and command."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from litestar import Litestar, post
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.testing import TestClient

from graphile_worker import App, ConfigurationError
from graphile_worker._db.connection.drivers import AnyConnection
from graphile_worker.contrib.litestar import BoundApp, GraphileWorkerPlugin
from graphile_worker.testing import Databases
from support.waiting import DEADLINE

PROJECT = """
from litestar import Litestar
from graphile_worker import App
from graphile_worker._db.connection.drivers import AnyConnection
from graphile_worker.contrib.litestar import GraphileWorkerPlugin

app = App({dsn!r})

@app.task
def hello(name: str) -> None:
    print("Hello,", name, flush=True)

web = Litestar([], plugins=[GraphileWorkerPlugin(app)])
"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def test_jobs_are_committed_and_rolled_back_with_the_session_of_the_request(database: str) -> None:
    app = App(database)

    async def open_transaction() -> AsyncIterator[AnyConnection]:
        async with app.utils.connection() as connection, connection.transaction():
            yield connection

    @post("/jobs/{name:str}")
    async def add(name: FromPath[str], tasks: NamedDependency[BoundApp]) -> int:
        job = await tasks.add_job(name)
        if name == "refused":
            raise HTTPException(status_code=409)
        return job.id

    web = Litestar(
        [add],
        dependencies={"transaction": Provide(open_transaction)},
        plugins=[GraphileWorkerPlugin(app, session="transaction", jobs="tasks")],
    )
    with TestClient(web) as client:
        assert client.post("/jobs/refused").status_code == 409
        kept = client.post("/jobs/kept").json()
    assert [job.id for job in app.utils.list_jobs_sync()] == [kept]
    app.close_sync()


def test_worker_runs_inside_the_lifespan_of_the_application(empty_database: str) -> None:
    events: list[str] = []
    ran = threading.Event()
    app = App(empty_database)

    @app.task
    async def hello(name: str) -> None:
        events.append(f"hello {name}")
        ran.set()

    @asynccontextmanager
    async def own(_web: Litestar) -> AsyncIterator[None]:
        events.append("opened")
        yield
        events.append("closed")

    @post("/hello")
    async def say_hello() -> None:
        await hello.enqueue("Ann")

    plugin = GraphileWorkerPlugin(app, run_worker=True, concurrency=2, health_path="/health/")
    with TestClient(Litestar([say_hello], lifespan=[own], plugins=[plugin])) as client:
        assert client.post("/hello").status_code == 201
        assert ran.wait(DEADLINE)
        live, ready = client.get("/health/live"), client.get("/health/ready")
        assert (live.status_code, ready.status_code) == (200, 200)
        assert ready.json()["worker_id"] == live.json()["worker_id"]
    assert events == ["opened", "hello Ann", "closed"]


def test_server_that_cannot_read_the_queue_is_not_ready(empty_database: str) -> None:
    plugin = GraphileWorkerPlugin(App(empty_database), migrate=False, health_path="/health")
    with TestClient(Litestar([], plugins=[plugin])) as client:
        answer = client.get("/health/ready")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert client.get("/health/live").json() == {"live": True}


def test_options_of_a_worker_that_does_not_run_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"concurrency= is an option of a worker.*run_worker"):
        GraphileWorkerPlugin(App(), concurrency=10)


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("litestar")
    return subprocess.run(
        [program, "--app", "shop:web", "workers", *arguments],
        check=False, capture_output=True, text=True, timeout=60, cwd=folder,
        env={"PATH": os.environ["PATH"], "DATABASE_URL": "postgresql://elsewhere.invalid/other"},
    )  # fmt: skip


def test_command_works_for_the_app_of_the_plugin(database: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROJECT.format(dsn=database))
    app = App(database)
    app.add_job_sync("hello", {"name": "Ann"})
    app.close_sync()
    worked = command(tmp_path, "run", "--once", "-j", "2")
    assert (worked.returncode, worked.stdout) == (0, "Hello, Ann\n"), worked.stderr


@pytest.mark.slow
def test_mistakes_are_told_without_a_traceback(database: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROJECT.format(dsn=database))
    mistyped = command(tmp_path, "stat")
    assert mistyped.returncode == 2
    assert "Did you mean stats?" in mistyped.stderr
    assert "Traceback" not in mistyped.stderr
