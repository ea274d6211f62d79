"""Type checkers see the parameters of a task's function, where jobs are added and where it is called."""

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

from graphile_worker import App, Job, JobContext, JobSpec, task
from graphile_worker.retry import Exponential
from graphile_worker.testing import Clock, assert_enqueued, context, drain, enqueued, inline, using
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
    async with using(app, clock=Clock()) as same, inline(same):
        n = (await drain(app, limit=3)).done
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
WRONG = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_mypy_sees_the_parameters(program: Path) -> None:
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
    ended = subprocess.run(command, cwd=program.parent, check=False, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert {int(line) for line in re.findall(r"program.py:(\d+): error", ended.stdout)} == WRONG, ended.stdout


def test_pyright_sees_the_parameters(program: Path) -> None:
    pyright = PEERS / "pyright-1.1.414" / "node_modules" / "pyright" / "index.js"
    if shutil.which("node") is None or not pyright.exists():
        node.missing("npm did not bring pyright")
    command = ["node", str(pyright), "--outputjson", "--pythonpath", sys.executable, "program.py"]
    ended = subprocess.run(command, cwd=program.parent, check=False, capture_output=True, text=True)
    found = json.loads(ended.stdout)["generalDiagnostics"]
    errors = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert errors == WRONG, found
