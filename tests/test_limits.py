"""Named limits hold across workers, whatever happens to these; and limits of one worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import pytest

from graphile_worker import App, ConfigurationError, JobContext, Limit, RunSummary, WorkerUtils, run
from graphile_worker._db.queries.exchange import ClaimedJob
from graphile_worker._db.queries.limits import LimitCounts, end_lost_shares, end_shares, register_limits
from graphile_worker._db.sql_files import Schema, read_script
from graphile_worker._worker.claiming.named_limits import NamedLimits
from graphile_worker.doctor import Level, examine
from graphile_worker.outcome import Failed
from support.commands import Cli
from support.jobs import add, count, lock
from support.pages import Page
from support.waiting import until, until_blocked
from support.workers import Gate
from test_exchange import ExchangeWorker, ids, result_of
from test_recovery import TimedSweeper, register_worker, session, timed_sweeper

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from graphile_worker._db.queries.exchange import ExchangeReply, Result

__all__ = ["session", "timed_sweeper"]

SCHEMA = Schema()
TASKS = ("task", "second", "free")


class LimitedWorker:
    """A worker reduced to its exchanges, with limits that "task" and "second" share."""

    def __init__(self, connection: asyncpg.Connection, name: str, limit: Limit) -> None:
        self.exchanges = ExchangeWorker(connection, name, *TASKS)
        self.limits = NamedLimits({"task": limit, "second": limit})
        self.held: list[ClaimedJob] = []

    async def exchange(
        self, results: Sequence[Result] = (), wanted: int = 10, **request: Any
    ) -> ExchangeReply:
        if not self.limits.ids:
            connection = self.exchanges.connection
            self.limits.ids = (await register_limits(connection, SCHEMA, self.limits.by_task)).ids
        recorded = [result.held for result in results]
        counts = self.limits.count(self.held, recorded if not self.exchanges.careful else ())
        reply = await self.exchanges.exchange(results, wanted, limits=counts, **request)
        unrecorded = {*reply.busy, *reply.refused}
        ended = [held for held in recorded if held.claim not in unrecorded]
        self.held = [held for held in self.held if held not in ended] + reply.claimed
        return reply

    async def claim(self, wanted: int = 10, **request: Any) -> list[int]:
        return ids((await self.exchange((), wanted, **request)).claimed)

    async def end(self, number: int = 1, wanted: int = 10) -> list[int]:
        """Complete jobs, and claim more in the same exchange. Return the claimed jobs."""
        results = [result_of(held) for held in self.held[:number]]
        return ids((await self.exchange(results, wanted)).claimed)


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


@pytest.fixture
async def connections(database: str) -> AsyncIterator[list[asyncpg.Connection]]:
    found = [await asyncpg.connect(database) for _ in range(3)]
    yield found
    for connection in found:
        await connection.close()


async def shares(db: asyncpg.Connection) -> dict[str, int]:
    rows = await db.fetch("select worker_id, held from graphile_worker._private_python_shares where held > 0")
    return {row["worker_id"]: row["held"] for row in rows}


async def set_limit(db: asyncpg.Connection, concurrency: int | None) -> None:
    await db.execute(
        "update graphile_worker._private_python_limits set concurrency_override = $1", concurrency
    )


async def add_jobs(db: asyncpg.Connection, number: int, *tasks: str, **options: Any) -> list[int]:
    return [(await add(db, task, **options))["id"] for _ in range(number) for task in tasks or ("task",)]


async def wait_longer_than_any_mark_counts(db: asyncpg.Connection) -> None:
    """Make the time long ago at which a worker found no room."""
    await db.execute(
        "update graphile_worker._private_python_limits set wanted_at = wanted_at - interval '1 hour'"
    )


class TestShares:
    async def test_claims_of_one_worker_and_of_two_stay_within_the_limit(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 3)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        jobs = await add_jobs(db, 6)
        assert await one.claim(2) == jobs[:2]
        assert await two.claim() == jobs[2:3]
        assert await one.claim() == []
        assert await shares(db) == {"a": 2, "b": 1}
        assert await one.end() == [jobs[3]]
        assert await one.end(2, wanted=0) == []
        assert await shares(db) == {"b": 1}

    async def test_tasks_that_share_a_limit_are_claimed_in_their_common_order(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 3))
        jobs = await add_jobs(db, 3, "second", "task")
        assert await worker.claim() == jobs[:3]

    @pytest.mark.parametrize("queue", [None, "q"])
    async def test_unlimited_jobs_behind_limited_ones_are_claimed_in_the_same_exchange(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], queue: str | None
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 1))
        limited = [
            (await add(db, "task", queue_name=None if queue is None else f"{queue} {n}"))["id"]
            for n in range(20)
        ]
        free = await add_jobs(db, 4, "free")
        late = await add_jobs(db, 2, "free", priority=5)
        assert await worker.claim(7) == [limited[0], *free, *late]
        assert await worker.claim() == []
        assert await shares(db) == {"a": 1}

    @pytest.mark.parametrize("flags", [None, ["never"]])
    async def test_jobs_with_flags_and_queues_stay_within_the_limit(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], flags: list[str] | None
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 3))
        for n in range(4):
            await add(db, "task", flags=["x"], queue_name=f"q{n}")
            await add(db, "second", flags=["y"])
            await add(db, "task", priority=n)
            await add(db, "second", queue_name="one queue")
        free = await add_jobs(db, 2, "free", priority=9)
        claimed = await worker.claim(12, forbidden_flags=flags, run_length=4)
        assert set(free) < set(claimed)
        assert len(claimed) == 5
        assert await shares(db) == {"a": 3}

    async def test_jobs_of_a_serial_queue_with_a_limit_never_overlap(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 2)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        jobs = await add_jobs(db, 3, queue_name="q")
        assert await one.claim() == jobs[:1]
        assert await two.claim() == []
        assert await one.end() == jobs[1:2]
        assert await one.end(wanted=0) == []
        assert await two.claim() == jobs[2:]

    async def test_limit_that_is_lowered_drains_and_that_is_raised_is_used(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 4))
        await add_jobs(db, 20)
        assert len(await worker.claim()) == 4
        await set_limit(db, 2)
        assert await worker.end() == []
        assert await worker.end() == []
        assert await shares(db) == {"a": 2}
        assert len(await worker.end()) == 1
        await set_limit(db, 6)
        assert len(await worker.claim()) == 4
        await set_limit(db, 0)
        assert await worker.end(6) == []
        await set_limit(db, None)
        assert len(await worker.claim()) == 4

    async def test_second_worker_gets_room_although_the_first_has_a_backlog(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 1)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        await add_jobs(db, 20)
        assert len(await one.claim()) == 1
        turns = Counter[str]()
        busy, waiting = one, two
        for _ in range(6):
            assert await waiting.claim() == []
            assert await busy.end() == [], "its share is given up for the worker that waits"
            assert len(await waiting.claim()) == 1
            turns[waiting.exchanges.name] += 1
            busy, waiting = waiting, busy
        assert turns == {"a": 3, "b": 3}

    async def test_released_share_is_announced_to_workers_that_wait(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 2)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        heard: list[object] = []
        await add_jobs(db, 1)
        await one.claim()
        await db.add_listener("jobs:insert", lambda *message: heard.append(message))
        await one.end(1)
        await db.execute("select 1")
        assert heard == [], "no worker waits"
        await add_jobs(db, 4, "second")
        await one.claim(2)
        assert await two.claim() == []
        await wait_longer_than_any_mark_counts(db)
        heard.clear()
        await one.end(1, wanted=0)

        async def has_heard() -> bool:
            await db.execute("select 1")
            return bool(heard)

        await until(has_heard, "the notification arrives")

    @pytest.mark.parametrize("options", [{}, {"flags": ["x"]}, {"queue_name": "q"}], ids=str)
    async def test_due_job_is_found_behind_jobs_of_better_priority_that_are_due_later(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], options: dict[str, Any]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 3))
        [due] = await add_jobs(db, 1, priority=5, **options)
        await add_jobs(db, 10, priority=0, run_at=datetime.now(UTC) + timedelta(days=7), **options)
        assert await worker.claim() == [due]

    @pytest.mark.parametrize("options", [{}, {"flags": ["x"]}, {"queue_name": "q"}], ids=str)
    async def test_worker_without_a_share_learns_when_the_next_job_is_due(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], options: dict[str, Any]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 3))
        due = datetime.now(UTC) + timedelta(minutes=3)
        await add_jobs(db, 1, run_at=due + timedelta(hours=1), **options)
        await add_jobs(db, 1, priority=3, run_at=due, **options)
        assert (await worker.exchange()).next_due == due

    @pytest.mark.parametrize("reason", ["queue", "flags", "left out", "room"])
    async def test_worker_that_can_run_no_due_job_takes_no_room_from_others(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], reason: str
    ) -> None:
        limit = Limit("stripe", 1)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        options: dict[str, dict[str, Any]] = {"queue": {"queue_name": "q"}, "flags": {"flags": ["x"]}}
        jobs = await add_jobs(db, 2, **options.get(reason, {}))
        requests: dict[str, dict[str, Any]] = {
            "queue": {},
            "flags": {"forbidden_flags": ["x"]},
            "left out": {"left_out": jobs},
            "room": {"rooms": {"task": 0}},
        }
        assert await one.claim() == jobs[:1]
        assert await two.claim(**requests[reason]) == []
        marks = "select wanted_at from graphile_worker._private_python_limits"
        assert await db.fetchval(marks) is None
        assert await one.end() == jobs[1:]

    async def test_jobs_in_very_many_locked_queues_hide_no_other_job(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 1))
        await add_jobs(db, 1, queue_name="locked")
        await add_jobs(db, 1, queue_name="free")
        await db.execute("""
            update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'other'
            where queue_name = 'locked'""")
        await db.execute("""
            insert into graphile_worker._private_jobs (task_id, job_queue_id, payload, run_at)
            select task_id, job_queue_id, '{}', run_at - interval '1 hour'
            from (select * from graphile_worker._private_jobs order by id limit 1) as job
            cross join generate_series(1, 1100)""")
        assert len(await worker.claim()) == 1

    async def test_idle_exchange_writes_nothing(self, connections: list[asyncpg.Connection]) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 2))
        await worker.claim()
        async with connections[0].transaction():
            await worker.claim()
            assert await connections[0].fetchval("select txid_current_if_assigned()") is None


class TestInterleavedExchanges:
    """Two exchanges at once, the second of which runs while the first has not committed."""

    async def test_second_worker_cannot_grow_while_the_first_grows_and_tries_again(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 4)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        await add_jobs(db, 20)
        await two.claim(0)
        await one.claim(0)
        async with connections[0].transaction():
            assert len(await one.claim(3)) == 3
            reply = await two.exchange((), 10)
            assert (reply.claimed, reply.contended) == ([], True)
        assert len(await two.claim()) == 1

    async def test_share_that_is_being_released_cannot_be_claimed_before_the_commit(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 2)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        await add_jobs(db, 2)
        await one.claim()
        await add_jobs(db, 5, "second")
        async with connections[0].transaction():
            await one.end(2, wanted=0)
            assert await two.claim() == []
        assert len(await two.claim()) == 2

    async def test_rolled_back_claim_leaves_no_share(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 2)
        one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        await add_jobs(db, 5)
        await one.claim(0)
        transaction = connections[0].transaction()
        await transaction.start()
        assert len(await one.claim()) == 2
        await transaction.rollback()
        assert len(await two.claim()) == 2

    async def test_busy_result_still_counts(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 2))
        jobs = await add_jobs(db, 6)
        await worker.claim()
        async with db.transaction():
            await db.execute("select from graphile_worker._private_jobs where id = $1 for update", jobs[0])
            assert await worker.end(2) == [jobs[2]]
        assert await shares(db) == {"a": 2}
        assert await worker.end(2) == jobs[3:5]

    async def test_careful_exchange_stays_within_the_limit(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 2))
        jobs = await add_jobs(db, 6)
        await worker.claim()
        worker.exchanges.careful = True
        assert await worker.end(2) == []  # the worker does not know yet which results will be refused
        assert await worker.claim() == jobs[2:4]
        assert await shares(db) == {"a": 2}

    async def test_failed_job_gives_its_room_back(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 1))
        jobs = await add_jobs(db, 2)
        await worker.claim()
        failed = result_of(worker.held[0], Failed(ValueError("oops"), delay=60.0))
        assert ids((await worker.exchange([failed])).claimed) == jobs[1:]


class Interleaved:
    """Stops the exchanges of the worker "b" at one place, until the test has finished something else."""

    PLACES = (
        "      select\n          array_agg(coalesce(known.size",
        "        limit_turns := array(",
        "          select coalesce(sum(known.held), 0) into share",
        (
            "            insert into {schema}._private_python_shares (limit_id, worker_id, held)\n"
            "              values (limit_ids[place], worker, limit_shares[place])"
        ),
        "  started := clock_timestamp();",
        "    if careful then\n      claimed := '{}';",
        "      share := job_counts[place] + used[place] - limit_rooms[place];",
    )

    def __init__(self, db: asyncpg.Connection, place: str, text: str) -> None:
        self._db = db
        where = text.index(place)
        stop = "if worker = 'b' then perform pg_advisory_xact_lock_shared(42); end if;\n"
        self._text = text[:where] + stop + text[where:]

    async def __aenter__(self) -> None:
        await self._db.execute(SCHEMA.render(self._text))
        await self._db.execute("select pg_advisory_lock(42)")

    async def __aexit__(self, *_error: object) -> None:
        await self._db.execute("select pg_advisory_unlock(42)")


def exchange_sql() -> str:
    return read_script("own/012_exchange.sql")


async def race(db: asyncpg.Connection, connections: list[asyncpg.Connection], place: str, text: str) -> int:
    """Let one worker claim, end and claim while another one is in the middle of a claim.

    Returns how many jobs both hold at most, of a limit of 2.
    """
    limit = Limit("stripe", 2)
    one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
    await add_jobs(db, 10, "task", "second")
    await one.claim(0)
    await two.claim(0)
    await one.claim(1)
    async with Interleaved(db, place, text):
        claiming = asyncio.create_task(two.claim())
        await until_blocked(connections[2], two.exchanges.connection.get_server_pid())
        await one.claim()
        peak = len(one.held)
        await one.end(1)
        peak = max(peak, len(one.held))
    await claiming
    return max(peak, len(one.held) + len(two.held))


class TestRaces:
    @pytest.mark.parametrize("place", Interleaved.PLACES, ids=range(len(Interleaved.PLACES)))
    async def test_limit_holds_wherever_another_exchange_stands(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], place: str
    ) -> None:
        assert exchange_sql().count(place) == 1, "update PLACES"
        assert await race(db, connections, place, exchange_sql()) <= 2

    async def test_limit_is_exceeded_if_the_sum_is_not_read_again_under_the_lock(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        guard = """          select coalesce(sum(known.held), 0) into share
            from {schema}._private_python_shares as known where known.limit_id = limit_ids[place];
"""
        assert exchange_sql().count(guard) == 1, "the guard has changed"
        text = exchange_sql().replace(guard, "        share := limit_totals[place];\n")
        assert await race(db, connections, Interleaved.PLACES[1], text) > 2


Connections: TypeAlias = "list[asyncpg.Connection]"


async def tasks_of_a_limit_share_it(db: asyncpg.Connection, connections: Connections) -> bool:
    worker = LimitedWorker(connections[0], "a", Limit("stripe", 2))
    await add_jobs(db, 3, "task", "second")
    return len(await worker.claim()) <= 2


async def lowered_limit_drains(db: asyncpg.Connection, connections: Connections) -> bool:
    worker = LimitedWorker(connections[0], "a", Limit("stripe", 4))
    await add_jobs(db, 10)
    await worker.claim()
    await set_limit(db, 2)
    return await worker.end() == []


async def busy_job_counts(db: asyncpg.Connection, connections: Connections) -> bool:
    worker = LimitedWorker(connections[0], "a", Limit("stripe", 2))
    jobs = await add_jobs(db, 6)
    await worker.claim()
    async with db.transaction():
        await db.execute("select from graphile_worker._private_jobs where id = $1 for update", jobs[0])
        return len(await worker.end(2)) == 1


async def starving_worker_gets_room(db: asyncpg.Connection, connections: Connections) -> bool:
    limit = Limit("stripe", 1)
    one, two = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
    await add_jobs(db, 10)
    await one.claim()
    await two.claim()
    await one.end()
    return len(await two.claim()) == 1


GUARDS: dict[Callable[[asyncpg.Connection, Connections], Awaitable[bool]], tuple[str, str]] = {
    tasks_of_a_limit_share_it: (
        "ranked.place_in_limit > coalesce(ranked.limit_room, 2147483647)",
        "false",
    ),
    lowered_limit_drains: (" - greatest(0, limit_totals[place] - limit_sizes[place])", ""),
    busy_job_counts: ("job_counts[place] := job_counts[place] + count;", "null;"),
    starving_worker_gets_room: ("if limit_starves[place] and limit_totals", "if false and limit_totals"),
}


class TestGuards:
    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_is_kept(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], promise: Any
    ) -> None:
        assert await promise(db, connections)

    @pytest.mark.parametrize("promise", GUARDS, ids=lambda promise: promise.__name__)
    async def test_promise_fails_without_its_guard(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], promise: Any
    ) -> None:
        before, after = GUARDS[promise]
        assert exchange_sql().count(before) == 1, "update GUARDS: the guard has changed"
        await db.execute(SCHEMA.render(exchange_sql().replace(before, after)))
        assert not await promise(db, connections)


class TestSweeps:
    async def test_share_of_a_dead_worker_is_free_after_the_sweep(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection], timed_sweeper: TimedSweeper
    ) -> None:
        await register_worker(db, "dead")
        limit = Limit("stripe", 2)
        dead, other = LimitedWorker(connections[0], "dead", limit), LimitedWorker(connections[1], "b", limit)
        await add_jobs(db, 5)
        assert len(await dead.claim()) == 2
        assert await other.claim() == []
        await timed_sweeper.run_for(60)
        assert await shares(db) == {}
        assert len(await other.claim()) == 2


class TestWorkers:
    async def test_two_workers_stay_within_the_limit_of_two_tasks_and_run_all_jobs(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app = App(dsn=database)
        limit = Limit("stripe", 3)
        now: Counter[str] = Counter()
        peaks: Counter[str] = Counter()

        async def work(task: str) -> None:
            now.update([task, "all"])
            for name in (task, "all"):
                peaks[name] = max(peaks[name], now[name])
            await asyncio.sleep(0.002)
            now.subtract([task, "all"])

        @app.task(limit=limit)
        async def charge() -> None:
            await work("charge")

        @app.task(limit=limit, worker_limit=1)
        async def refund() -> None:
            await work("refund")

        await charge.enqueue_many([{}] * 60)
        await refund.enqueue_many([{}] * 60)
        async with app.running(concurrency=5), app.running(concurrency=5):

            async def is_empty() -> bool:
                return await count(db) == 0

            await until(is_empty, "all jobs have run", within=60)
            assert [state.concurrency for state in await app.utils.limits()] == [3]
        await app.close()
        assert peaks["all"] == 3
        assert peaks["refund"] <= 2
        assert await shares(db) == {}
        assert await db.fetchval("select count(*) from graphile_worker._private_python_shares") == 0

    async def test_worker_without_recovery_refuses_a_limit_with_the_reason(self, database: str) -> None:
        app = App(dsn=database)

        @app.task(limit=Limit("stripe", 3))
        async def charge() -> None: ...

        with pytest.raises(ConfigurationError, match="recovery is off: charge"):
            async with app.running(recovery=False):
                pass

    async def test_run_once_runs_limited_jobs(self, database: str) -> None:
        app = App(dsn=database)

        @app.task(limit=Limit("stripe", 2))
        async def charge() -> None: ...

        await charge.enqueue_many([{}] * 7)
        assert await app.run_once(handle_signals=False) == RunSummary(succeeded=7)
        await app.close()

    async def test_limit_that_is_raised_at_run_time_starts_waiting_jobs_at_once(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app, gate = App(dsn=database), Gate()

        @app.task(limit=Limit("stripe", 1))
        async def charge() -> None:
            await gate(None)

        await charge.enqueue_many([{}] * 3)
        async with app.running(concurrency=5, poll_interval=3600) as runner:

            async def listens() -> bool:
                return runner.health().listening

            await until(listens, "the worker listens")
            await gate.until_started(1)
            await app.utils.set_limit("stripe", 3)
            await gate.until_started(3)
            gate.open()
        assert await count(db) == 0
        await app.close()

    @pytest.mark.parametrize("ending", ["its own transaction", "an exchange job by job"])
    async def test_stopping_worker_gives_the_share_of_an_ended_job_up_while_another_one_runs(
        self, database: str, db: asyncpg.Connection, ending: str
    ) -> None:
        app, gate, ends = App(dsn=database), Gate(), asyncio.Event()
        is_own = ending == "its own transaction"

        @app.task(limit=Limit("stripe", 3))
        async def charge(ctx: JobContext, number: int) -> None:
            if number == 1:
                await gate(number)
            else:
                gate.started.append(number)
                await ends.wait()
                if is_own:
                    async with ctx.transaction():
                        pass

        for number in (1, 2, 3):
            await charge.enqueue(number=number)
        if not is_own:
            # The server refuses the first exchange that records a job, so the worker repeats it job by job.
            await db.execute("""
                create sequence public.calls;
                create function refuse() returns trigger language plpgsql as $$
                begin
                  if nextval('public.calls') = 1 then
                    raise 'refused' using errcode = 'check_violation';
                  end if;
                  return old;
                end $$;
                create trigger refuse before delete on graphile_worker._private_jobs
                for each row execute function refuse()""")
        async with app.running(concurrency=5) as runner:

            async def have_started() -> bool:
                return len(gate.started) == 3

            await until(have_started, "the jobs have started")
            stopping = asyncio.create_task(runner.stop())
            ends.set()

            async def is_given_up() -> bool:
                return await count(db) == 1 and list((await shares(db)).values()) == [1]

            await until(is_given_up, "the share is given up")
            gate.open()
            await stopping
        await app.close()

    async def test_share_of_a_worker_that_lost_its_connection_when_it_stopped_is_removed(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limit = Limit("stripe", 1)
        gone, other = (LimitedWorker(on, name, limit) for on, name in zip(connections, "ab", strict=False))
        jobs = await add_jobs(db, 2)
        await gone.claim()
        heard: list[object] = []
        await db.add_listener("jobs:insert", lambda *message: heard.append(message))
        await end_lost_shares(connections[2], SCHEMA)
        assert await shares(db) == {"a": 1}, "its job is still locked"
        await db.execute("delete from graphile_worker._private_jobs where id = $1", jobs[0])
        assert await other.claim() == []
        await end_lost_shares(connections[2], SCHEMA)
        assert await other.claim() == jobs[1:]

        async def has_heard() -> bool:
            await db.execute("select 1")
            return bool(heard)

        await until(has_heard, "waiting workers are notified")

    async def test_waiting_workers_are_notified_when_a_worker_leaves_with_a_share(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 1))
        await add_jobs(db, 1)
        await worker.claim()
        heard: list[object] = []
        await db.add_listener("jobs:insert", lambda *message: heard.append(message))
        await end_shares(connections[2], SCHEMA, "a")

        async def has_heard() -> bool:
            await db.execute("select 1")
            return bool(heard)

        await until(has_heard, "waiting workers are notified")


class TestRegistration:
    async def test_worker_that_connects_again_does_not_restore_an_older_value(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        app = App(dsn=database)

        @app.task(limit=Limit("stripe", 10))
        async def charge() -> None: ...

        limits = "select concurrency from graphile_worker._private_python_limits"
        async with app.running(poll_interval=0.05):
            assert await db.fetchval(limits) == 10
            await register_limits(db, SCHEMA, {"charge": Limit("stripe", 2)})
            generations = "select max(generation) from graphile_worker._private_python_sessions"
            before = await db.fetchval(generations)
            await db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                "and pid <> pg_backend_pid()"
            )

            async def is_back() -> bool:
                return bool((await db.fetchval(generations) or 0) > before)

            await until(is_back, "the worker has connected again")
            assert await db.fetchval(limits) == 2
        await app.close()

    async def test_locked_limit_does_not_delay_a_worker_that_connects(
        self, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        limits = {"task": Limit("stripe", 3)}
        await register_limits(db, SCHEMA, limits)
        changed = {"task": Limit("stripe", 4)}
        async with db.transaction():
            await db.execute("select from graphile_worker._private_python_limits for update")
            registered = await register_limits(connections[0], SCHEMA, changed)
            assert (list(registered.ids), registered.is_declared) == (["stripe"], False)
        registered = await register_limits(connections[0], SCHEMA, changed)
        assert registered.is_declared
        assert await db.fetchval("select concurrency from graphile_worker._private_python_limits") == 4


class TestDeclarations:
    @pytest.mark.parametrize("values", [("", 1), ("a\n", 1), (1, 1), ("a", 0), ("a", True), ("a", 1.5)])
    def test_invalid_limit_is_refused(self, values: tuple[Any, Any]) -> None:
        with pytest.raises(ConfigurationError):
            Limit(*values)

    def test_invalid_task_options_are_refused(self) -> None:
        app = App()
        for wrong in ({"limit": 5}, {"worker_limit": 0}, {"worker_limit": Limit("a", 1)}):
            with pytest.raises(ConfigurationError, match="limit"):
                app.task(**wrong)(print)

    async def test_worker_refuses_two_values_of_one_limit(self, database: str) -> None:
        app = App(dsn=database)

        @app.task(limit=Limit("stripe", 3))
        async def charge() -> None: ...

        @app.task(limit=Limit("stripe", 4))
        async def refund() -> None: ...

        with pytest.raises(ConfigurationError, match="Declare it once"):
            await run({"charge": charge, "refund": refund}, database, handle_signals=False)

    async def test_unknown_limit_is_refused_with_a_hint(self, database: str) -> None:
        async with WorkerUtils(database) as utils:
            with pytest.raises(ConfigurationError, match="Known limits: none"):
                await utils.set_limit("strip", 3)

    def test_counts_leave_out_recorded_jobs_and_other_tasks(self) -> None:
        limits = NamedLimits({"task": Limit("stripe", 3)})
        limits.ids = {"stripe": 7}
        assert limits.count([], []) == LimitCounts([7], [0], {"task": 1})


class TestCommand:
    async def test_command_lists_sets_and_resets_limits(
        self, cli: Cli, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "a", Limit("stripe", 2))
        await add_jobs(db, 5)
        await worker.claim()
        [listed] = await cli.json("limits", "list")
        assert listed == {
            "name": "stripe",
            "concurrency": 2,
            "declared": 2,
            "held": 2,
            "waiting": 3,
            "tasks": ["second", "task"],
            "workers": {"a": 2},
        }
        assert "3 jobs wait for the limit 'stripe', which is 2." in (await cli("stats")).stderr
        done = await cli("limits", "set", "stripe", "--concurrency", "4")
        assert done.stderr == "The limit 'stripe' is 4 now; the code declares 2.\n"
        assert len(await worker.claim()) == 2
        assert (await cli("limits", "reset", "stripe")).returncode == 0
        done = await cli("limits", "set", "strip", "--concurrency", "4")
        assert (done.returncode, "Did you mean 'stripe'?" in done.stderr) == (1, True)
        assert (await cli("limits", "set", "stripe", "--concurrency", "-1")).returncode == 2

    async def test_doctor_warns_of_a_node_worker_and_names_a_full_limit(
        self, database: str, db: asyncpg.Connection, connections: list[asyncpg.Connection]
    ) -> None:
        worker = LimitedWorker(connections[0], "python-a", Limit("stripe", 1))
        jobs = await add_jobs(db, 3)
        await worker.claim()
        await lock(db, jobs[1], by="pool-1")
        found = [finding async for finding in examine(database) if finding.check == "limits"]
        assert [(finding.level, finding.message) for finding in found] == [
            (Level.WARNING, "Node or Rust workers run 1 job of 'task', which has a limit"),
            (Level.NOTE, "1 job waits for the limit 'stripe': 1 of 1 run"),
        ]


async def test_limits_guide_declares_the_limits_that_its_text_names(database: str) -> None:
    page = Page("guides/limits.md", dsn=database)
    names = await page.run()
    page.assert_done()
    assert (names["charge"].limit, names["refund"].worker_limit) == (Limit("stripe", 10), 2)
    await names["app"].run_once(handle_signals=False)
    assert [limit.name for limit in await names["app"].utils.limits()] == ["stripe"]
    await names["app"].close()
