"""The page on compatibility: its steps work, its tables are proven by tests, and these tests exist."""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker.testing import Databases
from support import node
from support.jobs import add
from support.postgres import ROOT
from support.programs import program
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PAGE = (ROOT / "docs" / "about" / "compatibility.md").read_text()
NODE_RESIZE = """module.exports = (payload, { query }) =>
  query("insert into sizes values ($1, $2)", [payload.image, -1]);"""
sys.path.insert(0, str(ROOT / "tools"))


def named(text: str) -> list[tuple[str, str, str]]:
    """Return file, class and function of each test that the text names."""
    return re.findall(r"`([\w/]+\.py)::(?:(\w+)::)?(\w+)`", text)


def rows(heading: str) -> list[list[str]]:
    """Return the rows of all tables of that section, without their headings."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads = {n for n, line in enumerate(lines) if line.startswith("|---")}
    kept = [line for n, line in enumerate(lines) if n not in heads and n + 1 not in heads]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def test_every_test_named_on_the_compatibility_page_exists() -> None:
    assert len(named(PAGE)) > 30
    for file, group, test in named(PAGE):
        source = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"
        assert f"class {group}:" in source or not group


@pytest.mark.parametrize("heading", ["Guarantees across languages", "Deliberate differences"])
def test_every_row_of_the_compatibility_tables_names_a_test(heading: str) -> None:
    assert rows(heading)
    for row in rows(heading):
        assert named(row[-1]), row[0]


def test_compatibility_page_has_every_known_defect_of_node() -> None:
    parity = (ROOT / "tests" / "PARITY.md").read_text()
    section = parity.partition("### Defects of Node's runtime")[2].partition("\n### ")[0]
    defects = [set(named(line)) for line in section.splitlines() if line.startswith("| D")]
    assert len(defects) == 16
    in_page = [set(named(row[-1])) for row in rows("Deliberate differences")]
    assert [tests for tests in defects if not any(tests & row for row in in_page)] == []


def test_compatibility_page_has_the_tested_versions() -> None:
    peers = importlib.import_module("fetch_peers")
    tested = {cells[1] for cells in rows("Supported combinations")}
    assert {package.partition("@")[2] for package in peers.GRAPHILE_WORKERS} <= tested


@pytest.fixture
async def empty(graphile_worker_databases: Databases) -> AsyncIterator[str]:
    async with graphile_worker_databases.fresh(empty=True) as dsn:
        yield dsn


@pytest.fixture
async def db(empty: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty)
    yield connection
    await connection.close()


class Team:
    """Follows the page's steps, block by block."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        steps = PAGE.partition("\n## Moving a task from Node to Python\n")[2]
        self.blocks = re.findall(r"```(\w+)\n(.*?)```", steps, re.DOTALL)

    def next(self, kind: str) -> str:
        found, text = self.blocks.pop(0)
        assert found == kind
        return re.sub(r"^   ", "", text, flags=re.MULTILINE).removeprefix("$ ").strip()

    def command(self) -> list[str]:
        name, *arguments = self.next("console").split()
        assert name == "graphile-worker"
        return [sys.executable, "-m", "graphile_worker", "-c", self._dsn, *arguments]


@pytest.mark.slow
async def test_following_the_steps_moves_a_task_from_node_to_python(
    empty: str, db: asyncpg.Connection, tmp_path: Path
) -> None:
    node_folder, python_folder = tmp_path / "node", tmp_path / "python"
    for folder in (node_folder, python_folder):
        (folder / "tasks").mkdir(parents=True)
    for task in ("resize", "other"):
        (node_folder / "tasks" / f"{task}.js").write_text(NODE_RESIZE)
    await node.install("0.17.3", empty)
    team = Team(empty)
    await db.execute("create table sizes (image int, width int)")

    assert await db.fetchval(team.next("sql")) == 19
    async with program(*team.command(), with_errors=True) as installing:
        assert await installing.end() == 0, installing.text
    (python_folder / "tasks" / "resize.py").write_text(team.next("python"))
    await add(db, "resize", payload={"image": 1})
    finished = await node.run("0.17.3", empty, "--once", cwd=str(node_folder))
    assert finished.status == 0, finished.output

    async with program(*team.command(), folder=python_folder, with_errors=True) as worker:
        await worker.until("Worker connected")
        await add(db, "resize", payload={"image": 2})
        await worker.until("Completed")
        failing = await add(db, "resize", payload={}, max_attempts=1)
        failed_jobs = team.next("sql")
        await until(lambda: db.fetch(failed_jobs), "the job has failed")
        assert [row["id"] for row in await db.fetch(failed_jobs)] == [failing["id"]]
        (node_folder / "tasks" / "resize.js").unlink()
        await add(db, "resize", payload={"image": 3, "width": 5})
        await worker.until("Completed", 2)
    assert [tuple(row) for row in await db.fetch("select * from sizes")] == [(1, -1), (2, 800), (3, 5)]
    assert await db.fetch(team.next("sql")) == []
    assert not team.blocks, "a step has no test"
