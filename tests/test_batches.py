"""Batch jobs: which items are done, which stay in the payload, and which errors are recorded."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import (
    App,
    BatchError,
    Cancel,
    ConfigurationError,
    Fail,
    InvalidJobError,
    JobContext,
    JobState,
    Retry,
    RunSummary,
    Snooze,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker.retry import Fixed
from support.jobs import add, existing
from support.workers import EventRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

    from graphile_worker import Job

once = functools.partial(run_once, handle_signals=False)


async def run_batch(
    database: str, function: Callable[..., Any], payload: Any, recorder: EventRecorder | None = None
) -> Job | None:
    """Add a job, run it once, and return it, or None if it was completed."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("task", payload)
        await once({"task": function}, database, events=recorder.events if recorder else None)
        return await utils.get_job(id=job.id)


@dataclass
class Picky:
    n: int

    def __post_init__(self) -> None:
        if self.n != 1:
            raise KeyError(self.n)


class TestTasks:
    @pytest.mark.parametrize("value", [None, [None, None, None], (1, "x", False), [int, str, None]])
    async def test_result_without_exceptions_completes_the_job(self, database: str, value: Any) -> None:
        received: list[Any] = []

        @task(batch=True)
        async def function(items: list[int]) -> Any:
            received.append(items)
            return value

        assert await run_batch(database, function, [1, 2, 3]) is None
        assert received == [[1, 2, 3]]

    async def test_raised_exception_fails_all_items(self, database: str) -> None:
        @task(batch=True)
        def function(_items: list[int]) -> None:
            raise ValueError("no")

        job = await run_batch(database, function, [1, 2, 3])
        assert job is not None
        assert (job.payload, job.last_error, job.attempts) == ([1, 2, 3], "no", 1)

    async def test_only_failed_items_stay_in_their_order(self, database: str) -> None:
        recorder = EventRecorder()

        @task(batch=True)
        async def function(ctx: JobContext, items: list[int]) -> list[Exception | None]:
            assert ctx.job.payload == items
            return [ValueError(f"odd: {n}") if n % 2 else None for n in items]

        job = await run_batch(database, function, [5, 4, 3, 2, 1], recorder)
        assert job is not None
        assert job.payload == [5, 3, 1]
        assert job.last_error == "3 of 5 items failed: [0] odd: 5; [2] odd: 3; [4] odd: 1"
        assert (job.attempts, job.state) == (1, JobState.SCHEDULED)
        [event] = recorder.named("job:error")
        assert isinstance(event.error, BatchError)
        assert [str(error) for error in event.batch_job_errors] == ["odd: 5", "odd: 3", "odd: 1"]

    async def test_failed_items_are_retried(self, db: asyncpg.Connection, database: str) -> None:
        seen: list[list[str]] = []

        @task(batch=True)
        async def function(items: list[str]) -> list[Any]:
            seen.append(items)
            return [OSError(item) if len(seen) == 1 and item != "b" else item for item in items]

        job = await add(db, payload=["a", "b", "c"])
        await once({"task": function}, database)
        await db.execute("update graphile_worker._private_jobs set run_at = now()")
        assert await once({"task": function}, database) == RunSummary(1, 0)
        assert seen == [["a", "b", "c"], ["a", "c"]]
        assert await db.fetchval("select count(*) from graphile_worker.jobs where id = $1", job["id"]) == 0

    async def test_items_are_validated_one_by_one(self, database: str) -> None:
        received: list[Any] = []

        @task(batch=True)
        async def function(items: list[dict[str, int]]) -> list[Any]:
            received.extend(items)
            return [None, ValueError("no")]

        job = await run_batch(database, function, [{"n": 1}, "x", {"n": "y"}, {"n": 2}])
        assert received == [{"n": 1}, {"n": 2}]
        assert job is not None
        assert job.payload == ["x", {"n": "y"}, {"n": 2}]
        assert job.last_error == (
            "3 of 4 items failed: [1] Expected `object`, got `str`; [2] [...]: Expected `int`, got `str`; "
            "[3] no"
        )

    async def test_task_is_not_called_if_all_items_are_invalid(self, database: str) -> None:
        @task(batch=True)
        async def function(_items: list[int]) -> None:
            raise AssertionError("called")

        job = await run_batch(database, function, ["x", None])
        assert job is not None
        assert job.payload == ["x", None]
        assert (job.last_error or "").startswith("2 of 2 items failed")

    async def test_job_fails_permanently_if_no_item_can_be_retried(self, database: str) -> None:
        @task(batch=True, on_invalid_payload="fail")
        async def function(items: list[int]) -> list[Any]:
            return [Fail("never") if n > 1 else None for n in items]

        job = await run_batch(database, function, [1, 2, "x"])
        assert job is not None
        assert (job.state, job.payload) == (JobState.FAILED, [2, "x"])

    @pytest.mark.parametrize("payload", [{}, {"items": [1]}, "x", 3])
    async def test_payload_that_is_not_a_list_is_rejected(self, database: str, payload: Any) -> None:
        @task(batch=True)
        async def function(items: list[int]) -> None: ...

        job = await run_batch(database, function, payload)
        assert job is not None
        assert "must be a list" in (job.last_error or "")
        assert job.payload == payload

    async def test_wrong_number_of_results_fails_the_whole_job(self, database: str) -> None:
        @task(batch=True)
        async def function(_items: list[int]) -> list[Any]:
            return [None]

        job = await run_batch(database, function, [1, 2])
        assert job is not None
        assert job.payload == [1, 2]
        assert "1 results for 2 items" in (job.last_error or "")

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "value", [3, False, "abc", {1: ValueError()}, map(str, [1, 2, 3]), iter([None] * 3), {1, 2, 3}]
    )
    async def test_result_that_is_not_a_list_fails_the_whole_job(self, database: str, value: Any) -> None:
        """The result does not tell which items are done. An iterator may not even have run yet."""

        @task(batch=True)
        async def function(_items: list[int]) -> Any:
            return value

        job = await run_batch(database, function, [1, 2, 3])
        assert job is not None
        assert (job.payload, job.attempts) == ([1, 2, 3], 1)
        assert f" {type(value).__name__}," in (job.last_error or "")

    async def test_returned_coroutine_fails_the_whole_job(self, database: str) -> None:
        @task(batch=True)
        async def function(_items: list[int]) -> Any:
            return asyncio.sleep(0)

        job = await run_batch(database, function, [1, 2])
        assert job is not None
        assert "coroutine" in (job.last_error or "")

    @pytest.mark.parametrize("value", [ValueError("whole"), ValueError])
    async def test_returned_exception_counts_as_raised(self, database: str, value: Any) -> None:
        @task(batch=True)
        def function(_items: list[int]) -> Any:
            return value

        job = await run_batch(database, function, [1, "x", 2])
        assert job is not None
        assert (job.payload, job.attempts) == ([1, "x", 2], 1)
        assert job.last_error == ("ValueError" if value is ValueError else "whole")

    @pytest.mark.parametrize("declared", [True, False])
    async def test_returned_exception_class_is_a_failure_as_with_raise(
        self, database: str, declared: bool
    ) -> None:
        async def function(_payload: list[int]) -> list[Any]:
            return [ValueError, None, UnicodeDecodeError, Cancel]

        job = await run_batch(database, task(batch=True)(function) if declared else function, [1, 2, 3, 4])
        assert job is not None
        assert job.payload == [1, 3]
        assert job.last_error == "2 of 4 items failed: [0] ValueError; [2] UnicodeDecodeError"

    @pytest.mark.parametrize("declared", [True, False])
    async def test_earliest_requested_retry_time_is_used(self, database: str, declared: bool) -> None:
        soon = datetime.now(UTC) + timedelta(seconds=300)

        async def function(_payload: list[int]) -> list[Any]:
            return [Retry("busy", after=500), Retry(at=soon), None, Snooze(400, "not yet"), Fail("never")]

        named = task(batch=True, retry=Fixed(1))(function) if declared else function
        job = await run_batch(database, named, [1, 2, 3, 4, 5])
        assert job is not None
        assert (job.payload, job.attempts, job.run_at) == ([1, 2, 4, 5], 1, soon)
        assert (job.last_error or "").startswith("4 of 5 items failed: [0] busy; [1] ")
        assert (job.last_error or "").endswith("; [3] not yet; [4] never")

    async def test_permanently_failed_item_does_not_affect_the_retry_time(self, database: str) -> None:
        @task(batch=True, on_invalid_payload="fail")
        async def function(_items: list[int]) -> list[Any]:
            return [Retry("busy", after=5000)]

        job = await run_batch(database, function, [1, "x"])
        assert job is not None
        assert 5000 <= (job.run_at - job.updated_at).total_seconds() < 5100

    async def test_snoozed_items_are_retried_after_their_delay_and_use_an_attempt(
        self, database: str
    ) -> None:
        @task(batch=True)
        async def function(_items: list[int]) -> list[Any]:
            return [Snooze(600), Snooze(900)]

        job = await run_batch(database, function, [1, 2])
        assert job is not None
        assert job.attempts == 1
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 700

    async def test_retry_policy_applies_if_an_item_requests_no_time(self, database: str) -> None:
        @task(batch=True, retry=Fixed(600))
        async def function(_items: list[int]) -> list[Any]:
            return [Retry("busy", after=5), ValueError("no")]

        job = await run_batch(database, function, [1, 2])
        assert job is not None
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 700
        assert job.last_error == "2 of 2 items failed: [0] busy; [1] no"

    async def test_retry_policy_matches_batch_error(self, database: str) -> None:
        @task(batch=True, retry={BatchError: timedelta(minutes=10)})
        async def function(_items: list[int]) -> list[Any]:
            return [None, ValueError("no")]

        job = await run_batch(database, function, [1, 2])
        assert job is not None
        assert 600 <= (job.run_at - job.updated_at).total_seconds() < 700

    async def test_raised_snooze_applies_to_the_whole_batch(self, database: str) -> None:
        @task(batch=True)
        async def function(_items: list[int]) -> None:
            raise Snooze(60)

        job = await run_batch(database, function, [1, 2])
        assert job is not None
        assert (job.attempts, job.payload) == (0, [1, 2])

    async def test_error_of_many_items_is_truncated(self, database: str) -> None:
        @task(batch=True)
        async def function(items: list[int]) -> list[Any]:
            return [ValueError("no")] * len(items)

        job = await run_batch(database, function, list(range(30)))
        assert job is not None
        assert (job.last_error or "").startswith("30 of 30 items failed: [0] no; [1] no")
        assert (job.last_error or "").endswith("; [19] no; and 10 more")

    @pytest.mark.parametrize("declared", [True, False])
    async def test_task_may_modify_its_list_of_items(self, database: str, declared: bool) -> None:
        def function(payload: list[Any]) -> list[Any]:
            results: list[Any] = []
            while payload:
                results.append(ValueError("no") if payload.pop(0) == 2 else None)
            return results

        job = await run_batch(database, task(batch=True)(function) if declared else function, [1, 2, 3])
        assert job is not None
        assert (job.payload, job.last_error) == ([2], "1 of 3 items failed: [1] no")

    async def test_cancelled_item_is_removed_from_the_payload(self, database: str) -> None:
        @task(batch=True)
        async def function(_items: list[int]) -> list[Any]:
            return [Cancel("x"), ValueError("no"), Fail("never")]

        job = await run_batch(database, function, [1, 2, 3])
        assert job is not None
        assert (job.payload, job.state) == ([2, 3], JobState.SCHEDULED)

    async def test_item_whose_type_raises_stays_in_the_payload(self, database: str) -> None:
        @task(batch=True)
        async def function(items: list[Picky]) -> None:
            assert items == [Picky(1)]

        job = await run_batch(database, function, [{"n": 1}, {"n": 2}])
        assert job is not None
        assert (job.payload, job.last_error) == ([{"n": 2}], "1 of 2 items failed: [1] KeyError: 2")

    async def test_items_arrive_in_the_annotated_collection_type(self, database: str) -> None:
        kinds: list[Any] = [list, tuple, Sequence, Any, list[int], tuple[int, ...], Sequence[int]]
        for kind in kinds:
            received: list[Any] = []

            async def function(items: Any) -> None:
                received.append(items)  # noqa: B023 - called before the next iteration

            function.__annotations__["items"] = kind
            assert await run_batch(database, task(batch=True)(function), [1, 2]) is None
            assert received == [(1, 2) if "tuple" in str(kind) else [1, 2]]

        async def pair(items: tuple[int, int]) -> None: ...

        with pytest.raises(ConfigurationError, match=r"'items'.*list.*tuple"):
            task(batch=True)(pair)

    async def test_items_and_context_may_be_keyword_only(self, database: str) -> None:
        @task(batch=True)
        async def function(*, items: list[int], ctx: JobContext) -> None:
            assert (items, ctx.job.payload) == ([1], [1])

        assert await run_batch(database, function, [1]) is None

    async def test_stored_text_of_remaining_items_is_unchanged(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        """This includes JSON that Python strings or the database's encoding may not be able to hold."""
        unusual = (
            r'["\ud800", "a\u0000b", 1, 1e400, "ä€", {"z": 1.00, "a": null, "a": 2}, 12345678901234567890.5]'
        )
        row = await db.fetchrow("select * from graphile_worker.add_job('task', $1::text::json)", unusual)
        assert row is not None

        async def function(_payload: list[Any]) -> list[Any]:
            return [ValueError("no")] * 2 + [None] + [ValueError("no")] * 4

        await once({"task": function}, database)
        stored = await existing(db, row["id"])
        assert stored["payload"] == unusual.replace(" 1,", "", 1)
        assert stored["attempts"] == 1

    async def test_failed_items_stay_after_the_last_attempt(self, database: str) -> None:
        recorder = EventRecorder()

        @task(batch=True)
        async def function(items: list[int]) -> list[Any]:
            return [ValueError("no") if n == 2 else None for n in items]

        async with WorkerUtils(database) as utils:
            job = await utils.add_job("task", [1, 2], max_attempts=1, queue_name="q")
            await once({"task": function}, database, events=recorder.events)
            found = await utils.get_job(id=job.id)
        assert found is not None
        assert (found.state, found.payload, found.locked_by) == (JobState.FAILED, [2], None)
        [failed] = recorder.named("job:failed")
        assert [str(error) for error in failed.batch_job_errors] == ["no"]
        assert recorder.named("job:complete")[0].error is failed.error


class TestEnqueueing:
    async def test_task_adds_a_batch_job(self, database: str) -> None:
        app = App(database)
        received: list[Any] = []

        @app.task
        async def fan_in(ctx: JobContext) -> None:
            await ctx.utils.add_batch_job("send", [1, 2])
            await send.enqueue([3])

        @app.task(batch=True)
        async def send(items: list[int]) -> None:
            received.append(items)

        async with app:
            await fan_in.enqueue()
            assert await app.run_once() == RunSummary(3, 0)
        assert received == [[1, 2], [3]]

    async def test_enqueued_items_are_the_payload(self, database: str) -> None:
        app = App(database)

        @app.task(batch=True)
        async def send(items: list[int]) -> None: ...

        async with app:
            assert (await send.enqueue([1, 2])).payload == [1, 2]
            assert (await send.enqueue(items=[3])).payload == [3]
            assert [job.payload for job in await send.enqueue_many([[1], [2, 3]])] == [[1], [2, 3]]
            with pytest.raises(InvalidJobError, match=r"\[1\]: Expected `int`, got `str`"):
                await send.enqueue([1, "x"])  # type: ignore[list-item]
            with pytest.raises(InvalidJobError, match="at least one item"):
                await send.enqueue([])

    @pytest.mark.parametrize("kind", [list[int], tuple[int, ...]])
    async def test_job_key_may_be_a_function_of_the_items(self, kind: Any) -> None:
        async def send(items: Any) -> None: ...

        send.__annotations__["items"] = kind
        declared = task(batch=True, job_key=lambda items: f"{len(items)} items")(send)
        assert declared.spec([1, 2]).job_key == "2 items"

    async def test_items_with_one_key_are_collected_in_one_job(self, database: str) -> None:
        app = App(database)
        received: list[Any] = []

        @app.task(batch=True, job_key="all")
        async def send(items: list[int]) -> None:
            received.extend(items)

        async with app:
            for n in range(3):
                await send.enqueue([n])
            assert await app.run_once() == RunSummary(1, 0)
        assert received == [0, 1, 2]


class TestPlainFunctions:
    """As in Graphile Worker, a function may return an array of results for an array of items."""

    async def test_results_of_a_plain_function_may_be_exceptions_or_awaitables(self, database: str) -> None:
        async def bad(n: int) -> None:
            await asyncio.sleep(0)
            raise ValueError(f"bad: {n}")

        async def function(_payload: list[int]) -> list[Any]:
            return [1, bad(2), asyncio.sleep(0), OSError("4")]

        recorder = EventRecorder()
        job = await run_batch(database, function, [1, 2, 3, 4], recorder)
        assert job is not None
        assert job.payload == [2, 4]
        assert job.last_error == "2 of 4 items failed: [1] bad: 2; [3] 4"
        assert len(recorder.named("job:error")[0].batch_job_errors) == 2

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "value", [None, 3, "x", [], [1], [None, ValueError("x"), None], {"a": ValueError()}]
    )
    async def test_any_other_result_of_a_plain_function_is_a_success(
        self, database: str, value: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def function(_payload: Any) -> Any:
            return value

        assert await run_batch(database, function, [1, 2]) is None
        warned = "2 items" in caplog.text
        assert warned is isinstance(value, list)

    async def test_payload_that_is_an_object_has_no_items(self, database: str) -> None:
        assert await run_batch(database, lambda _: [ValueError("x")], {"a": 1}) is None

    async def test_synchronous_function_may_return_results(self, database: str) -> None:
        job = await run_batch(database, lambda _payload: [None, ValueError("no")], [1, 2])
        assert job is not None
        assert job.payload == [2]

    async def test_result_of_a_task_without_batch_is_ignored(self, database: str) -> None:
        @task
        def function(payload: list[int]) -> list[Any]:
            return [ValueError("a value")] * len(payload)

        assert await run_batch(database, function, [1, 2]) is None
