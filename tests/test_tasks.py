"""Declaring tasks, calling them, and adding their jobs."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import asyncpg
import msgspec
import pydantic
import pytest
from starlette._utils import is_async_callable

from graphile_worker import (
    App,
    ConfigurationError,
    InvalidJobError,
    Job,
    JobContext,
    JobKeyMode,
    JobSpec,
    RunSummary,
    Task,
    WorkerUtils,
    run_once,
    task,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from graphile_worker.testing import Databases

LATER = datetime(2100, 1, 1, tzinfo=UTC)
sent: list[Any] = []


async def _async_key(name: str) -> str:
    return name


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
async def app(database: str) -> AsyncIterator[App]:
    app = App(database)
    sent.clear()
    yield app
    await app.close()
    await asyncio.to_thread(app.close_sync)


class TestDeclaration:
    def test_task_can_be_called_like_its_function(self) -> None:
        app = App()

        @app.task
        async def hello(name: str) -> str:
            """Greets."""
            return f"Hello, {name}"

        @app.task("plain", priority=3)
        def plain(ctx: JobContext | None, n: int) -> int:
            return n + (0 if ctx else 1)

        assert asyncio.run(hello(name="Ann")) == "Hello, Ann"
        assert plain(None, 1) == 2  # type: ignore[arg-type]
        assert (hello.__name__, hello.__doc__, repr(hello)) == ("hello", "Greets.", "<Task 'hello'>")
        assert list(app.tasks) == ["hello", "plain"]
        assert app.tasks["hello"] is hello

    def test_frameworks_recognize_async_tasks(self) -> None:
        async def hello() -> None: ...
        def plain() -> None: ...

        assert is_async_callable(task(hello))
        assert not is_async_callable(task(plain))

    def test_function_cannot_be_declared_twice(self) -> None:
        app = App()

        async def hello() -> None: ...

        app.task(hello)
        with pytest.raises(ConfigurationError, match="two tasks named 'hello'"):
            app.task(queue_name="q")(hello)

    def test_invalid_task_identifier_is_rejected(self) -> None:
        app = App()

        @app.task
        async def hello() -> None: ...

        async def other() -> None: ...

        with pytest.raises(
            ConfigurationError,
            match=r"two tasks named 'hello': .*hello.*test_tasks.py, line \d+\) and .*other",
        ):
            app.task("hello")(other)
        with pytest.raises(ConfigurationError, match="1 to 128 characters"):
            app.task("")(other)
        with pytest.raises(ConfigurationError, match="129 characters; the maximum is 128"):
            app.task("x" * 129)(other)
        with pytest.raises(ConfigurationError, match="has no name"):
            app.task(lambda: None)
        with pytest.raises(ConfigurationError, match="already"):
            app.task(hello)
        assert list(app.tasks) == ["hello"]

    def test_identifier_unusable_in_a_crontab_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        async def send() -> None: ...

        for good in ("send", "mail/send", "a:b-c_1", "_x"):
            task(good)(send)
        assert not caplog.records
        task("send mail")(send)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "'send mail' cannot be used in a crontab" in record.getMessage()

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"priority": 100_000}, "priority is 100000"),
            ({"max_attempts": 0}, "max_attempts is 0"),
            ({"queue_name": ""}, "queue_name is ''"),
            ({"flags": "x"}, "flags is 'x'"),
            ({"job_key_mode": "x"}, "job_key_mode is 'x'"),
            (
                {"job_key": "k:{nme}"},
                "'k:{nme}', names an unknown parameter 'nme'. The task's parameters: name",
            ),
            ({"job_key": "k:{"}, "Single '{' encountered"),
            ({"job_key": "k:{}"}, "unknown parameter ''"),
            ({"job_key": ""}, "'hello', '', must be a template"),
            ({"job_key": b"k"}, "b'k', must be a template"),
            ({"job_key": lambda: "k"}, "with the task's arguments: too many positional arguments"),
            ({"job_key": lambda name, other: "k"}, "missing a required argument: 'other'"),  # noqa: ARG005
            ({"job_key": _async_key}, "is an async def. It must be a plain function"),
            ({"batch": "no"}, "batch is 'no'; it must be True or False"),
            ({"retry": {}}, "retry is {}"),
            ({"retry": "soon"}, "retry is 'soon'"),
            ({"on_invalid_payload": "x"}, "it must be 'retry' or 'fail'"),
            ({"queue": "x"}, "'queue'. Did you mean queue_name?"),
        ],
    )
    def test_invalid_task_option_is_rejected(self, options: Any, why: str) -> None:
        async def hello(name: str) -> None: ...

        with pytest.raises(ConfigurationError) as caught:
            task(**options)(hello)
        assert why in str(caught.value)

    def test_decorator_with_options_can_be_shared(self) -> None:
        mail = task(queue_name="mail", max_attempts=3)

        @mail
        async def send(to: str) -> None: ...

        @mail("mail/urgent", priority=-1)
        async def urgent(to: str) -> None: ...

        assert send.spec("Ann") == JobSpec("send", {"to": "Ann"}, queue_name="mail", max_attempts=3)
        assert urgent.spec("Ann") == JobSpec(
            "mail/urgent", {"to": "Ann"}, queue_name="mail", max_attempts=3, priority=-1
        )

    def test_task_without_an_app_can_be_called_but_not_enqueued(self) -> None:
        @task
        async def hello(name: str) -> str:
            return name

        assert asyncio.run(hello("Ann")) == "Ann"
        with pytest.raises(ConfigurationError, match=r"'hello' belongs to no app.*include"):
            asyncio.run(hello.enqueue("Ann"))


class TestEnqueue:
    async def test_enqueue_stores_its_arguments_as_the_payload(self, app: App) -> None:
        @app.task(queue_name="q", priority=5, max_attempts=3, flags=iter(["slow"]))
        async def hello(name: str, n: int = 3) -> None:
            sent.append((name, n))

        jobs = [await hello.enqueue("Ann"), await hello.enqueue(name="Bob", n=4)]
        assert [job.payload for job in jobs] == [{"name": "Ann"}, {"name": "Bob", "n": 4}]
        for job in jobs:
            assert (job.queue_name, job.priority, job.max_attempts, job.flags) == (
                "q",
                5,
                3,
                frozenset({"slow"}),
            )
        assert await app.run_once() == RunSummary(2, 0)
        assert sent == [("Ann", 3), ("Bob", 4)]

    async def test_enqueue_rejects_invalid_arguments(self, app: App) -> None:
        @app.task
        async def hello(name: str, at: datetime | None = None) -> None: ...

        calls: dict[Any, str] = {
            hello.enqueue: "missing a required argument: 'name'",
            lambda: hello.enqueue("Ann", nme=1): "it has no parameter 'nme' (did you mean 'name'?)",  # type: ignore[call-arg]
            lambda: hello.enqueue(3): "name: Expected `str`, got `int`",  # type: ignore[arg-type]
            lambda: hello.enqueue("Ann", at="soon"): "at: Invalid RFC3339",  # type: ignore[arg-type]
            lambda: hello.enqueue(object()): "cannot be written as JSON",  # type: ignore[arg-type]
            lambda: hello.enqueue("a\0b"): "NUL",
            lambda: hello.using(priority=10**6).enqueue("Ann"): "priority is 1000000",
            lambda: hello.enqueue_many(
                [{"name": "Ann"}, {"name": 3}]
            ): "Payload number 1: Invalid arguments for task 'hello'",
            lambda: hello.enqueue_many([{"name": "Ann"}, "Bob"]): "must be a mapping",
            lambda: app.add_job("hello", {"name": 3}): "name: Expected `str`",
            lambda: app.add_job("hello"): "missing a required argument: 'name'",
        }
        for call, why in calls.items():
            with pytest.raises(InvalidJobError) as caught:
                await call()
            assert why in str(caught.value)
        with pytest.raises(InvalidJobError, match=r"using has no option 'queue'. Did you mean queue_name"):
            hello.using(queue="x")  # type: ignore[call-arg]
        for wrong, right in {
            "countdown": "delay",
            "eta": "run_at",
            "key": "job_key",
            "priorty": "priority",
        }.items():
            with pytest.raises(
                InvalidJobError, match=f"add_job has no option '{wrong}'. Did you mean {right}"
            ):
                await app.add_job("hello", {"name": "Ann"}, **{wrong: 1})  # type: ignore[arg-type]
        assert await app.utils.list_jobs() == []

    async def test_add_jobs_and_enqueue_many_reject_other_types(self, app: App) -> None:
        @app.task
        async def say(payload: str) -> None: ...

        calls: dict[Any, str] = {
            lambda: app.add_jobs("abc"): "add_jobs takes a list or another iterable of specs, not 'abc'",  # type: ignore[arg-type]
            lambda: app.add_jobs(b"abc"): "not b'abc'",  # type: ignore[arg-type]
            lambda: app.add_jobs(None): "not None",  # type: ignore[arg-type]
            lambda: app.add_jobs(["say"]): "not 'say'. Create a spec with Task.spec(...) or JobSpec",  # type: ignore[list-item]
            lambda: app.add_jobs([("say", "a")]): "not ('say', 'a')",  # type: ignore[list-item]
            lambda: app.add_jobs(iter([b"say"])): "not b'say'",  # type: ignore[arg-type]
            lambda: say.enqueue_many(None): "not None",  # type: ignore[arg-type]
            lambda: say.enqueue_many("abc"): "not 'abc'",
            lambda: say.enqueue_many({"payload": "a"}): "not {'payload': 'a'}",
            lambda: asyncio.to_thread(say.enqueue_many_sync, None): "not None",  # type: ignore[arg-type]
            lambda: asyncio.to_thread(app.add_jobs_sync, "abc"): "not 'abc'",  # type: ignore[arg-type]
        }
        for call, why in calls.items():
            with pytest.raises(InvalidJobError) as caught:
                await call()
            assert why in str(caught.value)
        assert await app.utils.list_jobs() == []

    async def test_add_job_rejects_unknown_task_types_with_a_hint(self, app: App) -> None:
        app.task(SendEmail)

        async def plain() -> None: ...

        wrong: dict[Any, str] = {
            SendEmail: "SendEmail is a class. Pass an instance, which is the payload: SendEmail(...).",
            plain: "plain is a function, not a task. Declare it: app.task(plain).",
            None: "None is not a task's name, a task, or an instance of a handler class.",
            int: "<class 'int'> is not a task's name",
            3.5: "3.5 is not a task's name",
        }
        for job, why in wrong.items():
            with pytest.raises(InvalidJobError) as caught:
                await app.add_job(job)
            assert str(caught.value).startswith(why)

    async def test_positional_only_parameters_are_stored_by_name(self, app: App) -> None:
        @app.task(job_key="{a}-{b}")
        async def add(a: int, /, b: int = 2, **more: int) -> None:
            sent.append((a, b, more))

        jobs = [
            await app.add_job("add", {"a": 1}),
            await add.enqueue(3, 4),
            *await add.enqueue_many([{"b": 6, "a": 5, "c": 7}]),
        ]
        assert [job.payload for job in jobs] == [{"a": 1}, {"a": 3, "b": 4}, {"a": 5, "b": 6, "c": 7}]
        assert [job.key for job in jobs] == ["1-2", "3-4", "5-6"]
        with pytest.raises(InvalidJobError, match="multiple values for argument 'a'"):
            await add.enqueue(1, a=2)
        await app.run_once()
        assert sent == [(1, 2, {}), (3, 4, {}), (5, 6, {"c": 7})]

    async def test_payload_key_may_have_any_name(self, app: App) -> None:
        @app.task(job_key=lambda **names: str(names["self"]))
        async def take(**names: int) -> None: ...

        job = await take.enqueue(self=1, makes=2, about=3, args=4, payload=5)
        assert (job.key, job.payload) == ("1", {"self": 1, "makes": 2, "about": 3, "args": 4, "payload": 5})

    async def test_using_sets_job_options(self, app: App) -> None:
        @app.task(priority=5, queue_name="q")
        async def hello(name: str) -> None: ...

        job = await hello.using(
            run_at=LATER,
            queue_name="other",
            job_key="k",
            job_key_mode=JobKeyMode.PRESERVE_RUN_AT,
            priority=-5,
            max_attempts=2,
            flags=["x"],
        ).enqueue("Ann")
        assert (job.run_at, job.queue_name, job.key, job.priority) == (LATER, "other", "k", -5)
        assert (job.max_attempts, job.flags) == (2, frozenset({"x"}))
        later = hello.using(run_at=timedelta(hours=1)).using(priority=1)
        assert (await later.enqueue("Bob")).run_at > datetime.now(UTC) + timedelta(minutes=59)
        assert (await later.enqueue("Bob")).priority == 1
        assert (await hello.using(queue_name=None).enqueue("Bob")).queue_name is None

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("delay", r"await report\.enqueue\(\.\.\.\), or without an event loop report\.enqueue_sync\("),
            ("apply_async", r"await report\.using\(run_at=\.\.\., priority=\.\.\.\)\.enqueue\("),
            ("s", r"To describe a job without adding it, use report\.spec\("),
        ],
    )
    def test_method_names_of_other_job_queues_get_a_hint(self, app: App, name: str, hint: str) -> None:
        @app.task("reports/daily")
        async def report(day: str) -> None: ...

        for target in (report, report.using(priority=1)):
            with pytest.raises(AttributeError, match=f"A task has no '{name}'. .*{hint}"):
                getattr(target, name)
            assert not hasattr(target, name)

    def test_unknown_attribute_of_a_task_is_an_ordinary_error(self, app: App) -> None:
        @app.task
        async def report(day: str) -> None: ...

        with pytest.raises(AttributeError, match="'Task' object has no attribute 'nothing'"):
            report.nothing  # type: ignore[attr-defined]  # noqa: B018
        assert copy.copy(report).identifier == "report"

    @pytest.mark.parametrize("queue_name", ["customer:{customer}", "{", "a}"])
    async def test_queue_name_of_one_job_with_braces_is_rejected(self, app: App, queue_name: str) -> None:
        @app.task
        async def ship(customer: int) -> None: ...

        with pytest.raises(InvalidJobError, match=r"not a template\. Pass the name itself, for example f'"):
            ship.using(queue_name=queue_name)
        job = await app.add_job("ship", {"customer": 7}, queue_name=queue_name)
        assert job.queue_name == queue_name, "a queue may have any name, because SQL and Node can add one"

    async def test_queue_name_of_a_task_may_be_a_template_or_a_function(self, app: App) -> None:
        @app.task(queue_name="customer:{customer}")
        async def bill(customer: int, note: str = "") -> None: ...

        @app.task(queue_name=lambda customer: f"c{customer}" if customer else None)
        async def ship(customer: int) -> None: ...

        assert (await bill.enqueue(7)).queue_name == "customer:7"
        assert [job.queue_name for job in await bill.enqueue_many([{"customer": 8}])] == ["customer:8"]
        assert (await app.add_job("bill", {"customer": 9})).queue_name == "customer:9"
        assert (await bill.using(queue_name="all").enqueue(7)).queue_name == "all"
        assert (await bill.using(queue_name=None).enqueue(7)).queue_name is None
        assert [ship.spec(1).queue_name, ship.spec(0).queue_name] == ["c1", None]

    @pytest.mark.parametrize(
        ("queue_name", "problem"), [("{", "not a valid template"), ("a:{other}", "unknown parameter 'other'")]
    )
    def test_invalid_queue_template_is_rejected(self, app: App, queue_name: str, problem: str) -> None:
        async def bill(customer: int) -> None: ...

        with pytest.raises(ConfigurationError, match=rf"The queue_name of the task 'bill'.*{problem}"):
            app.task(queue_name=queue_name)(bill)

    def test_options_of_a_task_may_be_functions_of_the_arguments(self, app: App) -> None:
        tomorrow = datetime(2040, 1, 2, tzinfo=UTC)

        @app.task(
            priority=lambda customer, *_: -customer,
            flags=lambda customer, *_: [f"customer-{customer}"],
            run_at=lambda _, at: at,
        )
        async def bill(customer: int, at: datetime | None = None) -> None: ...

        spec = bill.spec(7, at=tomorrow)
        assert (spec.priority, spec.flags, spec.run_at) == (-7, {"customer-7"}, tomorrow)
        assert bill.spec(7).run_at is None
        assert bill.using(priority=1).spec(7).priority == 1
        assert bill.using(delay=60).spec(7, at=tomorrow).run_at == timedelta(seconds=60)

    def test_option_that_cannot_be_computed_is_named(self, app: App) -> None:
        @app.task(priority=str)  # type: ignore[arg-type]
        async def bill(customer: int) -> None: ...

        with pytest.raises(InvalidJobError, match="priority is '7'"):
            bill.spec(7)

    async def test_job_is_part_of_the_callers_transaction(self, app: App, db: asyncpg.Connection) -> None:
        @app.task
        async def hello(name: str) -> None: ...

        async def rolled_back() -> None:
            async with db.transaction():
                await hello.using(connection=db).enqueue("Ann")
                await hello.using(connection=db).enqueue_many([{"name": "Bob"}])
                await app.add_job("hello", {"name": "Cid"}, connection=db)
                await app.add_jobs([hello.spec("Dan")], connection=db)
                assert await db.fetchval("select count(*) from graphile_worker.jobs") == 4
                raise RuntimeError("rolled back")

        with pytest.raises(RuntimeError, match="rolled back"):
            await rolled_back()
        assert await app.utils.list_jobs() == []
        with pytest.raises(ConfigurationError, match=r"asyncpg.*\bint\b"):
            await hello.using(connection=3).enqueue("Ann")  # type: ignore[arg-type]

    async def test_enqueue_many_adds_a_job_per_payload(self, app: App) -> None:
        @app.task(job_key="hello:{name}")
        async def hello(name: str) -> None: ...

        @app.task
        async def count(payload: int) -> None: ...

        jobs = await hello.enqueue_many({"name": f"n{n}"} for n in range(3))
        assert [job.key for job in jobs] == ["hello:n0", "hello:n1", "hello:n2"]
        assert [job.payload for job in await count.enqueue_many(range(3))] == [0, 1, 2]
        assert await hello.using(priority=3).enqueue_many([]) == []

    async def test_job_key_may_be_a_template_or_a_function(self, app: App) -> None:
        @app.task(job_key="user:{user_id}:{kind}", job_key_mode="unsafe_dedupe")
        async def sync(user_id: int, kind: str = "full") -> None: ...

        @app.task(job_key="fixed {{}}")
        async def fixed() -> None: ...

        @app.task(job_key=lambda name, **_: name.lower() or None)
        async def by_function(name: str, **extra: int) -> None: ...

        @app.task(job_key="point:{payload[x]}")
        async def whole(payload: dict[str, int]) -> None: ...

        assert (await sync.enqueue(7)).key == "user:7:full"
        assert (await sync.enqueue(7, "part")).key == "user:7:part"
        assert (await sync.using(job_key="other").enqueue(7)).key == "other"
        assert (await sync.using(job_key=None).enqueue(7)).key is None
        assert (await fixed.enqueue()).key == "fixed {}"
        assert (await by_function.enqueue("Ann", x=1)).key == "ann"
        assert (await by_function.enqueue("")).key is None
        assert (await whole.enqueue({"x": 3})).key == "point:3"
        with pytest.raises(
            InvalidJobError, match=r"'point:\{payload\[x\]\}', cannot be computed: KeyError: 'x'"
        ):
            await whole.enqueue({"y": 3})
        assert sync.spec(7).job_key_mode == "unsafe_dedupe"

        def fails(name: str) -> str:
            raise LookupError(name)

        def hello(name: str) -> None: ...

        with pytest.raises(InvalidJobError, match="'hello' cannot be computed: LookupError: Ann"):
            task("hello", job_key=fails)(hello).spec("Ann")

    async def test_job_key_uses_converted_arguments(self, app: App) -> None:
        @app.task(job_key="{day:%d.%m.%Y} {n}")
        async def report(day: date, n: int = 7) -> None: ...

        @app.task(job_key=lambda day, **_: str(day.year))
        async def yearly(day: date) -> None: ...

        keys = [
            await report.enqueue(date(2030, 1, 2)),
            await app.add_job("report", {"day": "2030-01-02"}),
            *await report.enqueue_many([{"day": "2030-01-02"}]),
        ]
        assert {job.key for job in keys} == {"02.01.2030 7"}
        assert (await app.add_job("yearly", {"day": "2030-01-02"})).key == "2030"

    async def test_add_job_applies_task_options_by_name_and_accepts_unknown_names(self, app: App) -> None:
        @app.task(queue_name="q", job_key="hello:{name}")
        async def hello(name: str) -> None: ...

        job = await app.add_job("hello", {"name": "Ann", "_trace": {"id": 1}}, priority=-10)
        assert (job.queue_name, job.key, job.priority) == ("q", "hello:Ann", -10)
        assert job.payload == {"name": "Ann", "_trace": {"id": 1}}
        assert (await app.add_job(hello, {"name": "Bob"})).key == "hello:Bob"
        other = await app.add_job("written_in_typescript", {"anything": [1]})
        assert (other.task_identifier, other.payload) == ("written_in_typescript", {"anything": [1]})

    async def test_reserved_payload_keys_are_rejected(self, app: App) -> None:
        @app.task
        async def hello(**extra: int) -> None: ...

        with pytest.raises(InvalidJobError, match="_cron: this key is reserved"):
            await hello.enqueue(_cron=1)


@dataclass
class SendEmail:
    identifier: ClassVar[str] = "send_email"
    to: str
    copies: int = 1

    async def run(self, ctx: JobContext) -> None:
        sent.append((self, ctx.job.id))


class Goods(NamedTuple):
    weight: int


class Parcel(Goods):
    identifier: ClassVar[str] = "parcel"

    async def run(self, ctx: JobContext) -> None: ...


class Count(msgspec.Struct):
    identifier: ClassVar[str] = "count"
    n: int

    def run(self) -> None:
        sent.append(self)


class Ship(pydantic.BaseModel):
    identifier: ClassVar[str] = "ship"
    days: list[int]

    def run(self, ctx: JobContext) -> None:
        sent.append((self, ctx.job.task_identifier))


class TestClasses:
    async def test_class_can_be_a_task(self, app: App) -> None:
        assert app.task(SendEmail) is SendEmail
        assert app.task(queue_name="counts", job_key="count:{self.n}")(Count) is Count
        app.task(Ship)
        one = await app.add_job(SendEmail("Ann", 2), priority=3)
        assert (one.task_identifier, one.payload, one.priority) == (
            "send_email",
            {"to": "Ann", "copies": 2},
            3,
        )
        others: list[Any] = [Count(7), Ship(days=[1, 2])]
        two, three = await app.add_jobs(iter(others))
        assert (two.queue_name, two.key) == ("counts", "count:7")
        assert three.payload == {"days": [1, 2]}
        assert await app.run_once() == RunSummary(3, 0)
        assert sorted(sent, key=str) == sorted(
            [Count(7), (SendEmail("Ann", 2), one.id), (Ship(days=[1, 2]), "ship")], key=str
        )

    async def test_named_tuple_can_be_a_task(self, app: App) -> None:
        app.task(Parcel)
        one = await app.add_job(Parcel(3))
        [two] = await app.add_jobs([Parcel(3)])
        assert (one.task_identifier, one.payload) == (two.task_identifier, two.payload)

    async def test_task_adds_jobs_like_the_app(self, app: App) -> None:
        """A task adds instances, tasks and names with the same options, and gets the same errors."""
        app.task(SendEmail)
        app.task(queue_name="counts")(Count)
        refused: list[str] = []

        @app.task(queue_name="greetings")
        async def greet(name: str) -> None: ...

        @app.task
        async def fan_out(ctx: JobContext) -> None:
            for wrong in ("options", "payload", "class"):
                try:
                    if wrong == "options":
                        await ctx.add_job("elsewhere", queue="x")  # type: ignore[call-arg]
                    elif wrong == "payload":
                        await ctx.add_job(greet, {"name": 3})
                    else:
                        await ctx.add_job(SendEmail)  # type: ignore[arg-type]
                except InvalidJobError as error:
                    refused.append(str(error))
            await ctx.add_job(SendEmail("Ann"), priority=3, run_at=LATER)
            await ctx.add_job(greet, {"name": "Bob"}, timeout=30, run_at=LATER)
            await ctx.add_job("elsewhere", {"n": 1}, timeout=timedelta(minutes=1))
            specs: list[Any] = [Count(7), greet.using(run_at=LATER).spec("Cid")]
            sent.extend(await ctx.add_jobs(iter(specs)))

        await fan_out.enqueue()
        assert await app.run_once() == RunSummary(2, 0)
        assert refused == [
            "add_job has no option 'queue'. Did you mean queue_name?",
            "Invalid arguments for task 'greet': name: Expected `str`, got `int`.",
            "SendEmail is a class. Pass an instance, which is the payload: SendEmail(...).",
        ]
        jobs = await app.utils.list_jobs()
        assert sorted((job.task_identifier, job.queue_name, sorted(job.flags)) for job in jobs) == sorted(
            [
                ("send_email", None, []),
                ("greet", "greetings", ["timeout:30"]),
                ("elsewhere", None, ["timeout:60"]),
                ("greet", "greetings", []),
            ]
        )
        assert sent[0].queue_name == "counts"

    def test_job_key_of_a_class_uses_its_fields(self) -> None:
        for kind, one in ((SendEmail, SendEmail("Ann")), (Ship, Ship(days=[3])), (Count, Count(7))):
            field = {SendEmail: "to", Ship: "days[0]", Count: "n"}[kind]
            app = App()
            app.task(job_key=f"{{{field}}}/{{self.{field}}}")(kind)
            key = app.tasks[kind.identifier].spec(one).job_key
            assert key in {"Ann/Ann", "3/3", "7/7"}
        with pytest.raises(ConfigurationError, match=r"'copy'\. .*: self, copies, to"):
            task(job_key="{copy}")(SendEmail)

    async def test_context_adds_jobs_by_the_names_of_the_worker(self, database: str) -> None:
        @task
        async def count(ctx: JobContext, n: int) -> None:
            if n:
                await ctx.add_job("counting", {"n": n - 1})

        async with WorkerUtils(database) as utils:
            await utils.add_job("counting", {"n": 2})
            assert await run_once({"counting": count}, database, handle_signals=False) == RunSummary(3, 0)

    async def test_class_can_have_another_task_name(self, app: App) -> None:
        app.task("mail/send")(SendEmail)
        assert (await app.add_job(SendEmail("Ann"))).task_identifier == "mail/send"

    async def test_invalid_instance_is_rejected(self, app: App) -> None:
        app.task(SendEmail)
        with pytest.raises(InvalidJobError, match="to: Expected `str`, got `int`"):
            await app.add_job(SendEmail(3))  # type: ignore[arg-type]
        with pytest.raises(InvalidJobError, match=r"Count.*app\.task\(Count\)"):
            await app.add_job(Count(1))
        with pytest.raises(InvalidJobError, match="SendEmail is already a payload"):
            await app.add_job(SendEmail("Ann"), {"to": "Bob"})

    async def test_class_task_can_be_added_by_name(self, app: App) -> None:
        app.task(SendEmail)
        await app.add_job("send_email", {"to": "Ann"})
        with pytest.raises(InvalidJobError, match="to: it is missing"):
            await app.add_job("send_email", {})
        assert await app.run_once() == RunSummary(1, 0)
        assert sent[0][0] == SendEmail("Ann")

    def test_unsuitable_class_is_rejected_as_a_task(self) -> None:
        class Plain:
            identifier = "plain"

            def run(self) -> None: ...

        @dataclass
        class Nameless:
            def run(self) -> None: ...

        @dataclass
        class WithoutRun:
            identifier: ClassVar[str] = "without_run"

        @dataclass
        class ExtraParameter:
            identifier: ClassVar[str] = "extra_parameter"

            def run(self, name: str) -> None: ...

        @dataclass
        class Field:
            identifier: str = "field"

            def run(self) -> None: ...

        for kind, why in [
            (Field, r"Make it a ClassVar\[str\]"),
            (Plain, r"must be a dataclass.* below @app.task"),
            (Nameless, "has no identifier"),
            (WithoutRun, r"has no method run\(self, ctx\)"),
            (ExtraParameter, r"must take \(self\) or \(self, ctx\)"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                task(kind)
        with pytest.raises(ConfigurationError, match="a class cannot be a batch task"):
            task(batch=True)(SendEmail)


class TestSync:
    async def test_sync_methods_add_the_same_jobs_as_async_ones(self, app: App) -> None:
        app.task(SendEmail)

        @app.task(queue_name="q")
        def hello(name: str) -> None:
            sent.append(name)

        def work() -> list[Job]:
            app.run_sync(app.migrate())
            assert app.run_sync(lambda: app.utils.stats()).ready == 0  # noqa: PLW0108 - app.utils must be read inside the call
            assert app.utils.stats_sync().ready == 0
            return [
                hello.enqueue_sync("a"),
                hello.using(priority=-1).enqueue_sync(name="b"),
                *hello.enqueue_many_sync({"name": name} for name in "cd"),
                app.add_job_sync("hello", {"name": "e"}, run_at=timedelta(0)),
                app.add_job_sync(SendEmail("Ann")),
                *app.add_jobs_sync([hello.spec("f"), SendEmail("Bob")]),
            ]

        jobs = await asyncio.to_thread(work)
        assert await app.utils.list_jobs() == sorted(jobs, key=lambda job: job.id)
        assert await app.run_once() == RunSummary(8, 0)

    async def test_threads_can_add_jobs_concurrently(self, app: App) -> None:
        @app.task
        def hello(n: int) -> None: ...

        barrier = threading.Barrier(20)

        def work(n: int) -> int:
            barrier.wait()
            return hello.enqueue_sync(n).id

        ids = await asyncio.gather(*[_on_thread(work, n) for n in range(20)])
        assert len(set(ids)) == 20

    async def test_sync_methods_raise_in_the_calling_thread(self, app: App) -> None:
        @app.task
        def hello(n: int) -> None: ...

        with pytest.raises(InvalidJobError, match="n: Expected `int`"):
            await asyncio.to_thread(hello.enqueue_sync, "x")  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"event loop.*without _sync"):
            hello.enqueue_sync(1)
        async with app.utils.connection() as connection:
            bound = hello.using(connection=connection)
            with pytest.raises(ConfigurationError, match="belongs to an event loop"):
                await asyncio.to_thread(bound.enqueue_sync, 1)

    async def test_task_on_a_thread_can_add_jobs(self, app: App) -> None:
        @app.task
        def first(n: int) -> None:
            if n:
                first.enqueue_sync(n - 1)
            sent.append(n)

        await first.enqueue(3)
        assert await app.run_once() == RunSummary(4, 0)
        assert sent == [3, 2, 1, 0]


async def _on_thread(work: Any, n: int) -> Any:
    """Run the function on a new thread, because the pool of the event loop may have fewer threads."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def run() -> None:
        value = work(n)
        done.get_loop().call_soon_threadsafe(done.set_result, value)

    threading.Thread(target=run).start()
    return await done


def test_decorated_function_is_a_task() -> None:
    @task
    def hello(name: str) -> None: ...

    assert isinstance(hello, Task)
