"""The task options `debounce`, `throttle` and `unique`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from graphile_worker import App, ConfigurationError, task


async def test_debounced_job_starts_its_delay_again(database: str) -> None:
    app = App(database)

    @app.task(debounce="30s", key="report:{day}")
    async def report(day: str, copies: int = 1) -> None: ...

    async with app:
        first = await report.enqueue("monday")
        again = await report.enqueue("monday", copies=2)
        other = await report.enqueue("tuesday")
    assert (first.key, again.id, again.payload) == ("report:monday", first.id, {"day": "monday", "copies": 2})
    assert again.run_at > first.run_at > datetime.now(UTC)
    assert other.id != first.id


async def test_throttled_job_keeps_its_time_and_takes_the_new_arguments(database: str) -> None:
    app = App(database)

    @app.task(throttle=timedelta(minutes=1), key="push")
    async def push(count: int) -> None: ...

    async with app:
        first = await push.enqueue(1)
        again = await push.enqueue(2)
    assert (again.id, again.run_at, again.payload) == (first.id, first.run_at, {"count": 2})
    assert first.run_at > datetime.now(UTC)


async def test_at_most_one_unique_job_waits(database: str) -> None:
    app, ran = App(database), []

    @app.task(unique=True, key="sync:{account}")
    async def sync(account: int) -> None:
        ran.append(account)
        if len(ran) == 1:
            await sync.enqueue(account)  # this job runs, so it does not count as waiting

    async with app:
        first = await sync.enqueue(7)
        again = await sync.enqueue(7)
        assert (again.id, again.run_at) == (first.id, first.run_at)
        await app.run_once()
    assert ran == [7, 7]


def test_options_of_one_job_override_the_delay_and_the_key() -> None:
    @task(debounce=30, key=lambda day: f"report:{day}")
    async def report(day: str) -> None: ...

    at = datetime(2040, 1, 1, tzinfo=UTC)
    assert report.spec("monday").run_at == timedelta(seconds=30)
    assert report.using(run_at=at).spec("monday").run_at == at
    assert report.using(delay=5).spec("monday").run_at == timedelta(seconds=5)
    assert report.using(job_key=None).spec("monday").job_key is None


def test_debounce_that_is_none_and_unique_that_is_false_change_nothing() -> None:
    @task(debounce=None, unique=False, job_key="k")
    async def hello() -> None: ...

    assert (hello.spec().job_key, hello.spec().job_key_mode, hello.spec().run_at) == ("k", None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"debounce": "30s"}, "debounce needs a key"),
        ({"unique": True}, "unique needs a key"),
        ({"key": "k"}, "needs debounce, throttle or unique.*job_key='k'"),
        ({"key": "k", "debounce": 1, "throttle": 1}, "both debounce and throttle"),
        ({"key": "k", "debounce": 1, "job_key": "k"}, "both debounce and job_key. Use key="),
        ({"key": "k", "unique": True, "job_key_mode": "replace"}, "both unique and job_key_mode"),
        ({"key": "k", "throttle": 1, "run_at": lambda: None}, "both throttle and run_at"),
        ({"key": "k", "debounce": 0}, "debounce is 0; it must be seconds"),
        ({"key": "k", "debounce": "soon"}, "debounce is 'soon'"),
        ({"key": "k", "throttle": True}, "throttle is True"),
        ({"key": "k", "unique": 1}, "unique is 1; it must be True or False"),
        ({"key": "k:{nme}", "unique": True}, "unknown parameter 'nme'"),
    ],
)
def test_invalid_combination_is_refused_when_the_task_is_declared(
    options: dict[str, Any], message: str
) -> None:
    async def hello() -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        task(**options)(hello)
