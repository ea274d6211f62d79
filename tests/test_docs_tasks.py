"""The guides on tasks, outcomes, timeouts, batches and processes: examples run and tables are correct."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import asyncpg
import msgspec
import pydantic
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

import graphile_worker
from graphile_worker import App, InvalidJobError, JobState, run_once
from graphile_worker._tasks.options import JobOptions, TaskOptions
from graphile_worker._worker.run_options import RunOptions
from graphile_worker.retry import Failure, read_policy
from graphile_worker.testing import job as make_job
from support.pages import RECOVERY_OPTIONS, Page
from support.postgres import ROOT
from support.stacks import async_engine
from support.tutorial import Reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from graphile_worker import Job
    from graphile_worker.events import Event
    from graphile_worker.testing import Databases

GUIDES = ROOT / "docs" / "guides"


@pytest.fixture(autouse=True)
def importable_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.mark.slow
def test_tutorial_commands_and_programs_work(tmp_path: Path, short_folder: Path) -> None:
    with Reader(tmp_path, {"embedded:": f"embedded:{short_folder}"}) as reader:
        reader.follow(ROOT / "docs" / "getting-started" / "tutorial.md")


class Shop:
    """The app of a page, with the events of its last run."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.events: list[str] = []
        app.events.on("*", self._record)

    def _record(self, event: Event) -> None:
        if event.name.startswith("job:") and event.name != "job:start":
            self.events.append(event.name)

    async def take_jobs(self) -> list[Job]:
        """Return all jobs in the database and complete them."""
        jobs = await self.app.utils.list_jobs()
        await self.app.utils.complete_jobs([job.id for job in jobs])
        return jobs

    async def run_jobs(self) -> list[Job]:
        """Run all due jobs, then return and complete the remaining ones."""
        self.events.clear()
        await self.app.run_once(handle_signals=False)
        return await self.take_jobs()


@pytest.fixture
async def open_page(db: asyncpg.Connection, database: str) -> AsyncIterator[Callable[[str], Page]]:
    """Open pages, and close the apps and connections that the examples leave open."""
    await db.execute("create table users (id int generated always as identity, email text)")
    pages: list[Page] = []

    def open_one(name: str) -> Page:
        pages.append(Page(f"guides/{name}.md", dsn=database))
        return pages[-1]

    yield open_one
    for page in pages:
        for value in [value for value in page.names.values() if isinstance(value, App)]:
            await value.close()
            await asyncio.to_thread(value.close_sync)
        if "connection" in page.names:
            await page.names["connection"].close()


class TestTasksPage:
    async def test_tasks_page_examples_run(
        self, open_page: Callable[[str], Page], database: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = open_page("tasks")
        names = await page.run()
        app = names["app"]
        shop = Shop(app)
        assert capsys.readouterr().out == "Hello, Ann\n"
        assert (names["summary"].succeeded, names["summary"].failed) == (1, 0)

        names = await page.run()
        welcome, goodbye = (names[name] for name in ("send_welcome", "send_goodbye"))
        assert (welcome.identifier, welcome.options) == (
            "send_welcome",
            {"queue_name": "mail", "max_attempts": 5},
        )
        assert (goodbye.identifier, goodbye.options["priority"]) == ("mail/goodbye", 10)

        names = await page.run()
        assert await shop.run_jobs() == []
        assert capsys.readouterr().out == "attempt 1: 2 of A-1, 2030-01-01, SLOW\n"
        await self.check_payloads_from_other_programs(shop)
        assert capsys.readouterr().out == "attempt 1: 1 of A-1, None, FAST\n"

        await page.run()
        await app.utils.add_job("store", [1, 2])
        await app.utils.add_job("track", {"event": "old", "_trace": 1, "_cron": {}})
        await app.utils.add_job("track", {"event": "old", "x": "far"})
        [unfit] = await shop.run_jobs()
        assert unfit.last_error == "Invalid payload: x: Expected `int`, got `str`"
        assert capsys.readouterr().out == (
            "click {'x': 3, 'y': 4}\n[0.5, 1.5] None\n[1.0, 2.0] None\nold {}\n"
        )

        names = await page.run()
        await names["count_users"].enqueue()
        [report] = await shop.run_jobs()
        assert (report.task_identifier, report.payload) == ("report", {"users": 0})

        names = await page.run(2)
        assert (await names["late"].utils.stats()).total == 0
        await app.add_job("audit", {"event": "a click"})
        await names["audit"].enqueue(event="a key")
        assert await shop.run_jobs() == []
        assert capsys.readouterr().out == "audited: a click\naudited: a key\n"
        await self.check_task_in_two_apps(names["audit"], database)

        await page.run()
        assert capsys.readouterr().out == "Good morning, Ann\n"

        names = await page.run()
        assert await shop.run_jobs() == []
        assert capsys.readouterr().out == "order 17, 2 times\n"
        assert names["PrintInvoice"](1).copies == 1
        page.assert_done()

        await app.add_jobs(
            [names["hello"].spec(name="Fay"), welcome.using(priority=3).spec(7), names["PrintInvoice"](18)]
        )
        jobs = await shop.take_jobs()
        assert [job.payload for job in jobs] == [{"name": "Fay"}, {"user": 7}, {"order": 18, "copies": 1}]
        assert [(job.queue_name, job.priority) for job in jobs] == [(None, 0), ("mail", 3), ("invoices", 0)]

    async def check_task_in_two_apps(self, audit: Any, database: str) -> None:
        """Check that each app adds to its own schema, and the bare task to the app that included it last."""
        app = audit.queue
        other = App(dsn=database, schema="other")
        other.include([audit])
        await other.migrate()
        assert (audit.queue, app.tasks["audit"].queue, other.tasks["audit"].queue) == (other, app, other)
        await audit.enqueue(event="elsewhere")
        assert ((await other.utils.stats()).total, (await app.utils.stats()).total) == (1, 0)
        await other.close()

    async def check_payloads_from_other_programs(self, shop: Shop) -> None:
        """Check that invalid payloads from other programs fail with the message on the page."""
        order = "00000000-0000-0000-0000-000000000001"
        good = {"order": order, "items": [{"sku": "A-1", "colour": "ignored"}], "speed": "fast"}
        await shop.app.utils.add_job("ship", good)
        await shop.app.utils.add_job("ship", {"order": order, "items": [{"sku": "A-1", "count": "2"}]})
        await shop.app.utils.add_job("ship", {**good, "unknown": 1})
        misfit, unknown = await shop.run_jobs()
        assert misfit.last_error is not None
        assert f"\n{misfit.last_error}\n" in (GUIDES / "tasks.md").read_text()
        assert unknown.last_error == "Invalid payload: unknown: the task takes no such key"
        assert (misfit.attempts, misfit.state) == (1, JobState.SCHEDULED)
        with pytest.raises(InvalidJobError):
            await shop.app.add_job("ship", {**good, "unknown": 1})


class TestOutcomesPage:
    async def test_outcomes_page_task_chooses_outcomes(self, open_page: Callable[[str], Page]) -> None:
        names = await open_page("outcomes").run()
        await names["app"].migrate()
        shop = Shop(names["app"])
        names["load_van"] = load_van
        deliver = names["deliver"]
        await deliver.enqueue_many({"order": order} for order in (1, 2, 3, 4))
        await deliver.enqueue(order=1, weight=9)
        jobs = await shop.run_jobs()
        assert [(job.payload["order"], job.attempts, job.last_error) for job in jobs] == [
            (2, 0, "Snoozed for 300 s: not paid yet"),
            (3, 25, "Cancelled: withdrawn"),
            (4, 25, "Order 4 does not exist"),
            (1, 1, "Retry in 60 s: too heavy"),
        ]

    async def test_outcomes_page_retry_policies_have_the_stated_delays(
        self, open_page: Callable[[str], Page]
    ) -> None:
        page = open_page("outcomes")
        names = await page.run(2)
        page.assert_done()
        job = make_job()
        delays = {
            "every 30 s": (30, 30, 30, 30),
            "every 30 s, as a timedelta": (30, 30, 30, 30),
            "1 s, 10 s, then every 60 s": (1, 10, 60, 60),
            "the same with jitter": (1, 10, 60, 60),
            "10 s, 20 s, 30 s … 5 min": (10, 20, 30, 300),
            "1 s, 2 s, 4 s … 1 h": (1, 2, 4, 3600),
        }
        for name, expected in delays.items():
            policy: Any = read_policy(names["policies"].pop(name))
            assert tuple(policy.delay(attempt) for attempt in (1, 2, 3, 99)) == expected
            assert all(
                (1 - policy.jitter) * expected[0] <= policy(Failure(job, OSError())) <= expected[0]
                for _ in range(100)
            )
        never, by_exception = map(read_policy, names["policies"].values())
        assert never is not None
        assert by_exception is not None
        with pytest.raises(graphile_worker.Fail):
            never(Failure(job, ValueError()))
        with pytest.raises(graphile_worker.Fail):
            by_exception(Failure(job, UnicodeError()))
        assert by_exception(Failure(job, TimeoutError())) == 5
        assert by_exception(Failure(job, ConnectionError())) == pytest.approx(2.718, abs=0.001)
        assert by_exception(Failure(job, KeyError())) is None

    async def test_outcomes_page_policy_function_reads_the_payload(
        self, open_page: Callable[[str], Page]
    ) -> None:
        names = await open_page("outcomes").run(2)
        await names["app"].migrate()
        shop = Shop(names["app"])
        for attempt, expected in ((2, None), (3, timedelta(hours=8))):
            settling = await names["settle"].enqueue(hours=8)
            await shop.app.utils.reschedule_jobs([settling.id], attempts=attempt)
            [settling] = await shop.take_jobs()
            assert names["by_the_hour"](Failure(settling, OSError())) == expected

    def test_outcomes_page_bare_number_is_not_a_policy(self) -> None:
        with pytest.raises(graphile_worker.ConfigurationError, match="max_attempts"):
            read_policy(3)


async def test_exactly_once_page_examples_run(db: asyncpg.Connection, database: str) -> None:
    await db.execute("""
        create table accounts (id int, cents int);
        create table orders (id int, shipped boolean default false, cancelled boolean default false);
        insert into accounts values (7, 2000);
        insert into orders values (7), (8);
    """)
    engine = async_engine(database)
    async with App(dsn=database) as app:
        shop = Shop(app)
        page = Page("guides/exactly-once.md", app=app, AsyncSession=AsyncSession, engine=engine, dsn=database)
        names = await page.run(4)
        await names["pay"].enqueue(order=7, cents=500)
        [receipt] = await shop.run_jobs()
        assert receipt.task_identifier == "send_receipt"
        assert await db.fetchval("select cents from accounts") == 1500
        await names["ship"].enqueue(order=7)
        await names["cancel_order"].enqueue(order=8)
        assert await shop.run_jobs() == []
        assert set(shop.events) == {"job:success", "job:complete"}
        assert [tuple(row) for row in await db.fetch("select * from orders order by id")] == [
            (7, True, False),
            (8, False, True),
        ]
        await names["test_pay"](db)
        page.assert_done()
    await engine.dispose()


async def test_timeouts_page_examples_run(open_page: Callable[[str], Page], database: str) -> None:
    await graphile_worker.run_migrations(dsn=database)
    page = open_page("timeouts")
    names = await page.run()
    page.assert_done()
    shop = Shop(names["app"])
    [job] = await shop.take_jobs()
    assert job.flags == frozenset({"timeout:300"})
    await names["render"].enqueue(pages=2)
    assert await shop.run_jobs() == []


async def test_processes_page_example_runs_in_a_process(
    open_page: Callable[[str], Page], database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = open_page("processes")
    # The example needs a file, because a child process has to import it.
    shop = import_example("primes_shop", page.skip(), tmp_path)
    page.assert_done()
    shop.app.configure(dsn=database)
    async with shop.app as app:
        await shop.count_primes.enqueue(below=10)
        summary = await app.run_once(handle_signals=False)
    assert (summary.succeeded, summary.failed) == (2, 0)
    assert capsys.readouterr().out == "There are 4\n"


async def test_batches_page_example_keeps_failed_items(
    open_page: Callable[[str], Page], database: str
) -> None:
    await graphile_worker.run_migrations(dsn=database)
    page = open_page("batches")
    names = await page.run()
    page.assert_done()
    assert names["job"].payload == ["ape", "b33", "cat"]
    shop = Shop(names["app"])
    await shop.app.utils.reschedule_jobs([names["job"].id], run_at=timedelta(0))
    [batch] = await shop.run_jobs()
    assert (batch.payload, batch.last_error) == (["b33"], "1 of 3 items failed: [1] b33 is not a word")
    assert f"`{batch.last_error}`" in (GUIDES / "batches.md").read_text()


def import_example(name: str, text: str, folder: Path) -> Any:
    """Write an example to a file and import it, so that other processes can import it too."""
    (folder / f"{name}.py").write_text(text)
    return importlib.import_module(name)


def load_van(weight: int) -> None:
    if weight > 5:
        raise OverflowError("too heavy")


class Point(NamedTuple):
    x: int


class Model(pydantic.BaseModel):
    x: int


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (float, 1, 1),
        (datetime, datetime(2030, 1, 1, 8, tzinfo=UTC), "2030-01-01T08:00:00Z"),
        (timedelta, timedelta(minutes=90), "PT5400S"),
        (Decimal, Decimal("1.50"), "1.50"),
        (bytes, b"abc", "YWJj"),
        (Colour, Colour.RED, "red"),
        (Literal["a", "b"], "a", "a"),
        (set[int], {1}, [1]),
        (Point, Point(1), [1]),
        (dict[int, str], {1: "one"}, {"1": "one"}),
        (Model, Model(x=1), {"x": 1}),
        (Model | None, None, None),
        (Annotated[int, msgspec.Meta(ge=1)], 1, 1),
        (Any, [1, "a"], [1, "a"]),
    ],
)
def test_tasks_page_types_are_stored_as_stated(kind: Any, value: Any, stored: Any) -> None:
    def take(thing: Any) -> None: ...

    take.__annotations__["thing"] = kind
    declared = graphile_worker.task(take)
    assert declared.spec(value).payload == {"thing": stored}
    assert declared.binding.arguments({"thing": stored}, None) == ((value,), {})


@pytest.mark.parametrize(
    ("kind", "value"), [(int, 1.0), (int, "1"), (Annotated[int, msgspec.Meta(ge=1)], 0), (Model, {"x": "?"})]
)
def test_tasks_page_values_of_the_wrong_type_are_rejected(kind: Any, value: Any) -> None:
    def take(thing: Any) -> None: ...

    take.__annotations__["thing"] = kind
    with pytest.raises(InvalidJobError):
        graphile_worker.task(take).spec(value)


def test_tasks_page_declarations_are_rejected_as_stated() -> None:
    declared: dict[str, Any] = {}
    exec(
        """
def not_json(value: complex): ...
def union(value: "str | date"): ...
def args(*args): ...
def generator(n): yield n
class Thing:
    def method(self, n): ...
def payload_and_more(payload, n): ...
def cron(_cron): ...
def trace(_trace): ...
def contexts(one: JobContext, other: JobContext): ...
def unknown(n: "Undefined"): ...
method = Thing.method
""",
        {"JobContext": graphile_worker.JobContext, "date": date},
        declared,
    )
    del declared["Thing"]
    assert len(declared) == 10
    for function in declared.values():
        with pytest.raises(graphile_worker.ConfigurationError):
            graphile_worker.task(function)
    app = App("postgresql://nowhere/mine")
    app.task("same")(lambda n: n)
    with pytest.raises(graphile_worker.ConfigurationError, match="two tasks"):
        app.task("same")(lambda n: n)


@pytest.mark.parametrize("on_task", [False, True])
async def test_invalid_payload_fails_permanently_if_configured(database: str, *, on_task: bool) -> None:
    async with App(dsn=database, on_invalid_payload="retry" if on_task else "fail") as app:

        @app.task(on_invalid_payload="fail" if on_task else None)
        async def ship(order: int) -> None: ...

        await app.utils.add_job("ship", {"order": "?"})
        [job] = await Shop(app).run_jobs()
        assert job.state == JobState.FAILED


async def test_outcomes_page_table_matches_recorded_outcomes(database: str) -> None:
    rows = re.findall(
        r"^\| `(\w+\(.*?\))` \| (.*?) \| (.*?) \| `(.*?)` \| (.*?) \|$",
        (GUIDES / "outcomes.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 5
    attempts = {"used": 1, "given back": 0, "all used": 25}
    async with App(dsn=database) as app:
        shop = Shop(app)

        @app.task
        async def choose(row: int) -> None:
            raise eval(
                rows[row][0], {name: getattr(graphile_worker, name) for name in graphile_worker.__all__}
            )

        for index, (_, attempt, again, error, events) in enumerate(rows):
            await choose.enqueue(row=index)
            [job] = await shop.run_jobs()
            assert (job.attempts, job.last_error) == (attempts[attempt], error)
            assert (job.state == JobState.FAILED) == (again == "never")
            assert shop.events == re.findall(r"`(.*?)`", events)
            if delay := re.match(r"in (\d+) s", again):
                assert abs(job.run_at - datetime.now(UTC) - timedelta(seconds=int(delay[1]))) < timedelta(
                    seconds=20
                )

        for index in (0, 1):
            await choose.using(max_attempts=1).enqueue(row=index)
            [job] = await shop.run_jobs()
            assert (job.state, shop.events[-2:]) == (JobState.FAILED, ["job:failed", "job:complete"])


def test_tasks_page_lists_every_option_of_tasks_and_apps() -> None:
    assert names_in_table("tasks.md", "### Task options") == set(TaskOptions.__annotations__)
    assert names_in_table("tasks.md", "## Configure the app") == set(inspect.signature(App).parameters)


def test_tasks_page_lists_every_attribute_of_the_context() -> None:
    attributes = {name for name in dir(graphile_worker.JobContext) if not name.startswith("_")}
    assert names_in_table("tasks.md", "## The job context") == attributes


def test_enqueueing_page_lists_every_job_option() -> None:
    assert names_in_table("enqueueing.md", "## Job options") == set(JobOptions.__annotations__)


def test_running_workers_page_lists_every_worker_option() -> None:
    options = {*RunOptions.__annotations__}
    elsewhere = {*RECOVERY_OPTIONS, "task_directory"}
    assert options - elsewhere <= names_in_table("running-workers.md", "## Worker options") <= options


def names_in_table(page: str, heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    below = (GUIDES / page).read_text().partition(f"\n{heading}\n")[2]
    cells = re.findall(
        r"^\| (`.*?) \|", re.split(r"^#+ ", below, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE
    )
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


async def test_batches_page_results_decide_which_items_remain(database: str) -> None:
    async with App(dsn=database) as app:
        shop = Shop(app)
        results: dict[str, Any] = {}
        got: list[Any] = []

        @app.task(batch=True, retry=timedelta(minutes=10))
        async def check(items: list[int]) -> Any:
            got[:] = items
            return results["value"]

        async def run_batch(items: list[Any], value: Any) -> list[Job]:
            results["value"] = value
            await app.utils.add_job("check", items)
            return await shop.run_jobs()

        assert await run_batch([1, 2], None) == []
        assert await run_batch([1, 2], [None, None]) == []
        [job] = await run_batch([1, 2, 3], [ValueError("one"), None, ValueError("three")])
        assert (job.payload, job.attempts) == ([1, 3], 1)
        [job] = await run_batch([1, 2], [None])
        assert (job.payload, job.attempts) == ([1, 2], 1)
        [job] = await run_batch([1, "two", 3], None)
        assert (job.payload, got) == (["two"], [1, 3])
        [job] = await run_batch([1, 2], [graphile_worker.Fail("no"), ValueError("no")])
        assert (job.payload, job.attempts) == ([1, 2], 1)
        [job] = await run_batch([1, 2], [graphile_worker.Fail("no"), None])
        assert (job.payload, job.state) == ([1], JobState.FAILED)
        [job] = await run_batch([1, 2], [graphile_worker.Snooze(60), None])
        assert (job.payload, job.attempts) == ([1], 1)

        async def plain(_payload: list[int]) -> list[Any]:
            return [None, ValueError("two")]

        await app.utils.add_job("plain", [1, 2])
        await app.utils.add_job("plain", [1, 2, 3])
        await run_once({"plain": plain}, database, handle_signals=False)
        [job] = await shop.take_jobs()
        assert job.payload == [2]


def test_app_leaves_no_open_connections_when_the_event_loop_ends(database: str) -> None:
    # The development mode of asyncio warns about slow steps, and a busy machine makes steps slow.
    program = f"""
import asyncio, logging
from graphile_worker import App
logging.getLogger("asyncio").setLevel("ERROR")

app = App(dsn={database!r})

@app.task
async def hello(name: str) -> None: ...

for name in ("Ann", "Bob"):
    asyncio.run(hello.enqueue(name))
print(hello.enqueue_sync("Cleo").id)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


class FakeService:
    """A remote service that the tasks on the page call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = False

    async def send(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((*arguments, *named.values()))
        if self.fails:
            raise LookupError("unknown")
        return "42"

    push = charge = pay_out = ask = send


class TestWritingGoodTasksPage:
    @pytest.fixture
    async def page(self, db: asyncpg.Connection, database: str) -> AsyncIterator[Page]:
        await db.execute("""
            create table stock (sku text primary key, count int);
            create table taken (order_id int, sku text, primary key (order_id, sku));
            create table readers (id int);
            create table users (id int generated always as identity, email text unique);
            create table incoming (id int);
            insert into stock values ('A-1', 10);
            insert into readers values (1), (2), (3);
            insert into incoming select generate_series(1, 25);
        """)
        async with App(dsn=database) as app:
            services: dict[str, Any] = {name: FakeService() for name in ("bank", "mailer", "phone", "oracle")}
            yield Page("guides/writing-good-tasks.md", app=app, pages={}, results={}, answers={}, **services)

    async def test_writing_good_tasks_page_examples_run(
        self,
        page: Page,
        db: asyncpg.Connection,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        names = page.names
        app: App = names["app"]
        shop = Shop(app)

        await page.run(2)
        for task in ("take_from_stock_badly", "take_from_stock"):
            await db.execute("update stock set count = 10")
            for _ in range(2):
                await app.add_job(task, {"order": 1, "sku": "A-1"})
            assert await shop.run_jobs() == []
            assert await db.fetchval("select count from stock") == (9 if task == "take_from_stock" else 8)
        await page.run()
        await names["take_once"].enqueue(order=1, sku="A-1")
        assert await shop.run_jobs() == []
        assert await db.fetchval("select count from stock") == 8
        await page.run()
        await names["charge"].enqueue(order=17, cents=500)
        assert await shop.run_jobs() == []
        assert names["bank"].calls == [(500, "order-17")]

        await page.run()
        await app.utils.add_job("send_invoice", {"order": 1})
        assert await shop.run_jobs() == []

        await page.run()
        await names["send_issue_to_all"].enqueue(issue=5)
        assert await shop.run_jobs() == []
        assert sorted(names["mailer"].calls) == [(1, 5), (2, 5), (3, 5)]

        await self.check_awaiting(page, shop)
        await self.check_threads_and_processes(page, shop, tmp_path)

        await page.run()
        await names["ask"].enqueue(question="why")
        assert await shop.run_jobs() == []
        assert names["answers"] == {"why": "42"}

        await self.check_signing_up(page, shop, db)

        await page.run()
        names["bank"].fails = True
        await app.add_job("pay_out_badly", {"account": 1})
        assert await shop.run_jobs() == []
        assert capsys.readouterr().out == "could not pay\n"
        await names["pay_out"].enqueue(account=1)
        [unpaid] = await shop.run_jobs()
        assert (unpaid.last_error, unpaid.attempts) == ("Account 1 does not exist", 12)

        await self.check_stopping(page, shop)

        await page.run()
        await names["pack"].enqueue(order=17)
        with caplog.at_level("INFO", "graphile_worker"):
            assert await shop.run_jobs() == []
        [packing] = [record for record in caplog.records if "packing" in record.getMessage()]
        assert (packing.getMessage(), vars(packing)["order"]) == ("packing, attempt 1", 17)
        assert {"task_identifier", "job_id", "worker_id"} <= vars(packing).keys()
        page.assert_done()

    async def check_awaiting(self, page: Page, shop: Shop) -> None:
        """Check that a failure in a task group fails the job, and that an unawaited failure does not."""
        names = await page.run()
        await names["notify"].enqueue(user=7)
        assert await shop.run_jobs() == []
        assert names["phone"].calls == [(7, "news")]
        names["phone"].fails = True
        before = asyncio.all_tasks()
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        await shop.app.add_job("notify_badly", {"user": 7})
        assert await shop.run_jobs() == []
        await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)
        await names["notify"].enqueue(user=7)
        assert len(await shop.run_jobs()) == 1

    async def check_threads_and_processes(self, page: Page, shop: Shop, tmp_path: Path) -> None:
        """Run the examples on a thread and in a process."""
        names = await page.run()
        (tmp_path / "page.html").write_text("Hello")
        url = (tmp_path / "page.html").as_uri()
        await names["fetch"].enqueue(url=url)
        assert await shop.run_jobs() == []
        assert names["pages"] == {url: b"Hello"}
        charts = import_example("charts", page.skip(), tmp_path)
        stored: list[tuple[int, int]] = []

        @shop.app.task
        async def store(n: int, digits: int) -> None:
            stored.append((n, digits))

        shop.app.include(charts)
        await charts.compute.enqueue(n=20)
        assert await shop.run_jobs() == []
        assert stored == [(20, 19)]

    async def check_signing_up(self, page: Page, shop: Shop, db: asyncpg.Connection) -> None:
        """Check that only the good example adds no job if the transaction rolls back."""

        @shop.app.task
        async def welcome(user: int) -> None: ...

        names = await page.run()
        names["welcome"] = welcome
        for name, count in (("sign_up", 0), ("sign_up_badly", 1)):
            transaction = db.transaction()
            await transaction.start()
            await names[name](db, "ann@example.com")
            await transaction.rollback()
            assert len(await shop.take_jobs()) == count
        await names["sign_up"](db, "ann@example.com")
        assert len(await shop.take_jobs()) == 1

    async def check_stopping(self, page: Page, shop: Shop) -> None:
        """Check that a stop request ends the job after the second chunk, and that a new job has the rest."""
        handled: list[int] = []
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def handle(row: int) -> None:
            handled.append(row)
            if row == 15:
                reached.set()
                await go_on.wait()

        names = await page.run()
        names["handle"] = handle
        shop.app.events.on("stop", lambda _: go_on.set())
        async with shop.app.running() as runner:
            await names["import_rows"].enqueue()
            await reached.wait()
            await runner.stop()
        [rest] = await shop.app.utils.list_jobs()
        assert (rest.payload, handled) == ({"after": 20}, list(range(1, 21)))
        assert await shop.run_jobs() == []
        assert handled == list(range(1, 26))
