"""The pages on tasks: their examples do what the text says."""

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

import graphile_worker
from graphile_worker import App, InvalidJobError, JobState, run_once
from graphile_worker.retry import Failure, read_policy
from graphile_worker.task_options import TaskOptions
from support.pages import Page
from support.postgres import ROOT
from support.tutorial import Reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker import Job
    from graphile_worker.events import Event
    from graphile_worker.testing import Databases

TASKS = ROOT / "docs" / "tasks.md"


@pytest.fixture(autouse=True)
def modules_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def test_the_tutorial(tmp_path: Path, short_folder: Path) -> None:
    with Reader(tmp_path, {"embedded:": f"embedded:{short_folder}"}) as reader:
        reader.follow(ROOT / "docs" / "tutorial.md")


class Shop:
    """The app of a page, and what became of its jobs."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.heard: list[str] = []
        app.events.on("*", self._hear)

    def _hear(self, event: Event) -> None:
        if event.name.startswith("job:") and event.name != "job:start":
            self.heard.append(event.name)

    async def left(self) -> list[Job]:
        """The jobs that are there; afterwards there are none."""
        jobs = await self.app.utils.list_jobs()
        await self.app.utils.complete_jobs([job.id for job in jobs])
        return jobs

    async def after_a_run(self) -> list[Job]:
        """What is left when all jobs that can run have."""
        self.heard.clear()
        await self.app.run_once(handle_signals=False)
        return await self.left()


class TestThePageOnTasks:
    @pytest.fixture
    async def page(self, db: asyncpg.Connection, database: str) -> AsyncIterator[Page]:
        await db.execute("create table users (id int generated always as identity, email text)")
        page = Page("tasks.md", dsn=database)
        yield page
        if "connection" in page.names:
            await page.names["connection"].close()
        for name in page.names.keys() & {"app", "late", "shared"}:
            await page.names[name].close()
            await asyncio.to_thread(page.names[name].close_sync)

    async def test_its_examples(self, page: Page, database: str, capsys: pytest.CaptureFixture[str]) -> None:
        names = await page.run()
        app = names["app"]
        shop = Shop(app)
        assert capsys.readouterr().out == "Hello, Ann\n"
        assert names["drained"] == (1, 0)

        names = await page.run(2)
        assert (await names["late"].utils.stats()).total == 0
        await app.add_job("audit", {"event": "a click"})
        await names["audit"].enqueue(event="a key")
        assert await shop.after_a_run() == []
        assert capsys.readouterr().out == "audited: a click\naudited: a key\n"
        await self.check_what_two_apps_include(names["audit"], database)

        await page.run()
        assert capsys.readouterr().out == "Good morning, Ann\n"

        names = await page.run()
        welcome, goodbye = (names[name] for name in ("send_welcome", "send_goodbye"))
        assert (welcome.identifier, welcome.options) == (
            "send_welcome",
            {"queue_name": "mail", "max_attempts": 5},
        )
        assert (goodbye.identifier, goodbye.options["priority"]) == ("mail/goodbye", 10)

        names = await page.run()
        assert await shop.after_a_run() == []
        assert capsys.readouterr().out == "attempt 1: 2 of A-1, 2030-01-01, SLOW\n"
        await self.check_what_fits(shop)
        assert capsys.readouterr().out == "attempt 1: 1 of A-1, None, FAST\n"

        await page.run()
        await app.utils.add_job("store", [1, 2])
        await app.utils.add_job("track", {"event": "old", "_trace": 1, "_cron": {}})
        await app.utils.add_job("track", {"event": "old", "x": "far"})
        [unfit] = await shop.after_a_run()
        assert unfit.last_error == "The payload does not fit: x: Expected `int`, got `str`"
        assert capsys.readouterr().out == (
            "click {'x': 3, 'y': 4}\n[0.5, 1.5] None\n[1.0, 2.0] None\nold {}\n"
        )

        names = await page.run()
        assert await shop.after_a_run() == []
        assert capsys.readouterr().out == "order 17, 2 times\n"
        assert names["PrintInvoice"](1).copies == 1

    async def check_what_two_apps_include(self, audit: Any, database: str) -> None:
        """Each adds to its own; the task itself to the last."""
        app = audit.queue
        other = App(dsn=database, schema="other")
        other.include([audit])
        await other.migrate()
        assert (audit.queue, app.tasks["audit"].queue, other.tasks["audit"].queue) == (other, app, other)
        await audit.enqueue(event="elsewhere")
        assert ((await other.utils.stats()).total, (await app.utils.stats()).total) == (1, 0)
        await other.close()
        audit.attach(app)

    async def check_what_fits(self, shop: Shop) -> None:
        """Of what others add, with the words of the page."""
        order = "00000000-0000-0000-0000-000000000001"
        good = {"order": order, "items": [{"sku": "A-1", "colour": "ignored"}], "speed": "fast"}
        await shop.app.utils.add_job("ship", good)
        await shop.app.utils.add_job("ship", {"order": order, "items": [{"sku": "A-1", "count": "2"}]})
        await shop.app.utils.add_job("ship", {**good, "unknown": 1})
        misfit, unknown = await shop.after_a_run()
        assert misfit.last_error is not None
        assert f"\n{misfit.last_error}\n" in TASKS.read_text()
        assert unknown.last_error == "The payload does not fit: unknown: the task takes no such key"
        assert (misfit.attempts, misfit.state) == (1, JobState.SCHEDULED)
        with pytest.raises(InvalidJobError):
            await shop.app.add_job("ship", {**good, "unknown": 1})

    async def test_its_examples_of_adding_jobs(self, page: Page, db: asyncpg.Connection) -> None:
        names = await page.run(8)
        shop = Shop(names["app"])
        await shop.left()

        names = await page.run()
        [job] = await shop.left()
        assert (job.priority, job.payload, job.state) == (-5, {"name": "Bob"}, JobState.SCHEDULED)
        await page.run()
        [job] = await shop.left()
        assert (job.payload, job.queue_name) == ({"user": 1}, "mail")
        assert await db.fetchval("select email from users where id = 1") == "cleo@example.com"

        await page.run()
        jobs = await shop.left()
        assert [job.payload for job in jobs] == [
            {"name": "Dan"},
            {"name": "Eve"},
            {"name": "Fay"},
            {"user": 7},
            {"order": 18, "copies": 1},
        ]
        assert (jobs[3].queue_name, jobs[3].priority, jobs[4].queue_name) == ("mail", 3, "invoices")

        await page.run()
        known, foreign = await shop.left()
        assert known.payload == {"name": "Gil"}
        assert (foreign.payload, foreign.queue_name) == ({"anything": [1, 2]}, "node")

        names = await page.run()
        assert re.fullmatch(r"Job \d+ waits", await asyncio.to_thread(names["view"], None))
        with pytest.raises(graphile_worker.ConfigurationError, match="event loop"):
            names["view"](None)
        assert [job.payload for job in await shop.left()] == [{"name": "Hal"}]

        names = await page.run()
        first, second, other = (names[name] for name in ("first", "second", "other"))
        assert first.id == second.id != other.id
        assert (second.key, other.key) == ("reindex:7", None)
        digest = names["digest"]
        assert digest.spec("ann@example.com", "Hello").job_key is None
        assert digest.spec(to="Ann@Example.org", text="Hello").job_key == "digest:ann@example.org"

    async def check_processes(self, text: str, database: str, tmp_path: Path) -> None:
        """In a module, where a process finds it."""
        shop = module("primes_shop", text, tmp_path)
        shop.app.configure(dsn=database)
        async with shop.app as app:
            await shop.count_primes.enqueue(below=10)
            assert await app.run_once(handle_signals=False) == (2, 0)

    async def test_its_examples_of_outcomes_and_policies(
        self, page: Page, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names = await page.run(14)
        shop = Shop(names["app"])
        await shop.left()

        names = await page.run()
        names["load_van"] = load_van
        deliver = names["deliver"]
        await deliver.enqueue_many({"order": order} for order in (1, 2, 3, 4))
        await deliver.enqueue(order=1, weight=9)
        jobs = await shop.after_a_run()
        assert [(job.payload["order"], job.attempts, job.last_error) for job in jobs] == [
            (2, 0, "Snoozed for 300 s: not paid yet"),
            (3, 25, "Cancelled: withdrawn"),
            (4, 25, "There is no order 4"),
            (1, 1, "To be tried again in 60 s: too heavy"),
        ]

        names = await page.run()
        job = jobs[-1]
        delays = {
            "every half minute": (30, 30, 30, 30),
            "the same": (30, 30, 30, 30),
            "these, then the last again and again": (1, 10, 60, 60),
            "the same, a bit apart": (1, 10, 60, 60),
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
        nowhere, by_exception = map(read_policy, names["policies"].values())
        assert nowhere is not None
        assert by_exception is not None
        with pytest.raises(graphile_worker.Fail):
            nowhere(Failure(job, ValueError()))
        with pytest.raises(graphile_worker.Fail):
            by_exception(Failure(job, UnicodeError()))
        assert by_exception(Failure(job, TimeoutError())) == 5
        assert by_exception(Failure(job, ConnectionError())) == pytest.approx(2.718, abs=0.001)
        assert by_exception(Failure(job, KeyError())) is None
        for attempt, expected_delay in ((2, None), (3, timedelta(hours=8))):
            settling = await names["settle"].enqueue(hours=8)
            await shop.app.utils.reschedule_jobs([settling.id], attempts=attempt)
            [settling] = await shop.left()
            assert names["after_the_night"](Failure(settling, OSError())) == expected_delay

        names = await page.run()
        [job] = await shop.left()
        assert job.flags == frozenset({"timeout:300"})
        await names["render"].enqueue(pages=2)
        assert await shop.after_a_run() == []

        capsys.readouterr()
        await self.check_processes(page.skip(), database, tmp_path)
        assert capsys.readouterr().out == "There are 4\n"

        names = await page.run()
        assert names["job"].payload == ["ape", "b33", "cat"]
        await shop.app.utils.reschedule_jobs([names["job"].id], run_at=timedelta(0))
        [batch] = await shop.after_a_run()
        assert (batch.payload, batch.last_error) == (["b33"], "1 of 3 items failed: [1] b33 is no word")
        assert f"`{batch.last_error}`" in TASKS.read_text()

        await page.run()
        assert "True\n" in capsys.readouterr().out
        page.assert_done()


def module(name: str, text: str, folder: Path) -> Any:
    """An example as a module of that name, which other processes find too."""
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
def test_the_table_of_types(kind: Any, value: Any, stored: Any) -> None:
    def take(thing: Any) -> None: ...

    take.__annotations__["thing"] = kind
    declared = graphile_worker.task(take)
    assert declared.spec(value).payload == {"thing": stored}
    assert declared.binding.arguments({"thing": stored}, None) == ((value,), {})


@pytest.mark.parametrize(
    ("kind", "value"), [(int, 1.0), (int, "1"), (Annotated[int, msgspec.Meta(ge=1)], 0), (Model, {"x": "?"})]
)
def test_what_does_not_fit_by_the_table_of_types(kind: Any, value: Any) -> None:
    def take(thing: Any) -> None: ...

    take.__annotations__["thing"] = kind
    with pytest.raises(InvalidJobError):
        graphile_worker.task(take).spec(value)


def test_what_the_page_on_tasks_says_is_refused() -> None:
    declared: dict[str, Any] = {}
    exec(
        """
def carried(value: complex): ...
def union(value: "str | date"): ...
def args(*args): ...
def generator(n): yield n
class Thing:
    def method(self, n): ...
def beside(payload, n): ...
def cron(_cron): ...
def trace(_trace): ...
def contexts(one: JobContext, other: JobContext): ...
def unknown(n: "Nobody"): ...
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


@pytest.mark.parametrize("of_task", [False, True])
async def test_a_payload_that_never_fits(database: str, *, of_task: bool) -> None:
    async with App(dsn=database, on_invalid_payload="retry" if of_task else "fail") as app:

        @app.task(on_invalid_payload="fail" if of_task else None)
        async def ship(order: int) -> None: ...

        await app.utils.add_job("ship", {"order": "?"})
        [job] = await Shop(app).after_a_run()
        assert job.state == JobState.FAILED


async def test_the_table_of_outcomes(database: str) -> None:
    rows = re.findall(
        r"^\| `(\w+\(.*?\))` \| (.*?) \| (.*?) \| `(.*?)` \| (.*?) \|$", TASKS.read_text(), re.MULTILINE
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

        for place, (_, attempt, again, error, events) in enumerate(rows):
            await choose.enqueue(row=place)
            [job] = await shop.after_a_run()
            assert (job.attempts, job.last_error) == (attempts[attempt], error)
            assert (job.state == JobState.FAILED) == (again == "never")
            assert shop.heard == re.findall(r"`(.*?)`", events)
            if delay := re.match(r"in (\d+) s", again):
                assert abs(job.run_at - datetime.now(UTC) - timedelta(seconds=int(delay[1]))) < timedelta(
                    seconds=20
                )

        for place in (0, 1):
            await choose.using(max_attempts=1).enqueue(row=place)
            [job] = await shop.after_a_run()
            assert (job.state, shop.heard[-2:]) == (JobState.FAILED, ["job:failed", "job:complete"])


async def test_the_tables_of_tasks_have_every_option() -> None:
    text = TASKS.read_text()
    of_tasks = text.partition("| option |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", of_tasks)) == set(TaskOptions.__annotations__)
    of_apps = text.partition("\n## The app")[2].partition("\n\nConnections")[0]
    assert set(inspect.signature(App).parameters) <= set(re.findall(r"`(\w+)`", of_apps))


async def test_what_the_page_on_tasks_says_of_batches(database: str) -> None:
    async with App(dsn=database) as app:
        shop = Shop(app)
        results: dict[str, Any] = {}
        got: list[Any] = []

        @app.task(batch=True, retry=timedelta(minutes=10))
        async def check(items: list[int]) -> Any:
            got[:] = items
            return results["value"]

        async def left_of(items: list[Any], value: Any) -> list[Job]:
            results["value"] = value
            await app.utils.add_job("check", items)
            return await shop.after_a_run()

        assert await left_of([1, 2], None) == []
        assert await left_of([1, 2], [None, None]) == []
        [job] = await left_of([1, 2, 3], [ValueError("one"), None, ValueError("three")])
        assert (job.payload, job.attempts) == ([1, 3], 1)
        [job] = await left_of([1, 2], [None])
        assert (job.payload, job.attempts) == ([1, 2], 1)
        [job] = await left_of([1, "two", 3], None)
        assert (job.payload, got) == (["two"], [1, 3])
        [job] = await left_of([1, 2], [graphile_worker.Fail("no"), ValueError("no")])
        assert (job.payload, job.attempts) == ([1, 2], 1)
        [job] = await left_of([1, 2], [graphile_worker.Fail("no"), None])
        assert (job.payload, job.state) == ([1], JobState.FAILED)
        [job] = await left_of([1, 2], [graphile_worker.Snooze(60), None])
        assert (job.payload, job.attempts) == ([1], 1)

        async def plain(_payload: list[int]) -> list[Any]:
            return [None, ValueError("two")]

        await app.utils.add_job("plain", [1, 2])
        await app.utils.add_job("plain", [1, 2, 3])
        await run_once({"plain": plain}, database, handle_signals=False)
        [job] = await shop.left()
        assert job.payload == [2]


def test_an_app_closes_its_connections_by_itself(database: str) -> None:
    # In its development mode asyncio warns of steps that take long, as on a busy machine they may.
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


class Friend:
    """Somebody whom the tasks of the page talk to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = False

    async def send(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((*arguments, *named.values()))
        if self.fails:
            raise LookupError("nobody")
        return "42"

    push = charge = pay_out = ask = send


class TestThePageOnWritingGoodTasks:
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
            friends = {name: Friend() for name in ("bank", "mailer", "phone", "oracle")}
            yield Page("writing-good-tasks.md", app=app, pages={}, results={}, answers={}, **friends)

    async def test_its_examples(
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
            assert await shop.after_a_run() == []
            assert await db.fetchval("select count from stock") == (9 if task == "take_from_stock" else 8)
        await page.run()
        await names["charge"].enqueue(order=17, cents=500)
        assert await shop.after_a_run() == []
        assert names["bank"].calls == [(500, "order-17")]

        await page.run()
        await app.utils.add_job("send_invoice", {"order": 1})
        assert await shop.after_a_run() == []

        await page.run()
        await names["send_issue_to_all"].enqueue(issue=5)
        assert await shop.after_a_run() == []
        assert sorted(names["mailer"].calls) == [(1, 5), (2, 5), (3, 5)]

        await self.check_awaiting(page, shop)
        await self.check_the_loop(page, shop, tmp_path)

        await page.run()
        await names["ask"].enqueue(question="why")
        assert await shop.after_a_run() == []
        assert names["answers"] == {"why": "42"}

        await self.check_signing_up(page, shop, db)

        await page.run()
        names["bank"].fails = True
        await app.add_job("pay_out_badly", {"account": 1})
        assert await shop.after_a_run() == []
        assert capsys.readouterr().out == "could not pay\n"
        await names["pay_out"].enqueue(account=1)
        [unpaid] = await shop.after_a_run()
        assert (unpaid.last_error, unpaid.attempts) == ("There is no account 1", 12)

        await self.check_stopping(page, shop)

        await page.run()
        await names["pack"].enqueue(order=17)
        with caplog.at_level("INFO", "graphile_worker"):
            assert await shop.after_a_run() == []
        [packing] = [record for record in caplog.records if "packing" in record.getMessage()]
        assert (packing.getMessage(), vars(packing)["order"]) == ("packing, attempt 1", 17)
        assert {"task_identifier", "job_id", "worker_id"} <= vars(packing).keys()
        page.assert_done()

    async def check_awaiting(self, page: Page, shop: Shop) -> None:
        """What fails in a task group fails the job; what nobody awaits does not."""
        names = await page.run()
        await names["notify"].enqueue(user=7)
        assert await shop.after_a_run() == []
        assert names["phone"].calls == [(7, "news")]
        names["phone"].fails = True
        before = asyncio.all_tasks()
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
        await shop.app.add_job("notify_badly", {"user": 7})
        assert await shop.after_a_run() == []
        await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)
        await names["notify"].enqueue(user=7)
        assert len(await shop.after_a_run()) == 1

    async def check_the_loop(self, page: Page, shop: Shop, tmp_path: Path) -> None:
        """On a thread, and in another process."""
        names = await page.run()
        (tmp_path / "page.html").write_text("Hello")
        url = (tmp_path / "page.html").as_uri()
        await names["fetch"].enqueue(url=url)
        assert await shop.after_a_run() == []
        assert names["pages"] == {url: b"Hello"}
        charts = module("charts", page.skip(), tmp_path)
        stored: list[tuple[int, int]] = []

        @shop.app.task
        async def store(n: int, digits: int) -> None:
            stored.append((n, digits))

        shop.app.include(charts)
        await charts.compute.enqueue(n=20)
        assert await shop.after_a_run() == []
        assert stored == [(20, 19)]

    async def check_signing_up(self, page: Page, shop: Shop, db: asyncpg.Connection) -> None:
        """When the transaction fails, only the better one adds nothing."""

        @shop.app.task
        async def welcome(user: int) -> None: ...

        names = await page.run()
        names["welcome"] = welcome
        for name, count in (("sign_up", 0), ("sign_up_badly", 1)):
            transaction = db.transaction()
            await transaction.start()
            await names[name](db, "ann@example.com")
            await transaction.rollback()
            assert len(await shop.left()) == count
        await names["sign_up"](db, "ann@example.com")
        assert len(await shop.left()) == 1

    async def check_stopping(self, page: Page, shop: Shop) -> None:
        """The job ends after the tenth row, or after the twentieth; another one has the rest."""
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
        assert await shop.after_a_run() == []
        assert handled == list(range(1, 26))
