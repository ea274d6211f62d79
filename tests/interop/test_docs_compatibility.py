"""The page on compatibility: its steps can be followed, its tables are facts, its tests exist."""

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

PAGE = (ROOT / "docs" / "compatibility.md").read_text()
NODES_RESIZE = """module.exports = (payload, { query }) =>
  query("insert into sizes values ($1, $2)", [payload.image, -1]);"""
sys.path.insert(0, str(ROOT / "tools"))


def named(text: str) -> list[tuple[str, str, str]]:
    """Files, classes and functions of the tests that are named in there."""
    return re.findall(r"`([\w/]+\.py)::(?:(\w+)::)?(\w+)`", text)


def rows(heading: str) -> list[list[str]]:
    """Of all tables of that section, without their heads."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    heads = {n for n, line in enumerate(lines) if line.startswith("|---")}
    kept = [line for n, line in enumerate(lines) if n not in heads and n + 1 not in heads]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def test_every_test_that_it_names_exists() -> None:
    assert len(named(PAGE)) > 30
    for file, group, test in named(PAGE):
        source = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in source, f"{file}::{test}"
        assert f"class {group}:" in source or not group


@pytest.mark.parametrize("heading", ["What holds across languages", "What differs on purpose"])
def test_every_row_of_its_tables_names_a_test(heading: str) -> None:
    assert rows(heading)
    for row in rows(heading):
        assert named(row[-1]), row[0]


def test_every_defect_of_upstream_that_we_know_of_is_in_it() -> None:
    parity = (ROOT / "tests" / "PARITY.md").read_text()
    section = parity.partition("### Defects of Node's runtime")[2].partition("\n### ")[0]
    theirs = [set(named(line)) for line in section.splitlines() if line.startswith("| D")]
    assert len(theirs) == 16
    in_page = [set(named(row[-1])) for row in rows("What differs on purpose")]
    assert [tests for tests in theirs if not any(tests & row for row in in_page)] == []


def test_the_versions_are_those_that_are_tested() -> None:
    peers = importlib.import_module("fetch_peers")
    tested = {cells[1] for cells in rows("Who may share a schema")}
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
    """Does what the page says, block by block."""

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


async def test_a_team_that_follows_the_steps_moves_its_task(
    empty: str, db: asyncpg.Connection, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "node", tmp_path / "python"
    for folder in (theirs, ours):
        (folder / "tasks").mkdir(parents=True)
    for task in ("resize", "other"):
        (theirs / "tasks" / f"{task}.js").write_text(NODES_RESIZE)
    await node.install("0.17.3", empty)
    team = Team(empty)
    await db.execute("create table sizes (image int, width int)")

    assert await db.fetchval(team.next("sql")) == 19
    async with program(*team.command(), with_errors=True) as installing:
        assert await installing.end() == 0, installing.text
    (ours / "tasks" / "resize.py").write_text(team.next("python"))
    await add(db, "resize", payload={"image": 1})
    finished = await node.run("0.17.3", empty, "--once", cwd=str(theirs))
    assert finished.status == 0, finished.output

    async with program(*team.command(), folder=ours, with_errors=True) as worker:
        await worker.until("Worker connected")
        await add(db, "resize", payload={"image": 2})
        await worker.until("Completed")
        failing = await add(db, "resize", payload={}, max_attempts=1)
        what_failed = team.next("sql")
        await until(lambda: db.fetch(what_failed), "it has failed")
        assert [row["id"] for row in await db.fetch(what_failed)] == [failing["id"]]
        (theirs / "tasks" / "resize.js").unlink()
        await add(db, "resize", payload={"image": 3, "width": 5})
        await worker.until("Completed", 2)
    assert [tuple(row) for row in await db.fetch("select * from sizes")] == [(1, -1), (2, 800), (3, 5)]
    assert await db.fetch(team.next("sql")) == []
    assert not team.blocks, "a step has no test"
