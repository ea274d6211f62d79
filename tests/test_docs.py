"""The examples of the documentation do what the text says."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import inspect
import json
import math
import pkgutil
import re
import signal
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest

import graphile_worker
from graphile_worker import JobSpec, WorkerInfo, WorkerUtils
from support.jobs import lock, one
from support.pages import Page, python_blocks
from support.postgres import ROOT
from support.waiting import until

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
    # Roles belong to the whole server, so this test's has a name of its own.
    clerk = f"clerk_{uuid4().hex}"
    guide = {
        heading: [text.replace("clerk", clerk) for text in texts] for heading, texts in sections(SQL_GUIDE)
    }
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
            await db.execute(f"set role {clerk}; select graphile_worker.add_job('report')")
        await db.execute("reset role")

        await examples("Security")
        assert await db.fetchval("select count(*) from audited_jobs") == 1

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
        await db.execute(f"reset role; drop owned by {clerk}; drop role {clerk}")
    assert run == list(guide), "a section has no test"


async def test_the_page_on_enqueueing(db: asyncpg.Connection, database: str) -> None:
    await db.execute("create table users (id int generated always as identity, email text)")
    page = Page("enqueueing.md", dsn=database)
    names = await page.run()
    async with names["app"] as app:
        receipts = await app.utils.list_jobs(task="send_receipt")
        assert [job.payload["order"] for job in receipts] == [7, 8, 9, 10, 11]
        assert (receipts[1].priority, receipts[1].max_attempts) == (-10, 5)
    names = await page.run()
    assert names["job"].payload == {"to": "ann@example.com"}
    async with WorkerUtils(dsn=database) as utils:
        names["utils"] = utils
        await page.run(2)
        [image] = await utils.list_jobs(task="resize_image")
        assert (image.queue_name, image.priority, image.max_attempts) == ("images", -10, 5)
        await page.run()
        assert {job.run_at.year for job in await utils.list_jobs(task="remind")} >= {2030}
        names = await page.run()
        await names["connection"].close()
        [welcome] = await utils.list_jobs(task="welcome")
        assert welcome.payload == {"user": 1}
        names = await page.run()
        assert [job.payload["reader"] for job in names["jobs"]] == list(range(1000))
        names = await page.run()
        assert names["job"].payload == ["a", "b", "c"]
    page.assert_done()


async def test_the_page_on_job_keys(database: str) -> None:
    async with WorkerUtils(dsn=database) as utils:
        page = Page("job-keys.md", utils=utils, dsn=database)
        await page.run()
        [debounced] = await utils.list_jobs(task="reindex")
        assert debounced.run_at - debounced.updated_at == timedelta(minutes=1)
        assert debounced.updated_at > debounced.created_at
        await page.run()
        [throttled] = await utils.list_jobs(task="push_stats")
        assert throttled.run_at - throttled.created_at == timedelta(minutes=1)
        assert throttled.payload == {"change": 2}
        names = await page.run()
        assert (names["job"].key, names["other"].key) == ("render:7", "render:7:dark")
        assert (await names["render"].using(job_key=None).enqueue(7)).key is None
        await names["app"].close()
        names = await page.run()
        assert names["removed"].key == "remind:5"
        assert await utils.remove_job("remind:5") is None
        page.assert_done()


async def test_the_page_on_reliability(database: str) -> None:
    page = Page("reliability.md", dsn=database, tasks={"hello": print})
    names = await page.run()
    await names["runner"].stop()
    decide, worker = names["on_recovery"], WorkerInfo(id="w", host="web-1", pid=7)
    async with WorkerUtils(dsn=database) as utils:
        charge, rest, other = [await utils.add_job(task) for task in ("charge_card", "import_all", "other")]
    assert (await decide(charge, worker)).reason.startswith("w (pid 7 on web-1) died")
    assert (await decide(rest, worker)).delay == 600
    assert await decide(other, worker) is None
    page.assert_done()


def test_the_page_on_reliability_has_every_setting() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    before = inspect.signature(graphile_worker.run).parameters
    about = [*before][[*before].index("recovery") : [*before].index("on_invalid_payload")]
    assert [name for name in about if f"| `{name}` |" not in text] == []


async def test_the_page_on_operations(
    db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with WorkerUtils(dsn=database) as utils:
        page = Page("operations.md", utils=utils)
        jobs = await utils.add_jobs(JobSpec("send_email", n, queue_name="q") for n in range(150))
        await utils.permanently_fail_jobs([job.id for job in jobs], "oops")
        await page.run(2)
        assert page.names["stats"].failed == 150
        await page.run()
        assert (await utils.stats()).total == 50
        await page.run()
        assert capsys.readouterr().out.endswith("\ncancelled\n")
        cancelled = await utils.get_job(id=page.names["job"].id)
        assert cancelled is not None
        assert f"`{cancelled.last_error}`" in (ROOT / "docs" / "operations.md").read_text()
        [held] = await utils.list_jobs(limit=1)
        await lock(db, held.id, by="pool-0123456789abcdef01")
        await page.run()
        assert "pool-0123456789abcdef01 node None None None 1" in capsys.readouterr().out
        await page.run()
        assert (await utils.stats()).running == 0
        await page.run()
        assert (await utils.stats()).total == 0
        page.assert_done()


async def test_the_page_on_workers(
    db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await db.execute("create table users (id int primary key, welcomed boolean)")
    await db.execute("insert into users values (7), (8)")
    await db.execute("create table sent (at timestamptz)")
    page = Page("workers.md", dsn=database)
    names = await page.run(3)
    assert "Hello, Bobby Tables" in capsys.readouterr().out
    assert names["drained"].failed == 0

    tasks = {"welcome": names["welcome"], "count_users": names["count_users"]}
    await db.execute("select graphile_worker.add_job('welcome', '{\"user\": 7}')")
    await db.execute("select graphile_worker.add_job('count_users')")
    await graphile_worker.run_once(tasks, database, handle_signals=False)
    assert await payloads(db, "send_email") == [{"user": 7}]
    assert await payloads(db, "report") == [{"users": 2}]
    await db.execute("delete from graphile_worker._private_jobs")

    # As many as are allowed were sent a moment ago, so nobody gets mail until they are old.
    await db.execute("insert into sent select now() from generate_series(1, 100)")
    async with asyncpg.create_pool(database, min_size=0) as pool:
        names["pool"] = pool
        await page.run(2)
        runner = names["runner"]
        asked = names["limit"].asked
        await until(lambda: asked_again(names["limit"], asked), "the limit is asked again")
        assert await db.fetchval("select count(*) from sent") == 100
        await db.execute("update sent set at = now() - interval '2 minutes'")
        await until(lambda: db.fetchval("select count(*) = 101 from sent"), "it is sent")
        await runner.stop()

    names = await page.run()
    async with names["lifespan"](None) as state:
        await names["greet"].enqueue("Ann")
        await until(lambda: is_drained(state["runner"]), "the job runs in the server")
    assert capsys.readouterr().out.endswith("Good morning, Ann\n")
    names = await page.run()
    worker = names["BackgroundWorker"]()
    worker.start()
    await asyncio.to_thread(worker.stop)
    assert "basicConfig" in page.skip()  # it would change the logging of this run
    page.assert_done()


async def asked_again(limit: Any, before: float) -> bool:
    return bool(limit.asked > before)


async def is_drained(runner: graphile_worker.Runner) -> bool:
    return runner.drained.done == 1


async def test_the_page_on_events(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    def hello(_payload: object) -> None:
        raise ValueError("no such name")

    page = Page("events.md", dsn=database, tasks={"hello": hello, "nothing": id})
    names = await page.run()
    await names["runner"].add_job("hello")
    await names["runner"].add_job("nothing")
    await until(lambda: has_two(names["durations"]), "both jobs end")
    await names["runner"].stop()
    assert capsys.readouterr().out == "hello failed: ValueError('no such name')\n"
    page.assert_done()


async def has_two(items: list[Any]) -> bool:
    return len(items) == 2


def test_the_page_on_events_names_every_event_and_its_fields() -> None:
    text = (ROOT / "docs" / "events.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]*)\|", text, re.MULTILINE)
    told = {
        name: re.findall(r"`([^`]+)`", re.sub(r"\(.*\)", "", fields))
        for names, fields in rows
        for name in re.findall(r"`([^`]+)`", names)
    }
    events = graphile_worker.events.EVENTS
    assert told == {name: list(event.__struct_fields__) for name, event in events.items()}


def run_python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a program of the documentation prints."""
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code], cwd=cwd, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_program_in_the_readme(short_folder: Path) -> None:
    _task, program = python_blocks(ROOT / "README.md")
    assert '"embedded:"' in program
    code = program.replace("embedded:", f"embedded:{short_folder}")
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Hello, Bobby Tables\n"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert rest == "Stopped\n"
    assert (process.returncode, errors) == (0, "")


def test_the_program_in_the_page_on_installing(database: str) -> None:
    [program] = python_blocks(ROOT / "docs" / "installing.md")
    assert run_python(program.replace("postgresql://me@localhost/mine", database)) == ""


def test_the_program_in_the_page_on_the_embedded_server(short_folder: Path) -> None:
    [program] = python_blocks(ROOT / "docs" / "embedded.md")
    printed = run_python(program.replace("./postgres", str(short_folder))).splitlines()
    assert [line.partition(":")[0] for line in printed[:2]] == ["postgresql", "postgresql"]
    assert printed[2] == str(short_folder / "run" / "server.log")


def test_the_tests_in_the_page_on_testing(tmp_path: Path) -> None:
    *examples, unit = python_blocks(ROOT / "docs" / "testing.md")
    (tmp_path / "test_mine.py").write_text("\n\n".join(examples))
    (tmp_path / "unit.py").write_text(unit)
    settings = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    for arguments, seen in (
        (["pytest", "-q", "-W", "error", *settings, "test_mine.py"], r"\b9 passed"),
        # In between asyncio may say what took long: unittest has its debug mode on.
        (["unittest", "-v", "unit"], r"(?s)^test_hello \(unit\.ShopTest\.test_hello\) .*\bok\n.*\nOK\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", *arguments],
            cwd=tmp_path,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert re.search(seen, done.stdout), done.stdout
        assert done.returncode == 0


def test_the_table_of_delays_is_right() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    shown = dict(re.findall(r"\| (\d+)(?: and more)? \| ([^|]+?) \|", text))
    assert len(shown) == 10
    units = {"h": 3600, "min": 60, "s": 1}
    for attempt, words in shown.items():
        parts = re.findall(r"([\d.]+) (h|min|s)", words)
        seconds = sum(float(number) * units[unit] for number, unit in parts)
        assert abs(seconds - math.exp(int(attempt))) <= units[parts[-1][1]], (attempt, words)


def public_modules() -> list[str]:
    """Every module that a user may import."""
    found = pkgutil.walk_packages(graphile_worker.__path__, "graphile_worker.")
    names = [module.name for module in found if not re.search(r"\._|__main__|\.watcher$", module.name)]
    return ["graphile_worker", *names]


@pytest.mark.parametrize("name", public_modules())
def test_examples_in_docstrings(name: str, graphile_worker_dsn: str, short_folder: Path) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"dsn": graphile_worker_dsn, "folder": short_folder})
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


def test_links_lead_to_headings_that_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in pages
        for target, anchor in re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", page.read_text())
        if anchor not in _anchors(page.parent / target if target else page)
    ]
    assert not broken


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
