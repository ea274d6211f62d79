"""The examples in the documentation run and do what the text says."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import json
import math
import os
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest

import graphile_worker
from graphile_worker import JobSpec, JobState, WorkerInfo, WorkerUtils
from graphile_worker._worker.run_options import RunOptions
from support.jobs import fetch_one, lock
from support.pages import RECOVERY_OPTIONS, Page, python_blocks
from support.postgres import ROOT
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphile_worker import App, Job

QUICKSTART = ROOT / "docs" / "getting-started" / "quickstart.md"
SQL_GUIDE = ROOT / "docs" / "guides" / "sql.md"


def sections(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each heading of a page with its SQL examples; "intro" stands for the text before the first."""
    for part in ("intro" + page.read_text()).split("\n## "):
        heading, _, text = part.partition("\n")
        yield heading.partition("# ")[0], re.findall(r"```sql\n(.*?)```", text, re.DOTALL)


async def payloads(db: asyncpg.Connection, task: str) -> list[object]:
    rows = await db.fetch(
        """select payload from graphile_worker._private_jobs as job
        join graphile_worker._private_tasks as task on task.id = job.task_id
        where identifier = $1 order by job.id""",
        task,
    )
    return [json.loads(row["payload"]) for row in rows]


async def test_sql_guide_examples_run(db: asyncpg.Connection) -> None:
    # Roles belong to the whole server, so this test needs a unique role name.
    clerk = f"clerk_{uuid4().hex}"
    guide = {
        heading: [text.replace("clerk", clerk) for text in texts] for heading, texts in sections(SQL_GUIDE)
    }
    run: list[str] = []

    async def examples(heading: str) -> list[list[Any]]:
        """Run the examples of a section and return their rows."""
        run.append(heading)
        return [
            await db.fetch(text) if text.count(";\n") == 1 else [await db.execute(text)]
            for text in guide[heading]
        ]

    try:
        await examples("intro")
        await examples("Add a job")
        assert await payloads(db, "send_email") == [
            {"to": "ann@example.com"},
            {"to": "bob@example.com"},
        ]
        image = await fetch_one(db, "select * from graphile_worker.jobs where priority = -10")
        assert (image["task_identifier"], image["queue_name"]) == ("resize_image", "images")

        assert len(await examples("Run a job later")) == 3
        waits = await db.fetch(
            "select run_at - created_at as wait from graphile_worker.jobs where task_identifier = 'remind'"
        )
        assert [row["wait"].total_seconds() for row in waits] == [9000.0]

        [newsletters] = await examples("Add many jobs")
        assert [json.loads(row["payload"])["reader"] for row in newsletters] == list(range(1, 101))

        await examples("Add jobs from a trigger")
        assert await payloads(db, "welcome") == [{"user": 1}]

        await examples("One trigger function for many tables")
        operations = [change["operation"] for change in await payloads(db, "index_article")]  # type: ignore[index]
        assert operations == ["INSERT", "UPDATE", "DELETE"]
        assert await payloads(db, "audit") == [
            {"schema": "public", "table": "users", "operation": "DELETE", "id": 1}
        ]

        await examples("Restricted roles")
        assert await payloads(db, "report") == [{"month": "2030-01-01", "asked_by": "postgres"}]
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await db.execute(f"set role {clerk}; select graphile_worker.add_job('report')")
        await db.execute("reset role")

        await examples("Security")
        assert await db.fetchval("select count(*) from audited_jobs") == 1

        jobs, states = await examples("Query jobs")
        assert len(jobs) == 20
        assert ("send_newsletter", "scheduled", 100) in {tuple(row) for row in states}

        await db.execute(
            "update graphile_worker._private_jobs set locked_by = $1, locked_at = now() where id = 4",
            "pool-0123456789abcdef01",
        )
        completed, failed, again, _ = await examples("Change jobs")
        assert [row["id"] for row in completed] == [1, 2]
        assert [row["id"] for row in failed + again] == [3, 3]
        assert await db.fetchval("select count(*) from graphile_worker.jobs where locked_by is not null") == 0

        await examples("Uninstall")
        assert await db.fetchval("select to_regnamespace('graphile_worker')") is None
    finally:
        await db.execute(f"reset role; drop owned by {clerk}; drop role {clerk}")
    assert run == list(guide), "a section has no test"


async def test_enqueueing_guide_examples_run(db: asyncpg.Connection, database: str) -> None:
    await db.execute("create table users (id int generated always as identity, email text)")
    page = Page("guides/enqueueing.md", dsn=database)
    names = await page.run()
    async with names["app"] as app:
        await check_enqueueing_with_an_app(page, app, db)
        await asyncio.to_thread(app.close_sync)
    names = await page.run()
    assert (names["job"].payload, names["job"].priority) == ({"to": "ann@example.com"}, -10)
    async with WorkerUtils(dsn=database) as utils:
        names["utils"] = utils
        await page.run()
        assert [job.payload["to"] for job in await utils.list_jobs(task="send_email")] == [
            "ann@example.com",
            "bob@example.com",
        ]
        names = await page.run()
        assert [job.payload["reader"] for job in names["jobs"]] == list(range(1000))
        names = await page.run()
        assert names["job"].payload == ["a", "b", "c"]
    page.assert_done()


async def check_enqueueing_with_an_app(page: Page, app: App, db: asyncpg.Connection) -> None:
    async def receipts() -> list[Job]:
        return await app.utils.list_jobs(task="send_receipt")

    [first] = await receipts()
    assert (first.payload, first.max_attempts) == ({"order": 7}, 5)
    await page.run()
    [image] = await app.utils.list_jobs(task="resize_image")
    assert (image.queue_name, image.priority, image.max_attempts) == ("images", -10, 5)
    assert image.flags == {"needs-gpu", "timeout:60"}

    await page.run()
    soon, later, fixed, text = (await receipts())[1:]
    assert soon.run_at - soon.created_at == timedelta(seconds=90)
    assert (later.run_at - later.created_at, later.priority) == (timedelta(hours=2), -10)
    assert fixed.run_at == text.run_at == datetime(2030, 1, 1, 8, tzinfo=UTC)
    assert {job.state for job in (soon, later, fixed, text)} == {JobState.SCHEDULED}

    names = await page.run()
    await names["connection"].close()
    [welcome] = await app.utils.list_jobs(task="welcome")
    assert (welcome.payload, welcome.queue_name) == ({"user": 1}, "mail")
    assert await db.fetchval("select email from users where id = 1") == "cleo@example.com"

    names = await page.run()
    assert [job.payload["order"] for job in await receipts()] == list(range(7, 16))
    assert [job.payload for job in names["jobs"]] == [{"order": 15}, {"image": 18}]
    assert names["jobs"][1].priority == 3

    await page.run()
    assert ((await receipts())[-1].payload, (await receipts())[-1].max_attempts) == ({"order": 16}, 5)
    [foreign] = await app.utils.list_jobs(task="made/by/node")
    assert (foreign.payload, foreign.queue_name) == ({"anything": [1, 2]}, "node")

    names = await page.run()
    assert re.fullmatch(r"Added job \d+", await asyncio.to_thread(names["view"], None))
    with pytest.raises(graphile_worker.ConfigurationError, match="event loop"):
        names["view"](None)
    assert (await receipts())[-1].payload == {"order": 17}


async def test_job_keys_guide_examples_run(database: str) -> None:
    async with WorkerUtils(dsn=database) as utils:
        page = Page("guides/job-keys.md", utils=utils, dsn=database)
        await page.run()
        [debounced] = await utils.list_jobs(task="reindex")
        assert debounced.run_at - debounced.updated_at == timedelta(minutes=1)
        assert debounced.updated_at > debounced.created_at
        await page.run()
        [throttled] = await utils.list_jobs(task="push_stats")
        assert throttled.run_at - throttled.created_at == timedelta(minutes=1)
        assert throttled.payload == {"change": 2}
        names = await page.run()
        job, same, other, without = (names[name] for name in ("job", "same", "other", "without"))
        assert (job.key, other.key, without.key) == ("render:7", "render:7:dark", None)
        assert job.id == same.id != other.id != without.id
        assert (same.payload, same.run_at) == ({"article": 7, "theme": "dark"}, job.run_at)
        digest = (await page.run())["digest"]
        assert digest.spec("ann@example.com", "Hello").job_key is None
        assert digest.spec(to="Ann@Example.org", text="Hello").job_key == "digest:ann@example.org"
        await page.run()
        [report] = await utils.list_jobs(task="report")
        assert (report.key, report.revision) == ("report:monday", 1)
        assert report.run_at - report.updated_at == timedelta(seconds=30)
        await names["app"].close()
        names = await page.run()
        assert names["removed"].key == "remind:5"
        assert await utils.remove_job("remind:5") is None
        page.assert_done()


async def test_reliability_page_examples_run(database: str) -> None:
    page = Page("production/reliability.md", dsn=database, tasks={"hello": print})
    names = await page.run()
    await names["runner"].stop()
    decide, worker = names["on_recovery"], WorkerInfo(id="w", host="web-1", pid=7)
    async with WorkerUtils(dsn=database) as utils:
        charge, rest, other = [await utils.add_job(task) for task in ("charge_card", "import_all", "other")]
    assert (await decide(charge, worker)).reason.startswith("w (pid 7 on web-1) died")
    assert (await decide(rest, worker)).delay == 600
    assert await decide(other, worker) is None
    page.assert_done()


def test_reliability_page_lists_every_recovery_option() -> None:
    text = (ROOT / "docs" / "production" / "reliability.md").read_text()
    assert {*RECOVERY_OPTIONS} <= {*RunOptions.__annotations__}
    assert [name for name in RECOVERY_OPTIONS if f"| `{name}` |" not in text] == []


async def test_maintenance_page_examples_run(
    db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with WorkerUtils(dsn=database) as utils:
        page = Page("production/maintenance.md", utils=utils)
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
        assert f"`{cancelled.last_error}`" in (ROOT / "docs" / "production" / "maintenance.md").read_text()
        [locked_job] = await utils.list_jobs(limit=1)
        await lock(db, locked_job.id, by="pool-0123456789abcdef01")
        await page.run()
        assert "pool-0123456789abcdef01 node None unknown None 1" in capsys.readouterr().out
        await page.run()
        assert (await utils.stats()).running == 0
        await page.run()
        assert (await utils.stats()).total == 0
        page.assert_done()


async def test_running_workers_guide_examples_run(
    db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await db.execute("create table users (id int primary key, welcomed boolean)")
    await db.execute("insert into users values (7), (8)")
    await db.execute("create table sent (at timestamptz)")
    page = Page("guides/running-workers.md", dsn=database)
    names = await page.run()
    assert "True\n" in capsys.readouterr().out
    app = names["app"]
    await app.run_once(handle_signals=False)

    names = await page.run(3)
    assert "Hello, Bobby Tables" in capsys.readouterr().out
    assert names["summary"].failed == 0

    tasks = {"welcome": names["welcome"], "count_users": names["count_users"]}
    await db.execute("select graphile_worker.add_job('welcome', '{\"user\": 7}')")
    await db.execute("select graphile_worker.add_job('count_users')")
    await graphile_worker.run_once(tasks, database, handle_signals=False)
    assert await payloads(db, "send_email") == [{"user": 7}]
    assert await payloads(db, "report") == [{"users": 2}]
    await db.execute("delete from graphile_worker._private_jobs")

    # The limit has just been reached, so no mail is sent until those rows are old.
    await db.execute("insert into sent select now() from generate_series(1, 100)")
    async with asyncpg.create_pool(database, min_size=0) as pool:
        names["pool"] = pool
        await page.run(2)
        runner = names["runner"]
        checked_at = names["rate_limit"].checked_at
        await until(lambda: was_checked_again(names["rate_limit"], checked_at), "the limit is checked again")
        assert await db.fetchval("select count(*) from sent") == 100
        await db.execute("update sent set at = now() - interval '2 minutes'")
        await until(lambda: db.fetchval("select count(*) = 101 from sent"), "the mail is sent")
        await runner.stop()

    names = await page.run()
    capsys.readouterr()
    async with names["lifespan"](None) as state:
        await names["greet"].enqueue("Ann")
        await until(lambda: ran_one_job(state["runner"]), "the job runs in the server")
    assert capsys.readouterr().out.endswith("Good morning, Ann\n")
    await app.close()
    names = await page.run()
    worker = names["BackgroundWorker"]()
    worker.start()
    await asyncio.to_thread(worker.stop)
    assert "basicConfig" in page.skip()  # basicConfig would change the logging of this test run
    page.assert_done()


async def was_checked_again(limit: Any, before: float) -> bool:
    return bool(limit.checked_at > before)


async def ran_one_job(runner: graphile_worker.Runner) -> bool:
    return runner.summary.succeeded == 1


async def test_events_page_examples_run(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    def hello(_payload: object) -> None:
        raise ValueError("no such name")

    page = Page("reference/events.md", dsn=database, tasks={"hello": hello, "nothing": id})
    names = await page.run()
    await names["runner"].add_job("hello")
    await names["runner"].add_job("nothing")
    await until(lambda: has_two(names["durations"]), "both jobs end")
    await names["runner"].stop()
    assert capsys.readouterr().out == "hello failed: ValueError('no such name')\n"
    page.assert_done()


async def has_two(items: list[Any]) -> bool:
    return len(items) == 2


def test_events_page_lists_every_event_and_its_fields() -> None:
    text = (ROOT / "docs" / "reference" / "events.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]*)\|", text, re.MULTILINE)
    documented = {
        name: re.findall(r"`([^`]+)`", re.sub(r"\(.*\)", "", fields))
        for names, fields in rows
        for name in re.findall(r"`([^`]+)`", names)
    }
    events = graphile_worker.events.EVENTS
    assert documented == {name: list(event.__struct_fields__) for name, event in events.items()}


def run_python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run a program from the documentation and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code], cwd=cwd, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_readme_program_runs(short_folder: Path) -> None:
    [program] = python_blocks(ROOT / "README.md")
    assert '"embedded:"' in program
    printed = run_python(program.replace("embedded:", f"embedded:{short_folder}"))
    assert printed == "Welcome, ann@example.com\n"


async def test_quickstart_examples_run(db: asyncpg.Connection, database: str, tmp_path: Path) -> None:
    await db.execute("create table users (id int generated always as identity, email text)")
    blocks = [textwrap.dedent(block) for block in python_blocks(QUICKSTART)]
    on_loop, on_thread, enqueue, enqueue_sync, in_transaction, program = blocks
    starter = files("graphile_worker.cli").joinpath("starter", "jobs.py.txt").read_text()
    for task in (on_loop, on_thread):
        jobs_py = f"{starter}\n\n{task}"
        page = Page(blocks=[jobs_py, enqueue, in_transaction], connection=db, email="ann@example.com")
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("DATABASE_URL", database)
            names = await page.run(3)
            await asyncio.to_thread(exec, enqueue_sync, names)
        async with names["app"] as app:
            await asyncio.to_thread(app.close_sync)
            jobs = await app.utils.list_jobs(task="send_welcome")
            assert [job.payload["user"] for job in jobs] == [7, names["user"], 7]
            (tmp_path / "jobs.py").write_text(jobs_py)
            assert await asyncio.to_thread(run_until_ctrl_c, program, tmp_path, database) == [
                *sorted(f"Welcome, user {job.payload['user']}" for job in jobs),
                "Stopped",
            ]


def run_until_ctrl_c(program: str, folder: Path, dsn: str) -> list[str]:
    """Run a worker until three jobs have printed, interrupt it, and return all printed lines."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=folder,
        env={**os.environ, "DATABASE_URL": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        text = ""
        while text.count("Welcome") < 3:  # two threads may print on one line, and then end two lines
            text += process.stdout.readline()
        printed = sorted(re.findall(r"Welcome, user \d+", text))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Worker connected" in errors
    assert "Traceback" not in errors
    return [*printed, *filter(None, rest.splitlines())]


def test_install_page_program_runs(database: str) -> None:
    [program] = python_blocks(ROOT / "docs" / "getting-started" / "install.md")
    assert run_python(program.replace("postgresql://me@localhost/mine", database)) == ""


def test_embedded_guide_program_prints_addresses_and_log(short_folder: Path) -> None:
    [program] = python_blocks(ROOT / "docs" / "guides" / "embedded.md")
    printed = run_python(program.replace("./postgres", str(short_folder))).splitlines()
    assert [line.partition(":")[0] for line in printed[:2]] == ["postgresql", "postgresql"]
    assert printed[2] == str(short_folder / "run" / "server.log")


@pytest.mark.slow
def test_testing_guide_examples_pass_as_tests(tmp_path: Path) -> None:
    *examples, unit = python_blocks(ROOT / "docs" / "guides" / "testing.md")
    (tmp_path / "test_mine.py").write_text("\n\n".join(examples))
    (tmp_path / "unit.py").write_text(unit)
    settings = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    for arguments, seen in (
        (["pytest", "-q", "-W", "error", *settings, "test_mine.py"], r"\b9 passed"),
        # unittest turns on the debug mode of asyncio, which may log slow callbacks in between.
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


def test_maintenance_page_retry_delays_match_the_formula() -> None:
    text = (ROOT / "docs" / "production" / "maintenance.md").read_text()
    shown = dict(re.findall(r"\| (\d+)(?: and more)? \| ([^|]+?) \|", text))
    assert len(shown) == 10
    units = {"h": 3600, "min": 60, "s": 1}
    for attempt, words in shown.items():
        parts = re.findall(r"([\d.]+) (h|min|s)", words)
        seconds = sum(float(number) * units[unit] for number, unit in parts)
        assert abs(seconds - math.exp(int(attempt))) <= units[parts[-1][1]], (attempt, words)


_EXCLUDED = re.compile(r"__main__|\.watcher$|\.contrib\.django\b")
"""Programs, and the app for Django, whose tests run with Django's settings."""


def all_modules() -> list[str]:
    """Return the names of all modules, private ones included."""
    found = pkgutil.walk_packages(graphile_worker.__path__, "graphile_worker.")
    return [module.name for module in found if not _EXCLUDED.search(module.name)]


def public_modules() -> list[str]:
    """Return the names of all modules that users may import."""
    return ["graphile_worker", *(name for name in all_modules() if "._" not in name)]


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", all_modules())
def test_docstring_examples_pass(name: str, graphile_worker_dsn: str, short_folder: Path) -> None:
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


def test_links_between_pages_have_existing_targets() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_links_with_anchors_match_existing_headings() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in pages
        for target, anchor in re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", page.read_text())
        if anchor not in _anchors(page.parent / target if target else page)
    ]
    assert not broken


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, as GitHub and the site render them, and its API names."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    documented = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    members = {f"{name}.{member}" for name in documented for member in dir(_documented(name))}
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return anchors | {*documented} | members


def _documented(name: str) -> object:
    """Return the object that the API reference documents under that name."""
    return pkgutil.resolve_name(name)
