"""Jobs that have flags: a worker finds those it may run, however many forbidden ones are in the way."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import RunSummary, WorkerUtils, run_once
from graphile_worker._db.queries.exchange import ExchangeReply, Position
from graphile_worker._db.sql_files import Schema, read_script
from graphile_worker._worker.claiming.claim_planner import Capacity, ClaimPlanner
from support.jobs import add, count
from support.waiting import until_blocked
from support.workers import nothing, running
from test_exchange import ExchangeWorker, ids, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NO = ["no"]
ADD_FORBIDDEN = """
    insert into graphile_worker._private_jobs (task_id, run_at, priority, flags)
    select task.id, now() - interval '1 hour', n % $2, '{"no": true}'
    from generate_series(1, $1) as n cross join graphile_worker._private_tasks as task
    where task.identifier = 'task'
"""


@pytest.fixture
async def worker(database: str) -> AsyncIterator[ExchangeWorker]:
    connection = await asyncpg.connect(database)
    yield ExchangeWorker(connection, "worker")
    await connection.close()


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


async def add_forbidden(db: asyncpg.Connection, number: int, priorities: int = 1) -> None:
    await db.execute("insert into graphile_worker._private_tasks (identifier) values ('task')")
    await db.execute(ADD_FORBIDDEN, number, priorities)


class TestClaiming:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("forbidden", [None, NO], ids=["nothing forbidden", "a flag forbidden"])
    @pytest.mark.parametrize("wanted", [1, 3, 100])
    async def test_jobs_with_and_without_flags_are_claimed_in_one_order(
        self, db: asyncpg.Connection, worker: ExchangeWorker, wanted: int, forbidden: list[str] | None
    ) -> None:
        worker.identifiers = ("x", "y")
        options: list[dict[str, Any]] = [{}, {"flags": ["a"]}, {"queue_name": "q"}]
        added = [
            (await add(db, "xy"[n % 2], priority=n % 3 // 2, **options[n * 5 % 7 % 3]))["id"]
            for n in range(24)
        ]
        claimed: list[int] = []
        while batch := (await worker.exchange((), wanted, forbidden_flags=forbidden, run_length=9)).claimed:
            claimed += ids(batch)
            await worker.exchange([result_of(held) for held in batch], 0)
        assert sorted(claimed) == added
        if wanted < 100:  # with more, a queue that became free in between waits for the next claim
            assert claimed == [job for job in added if job not in added[2::3]] + added[2::3]

    async def test_flagged_job_in_its_last_attempt_is_not_claimed_ahead(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for attempts in (25, 1):
            await add(db, flags=["a"], max_attempts=attempts)
        for forbidden in (NO, None):
            reply = await worker.exchange((), 2, startable=1, forbidden_flags=forbidden)
            assert (len(reply.claimed), reply.withheld) == (1, True)
            await db.execute("update graphile_worker._private_jobs set locked_by = null, locked_at = null")

    async def test_left_out_flagged_job_is_not_claimed(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        first, second = [(await add(db, flags=["a"]))["id"] for _ in range(2)]
        for forbidden in (NO, None):
            assert ids(await worker.claim(1, forbidden_flags=forbidden, left_out=[first])) == [second]
            await db.execute("update graphile_worker._private_jobs set locked_by = null, locked_at = null")

    @pytest.mark.parametrize("forbidden", [None, NO], ids=["nothing forbidden", "a flag forbidden"])
    async def test_flagged_job_that_another_transaction_has_locked_hides_no_other(
        self,
        db: asyncpg.Connection,
        other: asyncpg.Connection,
        worker: ExchangeWorker,
        forbidden: list[str] | None,
    ) -> None:
        added = [(await add(db, flags=["a"]))["id"] for _ in range(3)]
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select from graphile_worker._private_jobs where id = $1 for update", added[0])
        reply = await worker.exchange((), 2, forbidden_flags=forbidden)
        claimed = ids(reply.claimed)
        while len(claimed) < 2:
            assert reply.contended
            reply = await worker.exchange((), 2 - len(claimed), forbidden_flags=forbidden)
            claimed += ids(reply.claimed)
        assert claimed == added[1:]
        await transaction.rollback()

    @pytest.mark.parametrize("forbidden", [None, NO], ids=["nothing forbidden", "a flag forbidden"])
    async def test_next_due_time_includes_flagged_jobs(
        self, db: asyncpg.Connection, worker: ExchangeWorker, forbidden: list[str] | None
    ) -> None:
        soon, later = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, 2))
        await add(db, run_at=later)
        await add(db, run_at=soon, flags=["a"], priority=5)
        await add(db, run_at=later, flags=["a"])
        assert (await worker.exchange((), 2, forbidden_flags=forbidden)).next_due == soon

    async def test_dead_worker_claims_no_flagged_job(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        assert await dead_worker_claims_no_flagged_job(db, worker)


class TestManyForbiddenJobs:
    async def test_jobs_behind_thousands_of_forbidden_ones_are_found_step_by_step(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add_forbidden(db, 2000, priorities=3)
        wanted = {(await add(db, flags=["a"], priority=priority))["id"] for priority in range(3)}
        claimed: set[int] = set()
        position, calls = None, 0
        while True:
            reply = await worker.exchange((), 5, forbidden_flags=NO, flags_after=position)
            claimed |= set(ids(reply.claimed))
            calls += 1
            assert position is None or reply.flags_after is None or reply.flags_after > position
            position = reply.flags_after
            if position is None:
                break
        assert claimed == wanted
        assert calls < 20
        assert not (await worker.exchange((), 5)).contended

    async def test_better_flagged_job_is_claimed_first_though_the_search_is_beyond_it(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add_forbidden(db, 2000)
        position = (await worker.exchange((), 5, forbidden_flags=NO)).flags_after
        assert position is not None
        await add(db, flags=["a"], priority=1)
        better = await add(db, flags=["a"], priority=-1)
        assert ids(await worker.claim(1, forbidden_flags=NO, flags_after=position)) == [better["id"]]

    async def test_careful_claim_past_forbidden_jobs_spends_one_attempt(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """The walk begins anew where the first task ended, so it passes jobs of other tasks twice."""
        await add_forbidden(db, 2000)
        await db.execute("insert into graphile_worker._private_tasks (identifier) values ('other')")
        jobs = [await add(db, "other", flags=["a"]) for _ in range(3)]
        worker.identifiers = ("task", "other")
        worker.careful = True
        held = await worker.claim(10, forbidden_flags=NO)
        assert sorted(ids(held)) == sorted(job["id"] for job in jobs)
        assert {claimed.job.attempts for claimed in held} == {1}
        assert await db.fetchval("select max(attempts) from graphile_worker._private_jobs") == 1

    async def test_claim_reads_few_pages_past_forbidden_jobs(self, db: asyncpg.Connection) -> None:
        await add_forbidden(db, 20_000)
        for _ in range(20):
            await add(db)

        async def pages_read(forbidden: list[str] | None) -> int:
            transaction = db.transaction()
            await transaction.start()
            plan = await db.fetchval(
                """explain (analyze, buffers, format json)
                select * from graphile_worker._private_python_exchange_v4(
                  'probe', '{}', '{}', null, null, 0, null,
                  array(select id from graphile_worker._private_tasks), 10, null, 1, false, $1, now(),
                  null, null, null, 0, null, false, null
                )""",
                forbidden,
            )
            await transaction.rollback()
            [top] = json.loads(plan)
            assert top["Plan"]["Actual Rows"] == 11
            return int(top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"])

        await pages_read(NO)  # the first call also reads the catalog
        await pages_read(None)
        assert await pages_read(NO) < await pages_read(None) + 200, (
            "all forbidden jobs are on over 1,000 pages"
        )

    async def test_run_once_runs_all_jobs_behind_thousands_of_forbidden_ones(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add_forbidden(db, 3000)
        async with WorkerUtils(database) as utils:
            await utils.add_job("task", flags=["a"])
            await utils.add_job("task", timeout=60)
            await utils.add_job("task")
        summary = await run_once(tasks={"task": nothing}, dsn=database, forbidden_flags=NO)
        assert summary == RunSummary(3, 0)
        assert await count(db) == 3000

    async def test_notified_worker_finds_a_job_behind_thousands_of_forbidden_ones(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add_forbidden(db, 3000)
        started = asyncio.Event()

        async def task(_payload: object) -> None:
            started.set()

        async with running({"task": task}, database, forbidden_flags=NO, poll_interval=600) as runner:
            await runner.add_job("task", flags=["a"])
            async with asyncio.timeout(30):
                await started.wait()

    def test_planner_continues_the_search_where_it_ended(self) -> None:
        now = 1000.0
        planner = ClaimPlanner(poll_interval=2.0, clock=lambda: now)
        free = Capacity(free_slots=5)
        position = Position(0, datetime.now(UTC), 7)
        request = planner.plan(free, has_results=False, forbidden_flags=NO)
        assert request.flags_after is None
        planner.record(now, request, ExchangeReply(datetime.now(UTC), flags_after=position))
        assert planner.is_due
        request = planner.plan(free, has_results=False, forbidden_flags=NO)
        assert request.flags_after == position
        planner.record(now, request, ExchangeReply(datetime.now(UTC)))
        assert not planner.is_due, "all jobs were visited"
        now += 10
        assert planner.plan(free, has_results=False).flags_after is None


async def dead_worker_claims_no_flagged_job(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add(db, flags=["a"])
    await db.execute("insert into graphile_worker._private_python_dead_workers values ('worker')")
    return not await worker.claim(forbidden_flags=NO)


async def better_job_is_found_in_each_search(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add_forbidden(db, 1000)
    position = (await worker.exchange((), 5, forbidden_flags=NO)).flags_after
    await add(db, flags=["a"], priority=-1)
    return len(await worker.claim(1, forbidden_flags=NO, flags_after=position)) == 1


async def search_comes_to_an_end(db: asyncpg.Connection, worker: ExchangeWorker) -> bool:
    await add_forbidden(db, 1000)
    position = None
    for _ in range(10):
        position = (await worker.exchange((), 5, forbidden_flags=NO, flags_after=position)).flags_after
        if position is None:
            return True
    return False


CHANGES = {
    "run_at": ("run_at => now() + interval '1 day'", "and job.run_at <= as_of"),
    "task": ("", "and job.task_id = any (task_ids)"),
    "queue": ("queue_name => 'q'", "and job.job_queue_id is null"),
    "priority": ("priority => 9", "and job.priority = level"),
    "flags": ("flags => array['no']", "and (job.flags is null or not job.flags ?| forbidden_flags)"),
    "attempts": (None, "job.is_available and "),
}
LOCK_FLAGGED = "    if cardinality(chosen_flagged) > 0 then\n"
PAUSE = "    perform pg_advisory_lock(7);\n    perform pg_advisory_unlock(7);\n"


class TestGuards:
    """Each guard in the search for flagged jobs keeps a promise that fails without it."""

    GUARDS: dict[Any, tuple[str, str]] = {  # noqa: RUF012 - a constant
        dead_worker_claims_no_flagged_job: (
            """          limit walk_size
        ) as job
        where not exists (
          select from {schema}._private_python_dead_workers as dead where dead.worker_id = worker
        )
""",
            "          limit walk_size\n        ) as job\n",
        ),
        better_job_is_found_in_each_search: (
            "for walk in 1 .. 2 loop\n",
            "for walk in 2 .. 2 loop\n" + ("walk_priority := coalesce(flags_priority, walk_priority);"),
        ),
        search_comes_to_an_end: (
            "if (flags_priority, flags_run_at, flags_id) > (walk_priority, walk_run_at, walk_id) then",
            "if false then",
        ),
    }

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_guard_keeps_its_promise(
        self, db: asyncpg.Connection, worker: ExchangeWorker, promise: Any
    ) -> None:
        assert await promise(db, worker)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_fails_without_its_guard(
        self, db: asyncpg.Connection, worker: ExchangeWorker, promise: Any
    ) -> None:
        text = read_script("own/012_exchange.sql")
        before, after = self.GUARDS[promise]
        assert text.count(before) == 1, "update GUARDS: the guard has changed"
        await db.execute(Schema().render(text.replace(before, after)))
        assert not await promise(db, worker)

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("guarded", [True, False], ids=["with the guard", "without the guard"])
    @pytest.mark.parametrize("change", CHANGES)
    async def test_flagged_job_that_changes_before_it_is_locked_is_not_claimed(
        self,
        db: asyncpg.Connection,
        other: asyncpg.Connection,
        worker: ExchangeWorker,
        change: str,
        guarded: bool,
    ) -> None:
        """The exchange pauses after it has chosen the job, and another transaction changes the job."""
        text = read_script("own/012_exchange.sql")
        arguments, guard = CHANGES[change]
        begin = text.index(LOCK_FLAGGED)
        end = text.index("    end if;\n", begin)
        statement = text[begin:end]
        assert statement.count(guard) == 1, "update CHANGES: the guard has changed"
        changed = statement if guarded else statement.replace(guard, "")
        await db.execute(Schema().render(text[:begin] + PAUSE + changed + text[end:]))
        await add(db, flags=["a"], job_key="k")

        await other.execute("select pg_advisory_lock(7)")
        claiming = asyncio.create_task(worker.claim(forbidden_flags=NO))
        await until_blocked(db, worker.connection.get_server_pid())
        if arguments is None:
            await db.execute("update graphile_worker._private_jobs set attempts = max_attempts")
        else:
            task = "other" if change == "task" else "task"
            named = ", ".join(filter(None, [f"'{task}'", "job_key => 'k'", arguments]))
            for name, value in {"flags": "array['a']", "run_at": "'2020-01-01'"}.items():
                named += "" if name in arguments else f", {name} => {value}"
            await db.execute(f"select graphile_worker.add_job({named})")
        await other.execute("select pg_advisory_unlock(7)")
        try:
            is_claimed = bool(await claiming)
        except KeyError:  # The worker got a job without the lock of its queue.
            is_claimed = True
        assert is_claimed != guarded
