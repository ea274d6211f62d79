"""`WorkerUtils`: adding and administering jobs."""

from __future__ import annotations

import asyncio
import inspect
import json
import warnings
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from graphile_worker import (
    App,
    CleanupTask,
    ConfigurationError,
    DatabaseError,
    InvalidJobError,
    Job,
    JobKeyMode,
    JobSpec,
    JobState,
    SchemaMissingError,
    WorkerUtils,
    quick_add_job,
    run_migrations,
    task,
)
from graphile_worker._db.connection.error_mapping import translate_errors
from graphile_worker._db.sql_files import Schema
from graphile_worker._tasks.options import JobOptions
from graphile_worker.errors import AutocommitWarning
from support.jobs import AUTOCOMMITS, STATES, add, count, lock, put_in_state
from support.waiting import until, until_blocked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LATER = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
async def utils(database: str) -> AsyncIterator[WorkerUtils]:
    async with WorkerUtils(dsn=database) as utils:
        yield utils


async def database_now(db: asyncpg.Connection) -> datetime:
    now: datetime = await db.fetchval("select clock_timestamp()")
    return now


class TestAddJob:
    async def test_returned_job_is_the_stored_job(self, utils: WorkerUtils) -> None:
        job = await utils.add_job(
            "send",
            {"to": "Ann", "n": 2**60},
            queue_name="mail",
            run_at=LATER,
            max_attempts=3,
            job_key="k",
            job_key_mode="replace",
            priority=-7,
            flags={"a", "b"},
        )

        assert (job.task_identifier, job.queue_name, job.key) == ("send", "mail", "k")
        assert job.payload == {"to": "Ann", "n": 2**60}
        assert (job.run_at, job.max_attempts, job.priority) == (LATER, 3, -7)
        assert (job.flags, job.state, job.revision) == (frozenset("ab"), JobState.SCHEDULED, 0)
        assert job.created_at.utcoffset() == timedelta(0)
        assert await utils.get_job(id=job.id) == job
        assert await utils.get_job(key="k") == job

    async def test_omitted_options_have_defaults(self, utils: WorkerUtils) -> None:
        job = await utils.add_job("hello")
        assert (job.payload, job.max_attempts, job.priority, job.flags) == ({}, 25, 0, frozenset())
        assert (job.state, job.queue_name, job.is_available) == (JobState.READY, None, True)

    async def test_timedelta_is_added_to_the_time_of_the_database(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        # A day is 24 hours, even if daylight saving time changes in between.
        await db.execute(
            "alter database "
            + await db.fetchval("select quote_ident(current_database())")
            + " set timezone to 'Europe/Paris'"
        )
        before = await database_now(db)
        job = await utils.add_job("t", run_at=timedelta(days=200, microseconds=1))
        assert timedelta(0) <= job.run_at - before - timedelta(days=200) < timedelta(minutes=1)
        assert job.run_at - job.created_at == timedelta(days=200, microseconds=1)

    async def test_run_at_may_be_an_iso_8601_string_with_an_offset(self, utils: WorkerUtils) -> None:
        noon = datetime(2030, 1, 31, 12, tzinfo=UTC)
        job = await utils.add_job("t", run_at="2030-01-31T12:00:00Z")
        batch = await utils.add_batch_job("t", [1], run_at="2030-01-31T13:00+01:00")
        assert job.run_at == batch.run_at == noon
        [changed] = await utils.reschedule_jobs([job.id], run_at="2031-01-31T12:00:00Z")
        assert changed.run_at == noon.replace(year=2031)
        for text in ("2030-01-31T12:00", "2030-01-31", "in an hour", ""):
            with pytest.raises(InvalidJobError, match="ISO 8601") as rejected:
                await utils.add_job("t", run_at=text)
            assert rejected.value.argument == "run_at"
            with pytest.raises(InvalidJobError, match="ISO 8601"):
                await utils.reschedule_jobs([job.id], run_at=text)

    async def test_run_at_outside_the_range_of_utc_is_rejected(self, utils: WorkerUtils) -> None:
        job = await utils.add_job("t")
        west, east = timezone(timedelta(hours=-1)), timezone(timedelta(hours=1))
        for moment in (datetime.max.replace(tzinfo=west), datetime.min.replace(tzinfo=east)):
            for call in (
                utils.add_job("t", run_at=moment),
                utils.reschedule_jobs([job.id], run_at=moment),
                utils.reschedule_jobs([job.id], run_at=moment.isoformat()),
            ):
                with pytest.raises(InvalidJobError, match="UTC") as rejected:
                    await call
                assert rejected.value.argument == "run_at"
            with pytest.raises(InvalidJobError, match="UTC"):
                JobSpec("t", run_at=moment)
        assert (await utils.add_job("t", run_at=datetime.max.replace(tzinfo=east))).run_at.year == 9999

    async def test_invalid_timeout_is_rejected(self, utils: WorkerUtils) -> None:
        app = App(dsn="postgresql://nowhere/x")

        @app.task
        async def hello() -> None: ...

        for call in (
            utils.add_job("t", timeout=-1),
            utils.add_batch_job("t", [1], timeout=float("inf")),
            app.add_job("hello", timeout=-1),
            app.add_job("t", timeout=-1),
        ):
            with pytest.raises(InvalidJobError, match="timedelta") as rejected:
                await call
            assert rejected.value.argument == "timeout"

    async def test_use_local_time_uses_the_clock_of_this_machine(
        self, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return LATER.astimezone(tz)

        monkeypatch.setattr("graphile_worker._client.administration.datetime", Clock)
        async with WorkerUtils(dsn=database, use_local_time=True) as utils:
            assert (await utils.add_job("t")).run_at == LATER
            assert (await utils.add_job("t", run_at=timedelta(1))).run_at == LATER + timedelta(1)
            [job] = await utils.add_jobs([JobSpec("t", run_at=timedelta(1))])
            assert job.run_at == LATER + timedelta(1)
            [job] = await utils.reschedule_jobs([job.id], run_at=timedelta(0))
            assert job.run_at == LATER

    async def test_job_key_modes_replace_preserve_or_keep_the_job(self, utils: WorkerUtils) -> None:
        first = await utils.add_job("a", 1, job_key="k", run_at=LATER)
        second = await utils.add_job("a", 2, job_key="k", job_key_mode=JobKeyMode.PRESERVE_RUN_AT)
        third = await utils.add_job("b", 3, job_key="k", job_key_mode="unsafe_dedupe", queue_name="q")
        fourth = await utils.add_job("b", 4, job_key="k", queue_name="q")

        assert {job.id for job in (first, second, third, fourth)} == {first.id}
        assert [job.revision for job in (first, second, third, fourth)] == [0, 1, 2, 3]
        assert [job.payload for job in (second, third, fourth)] == [2, 2, 4]
        assert (second.run_at, third.run_at) == (LATER, LATER)
        assert (third.task_identifier, third.queue_name) == ("a", None)
        assert (fourth.task_identifier, fourth.queue_name) == ("b", "q")

    async def test_rejected_job_leaves_no_rows(self, utils: WorkerUtils, db: asyncpg.Connection) -> None:
        with pytest.raises(InvalidJobError):
            await utils.add_job("t", float("nan"))
        with pytest.raises(InvalidJobError):
            await utils.add_job("t", priority=99999)
        assert await count(db) == 0

    @pytest.mark.parametrize(
        ("arguments", "column", "code"),
        [
            ({"identifier": "x" * 129}, "identifier", "GWBID"),
            ({"queue_name": "x" * 129}, "queue_name", "GWBQN"),
            ({"job_key": ""}, "job_key", "GWBJK"),
            ({"max_attempts": 0}, "max_attempts", "GWBMA"),
            ({"job_key": "k", "job_key_mode": "upsert"}, "job_key_mode", "GWBKM"),
        ],
    )
    async def test_argument_and_code_are_the_same_when_postgresql_rejects_a_job(
        self, db: asyncpg.Connection, arguments: dict[str, Any], column: str, code: str
    ) -> None:
        with pytest.raises(InvalidJobError) as by_library:
            JobSpec(**({"identifier": "t"} | arguments))
        with pytest.raises(InvalidJobError) as by_postgresql, translate_errors(Schema()):
            await add(db, **({"identifier": "t"} | arguments))

        for caught in (by_library, by_postgresql):
            assert (caught.value.argument, caught.value.code) == (column, code)

    async def test_infinite_run_at_set_by_sql_can_be_read(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        await db.execute("select graphile_worker.add_job('t', run_at => 'infinity')")
        await db.execute("select graphile_worker.add_job('u', run_at => '-infinity')")
        await db.execute("select graphile_worker.add_job('w', run_at => '20000-01-01')")
        await utils.add_job("v")
        forever, always, far, _ = await utils.list_jobs()
        assert far.run_at == forever.run_at
        assert forever.run_at == datetime.max.replace(tzinfo=UTC)
        assert always.run_at == (await utils.stats()).oldest_due == datetime.min.replace(tzinfo=UTC)


class TestTransactions:
    async def test_job_is_added_when_the_caller_commits(
        self, utils: WorkerUtils, db: asyncpg.Connection, database: str
    ) -> None:
        other = await asyncpg.connect(database)
        async with db.transaction():
            job = await utils.add_job("t", connection=db)
            assert await count(other) == 0
        assert await count(other) == 1
        await other.close()
        assert await utils.get_job(id=job.id) == job

    async def test_rollback_undoes_every_method(self, utils: WorkerUtils, db: asyncpg.Connection) -> None:
        kept = await utils.add_job("t", job_key="kept")
        before = await db.fetch("select * from graphile_worker._private_jobs")
        transaction = db.transaction()
        await transaction.start()
        jobs = await utils.add_jobs([JobSpec("a"), JobSpec("b")], connection=db)
        await utils.add_batch_job("c", [1], connection=db)
        await utils.reschedule_jobs([kept.id], priority=3, connection=db)
        await utils.permanently_fail_jobs([jobs[0].id], "no", connection=db)
        await utils.complete_jobs([jobs[1].id], connection=db)
        await utils.remove_job("kept", connection=db)
        await utils.force_unlock_workers(["w"], connection=db)
        await utils.cleanup(CleanupTask, connection=db)
        assert (await utils.stats(connection=db)).total == 1
        assert len(await utils.list_jobs(connection=db)) == 1
        await utils.migrate(connection=db)
        await transaction.rollback()
        assert await db.fetch("select * from graphile_worker._private_jobs") == before

    async def test_adding_outside_a_transaction_warns_at_the_callers_line(
        self, utils: WorkerUtils, db: asyncpg.Connection, database: str
    ) -> None:
        app = App(dsn=database)

        @app.task
        async def hello() -> None: ...

        async with app:
            for add_one in (
                lambda: utils.add_job("t", connection=db),
                lambda: utils.add_jobs([JobSpec("t")], connection=db),
                lambda: utils.add_batch_job("t", [1], connection=db),
                lambda: quick_add_job("t", dsn=database, connection=db),
                lambda: app.add_job("t", connection=db),
                lambda: hello.using(connection=db).enqueue(),
                lambda: hello.using(connection=db).enqueue_many([{}]),
            ):
                with pytest.warns(AutocommitWarning, match="transaction") as caught_warnings:
                    await add_one()
                assert [warning.filename for warning in caught_warnings] == [__file__]
                async with db.transaction():
                    await add_one()  # warnings are errors here
        assert await count(db) == 14

    async def test_autocommit_warning_is_shown_once_per_line(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("default")
            for _ in range(2):
                await utils.add_job("t", connection=db)
            await utils.add_job("t", connection=db)
        assert len(caught_warnings) == 2

    async def test_connection_released_to_its_pool_is_reported(
        self, utils: WorkerUtils, database: str
    ) -> None:
        async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool:
            async with pool.acquire() as connection:
                pass
            with pytest.raises(ConfigurationError, match="is closed: an asyncpg PoolConnectionProxy"):
                await utils.add_job("t", connection=connection)

    @AUTOCOMMITS
    async def test_callers_json_codecs_do_not_matter(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        for kind in ("json", "jsonb"):
            await db.set_type_codec(
                kind, encoder=lambda value: json.dumps([value]), decoder=str.upper, schema="pg_catalog"
            )
        job = await utils.add_job("t", {"a": "b"}, flags=["f"], connection=db)
        assert (job.payload, job.flags) == ({"a": "b"}, frozenset("f"))
        [bulk] = await utils.add_jobs([JobSpec("t", {"a": "b"}, flags=["f"])], connection=db)
        assert (bulk.payload, bulk.flags) == ({"a": "b"}, frozenset("f"))
        assert await utils.list_jobs(connection=db) == [job, bulk]
        assert await utils.list_jobs() == [job, bulk]

    async def test_callers_pool_is_used_and_left_open(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool:
            async with WorkerUtils(pool=pool) as utils:
                await utils.add_job("t")
            assert await pool.fetchval("select count(*) from graphile_worker.jobs") == 1


class TestAddJobs:
    async def test_returned_jobs_are_in_the_order_of_the_specs(self, utils: WorkerUtils) -> None:
        specs = [
            JobSpec("plain"),
            JobSpec(
                "full",
                {"a": 1},
                queue_name="q",
                run_at=LATER,
                max_attempts=3,
                job_key="k",
                priority=-7,
                flags=['a"b', "c\\d", "{", "e f", ","],
            ),
            JobSpec("later", run_at=timedelta(hours=1)),
            JobSpec("plain", [1, 2]),
        ]

        jobs = await utils.add_jobs(specs)

        assert [job.task_identifier for job in jobs] == ["plain", "full", "later", "plain"]
        assert [job.id for job in jobs] == [1, 2, 3, 4]
        assert [job.state for job in jobs] == ["ready", "scheduled", "scheduled", "ready"]
        assert await utils.list_jobs() == jobs

    async def test_iterator_longer_than_a_chunk_keeps_its_order(self, utils: WorkerUtils) -> None:
        jobs = await utils.add_jobs(JobSpec(f"t{n % 3}", n, job_key=f"k{n}") for n in range(45_001))
        assert [job.payload for job in jobs] == list(range(45_001))
        assert [job.id for job in jobs] == list(range(1, 45_002))

    async def test_job_key_modes_apply_per_spec(self, utils: WorkerUtils) -> None:
        keys = ["a", "b", "c", "d"]
        await utils.add_jobs([JobSpec("t", job_key=key, run_at=LATER) for key in keys])
        modes = ["replace", "preserve_run_at", None, JobKeyMode.PRESERVE_RUN_AT]
        specs = [
            spec
            for key, mode in zip(keys, modes, strict=True)
            for spec in (JobSpec("t"), JobSpec("t", job_key=key, job_key_mode=mode))
        ]

        jobs = await utils.add_jobs(specs)

        assert [job.key for job in jobs] == [None, "a", None, "b", None, "c", None, "d"]
        assert [job.run_at == LATER for job in jobs if job.key] == [False, True, False, True]

    async def test_array_payloads_of_keyed_jobs_are_concatenated(self, utils: WorkerUtils) -> None:
        await utils.add_batch_job("t", [1], job_key="k")
        [job] = await utils.add_jobs([JobSpec("t", [2], job_key="k")])
        assert job.payload == [1, 2]
        assert (await utils.add_batch_job("t", iter([3]), job_key="k")).payload == [1, 2, 3]

    async def test_add_jobs_without_specs_returns_an_empty_list(self, utils: WorkerUtils) -> None:
        assert await utils.add_jobs([]) == []

    @pytest.mark.parametrize(
        ("specs", "message"),
        [
            ([JobSpec("a"), JobSpec("t", job_key="k", job_key_mode="unsafe_dedupe")], "unsafe_dedupe"),
            ([JobSpec("a", job_key="k"), JobSpec("b", job_key="k")], "'k'"),
            ([JobSpec("a", n) for n in range(21_000)] + [JobSpec("b", float("nan"))], "nan"),
        ],
    )
    async def test_one_invalid_spec_rejects_all(
        self, utils: WorkerUtils, db: asyncpg.Connection, specs: list[JobSpec], message: str
    ) -> None:
        with pytest.raises(InvalidJobError, match=message):
            await utils.add_jobs(specs)
        assert await count(db) == 0
        assert (await utils.add_job("still works")).id

    async def test_iterator_that_raises_adds_nothing(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        def specs() -> Any:
            for n in range(21_000):
                yield JobSpec("t", n)
            raise FileNotFoundError("no such file")

        with pytest.raises(FileNotFoundError, match="no such file"):
            await utils.add_jobs(specs())
        assert await count(db) == 0

    @AUTOCOMMITS
    async def test_cancelled_add_jobs_adds_nothing_and_leaves_the_connection_usable(
        self, utils: WorkerUtils, db: asyncpg.Connection, database: str
    ) -> None:
        blocker = await asyncpg.connect(database)
        async with blocker.transaction():
            await blocker.execute("lock table graphile_worker._private_jobs")
            adding = asyncio.create_task(
                utils.add_jobs((JobSpec("t", n) for n in range(50_000)), connection=db)
            )
            await until_blocked(blocker, db.get_server_pid())
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
        await blocker.close()
        assert await count(db) == 0

    async def test_value_that_is_not_a_job_spec_is_rejected(self, utils: WorkerUtils) -> None:
        with pytest.raises(InvalidJobError, match=r"JobSpec.*dict"):
            await utils.add_jobs([{"identifier": "t"}])  # type: ignore[list-item]

    async def test_empty_batch_is_rejected(self, utils: WorkerUtils) -> None:
        with pytest.raises(InvalidJobError, match="at least one item"):
            await utils.add_batch_job("t", [])


class TestAdministration:
    async def test_administration_changes_and_returns_all_except_running_jobs(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        jobs = {}
        for state in STATES:
            jobs[state] = (await add(db, job_key=state, max_attempts=9))["id"]
            await put_in_state(db, state, jobs[state])
        ids = list(jobs.values())
        changed = [jobs[state] for state in STATES if state != "locked"]

        moved = await utils.reschedule_jobs(iter(ids), run_at=LATER, priority=0, attempts=0, max_attempts=8)
        assert [job.id for job in moved] == changed
        assert {(job.run_at, job.attempts, job.max_attempts, job.task_identifier) for job in moved} == {
            (LATER, 0, 8, "task")
        }
        failed = await utils.permanently_fail_jobs(ids, "for good")
        assert [job.id for job in failed] == changed
        assert {(job.last_error, job.attempts) for job in failed} == {("for good", 8)}
        completed = await utils.complete_jobs(ids)
        assert [job.id for job in completed] == changed
        [left] = await utils.list_jobs()
        assert (left.id, left.state, left.locked_by) == (jobs["locked"], "running", "w")

    async def test_reschedule_treats_zero_as_a_value_and_none_as_unchanged(self, utils: WorkerUtils) -> None:
        job = await utils.add_job("t", priority=5, run_at=LATER)
        [after] = await utils.reschedule_jobs([job.id], priority=0)
        assert (after.priority, after.run_at, after.max_attempts) == (0, LATER, 25)
        [after] = await utils.reschedule_jobs([job.id], run_at=timedelta(0))
        assert after.state == JobState.READY

    @pytest.mark.parametrize(
        "arguments", [{"attempts": -1}, {"max_attempts": 0}, {"priority": 2**15}, {"run_at": "now"}]
    )
    async def test_reschedule_rejects_invalid_values(
        self, utils: WorkerUtils, arguments: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidJobError):
            await utils.reschedule_jobs([1], **arguments)

    async def test_remove_job_returns_the_removed_job(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        job = await utils.add_job("t", job_key="k", queue_name="q")
        assert await utils.remove_job("k") == job
        assert await utils.remove_job("k") is None
        running = await utils.add_job("t", job_key="k")
        await lock(db, running.id)
        removed = await utils.remove_job("k")
        assert removed is not None
        assert (removed.key, removed.attempts, removed.state) == (None, 25, "running")

    async def test_force_unlock_workers_releases_the_jobs_of_the_named_workers(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        for worker in ("w1", "w2"):
            await lock(db, (await utils.add_job("t", queue_name=worker)).id, by=worker)
        await utils.force_unlock_workers(["w1"])
        assert [job.locked_by for job in await utils.list_jobs()] == [None, "w2"]

    async def test_get_job_returns_none_for_an_unknown_job(self, utils: WorkerUtils) -> None:
        assert await utils.get_job(id=5) is None
        assert await utils.get_job(key="k") is None
        with pytest.raises(ConfigurationError, match="id or key"):
            await utils.get_job()


class TestListing:
    @pytest.fixture
    async def jobs(self, utils: WorkerUtils, db: asyncpg.Connection) -> dict[str, Job]:
        jobs = {
            "ready": await utils.add_job("a", {"who": "Ann_100%"}, queue_name="q"),
            "scheduled": await utils.add_job("a", run_at=LATER, job_key="sch"),
            "running": await utils.add_job("b"),
            "failed": await utils.add_job("b", queue_name="q"),
        }
        await lock(db, jobs["running"].id, by="worker-1")
        await utils.permanently_fail_jobs([jobs["failed"].id], "Kaputt")
        return jobs

    @pytest.mark.sample(5)
    @pytest.mark.parametrize(
        ("filters", "found"),
        [
            ({}, ["ready", "scheduled", "running", "failed"]),
            ({"task": "a"}, ["ready", "scheduled"]),
            ({"task": "unknown"}, []),
            ({"queue_name": "q"}, ["ready", "failed"]),
            ({"state": "ready"}, ["ready"]),
            ({"state": JobState.SCHEDULED}, ["scheduled"]),
            ({"state": "running"}, ["running"]),
            ({"state": "failed"}, ["failed"]),
            ({"key": "sch"}, ["scheduled"]),
            ({"locked_by": "worker-1"}, ["running"]),
            ({"search": "ann_100%"}, ["ready"]),
            ({"search": "annx100"}, []),
            ({"search": "KAPUTT"}, ["failed"]),
            ({"search": "SCH"}, ["scheduled"]),
            ({"task": "b", "state": "failed", "queue_name": "q"}, ["failed"]),
            ({"limit": 2}, ["ready", "scheduled"]),
            ({"limit": 2, "after_id": 2}, ["running", "failed"]),
        ],
    )
    async def test_list_jobs_applies_filters(
        self, utils: WorkerUtils, jobs: dict[str, Job], filters: dict[str, Any], found: list[str]
    ) -> None:
        assert [job.id for job in await utils.list_jobs(**filters)] == [jobs[name].id for name in found]

    async def test_list_jobs_rejects_an_unknown_state(self, utils: WorkerUtils) -> None:
        with pytest.raises(ConfigurationError, match="ready, scheduled, running, failed"):
            await utils.list_jobs(state="done")

    async def test_pages_do_not_shift_when_jobs_are_added_and_completed(self, utils: WorkerUtils) -> None:
        jobs = await utils.add_jobs(JobSpec("t") for _ in range(10))
        first = await utils.list_jobs(limit=4)
        await utils.complete_jobs([first[0].id, first[-1].id])
        second = await utils.list_jobs(limit=4, after_id=first[-1].id)
        await utils.add_job("t")
        third = await utils.list_jobs(limit=4, after_id=second[-1].id)
        assert [job.id for job in [*first, *second, *third]] == [*(job.id for job in jobs), 11]

    async def test_stats_count_jobs_by_state_and_task(self, utils: WorkerUtils, jobs: dict[str, Job]) -> None:
        stats = await utils.stats()
        assert (stats.ready, stats.scheduled, stats.running, stats.failed) == (1, 1, 1, 1)
        assert (stats.total, stats.oldest_due) == (4, jobs["ready"].run_at)
        assert (stats.tasks["a"].scheduled, stats.tasks["a"].total) == (1, 2)
        assert (stats.tasks["b"].failed, stats.tasks["b"].oldest_due) == (1, None)

    async def test_stats_of_an_empty_queue_are_zero(self, utils: WorkerUtils) -> None:
        stats = await utils.stats()
        assert (stats.total, stats.oldest_due, stats.tasks) == (0, None, {})


class TestCleanup:
    async def names(self, db: asyncpg.Connection) -> tuple[list[str], list[str]]:
        tasks = await db.fetch("select identifier from graphile_worker._private_tasks order by 1")
        queues = await db.fetch("select queue_name from graphile_worker._private_job_queues order by 1")
        return [row[0] for row in tasks], [row[0] for row in queues]

    async def test_cleanup_deletes_failed_jobs_even_beyond_max_attempts(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        fine, failed, beyond, running = await utils.add_jobs(JobSpec("t") for _ in range(4))
        await utils.permanently_fail_jobs([failed.id, running.id])
        await utils.reschedule_jobs([beyond.id], attempts=30)
        await lock(db, running.id)

        assert await utils.cleanup("DELETE_PERMAFAILED_JOBS") == (2, 0, 0)

        assert [job.id for job in await utils.list_jobs()] == [fine.id, running.id]

    async def test_cleanup_deletes_empty_queues_by_default(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        await utils.add_job("no queue")
        await utils.add_job("used", queue_name="used")
        for name in ("empty", "locked"):
            await utils.complete_jobs([(await utils.add_job("gone", queue_name=name)).id])
        await db.execute(
            "update graphile_worker._private_job_queues set locked_at = now() where queue_name = 'locked'"
        )

        assert await utils.cleanup() == (0, 0, 1)

        assert await self.names(db) == (["gone", "no queue", "used"], ["locked", "used"])

    async def test_cleanup_deletes_unused_task_identifiers_except_kept_ones(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        await utils.add_job("used")
        for name in ("kept", "unused"):
            await utils.complete_jobs([(await utils.add_job(name)).id])

        cleaned = await utils.cleanup([CleanupTask.GC_TASK_IDENTIFIERS], keep_task_identifiers=["kept"])

        assert cleaned == (0, 1, 0)
        assert (await self.names(db))[0] == ["kept", "used"]

    async def test_cleanup_steps_build_on_each_other(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        job = await utils.add_job("t", queue_name="q")
        await utils.permanently_fail_jobs([job.id])
        assert await utils.cleanup(CleanupTask) == (1, 1, 1)
        assert await self.names(db) == ([], [])

    async def test_unknown_cleanup_step_is_rejected_with_the_valid_ones(self, utils: WorkerUtils) -> None:
        with pytest.raises(ConfigurationError, match=r"VACUUM.*GC_JOB_QUEUES"):
            await utils.cleanup(["VACUUM"])

    @pytest.mark.parametrize("mode", ["replace", "unsafe_dedupe"])
    async def test_cleanup_does_not_orphan_a_job_that_is_being_added(
        self, utils: WorkerUtils, db: asyncpg.Connection, database: str, mode: str
    ) -> None:
        await utils.complete_jobs([(await utils.add_job("t", queue_name="q")).id])
        adder = await asyncpg.connect(database)
        adding = adder.transaction()
        await adding.start()
        await utils.add_job("t", queue_name="q", job_key="k", job_key_mode=mode, connection=adder)
        cleaning = asyncio.create_task(
            utils.cleanup([CleanupTask.GC_JOB_QUEUES, CleanupTask.GC_TASK_IDENTIFIERS], connection=db)
        )
        await until_blocked(adder, db.get_server_pid())

        await adding.commit()

        assert await cleaning == (0, 0, 0)
        [job] = await utils.list_jobs()
        assert (job.task_identifier, job.queue_name) == ("t", "q")
        await adder.close()

    async def test_another_isolation_level_does_not_hide_jobs_from_cleanup(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        name = await db.fetchval("select quote_ident(current_database())")
        await db.execute(f"alter database {name} set default_transaction_isolation = 'repeatable read'")
        adder = await asyncpg.connect(database)
        async with WorkerUtils(dsn=database) as utils:
            await utils.complete_jobs([(await utils.add_job("t", queue_name="q")).id])
            adding = adder.transaction()
            await adding.start()
            await utils.add_job("t", queue_name="q", connection=adder)
            cleaning = asyncio.create_task(utils.cleanup(CleanupTask))
            others = "select bool_or(cardinality(pg_blocking_pids(pid)) > 0) from pg_stat_activity"
            await until(lambda: db.fetchval(others), "the cleanup waits")
            await adding.commit()
            assert await cleaning == (0, 0, 0)
            async with adder.transaction(isolation="repeatable_read"):
                with pytest.raises(ConfigurationError, match="read committed"):
                    await utils.cleanup(connection=adder)
        await adder.close()

    async def test_cleanup_gives_up_on_a_transaction_that_never_ends(
        self, utils: WorkerUtils, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphile_worker._db.queries.cleanup._LOCK_ATTEMPTS", 2)
        async with db.transaction():
            await utils.add_job("t", queue_name="q", connection=db)
            with pytest.raises(DatabaseError, match="No queues were removed"):
                await utils.cleanup()

    async def test_cleanup_keeps_the_callers_lock_timeout(
        self, utils: WorkerUtils, db: asyncpg.Connection
    ) -> None:
        async with db.transaction():
            await db.execute("set local lock_timeout = '7s'")
            await utils.cleanup(connection=db)
            assert await db.fetchval("show lock_timeout") == "7s"


class TestConnections:
    async def test_missing_schema_error_names_the_schema_and_the_fix(self, empty_database: str) -> None:
        async with WorkerUtils(dsn=empty_database, schema="mine") as utils:
            for call in (
                lambda: utils.add_job("t"),
                lambda: utils.add_jobs([JobSpec("t")]),
                utils.list_jobs,
                utils.stats,
                utils.cleanup,
                lambda: utils.complete_jobs([1]),
            ):
                with pytest.raises(SchemaMissingError, match=r"'mine'.*app\.migrate\(\).*worker migrate"):
                    await call()
            await utils.migrate()
            assert (await utils.add_job("t")).id == 1

    async def test_dsn_and_pool_together_are_rejected(self, database: str) -> None:
        async with asyncpg.create_pool(database, min_size=0) as pool:
            with pytest.raises(ConfigurationError, match="not both"):
                WorkerUtils(dsn=database, pool=pool)

    @AUTOCOMMITS
    async def test_missing_database_name_is_an_error_on_first_use(
        self, monkeypatch: pytest.MonkeyPatch, db: asyncpg.Connection
    ) -> None:
        for name in ("DATABASE_URL", "PGDATABASE"):
            monkeypatch.delenv(name, raising=False)
        utils = WorkerUtils()
        with pytest.raises(ConfigurationError, match="database"):
            await utils.add_job("t")
        assert (await utils.add_job("t", connection=db)).id
        await utils.close()

    async def test_utils_open_no_connection_before_use_and_may_be_closed_twice(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        sessions = """select count(*) from pg_stat_activity
            where datname = current_database() and backend_type = 'client backend'"""
        utils = WorkerUtils(dsn=database)
        assert await db.fetchval(sessions) == 1
        await utils.close()
        await utils.close()
        assert await db.fetchval(sessions) == 1

    async def test_concurrent_calls_share_the_connections(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        async with WorkerUtils(dsn=database, max_pool_size=3) as utils:
            await asyncio.gather(*(utils.add_job("t") for _ in range(50)))
            opened = await db.fetchval(
                "select count(*) from pg_stat_activity where application_name = 'graphile-worker'"
                " and datname = current_database()"
            )
        assert await count(db) == 50
        assert 1 <= opened <= 3

    async def test_killed_connection_is_replaced(self, utils: WorkerUtils, db: asyncpg.Connection) -> None:
        await utils.add_job("t")
        others = "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        await db.fetch("select pg_terminate_backend(pid) " + others)

        async def gone() -> bool:
            return not await db.fetchval("select count(*) " + others)

        await until(gone, "the connection ends")
        await utils.add_job("t")
        assert await count(db) == 2

    async def test_cancelled_call_is_stopped_on_the_server(
        self, database: str, db: asyncpg.Connection
    ) -> None:
        sessions = """select count(*) from pg_stat_activity
            where application_name = 'graphile-worker' and datname = current_database()"""
        few = sessions.replace("count(*)", "count(*) <= 2")
        blocker = await asyncpg.connect(database)
        async with WorkerUtils(dsn=database, max_pool_size=2) as utils:
            await utils.add_job("t", "old", job_key="k")
            async with blocker.transaction():
                await blocker.execute("select from graphile_worker._private_jobs for update")
                for _ in range(6):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(utils.add_job("t", "new", job_key="k"), 0.1)
                    # A call may have been connecting. Its session ends when the server notices.
                    await until(lambda: db.fetchval(few), "at most two sessions are open")
                no_session_waits = sessions.replace(
                    "count(*)", "count(*) filter (where wait_event_type = 'Lock') = 0"
                )
                await until(lambda: db.fetchval(no_session_waits), "the last call is stopped")
            job = await utils.get_job(key="k")
            assert job is not None
            assert job.payload == "old"
        await blocker.close()

    async def test_close_can_be_cancelled_and_repeated(self, database: str, db: asyncpg.Connection) -> None:
        utils = WorkerUtils(dsn=database)
        async with db.transaction():
            await db.execute("lock table graphile_worker._private_jobs")
            adding = asyncio.create_task(utils.add_job("t"))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(utils.close(), 0.1)
        await adding
        await utils.close()
        with pytest.raises(ConfigurationError, match="closed"):
            await utils.add_job("t")

    def test_use_on_another_event_loop_is_rejected(self, graphile_worker_server: str) -> None:
        utils = WorkerUtils(dsn=graphile_worker_server)
        with asyncio.Runner() as first, asyncio.Runner() as second:
            with pytest.raises(SchemaMissingError):
                first.run(utils.add_job("t"))
            with pytest.raises(ConfigurationError, match="another event loop"):
                second.run(utils.add_job("t"))
            first.run(utils.close())

    @pytest.mark.parametrize(
        "call",
        [
            lambda utils: utils.force_unlock_workers("w"),
            lambda utils: utils.cleanup(keep_task_identifiers="abc"),
            lambda utils: utils.complete_jobs(["1"]),
            lambda utils: utils.get_job(id="x"),
            lambda utils: utils.list_jobs(limit=0),
            lambda utils: utils.list_jobs(limit=None),
            lambda utils: utils.list_jobs(task=5),
            lambda utils: utils.list_jobs(after_id="x"),
            lambda utils: utils.remove_job(5),
            lambda utils: utils.permanently_fail_jobs([1], ValueError()),
            lambda utils: utils.complete_jobs(5),
            lambda utils: utils.add_batch_job("t", "abc"),
            lambda utils: utils.add_batch_job("t", {"a": 1}),
        ],
    )
    async def test_arguments_of_a_wrong_type_are_rejected(self, utils: WorkerUtils, call: Any) -> None:
        with pytest.raises((ConfigurationError, InvalidJobError), match="must be"):
            await call(utils)

    async def test_value_that_is_not_a_connection_or_pool_is_rejected(
        self, utils: WorkerUtils, database: str
    ) -> None:
        async with asyncpg.create_pool(database, min_size=0) as pool:
            mistakes: list[Any] = [pool, database]
            for wrong in mistakes:
                for call in (utils.add_job("t", connection=wrong), utils.add_jobs([], connection=wrong)):
                    with pytest.raises(ConfigurationError, match="connection="):
                        await call
        with pytest.raises(ConfigurationError, match="pool="):
            WorkerUtils(pool=database)  # type: ignore[arg-type]

    async def test_job_instead_of_its_id_is_rejected_without_its_payload(self, utils: WorkerUtils) -> None:
        job = await utils.add_job("t", "private")
        with pytest.raises(InvalidJobError, match=r"job\.id") as caught:
            await utils.complete_jobs([job])  # type: ignore[list-item]
        assert "private" not in str(caught.value)

    def test_max_pool_size_of_zero_is_rejected(self) -> None:
        with pytest.raises(ConfigurationError, match="at least 1"):
            WorkerUtils(max_pool_size=0)

    @AUTOCOMMITS
    async def test_lost_connection_error_says_that_the_outcome_is_unknown(
        self, utils: WorkerUtils, db: asyncpg.Connection, database: str
    ) -> None:
        other = await asyncpg.connect(database)
        async with other.transaction():
            await other.execute("lock table graphile_worker._private_jobs")
            adding = asyncio.create_task(utils.add_job("t", connection=db))
            await until_blocked(other, db.get_server_pid())
            await other.execute("select pg_terminate_backend($1)", db.get_server_pid())
            with pytest.raises(DatabaseError, match=r"lost.*may have been"):
                await adding
        await other.close()

    async def test_quick_add_job_adds_a_job(self, database: str, db: asyncpg.Connection) -> None:
        job = await quick_add_job("t", {"a": 1}, dsn=database, priority=4, run_at=timedelta(1))
        assert (job.priority, job.payload, job.state) == (4, {"a": 1}, "scheduled")
        assert await count(db) == 1

    async def test_quick_add_job_and_run_migrations_leave_a_callers_pool_open(
        self, empty_database: str
    ) -> None:
        async with asyncpg.create_pool(empty_database, min_size=1, max_size=1) as pool:
            await run_migrations(pool=pool)
            await run_migrations(pool=pool, schema="other")
            job = await quick_add_job("t", pool=pool)
            elsewhere = await quick_add_job("u", pool=pool, schema="other")
            assert await pool.fetchval("select id from graphile_worker.jobs") == job.id
            assert await pool.fetchval("select id from other.jobs") == elsewhere.id
            with pytest.raises(ConfigurationError, match="not both"):
                await run_migrations(empty_database, pool=pool)
            with pytest.raises(ConfigurationError, match="not both"):
                await quick_add_job("t", dsn=empty_database, pool=pool)

    async def test_repr_and_errors_do_not_show_the_password(self) -> None:
        utils = WorkerUtils(dsn="postgresql://me:hidden@127.0.0.1:1/x")
        assert "hidden" not in repr(utils)
        with pytest.raises(DatabaseError, match=r"127\.0\.0\.1:1, database x") as caught:
            await utils.add_job("t")
        assert "hidden" not in str(caught.value)
        await utils.close()


def test_functions_that_add_jobs_have_the_same_parameters() -> None:
    def parameters(function: Any) -> dict[str, inspect.Parameter]:
        return {name: it for name, it in inspect.signature(function).parameters.items() if name != "self"}

    expected = parameters(WorkerUtils.add_job)
    assert list(expected) == ["identifier", "payload", "connection", "require_transaction", "options"]
    assert expected["options"].annotation == "Unpack[JobOptions]"
    quick, batch = parameters(quick_add_job), parameters(WorkerUtils.add_batch_job)
    assert {name: it for name, it in quick.items() if name not in {"dsn", "pool", "schema"}} == expected
    assert {name: it for name, it in batch.items() if name != "items"} == {
        name: it for name, it in expected.items() if name != "payload"
    }
    job_options = {*JobOptions.__annotations__}
    assert {*JobSpec.__struct_fields__} - {"identifier", "payload"} == job_options - {"delay", "timeout"}, (
        "a delay becomes run_at, and a timeout becomes a flag"
    )


class TestDelay:
    async def test_delay_in_seconds_or_as_timedelta_sets_the_start(self, database: str) -> None:
        async with WorkerUtils(database) as utils:
            by_seconds = await utils.add_job("task", delay=90)
            by_timedelta = await utils.add_job("task", delay=timedelta(hours=1))
            at_once = await utils.add_job("task", delay=0)
        assert by_seconds.run_at - by_seconds.created_at == timedelta(seconds=90)
        assert by_timedelta.run_at - by_timedelta.created_at == timedelta(hours=1)
        assert at_once.state is JobState.READY

    @pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), "5 min", True, 1e300])
    async def test_invalid_delay_is_rejected(self, database: str, delay: Any) -> None:
        async with WorkerUtils(database) as utils:
            with pytest.raises(InvalidJobError, match="delay") as caught:
                await utils.add_job("task", delay=delay)
        assert caught.value.argument == "delay"

    async def test_delay_and_run_at_exclude_each_other(self, database: str) -> None:
        async with WorkerUtils(database) as utils:
            with pytest.raises(InvalidJobError, match="run_at or delay, not both"):
                await utils.add_job("task", delay=5, run_at=timedelta(seconds=5))

    def test_later_using_replaces_a_delay_by_run_at_and_the_other_way_round(self) -> None:
        @task
        async def remind(user: int) -> None: ...

        tomorrow = datetime(2030, 1, 1, tzinfo=UTC)
        assert remind.using(delay=5).using(run_at=tomorrow).spec(1).run_at == tomorrow
        assert remind.using(run_at=tomorrow).using(delay=5).spec(1).run_at == timedelta(seconds=5)
