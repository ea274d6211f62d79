"""FastAPI and Starlette: the lifespan, jobs in the session of a request, and health checks."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import asyncpg
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from graphile_worker import App, ConfigurationError, DatabaseError
from graphile_worker.contrib.fastapi import BoundApp, bound_app, health_router, lifespan
from graphile_worker.testing import Databases
from support.waiting import DEADLINE


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class TestLifespan:
    def test_worker_runs_between_the_begin_and_the_end_of_the_own_lifespan(self, database: str) -> None:
        events: list[str] = []
        ran = threading.Event()
        app = App(database)
        app.events.on("pool:listen:success", lambda _: events.append("worker started"))
        app.events.on("stop", lambda _: events.append("worker stopped"))

        @app.task
        async def hello(name: str) -> None:
            events.append(f"hello {name}")
            ran.set()

        @asynccontextmanager
        async def own(_web: FastAPI) -> AsyncIterator[dict[str, Any]]:
            events.append("opened")
            yield {"greeting": "hi"}
            events.append("closed")

        web = FastAPI(lifespan=lifespan(app, own, run_worker=True, concurrency=2))

        @web.get("/greeting")
        async def greet(request: Request) -> str:
            await hello.enqueue("Ann")
            return str(request.state.greeting)

        with TestClient(web) as client:
            assert client.get("/greeting").json() == "hi"
            assert ran.wait(DEADLINE)
        started = "worker started"
        assert [event for event in events if event != started] == [
            "opened",
            "hello Ann",
            "worker stopped",
            "closed",
        ]

    def test_schema_is_installed_at_the_start_unless_migrate_is_off(self, empty_database: str) -> None:
        app = App(empty_database)
        for migrate, status in ((False, 503), (True, 200)):
            web = FastAPI(lifespan=lifespan(app, migrate=migrate))
            web.include_router(health_router(app))
            with TestClient(web) as client:
                answer = client.get("/ready")
                assert answer.status_code == status, answer.text
                assert answer.json()["ready"] is migrate

    def test_server_does_not_start_if_the_database_cannot_be_reached(self) -> None:
        web = FastAPI(lifespan=lifespan(App("postgresql://127.0.0.1:1/shop")))
        with pytest.raises(DatabaseError, match=r"127\.0\.0\.1"), TestClient(web):
            pass

    def test_options_of_a_worker_that_does_not_run_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"concurrency= is an option of a worker.*run_worker"):
            lifespan(App(), concurrency=10)


@asynccontextmanager
async def transaction(dsn: str) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(make_url(dsn).set(drivername="postgresql+asyncpg"))
    try:
        async with AsyncSession(engine) as session, session.begin():
            yield session
    finally:
        await engine.dispose()


class TestBoundApp:
    @pytest.mark.parametrize("form", ["function", "Depends", "Annotated", "Annotated with scope"])
    def test_jobs_are_committed_and_rolled_back_with_the_session_of_the_request(
        self, database: str, form: str
    ) -> None:
        app = App(database)

        async def open_session() -> AsyncIterator[AsyncSession]:
            async with transaction(database) as session:
                yield session

        depends = Depends(open_session, scope="function" if form.endswith("scope") else None)
        given = {"function": open_session, "Depends": depends}.get(form, Annotated[AsyncSession, depends])
        dependency = bound_app(app, given)
        web = FastAPI(lifespan=lifespan(app))

        @web.post("/jobs/{task}")
        async def add(
            task: str,
            session: Annotated[AsyncSession, depends],
            jobs: Annotated[BoundApp, Depends(dependency)],
        ) -> int:
            assert jobs.connection is session
            job = await jobs.add_job(task)
            if task == "refused":
                raise HTTPException(409)
            return job.id

        with TestClient(web) as client:
            assert client.post("/jobs/refused").status_code == 409
            kept = client.post("/jobs/kept").json()
        assert [job.id for job in app.utils.list_jobs_sync()] == [kept]
        app.close_sync()

    @pytest.mark.parametrize("given", [AsyncSession, Annotated[AsyncSession, "no dependency"], None])
    def test_what_gives_no_session_is_refused(self, given: Any) -> None:
        with pytest.raises(ConfigurationError, match="takes what gives the endpoint its session"):
            bound_app(App(), given)


class TestHealth:
    def test_checks_report_the_worker_that_runs_in_the_server(self, database: str) -> None:
        app = App(database)

        @app.task
        async def hello() -> None: ...

        web = FastAPI(lifespan=lifespan(app, run_worker=True))
        web.include_router(health_router(app), prefix="/health")
        with TestClient(web) as client:
            live, ready = client.get("/health/live"), client.get("/health/ready")
            assert (live.status_code, ready.status_code) == (200, 200)
            assert ready.json()["worker_id"] == live.json()["worker_id"]
            assert "/health/live" not in client.get("/openapi.json").json()["paths"]

    async def test_server_without_a_database_is_live_but_not_ready(self, database: str) -> None:
        app = App(database)
        web = FastAPI(lifespan=lifespan(app))
        web.include_router(health_router(app))
        url = make_url(database)
        other = url.set(database="postgres").render_as_string(hide_password=False)
        with TestClient(web) as client:
            assert client.get("/ready").status_code == 200
            server = await asyncpg.connect(other)
            await server.execute(f'alter database "{url.database}" with allow_connections false')
            await server.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", url.database
            )
            await server.close()
            answer = client.get("/ready")
            assert (answer.status_code, answer.json()["ready"]) == (503, False)
            assert answer.json()["reason"]
            assert client.get("/live").status_code == 200
