"""Methods of Celery, Procrastinate, RQ and ARQ: what they add, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import psycopg
import pytest

from graphile_worker import App, ConfigurationError, InvalidJobError, task
from graphile_worker.contrib.arq import JobPool
from graphile_worker.contrib.celery import CeleryTask, celery_methods
from graphile_worker.contrib.procrastinate import procrastinate_methods
from graphile_worker.contrib.rq import Queue
from graphile_worker.testing import Databases

LATER = datetime(2040, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
def app(database: str) -> Iterator[App]:
    made = App(database)

    @made.task
    def resize(image: int, width: int = 800) -> int:
        return image * width

    yield made
    made.close_sync()


class TestCelery:
    def test_apply_async_passes_its_options_on(self, app: App) -> None:
        resize: Any = celery_methods(app.tasks["resize"])
        soon = resize.apply_async((1,), {"width": 5}, countdown=60, priority=3, time_limit=9)
        assert (soon.payload, soon.priority) == ({"image": 1, "width": 5}, 3)
        assert soon.run_at - soon.created_at == timedelta(minutes=1)
        assert soon.flags
        assert resize.apply_async((1,), eta=LATER).run_at == LATER
        assert resize.delay(1, width=6).payload == {"image": 1, "width": 6}

    def test_jobs_belong_to_the_transaction_of_the_session(self, app: App, database: str) -> None:
        resize: Any = celery_methods(app.tasks["resize"])
        with psycopg.connect(database) as connection:
            resize.apply_async((1,), connection=connection)
            connection.rollback()
        assert app.utils.list_jobs_sync() == []

    @pytest.mark.parametrize(
        ("option", "advice"),
        [
            ("queue", "docs/migrating/celery.md"),
            ("expires", "raise Cancel"),
            ("task_id", "job_key="),
            ("link", "add the next job"),
            ("contdown", "Task.using"),
        ],
    )
    def test_other_options_are_refused_with_advice(self, app: App, option: str, advice: str) -> None:
        resize: Any = celery_methods(app.tasks["resize"])
        with pytest.raises(InvalidJobError, match=f"apply_async does not support {option}=.*{advice}"):
            resize.apply_async((1,), **{option: "value"})

    async def test_delay_in_a_coroutine_says_to_await_enqueue(self, app: App) -> None:
        resize: Any = celery_methods(app.tasks["resize"])
        with pytest.raises(ConfigurationError, match="event loop"):
            resize.delay(1)

    def test_task_that_an_app_includes_keeps_the_methods(self, database: str) -> None:
        @celery_methods
        @task
        def greet(name: str) -> str:
            return f"Hello, {name}"

        module = ModuleType("greetings")
        vars(module)["greet"] = greet
        app = App(database)
        app.include(module)
        included = app.tasks["greet"]
        assert isinstance(included, CeleryTask)
        assert included.delay("Ann").task_identifier == "greet"
        assert greet("Bob") == "Hello, Bob"
        assert app.run_once_sync().succeeded == 1
        app.close_sync()

    def test_function_that_is_not_a_task_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Put @celery_methods above @app\.task"):
            celery_methods(print)  # type: ignore[arg-type]


class TestProcrastinate:
    def test_configure_passes_its_options_on(self, app: App) -> None:
        resize: Any = procrastinate_methods(app.tasks["resize"])
        deferrer = resize.configure(
            lock="images", queueing_lock="image:1", schedule_at=LATER, priority=5, task_kwargs={"image": 1}
        )
        job = app.utils.get_job_sync(id=deferrer.defer(width=5))
        assert job is not None
        assert (job.payload, job.queue_name, job.key, job.priority, job.run_at) == (
            {"image": 1, "width": 5},
            "images",
            "image:1",
            -5,
            LATER,
        )

    async def test_batches_return_ids_in_order(self, app: App) -> None:
        resize: Any = procrastinate_methods(app.tasks["resize"])
        ids = await resize.batch_defer_async({"image": 1}, {"image": 2})
        ids.append(await resize.defer_async(image=3))
        jobs = {job.id: job.payload["image"] for job in await app.utils.list_jobs()}
        assert [jobs[job_id] for job_id in ids] == [1, 2, 3]
        await app.close()

    def test_sync_methods_return_ids(self, app: App) -> None:
        resize: Any = procrastinate_methods(app.tasks["resize"])
        assert len({resize.defer(image=1), *resize.batch_defer({"image": 2}, {"image": 3})}) == 3

    def test_queue_is_refused_with_advice(self, app: App) -> None:
        with pytest.raises(
            InvalidJobError, match=r"does not support queue=.*docs/migrating/procrastinate.md"
        ):
            procrastinate_methods(app.tasks["resize"]).configure(queue="images")


class TestRq:
    def test_options_are_passed_on(self, app: App) -> None:
        queue = Queue(app)
        resize = app.tasks["resize"]
        job = queue.enqueue(resize, 1, width=5, job_id="image:1", at_front=True, job_timeout=9)
        assert (job.payload, job.key, job.priority) == ({"image": 1, "width": 5}, "image:1", -100)
        later = queue.enqueue_in(timedelta(minutes=1), "resize", 2)
        assert later.run_at - later.created_at == timedelta(minutes=1)
        assert queue.enqueue_at(LATER, resize, image=3).run_at == LATER

    def test_jobs_belong_to_the_transaction_of_the_session(self, app: App, database: str) -> None:
        with psycopg.connect(database) as connection:
            Queue(app, connection=connection).enqueue("resize", 1)
            connection.rollback()
        assert app.utils.list_jobs_sync() == []

    def test_parameter_of_the_task_with_the_name_of_an_option_is_an_argument(self, app: App) -> None:
        @app.task
        def describe(description: str) -> None: ...

        assert Queue(app).enqueue(describe, description="x").payload == {"description": "x"}
        with pytest.raises(InvalidJobError, match=r"does not support description="):
            Queue(app).enqueue("resize", 1, description="x")

    def test_function_that_is_not_a_task_is_refused(self, app: App) -> None:
        with pytest.raises(ConfigurationError, match=r"print is not a task\. Decorate the function"):
            Queue(app).enqueue(print, 1)
        with pytest.raises(KeyError, match="Did you mean 'resize'"):
            Queue(app).enqueue("resise", 1)


class TestArq:
    async def test_options_are_passed_on(self, app: App) -> None:
        pool = JobPool(app)
        job = await pool.enqueue_job("resize", 1, width=5, _job_id="image:1", _defer_until=LATER)
        assert (job.payload, job.key, job.run_at) == ({"image": 1, "width": 5}, "image:1", LATER)
        soon = await pool.enqueue_job("resize", 2, _defer_by=timedelta(minutes=1))
        assert soon.run_at - soon.created_at == timedelta(minutes=1)
        with pytest.raises(InvalidJobError, match=r"does not support _expires=.*raise Cancel"):
            await pool.enqueue_job("resize", 1, _expires=5)
        await app.close()

    async def test_jobs_belong_to_the_transaction_of_the_connection(self, app: App, database: str) -> None:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            await JobPool(app, connection=connection).enqueue_job("resize", 1)
            await connection.rollback()
        assert await app.utils.list_jobs() == []
        await app.close()
