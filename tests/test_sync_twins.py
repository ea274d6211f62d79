"""Methods with _sync: of the app, of its utils and of WorkerUtils, from code without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from graphile_worker import App, ConfigurationError, JobSpec, RunSummary, WorkerUtils

RUNS_A_PROGRAM = {"run"}
"""Methods of an app without a twin: a worker runs until the program ends. `run_sync` is another method."""


@pytest.fixture
def app(database: str) -> Iterator[App]:
    found = App(database)
    yield found
    found.close_sync()


def test_every_method_of_the_client_has_a_sync_twin() -> None:
    for name, _ in inspect.getmembers(WorkerUtils, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            assert hasattr(WorkerUtils, f"{name}_sync"), name


def test_every_method_of_the_app_has_a_sync_twin() -> None:
    for name, _ in inspect.getmembers(App, inspect.iscoroutinefunction):
        if not name.startswith("_") and name not in RUNS_A_PROGRAM:
            assert hasattr(App, f"{name}_sync"), name


def test_sync_twin_takes_the_parameters_of_its_method() -> None:
    for owner in (App, WorkerUtils):
        for name, method in inspect.getmembers(owner, inspect.iscoroutinefunction):
            twin = getattr(owner, f"{name}_sync", None)
            if twin is not None and name not in RUNS_A_PROGRAM:
                assert not inspect.iscoroutinefunction(twin)
                assert twin.__name__ == f"{name}_sync"
                assert inspect.signature(twin).parameters == inspect.signature(method).parameters


def test_client_without_an_event_loop_manages_jobs(database: str) -> None:
    with WorkerUtils(database) as utils:
        utils.migrate_sync()
        job = utils.add_job_sync("t", job_key="k")
        assert utils.get_job_sync(key="k") == job
        assert [found.id for found in utils.list_jobs_sync(task="t")] == [job.id]
        assert utils.stats_sync().ready == 1
        removed = utils.remove_job_sync("k")
        assert removed is not None


def test_app_without_an_event_loop_manages_jobs(app: App) -> None:
    @app.task
    def work() -> None: ...

    app.migrate_sync()
    jobs = [work.enqueue_sync(), *app.add_jobs_sync([JobSpec("other")])]
    assert app.utils.list_jobs_sync() == jobs
    assert app.utils.stats_sync().ready == 2
    assert app.utils.complete_jobs_sync(job.id for job in jobs[1:]) == jobs[1:]
    assert app.run_once_sync() == RunSummary(succeeded=1)
    assert app.utils.stats_sync().total == 0


def test_utils_of_an_app_work_on_a_sync_connection(app: App, database: str) -> None:
    with psycopg.connect(database) as connection:
        job = app.utils.add_job_sync("t", connection=connection)
        assert app.utils.get_job_sync(id=job.id, connection=connection) == job
        connection.rollback()
    assert app.utils.get_job_sync(id=job.id) is None


def test_all_sync_methods_of_an_app_share_its_connections(app: App, database: str) -> None:
    app.add_job_sync("t")
    app.utils.stats_sync()
    app.run_sync(lambda: app.utils.stats())  # noqa: PLW0108 - app.utils must be read inside the call
    with psycopg.connect(database) as connection:
        found = connection.execute(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        assert found.fetchone() == (1,)


def test_awaited_method_of_utils_that_were_read_without_an_event_loop_is_refused(app: App) -> None:
    utils = app.utils
    with pytest.raises(ConfigurationError, match=r"app\.utils\.stats_sync\(\).*read app\.utils there"):
        asyncio.run(utils.stats())


def test_utils_of_an_app_follow_its_settings(app: App, database: str) -> None:
    assert app.utils.schema == "graphile_worker"
    app.configure(schema="other", require_transaction=True)
    assert app.utils.schema == "other"
    with (
        psycopg.connect(database, autocommit=True) as connection,
        pytest.raises(ConfigurationError, match="is not in a transaction"),
    ):
        app.utils.add_job_sync("t", connection=connection)


async def test_sync_method_in_a_running_event_loop_names_the_async_one(database: str) -> None:
    app, utils = App(database), WorkerUtils(database)

    @app.task
    async def work() -> None: ...

    for call in (work.enqueue_sync, lambda: app.add_job_sync("t"), utils.stats_sync, app.migrate_sync):
        with pytest.raises(ConfigurationError, match="Use the method without _sync, with await"):
            call()
    with pytest.raises(ConfigurationError, match="Use the method without _sync, with await"):
        app.utils.stats_sync()
    await app.close()


def test_iterables_are_read_in_the_thread_of_the_caller(app: App) -> None:
    """A Django queryset, for example, cannot be read anywhere else."""
    threads: set[int] = set()

    def read_here(values: list[Any]) -> Iterator[Any]:
        for value in values:
            threads.add(threading.get_ident())
            yield value

    app.migrate_sync()
    jobs = app.utils.add_jobs_sync(read_here([JobSpec("t")] * 4))
    app.utils.add_jobs_sync(specs=read_here([JobSpec("t")]))
    app.add_jobs_sync(read_here([JobSpec("t")]))
    app.utils.add_batch_job_sync("batch", read_here([1, 2]))
    app.utils.complete_jobs_sync(read_here([jobs[0].id]))
    app.utils.reschedule_jobs_sync(job_ids=read_here([jobs[1].id]), priority=3)
    app.utils.permanently_fail_jobs_sync(read_here([jobs[2].id]), "broken")
    assert threads == {threading.get_ident()}
    assert app.utils.stats_sync().total == 6
