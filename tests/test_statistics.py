"""Statistics: workers count every job once, and one worker at a time does the upkeep."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import pytest
from hypothesis import given, strategies as st

from graphile_worker import (
    Cancel,
    ConfigurationError,
    DatabaseError,
    JobSpec,
    Metric,
    SchemaMissingError,
    Snooze,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker._base.histogram import LAST, SQUARED, bucket_of, percentile, upper_limit
from graphile_worker._base.logs import ScopedLogger
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._db.queries import statistics as database_statistics
from graphile_worker._db.queries.exchange import ClaimedJob
from graphile_worker._db.sql_files import Schema, statements_for
from graphile_worker._worker.execution.job_events import JobRun
from graphile_worker._worker.execution.tally import Tally
from graphile_worker._worker.maintenance import statistics_service
from graphile_worker._worker.maintenance.statistics_service import StatisticsService
from graphile_worker.events import Worker as Slot
from graphile_worker.outcome import Cancelled, Completed, Failed, Interrupted, Outcome, Snoozed
from graphile_worker.testing import job as make_job
from support import computing
from support.commands import Cli
from support.jobs import add, fetch_one, lock
from support.proxy import proxied
from support.waiting import until
from support.workers import EventRecorder, nothing, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from graphile_worker.stats import JobCounts

NOON = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
SCHEMA = Schema()
STATISTICS = "graphile_worker._private_python_statistics"
DEPTHS = "graphile_worker._private_python_depths"
TABLES = ("statistics", "flushes", "depths", "turns")
once = partial(run_once, handle_signals=False)


class SteppedClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = NOON

    def __call__(self) -> datetime:
        return self.at


def run_of(
    name: str = "t", outcome: type[Outcome] = Completed, *, duration: float = 0.01, waited: float = 0.5
) -> JobRun:
    """Return a run that has just ended, of a job that had waited before it at noon."""
    due = NOON - timedelta(seconds=waited + duration)
    job = make_job(name, run_at=due, created_at=due)
    slot = Slot("w-1", 1, "w")
    return JobRun(
        ClaimedJob(job, NOON, None), slot, monotonic() - duration, duration=duration, outcome=outcome
    )


def tally_of(clock: SteppedClock) -> Tally:
    return Tally(clock, clock)


def service_of(session: Session, tally: Tally, worker: str = "w") -> StatisticsService:
    logger = ScopedLogger(logging.getLogger("graphile_worker"), {})
    return StatisticsService(worker_id=worker, tally=tally, session=session, logger=logger)


@pytest.fixture
async def session(database: str) -> AsyncIterator[Session]:
    pool = Pool(database, max_size=4)
    yield Session(SCHEMA, pool, logging.getLogger("graphile_worker"))
    await pool.close()


@pytest.fixture
def cli(database: str, tmp_path: Path) -> Cli:
    return Cli(database, tmp_path)


@pytest.fixture
def merge_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge the rows of workers even if their minute is not over."""
    merges = [
        merge._replace(age=-120) if merge.of_period == merge.to_period else merge
        for merge in database_statistics._MERGES
    ]
    monkeypatch.setattr(database_statistics, "_MERGES", merges)


async def total(database: str, **options: Any) -> JobCounts:
    async with WorkerUtils(database) as utils:
        return (await utils.activity(**options)).total()


class TestHistogram:
    @given(st.floats(0, 70_000))
    def test_bucket_of_a_duration_has_the_limits_around_it(self, duration: float) -> None:
        bucket = bucket_of(duration)
        lower = upper_limit(bucket - 1) if bucket else 0.0
        assert lower * (1 - 1e-9) <= duration
        assert bucket == LAST or duration <= upper_limit(bucket) * (1 + 1e-9)

    @given(st.lists(st.floats(0.001, 60_000), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
    def test_percentile_is_at_most_a_bucket_off(self, durations: list[float], fraction: float) -> None:
        counts = [0] * (LAST + 1)
        for duration in durations:
            counts[bucket_of(duration)] += 1
        found = percentile(counts, fraction)
        exact = sorted(durations)[max(0, -int(-fraction * len(durations) // 1) - 1)]
        assert found is not None
        assert exact / 1.4143 <= found <= exact * 1.4143

    def test_durations_of_milliseconds_to_hours_have_their_own_buckets(self) -> None:
        assert (
            len({bucket_of(duration) for duration in (0.001, 0.01, 0.1, 1, 10, 100, 1000, 3600, 36_000)}) == 9
        )
        assert upper_limit(8) == 0.001
        assert SQUARED == 16_000**2


class TestTally:
    def test_each_outcome_counts_in_the_minute_in_which_it_is_recorded(self) -> None:
        clock = SteppedClock()
        tally = tally_of(clock)
        clock.at = NOON.replace(minute=0, second=59, microsecond=999_999)
        tally.add([run_of(), run_of("other", Failed)])
        clock.at = NOON.replace(minute=1)
        tally.add([run_of(), run_of()])
        rows = {(row["at"], row["task"]): (row["done"], row["failed"]) for row in tally.take()}
        minute = NOON.timestamp()
        assert rows == {(minute, "t"): (1, 0), (minute, "other"): (0, 1), (minute + 60, "t"): (2, 0)}
        assert not tally

    def test_clock_that_goes_back_adds_to_the_earlier_minute(self) -> None:
        clock = SteppedClock()
        tally = tally_of(clock)
        tally.add([run_of()])
        clock.at = NOON + timedelta(minutes=5)
        tally.add([run_of()])
        clock.at = NOON
        tally.add([run_of()])
        rows = [(row["at"] - NOON.timestamp(), row["done"]) for row in tally.take()]
        assert sorted(rows) == [(0, 2), (300, 1)]

    def test_all_outcomes_are_counted(self) -> None:
        tally = tally_of(SteppedClock())
        kinds: list[type[Outcome]] = [Completed, Failed, Failed, Snoozed, Cancelled, Interrupted]
        tally.add([run_of(outcome=kind) for kind in kinds])
        [row] = tally.take()
        counted = {name: row[name] for name in ("done", "failed", "snoozed", "cancelled", "interrupted")}
        assert counted == {"done": 1, "failed": 2, "snoozed": 1, "cancelled": 1, "interrupted": 1}
        assert sum(row["runs"]) == len(kinds)

    def test_times_go_into_their_buckets(self) -> None:
        tally = tally_of(SteppedClock())
        tally.add([run_of(duration=0.02, waited=3.0)])
        [row] = tally.take()
        assert row["runs"].index(1) == bucket_of(0.02)
        # The wait is measured with the real monotonic clock, so this test may have added to it.
        assert bucket_of(3.0) - 1 <= row["waits"].index(1)
        assert row["run_seconds"] == 0.02

    def test_job_that_was_added_late_waits_since_it_was_added(self) -> None:
        tally = tally_of(SteppedClock())
        run = run_of()
        added = make_job("t", run_at=NOON - timedelta(days=900), created_at=NOON)
        tally.add([JobRun(ClaimedJob(added, NOON, None), run.slot, monotonic(), outcome=Completed)])
        [row] = tally.take()
        assert row["wait_seconds"] < 3600

    def test_job_that_starts_early_by_the_clock_waits_zero(self) -> None:
        tally = tally_of(SteppedClock())
        tally.add([run_of(waited=-50.0)])
        [row] = tally.take()
        assert (row["waits"], row["wait_seconds"]) == ([1], 0.0)

    def test_very_many_jobs_are_counted_exactly_and_their_times_approximately(self) -> None:
        tally = tally_of(SteppedClock())
        for _ in range(50):
            tally.add([run_of(duration=0.1), *(run_of(duration=0.001) for _ in range(99))])
        [row] = tally.take()
        assert row["done"] == 5000
        assert sum(row["runs"]) == pytest.approx(5000, abs=8)
        assert percentile(row["runs"], 0.5) == pytest.approx(0.001, rel=0.42)


class TestWorker:
    async def test_stopped_worker_has_written_what_its_jobs_did(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        async def act(payload: Any) -> None:
            match payload:
                case "fail":
                    raise ValueError("no")
                case "snooze":
                    raise Snooze(60)
                case "cancel":
                    raise Cancel

        await db.fetch(
            "select graphile_worker.add_job('act', to_json('fine'::text)) from generate_series(1, 3)"
        )
        for payload in ("fail", "snooze", "cancel"):
            await add(db, "act", payload=payload)
        await once({"act": act}, database)
        counts = await total(database)
        assert (counts.done, counts.failed, counts.snoozed, counts.cancelled) == (3, 1, 1, 1)
        assert sum(counts.runs) == sum(counts.waits) == 6
        assert counts.run_time(0.95) is not None
        assert await db.fetchval(f"select count(*) from {STATISTICS}") in {1, 2}  # two across a minute

    @pytest.mark.slow
    async def test_jobs_in_task_processes_and_batches_are_counted(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await add(db, "quick")
        await add(db, "batch", payload=[1, 2])

        @task(batch=True)
        async def batch(items: list[int]) -> None: ...

        await once({"quick": computing.quick, "batch": batch}, database)
        async with WorkerUtils(database) as utils:
            activity = await utils.activity()
        assert {name: activity.total(name).done for name in activity.tasks} == {"quick": 1, "batch": 1}

    async def test_worker_without_statistics_writes_none(self, db: asyncpg.Connection, database: str) -> None:
        await add(db)
        await once({"task": nothing}, database, statistics=False)
        for table in ("statistics", "flushes", "depths"):
            assert not await db.fetchval(f"select count(*) from graphile_worker._private_python_{table}")

    @pytest.mark.parametrize("how", ["refused", "missing"])
    async def test_worker_that_may_not_write_statistics_warns_once_and_runs_jobs(
        self, how: str, db: asyncpg.Connection, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        dsn, role = database, f"worker_{uuid4().hex[:8]}"
        if how == "missing":
            await db.execute(
                "".join(f"drop table graphile_worker._private_python_{name};" for name in TABLES)
            )
        else:
            await db.execute(f"""
                create role {role} login bypassrls;
                grant usage on schema graphile_worker to {role};
                grant all on all tables in schema graphile_worker to {role};
                grant all on all sequences in schema graphile_worker to {role};
                revoke insert on {STATISTICS} from {role};
            """)
            dsn = database.replace("postgres@", f"{role}@")
        try:
            recorder = EventRecorder()
            async with running({"task": nothing}, dsn, recorder=recorder, migrate=False) as runner:
                await add(db)
                await recorder.until("job:complete")
                service = runner._parts._statistics
                assert service is not None
                service._started = True
                for _ in range(3):
                    await service.tick()
                assert runner.health().ready
                await add(db)
                await recorder.until("job:complete", 2)
        finally:
            if how == "refused":
                await db.execute(f"drop owned by {role}; drop role {role}")
        warnings = [record for record in caplog.records if "writes no statistics" in record.getMessage()]
        assert len(warnings) == 1
        assert "grant select, insert" in warnings[0].getMessage()

    @pytest.mark.usefixtures("merge_at_once")
    async def test_two_workers_and_roll_ups_count_every_job_once(
        self, db: asyncpg.Connection, database: str, session: Session
    ) -> None:
        recorders = EventRecorder(), EventRecorder()
        async with (
            running({"task": nothing}, database, recorder=recorders[0], concurrency=2) as first,
            running({"task": nothing}, database, recorder=recorders[1], concurrency=2) as second,
        ):
            services = [first._parts._statistics, second._parts._statistics]
            for number in range(1, 11):
                await db.fetch("select graphile_worker.add_job('task') from generate_series(1, 20)")

                async def done(count: int = number * 20) -> bool:
                    return sum(recorder.counts["job:complete"] for recorder in recorders) >= count

                await until(done, "the jobs are done")
                # Flushes of both workers and two roll-ups at the same time.
                await asyncio.gather(
                    *(service.flush() for service in services if service is not None),
                    session.call(lambda on: database_statistics.roll_up(on, SCHEMA)),
                    session.call(lambda on: database_statistics.roll_up(on, SCHEMA)),
                )
        assert (await total(database)).done == 200
        await session.call(lambda on: database_statistics.roll_up(on, SCHEMA))
        assert await db.fetchval(f"select count(*) from {STATISTICS} where worker <> ''") == 0
        counts = await total(database)
        assert counts.done == sum(counts.runs) == sum(counts.waits) == 200

    async def test_worker_writes_regularly_and_not_only_at_its_end(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(statistics_service, "FLUSH_INTERVAL", 0.01)
        await add(db)
        async with running({"task": nothing}, database):

            async def written() -> bool:
                return bool(await db.fetchval(f"select sum(done) from {STATISTICS}"))

            await until(written, "the worker writes statistics")


class TestFlush:
    async def test_batch_that_is_sent_twice_counts_once(self, db: asyncpg.Connection) -> None:
        tally = tally_of(SteppedClock())
        tally.add([run_of()])
        batch = database_statistics.encode_batch(tally.take())
        for number in (1, 1, 2):
            await database_statistics.flush(db, SCHEMA, "w", number, batch)
        assert await db.fetchval(f"select sum(done) from {STATISTICS}") == 2
        assert len(await db.fetch(f"select from {STATISTICS}")) == 1

    async def test_connection_that_is_lost_during_a_flush_neither_loses_nor_doubles_counts(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        tally = tally_of(SteppedClock())
        tally.add([run_of()])
        async with proxied(database) as (proxy, dsn):
            pool = Pool(dsn, max_size=2)
            service = service_of(Session(SCHEMA, pool, logging.getLogger("graphile_worker")), tally)
            async with db.transaction():
                # The flush waits for this lock, and the connection is lost meanwhile.
                await db.execute("lock table graphile_worker._private_python_flushes in exclusive mode")
                flushing = asyncio.create_task(service.flush())
                observer = await asyncpg.connect(database)

                async def waits() -> bool:
                    return bool(
                        await observer.fetchval("select exists (select from pg_locks where not granted)")
                    )

                await until(waits, "the flush waits")
                await observer.close()
                proxy.cut_all()
                with pytest.raises(DatabaseError):
                    await flushing
            # The server may finish the statement of the lost session at any time, before or after this one.
            tally.add([run_of()])
            await service.flush()
            await service.flush()

            async def others_idle() -> bool:
                return not await db.fetchval(
                    "select exists (select from pg_stat_activity where datname = current_database() "
                    "and pid <> pg_backend_pid() and state = 'active')"
                )

            await until(others_idle, "no statement is running")
            assert await db.fetchval(f"select sum(done) from {STATISTICS}") == 2
            await pool.close()

    async def test_repeated_flush_waits_for_the_first_attempt_and_writes_nothing(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        tally = tally_of(SteppedClock())
        tally.add([run_of()])
        batch = database_statistics.encode_batch(tally.take())
        async with db.transaction():
            await database_statistics.flush(db, SCHEMA, "w", 1, batch)
            repeated = asyncio.create_task(
                session.call(lambda on: database_statistics.flush(on, SCHEMA, "w", 1, batch))
            )

            async def waits() -> bool:
                return bool(await db.fetchval("select exists (select from pg_locks where not granted)"))

            await until(waits, "the repeated flush waits")
        await repeated
        assert await db.fetchval(f"select sum(done) from {STATISTICS}") == 1

    async def test_stop_does_not_wait_for_a_database_that_does_not_answer(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(statistics_service, "_FLUSH_TIMEOUT", 0.05)
        tally = tally_of(SteppedClock())
        tally.add([run_of()])
        async with proxied(database) as (proxy, dsn):
            pool = Pool(dsn, max_size=2)
            service = service_of(Session(SCHEMA, pool, logging.getLogger("graphile_worker")), tally)
            await service._may_write()
            proxy.start_blackhole()
            async with asyncio.timeout(15):
                await service.close()
            proxy.end_blackhole()
            await pool.close()

    async def test_tick_during_an_outage_keeps_the_counts(self, database: str) -> None:
        tally = tally_of(SteppedClock())
        tally.add([run_of()])
        async with proxied(database) as (proxy, dsn):
            pool = Pool(dsn, max_size=2)
            service = service_of(Session(SCHEMA, pool, logging.getLogger("graphile_worker")), tally)
            service._started = True
            await service._may_write()
            await proxy.stop()
            await service.tick()
            assert service.failing is None  # the worker stays ready
            assert service._batch is not None
            await pool.close()


class TestRollUp:
    async def insert(
        self, db: asyncpg.Connection, age: timedelta, period: int = 60, worker: str = ""
    ) -> None:
        at = datetime.fromtimestamp((datetime.now(UTC) - age).timestamp() // period * period, UTC)
        await db.execute(
            f"""insert into {STATISTICS} values ($1, $2, 't', $3, 1, 2, 3, 4, 5, 0.5, 1.5, '{{0,1}}', '{{2}}')
            on conflict do nothing""",
            period, at, worker,
        )  # fmt: skip

    async def test_old_minutes_become_longer_periods_and_the_oldest_go(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        for minutes in range(5):
            await self.insert(db, timedelta(hours=30, minutes=minutes))
        await self.insert(db, timedelta(minutes=10), worker="a")
        await self.insert(db, timedelta(minutes=10), worker="b")
        await self.insert(db, timedelta(days=8), 300)
        await self.insert(db, timedelta(days=91), 3600)
        before = await fetch_one(
            db,
            f"select sum(done) as done, sum(failed) as failed from {STATISTICS} "
            "where at > now() - '90 days'::interval",
        )
        for _ in range(2):  # the second one changes nothing
            await session.call(lambda on: database_statistics.roll_up(on, SCHEMA))
            rows = await db.fetch(
                f"select period, sum(done) as done, sum(failed) as failed, count(*) as rows "
                f"from {STATISTICS} "
                "group by period order by period"
            )
            assert sum(row["done"] for row in rows) == before["done"]
            assert sum(row["failed"] for row in rows) == before["failed"]
            assert [row["period"] for row in rows] == [60, 300, 3600]
            assert [row["done"] for row in rows] == [2, 5, 1]
            assert rows[0]["rows"] == 1
        merged = await fetch_one(
            db, f"select runs, waits, run_seconds, worker from {STATISTICS} where period = 60"
        )
        assert dict(merged) == {"runs": [0, 2], "waits": [4], "run_seconds": 1.0, "worker": ""}

    async def test_histograms_of_different_lengths_are_added(self, db: asyncpg.Connection) -> None:
        merge = statements_for(SCHEMA, "statistics.sql")["merge_counts"]
        for worker, runs in (("a", [1]), ("b", [1, 0, 2]), ("c", [])):
            await db.execute(
                f"insert into {STATISTICS} values (60, $1, 't', $2, 1, 0, 0, 0, 0, 0, 0, $3, '{{}}')",
                NOON - timedelta(days=3650), worker, runs,
            )  # fmt: skip
        await db.fetchval(merge, 60, 60, 120)
        [row] = await db.fetch(f"select done, runs, waits from {STATISTICS}")
        assert (row["done"], row["runs"], row["waits"]) == (3, [2, 0, 2], [])

    async def test_counts_that_arrive_after_the_merge_are_added_to_it(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        for done in (1, 2):
            await self.insert(db, timedelta(minutes=10), worker="late")
            await session.call(lambda on: database_statistics.roll_up(on, SCHEMA))
            [row] = await db.fetch(f"select worker, done, runs from {STATISTICS}")
            assert (row["worker"], row["done"], row["runs"]) == ("", done, [0, done])

    async def test_roll_up_that_dies_before_its_commit_changes_nothing(
        self, db: asyncpg.Connection, database: str, session: Session
    ) -> None:
        for worker in ("a", "b"):
            await self.insert(db, timedelta(minutes=10), worker=worker)
        victim = await asyncpg.connect(database)
        await victim.execute("begin")
        merge = statements_for(SCHEMA, "statistics.sql")["merge_counts"]
        assert await victim.fetchval(merge, 60, 60, 120) == 1
        await db.fetchval("select pg_terminate_backend($1)", victim.get_server_pid())
        with pytest.raises(
            (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
        ):
            await victim.execute("commit")
        await victim.close()
        assert len(await db.fetch(f"select from {STATISTICS}")) == 2
        await session.call(lambda on: database_statistics.roll_up(on, SCHEMA))
        assert await db.fetchval(f"select sum(done) from {STATISTICS} where worker = ''") == 2

    async def test_one_worker_at_a_time_takes_a_turn(self, db: asyncpg.Connection, session: Session) -> None:
        async def take() -> bool:
            return await session.call(lambda on: database_statistics.take_turn(on, SCHEMA, "sample", 15))

        assert sorted(await asyncio.gather(*(take() for _ in range(6)))) == [False] * 5 + [True]
        await db.execute("update graphile_worker._private_python_turns set due_at = now()")
        assert await take()

    async def test_numbers_of_workers_that_are_gone_are_deleted(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await db.execute(
            "insert into graphile_worker._private_python_flushes values "
            "('old', 1, now() - '8 days'::interval), ('new', 1, now() - '6 days'::interval)"
        )
        await session.call(lambda on: database_statistics.roll_up(on, SCHEMA))
        rows = await db.fetch("select worker from graphile_worker._private_python_flushes")
        assert [row["worker"] for row in rows] == ["new"]


class TestDepth:
    async def test_sample_counts_jobs_by_task_and_state(
        self, db: asyncpg.Connection, database: str, session: Session
    ) -> None:
        await db.fetch("select graphile_worker.add_job('a') from generate_series(1, 4)")
        await add(db, "a", queue_name="q")
        later = await add(db, "a", run_at=datetime.now(UTC) + timedelta(days=1))
        running_job = await add(db, "b")
        failed = await add(db, "b")
        await lock(db, running_job["id"])
        await db.execute(
            "update graphile_worker._private_jobs set attempts = max_attempts where id = $1", failed["id"]
        )
        assert later["id"]
        for _ in range(2):  # the average of two samples
            assert await session.call(lambda on: database_statistics.sample_depths(on, SCHEMA, 10.0))
        async with WorkerUtils(database) as utils:
            found = {
                # The last minute with a sample: a new minute may have begun since.
                (metric, name): [
                    point.value
                    for point in (await utils.series(metric, task=name, since=120)).points
                    if point.value is not None
                ][-1]
                for metric in ("ready", "scheduled", "running", "failed_jobs")
                for name in ("a", "b", None)
            }
        assert [found[metric, "a"] for metric in ("ready", "scheduled", "running", "failed_jobs")] == [
            5,
            1,
            0,
            0,
        ]
        assert [found[metric, "b"] for metric in ("ready", "scheduled", "running", "failed_jobs")] == [
            0,
            0,
            1,
            1,
        ]
        assert [found[metric, None] for metric in ("ready", "scheduled", "running", "failed_jobs")] == [
            5,
            1,
            1,
            1,
        ]

    async def test_task_that_is_missing_in_a_sample_counts_as_zero_there(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute(
            f"insert into {DEPTHS} values (60, date_trunc('minute', now()), '', 4, 8, 0, 0, 0, false), "
            "(60, date_trunc('minute', now()), 'a', 1, 8, 0, 0, 0, true)"
        )
        async with WorkerUtils(database) as utils:
            series = await utils.series(Metric.READY, task="a", since=120)
        assert [point.value for point in series.points if point.value is not None] == [2]
        assert series.estimated

    @pytest.mark.slow
    async def test_sample_of_a_large_table_reads_a_part_of_it(
        self, db: asyncpg.Connection, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database_statistics, "_MAX_PAGES", 100)
        monkeypatch.setattr(database_statistics, "_MAX_COUNTED", 1000)
        await db.execute(
            "select graphile_worker.add_job('many', json_build_object('n', n)) "
            "from generate_series(1, 20000) as n"
        )
        await db.execute(
            "select graphile_worker.add_job('few', queue_name := 'q') from generate_series(1, 7)"
        )
        await session.call(lambda on: database_statistics.sample_depths(on, SCHEMA, 60.0))
        rows = {row["task"]: row for row in await db.fetch(f"select * from {DEPTHS}")}
        assert rows["few"]["ready"] == 7  # counted in the index
        assert rows["many"]["ready"] == pytest.approx(20_000, rel=0.5)  # estimated
        assert rows["many"]["estimated"]

    async def test_sample_that_takes_too_long_is_given_up_and_postponed(
        self,
        db: asyncpg.Connection,
        database: str,
        session: Session,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(statistics_service, "_SAMPLE_TIMEOUT", 0.05)
        service = service_of(session, tally_of(SteppedClock()))
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("lock table graphile_worker._private_tasks in access exclusive mode")
            await service.sample()
        await other.close()
        assert "the next sample is in 10 min" in caplog.text
        due = await db.fetchval(
            "select due_at - now() from graphile_worker._private_python_turns where name = 'sample'"
        )
        assert timedelta(minutes=5) < due <= timedelta(minutes=10)

    @pytest.mark.slow
    async def test_sample_of_a_million_jobs_takes_less_than_a_second(
        self, db: asyncpg.Connection, session: Session
    ) -> None:
        await add(db, "t")
        await db.execute("""
            insert into graphile_worker._private_jobs (task_id, payload, run_at)
            select (select id from graphile_worker._private_tasks), json_build_object('n', n), now()
            from generate_series(1, 1000000) as n
        """)
        for table in ("as it is", "analyzed"):
            if table == "analyzed":
                await db.execute("vacuum analyze graphile_worker._private_jobs")
            started = monotonic()
            assert await session.call(lambda on: database_statistics.sample_depths(on, SCHEMA, 60.0))
            assert monotonic() - started < 10.0  # 0.1 s, but the machine may be busy
        ready = await db.fetchval(f"select ready / samples from {DEPTHS} where task = 't'")
        assert ready == pytest.approx(1_000_000, rel=0.2)


class TestReading:
    async def test_series_has_a_point_for_each_step(self, db: asyncpg.Connection, database: str) -> None:
        await add(db)
        await once({"task": nothing}, database)
        async with WorkerUtils(database) as utils:
            done = await utils.series("done", task="task", since=timedelta(minutes=10))
            assert sum(point.value or 0 for point in done.points) == 1
            assert {later.at - at.at for at, later in zip(done.points, done.points[1:], strict=False)} == {
                timedelta(minutes=1)
            }
            for metric in (Metric.RUN_P50, Metric.WAIT_P95, Metric.RUN_MEAN, Metric.WAIT_MEAN):
                found = await utils.series(metric, since=datetime.now(UTC) - timedelta(minutes=5))
                assert [point.value for point in found.points].count(None) >= len(found.points) - 2
                assert any(point.value is not None for point in found.points)
            assert (await utils.series("failed", since=86_400 * 2)).step == 300
            assert (await utils.series("failed", since=timedelta(days=80))).step == 3600
            assert (await utils.series("ready", since=600, step=300)).step == 300

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"metric": "speed"}, "Unknown metric 'speed'"),
            ({"metric": "done", "since": 0}, "since is 0"),
            ({"metric": "done", "step": 90}, "multiple of 60"),
            ({"metric": "ready", "since": timedelta(days=3), "step": 60}, "multiple of 300"),
            ({"metric": "ready", "since": timedelta(days=100)}, "kept for 90 days"),
        ],
    )
    async def test_series_rejects_invalid_arguments(
        self, arguments: dict[str, Any], message: str, database: str
    ) -> None:
        async with WorkerUtils(database) as utils:
            with pytest.raises(ConfigurationError, match=message):
                await utils.series(**arguments)

    async def test_series_works_without_an_event_loop(self, database: str) -> None:
        def read() -> None:
            with WorkerUtils(database) as utils:
                assert utils.series_sync("done").step == 60
                assert utils.activity_sync().total().done == 0
                assert utils.progress_sync(1) is None

        await asyncio.to_thread(read)

    async def test_series_of_a_schema_without_statistics_says_what_to_do(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        await db.execute(f"drop table {STATISTICS}")
        async with WorkerUtils(database) as utils:
            with pytest.raises(SchemaMissingError, match="Upgrade it"):
                await utils.series("done")

    async def test_statistics_of_a_removed_task_stay(self, db: asyncpg.Connection, database: str) -> None:
        await add(db)
        await once({"task": nothing}, database)
        async with WorkerUtils(database) as utils:
            await utils.cleanup("GC_TASK_IDENTIFIERS")
            assert (await utils.activity(task="task")).total("task").done == 1


class TestCommand:
    async def test_stats_since_prints_counts_times_and_a_chart(self, database: str, cli: Cli) -> None:
        async with WorkerUtils(database) as utils:
            await utils.add_jobs(JobSpec("task") for _ in range(3))
        await once({"task": nothing}, database)
        done = await cli("stats", "--since", "1h", "--json")
        document = json.loads(done.stdout)
        assert document["tasks"]["task"]["done"] == document["all"]["done"] == 3
        assert document["tasks"]["task"]["run_p95"] is not None
        assert sum(document["all"]["steps"]["done"]) == 3
        assert len(document["times"]) == len(document["all"]["steps"]["done"])
        assert "Node or Rust" in document["counted"]
        [row, everything] = (await cli("stats", "--since", "24h")).stdout.splitlines()
        assert row.split("\t")[:3] == ["task", "3", "0"]
        assert everything.startswith("(all)\t3")

    async def test_stats_rejects_flags_that_do_not_fit(self, cli: Cli) -> None:
        for arguments, message in (
            (["--step", "5m"], "--step needs --since"),
            (["--since", "1h", "--watch"], "cannot be combined"),
            (["--since", "100d"], "90 days"),
            (["--since", "2d", "--step", "1m"], "multiple of 300"),
        ):
            done = await cli("stats", *arguments)
            assert done.returncode
            assert message in done.stderr
