"""The client compensates for defects of the SQL functions that Node's package installs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import asyncpg
import pytest

from graphile_worker import CleanupTask, DatabaseError, JobSpec, WorkerUtils, run_migrations
from support import node
from support.jobs import AUTOCOMMITS, add, lock
from support.waiting import until_blocked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LATER = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
async def utils(empty_database: str) -> AsyncIterator[WorkerUtils]:
    await node.install("0.18.0", empty_database)
    await run_migrations(dsn=empty_database)
    async with WorkerUtils(dsn=empty_database) as utils:
        yield utils


@pytest.fixture
async def connections(
    empty_database: str,
) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.Connection]]:
    worker, adder = await asyncpg.connect(empty_database), await asyncpg.connect(empty_database)
    yield worker, adder
    await worker.close()
    await adder.close()


@AUTOCOMMITS
async def test_keyed_add_without_a_result_is_repeated(
    utils: WorkerUtils, connections: tuple[asyncpg.Connection, asyncpg.Connection], empty_database: str
) -> None:
    worker, adder = connections
    observer = await asyncpg.connect(empty_database)
    old = await utils.add_job("t", "old", job_key="k")
    claim = worker.transaction()
    await claim.start()
    await lock(worker, old.id)
    adding = asyncio.create_task(utils.add_job("t", "new", job_key="k", connection=adder))
    await until_blocked(observer, adder.get_server_pid())

    await claim.commit()
    new = await adding

    assert (new.payload, new.key, new.is_available) == ("new", "k", True)
    assert new.id != old.id
    await observer.close()


async def test_nodes_function_may_return_no_job_for_a_keyed_add(
    utils: WorkerUtils, connections: tuple[asyncpg.Connection, asyncpg.Connection], empty_database: str
) -> None:
    """The defect behind the test above. If this test fails one day, Node has fixed it."""
    worker, adder = connections
    observer = await asyncpg.connect(empty_database)
    old = await utils.add_job("t", job_key="k")
    claim = worker.transaction()
    await claim.start()
    await lock(worker, old.id)
    adding = asyncio.create_task(add(adder, job_key="k"))
    await until_blocked(observer, adder.get_server_pid())

    await claim.commit()

    assert (await adding)["id"] is None
    await observer.close()


async def test_add_jobs_matches_jobs_to_specs_by_content(utils: WorkerUtils) -> None:
    specs = [
        JobSpec(
            f"t{n * 7 % 5}",
            {"n": n // 2},
            queue_name=f"q{n % 3}" if n % 2 else None,
            run_at=[None, LATER, timedelta(minutes=n)][n % 3],
            priority=n % 4 or None,
            max_attempts=n % 5 or None,
            flags=["a", "b"] if n % 2 else None,
            job_key=f"k{n}" if n % 4 == 0 else None,
        )
        for n in range(60)
    ]

    jobs = await utils.add_jobs(specs)

    assert len({job.id for job in jobs}) == 60
    assert {job.id: job for job in await utils.list_jobs()} == {job.id: job for job in jobs}
    for spec, job in zip(specs, jobs, strict=True):
        assert (job.task_identifier, job.payload, job.key) == (spec.identifier, spec.payload, spec.job_key)
        assert (job.queue_name, job.priority) == (spec.queue_name, spec.priority or 0)
        assert job.flags == (spec.flags or frozenset())


async def test_add_jobs_matches_times_in_a_repeated_hour(utils: WorkerUtils) -> None:
    twice = datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    first, second = await utils.add_jobs(
        [JobSpec("t", run_at=twice), JobSpec("t", run_at=twice.replace(fold=1))]
    )
    assert second.run_at - first.run_at == timedelta(hours=1)


@AUTOCOMMITS
async def test_add_jobs_repeats_keyed_specs_that_conflicted_with_a_claim(
    utils: WorkerUtils, connections: tuple[asyncpg.Connection, asyncpg.Connection], empty_database: str
) -> None:
    worker, adder = connections
    observer = await asyncpg.connect(empty_database)
    old = {key: await utils.add_job("t", job_key=key) for key in ("a", "b", "c")}
    claim = worker.transaction()
    await claim.start()
    await lock(worker, old["b"].id)
    specs = [JobSpec("t", key, job_key=key) for key in ("a", "b", "c")] + [JobSpec("t", "d")]
    adding = asyncio.create_task(utils.add_jobs(specs, connection=adder))
    await until_blocked(observer, adder.get_server_pid())

    await claim.commit()
    jobs = await adding

    assert [job.payload for job in jobs] == ["a", "b", "c", "d"]
    assert [job.id == old.get(str(job.key), job).id for job in jobs] == [True, False, True, True]
    await observer.close()


async def test_cleanup_does_not_orphan_a_job_that_nodes_function_is_adding(
    utils: WorkerUtils,
    connections: tuple[asyncpg.Connection, asyncpg.Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node's function takes the same locks before it adds the job, so the cleanup waits for it."""
    monkeypatch.setattr("graphile_worker._db.queries.cleanup._LOCK_ATTEMPTS", 1)
    await utils.complete_jobs([(await utils.add_job("t", queue_name="q")).id])
    _, adder = connections
    async with adder.transaction():
        await add(adder, "t", queue_name="q")
        for task in (CleanupTask.GC_JOB_QUEUES, CleanupTask.GC_TASK_IDENTIFIERS):
            with pytest.raises(DatabaseError, match="were removed"):
                await utils.cleanup(task)
    assert await utils.cleanup(CleanupTask) == (0, 0, 0)
    [job] = await utils.list_jobs()
    assert (job.task_identifier, job.queue_name) == ("t", "q")
