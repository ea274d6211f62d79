"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg
import httpx
import pytest

from graphile_worker.testing import Databases
from support.jobs import count
from support.postgres import ROOT
from support.programs import Program, program
from support.waiting import until
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ORDER = {"item": "a teapot", "email": "ann@example.com"}


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@asynccontextmanager
async def web_server(dsn: str) -> AsyncIterator[tuple[Program, httpx.AsyncClient]]:
    """Run the FastAPI example under uvicorn, and yield the program and an HTTP client for it."""
    async with program(
        *(sys.executable, "-m", "uvicorn", "--port", "0"),
        *("--app-dir", ROOT / "examples", "fastapi_app:web"),
        environment={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "DATABASE_URL": dsn},
        with_errors=True,
    ) as running:
        await running.until("Uvicorn running on")
        [address] = re.findall(r"http://[\d.:]+", running.text)
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            yield running, client


class TestFastapiExample:
    async def test_order_and_its_job_are_committed_together(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with web_server(database) as (_, client):
            placed = await client.post("/orders", json=ORDER)
            assert placed.status_code == 201
            assert placed.json() == {"order": 1, "job": 1}
            await until(lambda: db.fetchval("select receipt_sent from orders"), "the receipt is sent")

            # The job cannot be added, so the order must not be stored either.
            await db.execute("alter table graphile_worker._private_jobs add check (id < 2) not valid")
            assert (await client.post("/orders", json=ORDER)).status_code == 500
            assert await db.fetchval("select count(*) from orders") == 1

    @pytest.mark.slow
    async def test_report_job_runs_on_a_thread(self, db: asyncpg.Connection, database: str) -> None:
        async with web_server(database) as (running, client):
            response = await client.post("/reports/2030-01-01")
            assert (response.status_code, response.json()) == (202, {"job": 1})
            await running.until("Wrote the report of 2030-01-01")
            await until(lambda: is_empty(db), "the job is deleted")
            assert (await client.get("/jobs/1")).status_code == 404

    async def test_endpoints_show_stats_jobs_and_health(self, db: asyncpg.Connection, database: str) -> None:
        async with web_server(database) as (_, client):
            await db.execute(
                "select graphile_worker.add_job('send_receipt', '{\"order\": \"x\"}', max_attempts := 1)"
            )

            async def failed() -> bool:
                stats: dict[str, int] = (await client.get("/stats")).json()
                return stats == {"ready": 0, "scheduled": 0, "running": 0, "failed": 1}

            await until(failed, "the job has failed permanently")
            shown = (await client.get("/jobs/1")).json()
            assert (shown["task"], shown["state"], shown["attempts"]) == ("send_receipt", "failed", 1)
            assert "order" in shown["error"]
            health = await client.get("/health")
            assert (health.status_code, health.json()["state"]) == (200, "ready")

    async def test_sigterm_waits_for_running_jobs_and_leaves_no_locks(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with web_server(database) as (running, client):
            observer = await asyncpg.connect(database)
            await db.execute("insert into orders (item, email) values ('tea', 'bo@example.com')")
            async with db.transaction():  # blocks the task
                await db.execute("select from orders where id = 1 for update")
                await observer.execute("select graphile_worker.add_job('send_receipt', '{\"order\": 1}')")
                await until(lambda: session_waits_for_a_lock(observer), "the task waits for the row lock")
                assert (await client.get("/stats")).json()["running"] == 1
                running.send(signal.SIGTERM)
                await running.until("Waiting for application shutdown")
                assert await locked(observer) == [("job", 1)]
            assert await running.end() == -signal.SIGTERM, running.text
            assert "Traceback" not in running.text
            assert await db.fetchval("select receipt_sent from orders")
            assert await locked(observer) == []
            assert await count(observer) == 0
            await observer.close()


async def is_empty(db: asyncpg.Connection) -> bool:
    return await count(db) == 0


async def session_waits_for_a_lock(observer: asyncpg.Connection) -> object:
    return await observer.fetchval(
        "select true from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
