"""Jobs added and changed in the caller's transaction, on async connections of every driver and ORM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from graphile_worker import App, InvalidJobError, JobSpec, JobState, Middleware, WorkerUtils
from support import stacks

HOSTILE = {
    "text": "%s %(x)s %% :x ::x \\:x $1 $$ ? {x} ' \" \\ é 🐍 \N{LINE SEPARATOR}",
    "big": 12345678901234567890123,
    "nested": [{"null": None, "deep": {"%s": ":x"}}],
}


@pytest.fixture(params=stacks.ASYNC)
async def stack(request: pytest.FixtureRequest, database: str) -> AsyncIterator[stacks.AsyncStack]:
    async with stacks.ASYNC[request.param](database) as found:
        yield found


@pytest.fixture
def other(database: str) -> Iterator[psycopg.Connection[Any]]:
    """Another connection, which sees what is committed."""
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def app() -> App:
    """An app that cannot reach a database by itself."""
    return App("postgresql://ann@127.0.0.1:1/none")


def count(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select count(*) from graphile_worker.jobs").fetchone()
    assert row is not None
    return int(row[0])


async def test_job_exists_once_the_caller_commits(
    app: App, stack: stacks.AsyncStack, other: psycopg.Connection[Any]
) -> None:
    job = await app.add_job("send", {"to": "Ann"}, connection=stack.connection)
    assert (job.task_identifier, job.payload, count(other)) == ("send", {"to": "Ann"}, 0)
    await stack.commit()
    assert count(other) == 1


async def test_job_does_not_exist_if_the_caller_rolls_back(
    app: App, stack: stacks.AsyncStack, other: psycopg.Connection[Any]
) -> None:
    await app.add_job("send", connection=stack.connection)
    await app.add_jobs([JobSpec("send")] * 3, connection=stack.connection)
    await stack.rollback()
    assert count(other) == 0


@pytest.mark.sample(4)
async def test_every_option_and_hostile_value_is_stored(
    app: App, stack: stacks.AsyncStack, database: str
) -> None:
    at = datetime(2040, 1, 2, 3, 4, 5, 678901, UTC)
    options: Any = {
        "queue_name": "q %s :x $1",
        "run_at": at,
        "max_attempts": 3,
        "job_key": "k' %s :x $1 \\",
        "job_key_mode": "preserve_run_at",
        "priority": -7,
        "flags": ['f,{}" %s', "g"],
    }
    job = await app.add_job("send", HOSTILE, connection=stack.connection, **options)
    [bulk] = await app.add_jobs(
        [JobSpec("send", HOSTILE, **{**options, "job_key": "other"})], connection=stack.connection
    )
    await stack.commit()
    async with WorkerUtils(database) as utils:
        assert await utils.get_job(id=job.id) == job
        assert await utils.get_job(id=bulk.id) == bulk
    assert (job.payload, job.run_at, job.key) == (HOSTILE, at, options["job_key"])
    assert job.flags == frozenset(options["flags"])


@pytest.mark.sample(4)
async def test_refused_job_does_not_abort_the_transaction(
    app: App, stack: stacks.AsyncStack, other: psycopg.Connection[Any]
) -> None:
    other.execute("alter table graphile_worker._private_jobs add constraint small check (priority < 100)")
    await app.add_job("kept", connection=stack.connection)
    with pytest.raises(Exception, match="refused the statement") as caught:
        await app.add_job("refused", priority=100, connection=stack.connection)
    assert caught.value.__cause__ is not None
    with pytest.raises(Exception, match="refused the statement"):
        await app.add_jobs([JobSpec("a"), JobSpec("b", priority=100)], connection=stack.connection)
    await stack.commit()
    assert count(other) == 1


@pytest.mark.sample(4)
async def test_savepoint_of_the_caller_rolls_back_its_jobs(
    app: App, stack: stacks.AsyncStack, other: psycopg.Connection[Any]
) -> None:
    await app.add_job("kept", connection=stack.connection)
    await stack.execute("savepoint mine")
    await app.add_job("undone", connection=stack.connection)
    await stack.execute("rollback to savepoint mine")
    await app.add_job("kept", connection=stack.connection)
    await stack.commit()
    assert count(other) == 2


@pytest.mark.sample(4)
async def test_jobs_are_changed_in_the_transaction(
    stack: stacks.AsyncStack, other: psycopg.Connection[Any], database: str
) -> None:
    on: Any = {"connection": stack.connection}
    utils = WorkerUtils(database)
    jobs = await utils.add_jobs([JobSpec("t", n, job_key=f"k{n}") for n in range(5)], **on)
    removed = await utils.remove_job("k0", **on)
    assert removed is not None
    assert removed.id == jobs[0].id
    assert await utils.remove_job("none", **on) is None
    assert [job.id for job in await utils.complete_jobs([jobs[1].id], **on)] == [jobs[1].id]
    [failed] = await utils.permanently_fail_jobs([jobs[2].id], "broken", **on)
    assert (failed.last_error, failed.state) == ("broken", "failed")
    found = await utils.get_job(id=failed.id, **on)
    assert found is not None
    assert found.failed_at == failed.updated_at
    [later] = await utils.reschedule_jobs([jobs[3].id], run_at=timedelta(days=1), priority=4, **on)
    assert (later.priority, later.run_at) == (4, jobs[3].updated_at + timedelta(days=1))
    assert await utils.get_job(key="k3", **on) == later
    assert await utils.cancel_job(jobs[4].id, "no", **on) == "cancelled"
    assert await utils.cancel_job(jobs[4].id, **on) is None
    assert count(other) == 0
    await stack.commit()
    assert count(other) == 3


async def test_reads_see_the_jobs_of_the_transaction(stack: stacks.AsyncStack, database: str) -> None:
    on: Any = {"connection": stack.connection}
    utils = WorkerUtils(database)
    specs = [JobSpec("t", {"n": n, **HOSTILE}, job_key=f"k{n}", queue_name=f"q{n % 2}") for n in range(4)]
    specs += [JobSpec("later", run_at=timedelta(days=1)), JobSpec("%s :x $1 \\")]
    first, second, third, fourth, later, odd = await utils.add_jobs(specs, **on)
    [failed] = await utils.permanently_fail_jobs([fourth.id], "broken :x %s", **on)

    async def ids(**filters: Any) -> list[int]:
        return [job.id for job in await utils.list_jobs(**filters, **on)]

    every = [first.id, second.id, third.id, fourth.id, later.id, odd.id]
    assert await ids() == every
    assert await ids(limit=2, after_id=first.id) == [second.id, third.id]
    assert await ids(task="t", state="ready") == [first.id, second.id, third.id]
    assert await ids(state=JobState.SCHEDULED) == [later.id]
    assert await ids(state="failed", search="BROKEN :X %S") == [failed.id]
    assert await ids(queue_name="q1") == [second.id, fourth.id]
    assert await ids(key="k2") == [third.id]
    assert await ids(locked_by="no worker") == []
    assert await ids(task="%s :x $1 \\") == [odd.id]
    counted = await utils.stats(**on)
    assert (counted.ready, counted.scheduled, counted.failed) == (4, 1, 1)
    assert counted.tasks["t"].oldest_due == first.run_at
    assert await utils.workers(**on) == await utils.workers(include_locks=False, **on) == []
    assert await utils.known_crontabs(**on) == {}
    await utils.force_unlock_workers(["no worker"], **on)
    found = await utils.list_jobs(**on)
    await stack.commit()
    async with WorkerUtils(database) as own:
        assert await own.list_jobs() == found
        assert await own.stats() == counted


@pytest.mark.sample(3)
async def test_many_jobs_are_added_in_order_from_an_iterator(
    app: App, stack: stacks.AsyncStack, other: psycopg.Connection[Any]
) -> None:
    jobs = await app.add_jobs(
        (JobSpec("t", {"n": n, **HOSTILE}) for n in range(2500)), connection=stack.connection
    )
    assert [job.payload["n"] for job in jobs] == list(range(2500))
    assert len({job.id for job in jobs}) == 2500
    await stack.commit()
    assert count(other) == 2500


@pytest.mark.sample(3)
async def test_error_of_the_callers_iterator_adds_no_job(
    app: App, stack: stacks.AsyncStack, other: psycopg.Connection[Any]
) -> None:
    def specs() -> Iterator[JobSpec]:
        for _ in range(1500):
            yield JobSpec("t")
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        await app.add_jobs(specs(), connection=stack.connection)
    await app.add_job("t", connection=stack.connection)
    await stack.commit()
    assert count(other) == 1


class Tagging(Middleware):
    async def enqueue(self, specs: Any, proceed: Any) -> Any:
        return await proceed([spec.replace(priority=9) for spec in specs])


@pytest.mark.sample(4)
async def test_middleware_runs_around_adding(stack: stacks.AsyncStack) -> None:
    app = App("postgresql://ann@127.0.0.1:1/none", middleware=[Tagging()])

    @app.task
    def send(to: str) -> None: ...

    job = await send.using(connection=stack.connection).enqueue(to="Ann")
    assert job.priority == 9
    many = await send.using(connection=stack.connection).enqueue_many([{"to": "a"}, {"to": "b"}])
    assert [job.priority for job in many] == [9, 9]


async def test_invalid_arguments_are_refused_before_the_database(app: App, stack: stacks.AsyncStack) -> None:
    with pytest.raises(InvalidJobError):
        await app.add_job("t", {"nul": "\0"}, job_key="\0", connection=stack.connection)
