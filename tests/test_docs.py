"""The examples of the documentation do what the text says."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import re
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import graphile_worker
from support.jobs import one
from support.postgres import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SQL_GUIDE = ROOT / "docs" / "sql.md"


def sections(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The headings of a page, each with its SQL examples."""
    for part in page.read_text().split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        yield heading, re.findall(r"```sql\n(.*?)```", text, re.DOTALL)


async def payloads(db: asyncpg.Connection, task: str) -> list[object]:
    rows = await db.fetch(
        """select payload from graphile_worker._private_jobs as job
        join graphile_worker._private_tasks as task on task.id = job.task_id
        where identifier = $1 order by job.id""",
        task,
    )
    return [json.loads(row["payload"]) for row in rows]


async def test_the_sql_guide(db: asyncpg.Connection) -> None:
    guide = dict(sections(SQL_GUIDE))
    run: list[str] = []

    async def examples(heading: str) -> list[list[Any]]:
        """Run the examples of a section; what the statements returned that asked for something."""
        run.append(heading)
        return [
            await db.fetch(text) if text.count(";\n") == 1 else [await db.execute(text)]
            for text in guide[heading]
        ]

    try:
        await examples("Adding a job")
        assert await payloads(db, "send_email") == [
            {"to": "ann@example.com"},
            {"to": "bob@example.com"},
        ]
        image = await one(db, "select * from graphile_worker.jobs where priority = -10")
        assert (image["task_identifier"], image["queue_name"]) == ("resize_image", "images")

        assert len(await examples("Later")) == 3
        waits = await db.fetch(
            "select run_at - created_at as wait from graphile_worker.jobs where task_identifier = 'remind'"
        )
        assert [row["wait"].total_seconds() for row in waits] == [9000.0]

        [newsletters] = await examples("Many at once")
        assert [json.loads(row["payload"])["reader"] for row in newsletters] == list(range(1, 101))

        await examples("From a trigger")
        assert await payloads(db, "welcome") == [{"user": 1}]

        await examples("One trigger function for many tables")
        operations = [change["operation"] for change in await payloads(db, "index_article")]  # type: ignore[index]
        assert operations == ["INSERT", "UPDATE", "DELETE"]
        assert await payloads(db, "audit") == [
            {"schema": "public", "table": "users", "operation": "DELETE", "id": 1}
        ]

        await examples("For a role with fewer rights")
        assert await payloads(db, "report") == [{"month": "2030-01-01", "asked_by": "postgres"}]
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await db.execute("set role clerk; select graphile_worker.add_job('report')")
        await db.execute("reset role")

        jobs, states = await examples("Looking")
        assert len(jobs) == 20
        assert ("send_newsletter", "scheduled", 100) in {tuple(row) for row in states}

        await db.execute(
            "update graphile_worker._private_jobs set locked_by = $1, locked_at = now() where id = 4",
            "pool-0123456789abcdef01",
        )
        completed, failed, again, _ = await examples("Administering")
        assert [row["id"] for row in completed] == [1, 2]
        assert [row["id"] for row in failed + again] == [3, 3]
        assert await db.fetchval("select count(*) from graphile_worker.jobs where locked_by is not null") == 0

        await examples("Uninstalling")
        assert await db.fetchval("select to_regnamespace('graphile_worker')") is None
    finally:
        await db.execute("reset role; drop owned by clerk; drop role clerk")
    assert run == list(guide), "a section has no test"


def public_modules() -> list[str]:
    """Every module that a user may import."""
    found = pkgutil.walk_packages(graphile_worker.__path__, "graphile_worker.")
    names = [module.name for module in found if not re.search(r"\._|__main__|\.watcher$", module.name)]
    return ["graphile_worker", *names]


@pytest.mark.parametrize("name", public_modules())
def test_examples_in_docstrings(name: str, default_server: str, short_folder: Path) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"dsn": default_server, "folder": short_folder})
    assert result.failed == 0


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        f"{name}.{member}"
        for name in public_modules()
        for member in getattr(importlib.import_module(name), "__all__", [])
        if not getattr(importlib.import_module(name), member).__doc__
    ]
    assert not missing


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
