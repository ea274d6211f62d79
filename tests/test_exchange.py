"""The exchange keeps its rules, whatever other transactions do to the rows at the same time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import msgspec
import pytest

from graphile_worker._db.connection.error_mapping import StaleSessionError
from graphile_worker._db.queries import exchange as database
from graphile_worker._db.queries.exchange import ClaimedJob, ClaimRequest, ExchangeReply, Position, Result
from graphile_worker._db.queries.small_exchange import (
    SmallExchange,
    is_small,
    prepare_small,
    small_exchange,
)
from graphile_worker._db.queries.workers import unlock_stale
from graphile_worker._db.sql_files import Schema
from graphile_worker.outcome import Completed, Failed, Interrupted, Returned
from support.jobs import add, count, existing, fetch_one, get
from support.waiting import until_blocked
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

SCHEMA = Schema()


class ExchangeWorker:
    """A worker reduced to its exchanges."""

    timeout = 10.0  # the exchange never waits for other transactions

    def __init__(self, connection: asyncpg.Connection, name: str, *tasks: str, small: bool = False) -> None:
        self.connection = connection
        self.name = name
        self.generation: int | None = None
        self.careful = False
        self.identifiers = tasks or ("task",)
        self.small = small
        """Whether small exchanges are plain statements, followed by the function if it is needed."""
        self.statements: SmallExchange | None = None

    async def exchange(
        self, results: Sequence[Result] = (), wanted: int = 10, **request: Any
    ) -> ExchangeReply:
        tasks = await database.register_tasks(self.connection, SCHEMA, self.identifiers)
        claim = ClaimRequest(wanted=wanted, is_probably_filled=self.small, **request)
        reply = None
        if self.small and not self.careful and is_small(results, claim):
            reply = await self.exchange_small(results, claim, tasks)
            if not reply.partial:
                return reply
            results, claim = (), msgspec.structs.replace(claim, wanted=wanted - len(reply.claimed))
        async with asyncio.timeout(self.timeout):
            answer = await database.exchange(
                *(self.connection, SCHEMA, self.name, results, claim, tasks),
                generation=self.generation,
                careful=self.careful,
            )
        rest = answer.read()
        if reply is not None:
            rest.claimed = reply.claimed + rest.claimed
            rest.busy, rest.lost = reply.busy, reply.lost
        return rest

    async def exchange_small(
        self, results: Sequence[Result], claim: ClaimRequest, tasks: dict[int, str]
    ) -> ExchangeReply:
        if self.generation is None:
            self.generation = (await read_locked(self, tasks)).generation
        if self.statements is None:
            self.statements = await prepare_small(self.connection, SCHEMA)
            assert self.statements is not None
        async with asyncio.timeout(self.timeout):
            answer = await small_exchange(
                *(self.statements, self.name, results, claim, tasks), generation=self.generation
            )
        return answer.read()

    async def claim(self, wanted: int = 10, **request: Any) -> list[ClaimedJob]:
        return (await self.exchange((), wanted, **request)).claimed


def result_of(held: ClaimedJob, outcome: Any = Completed()) -> Result:  # noqa: B008 - Completed has no state
    return Result(held, outcome, held.queue)


def claim_ids(claims: set[database.Claim]) -> set[int]:
    return {claim.job_id for claim in claims}


def ids(claimed: Sequence[ClaimedJob]) -> list[int]:
    return [held.job.id for held in claimed]


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    """Yield a second connection, for another worker or transaction."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


on_both_planes = pytest.mark.parametrize(
    "worker", [False, True], ids=["function", "plain statements"], indirect=True
)


@pytest.fixture
async def worker(database: str, request: pytest.FixtureRequest) -> AsyncIterator[ExchangeWorker]:
    small = getattr(request, "param", False)
    connection = await asyncpg.connect(
        database, server_settings={"search_path": "pg_catalog, pg_temp"} if small else {}
    )
    yield ExchangeWorker(connection, "worker", small=small)
    await connection.close()


@on_both_planes
class TestClaiming:
    async def test_claimed_job_is_locked_and_has_one_more_attempt(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, payload={"a": 1}, queue_name="q", priority=3, flags=["x"])

        [held] = await worker.claim()

        row = await existing(db, job["id"])
        assert (row["locked_by"], row["attempts"]) == ("worker", 1)
        assert held.locked_at == row["locked_at"]
        assert (held.job.payload, held.job.queue_name, held.job.flags) == ({"a": 1}, "q", frozenset({"x"}))
        assert (held.job.task_identifier, held.job.attempts, held.job.locked_by) == ("task", 1, "worker")
        assert await locked(db) == [("job", job["id"]), ("queue", held.job.job_queue_id)]

    async def test_jobs_are_claimed_by_priority_then_time_then_id(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        earlier = datetime.now(UTC) - timedelta(hours=1)
        added = [
            await add(db, priority=5),
            await add(db, queue_name="a"),
            await add(db, priority=-1, queue_name="b"),
            await add(db, run_at=earlier),
            await add(db),
            await add(db, queue_name="c", run_at=earlier - timedelta(hours=1)),
            await add(db, "other", priority=-9),
        ]
        one_by_one = [ids(await worker.claim(1))[0] for _ in range(6)]

        first, second, third, fourth, fifth, sixth = (added[n]["id"] for n in (2, 5, 3, 1, 4, 0))
        assert one_by_one == [first, second, third, fourth, fifth, sixth]
        assert await worker.claim() == []

    @pytest.mark.parametrize("wanted", [1, 3, 100])
    async def test_jobs_of_several_tasks_are_claimed_in_one_order(
        self, db: asyncpg.Connection, worker: ExchangeWorker, wanted: int
    ) -> None:
        worker.identifiers = ("x", "y", "z")
        added = [(await add(db, "xyz"[n * 7 % 3], priority=n % 2))["id"] for n in range(12)]
        claimed: list[int] = []
        while batch := await worker.claim(wanted):
            claimed += ids(batch)
        assert claimed == added[::2] + added[1::2]

    async def test_jobs_that_cannot_run_are_not_claimed(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        await add(db, "other")
        await add(db, run_at=later)
        failed = await add(db)
        await db.execute("update graphile_worker._private_jobs set attempts = 25 where id = $1", failed["id"])
        await add(db, flags=["no", "maybe"])
        held = await add(db, queue_name="held")
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now() where id = $1",
            held["job_queue_id"],
        )
        reply = await worker.exchange(forbidden_flags=["no"])
        assert reply.claimed == []
        assert not reply.contended
        assert reply.next_due == later

    async def test_as_of_decides_which_jobs_are_due(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        job = await add(db, run_at=later)
        assert await worker.claim(as_of=later - timedelta(seconds=1)) == []
        [held] = await worker.claim(as_of=later)
        assert held.job.id == job["id"]
        assert abs(held.locked_at - datetime.now(UTC)) < timedelta(minutes=1), (
            "the lock has the time of the database"
        )

    async def test_future_jobs_of_a_better_priority_do_not_hide_due_jobs(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, null, now() + interval '1 day', null, null, -n % 5, null)
                ::graphile_worker.job_spec from generate_series(1, 500) as n))
        """)
        due = await add(db, priority=7)
        assert ids(await worker.claim(1)) == [due["id"]]

    async def test_one_claim_takes_one_job_per_queue(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        added = [await add(db, queue_name=name, priority=n) for n, name in enumerate("aabba")]
        assert ids(await worker.claim()) == [added[0]["id"], added[2]["id"]]
        assert await worker.claim() == []

    async def test_run_length_claims_consecutive_jobs_of_a_queue_under_one_lock(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        added = [(await add(db, queue_name="a", priority=n % 2))["id"] for n in range(6)]
        claimed = await worker.claim(4, run_length=4)
        assert ids(claimed) == [added[0], added[2], added[4], added[1]]
        assert len({id(held.queue) for held in claimed}) == 1


@on_both_planes
class TestFencing:
    @pytest.mark.parametrize("outcome", [Completed(), Failed(ValueError("no")), Returned()])
    async def test_result_of_a_job_claimed_by_another_worker_changes_nothing(
        self, db: asyncpg.Connection, worker: ExchangeWorker, outcome: Any
    ) -> None:
        job = await add(db)
        [held] = await worker.claim()
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        [again] = await ExchangeWorker(db, "other").claim()

        reply = await worker.exchange([result_of(held, outcome)], 0)

        assert claim_ids(reply.lost) == {job["id"]}
        row = await existing(db, job["id"])
        assert (row["locked_by"], row["locked_at"], row["last_error"]) == ("other", again.locked_at, None)

    async def test_result_of_an_older_claim_by_the_same_worker_changes_nothing(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db)
        [held] = await worker.claim()
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        [again] = await worker.claim()
        assert claim_ids((await worker.exchange([result_of(held)], 0)).lost) == {job["id"]}
        assert (await worker.exchange([result_of(again)], 0)).lost == set()
        assert await count(db) == 0

    @pytest.mark.parametrize("takeover", ["add_job('task', job_key => 'k')", "remove_job('k')"])
    async def test_superseded_job_is_deleted_when_it_succeeds(
        self, db: asyncpg.Connection, worker: ExchangeWorker, takeover: str
    ) -> None:
        job = await add(db, job_key="k")
        [held] = await worker.claim()
        await db.execute(f"select graphile_worker.{takeover}")
        assert (await worker.exchange([result_of(held)], 0)).lost == set()
        assert await get(db, job["id"]) is None

    async def test_queue_is_released_though_the_job_was_deleted(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute("delete from graphile_worker._private_jobs")
        assert claim_ids((await worker.exchange([result_of(held)], 0)).lost) == {held.job.id}
        assert await locked(db) == []

    async def test_queue_locked_by_another_worker_stays_locked(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = 'other', locked_at = now()"
        )
        assert (await worker.exchange([result_of(held)], 0)).lost == set()
        assert await get(db, job["id"]) is None
        assert await locked(db) == [("queue", job["job_queue_id"])]


class TestClaimOnlyLockedRows:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        "change",
        [
            "'task', run_at => now() + interval '1 day'",
            "'other'",
            "'task', queue_name => 'elsewhere'",
            "'task', priority => 9",
            "'task', flags => array['forbidden']",
        ],
    )
    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_concurrently_changed_job_is_claimed_with_its_current_values(
        self, database: str, db: asyncpg.Connection, worker: ExchangeWorker, change: str, queue: str | None
    ) -> None:
        """The outcome of a race depends on chance, so the test runs many of them."""
        back = "'task'" if queue is None else f"'task', queue_name => '{queue}'"
        connections = [await asyncpg.connect(database) for _ in range(3)]
        finished = asyncio.Event()

        async def keep_changing(connection: asyncpg.Connection, key: str) -> None:
            while not finished.is_set():
                for spec in (back, change):
                    await connection.execute(f"select graphile_worker.add_job({spec}, job_key => '{key}')")

        changing = [
            asyncio.create_task(keep_changing(connection, f"k{n}"))
            for n, connection in enumerate(connections)
        ]
        claims = 0
        for _ in range(60):
            reply = await worker.exchange((), 10, forbidden_flags=["forbidden"])
            for held in reply.claimed:
                claims += 1
                assert held.job.task_identifier == "task"
                assert held.job.run_at <= reply.now
                assert not held.job.flags
                if held.queue is not None:
                    row = await fetch_one(
                        db,
                        "select locked_by, locked_at from graphile_worker._private_job_queues where id = $1",
                        held.queue.id,
                    )
                    assert tuple(row) == ("worker", held.locked_at), (
                        "the job must be claimed with its own queue, which is locked"
                    )
            results = [result_of(held) for held in reply.claimed]
            while results:
                busy = (await worker.exchange(results, 0)).busy
                results = [result for result in results if result.held.claim in busy]
        finished.set()
        await asyncio.gather(*changing)
        for connection in connections:
            await connection.close()
        assert claims
        locks = "select count(*) from graphile_worker._private_job_queues where locked_at is not null"
        assert await db.fetchval(locks) == 0


@on_both_planes
class TestNeverWaitForARow:
    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_transaction_on_the_job_key_makes_only_that_result_busy(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker, queue: str | None
    ) -> None:
        job = await add(db, job_key="k", queue_name=queue)
        free = await add(db)
        [held, unrelated] = await worker.claim()
        await add(db)
        transaction = other.transaction()
        await transaction.start()
        await add(other, job_key="k", queue_name=queue)

        reply = await worker.exchange([result_of(held), result_of(unrelated)])

        assert claim_ids(reply.busy) == {job["id"]}
        assert reply.lost == set()
        assert await get(db, free["id"]) is None
        assert len(reply.claimed) == 1
        assert (("queue", job["job_queue_id"]) in await locked(db)) == (queue is not None)

        await transaction.commit()
        reply = await worker.exchange([result_of(held)], 0)
        assert reply.busy == set()
        assert await get(db, job["id"]) is None
        assert len(await locked(db)) == 1

    async def test_queue_row_locked_by_a_transaction_makes_the_result_busy(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, queue_name="q")
        [held] = await worker.claim()
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select from graphile_worker._private_job_queues for update")
        assert claim_ids((await worker.exchange([result_of(held)])).busy) == {job["id"]}
        await transaction.rollback()
        assert (await worker.exchange([result_of(held)])).busy == set()
        assert await locked(db) == []

    async def test_pending_job_locked_by_a_transaction_is_skipped(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, job_key="k", queue_name="q")
        second = await add(db, queue_name="q")
        third = await add(db)
        transaction = other.transaction()
        await transaction.start()
        await add(other, job_key="k", queue_name="q")
        reply = await worker.exchange()
        assert ids(reply.claimed) == [second["id"], third["id"]]
        await transaction.rollback()


class TestNoStarvation:
    async def test_many_jobs_of_a_locked_queue_do_not_hide_other_queues(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, 'big', null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 500) as n))
        """)
        await db.execute("update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()")
        last = [await add(db, queue_name=f"small {n}") for n in range(3)]
        assert ids(await worker.claim(2)) == [job["id"] for job in last[:2]]

    async def test_many_locked_queues_are_visited_in_several_exchanges(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, 'q' || n, null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 1200) as n))
        """)
        await db.execute("update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()")
        last = await add(db, queue_name="last")
        cursor: int | None = 0
        exchanges = 0
        claimed: list[ClaimedJob] = []
        while not claimed:
            reply = await worker.exchange((), 1, after_queue=cursor)
            claimed, cursor = reply.claimed, reply.next_queue
            assert claimed or reply.next_queue, "the reply must say that there are queues left to visit"
            exchanges += 1
        assert ids(claimed) == [last["id"]]
        assert 1 < exchanges <= 4

    async def test_visited_queue_gives_no_job_out_of_order(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """Jobs of a locked queue fill the page of one task, so queues are visited one by one."""
        connection = await asyncpg.connect(database)
        worker = ExchangeWorker(connection, "worker", "x", "y")
        for _ in range(40):
            await add(db, "x", queue_name="busy")
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = 'other', locked_at = now()"
        )
        earlier = datetime.now(UTC) - timedelta(hours=1)
        jobs = [await add(db, task, queue_name="q", run_at=earlier) for task in "yyyx"]
        assert ids(await worker.claim(3)) == [jobs[0]["id"]]
        await connection.close()

    async def test_exchange_without_a_queue_visit_reports_that_one_is_needed(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        first = await add(db, queue_name="small")
        assert (await worker.exchange((), 0, after_queue=None)).next_queue == 0, "no queue needs a visit"
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, 'big', null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 500) as n))
        """)
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now() "
            "where queue_name = 'big'"
        )
        last = await add(db, queue_name="last")
        reply = await worker.exchange((), 2, after_queue=None)
        assert ids(reply.claimed) == [first["id"]]
        assert reply.next_queue is None, "the reply must say that there are queues left to visit"
        assert ids((await worker.exchange((), 2)).claimed) == [last["id"]]

    async def test_locked_queues_of_one_priority_do_not_hide_queues_of_another(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, 'q' || n, null, null, null, n % 2, null)
                ::graphile_worker.job_spec from generate_series(1, 1200) as n))
        """)
        await db.execute("update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()")
        last = await add(db, queue_name="last", priority=0)
        cursor: int | None = 0
        seen = set()
        for _ in range(4):
            reply = await worker.exchange((), 1, after_queue=cursor)
            seen.update(ids(reply.claimed))
            cursor = reply.next_queue
        assert seen == {last["id"]}


class TestEmptyReply:
    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_rows_locked_by_other_transactions_are_reported_as_contended(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker, queue: str | None
    ) -> None:
        await add(db, queue_name=queue)
        await worker.exchange((), 0)
        transaction = other.transaction()
        await transaction.start()
        assert len(await ExchangeWorker(other, "other").claim()) == 1
        reply = await worker.exchange()
        assert (reply.claimed, reply.contended) == ([], True)
        await transaction.commit()
        reply = await worker.exchange()
        assert (reply.claimed, reply.contended) == ([], False)

    async def test_next_due_time_ignores_locked_queues(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        soon, later = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, 2))
        await add(db, queue_name="q")
        await worker.claim()
        await add(db, queue_name="q", run_at=soon)
        await add(db, queue_name="free", run_at=later, priority=9)
        assert (await worker.exchange()).next_due == later

    async def test_releasing_a_queue_with_jobs_notifies_other_workers(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        received: asyncio.Queue[str] = asyncio.Queue()
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await add(db, "unknown", queue_name="q")
        await other.add_listener("jobs:insert", lambda *message: received.put_nowait(message[-1]))
        await worker.exchange([result_of(held)])
        async with asyncio.timeout(10):
            assert json.loads(await received.get())["count"] == 1
        await other.reset()


class TestPlannerSettings:
    async def test_exchange_plans_do_not_depend_on_session_settings(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        settings = await db.fetchval(
            "select proconfig from pg_proc where proname = '_private_python_exchange_v4'"
        )
        assert {"jit=off", "plan_cache_mode=force_generic_plan", "enable_seqscan=off"} <= set(settings)
        await add(db)
        await worker.connection.execute("set enable_indexscan = on; set plan_cache_mode = force_custom_plan")
        assert len(await worker.claim()) == 1
        kept = await worker.connection.fetchval("show plan_cache_mode")
        assert kept == "force_custom_plan", "the exchange must not change the settings of the session"

    async def test_claim_reads_few_pages_though_many_jobs_are_due_at_the_same_time(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """With such statistics, an index without the id plus a sort looks cheap, but reads all jobs."""
        snapshot = other.transaction(isolation="repeatable_read")
        await snapshot.start()
        await other.fetchval("select 1 from graphile_worker._private_jobs")
        task = (await add(db))["task_id"]
        await db.execute(f"""
            insert into graphile_worker._private_jobs (task_id, payload)
            select {task}, '{{}}' from generate_series(1, 60000)
        """)
        for _ in range(10):
            claimed = await worker.claim(5000)
            await worker.exchange([result_of(held) for held in claimed], 0)
        mark = claimed[-1].order
        await db.execute("vacuum analyze graphile_worker._private_jobs")
        plan = await db.fetchval(
            """explain (analyze, buffers, format json)
            select * from graphile_worker._private_python_exchange_v4(
              'a worker', '{}', '{}', null, null, 0, null,
              array(select id from graphile_worker._private_tasks), 10, null, 1, false, null, now(),
              $1, $2, $3, 0, null, false, null
            )""",
            *mark,
        )
        await snapshot.rollback()
        [top] = json.loads(plan)
        assert top["Plan"]["Actual Rows"] == 11
        assert top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"] < 1000


class TestWatermark:
    async def test_claim_from_a_position_does_not_scan_deleted_jobs(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """Index entries of deleted jobs stay while an old transaction is open."""
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, null, null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 21000) as n))
        """)
        old = other.transaction(isolation="repeatable_read")
        await old.start()
        await other.fetchval("select count(*) from graphile_worker._private_jobs")
        claimed = await worker.claim(20000)
        await worker.exchange([result_of(held) for held in claimed], 0)
        mark = Position(*claimed[-1].order)

        async def pages_read(mark: Position | None) -> int:
            tasks = "array[(select id from graphile_worker._private_tasks)]"
            place = "null, null, null" if mark is None else f"{mark[0]}::smallint, '{mark[1]}', {mark[2]}"
            transaction = db.transaction()
            await transaction.start()
            plan = await db.fetchval(
                f"""explain (analyze, buffers, format json)
                select * from graphile_worker._private_python_exchange_v4(
                  'probe', '{{}}', '{{}}', '{{}}', '{{}}', 0, null, {tasks}, 10, null, 1, false, null, now(),
                  {place}, 0, null, false, null
                )"""
            )
            await transaction.rollback()
            [top] = json.loads(plan)
            return int(top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"])

        await pages_read(None)
        await pages_read(mark)
        assert await pages_read(mark) * 3 < await pages_read(None)
        assert len(await worker.claim(1000, mark=mark)) == 1000
        await old.rollback()

    async def test_claim_from_a_position_skips_only_earlier_jobs(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        added = [await add(db, priority=priority) for priority in (0, 0, -5, 3)]
        middle = added[0]
        mark = Position(middle["priority"], middle["run_at"], middle["id"])
        assert ids(await worker.claim(mark=mark)) == [added[1]["id"], added[3]["id"]]
        assert ids(await worker.claim()) == [added[2]["id"], middle["id"]]

    async def test_claim_from_a_position_keeps_the_order_of_serial_queues(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """Earlier jobs may have been skipped because their queue was locked then."""
        one, two, three = [
            [(await add(db, queue_name=queue, priority=priority))["id"] for priority in priorities]
            for queue, priorities in (("one", (0, 0)), ("two", (-5, 0, 0)), ("three", (0, 3)))
        ]
        last = await existing(db, three[0])
        mark = Position(0, last["run_at"], last["id"])
        behind = await add(db, queue_name="one")
        assert behind["id"] > mark.id

        assert await worker.claim(mark=mark) == [], "only the first job of a queue may be claimed"

        assert ids(await worker.claim()) == [two[0], one[0], three[0]]


class TestLockOnlyClaimedRows:
    async def test_only_claimed_rows_are_locked(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        tasks = [f"task {n}" for n in range(8)]
        worker.identifiers = tuple(tasks)
        for _ in range(3):
            for task in tasks:
                await add(db, task)
                await add(db, task, queue_name=task)
        await worker.exchange((), 0)
        transaction = worker.connection.transaction()
        await transaction.start()
        claimed = await worker.claim(5)
        free = await other.fetch("select id from graphile_worker._private_jobs for update skip locked")
        assert len(claimed) == 5
        assert len(free) == 48 - 5
        await transaction.rollback()


class TestRecording:
    async def test_failed_job_is_retried_after_the_exponential_delay(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, payload=[1], queue_name="q", max_attempts=3)
        for attempt, delay in ((1, 2.718281828), (2, 7.389056099), (3, 20.08553692)):
            await db.execute("update graphile_worker._private_jobs set run_at = now() - interval '1 hour'")
            [held] = await worker.claim()
            reply = await worker.exchange([result_of(held, Failed(ValueError(f"no {attempt}")))], 0)
            row = await existing(db, job["id"])
            assert (row["attempts"], row["last_error"], row["locked_at"]) == (attempt, f"no {attempt}", None)
            assert abs((row["run_at"] - reply.now).total_seconds() - delay) < 0.001
            assert row["updated_at"] == job["updated_at"], "other workers do not change updated_at either"
        assert not (await existing(db, job["id"]))["is_available"]
        assert await locked(db) == []

    async def test_retry_delay_counts_from_a_later_run_at(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db)
        [held] = await worker.claim()
        later = datetime.now(UTC) + timedelta(hours=1)
        await db.execute("update graphile_worker._private_jobs set run_at = $1", later)
        await worker.exchange([result_of(held, Failed(ValueError()))], 0)
        row = await existing(db, job["id"])
        assert abs((row["run_at"] - later).total_seconds() - 2.718281828) < 0.001
        assert row["last_error"] == "ValueError"

    async def test_retry_delay_stops_growing_at_the_tenth_attempt(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db)
        await db.execute("update graphile_worker._private_jobs set attempts = 14")
        [held] = await worker.claim()
        reply = await worker.exchange([result_of(held, Failed(ValueError()))], 0)
        row = await existing(db, job["id"])
        assert abs((row["run_at"] - reply.now).total_seconds() - 22026.4657948) < 0.001

    async def test_unstorable_error_text_is_escaped_or_truncated(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        class Unprintable(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise RuntimeError

        errors = [ValueError("a\0b\ud800"), ValueError("x" * 100_000), Unprintable()]
        jobs = [await add(db) for _ in errors]
        claimed = await worker.claim()
        await worker.exchange([result_of(h, Failed(e)) for h, e in zip(claimed, errors, strict=True)], 0)
        texts = [(await existing(db, job["id"]))["last_error"] for job in jobs]
        assert texts[0] == "a\\0b\\ud800"
        assert len(texts[1]) == 10_001
        assert texts[2] == "Unprintable"

    async def test_interrupted_job_gets_its_attempt_back(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, queue_name="q", job_key="k")
        [held] = await worker.claim()
        reply = await worker.exchange([result_of(held, Interrupted(30))], 0)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["last_error"], row["locked_by"]) == (0, None, None)
        assert row["run_at"] == reply.now + timedelta(seconds=30)
        assert await locked(db) == []

    @pytest.mark.parametrize("max_attempts", [1, 25])
    @pytest.mark.parametrize("takeover", ["add_job('task', job_key => 'k')", "remove_job('k')"])
    async def test_superseded_job_does_not_run_again_when_interrupted(
        self, db: asyncpg.Connection, worker: ExchangeWorker, takeover: str, max_attempts: int
    ) -> None:
        job = await add(db, job_key="k", max_attempts=max_attempts)
        [held] = await worker.claim()
        await db.execute(f"select graphile_worker.{takeover}")
        await worker.exchange([result_of(held, Interrupted())], 0)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["locked_at"], row["is_available"]) == (max_attempts, None, False)

    async def test_returned_jobs_are_announced(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db)
        await add(db)
        claimed = await worker.claim()
        received: asyncio.Queue[str] = asyncio.Queue()
        await other.add_listener("jobs:insert", lambda *message: received.put_nowait(message[-1]))
        await worker.exchange([result_of(held, Returned()) for held in claimed], 0)
        async with asyncio.timeout(10):
            assert json.loads(await received.get())["count"] == 2
        await other.reset()

    async def test_recording_a_huge_partly_failed_batch_takes_linear_time(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """Other sessions wait meanwhile. Linear time is about 2 seconds here; quadratic time is 3 minutes."""
        items = list(range(200_000))
        job = await add(db, payload=items)
        [held] = await worker.claim()
        worker.timeout = 60
        await worker.connection.execute("set statement_timeout = '30s'")
        await worker.exchange([result_of(held, Failed(ValueError(), left=items[::2]))], 0)
        assert json.loads((await existing(db, job["id"]))["payload"]) == items[::2]

    async def test_unreadable_payload_does_not_affect_other_jobs(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await db.execute("select graphile_worker.add_job('task', ('[' || repeat('9', 5000) || ']')::json)")
        await add(db, payload=1)
        bad, good = await worker.claim()
        assert bad.unreadable is not None
        assert good.job.payload == 1


class TestSerialQueues:
    async def test_recording_a_result_claims_the_next_job_of_its_queue(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        added = [(await add(db, queue_name="q"))["id"] for _ in range(3)]
        [held] = await worker.claim()
        order = [held.job.id]
        for _ in range(2):
            [held] = (await worker.exchange([result_of(held)])).claimed
            order.append(held.job.id)
        assert order == added
        await worker.exchange([result_of(held)])
        assert await locked(db) == []

    async def test_queue_is_released_if_a_better_job_is_claimed(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await add(db, queue_name="q", priority=5)
        better = await add(db)
        assert ids((await worker.exchange([result_of(held)], 1)).claimed) == [better["id"]]
        assert await locked(db) == [("job", better["id"])]

    async def test_queue_claimed_with_run_length_stays_locked_until_its_last_job(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        added = [await add(db, queue_name="q") for _ in range(3)]
        first, second = await worker.claim(2, run_length=2)
        await worker.exchange([Result(first, Completed(), None)], 0)
        assert await ExchangeWorker(other, "other").claim() == []
        reply = await worker.exchange([Result(second, Completed(), second.queue)], 1)
        assert ids(reply.claimed) == [added[2]["id"]]

    async def test_held_queue_continues_before_a_better_job_without_a_queue(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        first, second = [await add(db, queue_name="q") for _ in range(2)]
        [held] = await worker.claim()
        assert ids([held]) == [first["id"]]
        better = await add(db, priority=-1)
        reply = await worker.exchange([result_of(held)], queues_first=True)
        assert ids(reply.claimed) == [second["id"]]
        assert reply.next_queue is None, "another claim has to search"
        assert ids(await worker.claim()) == [better["id"]]

    async def test_queues_first_searches_if_a_held_queue_is_empty(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        other = await add(db, queue_name="other")
        reply = await worker.exchange([result_of(held)], queues_first=True)
        assert ids(reply.claimed) == [other["id"]]
        assert reply.next_queue == 0
        assert (
            await db.fetchval(
                "select count(*) from graphile_worker._private_job_queues where locked_by is not null"
            )
            == 1
        )

    async def test_queues_first_with_too_few_slots_searches_in_order(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for name in ("a", "b"):
            for _ in range(2):
                await add(db, queue_name=name)
        held = await worker.claim()
        better = await add(db, priority=-1)
        reply = await worker.exchange([result_of(job) for job in held], wanted=1, queues_first=True)
        assert ids(reply.claimed) == [better["id"]]

    async def test_continued_queues_give_no_more_jobs_than_wanted(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for number in range(40):
            await add(db, queue_name=f"q{number % 2}")
        held = await worker.claim(2)
        results = [result_of(job) for job in held]
        reply = await worker.exchange(results, wanted=7, startable=2, run_length=20, queues_first=True)
        assert len(reply.claimed) == 6, "three of each queue"

    async def test_continued_queue_has_the_latest_lock_if_a_result_brings_an_older_one(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for _ in range(3):
            await add(db, queue_name="q")
        [stale] = await worker.claim(1)
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        [held] = await worker.claim(1)
        reply = await worker.exchange([result_of(held), result_of(stale)], wanted=1)
        [following] = reply.claimed
        await worker.exchange([result_of(following)], wanted=0)
        assert await locked(db) == []

    async def test_job_of_a_continued_queue_is_recorded_under_the_old_lock(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for _ in range(3):
            await add(db, queue_name="q")
        claimed = await worker.claim()
        for queues_first in (False, True, True):
            reply = await worker.exchange([result_of(job) for job in claimed], queues_first=queues_first)
            claimed = reply.claimed
        assert await count(db) == 0
        assert await locked(db) == []


class TestLostConnection:
    async def test_reading_locked_jobs_waits_for_a_pending_exchange(
        self, database: str, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        job = await add(db, queue_name="q")
        tasks = await register(db)
        lost = await asyncpg.connect(database)
        client = ExchangeWorker(lost, "worker")
        client.generation = (await read_locked(client, tasks)).generation
        under_way = lost.transaction()
        await under_way.start()
        await client.claim()

        reading = asyncio.create_task(read_locked(worker, tasks))
        await until_blocked(db, worker.connection.get_server_pid())
        await under_way.commit()
        found = await reading

        assert ids(found.jobs) == [job["id"]]
        assert list(found.queues) == [job["job_queue_id"]]
        await lost.close()

    async def test_exchange_of_an_earlier_generation_does_nothing(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        """A frozen pooler may deliver a call after the worker has read back the jobs that it relies on."""
        await add(db)
        tasks = await register(db)
        worker.generation = (await read_locked(worker, tasks)).generation
        reader = other.transaction()
        await reader.start()
        later = await read_locked(ExchangeWorker(other, "worker"), tasks)
        with pytest.raises(asyncpg.LockNotAvailableError):
            await worker.exchange()
        await reader.commit()
        with pytest.raises(asyncpg.PostgresError) as raised:
            await worker.exchange()
        assert raised.value.sqlstate == "GWGUP"
        assert await locked(db) == []
        worker.generation = later.generation
        assert len(await worker.claim()) == 1

    async def test_renewal_of_an_earlier_generation_does_not_change_locks(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        tasks = await register(db)
        worker.generation = (await read_locked(worker, tasks)).generation
        await add(db, queue_name="q")
        [held] = await worker.claim()
        assert held.queue is not None
        [found] = (await read_locked(worker, tasks)).jobs
        with pytest.raises(StaleSessionError):
            await database.renew(
                worker.connection, SCHEMA, "worker", [held], [held.queue], generation=worker.generation
            )
        assert (await existing(db, held.job.id))["locked_at"] == found.locked_at

    async def test_late_release_does_not_unlock_a_queue_that_was_locked_again(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        assert held.queue is not None
        spare = {held.queue.id: held.queue.locked_at}
        await worker.exchange([result_of(held)], 0)
        await add(db, queue_name="q")
        await worker.claim()
        assert await database.unlock_queues(worker.connection, SCHEMA, "worker", spare) == set()
        assert [kind for kind, _ in await locked(db)] == ["job", "queue"]

    async def test_reading_locked_jobs_stops_waiting_for_a_hanging_exchange(
        self, database: str, db: asyncpg.Connection, worker: ExchangeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.queries.exchange._LONGEST_WAIT", 0.05)
        tasks = await register(db)
        hung = ExchangeWorker(await asyncpg.connect(database), "worker")
        hung.generation = (await read_locked(hung, tasks)).generation
        async with hung.connection.transaction():
            await hung.exchange()
            with pytest.raises(asyncpg.LockNotAvailableError):
                await read_locked(worker, tasks)
        assert (await read_locked(worker, tasks)).generation == hung.generation + 1
        await hung.connection.close()

    async def test_advisory_locks_of_another_role_do_not_block_the_worker(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await other.execute("create role gw_other_role")
        await other.execute("set role gw_other_role")
        for word in ("exchange", "alive", "sweep"):
            await other.execute(
                f"select pg_advisory_lock(hashtextextended('graphile_worker {word} worker', 0))"
            )
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await other.execute("select from graphile_worker._private_python_sessions for update")
        await add(db)
        tasks = await register(db)
        worker.generation = (await read_locked(worker, tasks)).generation
        assert len(await worker.claim()) == 1
        await other.execute("reset role; drop role gw_other_role")


async def register(db: asyncpg.Connection) -> dict[int, str]:
    return await database.register_tasks(db, SCHEMA, ["task"])


async def read_locked(worker: ExchangeWorker, tasks: dict[int, str]) -> database.Locked:
    return await database.read_locked(worker.connection, SCHEMA, worker.name, tasks)


class TestLockRenewalAndExpiry:
    async def test_renewal_updates_job_and_queue_locks_and_results_are_still_recorded(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        before = held.locked_at
        assert held.queue is not None
        await database.renew(worker.connection, SCHEMA, "worker", [held], [held.queue])
        assert held.locked_at > before
        assert held.queue.locked_at == held.locked_at
        assert (await worker.exchange([result_of(held)])).lost == set()
        assert await locked(db) == []

    async def test_renewal_does_not_lock_lost_jobs_again(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        assert held.queue is not None
        queue = replace(held.queue)
        await database.renew(worker.connection, SCHEMA, "worker", [held], [queue])
        assert await locked(db) == []

    async def test_only_locks_older_than_four_hours_are_released(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        for age in ("4 hours 1 second", "3 hours 59 minutes"):
            job = await add(db, queue_name=age, run_at=datetime(2020, 1, 1, tzinfo=UTC))
            for table in ("jobs", "job_queues"):
                column = "id" if table == "jobs" else "queue_name"
                value = job["id"] if table == "jobs" else age
                await db.execute(
                    f"""update graphile_worker._private_{table} set locked_by = 'dead',
                    locked_at = now() - interval '{age}' where {column} = $1""",
                    value,
                )
        await unlock_stale(db, SCHEMA)
        [young] = [row for row in await locked(db) if row[0] == "job"]
        assert young == ("job", job["id"])
        assert len(await locked(db)) == 2
        [freed] = await worker.claim()
        assert freed.job.run_at > datetime(2026, 1, 1, tzinfo=UTC)

    async def test_releasing_stale_locks_does_not_wait_for_locked_rows(
        self, db: asyncpg.Connection, other: asyncpg.Connection
    ) -> None:
        await add(db, queue_name="q")
        for table in ("jobs", "job_queues"):
            await db.execute(
                f"""update graphile_worker._private_{table} set locked_by = 'dead',
                locked_at = now() - interval '5 hours'"""
            )
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select from graphile_worker._private_jobs for update")
        async with asyncio.timeout(10):
            await unlock_stale(db, SCHEMA)
        await transaction.rollback()
        assert [kind for kind, _ in await locked(db)] == ["job"]


async def test_error_of_an_unreadable_payload_does_not_keep_the_reply_in_memory(
    db: asyncpg.Connection, worker: ExchangeWorker
) -> None:
    await add(db)
    await db.execute(
        """update graphile_worker._private_jobs set payload = ('{"n": ' || repeat('9', 6000) || '}')::json"""
    )
    [held] = await worker.claim()
    assert held.unreadable is not None
    # A traceback keeps its frames alive, and so the whole reply.
    assert (held.unreadable.__traceback__, held.unreadable.__context__) == (None, None)


class TestRecordingInBulk:
    """One statement deletes all completed jobs, unless a row is locked or lost."""

    async def test_exchange_restores_the_lock_timeout_of_the_session(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        await worker.connection.execute("set lock_timeout = '7s'")
        jobs = [await add(db) for _ in range(3)]
        claimed = await worker.claim(3)
        async with other.transaction():
            await other.execute(
                "select from graphile_worker._private_jobs where id = $1 for update", jobs[1]["id"]
            )
            reply = await worker.exchange([result_of(held) for held in claimed], 0)
            assert {claim.job_id for claim in reply.busy} == {jobs[1]["id"]}
            assert await worker.connection.fetchval("show lock_timeout") == "7s"
        reply = await worker.exchange([result_of(claimed[1])], 0)
        assert (reply.busy, reply.lost) == (set(), set())
        assert await worker.connection.fetchval("show lock_timeout") == "7s"
        assert await count(db) == 0

    async def test_lost_result_does_not_prevent_recording_the_others(
        self, db: asyncpg.Connection, worker: ExchangeWorker
    ) -> None:
        jobs = [await add(db) for _ in range(3)]
        claimed = await worker.claim(3)
        await db.execute(
            "update graphile_worker._private_jobs set locked_by = 'other' where id = $1", jobs[2]["id"]
        )
        reply = await worker.exchange([result_of(held) for held in claimed], 0)
        assert {claim.job_id for claim in reply.lost} == {jobs[2]["id"]}
        assert await count(db) == 1
