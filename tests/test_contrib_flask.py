"""Flask: jobs in application contexts, `db.session`, the configuration and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, current_app, g
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError

from graphile_worker import App, ConfigurationError
from graphile_worker.contrib.flask import GraphileWorker
from graphile_worker.testing import Databases
from support.programs import program

PROJECT = """
from flask import Flask, current_app, g
from graphile_worker import App
from graphile_worker.contrib.flask import GraphileWorker

app = App()
queue = GraphileWorker(app)

@app.task(executor="process")
def hello(name: str) -> None:
    g.name = name
    print("Hello,", g.name, "from", current_app.config["SHOP"], flush=True)

def create_app():
    web = Flask("shop")
    web.config.update(GRAPHILE_WORKER_DSN={dsn!r}, SHOP="the tea shop")
    queue.init_app(web)
    return web

web = create_app()
"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def web(database: str) -> Flask:
    made = Flask("shop")
    made.config["SQLALCHEMY_DATABASE_URI"] = make_url(database).set(drivername="postgresql+psycopg")
    return made


@pytest.fixture
def db(web: Flask) -> Iterator[SQLAlchemy]:
    db = SQLAlchemy(web)
    with web.app_context():
        db.session.execute(text("create table notes (note text)"))
        db.session.commit()
    yield db
    with web.app_context():
        db.engine.dispose()


@pytest.fixture
def app() -> Iterator[App]:
    made = App()
    yield made
    made.close_sync()


def notes(web: Flask, db: SQLAlchemy) -> list[str]:
    with web.app_context():
        return list(db.session.scalars(text("select note from notes order by note")))


class TestContext:
    def test_each_job_has_its_own_context_and_session_on_its_thread(
        self, web: Flask, db: SQLAlchemy, app: App
    ) -> None:
        seen: list[tuple[Any, ...]] = []
        web.teardown_appcontext(lambda _error: seen.append(("teardown", threading.get_ident())))
        GraphileWorker(app, web)

        @app.task
        def note(name: str) -> None:
            assert current_app.name == "shop"
            assert "name" not in g
            g.name = name
            db.session.execute(text("insert into notes values (:name)"), {"name": name})
            db.session.commit()
            seen.append((name, threading.get_ident()))

        note.enqueue_many_sync([{"name": "a"}, {"name": "b"}])
        assert app.run_once_sync().succeeded == 2
        assert notes(web, db)[:2] == ["a", "b"]
        assert [name for name, _ in seen[:4]] == ["a", "teardown", "b", "teardown"]
        assert seen[0][1] == seen[1][1] != threading.get_ident()

    def test_coroutine_functions_have_a_context_too(self, web: Flask, app: App) -> None:
        contexts: list[Any] = []
        GraphileWorker(app, web)

        @app.task
        async def note() -> None:
            contexts.append(current_app._get_current_object())  # type: ignore[attr-defined]

        note.enqueue_sync()
        assert app.run_once_sync().succeeded == 1
        assert contexts == [web]

    def test_failed_job_rolls_back_its_session_and_keeps_no_connection(
        self, web: Flask, db: SQLAlchemy, app: App
    ) -> None:
        GraphileWorker(app, web)

        @app.task
        def note() -> None:
            db.session.execute(text("insert into notes values ('lost')"))
            raise ValueError("no")

        note.enqueue_sync()
        assert app.run_once_sync().failed == 1
        assert notes(web, db) == []
        with web.app_context():
            assert db.engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    def test_job_after_one_that_lost_its_connection_runs(self, web: Flask, db: SQLAlchemy, app: App) -> None:
        GraphileWorker(app, web)

        @app.task
        def note(*, cut: bool) -> None:
            if cut:
                with pytest.raises(OperationalError):
                    db.session.execute(text("select pg_terminate_backend(pg_backend_pid())"))
                raise ValueError("the connection is lost")
            db.session.execute(text("insert into notes values ('kept')"))
            db.session.commit()

        note.using(priority=1).enqueue_sync(cut=True)
        note.using(priority=2).enqueue_sync(cut=False)
        summary = app.run_once_sync()
        assert (summary.succeeded, summary.failed) == (1, 1)
        assert notes(web, db) == ["kept"]

    def test_job_without_a_flask_application_says_what_to_do(self, database: str) -> None:
        app = App(database)
        GraphileWorker(app)

        @app.task
        def note() -> None: ...

        job = note.enqueue_sync()
        assert app.run_once_sync().failed == 1
        found = app.utils.get_job_sync(id=job.id)
        assert found is not None
        assert "flask graphile-worker run" in (found.last_error or "")
        app.close_sync()


class TestSession:
    def test_jobs_are_committed_and_rolled_back_with_db_session(
        self, web: Flask, db: SQLAlchemy, app: App
    ) -> None:
        queue = GraphileWorker(app, web)

        @app.task
        def note() -> None: ...

        with web.app_context():
            queue.jobs.using(note).enqueue_sync()
            db.session.rollback()
            kept = queue.jobs.add_job_sync("note")
            db.session.commit()
        assert [job.id for job in app.utils.list_jobs_sync()] == [kept.id]

    def test_application_without_flask_sqlalchemy_is_told_to_pass_its_session(self, database: str) -> None:
        web = Flask("shop")
        queue = GraphileWorker(App(database), web)
        with web.app_context(), pytest.raises(ConfigurationError, match="connection=session"):
            _ = queue.jobs


class TestConfiguration:
    def test_connection_string_and_schema_come_from_the_flask_application(self) -> None:
        app = App()
        queue = GraphileWorker(app)
        first, second = Flask("first"), Flask("second")
        first.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://me:secret@db/first"
        second.config |= {"GRAPHILE_WORKER_DSN": "postgresql://db/second", "GRAPHILE_WORKER_SCHEMA": "jobs"}
        queue.init_app(first)
        assert app.settings["dsn"] == "postgresql://me:secret@db/first"
        queue.init_app(second)  # as in tests that create an application each
        assert (app.settings["dsn"], app.settings["schema"]) == ("postgresql://db/second", "jobs")

    def test_settings_of_the_app_are_kept(self) -> None:
        app = App("postgresql://db/own", schema="own")
        web = Flask("shop")
        web.config |= {"GRAPHILE_WORKER_DSN": "postgresql://db/flask", "GRAPHILE_WORKER_SCHEMA": "jobs"}
        GraphileWorker(app, web)
        assert (app.settings["dsn"], app.settings["schema"]) == ("postgresql://db/own", "own")

    def test_database_that_is_not_postgresql_is_ignored(self) -> None:
        app = App()
        web = Flask("shop")
        web.config["SQLALCHEMY_DATABASE_URI"] = "sqlite:///shop.db"
        GraphileWorker(app, web)
        assert app.settings["dsn"] is None


@pytest.fixture
def folder(database: str, tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(PROJECT.format(dsn=database))
    return tmp_path


FLASK = Path(sys.executable).with_name("flask")
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONUNBUFFERED": "1",
    "DATABASE_URL": "postgresql://elsewhere.invalid/other",
}


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FLASK, "--app", "shop", "graphile-worker", *arguments],
        check=False, capture_output=True, text=True, timeout=60, cwd=folder, env=ENVIRONMENT,
    )  # fmt: skip


class TestCommand:
    def test_command_runs_jobs_of_the_app_also_in_task_processes(self, folder: Path, database: str) -> None:
        app = App(database)
        app.add_job_sync("hello", {"name": "Ann"})
        app.close_sync()
        done = command(folder, "run", "--once", "-j", "2")
        assert (done.returncode, done.stdout) == (0, "Hello, Ann from the tea shop\n"), done.stderr

    def test_other_verbs_use_the_database_of_the_app(self, folder: Path) -> None:
        done = command(folder, "stats", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ready"] == 0

    @pytest.mark.slow
    def test_mistakes_are_told_without_a_traceback(self, folder: Path) -> None:
        done = command(folder, "run", "--concurrency", "5")
        assert done.returncode == 2
        assert "Usage: flask graphile-worker run" in done.stderr
        assert "Did you mean '--jobs'?" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.slow
    async def test_several_worker_processes_are_started_through_flask(
        self, folder: Path, database: str
    ) -> None:
        app = App(database)
        await app.add_job("hello", {"name": "Ann"})
        await app.close()
        async with program(
            FLASK, *["--app", "shop", "graphile-worker", "run", "--processes", "2"],
            folder=folder, environment=ENVIRONMENT, with_errors=True,
        ) as running:  # fmt: skip
            await running.until("Hello, Ann from the tea shop")
            running.process.terminate()
            await running.end()
            assert "Traceback" not in running.text
