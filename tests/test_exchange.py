"""The exchange keeps its rules, whatever others do to the rows at the same time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker._db import exchange as database
from graphile_worker._db.exchange import Held, Position, Reply, Result, Wish
from graphile_worker._db.failures import GivenUpError
from graphile_worker._db.sql import Schema
from graphile_worker._db.workers import unlock_stale
from graphile_worker.outcome import Completed, Failed, Interrupted, Returned
from support.jobs import add, count, existing, get, one
from support.waiting import until_blocked
from support.workers import locked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

SCHEMA = Schema()


class Client:
    """A worker reduced to its exchanges."""

    patience = 10.0  # it never waits for anybody

    def __init__(self, connection: asyncpg.Connection, name: str, *tasks: str) -> None:
        self.connection = connection
        self.name = name
        self.generation: int | None = None
        self.careful = False
        self.identifiers = tasks or ("task",)

    async def exchange(self, results: Sequence[Result] = (), wanted: int = 10, **wish: Any) -> Reply:
        tasks = await database.register_tasks(self.connection, SCHEMA, self.identifiers)
        async with asyncio.timeout(self.patience):
            answer = await database.exchange(
                *(self.connection, SCHEMA, self.name, results, Wish(wanted=wanted, **wish), tasks),
                generation=self.generation,
                careful=self.careful,
            )
        return answer.read()

    async def claim(self, wanted: int = 10, **wish: Any) -> list[Held]:
        return (await self.exchange((), wanted, **wish)).claimed


def done(held: Held, outcome: Any = Completed()) -> Result:  # noqa: B008 - it has no state
    return Result(held, outcome, held.queue)


def numbers(claims: set[database.Claim]) -> set[int]:
    return {claim.job_id for claim in claims}


def ids(claimed: Sequence[Held]) -> list[int]:
    return [held.job.id for held in claimed]


@pytest.fixture
async def other(database: str) -> AsyncIterator[asyncpg.Connection]:
    """Somebody else's connection."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def worker(database: str) -> AsyncIterator[Client]:
    connection = await asyncpg.connect(database)
    yield Client(connection, "worker")
    await connection.close()


class TestClaiming:
    async def test_a_claimed_job_is_locked_and_has_one_more_attempt(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        job = await add(db, payload={"a": 1}, queue_name="q", priority=3, flags=["x"])

        [held] = await worker.claim()

        row = await existing(db, job["id"])
        assert (row["locked_by"], row["attempts"]) == ("worker", 1)
        assert held.locked_at == row["locked_at"]
        assert (held.job.payload, held.job.queue_name, held.job.flags) == ({"a": 1}, "q", frozenset({"x"}))
        assert (held.job.task_identifier, held.job.attempts, held.job.locked_by) == ("task", 1, "worker")
        assert await locked(db) == [("job", job["id"]), ("queue", held.job.job_queue_id)]

    async def test_jobs_come_by_priority_then_time_then_id(
        self, db: asyncpg.Connection, worker: Client
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
    async def test_tasks_compete_by_the_same_order(
        self, db: asyncpg.Connection, worker: Client, wanted: int
    ) -> None:
        worker.identifiers = ("x", "y", "z")
        added = [(await add(db, "xyz"[n * 7 % 3], priority=n % 2))["id"] for n in range(12)]
        claimed: list[int] = []
        while batch := await worker.claim(wanted):
            claimed += ids(batch)
        assert claimed == added[::2] + added[1::2]

    async def test_what_cannot_run_is_left_alone(self, db: asyncpg.Connection, worker: Client) -> None:
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

    async def test_a_time_given_decides_what_is_due(self, db: asyncpg.Connection, worker: Client) -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        job = await add(db, run_at=later)
        assert await worker.claim(as_of=later - timedelta(seconds=1)) == []
        [held] = await worker.claim(as_of=later)
        assert held.job.id == job["id"]
        assert abs(held.locked_at - datetime.now(UTC)) < timedelta(minutes=1), "by the database's clock"

    async def test_future_jobs_of_a_better_priority_are_not_in_the_way(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, null, now() + interval '1 day', null, null, -n % 5, null)
                ::graphile_worker.job_spec from generate_series(1, 500) as n))
        """)
        due = await add(db, priority=7)
        assert ids(await worker.claim(1)) == [due["id"]]

    async def test_one_claim_takes_one_job_of_a_queue(self, db: asyncpg.Connection, worker: Client) -> None:
        added = [await add(db, queue_name=name, priority=n) for n, name in enumerate("aabba")]
        assert ids(await worker.claim()) == [added[0]["id"], added[2]["id"]]
        assert await worker.claim() == []

    async def test_a_run_takes_consecutive_jobs_of_a_queue_under_one_lock(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        added = [(await add(db, queue_name="a", priority=n % 2))["id"] for n in range(6)]
        claimed = await worker.claim(4, run_length=4)
        assert ids(claimed) == [added[0], added[2], added[4], added[1]]
        assert len({id(held.queue) for held in claimed}) == 1


class TestRule1Fence:
    @pytest.mark.parametrize("outcome", [Completed(), Failed(ValueError("no")), Returned()])
    async def test_a_result_of_a_job_that_is_not_ours_any_more_changes_nothing(
        self, db: asyncpg.Connection, worker: Client, outcome: Any
    ) -> None:
        job = await add(db)
        [held] = await worker.claim()
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        [again] = await Client(db, "thief").claim()

        reply = await worker.exchange([done(held, outcome)], 0)

        assert numbers(reply.lost) == {job["id"]}
        row = await existing(db, job["id"])
        assert (row["locked_by"], row["locked_at"], row["last_error"]) == ("thief", again.locked_at, None)

    async def test_not_even_if_the_new_claim_is_our_own(self, db: asyncpg.Connection, worker: Client) -> None:
        job = await add(db)
        [held] = await worker.claim()
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        [again] = await worker.claim()
        assert numbers((await worker.exchange([done(held)], 0)).lost) == {job["id"]}
        assert (await worker.exchange([done(again)], 0)).lost == set()
        assert await count(db) == 0

    @pytest.mark.parametrize("takeover", ["add_job('task', job_key => 'k')", "remove_job('k')"])
    async def test_a_superseded_job_is_deleted_when_it_succeeds(
        self, db: asyncpg.Connection, worker: Client, takeover: str
    ) -> None:
        job = await add(db, job_key="k")
        [held] = await worker.claim()
        await db.execute(f"select graphile_worker.{takeover}")
        assert (await worker.exchange([done(held)], 0)).lost == set()
        assert await get(db, job["id"]) is None

    async def test_the_queue_is_let_go_though_the_job_vanished(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute("delete from graphile_worker._private_jobs")
        assert numbers((await worker.exchange([done(held)], 0)).lost) == {held.job.id}
        assert await locked(db) == []

    async def test_a_queue_that_somebody_else_holds_stays_theirs(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        job = await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute(
            "update graphile_worker._private_job_queues set locked_by = 'thief', locked_at = now()"
        )
        assert (await worker.exchange([done(held)], 0)).lost == set()
        assert await get(db, job["id"]) is None
        assert await locked(db) == [("queue", job["job_queue_id"])]


class TestRule2ClaimOnlyWhatIsLocked:
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
    async def test_a_job_that_is_changed_at_the_same_time_is_claimed_as_it_is(
        self, database: str, db: asyncpg.Connection, worker: Client, change: str, queue: str | None
    ) -> None:
        """Races are lost or won by chance, so many of them are run."""
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
                    row = await one(
                        db,
                        "select locked_by, locked_at from graphile_worker._private_job_queues where id = $1",
                        held.queue.id,
                    )
                    assert tuple(row) == ("worker", held.locked_at), "its own queue, and locked"
            results = [done(held) for held in reply.claimed]
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


class TestRule3NeverWait:
    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_somebodys_transaction_on_the_key_makes_the_result_busy_and_stops_nothing_else(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client, queue: str | None
    ) -> None:
        job = await add(db, job_key="k", queue_name=queue)
        free = await add(db)
        [held, unrelated] = await worker.claim()
        await add(db)
        transaction = other.transaction()
        await transaction.start()
        await add(other, job_key="k", queue_name=queue)

        reply = await worker.exchange([done(held), done(unrelated)])

        assert numbers(reply.busy) == {job["id"]}
        assert reply.lost == set()
        assert await get(db, free["id"]) is None
        assert len(reply.claimed) == 1
        assert (("queue", job["job_queue_id"]) in await locked(db)) == (queue is not None)

        await transaction.commit()
        reply = await worker.exchange([done(held)], 0)
        assert reply.busy == set()
        assert await get(db, job["id"]) is None
        assert len(await locked(db)) == 1

    async def test_a_queue_that_somebody_has_locked_makes_the_result_busy(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        job = await add(db, queue_name="q")
        [held] = await worker.claim()
        transaction = other.transaction()
        await transaction.start()
        await other.execute("select from graphile_worker._private_job_queues for update")
        assert numbers((await worker.exchange([done(held)])).busy) == {job["id"]}
        await transaction.rollback()
        assert (await worker.exchange([done(held)])).busy == set()
        assert await locked(db) == []

    async def test_a_pending_job_that_is_being_changed_lets_the_next_one_go_first(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
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


class TestRule5NoStarvation:
    async def test_a_page_full_of_one_locked_queue_hides_no_other(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, 'big', null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 500) as n))
        """)
        await db.execute("update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()")
        last = [await add(db, queue_name=f"small {n}") for n in range(3)]
        assert ids(await worker.claim(2)) == [job["id"] for job in last[:2]]

    async def test_many_locked_queues_are_visited_some_at_a_time(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, 'q' || n, null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 1200) as n))
        """)
        await db.execute("update graphile_worker._private_job_queues set locked_by = 'x', locked_at = now()")
        last = await add(db, queue_name="last")
        cursor: int | None = 0
        looks = 0
        claimed: list[Held] = []
        while not claimed:
            reply = await worker.exchange((), 1, after_queue=cursor)
            claimed, cursor = reply.claimed, reply.next_queue
            assert claimed or reply.next_queue, "says that it has not seen everything"
            looks += 1
        assert ids(claimed) == [last["id"]]
        assert 1 < looks <= 4

    async def test_a_visit_that_is_spared_is_made_up_for_later(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        first = await add(db, queue_name="small")
        assert (await worker.exchange((), 0, after_queue=None)).next_queue == 0, (
            "there is nothing to be visited"
        )
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
        assert reply.next_queue is None, "says that it has not seen everything"
        assert ids((await worker.exchange((), 2)).claimed) == [last["id"]]

    async def test_of_two_priorities_neither_hides_queues_of_the_other(
        self, db: asyncpg.Connection, worker: Client
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


class TestRule6EmptyIsNotIdle:
    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_rows_that_others_have_locked_are_reported(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client, queue: str | None
    ) -> None:
        await add(db, queue_name=queue)
        await worker.exchange((), 0)
        transaction = other.transaction()
        await transaction.start()
        assert len(await Client(other, "other").claim()) == 1
        reply = await worker.exchange()
        assert (reply.claimed, reply.contended) == ([], True)
        await transaction.commit()
        reply = await worker.exchange()
        assert (reply.claimed, reply.contended) == ([], False)

    async def test_the_next_due_time_leaves_out_locked_queues(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        soon, later = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, 2))
        await add(db, queue_name="q")
        await worker.claim()
        await add(db, queue_name="q", run_at=soon)
        await add(db, queue_name="free", run_at=later, priority=9)
        assert (await worker.exchange()).next_due == later

    async def test_letting_go_of_a_queue_with_jobs_tells_others(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await add(db, "not ours", queue_name="q")
        await other.add_listener("jobs:insert", lambda *message: heard.put_nowait(message[-1]))
        await worker.exchange([done(held)])
        async with asyncio.timeout(10):
            assert json.loads(await heard.get())["count"] == 1
        await other.reset()


class TestRule8PlannerSettings:
    async def test_its_plans_do_not_depend_on_the_session_or_on_statistics(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        settings = await db.fetchval(
            "select proconfig from pg_proc where proname = '_private_python_exchange_v2'"
        )
        assert {"jit=off", "plan_cache_mode=force_generic_plan", "enable_seqscan=off"} <= set(settings)
        await add(db)
        await worker.connection.execute("set enable_indexscan = on; set plan_cache_mode = force_custom_plan")
        assert len(await worker.claim()) == 1
        kept = await worker.connection.fetchval("show plan_cache_mode")
        assert kept == "force_custom_plan", "the session's own settings stay"

    async def test_a_claim_reads_few_pages_however_many_jobs_are_due_at_the_same_moment(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        """With such statistics an index without the id, and a sort, looks good; and reads all of them."""
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
            await worker.exchange([done(held) for held in claimed], 0)
        mark = claimed[-1].order
        await db.execute("vacuum analyze graphile_worker._private_jobs")
        plan = await db.fetchval(
            """explain (analyze, buffers, format json)
            select * from graphile_worker._private_python_exchange_v2(
              'a worker', '{}', '{}', null, null, null,
              array(select id from graphile_worker._private_tasks), 10, 1, null, now(), $1, $2, $3, 0, null,
              false, null
            )""",
            *mark,
        )
        await snapshot.rollback()
        [top] = json.loads(plan)
        assert top["Plan"]["Actual Rows"] == 11
        assert top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"] < 1000


class TestRule9Watermark:
    async def test_a_look_from_a_position_on_does_not_walk_past_what_is_gone(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        """With an old transaction open, index entries of deleted jobs stay."""
        await db.execute("""
            select graphile_worker.add_jobs(array(
              select row('task', null, null, null, null, null, null, null)
                ::graphile_worker.job_spec from generate_series(1, 21000) as n))
        """)
        old = other.transaction(isolation="repeatable_read")
        await old.start()
        await other.fetchval("select count(*) from graphile_worker._private_jobs")
        claimed = await worker.claim(20000)
        await worker.exchange([done(held) for held in claimed], 0)
        mark = Position(*claimed[-1].order)

        async def pages_read(mark: Position | None) -> int:
            tasks = "array[(select id from graphile_worker._private_tasks)]"
            place = "null, null, null" if mark is None else f"{mark[0]}::smallint, '{mark[1]}', {mark[2]}"
            transaction = db.transaction()
            await transaction.start()
            plan = await db.fetchval(
                f"""explain (analyze, buffers, format json)
                select * from graphile_worker._private_python_exchange_v2(
                  'probe', '{{}}', '{{}}', '{{}}', '{{}}', null, {tasks}, 10, 1, null, now(), {place}, 0,
                  null, false, null
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

    async def test_a_position_leaves_out_what_comes_before_it_and_nothing_else(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        added = [await add(db, priority=priority) for priority in (0, 0, -5, 3)]
        middle = added[0]
        mark = Position(middle["priority"], middle["run_at"], middle["id"])
        assert ids(await worker.claim(mark=mark)) == [added[1]["id"], added[3]["id"]]
        assert ids(await worker.claim()) == [added[2]["id"], middle["id"]]

    async def test_but_the_jobs_of_a_queue_keep_their_order(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        """Those before the position may have been left because their queue was locked then."""
        one, two, three = [
            [(await add(db, queue_name=queue, priority=priority))["id"] for priority in priorities]
            for queue, priorities in (("one", (0, 0)), ("two", (-5, 0, 0)), ("three", (0, 3)))
        ]
        last = await existing(db, three[0])
        mark = Position(0, last["run_at"], last["id"])
        behind = await add(db, queue_name="one")
        assert behind["id"] > mark.id

        assert await worker.claim(mark=mark) == [], "of a queue the first, or none"

        assert ids(await worker.claim()) == [two[0], one[0], three[0]]


class TestRule10LockWhatIsClaimed:
    async def test_no_row_is_locked_that_is_not_claimed(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
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
    async def test_a_failure_is_retried_by_the_formula(self, db: asyncpg.Connection, worker: Client) -> None:
        job = await add(db, payload=[1], queue_name="q", max_attempts=3)
        for attempt, delay in ((1, 2.718281828), (2, 7.389056099), (3, 20.08553692)):
            await db.execute("update graphile_worker._private_jobs set run_at = now() - interval '1 hour'")
            [held] = await worker.claim()
            reply = await worker.exchange([done(held, Failed(ValueError(f"no {attempt}")))], 0)
            row = await existing(db, job["id"])
            assert (row["attempts"], row["last_error"], row["locked_at"]) == (attempt, f"no {attempt}", None)
            assert abs((row["run_at"] - reply.now).total_seconds() - delay) < 0.001
            assert row["updated_at"] == job["updated_at"], "as everybody else leaves it"
        assert not (await existing(db, job["id"]))["is_available"]
        assert await locked(db) == []

    async def test_the_retry_counts_from_a_later_run_at(self, db: asyncpg.Connection, worker: Client) -> None:
        job = await add(db)
        [held] = await worker.claim()
        later = datetime.now(UTC) + timedelta(hours=1)
        await db.execute("update graphile_worker._private_jobs set run_at = $1", later)
        await worker.exchange([done(held, Failed(ValueError()))], 0)
        row = await existing(db, job["id"])
        assert abs((row["run_at"] - later).total_seconds() - 2.718281828) < 0.001
        assert row["last_error"] == "ValueError"

    async def test_the_delay_stops_growing_at_the_tenth_attempt(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        job = await add(db)
        await db.execute("update graphile_worker._private_jobs set attempts = 14")
        [held] = await worker.claim()
        reply = await worker.exchange([done(held, Failed(ValueError()))], 0)
        row = await existing(db, job["id"])
        assert abs((row["run_at"] - reply.now).total_seconds() - 22026.4657948) < 0.001

    async def test_an_error_text_that_cannot_be_stored_is_stored_all_the_same(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        class Unprintable(Exception):  # noqa: N818
            def __str__(self) -> str:
                raise RuntimeError

        errors = [ValueError("a\0b\ud800"), ValueError("x" * 100_000), Unprintable()]
        jobs = [await add(db) for _ in errors]
        claimed = await worker.claim()
        await worker.exchange([done(h, Failed(e)) for h, e in zip(claimed, errors, strict=True)], 0)
        texts = [(await existing(db, job["id"]))["last_error"] for job in jobs]
        assert texts[0] == "a\\0b\\ud800"
        assert len(texts[1]) == 10_001
        assert texts[2] == "Unprintable"

    async def test_an_interrupted_job_gets_its_attempt_back(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        job = await add(db, queue_name="q", job_key="k")
        [held] = await worker.claim()
        reply = await worker.exchange([done(held, Interrupted(30))], 0)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["last_error"], row["locked_by"]) == (0, None, None)
        assert row["run_at"] == reply.now + timedelta(seconds=30)
        assert await locked(db) == []

    @pytest.mark.parametrize("max_attempts", [1, 25])
    @pytest.mark.parametrize("takeover", ["add_job('task', job_key => 'k')", "remove_job('k')"])
    async def test_a_superseded_job_is_not_revived_when_it_is_interrupted(
        self, db: asyncpg.Connection, worker: Client, takeover: str, max_attempts: int
    ) -> None:
        job = await add(db, job_key="k", max_attempts=max_attempts)
        [held] = await worker.claim()
        await db.execute(f"select graphile_worker.{takeover}")
        await worker.exchange([done(held, Interrupted())], 0)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["locked_at"], row["is_available"]) == (max_attempts, None, False)

    async def test_what_is_given_back_is_announced(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        await add(db)
        await add(db)
        claimed = await worker.claim()
        heard: asyncio.Queue[str] = asyncio.Queue()
        await other.add_listener("jobs:insert", lambda *message: heard.put_nowait(message[-1]))
        await worker.exchange([done(held, Returned()) for held in claimed], 0)
        async with asyncio.timeout(10):
            assert json.loads(await heard.get())["count"] == 2
        await other.reset()

    async def test_what_is_left_of_a_huge_batch_takes_no_time_for_each_pair_of_items(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        """Others wait meanwhile. Done one by one it takes 2 seconds, and pair by pair 3 minutes."""
        items = list(range(200_000))
        job = await add(db, payload=items)
        [held] = await worker.claim()
        worker.patience = 60
        await worker.connection.execute("set statement_timeout = '30s'")
        await worker.exchange([done(held, Failed(ValueError(), left=items[::2]))], 0)
        assert json.loads((await existing(db, job["id"]))["payload"]) == items[::2]

    async def test_a_payload_that_python_cannot_read_spoils_no_other_job(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await db.execute("select graphile_worker.add_job('task', ('[' || repeat('9', 5000) || ']')::json)")
        await add(db, payload=1)
        bad, good = await worker.claim()
        assert bad.unreadable is not None
        assert good.job.payload == 1


class TestSerialQueues:
    async def test_a_finished_job_hands_its_queue_on_to_the_next_in_the_same_call(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        added = [(await add(db, queue_name="q"))["id"] for _ in range(3)]
        [held] = await worker.claim()
        order = [held.job.id]
        for _ in range(2):
            [held] = (await worker.exchange([done(held)])).claimed
            order.append(held.job.id)
        assert order == added
        await worker.exchange([done(held)])
        assert await locked(db) == []

    async def test_a_kept_queue_competes_by_order_and_is_let_go_if_it_loses(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await add(db, queue_name="q", priority=5)
        better = await add(db)
        assert ids((await worker.exchange([done(held)], 1)).claimed) == [better["id"]]
        assert await locked(db) == [("job", better["id"])]

    async def test_the_queue_of_a_run_stays_locked_until_its_last_job(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        added = [await add(db, queue_name="q") for _ in range(3)]
        first, second = await worker.claim(2, run_length=2)
        await worker.exchange([Result(first, Completed(), None)], 0)
        assert await Client(other, "other").claim() == []
        reply = await worker.exchange([Result(second, Completed(), second.queue)], 1)
        assert ids(reply.claimed) == [added[2]["id"]]


class TestAfterALostConnection:
    async def test_what_is_ours_is_read_when_no_call_is_under_way(
        self, database: str, db: asyncpg.Connection, worker: Client
    ) -> None:
        job = await add(db, queue_name="q")
        tasks = await register(db)
        lost = await asyncpg.connect(database)
        client = Client(lost, "worker")
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

    async def test_a_call_that_arrives_too_late_does_nothing(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        """As out of a pooler that was frozen: the worker has read back what it holds, and counts on it."""
        await add(db)
        tasks = await register(db)
        worker.generation = (await read_locked(worker, tasks)).generation
        reader = other.transaction()
        await reader.start()
        later = await read_locked(Client(other, "worker"), tasks)
        with pytest.raises(asyncpg.LockNotAvailableError):
            await worker.exchange()
        await reader.commit()
        with pytest.raises(asyncpg.PostgresError, match="given up"):
            await worker.exchange()
        assert await locked(db) == []
        worker.generation = later.generation
        assert len(await worker.claim()) == 1

    async def test_a_late_renewal_leaves_the_locks_that_were_read_back(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        tasks = await register(db)
        worker.generation = (await read_locked(worker, tasks)).generation
        await add(db, queue_name="q")
        [held] = await worker.claim()
        assert held.queue is not None
        [found] = (await read_locked(worker, tasks)).jobs
        with pytest.raises(GivenUpError):
            await database.renew(
                worker.connection, SCHEMA, "worker", [held], [held.queue], generation=worker.generation
            )
        assert (await existing(db, held.job.id))["locked_at"] == found.locked_at

    async def test_a_late_release_leaves_a_queue_that_was_locked_again(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        assert held.queue is not None
        spare = {held.queue.id: held.queue.locked_at}
        await worker.exchange([done(held)], 0)
        await add(db, queue_name="q")
        await worker.claim()
        assert await database.unlock_queues(worker.connection, SCHEMA, "worker", spare) == set()
        assert [kind for kind, _ in await locked(db)] == ["job", "queue"]

    async def test_reading_back_gives_up_waiting_for_a_call_that_hangs(
        self, database: str, db: asyncpg.Connection, worker: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.exchange._LONGEST_WAIT", 0.05)
        tasks = await register(db)
        hung = Client(await asyncpg.connect(database), "worker")
        hung.generation = (await read_locked(hung, tasks)).generation
        async with hung.connection.transaction():
            await hung.exchange()
            with pytest.raises(asyncpg.LockNotAvailableError):
                await read_locked(worker, tasks)
        assert (await read_locked(worker, tasks)).generation == hung.generation + 1
        await hung.connection.close()

    async def test_a_stranger_with_all_advisory_locks_stalls_nothing(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        await other.execute("create role gw_stranger")
        await other.execute("set role gw_stranger")
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
        await other.execute("reset role; drop role gw_stranger")


async def register(db: asyncpg.Connection) -> dict[int, str]:
    return await database.register_tasks(db, SCHEMA, ["task"])


async def read_locked(worker: Client, tasks: dict[int, str]) -> database.Locked:
    return await database.read_locked(worker.connection, SCHEMA, "worker", tasks)


class TestLongHeldLocks:
    async def test_renewal_moves_job_and_queue_and_results_still_fit(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        before = held.locked_at
        assert held.queue is not None
        await database.renew(worker.connection, SCHEMA, "worker", [held], [held.queue])
        assert held.locked_at > before
        assert held.queue.locked_at == held.locked_at
        assert (await worker.exchange([done(held)])).lost == set()
        assert await locked(db) == []

    async def test_renewal_does_not_take_back_what_was_lost(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        await add(db, queue_name="q")
        [held] = await worker.claim()
        await db.execute("select graphile_worker.force_unlock_workers(array['worker'])")
        assert held.queue is not None
        queue = replace(held.queue)
        await database.renew(worker.connection, SCHEMA, "worker", [held], [queue])
        assert await locked(db) == []

    async def test_locks_older_than_four_hours_are_freed_and_younger_ones_not(
        self, db: asyncpg.Connection, worker: Client
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

    async def test_freeing_waits_for_nobody(self, db: asyncpg.Connection, other: asyncpg.Connection) -> None:
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


async def test_a_payload_that_cannot_be_read_does_not_keep_the_jobs_that_came_with_it(
    db: asyncpg.Connection, worker: Client
) -> None:
    await add(db)
    await db.execute(
        """update graphile_worker._private_jobs set payload = ('{"n": ' || repeat('9', 6000) || '}')::json"""
    )
    [held] = await worker.claim()
    assert held.unreadable is not None
    # A traceback refers to what the frames in it refer to, and so to the whole reply.
    assert (held.unreadable.__traceback__, held.unreadable.__context__) == (None, None)


class TestRecordingAtOnce:
    """All that is completed is deleted at once, unless something stands in the way."""

    async def test_what_the_session_has_set_for_locks_stays(
        self, db: asyncpg.Connection, other: asyncpg.Connection, worker: Client
    ) -> None:
        await worker.connection.execute("set lock_timeout = '7s'")
        jobs = [await add(db) for _ in range(3)]
        claimed = await worker.claim(3)
        async with other.transaction():
            await other.execute(
                "select from graphile_worker._private_jobs where id = $1 for update", jobs[1]["id"]
            )
            reply = await worker.exchange([done(held) for held in claimed], 0)
            assert {claim.job_id for claim in reply.busy} == {jobs[1]["id"]}
            assert await worker.connection.fetchval("show lock_timeout") == "7s"
        reply = await worker.exchange([done(claimed[1])], 0)
        assert (reply.busy, reply.lost) == (set(), set())
        assert await worker.connection.fetchval("show lock_timeout") == "7s"
        assert await count(db) == 0

    async def test_one_that_is_lost_does_not_keep_the_others_from_being_recorded(
        self, db: asyncpg.Connection, worker: Client
    ) -> None:
        jobs = [await add(db) for _ in range(3)]
        claimed = await worker.claim(3)
        await db.execute(
            "update graphile_worker._private_jobs set locked_by = 'other' where id = $1", jobs[2]["id"]
        )
        reply = await worker.exchange([done(held) for held in claimed], 0)
        assert {claim.job_id for claim in reply.lost} == {jobs[2]["id"]}
        assert await count(db) == 1
