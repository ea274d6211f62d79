"""Jobs added and changed in the caller's transaction, on sync connections of every driver and ORM."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(params=stacks.SYNC)
def stack(request: pytest.FixtureRequest, database: str) -> Iterator[stacks.SyncStack]:
    with stacks.SYNC[request.param](database) as found:
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


def test_job_exists_once_the_caller_commits(
    app: App, stack: stacks.SyncStack, other: psycopg.Connection[Any]
) -> None:
    job = app.add_job_sync("send", {"to": "Ann"}, connection=stack.connection)
    assert (job.task_identifier, job.payload, count(other)) == ("send", {"to": "Ann"}, 0)
    stack.commit()
    assert count(other) == 1


def test_job_does_not_exist_if_the_caller_rolls_back(
    app: App, stack: stacks.SyncStack, other: psycopg.Connection[Any]
) -> None:
    app.add_job_sync("send", connection=stack.connection)
    app.add_jobs_sync([JobSpec("send")] * 3, connection=stack.connection)
    stack.rollback()
    assert count(other) == 0


@pytest.mark.sample(4)
def test_every_option_and_hostile_value_is_stored(app: App, stack: stacks.SyncStack, database: str) -> None:
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
    job = app.add_job_sync("send", HOSTILE, connection=stack.connection, **options)
    [bulk] = app.add_jobs_sync(
        [JobSpec("send", HOSTILE, **{**options, "job_key": "other"})], connection=stack.connection
    )
    stack.commit()
    with WorkerUtils(database) as utils:
        assert utils.get_job_sync(id=job.id) == job
        assert utils.get_job_sync(id=bulk.id) == bulk
    assert (job.payload, job.run_at, job.key) == (HOSTILE, at, options["job_key"])
    assert job.flags == frozenset(options["flags"])


@pytest.mark.sample(4)
def test_refused_job_does_not_abort_the_transaction(
    app: App, stack: stacks.SyncStack, other: psycopg.Connection[Any]
) -> None:
    other.execute("alter table graphile_worker._private_jobs add constraint small check (priority < 100)")
    app.add_job_sync("kept", connection=stack.connection)
    with pytest.raises(Exception, match="refused the statement") as caught:
        app.add_job_sync("refused", priority=100, connection=stack.connection)
    assert caught.value.__cause__ is not None
    with pytest.raises(Exception, match="refused the statement"):
        app.add_jobs_sync([JobSpec("a"), JobSpec("b", priority=100)], connection=stack.connection)
    stack.commit()
    assert count(other) == 1


@pytest.mark.sample(4)
def test_savepoint_of_the_caller_rolls_back_its_jobs(
    app: App, stack: stacks.SyncStack, other: psycopg.Connection[Any]
) -> None:
    app.add_job_sync("kept", connection=stack.connection)
    stack.execute("savepoint mine")
    app.add_job_sync("undone", connection=stack.connection)
    stack.execute("rollback to savepoint mine")
    app.add_job_sync("kept", connection=stack.connection)
    stack.commit()
    assert count(other) == 2


@pytest.mark.sample(3)
def test_jobs_are_changed_in_the_transaction(
    stack: stacks.SyncStack, other: psycopg.Connection[Any], database: str
) -> None:
    on: Any = {"connection": stack.connection}
    utils = WorkerUtils(database)
    jobs = utils.add_jobs_sync([JobSpec("t", n, job_key=f"k{n}") for n in range(5)], **on)
    removed = utils.remove_job_sync("k0", **on)
    assert removed is not None
    assert removed.id == jobs[0].id
    assert utils.remove_job_sync("none", **on) is None
    assert [job.id for job in utils.complete_jobs_sync([jobs[1].id], **on)] == [jobs[1].id]
    [failed] = utils.permanently_fail_jobs_sync([jobs[2].id], "broken", **on)
    assert (failed.last_error, failed.state) == ("broken", "failed")
    found = utils.get_job_sync(id=failed.id, **on)
    assert found is not None
    assert found.failed_at == failed.updated_at
    [later] = utils.reschedule_jobs_sync([jobs[3].id], run_at=timedelta(days=1), priority=4, **on)
    assert (later.priority, later.run_at) == (4, jobs[3].updated_at + timedelta(days=1))
    assert utils.get_job_sync(key="k3", **on) == later
    assert utils.cancel_job_sync(jobs[4].id, "no", **on) == "cancelled"
    assert utils.cancel_job_sync(jobs[4].id, **on) is None
    assert count(other) == 0
    stack.commit()
    assert count(other) == 3


def test_reads_see_the_jobs_of_the_transaction(stack: stacks.SyncStack, database: str) -> None:
    on: Any = {"connection": stack.connection}
    utils = WorkerUtils(database)
    specs = [JobSpec("t", {"n": n, **HOSTILE}, job_key=f"k{n}", queue_name=f"q{n % 2}") for n in range(4)]
    specs += [JobSpec("later", run_at=timedelta(days=1)), JobSpec("%s :x $1 \\")]
    first, second, third, fourth, later, odd = utils.add_jobs_sync(specs, **on)
    [failed] = utils.permanently_fail_jobs_sync([fourth.id], "broken :x %s", **on)

    def ids(**filters: Any) -> list[int]:
        return [job.id for job in utils.list_jobs_sync(**filters, **on)]

    every = [first.id, second.id, third.id, fourth.id, later.id, odd.id]
    assert ids() == every
    assert ids(limit=2, after_id=first.id) == [second.id, third.id]
    assert ids(task="t", state="ready") == [first.id, second.id, third.id]
    assert ids(state=JobState.SCHEDULED) == [later.id]
    assert ids(state="failed", search="BROKEN :X %S") == [failed.id]
    assert ids(queue_name="q1") == [second.id, fourth.id]
    assert ids(key="k2") == [third.id]
    assert ids(locked_by="no worker") == []
    assert ids(task="%s :x $1 \\") == [odd.id]
    counted = utils.stats_sync(**on)
    assert (counted.ready, counted.scheduled, counted.failed) == (4, 1, 1)
    assert counted.tasks["t"].oldest_due == first.run_at
    assert utils.workers_sync(**on) == utils.workers_sync(include_locks=False, **on) == []
    assert utils.known_crontabs_sync(**on) == {}
    utils.force_unlock_workers_sync(["no worker"], **on)
    found = utils.list_jobs_sync(**on)
    stack.commit()
    with WorkerUtils(database) as own:
        assert own.list_jobs_sync() == found
        assert own.stats_sync() == counted


@pytest.mark.sample(3)
def test_many_jobs_are_added_in_order_from_an_iterator(
    app: App, stack: stacks.SyncStack, other: psycopg.Connection[Any]
) -> None:
    jobs = app.add_jobs_sync(
        (JobSpec("t", {"n": n, **HOSTILE}) for n in range(2500)), connection=stack.connection
    )
    assert [job.payload["n"] for job in jobs] == list(range(2500))
    assert len({job.id for job in jobs}) == 2500
    stack.commit()
    assert count(other) == 2500


@pytest.mark.sample(3)
def test_error_of_the_callers_iterator_adds_no_job(
    app: App, stack: stacks.SyncStack, other: psycopg.Connection[Any]
) -> None:
    def specs() -> Iterator[JobSpec]:
        for _ in range(1500):
            yield JobSpec("t")
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        app.add_jobs_sync(specs(), connection=stack.connection)
    app.add_job_sync("t", connection=stack.connection)
    stack.commit()
    assert count(other) == 1


class Tagging(Middleware):
    async def enqueue(self, specs: Any, proceed: Any) -> Any:
        return await proceed([spec.replace(priority=9) for spec in specs])


@pytest.mark.sample(3)
def test_middleware_runs_around_adding(stack: stacks.SyncStack) -> None:
    app = App("postgresql://ann@127.0.0.1:1/none", middleware=[Tagging()])

    @app.task
    def send(to: str) -> None: ...

    assert send.using(connection=stack.connection).enqueue_sync(to="Ann").priority == 9
    many = send.using(connection=stack.connection).enqueue_many_sync([{"to": "a"}, {"to": "b"}])
    assert [job.priority for job in many] == [9, 9]


@pytest.mark.sample(4)
def test_invalid_arguments_are_refused_before_the_database(app: App, stack: stacks.SyncStack) -> None:
    with pytest.raises(InvalidJobError):
        app.add_job_sync("t", {"nul": "\0"}, job_key="\0", connection=stack.connection)
