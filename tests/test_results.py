"""Waiting for the results of jobs: `JobHandle.result`, `Task.call`, and what they raise."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import asyncpg
import msgspec
import psycopg
import pydantic
import pytest

from graphile_worker import (
    App,
    Cancel,
    ConfigurationError,
    History,
    InvalidJobError,
    Job,
    JobCancelledError,
    JobContext,
    JobFailedError,
    JobHandle,
    ResultTimeoutError,
    ResultUnknownError,
    Retry,
    SchemaMissingError,
    WorkerUtils,
)
from graphile_worker._client import results as waiting
from graphile_worker._client.results import ResultPoller
from graphile_worker._db.queries.results import read_results
from graphile_worker.history import caller_of
from graphile_worker.job import AwaitedJob
from graphile_worker.testing import drain, inline, override
from support import computing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from datetime import datetime

    from graphile_worker.testing import Databases

LONG = 60
"""Seconds that a result does not take, even on a machine that pauses."""
NEVER = 1e6
TERMINATE = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid()
"""


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only notifications end a call."""
    monkeypatch.setattr(waiting, "_SHORTEST", NEVER)
    monkeypatch.setattr(waiting, "_LONGEST", NEVER)


@dataclass
class Total:
    order: int
    amount: Decimal


class Point(msgspec.Struct):
    x: int


class Invoice(pydantic.BaseModel):
    number: int


class Unknown:
    """A class that JSON cannot carry."""


def make_app(dsn: str, **options: Any) -> App:
    app = App(dsn, **options)
    tries = iter(range(100))

    @app.task(keep_result=True)
    async def total(order: int) -> Total:
        return Total(order, Decimal("9.90"))

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    def in_thread(text: str) -> str:
        return text

    @app.task(keep_result=True, max_attempts=1)
    async def broken(text: str) -> int:
        raise LookupError(text)

    @app.task(keep_result=True)
    async def flaky() -> int:
        if (attempt := next(tries)) < 2:
            raise Retry(after=0)
        return attempt

    @app.task(keep_result=True)
    async def cancels() -> int:
        raise Cancel("not needed")

    return app


@asynccontextmanager
async def working(app: App, **options: Any) -> AsyncIterator[App]:
    """Run a worker, in other connections than those of the code that waits."""
    worker = make_app(app.settings["dsn"], history=app.history)
    for task in app.tasks.values():
        if task.identifier not in worker.tasks:
            worker.include(task)
    async with app, worker.running(**options):
        yield app


def poller(app: App) -> ResultPoller:
    return app.utils._session.service(ResultPoller)


async def listen(app: App) -> None:
    """Listen, because a notification that is sent before is lost."""
    poller(app).listen()
    while not poller(app).is_listening:
        await asyncio.sleep(0.001)


async def waiter_count(app: App, count: int) -> None:
    """Wait until so many jobs are awaited."""
    while len(poller(app)._waiters) != count:
        await asyncio.sleep(0.001)


class TestResult:
    async def test_result_has_the_return_type_of_the_task(self, database: str) -> None:
        app = make_app(database)

        @app.task(keep_result=True)
        async def point(x: int) -> Point:
            return Point(x)

        @app.task(keep_result=True)
        def invoices(numbers: list[int]) -> dict[int, Invoice]:
            return {number: Invoice(number=number) for number in numbers}

        @app.task(keep_result=True)
        async def nothing() -> None: ...

        @app.task(keep_result=True)
        async def plain():  # type: ignore[no-untyped-def]  # noqa: ANN202
            return Total(1, Decimal(2))

        async with app:
            total = await app.tasks["total"].enqueue(order=7)
            jobs: list[JobHandle[Any]] = [
                await point.enqueue(3),
                await invoices.enqueue([1]),
                await nothing.enqueue(),
            ]
            plain_job = await plain.enqueue()
            await drain(app)
            assert await total.result() == Total(7, Decimal("9.90"))
            assert [await job.result() for job in jobs] == [Point(3), {1: Invoice(number=1)}, None]
            assert await plain_job.result() == {"order": 1, "amount": "2"}

    async def test_result_waits_until_a_worker_has_run_the_job(self, database: str) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["total"].enqueue(order=7)
            result = asyncio.create_task(job.result(timeout=LONG))
            await waiter_count(app, 1)
            await drain(app)
            assert await result == Total(7, Decimal("9.90"))

    async def test_result_waits_through_retries(self, database: str) -> None:
        app = make_app(database)
        async with working(app):
            assert await (await app.tasks["flaky"].enqueue()).result(timeout=LONG) == 2

    async def test_failed_job_raises_the_remote_error(self, database: str) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["broken"].enqueue("no such order")
            await drain(app)
            with pytest.raises(
                JobFailedError, match=r"Job \d+ \(broken\) failed: LookupError: no such o"
            ) as it:
                await job.result(timeout=LONG)
        error = it.value
        assert (error.job_id, error.task_identifier) == (job.id, "broken")
        assert (error.error_type, error.error_message) == ("LookupError", "no such order")
        assert "raise LookupError(text)" in (error.traceback or "")
        assert error.__notes__ == [f"In the worker:\n{(error.traceback or '').rstrip()}"]
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.traceback) == (str(error), error.traceback)

    @pytest.mark.parametrize(
        ("error_type", "message", "shown"),
        [
            ("ValueError", "no", "ValueError: no"),
            ("KeyError", "KeyError: 'to'", "KeyError: 'to'"),
            ("shop.OrderError", "OrderError", "OrderError"),
            ("httpx.ReadTimeout", "", "httpx.ReadTimeout"),
            (None, "no", "no"),
            (None, "", ""),
        ],
    )
    def test_error_names_the_type_once(self, error_type: str | None, message: str, shown: str) -> None:
        error = JobFailedError(7, "total", message, error_type=error_type)
        assert str(error) == f"Job 7 (total) failed: {shown}"

    async def test_failed_job_raises_even_after_its_row_is_removed(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["broken"].enqueue("no")
            await drain(app)
            await db.execute("delete from graphile_worker._private_jobs")
            with pytest.raises(JobFailedError, match="LookupError: no"):
                await job.result(timeout=LONG)

    async def test_cancelled_job_raises_the_reason(self, database: str) -> None:
        app = make_app(database)
        async with app:
            by_task = await app.tasks["cancels"].enqueue()
            await drain(app)
            waits = await app.tasks["total"].enqueue(order=1)
            await app.cancel_job(waits.id, "by hand")
            for job, reason in ((by_task, "not needed"), (waits, "by hand")):
                with pytest.raises(JobCancelledError, match=f"was cancelled: Cancelled: {reason}") as it:
                    await job.result(timeout=LONG)
                assert it.value.job_id == job.id
                assert str(pickle.loads(pickle.dumps(it.value))) == str(it.value)

    async def test_job_that_fails_after_a_cancellation_was_undone_has_failed(self, database: str) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["broken"].enqueue("later")
            await app.cancel_job(job.id)
            await app.utils.reschedule_jobs([job.id], attempts=0)
            await drain(app)
            with pytest.raises(JobFailedError, match="LookupError: later"):
                await job.result(timeout=LONG)

    async def test_job_that_was_failed_by_hand_has_failed(self, database: str) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["total"].enqueue(1)
            await app.utils.permanently_fail_jobs([job.id], "enough")
            with pytest.raises(JobFailedError, match="failed: enough") as it:
                await job.result(timeout=LONG)
        assert (it.value.error_type, it.value.traceback) == (None, None)

    async def test_timeout_leaves_the_job_and_its_id(self, database: str) -> None:
        app = make_app(database)
        async with app:
            total = app.tasks["total"]
            job = await total.enqueue(1)
            for timeout in (0, 0.001):
                with pytest.raises(ResultTimeoutError, match=r"has not ended .* It goes on") as it:
                    await job.result(timeout)
                assert isinstance(it.value, TimeoutError)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await job.result()
            assert not poller(app)._waiters
            await drain(app)
            assert it.value.job_id is not None
            assert await total.result_of(it.value.job_id, timeout=0) == Total(1, Decimal("9.90"))

    async def test_result_of_many_jobs(self, database: str) -> None:
        app = make_app(database)
        total = app.tasks["total"]
        async with working(app):
            jobs = await total.enqueue_many([{"order": order} for order in range(20)])
            totals = await asyncio.gather(*(total.result_of(job, timeout=LONG) for job in jobs))
            assert [one.order for one in totals] == [*range(20)]

    async def test_plain_client_returns_json(self, database: str) -> None:
        app = make_app(database)
        async with app, WorkerUtils(database) as utils:
            job = await app.tasks["total"].enqueue(1)
            await drain(app)
            assert await utils.job_result(job.id, timeout=LONG) == {"order": 1, "amount": "9.90"}
            with pytest.raises(ConfigurationError, match="timeout is -1"):
                await utils.job_result(job.id, timeout=-1)

    @pytest.mark.parametrize("job_id", ["abc", 1.5, -1, 2**63])
    async def test_invalid_job_id_is_rejected_before_the_wait(self, database: str, job_id: Any) -> None:
        app = make_app(database)
        async with app:
            with pytest.raises(InvalidJobError, match="job_id is"):
                await app.utils.job_result(job_id)
            with pytest.raises(InvalidJobError, match="job is"):
                await app.tasks["total"].result_of(job_id)

    async def test_result_whose_conversion_raises_is_not_kept(self, database: str) -> None:
        class Broken(msgspec.Struct):
            value: int

        app = make_app(database)

        @app.task
        async def unconvertible() -> Any:
            found = Broken(1)
            del found.value
            return found

        async with app, app.running():
            with pytest.raises(ResultUnknownError, match="cannot be converted to JSON: AttributeError"):
                await unconvertible.using(wait=LONG).call()

    async def test_handle_equals_its_job_and_can_be_copied(self, database: str) -> None:
        app = make_app(database)
        async with app:
            handle = await app.tasks["total"].enqueue(1)
            job = await app.utils.get_job(id=handle.id)
            assert job is not None
            assert job == handle
            assert await copy.copy(handle).progress() is None

    async def test_app_can_keep_the_results_of_all_tasks(self, database: str) -> None:
        app = make_app(database, history=History("all", results=True))
        async with app:
            job = await app.tasks["double"].enqueue(4)
            await drain(app)
            assert await job.result(timeout=LONG) == 8

    async def test_handle_is_a_plain_job_for_everything_else(self, database: str) -> None:
        app = make_app(database)
        async with app:
            handle = await app.tasks["total"].enqueue(1)
            job = await app.utils.get_job(id=handle.id)
        assert isinstance(handle, Job)
        assert handle == job
        assert job == handle
        assert handle != 3
        assert type(pickle.loads(pickle.dumps(handle))) is Job
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert msgspec.json.encode(handle) == msgspec.json.encode(job)
        with pytest.raises(AttributeError):
            handle.id = 3  # type: ignore[misc]


class TestUnknownResults:
    async def test_result_of_a_task_that_keeps_none_is_refused_at_once(self, database: str) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["double"].enqueue(1)
            with pytest.raises(
                ResultUnknownError, match=r"keep_result=True\), or use await double\.call"
            ) as it:
                await job.result()
            assert it.value.job_id == job.id
            with pytest.raises(ResultUnknownError, match="keep_result=True"):
                await asyncio.to_thread(job.result_sync)
            await asyncio.to_thread(app.close_sync)
            await drain(app)
            with pytest.raises(ResultUnknownError, match="is not in the queue, and no result is kept"):
                await job.result()

    @pytest.mark.parametrize("by", ["node", "hand"])
    async def test_job_that_another_program_completed_has_no_result(
        self, database: str, db: asyncpg.Connection, by: str
    ) -> None:
        app = make_app(database)
        async with app:
            result = asyncio.create_task(app.tasks["total"].call(1))
            await waiter_count(app, 1)
            if by == "node":
                await db.execute("delete from graphile_worker._private_jobs")  # as its workers do
            else:
                await app.utils.complete_jobs([*poller(app)._waiters])
            reason = "A Node or Rust worker has completed it" if by == "node" else "was completed by hand"
            with pytest.raises(ResultUnknownError, match=reason):
                await result

    async def test_unknown_job_has_no_result(self, database: str) -> None:
        app = make_app(database)
        async with app:
            with pytest.raises(ResultUnknownError, match="or there is no job with this id"):
                await app.tasks["total"].result_of(12345, timeout=LONG)

    async def test_large_result_is_not_kept(self, database: str) -> None:
        app = make_app(database)
        async with working(app):
            with pytest.raises(ResultUnknownError, match=r"1,000,002 bytes of JSON, and at most 1,000,000"):
                await app.tasks["in_thread"].call("x" * 1_000_000)

    async def test_result_that_is_not_json_is_not_kept(self, database: str) -> None:
        app = make_app(database)

        @app.task
        async def loose() -> Any:
            return Unknown()

        async with app, inline(app):
            with pytest.raises(ResultUnknownError, match="its result is not kept: it is not JSON"):
                await loose.call()

    async def test_result_of_another_type_is_unknown(self, database: str) -> None:
        app = make_app(database)

        @app.task
        async def wrong() -> int:
            return "text"  # type: ignore[return-value]

        async with app, inline(app):
            with pytest.raises(
                ResultUnknownError, match="does not match its return type int: Expected `int`"
            ):
                await wrong.call()

    async def test_job_that_its_task_completes_in_a_transaction_has_no_result(self, database: str) -> None:
        app = make_app(database)

        @app.task
        async def pays(ctx: JobContext) -> int:
            async with ctx.transaction():
                pass
            return 1

        async with app, inline(app):
            with pytest.raises(ResultUnknownError, match="completed its job in a transaction"):
                await pays.call()

    async def test_results_of_other_types_cannot_be_kept(self, database: str) -> None:
        app = make_app(database)
        with pytest.raises(
            ConfigurationError, match=r"The results of task 'odd' cannot be kept, .* returns Unk"
        ):

            @app.task(keep_result=True)
            async def odd() -> Unknown:
                return Unknown()

        @app.task
        async def unresolved() -> Missing:  # type: ignore[name-defined]  # noqa: F821
            ...

        @app.task(batch=True)
        async def batch(items: list[int]) -> None: ...

        async with app:
            for task, arguments, reason in (
                (unresolved, (), "its return type cannot be resolved: name 'Missing'"),
                (batch, ([1],), "a batch task has no result"),
            ):
                with pytest.raises(ConfigurationError, match=reason):
                    await task.call(*arguments)
            assert await app.utils.list_jobs() == []


class TestCall:
    async def test_call_returns_the_result_without_configuration(self, database: str) -> None:
        app = make_app(database)
        async with working(app):
            assert await app.tasks["double"].call(n=7) == 14
            assert await app.tasks["in_thread"].using(wait=LONG, priority=-1).call("x") == "x"
            assert not poller(app)._waiters

    @pytest.mark.usefixtures("without_polling")
    async def test_notification_ends_a_call(self, database: str) -> None:
        app = make_app(database)
        async with working(app):
            await listen(app)
            texts = [
                "short",
                "x" * 6_950,
                "x" * 6_999,
                "x" * 8_000,
                "\x01" * 4_000,
                "é" * 3_500,
                "x" * 100_000,
            ]
            for text in texts:  # only short results are part of the notification
                assert await app.tasks["in_thread"].call(text) == text
            with pytest.raises(JobFailedError, match="LookupError: no"):
                await app.tasks["broken"].call("no")
            with pytest.raises(JobCancelledError, match="not needed"):
                await app.tasks["cancels"].call()
            assert await app.tasks["flaky"].call() == 2

    @pytest.mark.usefixtures("without_polling")
    async def test_notification_that_arrives_before_the_job_is_known_is_not_lost(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = make_app(database)
        add_spec = WorkerUtils.add_spec

        async def add_and_wait(self: WorkerUtils, *args: Any, **options: Any) -> Job:
            job = await add_spec(self, *args, **options)
            while caller_of(job.flags) is not None and job.id not in poller(app)._early:
                await asyncio.sleep(0.001)
            return job

        async with working(app):
            await listen(app)
            monkeypatch.setattr(WorkerUtils, "add_spec", add_and_wait)
            assert await app.tasks["double"].call(4) == 8
            with pytest.raises(JobFailedError):
                await app.tasks["broken"].call("no")
            assert not poller(app)._early

    async def test_results_that_nothing_waits_for_are_forgotten(self, database: str) -> None:
        app = make_app(database)
        async with app:
            results = poller(app)
            for job_id in range(1000):
                results._on_notification("", f'{{"id": {job_id}, "result": 1}}')
                results._on_notification("", str(1000 + job_id))
            assert len(results._early) <= 256

    async def test_call_works_without_notifications(self, database: str) -> None:
        app = make_app(database, prepared_statements=False)  # as behind a pooler
        async with working(app):
            assert await app.tasks["double"].call(7) == 14
            assert poller(app)._listening is None

    async def test_calls_of_a_process_share_one_listening_connection(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app = make_app(database)
        async with working(app):
            results = await asyncio.gather(*(app.tasks["double"].call(n) for n in range(50)))
            assert results == [2 * n for n in range(50)]
            listening = "select count(*) from pg_stat_activity where query like 'LISTEN \"python:ended%'"
            assert await db.fetchval(listening) <= 1

    async def test_only_jobs_that_are_called_notify(self, database: str, db: asyncpg.Connection) -> None:
        app = make_app(database)
        channels: list[str] = []
        async with app:
            channel = poller(app)._channel
            await db.add_listener(channel, lambda *args: channels.append(args[2]))
            await app.tasks["total"].enqueue(1)
            await drain(app)
            async with inline(app):
                await app.tasks["double"].call(1)
            await db.execute("select 1")
            assert channels == [channel]

    async def test_call_that_ends_early_leaves_the_job(self, database: str) -> None:
        app = make_app(database)
        double = app.tasks["double"]
        async with app:
            with pytest.raises(ResultTimeoutError, match=r"within 0\.01 s") as it:
                await double.using(wait=0.01).call(21)
            call = asyncio.create_task(double.call(1))
            await waiter_count(app, 1)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
            assert not poller(app)._waiters
            assert (await drain(app)).succeeded == 2
            assert it.value.job_id is not None
            assert await double.result_of(it.value.job_id) == 42  # its result was still kept

    async def test_wait_must_be_a_duration(self, database: str) -> None:
        with pytest.raises(ConfigurationError, match="wait is 0"):
            make_app(database).tasks["double"].using(wait=0)

    async def test_call_in_a_transaction_is_refused(self, database: str, db: asyncpg.Connection) -> None:
        app = make_app(database)
        double = app.tasks["double"]
        async with app:
            async with db.transaction():
                with pytest.raises(
                    ConfigurationError, match=r"call would wait forever: .* Use enqueue, commit"
                ):
                    await double.using(connection=db).call(1)
            with psycopg.connect(database) as connection:  # noqa: SIM117
                with pytest.raises(ConfigurationError, match="call would wait forever"):
                    await asyncio.to_thread(double.using(connection=connection).call_sync, 1)
            await asyncio.to_thread(app.close_sync)
            assert await app.utils.list_jobs() == []

    async def test_call_on_a_connection_without_a_transaction(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app = make_app(database)
        double = app.tasks["double"]
        async with working(app):
            assert await double.using(connection=db).call(1) == 2
            with psycopg.connect(database, autocommit=True) as connection:
                bound = double.using(connection=connection, wait=LONG)
                assert await asyncio.to_thread(bound.call_sync, 2) == 4
            await asyncio.to_thread(app.close_sync)

    async def test_waiting_before_the_commit_is_refused(self, database: str, db: asyncpg.Connection) -> None:
        app = make_app(database)
        async with app:
            async with db.transaction():
                job = await app.tasks["total"].using(connection=db).enqueue(1)
                with pytest.raises(ResultUnknownError, match="commit it before you wait"):
                    await job.result(timeout=LONG)
            await drain(app)
            assert await job.result(timeout=LONG) == Total(1, Decimal("9.90"))

    async def test_call_of_a_job_that_exists_unchanged_is_unknown(self, database: str) -> None:
        app = make_app(database)
        async with app:
            keyed = app.tasks["double"].using(job_key="k", job_key_mode="unsafe_dedupe")
            job = await keyed.enqueue(1)
            with pytest.raises(ResultUnknownError, match="was already in the queue and is not changed") as it:
                await keyed.call(1)
            assert it.value.job_id == job.id


class TestKeyedJobs:
    async def test_replaced_job_gives_the_result_of_the_last_payload(self, database: str) -> None:
        app = make_app(database)
        keyed = app.tasks["double"].using(job_key="k")
        async with app:
            first = asyncio.create_task(keyed.call(1))
            await waiter_count(app, 1)
            second = asyncio.create_task(keyed.call(2))
            while sum(map(len, poller(app)._waiters.values())) < 2:
                await asyncio.sleep(0.001)
            await drain(app)
            assert [await first, await second] == [4, 4]

    async def test_running_job_that_is_replaced_keeps_its_own_result(self, database: str) -> None:
        app = make_app(database)

        @app.task(job_key="one", keep_result=True)
        async def once(n: int) -> int:
            if n == 1:
                again.append(await once.enqueue(2))
            return n

        again: list[JobHandle[int]] = []
        async with app:
            first = await once.enqueue(1)
            await drain(app)
            assert await first.result(timeout=LONG) == 1
            assert await again[0].result(timeout=LONG) == 2


class TestWaiters:
    async def test_thousand_waiters_cost_one_query_a_tick(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = make_app(database)
        queries: list[int] = []
        read, enough = read_results, asyncio.Event()

        async def count(on: Any, schema: Any, since: Mapping[int, datetime | None]) -> Any:
            queries.append(len(since))
            if len(queries) == 4:
                enough.set()
            return await read(on, schema, since)

        monkeypatch.setattr(waiting, "read_results", count)
        async with app:
            total = app.tasks["total"]
            jobs = await total.enqueue_many([{"order": order} for order in range(1000)])
            results = asyncio.gather(*(total.result_of(job) for job in jobs))
            await enough.wait()
            assert queries[:4] == [1000] * 4
            results.cancel()
            await asyncio.wait([results])
            await waiter_count(app, 0)
            while poller(app)._polling is not None:
                await asyncio.sleep(0.001)

    async def test_no_query_follows_the_one_that_found_the_result(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = make_app(database)
        read, queries = read_results, 0

        async def count(on: Any, schema: Any, since: Mapping[int, datetime | None]) -> Any:
            nonlocal queries
            queries += 1
            return await read(on, schema, since)

        monkeypatch.setattr(waiting, "read_results", count)
        monkeypatch.setattr(waiting, "_SHORTEST", 0.0)  # as if a query took longer than the time between two
        async with app:
            job = await app.tasks["total"].enqueue(1)
            await app.run_once()
            await job.result()
            assert (queries, poller(app)._waiters) == (1, {})

    def test_queries_about_a_job_become_rarer(self) -> None:
        async def delays() -> list[float]:
            waiter = waiting._Waiter(AwaitedJob(1), 0.0)
            found = []
            for _ in range(9):
                waiter.postpone(0.0)
                found.append(waiter.due)
            return found

        assert asyncio.run(delays()) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]

    async def test_wait_that_begins_while_the_app_is_closed_ends(self, database: str) -> None:
        app = make_app(database)
        job = await app.tasks["total"].enqueue(1)

        async def wait_twice() -> None:
            with pytest.raises(ConfigurationError):
                await job.result()
            with pytest.raises(ConfigurationError):
                await job.result()

        waiting = asyncio.create_task(wait_twice())
        await waiter_count(app, 1)
        await poller(app).close()
        await app.close()
        async with asyncio.timeout(LONG):
            await waiting

    async def test_closing_the_app_ends_all_waits(self, database: str) -> None:
        app = make_app(database)
        async with app:
            waits = [asyncio.create_task(app.tasks["double"].call(1)) for _ in range(3)]
            await waiter_count(app, 3)
        for result in waits:
            with pytest.raises(
                ConfigurationError, match="The connections were closed while this code waited"
            ):
                await result

    def test_closing_the_app_ends_waits_in_threads(self, database: str) -> None:
        app = make_app(database)
        job = app.tasks["total"].enqueue_sync(1)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                job.result_sync()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()

        async def waiters() -> None:
            await waiter_count(app, 1)

        app.run_sync(waiters)
        app.close_sync()
        thread.join()
        assert "closed while this code waited" in str(errors[0])

    def test_code_without_an_event_loop_waits(self, database: str) -> None:
        app = make_app(database)
        job = app.tasks["total"].enqueue_sync(7)
        results: list[Any] = []
        with WorkerUtils(database) as utils:
            thread = threading.Thread(target=lambda: results.append(app.tasks["double"].call_sync(4)))
            thread.start()

            async def called() -> None:
                await waiter_count(app, 1)

            app.run_sync(called)
            asyncio.run(drain(make_app(database)))
            thread.join()
            assert job.result_sync(timeout=LONG) == Total(7, Decimal("9.90"))
            assert app.tasks["total"].result_of_sync(job.id) == Total(7, Decimal("9.90"))
            assert utils.job_result_sync(job.id) == {"order": 7, "amount": "9.90"}
            assert results == [8]
        app.close_sync()

    async def test_sync_call_on_an_event_loop_is_refused(self, database: str) -> None:
        app = make_app(database)
        with pytest.raises(ConfigurationError, match="This thread has a running event loop"):
            app.tasks["double"].call_sync(1)

    async def test_each_event_loop_waits_by_itself(self, database: str) -> None:
        app = make_app(database)
        double = app.tasks["double"]

        async def call(n: int) -> int:
            async with app:
                result: int = await double.call(n)
            return result

        async with working(app):
            others = [asyncio.to_thread(asyncio.run, call(n)) for n in (1, 2)]
            assert await asyncio.gather(double.call(0), *others) == [0, 2, 4]

    async def test_wait_goes_on_after_all_connections_were_lost(
        self, database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["total"].enqueue(1)
            waits = [asyncio.create_task(job.result()), asyncio.create_task(app.tasks["double"].call(2))]
            await waiter_count(app, 2)
            for _ in range(3):
                await db.execute(TERMINATE)
            async with make_app(database) as worker:
                await drain(worker)
            assert await asyncio.gather(*waits) == [Total(1, Decimal("9.90")), 4]
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    async def test_wait_ends_if_the_schema_lacks_the_history(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app = make_app(database)
        async with app:
            job = await app.tasks["total"].enqueue(1)
            await db.execute("drop table graphile_worker._private_python_runs")
            with pytest.raises(SchemaMissingError, match="lacks objects that this release needs"):
                await job.result()


class TestJobsThatWait:
    async def test_job_that_waits_for_itself_fails(self, database: str) -> None:
        app = make_app(database)

        @app.task(keep_result=True, max_attempts=1)
        async def itself(ctx: JobContext) -> int:
            return await itself.result_of(ctx.job.id)

        async with app:
            job = await itself.enqueue()
            await drain(app)
            with pytest.raises(JobFailedError, match="waits for its own result, which would never end"):
                await job.result()

    async def test_job_that_calls_a_job_of_its_own_queue_fails(self, database: str) -> None:
        app = make_app(database)
        double = app.tasks["double"]

        @app.task(queue_name="q", max_attempts=1)
        async def parent() -> int:
            result: int = await double.using(queue_name="q").call(1)
            return result

        async with app, app.running():
            with pytest.raises(JobFailedError, match="calls a job of its own serial queue 'q'"):
                await parent.call()
            assert await app.utils.list_jobs(task="double") == []

    async def test_job_calls_another_job(self, database: str) -> None:
        app = make_app(database)
        double = app.tasks["double"]

        @app.task
        async def parent(n: int) -> list[int]:
            return list(await asyncio.gather(double.call(n), double.call(n + 1)))

        @app.task
        def blocking_parent(n: int) -> int:
            return double.call_sync(n)  # type: ignore[no-any-return]

        async with app, app.running(concurrency=4):
            assert await parent.call(1) == [2, 4]
            assert await blocking_parent.call(3) == 6
        await asyncio.to_thread(app.close_sync)

    @pytest.mark.slow
    async def test_task_in_a_process_keeps_its_result_and_cannot_wait(self, database: str) -> None:
        app = App(database)
        app.include(computing.double, computing.call_another)
        async with app, app.running():
            assert await app.tasks["double"].call(4) == 8
            with pytest.raises(JobFailedError, match="A task in a process cannot wait for the result"):
                await app.tasks["call_another"].call(4)


class TestInTests:
    async def test_inline_answers_at_once(self, database: str) -> None:
        app = make_app(database)
        async with app, inline(app):
            assert await app.tasks["double"].call(2) == 4
            assert await (await app.tasks["total"].enqueue(2)).result() == Total(2, Decimal("9.90"))
            with pytest.raises(LookupError, match="no"):  # the task's own error, where the job is added
                await app.tasks["broken"].call("no")

    async def test_inline_does_not_wait_for_what_it_does_not_run(self, database: str) -> None:
        app = make_app(database)

        @app.task(retry=[3600])
        async def fails_once() -> int:
            raise LookupError("no")

        async with app, inline(app, raise_errors=False):
            with pytest.raises(JobFailedError, match="LookupError: no"):
                await app.tasks["broken"].call("no")
            for call in (fails_once.call(), app.tasks["double"].using(delay=60).call(1)):
                with pytest.raises(ResultTimeoutError, match="although all jobs that are due have run"):
                    await call

    @pytest.mark.parametrize("how", ["drain", "inline", "connection"])
    async def test_job_in_a_test_may_call_other_jobs(
        self, database: str, db: asyncpg.Connection, how: Literal["drain", "inline", "connection"]
    ) -> None:
        app = make_app(database)
        double, in_thread = app.tasks["double"], app.tasks["in_thread"]

        @app.task(keep_result=True)
        async def parent(n: int) -> list[Any]:
            return [await double.call(n), *await asyncio.gather(double.call(3), in_thread.call("x"))]

        @app.task(keep_result=True)
        def blocking_parent(n: int) -> Any:
            return double.call_sync(n)

        async def run() -> None:
            if how == "inline":
                async with inline(app):
                    assert await parent.call(1) == [2, 6, "x"]
                    return
            jobs = [await parent.enqueue(1), await blocking_parent.enqueue(2)]
            if how == "connection":
                jobs.pop()
            await drain(app, raise_errors=True)
            assert await jobs[0].result() == [2, 6, "x"]
            assert how == "connection" or await jobs[1].result() == 4

        async with app:
            if how != "connection":
                await run()
                await asyncio.to_thread(app.close_sync)
                return
            transaction = db.transaction()
            await transaction.start()
            async with override(app, connection=db):
                await run()
            await transaction.rollback()
