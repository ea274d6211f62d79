"""Type checkers check the arguments of tasks, and accept connections of every driver and ORM."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support import node
from support.postgres import PEERS

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from graphile_worker import App, Job, JobContext, JobHandle, JobSpec, task
from graphile_worker.retry import Exponential
from graphile_worker.testing import Clock, assert_enqueued, context, drain, enqueued, inline, override
from graphile_worker.testing import job as a_job

@dataclass
class State:
    greeting: str

app = App()

@app.task
async def stateful(ctx: JobContext[State], name: str) -> None:
    greeting: str = ctx.state.greeting
    ctx.state.missing  # wrong

@app.task
async def plain(name: str, n: int = 3) -> int:
    return n

@app.task("named", queue_name="q", retry=Exponential(first=1), job_key="k:{name}")
async def with_context(ctx: JobContext, name: str, *, n: int = 3) -> None: ...

@task
def whole(payload: dict[str, int], ctx: JobContext) -> str:
    return ""

@app.task(batch=True)
async def batch(items: list[int]) -> list[Exception | None]:
    return []

@app.task
async def nothing() -> None: ...

@app.task
async def loose(payload: Any) -> None: ...

@app.task
async def last(name: str, n: int, ctx: JobContext) -> None: ...

@app.task
@dataclass
class SendEmail:
    identifier: ClassVar[str] = "send_email"
    to: str

    async def run(self, ctx: JobContext) -> None: ...

async def good(ctx: JobContext) -> None:
    job: Job = await plain.enqueue("Ann")
    job = await plain.enqueue(name="Ann", n=4)
    job = await plain.using(priority=1, run_at=timedelta(1)).enqueue("Ann", n=4)
    job = plain.using(priority=1).using(job_key=None).enqueue_sync("Ann")
    job = plain.enqueue_sync(name="Ann")
    spec: JobSpec = plain.spec("Ann")
    n: int = await plain("Ann")
    handle: JobHandle[int] = await plain.enqueue("Ann")
    n = await handle.result(timeout=3)
    n = await plain.using(wait=3).call("Ann")
    n = plain.call_sync(name="Ann")
    text_of: str = whole.call_sync({"a": 1})
    job = await with_context.enqueue("Ann", n=4)
    job = await with_context.using(flags=["x"]).enqueue(name="Ann")
    await with_context(ctx, "Ann", n=4)
    job = await whole.enqueue({"a": 1})
    text: str = whole({"a": 1}, ctx)
    job = await batch.enqueue([1, 2])
    job = await last.enqueue("Ann", 1)
    job = await stateful.enqueue("Ann")
    job = await nothing.enqueue()
    job = await loose.enqueue({"any": "thing"})
    jobs: list[Job] = await app.add_jobs([spec, SendEmail("Ann")])
    job = await app.add_job(SendEmail("Ann"), priority=3)
    job = await app.add_job("other", {"x": 1}, run_at=timedelta(1))
    async with app.running(concurrency=3) as runner:
        await runner.stop()
    await stateful(context(state=State("Hi")), "Ann")
    await stateful(context(), "Ann")
    text = whole({"a": 1}, context(a_job("whole", {"a": 1})))
    async with override(app, clock=Clock()) as same, inline(same):
        n = (await drain(app, limit=3)).succeeded
        job = await assert_enqueued(plain.using(priority=1), name="Ann")
        jobs = await enqueued(app, plain)

async def bad(ctx: JobContext) -> None:
    await plain.enqueue()  # wrong
    await plain.enqueue(3)  # wrong
    await plain.enqueue("Ann", x=3)  # wrong
    await plain.using(priority=1).enqueue(3)  # wrong
    await plain.using(queue="x").enqueue("Ann")  # wrong
    plain.enqueue_sync(3)  # wrong
    plain.spec(3)  # wrong
    await plain(3)  # wrong
    await plain.call(3)  # wrong
    wrong_type: str = await plain.call("Ann")  # wrong
    wrong_handle: JobHandle[str] = await plain.enqueue("Ann")  # wrong
    await with_context.enqueue(ctx, "Ann")  # wrong
    await with_context.enqueue(3)  # wrong
    await with_context("Ann")  # wrong
    await whole.enqueue({"a": "b"})  # wrong
    await whole.enqueue({"a": 1}, ctx)  # wrong
    await batch.enqueue(["a"])  # wrong
    await nothing.enqueue(1)  # wrong
    await last.enqueue("Ann", "1")  # wrong
    await stateful.enqueue(3)  # wrong
    app.task(retry=object())  # wrong
    SendEmail(3)  # wrong
    app.task(queue="x")  # wrong
    async with app.running(concurency=3):  # wrong
        pass
    await stateful(context(state=3), "Ann")  # wrong
    await drain(app, tasks=[])  # wrong
    await assert_enqueued(3)  # wrong
"""
CONNECTIONS = """
from typing import Any

import asyncpg
import psycopg
import psycopg2.extensions
import sqlmodel
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlmodel.ext.asyncio.session import AsyncSession as ModelAsyncSession
from tortoise.transactions import in_transaction

from graphile_worker import App, Job, JobContext, JobSpec, WorkerUtils, quick_add_job, quick_add_job_sync

app = App()

@app.task
async def send(to: str) -> None: ...

async def with_asyncio(
    utils: WorkerUtils,
    ctx: JobContext,
    own: asyncpg.Connection[Any],
    pooled: asyncpg.pool.PoolConnectionProxy[Any],
    async_psycopg: psycopg.AsyncConnection[Any],
    session: AsyncSession,
    connection: AsyncConnection,
    scoped: async_scoped_session[AsyncSession],
    model: ModelAsyncSession,
    any_of_two: AsyncSession | asyncpg.Connection[Any] | None,
) -> None:
    job: Job = await send.using(connection=own).enqueue("Ann")
    job = await send.using(connection=pooled, require_transaction=True).enqueue("Ann")
    job = await app.add_job("t", connection=async_psycopg)
    jobs: list[Job] = await app.add_jobs([JobSpec("t")], connection=session, require_transaction=True)
    job = await utils.add_job("t", connection=connection, require_transaction=True)
    jobs = await utils.list_jobs(connection=scoped)
    ready: int = (await utils.stats(connection=model)).ready
    job = await quick_add_job("t", connection=any_of_two)
    job = await ctx.add_job("t", connection=session, require_transaction=True)
    await ctx.complete(connection=session)
    async with in_transaction() as tortoise:
        job = await send.using(connection=tortoise).enqueue("Ann")
    async with ctx.transaction() as lent:
        job = await app.bind(lent).using(send).enqueue("Ann")

def without_asyncio(
    utils: WorkerUtils,
    ctx: JobContext,
    sync_psycopg: psycopg.Connection[Any],
    old: psycopg2.extensions.connection,
    session: Session,
    connection: Connection,
    scoped: scoped_session[Session],
    model: sqlmodel.Session,
) -> None:
    job: Job = send.using(connection=sync_psycopg).enqueue_sync("Ann")
    jobs: list[Job] = send.using(connection=old).enqueue_many_sync([{"to": "Ann"}])
    job = app.add_job_sync("t", connection=session, require_transaction=True)
    jobs = app.add_jobs_sync([JobSpec("t")], connection=connection)
    job = utils.add_job_sync("t", priority=1, connection=scoped, require_transaction=True)
    jobs = app.utils.list_jobs_sync(task="t", connection=model)
    ready: int = app.utils.stats_sync().ready
    job = app.bind(session).add_job_sync("t")
    job = quick_add_job_sync("t", connection="default")
    ctx.complete_sync(connection=session)
    n: int = app.run_once_sync(concurrency=2).succeeded

async def bad(
    utils: WorkerUtils, pool: asyncpg.Pool[Any], engine: Engine, async_engine: AsyncEngine, own: Session
) -> None:
    await app.add_job("t", connection=engine)  # wrong
    await send.using(connection=async_engine).enqueue("Ann")  # wrong
    await utils.add_job("t", connection=pool)  # wrong
    app.bind(5)  # wrong
    app.add_job_sync("t", connection=own, require_transaction="yes")  # wrong
    app.utils.list_jobs_sync(task=5)  # wrong
    app.utils.stats_sync().nothing  # wrong
    utils.add_jobs_sync(["t"])  # wrong
    app.run_once_sync(concurency=3)  # wrong
    await utils.complete_jobs(["a"])  # wrong
"""


@pytest.fixture(params=[PROGRAM, CONNECTIONS], ids=["tasks", "connections"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(request.param)
    return tmp_path / "program.py"


def wrong_lines(program: Path) -> set[int]:
    lines = program.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


@pytest.mark.sample(1)
def test_mypy_finds_the_wrong_lines_only(program: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        ".",
        "program.py",
    ]
    finished = subprocess.run(command, cwd=program.parent, check=False, capture_output=True, text=True)
    assert finished.returncode == 1, finished.stderr
    assert {int(line) for line in re.findall(r"program.py:(\d+): error", finished.stdout)} == wrong_lines(
        program
    ), finished.stdout


@pytest.mark.slow
def test_pyright_finds_the_wrong_lines_only(program: Path) -> None:
    pyright = PEERS / "pyright-1.1.414" / "node_modules" / "pyright" / "index.js"
    if shutil.which("node") is None or not pyright.exists():
        node.missing("pyright is not installed")
    command = ["node", str(pyright), "--outputjson", "--pythonpath", sys.executable, "program.py"]
    finished = subprocess.run(command, cwd=program.parent, check=False, capture_output=True, text=True)
    found = json.loads(finished.stdout)["generalDiagnostics"]
    errors = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert errors == wrong_lines(program), found
