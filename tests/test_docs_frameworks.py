"""The guides on frameworks: their programs and commands run as a reader would type them."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest
from fastapi.testclient import TestClient
from litestar.testing import TestClient as LitestarTestClient
from sqlalchemy import make_url

from graphile_worker.testing import Databases
from support.jobs import count
from support.pages import Page, python_blocks
from support.postgres import ROOT
from support.programs import Program, program
from support.waiting import until

GUIDES = ROOT / "docs" / "guides"


class Guide(NamedTuple):
    """A guide whose first block is the program ``shop.py``, and how to start its server on a free port."""

    name: str
    serve: str
    port: str = "--port 0"

    @property
    def path(self) -> Path:
        return GUIDES / f"{self.name}.md"

    def commands(self, kind: str) -> list[str]:
        """Return the commands of the console blocks that begin with a word."""
        blocks = re.findall(r"```console\n(.*?)```", self.path.read_text(), re.DOTALL)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        return [line for line in lines if line.startswith(kind)]


WEB_GUIDES = {
    guide.name: guide
    for guide in (
        Guide("fastapi", "uvicorn shop:web"),
        Guide("litestar", "uvicorn shop:web"),
        Guide("flask", "flask --app shop run"),
    )
}
ALEMBIC = Guide("alembic", "")


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture(params=WEB_GUIDES)
def guide(request: pytest.FixtureRequest) -> Guide:
    return WEB_GUIDES[request.param]


@asynccontextmanager
async def run(folder: Path, command: str, dsn: str) -> AsyncIterator[Program]:
    scripts = Path(sys.executable).parent
    name, *arguments = shlex.split(command)
    environment = {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "DATABASE_URL": dsn,
    }
    async with program(
        scripts / name, *arguments, folder=folder, environment=environment, with_errors=True
    ) as running:
        yield running


async def run_to_end(folder: Path, command: str, dsn: str) -> None:
    async with run(folder, command, dsn) as running:
        assert await running.end() == 0, running.text


@pytest.mark.slow
async def test_first_program_of_the_guide_runs_as_the_guide_says(
    guide: Guide, empty_database: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(python_blocks(guide.path)[0])
    *prepare, work = [
        line for kind in ("flask", "litestar", "graphile-worker") for line in guide.commands(kind)
        if line != guide.serve
    ]  # fmt: skip
    [serve] = guide.commands(guide.serve)
    paths = [re.sub(r"^curl -X POST localhost:\d+", "", line) for line in guide.commands("curl")]
    for command in prepare:
        await run_to_end(tmp_path, command, empty_database)
    async with run(tmp_path, f"{serve} {guide.port}", empty_database) as server:
        await server.until("http://")
        [address, *_] = re.findall(r"http://[\d.]+:\d+", server.text)
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            placed, declined = [await client.post(path) for path in paths]
        assert (placed.status_code // 100, declined.status_code) == (2, 409), server.text
        server.process.terminate()
        await server.end()
    [printed] = re.findall(r"The worker prints `(.*?)`", guide.path.read_text())
    connection = await asyncpg.connect(empty_database)
    try:
        assert await connection.fetchval("select count(*) from orders") == 1
        assert await count(connection) == 1
        async with run(tmp_path, work, empty_database) as worker:
            await worker.until(printed)

            async def is_empty() -> bool:
                return await count(connection) == 0

            await until(is_empty, "the job is complete")
            worker.process.terminate()
            await worker.end()
            assert "Traceback" not in worker.text
    finally:
        await connection.close()


def load_program(name: str, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Run the first program of a guide in this process, and return the page with the other examples."""
    blocks = python_blocks(GUIDES / f"{name}.md")
    monkeypatch.setenv("DATABASE_URL", dsn)
    module = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", module)  # frameworks look up annotations there
    exec(compile(blocks[0], "shop.py", "exec", dont_inherit=True), vars(module))
    page = Page(blocks=blocks[1:])
    page.names = vars(module)
    return page


async def test_other_examples_of_the_fastapi_guide_run(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(empty_database).render_as_string(hide_password=False)
    page = load_program("fastapi", url, monkeypatch)
    names = await page.run()
    await asyncio.to_thread(names["test_order_sends_a_receipt"])
    names["app"].close_sync()
    names = await page.run(2)
    with TestClient(names["web"]) as client:
        assert client.get("/health/ready").json()["worker_id"]
    names = await page.run()
    with TestClient(names["small"]) as client:
        assert client.get("/ready").json()["worker_id"]
    page.assert_done()


async def test_other_example_of_the_litestar_guide_runs(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = load_program("litestar", empty_database, monkeypatch)
    names = await page.run()
    with LitestarTestClient(names["web"]) as client:
        assert client.get("/health/ready").json()["worker_id"]
    page.assert_done()


def test_flask_guide_has_no_other_example() -> None:
    assert len(python_blocks(GUIDES / "flask.md")) == 1


@pytest.mark.slow
async def test_alembic_guide_runs(empty_database: str, tmp_path: Path) -> None:
    init, revision, upgrade, script = ALEMBIC.commands("alembic")
    first, second, options = python_blocks(ALEMBIC.path)
    await run_to_end(tmp_path, init, empty_database)
    url = make_url(empty_database).set(drivername="postgresql+psycopg")
    shown = url.render_as_string(hide_password=False).replace("%", "%%")
    settings = tmp_path / "alembic.ini"
    settings.write_text(
        re.sub("^sqlalchemy.url.*", f"sqlalchemy.url = {shown}", settings.read_text(), flags=re.MULTILINE)
    )
    await run_to_end(tmp_path, revision, empty_database)
    replace_functions(tmp_path, first)
    await run_to_end(tmp_path, upgrade, empty_database)
    connection = await asyncpg.connect(empty_database)
    assert await connection.fetchval("select to_regclass('graphile_worker.jobs') is not null")
    await connection.close()

    async with run(tmp_path, script.partition(" >")[0], empty_database) as running:
        assert await running.end() == 0
        assert "graphile_worker" in running.text
    names: dict[str, Any] = {}
    exec(options, names)
    assert names["options"]["include_name"]("sales", "schema", {})
    assert "install_schema()" in second


def replace_functions(folder: Path, block: str) -> None:
    """Replace the functions of the new revision with those of the guide."""
    [path] = (folder / "migrations" / "versions").glob("*.py")
    path.write_text(path.read_text().partition("def upgrade()")[0] + block)
