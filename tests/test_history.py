"""The history: a row for each attempt that is kept, committed with the outcome, and only then."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    App,
    AttemptOutcome,
    Cancel,
    ConfigurationError,
    Fail,
    History,
    InvalidJobError,
    JobContext,
    Retry,
    Snooze,
    WorkerUtils,
    run_once,
)
from graphile_worker._client.bulk import Change
from graphile_worker._db.queries.exchange import AttemptRecord, Result
from graphile_worker._db.sql_files import Schema, read_script
from graphile_worker._worker.claiming.clock import Clock
from graphile_worker._worker.execution.attempts import AttemptRecorder
from graphile_worker.history import CALLED_FLAG, ENDED_CHANNEL, MAX_RESULT_SIZE
from graphile_worker.outcome import Cancelled, Completed, Failed, Interrupted, Returned, Snoozed
from support.computing import sum_up
from support.jobs import add, existing, get
from support.programs import program
from support.waiting import until
from support.workers import Gate, running
from test_exchange import ExchangeWorker, worker
from test_recovery import TimedSweeper, add_locked_job, register_worker, session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from graphile_worker import Job, JobAttempt
    from graphile_worker._db.connection.session import Session
    from graphile_worker._db.queries.exchange import ClaimedJob

__all__ = ["session", "worker"]

SCHEMA = Schema()
VICTIM = Path(__file__).parent / "support" / "victim.py"
ANY_APP: Any = App
ANY_HISTORY: Any = History
START = datetime(2030, 1, 1, tzinfo=UTC)
OUTCOMES = [
    (Completed(), 1, True),
    (Failed(ValueError("no")), 2, False),
    (Failed(ValueError("no"), final=True), 2, True),
    (Cancelled(Cancel("why")), 3, True),
    (Snoozed(Snooze(5)), 4, False),
]


@pytest.fixture
async def app(database: str) -> AsyncIterator[App]:
    async with App(dsn=database, history="all") as app:
        yield app


async def rows(db: asyncpg.Connection) -> list[asyncpg.Record]:
    return await db.fetch("select * from graphile_worker._private_python_runs order by ended_at, job_id")


def kept(held: ClaimedJob, outcome: Any = Completed(), details: str | None = None) -> Result:  # noqa: B008 - no state
    return Result(held, outcome, held.queue, AttemptRecord(START, 1.5, details))


async def attempts_of(app: App, **filters: Any) -> list[JobAttempt]:
    return await app.utils.history(**filters)


class TestExchange:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("careful", [False, True])
    @pytest.mark.parametrize(
        ("outcome", "code", "is_final"), OUTCOMES, ids=lambda value: type(value).__name__
    )
    async def test_attempt_is_written_with_its_outcome(
        self,
        db: asyncpg.Connection,
        worker: ExchangeWorker,
        outcome: Any,
        code: int,
        *,
        is_final: bool,
        careful: bool,
    ) -> None:
        job = await add(db, queue_name="q", payload={"a": 1})
        [held] = await worker.claim()
        worker.careful = careful
        await worker.exchange([kept(held, outcome)], 0)
        [row] = await rows(db)
        assert (row["job_id"], row["attempt"], row["outcome"], row["final"]) == (job["id"], 1, code, is_final)
        assert (row["queue_name"], row["task_id"], row["worker"]) == ("q", job["task_id"], "worker")
        assert (row["started_at"], row["duration"]) == (START, 1.5)
        assert (row["run_at"], row["created_at"]) == (job["run_at"], job["created_at"])
        assert row["payload"] is None

    @pytest.mark.parametrize("outcome", [Interrupted(), Returned()])
    async def test_attempt_that_did_not_run_to_its_end_is_not_written(
        self, db: asyncpg.Connection, worker: ExchangeWorker, outcome: Any
    ) -> None:
        await add(db)
        [held] = await worker.claim()
        await worker.exchange([kept(held, outcome)], 0)
        assert await rows(db) == []

    @pytest.mark.parametrize("outcome", [Completed(), Failed(ValueError("no"))])
    async def test_lost_result_leaves_no_row(
        self, db: asyncpg.Connection, worker: ExchangeWorker, outcome: Any
    ) -> None:
        first, second = await add(db), await add(db)
        held = await worker.claim()
        await db.execute(
            "update graphile_worker._private_jobs set locked_by = 'x' where id = $1", first["id"]
        )
        reply = await worker.exchange([kept(one, outcome) for one in held], 0)
        assert {claim.job_id for claim in reply.lost} == {first["id"]}
        assert [row["job_id"] for row in await rows(db)] == [second["id"]], "the others are written"

    @pytest.mark.parametrize("outcome", [Completed(), Failed(ValueError("no"))])
    async def test_busy_result_leaves_one_row_in_the_end(
        self, db: asyncpg.Connection, worker: ExchangeWorker, outcome: Any
    ) -> None:
        job = await add(db)
        [held] = await worker.claim()
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job["id"])
            reply = await worker.exchange([kept(held, outcome)], 0)
            assert {claim.job_id for claim in reply.busy} == {job["id"]}
            assert await rows(db) == []
        await worker.exchange([kept(held, outcome)], 0)
        assert [row["job_id"] for row in await rows(db)] == [job["id"]]

    async def test_rolled_back_quick_path_leaves_no_row(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """The quick path deletes all jobs or none. One that it cannot delete undoes the others."""
        jobs = [await add(db) for _ in range(3)]
        held = await worker.claim()
        await db.execute("delete from graphile_worker._private_jobs where id = $1", jobs[1]["id"])
        await worker.exchange([kept(one) for one in held], 0)
        assert [row["job_id"] for row in await rows(db)] == [jobs[0]["id"], jobs[2]["id"]], "once each"

    async def test_job_whose_key_was_taken_over_keeps_its_attempt_and_key(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, job_key="k")
        [held] = await worker.claim()
        await add(db, job_key="k")
        await worker.exchange([kept(held, details='{"key": "k", "attempt": 1}')], 0)
        [row] = await rows(db)
        assert (row["attempt"], row["key"]) == (1, "k")

    async def test_only_kept_attempts_of_one_exchange_are_written(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        ids = [(await add(db))["id"] for _ in range(4)]
        held = await worker.claim()
        results = [
            kept(held[0]),
            Result(held[1], Completed(), None),
            kept(held[2], Failed(ValueError("no"))),
            Result(held[3], Failed(ValueError("no")), None),
        ]
        await worker.exchange(results, 0)
        assert [(row["job_id"], row["outcome"]) for row in await rows(db)] == [(ids[0], 1), (ids[2], 2)]

    async def test_details_are_stored(self, db: asyncpg.Connection, worker: ExchangeWorker) -> None:
        await add(db, payload={"a": 1})
        await add(db, payload={"secret": 2})
        one, two = await worker.claim()
        await worker.exchange(
            [
                kept(one, details='{"result": [1, null], "keep_payload": true}'),
                kept(two, details='{"result": null, "payload": {"secret": "***"}}'),
            ],
            0,
        )
        first, second = (dict(row) for row in await rows(db))
        found = [[json.loads(row[name]) for name in ("result", "payload")] for row in (first, second)]
        assert found == [[[1, None], {"a": 1}], [None, {"secret": "***"}]]

    @pytest.mark.parametrize("outcome", [Completed(), Failed(ValueError("no"))])
    async def test_only_called_jobs_notify(
        self, db: asyncpg.Connection, worker: ExchangeWorker, outcome: Any
    ) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        await db.add_listener(ENDED_CHANNEL, lambda *arguments: heard.put_nowait(arguments[-1]))
        called, other = await add(db), await add(db)
        held = await worker.claim()
        await worker.exchange(
            [kept(one, outcome, '{"called": true}' if one.job.id == called["id"] else None) for one in held],
            0,
        )
        await db.execute(f"notify \"{ENDED_CHANNEL}\", 'last'")
        async with asyncio.timeout(20):
            assert [await heard.get(), await heard.get()] == [str(called["id"]), "last"]
        assert other["id"] != called["id"]
        await db.reset()


async def quick_path_undoes_its_rows(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    """Return whether a job that is gone leaves no row and is lost, and the other one is recorded once."""
    jobs = [await add(db), await add(db)]
    held = await worker.claim()
    await db.execute("delete from graphile_worker._private_jobs where id = $1", jobs[1]["id"])
    reply = await worker.exchange([kept(one) for one in held], 0)
    lost = [claim.job_id for claim in reply.lost]
    return [row["job_id"] for row in await rows(db)] == [jobs[0]["id"]] and lost == [jobs[1]["id"]]


async def slow_path_writes_only_what_it_records(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    """Return whether a busy job leaves no row."""
    jobs = [await add(db), await add(db)]
    held = await worker.claim()
    async with db.transaction():
        await db.execute("select from graphile_worker._private_jobs where id = $1 for update", jobs[1]["id"])
        await worker.exchange([kept(one) for one in held], 0)
        return [row["job_id"] for row in await rows(db)] == [jobs[0]["id"]]


async def returned_job_leaves_no_row(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    """Return whether a job that did not run to its end leaves no row."""
    await add(db)
    [held] = await worker.claim()
    await worker.exchange([kept(held, Interrupted())], 0)
    return await rows(db) == []


async def attempt_without_a_start_is_not_kept(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    """Return whether a job that the worker does not keep leaves no row beside one that it keeps."""
    jobs = [await add(db), await add(db)]
    held = await worker.claim()
    await worker.exchange([kept(held[0]), Result(held[1], Completed(), None)], 0)
    return [row["job_id"] for row in await rows(db)] == [jobs[0]["id"]]


async def superseded_job_keeps_its_key(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    """Return whether a job has its key in the history, although another job has taken it over."""
    await add(db, job_key="k")
    [held] = await worker.claim()
    await add(db, job_key="k")
    await worker.exchange([kept(held, details='{"key": "k", "attempt": 1}')], 0)
    [row] = await rows(db)
    return (row["key"], row["attempt"]) == ("k", 1)


GUARDS: dict[Callable[..., Any], tuple[str, str]] = {
    quick_path_undoes_its_rows: (
        "        if count < completed then\n          raise lock_not_available;",
        "        if false then",
    ),
    slow_path_writes_only_what_it_records: (
        """                or queue.locked_by = 'python:paused'
              )
            ))
          for update skip locked
        ) as job;
      delete""",
        """                or queue.locked_by = 'python:paused'
              )
            ))
        ) as job;
      delete""",
    ),
    returned_job_leaves_no_row: (
        "filter (where changed.action <> 'return' and (",
        "filter (where true and (",
    ),
    attempt_without_a_start_is_not_kept: (
        "            where found.started_at is not null or found.details is not null\n",
        "",
    ),
    superseded_job_keeps_its_key: (
        "worker, coalesce(found.details ->> 'key', found.key), found.details -> 'result',",
        "worker, found.key, found.details -> 'result',",
    ),
}


class TestGuards:
    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_is_kept(
        self, db: asyncpg.Connection, worker: ExchangeWorker, promise: Callable[..., Any]
    ) -> None:
        assert await promise(db, worker)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_fails_without_its_guard(
        self, db: asyncpg.Connection, worker: ExchangeWorker, promise: Callable[..., Any]
    ) -> None:
        text = read_script("own/012_exchange.sql")
        before, after = GUARDS[promise]
        assert text.count(before) == 1, "update GUARDS: the guard has changed"
        await db.execute(SCHEMA.render(text.replace(before, after)))
        worker.timeout = 1.0  # without SKIP LOCKED the exchange waits
        try:
            assert not await promise(db, worker)
        except TimeoutError:
            worker.connection.terminate()


class TestWorker:
    async def test_history_is_off_by_default(self, db: asyncpg.Connection, database: str) -> None:
        await add(db)
        await run_once({"task": lambda _: None}, database)
        assert await rows(db) == []

    @pytest.mark.parametrize(
        ("keep", "outcomes"),
        [
            ("none", []),
            ("failures", ["cancelled", "failed"]),
            ("all", ["cancelled", "completed", "failed", "snoozed"]),
        ],
    )
    async def test_history_keeps_the_chosen_outcomes(
        self, database: str, keep: Any, outcomes: list[str]
    ) -> None:
        choices = {"completed": None, "failed": Fail("no"), "cancelled": Cancel("no"), "snoozed": Snooze(60)}

        def task(payload: Any) -> None:
            if (choice := choices[payload["choice"]]) is not None:
                raise choice

        async with WorkerUtils(database) as utils:
            for choice in choices:
                await utils.add_job("task", {"choice": choice})
            await run_once({"task": task}, database, history=keep)
            assert sorted(attempt.outcome for attempt in await utils.history()) == outcomes

    async def test_attempts_of_one_job_are_listed_in_order(self, app: App) -> None:
        @app.task(max_attempts=3)
        async def task(ctx: JobContext) -> None:
            if ctx.job.attempts < 3:
                raise Retry("not yet", after=0) from ValueError("why")

        job = await task.enqueue()
        while (await app.run_once()).succeeded == 0:
            await app.utils.reschedule_jobs([job.id], run_at=timedelta(0))
        attempts = await app.utils.job_history(job.id)
        assert [(one.attempt, one.outcome, one.is_final) for one in attempts] == [
            (1, "failed", False),
            (2, "failed", False),
            (3, "completed", True),
        ]
        assert [one.error_type for one in attempts] == ["ValueError", "ValueError", None]
        assert attempts[0].error == "Retry in 0 s: not yet"
        assert await app.utils.get_job(id=job.id) is None

    async def test_task_overrides_the_history_of_its_app(self, database: str) -> None:
        async with App(dsn=database, history="failures") as app:

            @app.task(history="all")
            async def everything() -> None: ...

            @app.task(history="none")
            async def nothing() -> None:
                raise Fail("no")

            @app.task
            async def failures() -> None: ...

            for task in (everything, nothing, failures):
                await task.enqueue()
            await app.run_once()
            assert [one.task_identifier for one in await attempts_of(app)] == ["everything"]

    async def test_result_is_kept_if_the_task_says_so(self, database: str) -> None:
        async with App(dsn=database) as app:

            @app.task(keep_result=True)
            async def total(numbers: list[int]) -> dict[str, int]:
                return {"total": sum(numbers)}

            @app.task(keep_result=True)
            def nothing() -> None: ...

            await total.enqueue(numbers=[1, 2])
            await nothing.enqueue()
            await app.run_once()
            found = {one.task_identifier: one for one in await attempts_of(app)}
            assert (found["total"].has_result, found["total"].result) == (True, {"total": 3})
            assert (found["nothing"].has_result, found["nothing"].result) == (True, None)

    async def test_too_large_result_is_marked_and_logged(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with App(dsn=database) as app:

            @app.task(keep_result=True)
            async def large() -> str:
                return "x" * MAX_RESULT_SIZE

            await large.enqueue()
            assert (await app.run_once()).succeeded == 1
            [attempt] = await attempts_of(app)
        assert (attempt.outcome, attempt.has_result) == ("completed", False)
        assert attempt.no_result == "it has 1,000,002 bytes of JSON, and at most 1,000,000 are kept"
        assert "The result of job 1 (large) is not kept: it has 1,000,002 bytes" in caplog.text

    async def test_result_that_is_not_json_does_not_fail_the_job(self, database: str) -> None:
        async with App(dsn=database) as app:

            @app.task(keep_result=True)
            async def odd() -> Any:
                return {"lock": asyncio.Lock()}

            await odd.enqueue()
            assert (await app.run_once()).succeeded == 1
            [attempt] = await attempts_of(app)
        assert attempt.no_result is not None
        assert attempt.no_result.startswith("it is not JSON: The argument 'lock' cannot be written as JSON")

    async def test_payload_is_kept_as_it_is_stored(self, database: str) -> None:
        async with App(dsn=database, history=History("all", payload=True)) as app:
            await app.utils.add_job("task", {"a": [1, 2**60]})
            await run_once({"task": lambda _: None}, database, history=History("all", payload=True))
            [attempt] = await attempts_of(app)
        assert attempt.payload == {"a": [1, 2**60]}

    async def test_payload_is_redacted(self, database: str, caplog: pytest.LogCaptureFixture) -> None:
        def redact(task: str, payload: Any) -> Any:
            return {**payload, "card": f"*** of {task}"}

        history = History("all", payload=True, redact=redact)
        async with WorkerUtils(database) as utils:
            await utils.add_job("task", {"card": "4242", "n": 1})
            await utils.add_job("task", 7)
            await run_once({"task": lambda _: None}, database, history=history)
            attempts = {attempt.job_id: attempt.payload for attempt in await utils.history()}
        assert attempts == {1: {"card": "*** of task", "n": 1}, 2: None}
        assert "History(redact=...) failed for job 2 (task), so its payload is not kept" in caplog.text

    @pytest.mark.parametrize("is_async", [True, False])
    async def test_times_say_when_the_task_ran(self, app: App, *, is_async: bool) -> None:
        async def on_the_loop() -> None:
            await asyncio.sleep(0.05)

        def on_a_thread() -> None:
            time.sleep(0.05)

        task = app.task("task")(on_the_loop if is_async else on_a_thread)
        job = await task.enqueue()
        await app.run_once()
        [attempt] = await attempts_of(app)
        assert attempt.started_at is not None
        assert attempt.duration is not None
        assert attempt.duration >= 0.05
        assert attempt.created_at == job.created_at
        assert attempt.created_at <= attempt.started_at < attempt.ended_at
        assert attempt.wait is not None
        assert attempt.wait >= 0

    @pytest.mark.slow
    async def test_result_and_error_of_a_task_process_are_kept(self, database: str) -> None:
        async with App(dsn=database, history=History("all", results=True)) as app:
            app.include(sum_up)
            await sum_up.enqueue(n=3)
            await sum_up.enqueue(n=-1)
            await app.run_once()
            done, failed = sorted(await attempts_of(app), key=lambda one: one.job_id)
        assert (done.result, done.outcome) == (6, "completed")
        assert (failed.outcome, failed.error_type) == ("failed", "ValueError")
        assert failed.traceback is not None
        assert failed.traceback.startswith("Traceback (most recent call last):\n  File ")
        assert "computing.py" in failed.traceback

    async def test_completion_in_a_transaction_writes_the_row_with_it(
        self, app: App, db: asyncpg.Connection
    ) -> None:
        await db.execute("create table done (n integer)")

        @app.task(queue_name="q", keep_result=True)
        async def task(ctx: JobContext, *, fails: bool) -> int:
            async with ctx.transaction() as connection:
                await connection.execute("insert into done values (1)")
                if fails:
                    raise ValueError("no")
            assert len(await rows(db)) == 1, "it is committed with the transaction"
            return 5

        await task.enqueue(fails=False)
        await app.run_once()
        [attempt] = await attempts_of(app)
        assert (attempt.outcome, attempt.is_final, attempt.queue_name) == ("completed", True, "q")
        assert attempt.no_result == "the task completed its job in a transaction, before it returned"
        await task.enqueue(fails=True)
        await app.run_once()
        assert [one.outcome for one in await attempts_of(app)] == ["failed", "completed"]
        assert await db.fetchval("select count(*) from done") == 1

    @pytest.mark.parametrize("commits", [True, False])
    async def test_completion_on_the_callers_connection_writes_the_row_with_it(
        self, app: App, db: asyncpg.Connection, database: str, *, commits: bool
    ) -> None:
        @app.task
        async def task(ctx: JobContext) -> None:
            connection = await asyncpg.connect(database)
            transaction = connection.transaction()
            await transaction.start()
            await ctx.complete(connection=connection)
            await (transaction.commit() if commits else transaction.rollback())
            await connection.close()

        await task.enqueue()
        await app.run_once()
        assert [one.outcome for one in await attempts_of(app)] == ["completed" if commits else "failed"]
        assert len(await rows(db)) == 1

    @pytest.mark.parametrize("event", ["job:success", "job:complete"])
    async def test_worker_killed_after_a_job_leaves_the_outcome_with_its_row_or_neither(
        self, event: str, db: asyncpg.Connection, database: str
    ) -> None:
        """The worker is killed between the end of the task and the exchange, or right after the exchange."""
        job = await add(db, "sleep", payload=0)
        leases: dict[str, Any] = {"heartbeat_interval": 0.1, "fast_lease": 0.5}
        options = json.dumps({"history": "all", "kill_on": event, **leases})
        async with program(sys.executable, VICTIM, database, options, with_errors=True) as victim:
            assert await victim.end() == -signal.SIGKILL
        is_recorded = event == "job:complete"
        assert [row["job_id"] for row in await rows(db)] == ([job["id"]] if is_recorded else [])
        assert (await get(db, job["id"]) is None) == is_recorded

        async def sleep(_payload: object) -> None: ...

        async def is_gone() -> bool:
            return await get(db, job["id"]) is None

        async with running({"sleep": sleep}, database, history="all", **leases):
            await until(is_gone, "the job is complete", within=60)
        async with App(database) as app:
            outcomes = [(one.attempt, one.outcome) for one in await app.utils.job_history(job["id"])]
        assert outcomes == ([(1, "completed")] if is_recorded else [(1, "worker_died"), (2, "completed")])

    async def test_cancelled_prefetched_job_is_kept_without_a_start(self, app: App) -> None:
        gate = Gate()
        app.task("gate")(gate.__call__)
        async with app.running(concurrency=1, prefetch=2, poll_interval=0.05):
            await app.add_job("gate", {})
            second = await app.add_job("gate", {})
            await gate.until_started()
            await until(lambda: _is_locked(app, second.id), "the second job is prefetched")
            await app.cancel_job(second.id, "not needed")
            await until(lambda: _has_attempts(app, second.id), "the cancelled job is recorded")
            gate.open()
        [attempt] = await app.utils.job_history(second.id)
        assert (attempt.outcome, attempt.started_at, attempt.error) == (
            "cancelled",
            None,
            "Cancelled: not needed",
        )

    async def test_called_job_is_kept_although_the_history_is_off(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        await db.add_listener(ENDED_CHANNEL, lambda *arguments: heard.put_nowait(arguments[-1]))
        async with App(dsn=database) as app:

            @app.task
            async def add_up(a: int, b: int) -> int:
                return a + b

            job = await add_up.using(flags=[CALLED_FLAG]).enqueue(a=1, b=2)
            await add_up.enqueue(a=3, b=4)
            await app.run_once()
            async with asyncio.timeout(20):
                assert await heard.get() == str(job.id)
            [attempt] = await attempts_of(app)
        assert (attempt.job_id, attempt.result, attempt.has_result) == (job.id, 3, True)
        await db.reset()


async def _is_locked(app: App, job_id: int) -> bool:
    job = await app.utils.get_job(id=job_id)
    return job is not None and job.locked_at is not None


async def _has_attempts(app: App, job_id: int) -> bool:
    return bool(await app.utils.job_history(job_id))


class TestReading:
    async def test_filters_are_combined(self, app: App) -> None:
        @app.task
        async def good() -> None: ...

        @app.task
        async def bad() -> None:
            raise Fail("no") from KeyError("x")

        await good.using(job_key="k").enqueue()
        await good.enqueue()
        await bad.enqueue()
        await app.run_once(concurrency=1)
        found = [
            [one.job_id for one in await attempts_of(app, **filters)]
            for filters in (
                {},
                {"limit": 2},
                {"task": "good"},
                {"task": "nothing"},
                {"outcome": "failed"},
                {"outcome": ["failed", "completed"], "task": "bad"},
                {"key": "k"},
                {"error_type": "KeyError"},
                {"since": timedelta(hours=1)},
                {"until": timedelta(hours=1)},
                {"since": datetime.now(UTC) + timedelta(hours=1)},
            )
        ]
        assert found == [[3, 2, 1], [3, 2], [2, 1], [], [3], [3], [1], [3], [3, 2, 1], [], []]

    async def test_pages_contain_every_attempt_once(self, app: App) -> None:
        """Attempts of one exchange ended at the same time."""
        for name in ("one", "two"):
            app.task(name)(_do_nothing)
        for n in range(30):
            await app.add_job(("one", "two")[n % 2])
        await app.run_once(concurrency=30)
        found: list[int] = []
        last = None
        while page := await app.utils.history(limit=7, before=last):
            found += [one.job_id for one in page]
            last = page[-1]
        assert sorted(found) == list(range(1, 31))

    async def test_summary_counts_by_task(self, app: App) -> None:
        @app.task(max_attempts=1)
        async def bad() -> None:
            raise ValueError("no")

        app.task("good")(_do_nothing)
        await app.add_job("good")
        await app.add_job("good")
        await bad.enqueue()
        await app.run_once()
        good, failed = await app.utils.history_summary(since=timedelta(hours=1))
        assert (good.task_identifier, good.attempts, good.completed, good.failed) == ("good", 2, 2, 0)
        assert (failed.failed, failed.failed_permanently, failed.completed) == (1, 1, 0)
        assert good.median_duration is not None

    async def test_attempts_of_a_removed_task_are_still_listed(self, app: App) -> None:
        app.task("gone")(_do_nothing)
        await app.add_job("gone")
        await app.run_once()
        await app.utils.cleanup("GC_TASK_IDENTIFIERS")
        [attempt] = await app.utils.history()
        assert attempt.task_identifier == "(removed task 1)"

    @pytest.mark.parametrize(
        ("filters", "message"),
        [
            ({"outcome": "lost"}, "outcome is 'lost'; it must be one of completed, failed, cancelled"),
            ({"limit": 0}, "limit is 0; it must be an integer from 1 to 100,000"),
            ({"since": "yesterday"}, "since is 'yesterday'; it must be ISO 8601"),
        ],
    )
    async def test_invalid_filter_is_rejected(self, app: App, filters: Any, message: str) -> None:
        with pytest.raises(InvalidJobError, match=message):
            await app.utils.history(**filters)

    async def test_sync_twins_read_the_history_too(self, app: App) -> None:
        app.task("task")(_do_nothing)
        job = await app.add_job("task")
        await app.run_once()

        def read() -> list[list[JobAttempt]]:
            with WorkerUtils(app.settings["dsn"]) as utils:
                return [utils.history_sync(task="task"), utils.job_history_sync(job.id)]

        one, two = await asyncio.to_thread(read)
        assert one == two
        assert one[0].outcome is AttemptOutcome.COMPLETED


async def _do_nothing() -> None: ...


class TestOptions:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: ANY_APP(history="some"),
                "history is 'some'; it must be one of none, failures, all, or a History",
            ),
            (
                lambda: ANY_HISTORY("some"),
                r"History\(keep=...\) is 'some'; it must be one of none, failures, all",
            ),
            (lambda: ANY_HISTORY(payload=1), r"History\(payload=...\) is 1; it must be True or False"),
            (lambda: ANY_HISTORY(redact=7), r"History\(redact=...\) is 7; it must be a function"),
            (lambda: ANY_APP(history_keep="soon"), "history_keep is 'soon'; it must be seconds, a timedelta"),
            (lambda: ANY_APP().task(history="some")(_do_nothing), "history is 'some'; it must be one of"),
            (
                lambda: ANY_APP().task(keep_result=1)(_do_nothing),
                "keep_result is 1; it must be True or False",
            ),
            (
                lambda: ANY_APP().task(keep_result=True, history="failures")(_do_nothing),
                "keep_result=True needs history='all', because a result is part of the history",
            ),
        ],
    )
    def test_invalid_option_is_rejected(self, make: Callable[[], Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make()

    def test_history_keep_takes_a_duration_or_a_text(self) -> None:
        for keep in ("14d", 14 * 86_400, timedelta(days=14)):
            assert App(history_keep=keep).settings["history_keep"] == 14 * 86_400

    def test_app_can_be_configured_later(self) -> None:
        app = App()
        app.configure(history="all", history_keep="1d")
        assert (app.settings["history"].keep, app.settings["history_keep"]) == ("all", 86_400)


async def test_job_of_the_table_is_as_before(db: asyncpg.Connection, worker: ExchangeWorker) -> None:
    """A failure with history changes the job as one without does."""
    one, two = await add(db), await add(db)
    held = await worker.claim()
    error = Failed(ValueError("no"))
    await worker.exchange([kept(held[0], error), Result(held[1], error, None)], 0)
    first, second = dict(await existing(db, one["id"])), dict(await existing(db, two["id"]))
    for row in (first, second):
        del row["id"], row["created_at"], row["run_at"], row["updated_at"]
    assert first == second


class TestDeadWorkers:
    async def test_attempt_whose_worker_died_is_kept(self, db: asyncpg.Connection, session: Session) -> None:
        await register_worker(db)
        kept_id = await add_locked_job(db, queue_name="q", job_key="k", max_attempts=1)
        await add_locked_job(db, "w", identifier="other")

        def keep(job: Job) -> dict[str, object] | None:
            return {"keep_payload": True} if job.task_identifier == "task" else None

        await db.execute("update graphile_worker._private_jobs set attempts = 1")
        await TimedSweeper(session, keep_attempt=keep).run_for(10)
        [row] = await rows(db)
        assert (row["job_id"], row["attempt"], row["outcome"], row["final"]) == (kept_id, 1, 5, True)
        assert (row["worker"], row["queue_name"], row["key"]) == ("w", "q", "k")
        assert row["error"].startswith("The worker that ran this job died: w (pid 7")
        assert row["payload"] == "{}"

    async def test_redacted_payload_of_a_dead_worker_is_kept(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        await add_locked_job(db)
        history = History("failures", payload=True, redact=lambda _task, _payload: {"hidden": "µ"})
        recorder = AttemptRecorder(history, {}, Clock(local=True))
        await TimedSweeper(session, keep_attempt=recorder.record_death).run_for(10)
        [row] = await rows(db)
        assert json.loads(row["payload"]) == {"hidden": "µ"}

    async def test_called_job_whose_worker_died_notifies(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        await db.add_listener(ENDED_CHANNEL, lambda *arguments: heard.put_nowait(arguments[-1]))
        await register_worker(db)
        job_id = await add_locked_job(db, flags=[CALLED_FLAG])
        recorder = AttemptRecorder(History("none"), {}, Clock(local=False))
        await TimedSweeper(session, keep_attempt=recorder.record_death).run_for(10)
        async with asyncio.timeout(20):
            assert await heard.get() == str(job_id)
        await db.reset()

    async def test_job_that_is_not_released_leaves_no_row(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await register_worker(db)
        job_id = await add_locked_job(db)
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", job_id)
            await TimedSweeper(session, keep_attempt=lambda _: {}).run_for(10)
            assert await rows(db) == []


class TestByHand:
    async def test_completed_failed_and_cancelled_jobs_are_recorded_beside_others(self, app: App) -> None:
        app.task("task")(_do_nothing)
        await app.add_job("task")
        await app.run_once()
        completed, failed, cancelled = [await app.add_job("task", delay=60) for _ in range(3)]
        await app.utils.complete_jobs([completed.id])
        await app.utils.permanently_fail_jobs([failed.id], "no use")
        await app.cancel_job(cancelled.id, "not needed")
        found = {
            one.job_id: (one.attempt, one.outcome, one.is_final, one.error, one.worker)
            for one in await attempts_of(app)
            if one.attempt == 0
        }
        assert found == {
            completed.id: (0, "completed", True, None, None),
            failed.id: (0, "failed", True, "no use", None),
            cancelled.id: (0, "cancelled", True, "Cancelled: not needed", None),
        }

    async def test_nothing_is_recorded_if_no_worker_keeps_history(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            jobs = [await utils.add_job("task") for _ in range(3)]
            await utils.complete_jobs([jobs[0].id])
            await utils.permanently_fail_jobs([jobs[1].id])
            await utils.cancel_job(jobs[2].id)
        assert await rows(db) == []

    async def test_called_jobs_are_recorded_on_the_callers_connection_and_in_bulk(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            jobs = [await utils.add_job("task", flags=[CALLED_FLAG]) for _ in range(4)]
            async with db.transaction():
                await utils.complete_jobs([jobs[0].id], connection=db)
                await utils.permanently_fail_jobs([jobs[1].id], "no", connection=db)
            for job, change in ((jobs[2], Change.complete()), (jobs[3], Change.fail("no"))):
                async for _ in utils.many.change(change, [job.id]):
                    pass
        assert [(row["job_id"], row["outcome"]) for row in await rows(db)] == [(1, 1), (2, 2), (3, 1), (4, 2)]

    async def test_row_is_rolled_back_with_the_callers_transaction(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            job = await utils.add_job("task", flags=[CALLED_FLAG])
            transaction = db.transaction()
            await transaction.start()
            await utils.complete_jobs([job.id], connection=db)
            assert len(await rows(db)) == 1
            await transaction.rollback()
        assert await rows(db) == []
