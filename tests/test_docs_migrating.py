"""The pages on migrating from another queue: their examples run, and the names in their tables exist."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import subprocess
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import pytest

import graphile_worker
from graphile_worker import App, JobContext, RunSummary, WorkerUtils, retry as policies, run_once
from graphile_worker._tasks.options import JobOptions, TaskOptions
from graphile_worker._worker.run_options import RunOptions
from graphile_worker.cli.command import root
from graphile_worker.retry import read_policy
from graphile_worker.testing import Databases
from support import node
from support.jobs import add
from support.pages import Page
from support.postgres import PEERS, ROOT
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODE, CELERY = "migrating/graphile-worker.md", "migrating/celery.md"
PROCRASTINATE = "migrating/procrastinate.md"
RQ, ARQ = "migrating/rq.md", "migrating/arq.md"
PAGES = [NODE, CELERY, PROCRASTINATE, RQ, ARQ]
NODE_PACKAGE = PEERS / "graphile-worker-0.18.0" / "node_modules" / "graphile-worker"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


class TestGraphileWorkerPage:
    async def test_examples_run(
        self,
        db: asyncpg.Connection,
        database: str,
        caplog: pytest.LogCaptureFixture,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        caplog.set_level(logging.INFO, "graphile_worker")
        await db.execute("create table sizes (image int, width int)")
        page = Page(NODE, dsn=database)
        names = await page.run()
        await until(lambda: is_logged(caplog, "Hello, Ann"), "the first job runs")
        await names["runner"].stop()

        names = await page.run()
        assert "Hello to ann@example.com, attempt 1" in caplog.messages
        app: App = names["app"]
        async with app:
            await page.run()
            [remind] = await app.utils.list_jobs(task="remind")
            assert (remind.key, remind.max_attempts) == ("remind:5", 3)
            assert remind.run_at - remind.created_at == timedelta(hours=2)

            names = await page.run()
            await self.check_outcomes(names["charge"], app)

            names = await page.run()
            await app.run_once()
            [ping] = await app.utils.list_jobs(task="ping")
            assert ping.payload == ["http://two.example"]
            assert f"`{ping.last_error}`" in " ".join((ROOT / "docs" / NODE).read_text().split())

            await page.run()
            await app.add_job("charge", {"order": 5, "state": "unknown"})
            await app.run_once()
            assert "charge failed permanently: there is no such order" in capsys.readouterr().out

            names = await page.run()
            await add(db, "resize", payload={"image": 1})
            wide = await add(db, "resize", payload={"image": 2, "width": "wide"})
            await page.run()
            [(job, why)] = names["misfits"]
            assert job == wide["id"]
            assert "width" in why
            await app.run_once()
            assert [tuple(row) for row in await db.fetch("select * from sizes")] == [(1, 800)]
        page.assert_done()

    async def check_outcomes(self, charge: Any, app: App) -> None:
        states = ("disputed", "busy", "returned", "unknown", "fine")
        jobs = {state: await charge.enqueue(order=1, state=state) for state in states}
        await app.run_once()
        snoozed, retried, cancelled, failed, done = [
            await app.utils.get_job(id=jobs[state].id) for state in states
        ]
        assert snoozed is not None
        assert (snoozed.attempts, snoozed.state) == (0, "scheduled")
        assert retried is not None
        assert (retried.attempts, retried.state) == (1, "scheduled")
        assert timedelta(seconds=20) < retried.run_at - retried.created_at < timedelta(seconds=60)
        assert cancelled is not None
        assert cancelled.state == "failed"
        assert failed is not None
        assert (failed.state, failed.last_error) == ("failed", "there is no such order")
        assert done is None

    async def test_plain_function_can_return_batch_results(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def settle(payload: list[int]) -> list[ValueError | int]:
            return [ValueError("odd") if item % 2 else item for item in payload][
                : 3 if 7 in payload else None
            ]

        async with WorkerUtils(database) as utils:
            await utils.add_batch_job("settle", [1, 2, 3])
            await utils.add_batch_job("settle", [7, 7, 7, 7])
            await run_once({"settle": settle}, database)
            [job] = await utils.list_jobs()
        assert job.payload == [1, 3]
        assert "are ignored" in caplog.text

    async def test_removing_a_task_from_node_moves_its_jobs_to_python(
        self, db: asyncpg.Connection, database: str, tmp_path: Path
    ) -> None:
        """A worker claims only jobs of tasks that it has."""
        (tmp_path / "tasks").mkdir()
        for task in ("resize", "other"):
            (tmp_path / f"tasks/{task}.js").write_text(
                "module.exports = (payload, { query }) => query('insert into ran values ($1)', ['node'])"
            )
        await db.execute("create table ran (by text)")
        app = App(database)

        @app.task
        async def resize(ctx: JobContext, image: int) -> None:
            await ctx.query("insert into ran values ($1)", f"python {image}")

        async def run_workers(*order: str) -> list[str]:
            await db.execute("truncate ran")
            for task in ("resize", "other"):
                await add(db, task, payload={"image": 1})
            for worker in order:
                if worker == "node":
                    finished = await node.run("0.18.0", database, "--once", cwd=str(tmp_path))
                    assert finished.status == 0, finished.output
                else:
                    await app.run_once()
            return sorted(row["by"] for row in await db.fetch("select by from ran"))

        assert await run_workers("node", "python") == ["node", "node"]
        assert await run_workers("python", "node") == ["node", "python 1"]
        (tmp_path / "tasks/resize.js").unlink()
        assert await run_workers("node", "python") == ["node", "python 1"]
        await app.close()


class TestCeleryPage:
    async def test_examples_run(
        self, db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await db.execute("create table users (id int generated always as identity, email text)")
        await db.execute("create table sums (request int primary key, total int)")
        await db.execute("create table uploads (id int primary key, files text[])")
        smtp = Smtp()
        page = Page(CELERY, dsn=database, smtp=smtp)
        names = await page.run()
        app: App = names["app"]
        async with app:
            [ann, bob] = await app.utils.list_jobs(task="send_email")
            assert (ann.payload, ann.max_attempts) == ({"to": "ann@example.com"}, 6)
            assert (bob.priority, bob.run_at - bob.created_at) == (3, timedelta(hours=1))
            await app.run_once()
            [ann] = await app.utils.list_jobs(task="send_email", state="scheduled", limit=1)
            assert (ann.attempts, ann.last_error) == (1, "Retry in 60 s: it hung up")

            smtp.answers = True
            names = await page.run()
            await asyncio.to_thread(names["upload_view"])
            app.close_sync()
            [small] = await app.utils.list_jobs(task="resize_image", state="scheduled")
            assert small.payload == {"image": 2, "width": 400}
            await page.run()
            await app.run_once()
            assert smtp.sent == [("cleo@example.com", "Welcome, number 1")]
            assert capsys.readouterr().out == "Resized image 1 to 800\n"

            names = await page.run()
            await self.check_retries(names["fetch"], app)
            names = await page.run()
            await self.check_routing(names)

            names = await page.run()
            await names["add"].enqueue(request=1, x=2, y=3)
            await names["add"].enqueue(request=1, x=2, y=3)
            await page.run()
            await app.run_once()
            assert await db.fetchval("select total from sums") == 5
            assert capsys.readouterr().out == "Upload 1 is complete\n"
        page.assert_done()

    async def check_retries(self, fetch: Any, app: App) -> None:
        safe, unsafe = await fetch.enqueue("https://one.example"), await fetch.enqueue("http://one.example")
        await app.run_once()
        retried, failed = await app.utils.get_job(id=safe.id), await app.utils.get_job(id=unsafe.id)
        assert retried is not None
        assert failed is not None
        assert (retried.attempts, retried.state) == (1, "scheduled")
        assert (failed.attempts, failed.state, failed.last_error) == (
            4,
            "failed",
            "http://one.example is not safe",
        )

    async def check_routing(self, names: dict[str, Any]) -> None:
        everything, only_images = names["everything"], names["only_images"]
        async with everything:
            await everything.tasks["resize"].enqueue(1)
            book = await everything.tasks["book"].enqueue(2)
            assert book.queue_name == "ledger"
            assert await only_images.run_once() == RunSummary(1)
            assert await everything.run_once() == RunSummary(1)

    @pytest.mark.parametrize("written", re.findall(r"`retry=([^`]+)`", (ROOT / "docs" / CELERY).read_text()))
    def test_retry_policies_in_the_table_are_valid(self, written: str) -> None:
        assert read_policy(eval(written, vars(policies))) is not None


class TestProcrastinatePage:
    async def test_examples_run(
        self, db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await db.execute("create table users (id int generated always as identity, email text)")
        smtp = AsyncSmtp()
        page = Page(PROCRASTINATE, dsn=database, smtp=smtp)
        names = await page.run()
        app: App = names["app"]
        async with app:
            [ann, bob] = await app.utils.list_jobs(task="send_email")
            assert (ann.payload, ann.max_attempts, ann.queue_name) == (
                {"to": "ann@example.com"},
                6,
                "mail",
            )
            assert (bob.priority, bob.run_at - bob.created_at) == (-3, timedelta(hours=1))
            await page.run()
            [later] = await app.utils.list_jobs(task="resize_image", state="scheduled")
            assert (later.payload, later.priority, later.queue_name) == ({"image": 2}, -5, "images")
            await page.run()
            await app.run_once()
            assert smtp.sent == [("ann@example.com", "Hello"), ("cleo@example.com", "Welcome, number 1")]
            assert capsys.readouterr().out == "Resized image 1 to 800\n"

            names = await page.run()
            everything, only_images = names["everything"], names["only_images"]
            async with everything:
                await everything.tasks["resize"].enqueue(1)
                await everything.tasks["report"].enqueue("2030-01")
                assert await only_images.run_once() == RunSummary(1)
                assert await everything.run_once() == RunSummary(1)

            await page.run()
            [item] = app.cron_items
            assert (item.task, item.backfill) == ("clean_up", timedelta(days=1))
            await app.add_job("clean_up", {"_cron": {"ts": "2030-01-01T04:00:00Z", "backfilled": False}})
            await app.run_once()
            assert capsys.readouterr().out == "2030-01-01T04:00:00Z\n"
        page.assert_done()

    @pytest.mark.parametrize(
        "written", re.findall(r"`retry=([^`]+)`", (ROOT / "docs" / PROCRASTINATE).read_text())
    )
    def test_retry_policies_in_the_table_are_valid(self, written: str) -> None:
        if written not in {"True", "False", "5"}:  # values from the Procrastinate column
            assert read_policy(eval(written, vars(policies))) is not None


class TestRqPage:
    async def test_examples_run(
        self, db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await db.execute("create table accounts (id int primary key, closed boolean default false)")
        await db.execute("insert into accounts values (1)")
        smtp = Smtp()
        smtp.answers = True
        page = Page(RQ, dsn=database, smtp=smtp)
        names = await page.run()
        app: App = names["app"]
        async with app:
            [_, bob] = await app.utils.list_jobs(task="send_email")
            assert (bob.max_attempts, bob.run_at - bob.created_at) == (6, timedelta(hours=1))
            names = await page.run()
            await asyncio.to_thread(names["sign_up_view"])
            [dan] = [job for job in await app.utils.list_jobs() if job.payload["to"] == "dan@example.com"]
            assert dan.payload["subject"] == "Still there?"
            await app.run_once()
            assert smtp.sent == [("ann@example.com", "Hello"), ("cleo@example.com", "Hello")]
            app.close_sync()

            names = await page.run()
            everything, only_images = names["everything"], names["only_images"]
            async with everything:
                await everything.tasks["resize"].enqueue(1)
                await everything.tasks["book"].enqueue(2)
                assert await only_images.run_once() == RunSummary(1)
                assert await everything.run_once() == RunSummary(1)

            await page.run()
            await app.run_once()
            assert capsys.readouterr().out == "Goodbye, account 1\n"
            assert await db.fetchval("select closed from accounts")
        page.assert_done()


class TestArqPage:
    async def test_examples_run(
        self, db: asyncpg.Connection, database: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await db.execute("create table users (id int generated always as identity, email text)")
        smtp = AsyncSmtp()
        page = Page(ARQ, dsn=database, smtp=smtp)
        names = await page.run()
        app: App = names["app"]
        async with app:
            [_, bob] = await app.utils.list_jobs(task="send_email")
            assert (bob.max_attempts, bob.run_at - bob.created_at) == (6, timedelta(hours=1))
            await page.run()
            [dan] = [job for job in await app.utils.list_jobs() if job.key is not None]
            assert (dan.key, dan.run_at - dan.created_at) == ("reminder:dan", timedelta(minutes=1))
            await page.run()
            await app.run_once()
            assert smtp.sent == [
                ("ann@example.com", "Hello"),
                ("cleo@example.com", "Welcome"),
                ("eve@example.com", "Welcome, number 1"),
            ]
            await page.run()
            [item] = app.cron_items
            assert item.task == "clean_up"
            await app.add_job("clean_up")
            await app.run_once()
            assert capsys.readouterr().out == "Cleaned up\n"
        page.assert_done()


class Smtp:
    """A mail server that can refuse connections."""

    def __init__(self) -> None:
        self.answers = False
        self.sent: list[tuple[str, str]] = []

    def send(self, to: str, subject: str) -> None:
        if not self.answers:
            raise ConnectionError("it hung up")
        self.sent.append((to, subject))


class AsyncSmtp:
    """A mail server for async tasks."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    async def send(self, to: str, subject: str) -> None:
        self.sent.append((to, subject))


async def is_logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.messages


class Row(NamedTuple):
    """A row of a table: the heading of its second column, and the code spans of its first two columns."""

    heading: str
    other_names: list[str]
    python_names: list[str]


def rows(page: str) -> Iterator[Row]:
    """Yield the rows of all tables that have a column with names from this library."""
    heading = ""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if not line.startswith("|"):
            heading = ""
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not heading:
            heading = cells[1]
        elif not cells[0].startswith("---") and "here" in heading:
            yield Row(heading, *(re.findall(r"`([^`]+)`", cell) for cell in cells[:2]))


def exists(name: str) -> bool:
    """Return whether the library has this function, option, command or flag."""
    if re.fullmatch(r"[A-Za-z_.]+", name):
        head, *rest = name.split(".")
        found: Any = JobContext if head == "ctx" else getattr(graphile_worker, head, None)
        if head == "graphile_worker":
            found = graphile_worker
        for part in rest:
            found = member(found, part)
        return found is not None
    if match := re.fullmatch(r"(\w+)=.*", name):
        return match[1] in {*run_option_names(), *TaskOptions.__annotations__, *JobOptions.__annotations__}
    if match := re.fullmatch(r"graphile-worker (\w+).*", name):
        return match[1] in root.commands
    return name in command_flags()


def member(owner: Any, name: str) -> Any:
    """Return the member, or the owner itself if its docstring documents such an instance attribute."""
    if owner is None or re.search(rf"^ +{name}: ", inspect.getdoc(owner) or "", re.MULTILINE):
        return owner
    return getattr(owner, name, None)


def run_option_names() -> list[str]:
    return ["tasks", "dsn", *RunOptions.__annotations__]


def command_flags() -> set[str]:
    command = root.commands["run"]
    return {
        flag
        for parameter in (*root.params, *command.params)
        for flag in parameter.opts
        if flag.startswith("-")
    } | {"--help"}


class TestTables:
    @pytest.mark.parametrize(
        ("right", "wrong"),
        [
            ("App.run", "App.walk"),
            ("Runner.events", "Runner.happenings"),
            ("ctx.job", "ctx.jobs"),
            ("graphile_worker.events", "graphile_worker.event"),
            ("--jobs", "--job"),
            ("lease=", "eta="),
            ("graphile-worker run shop.jobs:app", "graphile-worker walk"),
        ],
    )
    def test_name_check_accepts_existing_names_only(self, right: str, wrong: str) -> None:
        assert exists(right)
        assert not exists(wrong)

    @pytest.mark.parametrize("page", PAGES)
    def test_names_in_migration_tables_exist(self, page: str) -> None:
        python_names = [name for row in rows(page) if row.heading == "here" for name in row.python_names]
        names = [
            name
            for name in python_names
            if not re.match(r"@|retry=.|" + "|".join(JobOptions.__annotations__), name)
        ]
        assert len(names) > 25
        assert [name for name in names if not exists(name)] == []

    @pytest.mark.parametrize("page", PAGES)
    def test_migration_pages_announce_no_future_features(self, page: str) -> None:
        """The pages state only what exists and what does not."""
        assert not re.search(r"not there yet|not yet there|coming soon", (ROOT / "docs" / page).read_text())

    @pytest.mark.parametrize("page", PAGES)
    def test_names_in_migration_pages_exist(self, page: str) -> None:
        text = (ROOT / "docs" / page).read_text()
        named = re.findall(r"`((?:App|Task|WorkerUtils|Runner|ctx|graphile_worker)\.\w+)(?:\(\))?`", text)
        assert named
        assert [name for name in named if not exists(name) and name != "graphile_worker.add_job"] == []

    def test_graphile_worker_page_lists_every_option_of_run(self) -> None:
        text = (ROOT / "docs" / NODE).read_text()
        python_names = {
            name for row in rows(NODE) if row.heading == "of `run` here" for name in row.python_names
        }
        [additions] = re.findall(r"Not in Node: (.*?)\n\n", text, re.DOTALL)
        additional = set(re.findall(r"`(\w+)`", additions))
        assert python_names | additional == set(run_option_names())
        assert not python_names & additional

    def test_graphile_worker_page_lists_every_member_of_the_context(self) -> None:
        members = {name for name in dir(JobContext) if not name.startswith("_")}
        named = {name for row in rows(NODE) for name in row.python_names if name.startswith("ctx.")}
        assert named == {f"ctx.{name}" for name in members}

    def test_graphile_worker_page_lists_every_flag(self) -> None:
        named = {name for row in rows(NODE) for name in row.python_names if name.startswith("-")}
        assert named == command_flags() - {"-h"}

    def test_graphile_worker_page_lists_the_events_that_differ(self) -> None:
        text = (ROOT / "docs" / NODE).read_text()
        missing, additions = (
            set(re.findall(r"`([\w:]+)`", re.findall(rf"^\| {kind} \|(.*)\|$", text, re.MULTILINE)[0]))
            for kind in ("not here", "additions")
        )
        python_names, other_names = set(graphile_worker.events.EVENTS), node_events()
        assert additions == python_names - other_names
        assert missing == other_names - python_names


def node_declarations() -> str:
    """Return the type declarations of the npm package; skip the test if it is not installed."""
    node.command("0.18.0")
    return "".join((NODE_PACKAGE / "dist" / f"{name}.d.ts").read_text() for name in ("interfaces", "index"))


def node_events() -> set[str]:
    name = r"(?:\w+:[\w:]+)|gracefulShutdown|forcefulShutdown|stop"
    return set(re.findall(rf'^    "?({name})"?: \{{', node_declarations(), re.MULTILINE))


class TestGraphileWorkerPageIsComplete:
    """The page covers everything that Graphile Worker for Node exports."""

    def named(self) -> set[str]:
        return {re.sub(r"^\w+\.|\(\)$", "", name) for row in rows(NODE) for name in row.other_names}

    def test_page_lists_every_function_of_node(self) -> None:
        node.command("0.18.0")
        script = "import('graphile-worker').then(m => console.log(JSON.stringify(Object.keys(m))))"
        done = subprocess.run(
            ["node", "-e", script], cwd=NODE_PACKAGE, check=True, capture_output=True, text=True
        )
        exported = {name for name in json.loads(done.stdout) if not name.startswith("$")}
        assert exported - self.named() == set()

    def test_page_lists_every_option_of_node(self) -> None:
        text = node_declarations()
        preset = re.findall(r"interface WorkerOptions \{(.*?)\n        \}", text, re.DOTALL)[0]
        direct = r"interface (?:WorkerSharedOptions|SharedOptions|RunnerOptions|WorkerPoolOptions)[^{]*"
        shared = "".join(re.findall(direct + r"\{(.*?)\n\}", text, re.DOTALL))
        options = {
            *re.findall(r"^            (\w+)\?: ", preset, re.MULTILINE),
            *re.findall(r"^    (\w+)\?: ", shared, re.MULTILINE),
        }
        assert len(options) > 25
        whole = {name.split(".")[0] for row in rows(NODE) for name in row.other_names}
        assert options - self.named() - whole == set()

    def test_page_lists_every_helper_of_node(self) -> None:
        text = node_declarations()
        found = re.findall(r"interface (?:Job)?Helpers[^{]*\{(.*?)\n\}", text, re.DOTALL)
        helpers = set(re.findall(r"^    (\w+)[?:(<]", "".join(found), re.MULTILINE))
        assert {"job", "abortSignal", "query"} <= helpers
        assert helpers - self.named() == set()

    async def test_page_lists_every_flag_of_node(self) -> None:
        node.command("0.18.0")
        done = await asyncio.to_thread(
            subprocess.run, [node.command("0.18.0"), "--help"], check=True, capture_output=True, text=True
        )
        other_names = set(re.findall(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", done.stdout))
        named = {name for row in rows(NODE) for name in row.other_names if name.startswith("-")}
        assert other_names - named == set()
