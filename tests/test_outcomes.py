"""The outcome of a job: chosen by its task, by its retry policy, or by the defaults of Graphile Worker."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import pickle
import random
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from graphile_worker import (
    BatchError,
    Cancel,
    ConfigurationError,
    Fail,
    InvalidJobError,
    InvalidPayloadError,
    Job,
    JobSpec,
    JobState,
    Retry,
    RunSummary,
    Snooze,
    WorkerUtils,
    run_once,
    task,
)
from graphile_worker._db.queries import changes
from graphile_worker.outcome import ControlFlow
from graphile_worker.retry import ByException, Delays, Exponential, Failure, Fixed, Linear, never, read_policy
from support.jobs import add, existing, get
from support.workers import EventRecorder, Gate, nothing, running

if TYPE_CHECKING:
    from collections.abc import Callable

    import asyncpg

once = functools.partial(run_once, handle_signals=False)
TOLERANCE = 25.0
"""Seconds that a slow machine may add to a delay."""


def raising(error: BaseException | type[BaseException]) -> Callable[[Any], Any]:
    async def function(_payload: Any) -> None:
        raise error

    return function


async def outcome_of(
    database: str, function: Callable[..., Any], recorder: EventRecorder | None = None, **options: Any
) -> tuple[Job, float]:
    """Return the job after its first run, and the seconds from then until it is due."""
    async with WorkerUtils(database) as utils:
        job = await utils.add_job("task", **options)
        await once({"task": function}, database, events=recorder.events if recorder else None)
        found = await utils.get_job(id=job.id)
        assert found is not None
        return found, (found.run_at - found.updated_at).total_seconds()


class TestChosenOutcomes:
    async def test_retry_after_counts_the_attempt(self, database: str) -> None:
        recorder = EventRecorder()
        job, delay = await outcome_of(database, raising(Retry("busy", after=60)), recorder)
        assert (job.attempts, job.last_error) == (1, "Retry in 60 s: busy")
        assert 60 <= delay < 60 + TOLERANCE
        [failure] = recorder.named("job:error")
        assert failure.retry_in == 60
        assert isinstance(failure.error, Retry)
        assert recorder.counts["job:failed"] == 0
        assert recorder.named("job:complete")[0].error is failure.error

    async def test_retry_at_a_time_counts_the_attempt(self, database: str) -> None:
        at = datetime(2100, 1, 1, tzinfo=UTC)
        job, _ = await outcome_of(database, raising(Retry(at=at)))
        assert (job.run_at, job.attempts) == (at, 1)
        assert job.last_error == "Retry at 2100-01-01 00:00:00+00:00"
        past, delay = await outcome_of(
            database, raising(Retry(at=datetime(2000, 1, 1, tzinfo=UTC))), max_attempts=1
        )
        assert delay >= 0
        assert past.state is JobState.FAILED

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "choice",
        [
            Retry(after=1e300),
            Retry(at=datetime.max.replace(tzinfo=UTC)),
            Retry(at=datetime(2100, 1, 1, tzinfo=timezone(timedelta(seconds=1, microseconds=5)))),
            Snooze(1e300),
            Fail("\0 \ud800 " + "x" * 100_000),
            Cancel(3),  # type: ignore[arg-type]
        ],
        ids=lambda choice: repr(choice)[:20],
    )
    async def test_unstorable_outcome_does_not_affect_other_jobs(
        self, db: asyncpg.Connection, database: str, choice: ControlFlow, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL, "graphile_worker")  # not every terminal can show these characters

        async def function(payload: Any) -> None:
            if payload == 1:
                raise choice

        for n in range(3):
            await add(db, payload=n)
        await once({"task": function}, database, concurrency=3)
        async with WorkerUtils(database) as utils:
            [job] = await utils.list_jobs()
        assert (job.payload, job.locked_by) == (1, None)
        assert job.last_error

    async def test_last_error_of_a_retry_contains_its_cause(self, database: str) -> None:
        async def function(_payload: Any) -> None:
            try:
                raise OSError("no route")  # noqa: TRY301
            except OSError as error:
                raise Retry(after=timedelta(minutes=1)) from error

        job, _ = await outcome_of(database, function)
        assert job.last_error == "Retry in 60 s: no route"

    async def test_retry_on_the_last_attempt_fails_the_job(self, database: str) -> None:
        recorder = EventRecorder()
        job, _ = await outcome_of(database, raising(Retry(after=1)), recorder, max_attempts=1)
        assert (job.state, job.attempts) == (JobState.FAILED, 1)
        assert "last attempt" in (job.last_error or "")
        assert recorder.counts["job:failed"] == 1
        assert recorder.named("job:error")[0].retry_in is None

    async def test_fail_fails_the_job_permanently(self, database: str) -> None:
        recorder = EventRecorder()
        job, _ = await outcome_of(database, raising(Fail("no such account")), recorder)
        assert (job.state, job.attempts, job.max_attempts) == (JobState.FAILED, 25, 25)
        assert (job.last_error, job.locked_by) == ("no such account", None)
        assert recorder.counts["job:error"] == recorder.counts["job:failed"] == 1

    async def test_snooze_gives_the_attempt_back(self, database: str) -> None:
        recorder = EventRecorder()
        job, delay = await outcome_of(database, raising(Snooze(120, "not yet")), recorder)
        assert (job.state, job.attempts) == (JobState.SCHEDULED, 0)
        assert job.last_error == "Snoozed for 120 s: not yet"
        assert 120 <= delay < 120 + TOLERANCE
        [snoozed] = recorder.named("job:snoozed")
        assert (snoozed.delay, snoozed.reason) == (120, "not yet")
        assert not {"job:error", "job:success", "job:complete"} & set(recorder.names)

    async def test_cancel_fails_the_job_without_an_error_event(
        self, database: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        recorder = EventRecorder()
        caplog.set_level(logging.INFO, "graphile_worker")
        job, _ = await outcome_of(database, raising(Cancel("called off")), recorder)
        assert (job.state, job.last_error) == (JobState.FAILED, "Cancelled: called off")
        [cancelled] = recorder.named("job:cancelled")
        assert cancelled.reason == "called off"
        assert not {"job:error", "job:failed", "job:success"} & set(recorder.names)
        assert isinstance(recorder.named("job:complete")[0].error, Cancel)
        assert [r.levelno for r in caplog.records if "was cancelled" in r.getMessage()] == [logging.INFO]

    @pytest.mark.parametrize("choice", [Fail, Cancel("x"), Retry(after=1), Snooze(1)])
    async def test_thread_task_chooses_its_outcome(self, database: str, choice: Any) -> None:
        def function(_payload: Any) -> None:
            raise choice

        job, _ = await outcome_of(database, function)
        assert (
            job.attempts
            == {Fail: 25, Cancel: 25, Retry: 1, Snooze: 0}[
                choice if isinstance(choice, type) else type(choice)
            ]
        )

    async def test_outcome_raised_in_a_task_group_is_found(self, database: str) -> None:
        async def function(_payload: Any) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(raising(Snooze(60))(None))

        job, _ = await outcome_of(database, function)
        assert job.attempts == 0

    async def test_serial_queue_continues_after_each_outcome(self, database: str) -> None:
        ran: list[Any] = []

        async def function(payload: Any) -> None:
            ran.append(payload)
            if payload < 4:
                raise [Retry(after=60), Fail("x"), Snooze(60), Cancel("x")][payload]

        async with WorkerUtils(database) as utils:
            for n in range(5):
                await utils.add_job("task", n, queue_name="q")
        assert await once({"task": function}, database) == RunSummary(1, 2, snoozed=1, cancelled=1)
        assert ran == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("choice", [Snooze(1), Retry(after=1), Fail("x"), Cancel("x")], ids=repr)
    async def test_superseded_job_does_not_run_again_with_any_outcome(
        self, db: asyncpg.Connection, database: str, choice: ControlFlow
    ) -> None:
        gate = Gate()

        async def function(payload: Any) -> None:
            await gate(payload)
            raise choice

        old = await add(db, payload=1, job_key="k")
        async with running({"task": function}, database) as runner:
            await gate.until_started()
            await db.execute("select graphile_worker.remove_job('k')")
            gate.open()
            await runner.stop()
        row = await existing(db, old["id"])
        assert (row["attempts"], row["key"], row["locked_by"]) == (25, None, None)

    def test_invalid_outcomes_are_rejected(self) -> None:
        for make, error in [
            (Retry, TypeError),
            (lambda: Retry(after=1, at=datetime.now(UTC)), TypeError),
            (lambda: Retry(at=timedelta(1)), TypeError),  # type: ignore[arg-type]
            (lambda: Retry(at=datetime.now()), InvalidJobError),  # noqa: DTZ005
            (lambda: Retry(at=datetime.min.replace(tzinfo=timezone(timedelta(hours=9)))), InvalidJobError),
            (lambda: Retry(after=-1), ConfigurationError),
            (lambda: Snooze(0), ConfigurationError),
            (lambda: Snooze(math.nan), ConfigurationError),
        ]:
            with pytest.raises(error):
                make()  # type: ignore[no-untyped-call]


async def _fail_with_payload(payload: Any) -> None:
    raise ValueError(f"no: {payload}")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Busy(Retry):
    def __init__(self) -> None:
        """Create the outcome without a time and a reason."""


def harmful_tasks() -> dict[str, Any]:
    def mutating(items: list[Any]) -> list[Any]:
        items[0]["connection"] = object()
        return [ValueError("no")]

    def exiting(_failure: Failure) -> None:
        raise SystemExit

    async def leave() -> None:
        raise SystemExit

    return {
        "a changed item": task(batch=True)(mutating),
        "results that raise SystemExit": task(batch=True)(lambda items: [leave() for _ in items]),
        "a BatchError with invalid indexes": raising(BatchError("x", indexes=[7, -1])),
        "an outcome without a time": raising(Busy()),
        "an error whose text raises": raising(UnprintableError()),
        "a policy that raises SystemExit": task(retry=exiting)(_fail_with_payload),
        "a policy with an invalid time": task(
            retry=lambda _: datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=20)))
        )(_fail_with_payload),
    }


class TestHarmfulTasks:
    """A task must not stop the worker or affect the outcomes of other jobs."""

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("harmful", [*harmful_tasks()])
    async def test_harmful_task_does_not_affect_other_jobs(
        self, db: asyncpg.Connection, database: str, harmful: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL, "graphile_worker")
        job = await add(db, "harmful", payload=[{}])
        for _ in range(3):
            await add(db, "good")
        tasks = {"harmful": harmful_tasks()[harmful], "good": nothing}
        async with asyncio.timeout(20):
            drained = await once(tasks, database, concurrency=4)
        assert drained == RunSummary(3, 1)
        row = await existing(db, job["id"])
        assert (row["attempts"], row["locked_by"], row["payload"]) == (1, None, "[{}]")
        assert row["last_error"]

    async def test_outcome_rejected_by_the_database_is_recorded_without_details(
        self, db: asyncpg.Connection, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Imitate an outcome with a value that the database does not accept."""
        known = changes._change
        monkeypatch.setattr(
            changes,
            "_change",
            lambda *args, **more: {
                **known(*args, **more),
                **({} if more["unicode"] is False else {"at": "soon"}),
            },
        )
        part = await add(db, "part", payload=[1, 2])
        bad, good = await add(db, "bad"), await add(db, "good")
        later = await add(db, "later")
        tasks = {"bad": raising(ValueError("x")), "good": nothing, "later": raising(Snooze(60))}
        tasks["part"] = task(batch=True)(_half)
        async with asyncio.timeout(20):
            assert await once(tasks, database, concurrency=4) == RunSummary(1, 2, snoozed=1)
        assert (await existing(db, part["id"]))["payload"] == "[2]", "completed items must not run again"
        assert "cannot be stored" in (await existing(db, bad["id"]))["last_error"]
        assert (await existing(db, later["id"]))["attempts"] == 0
        assert await get(db, good["id"]) is None

    @pytest.mark.parametrize(
        "choice",
        [
            Retry("r", after=3),
            Retry(at=datetime(2100, 1, 1, tzinfo=UTC)),
            Fail("f"),
            Snooze(3, "s"),
            Cancel("c"),
        ],
        ids=lambda choice: type(choice).__name__,
    )
    def test_outcomes_can_be_pickled(self, choice: ControlFlow) -> None:
        again = pickle.loads(pickle.dumps(choice))
        assert (type(again), str(again), again.__dict__) == (type(choice), str(choice), choice.__dict__)
        error = pickle.loads(pickle.dumps(BatchError("x", errors=[OSError("y")], indexes=[1], final=True)))
        assert (str(error), error.indexes, error.final, str(error.errors[0])) == ("x", (1,), True, "y")

    async def test_reason_of_fail_may_be_an_exception(self, database: str) -> None:
        job, _ = await outcome_of(database, raising(Fail(OSError("no route"))))
        assert job.last_error == "no route"

    async def test_last_error_of_a_key_error_contains_its_type(self, database: str) -> None:
        job, _ = await outcome_of(database, raising(KeyError("name")))
        assert job.last_error == "KeyError: 'name'"

    async def test_retry_raised_by_a_policy_contains_the_error_of_the_task(self, database: str) -> None:
        def policy(_failure: Failure) -> None:
            raise Retry(after=60)

        job, _ = await outcome_of(database, task(retry=policy)(_fail_always))
        assert job.last_error == "Retry in 60 s: no"


class TestPolicies:
    @pytest.mark.sample(4)
    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            (None, math.e),
            (Exponential(), math.e),
            (Exponential(first=100, factor=10, cap=50), 50),
            (Fixed(90), 90),
            (timedelta(minutes=2), 120),
            ([100, 200], 100),
            (Linear(70), 70),
            (lambda failure: failure.attempt * 30, 30),
            (lambda _: None, math.e),
            (lambda _: 1e300, 3e10),
            ({OSError: [5], ValueError: [300]}, 300),
            ({OSError: [5]}, math.e),
            ({Exception: Fixed(5), ArithmeticError: [6]}, 5),
        ],
        ids=lambda part: "a function" if inspect.isfunction(part) else str(part),
    )
    async def test_retry_policy_decides_the_delay_after_a_failure(
        self, database: str, policy: Any, expected: float
    ) -> None:
        recorder = EventRecorder()
        job, delay = await outcome_of(database, task(retry=policy)(_fail_always), recorder)
        assert (job.attempts, job.last_error) == (1, "no")
        assert expected - 0.01 <= delay < expected * 1.0001 + TOLERANCE
        assert isinstance(recorder.named("job:error")[0].error, ValueError)

    async def test_retry_policy_may_return_a_time(self, database: str) -> None:
        at = datetime(2100, 1, 1, tzinfo=UTC)
        job, _ = await outcome_of(database, task(retry=lambda _: at)(_fail_always))
        assert job.run_at == at

    async def test_never_policy_fails_the_job_with_its_own_error(self, database: str) -> None:
        recorder = EventRecorder()
        job, _ = await outcome_of(database, task(retry={ValueError: never})(_fail_always), recorder)
        assert (job.state, job.last_error) == (JobState.FAILED, "no")
        assert isinstance(recorder.named("job:failed")[0].error, ValueError)

    async def test_retry_policy_may_raise_an_outcome(self, database: str) -> None:
        def policy(failure: Failure) -> None:
            raise Snooze(60, f"after {failure.error}, attempt {failure.attempt} of {failure.job.id > 0}")

        job, _ = await outcome_of(database, task(retry=policy)(_fail_always))
        assert (job.attempts, job.last_error) == (0, "Snoozed for 60 s: after no, attempt 1 of True")

    async def test_outcome_of_the_task_overrides_its_retry_policy(self, database: str) -> None:
        @task(retry=[1000])
        async def function() -> None:
            raise Retry(after=60)

        _, delay = await outcome_of(database, function)
        assert 60 <= delay < 60 + TOLERANCE

    @pytest.mark.parametrize(
        "policy",
        [lambda _: 1 / 0, lambda _: -1, lambda _: "soon", lambda _: datetime(2100, 1, 1)],  # noqa: DTZ001
    )
    async def test_failing_retry_policy_is_logged_and_the_default_delay_is_used(
        self, database: str, policy: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        job, delay = await outcome_of(database, task(retry=policy)(_fail_always))
        assert (job.attempts, job.last_error) == (1, "no")
        assert 2.7 <= delay < 2.8 + TOLERANCE
        assert "The retry policy of task 'task' failed" in caplog.text

    def test_retry_policies_have_the_delays_of_each_attempt(self) -> None:
        for policy, delays in [
            (Exponential(first=1, factor=2, cap=5), [1, 2, 4, 5, 5]),
            (Linear(10, first=1, cap=timedelta(seconds=25)), [1, 11, 21, 25, 25]),
            (Delays([1, timedelta(minutes=1)]), [1, 60, 60, 60, 60]),
            (Fixed(3), [3, 3, 3, 3, 3]),
        ]:
            assert [policy.delay(attempt) for attempt in range(1, 6)] == delays
        assert [Exponential().delay(n) for n in range(1, 30)] == pytest.approx(
            [math.exp(min(10, n)) for n in range(1, 30)]
        )
        assert Exponential(factor=1000, cap=None).delay(32767) == 3e10

    @given(
        st.floats(0, 1),
        st.integers(1, 32767),
        st.floats(0, 1e6),
        st.floats(1, 10),
        st.floats(0, 1e6),
    )
    def test_jitter_only_shortens_the_delay(
        self, jitter: float, attempt: int, first: float, factor: float, cap: float
    ) -> None:
        policy = Exponential(first=first, factor=factor, cap=cap, jitter=jitter)
        failure = Failure(_job(attempt), ValueError())
        full_delay = policy.delay(attempt)
        assert full_delay <= cap
        assert full_delay * (1 - jitter) - 1e-6 <= policy(failure) <= full_delay

    def test_by_exception_handles_groups_and_batches_with_one_policy(self) -> None:
        policy = ByException({OSError: [2], ValueError: [3]})
        for error, expected in [
            (ExceptionGroup("x", [OSError()]), 2),
            (ExceptionGroup("x", [OSError(), ValueError()]), None),
            (BatchError("x", errors=[OSError(), ConnectionError()]), 2),
            (BatchError("x", errors=[OSError(), ValueError()]), None),
            (BatchError("x"), None),
        ]:
            assert policy(Failure(_job(1), error)) == expected

    def test_by_exception_uses_the_nearest_type(self) -> None:
        policy = ByException({Exception: [1], OSError: [2], ConnectionError: Fixed(3)})
        for error, expected in [
            (ValueError(), 1),
            (OSError(), 2),
            (ConnectionResetError(), 3),
            (KeyboardInterrupt(), None),
        ]:
            assert policy(Failure(_job(1), error)) == expected

    def test_invalid_retry_policies_are_rejected(self) -> None:
        async def coroutine(_: Failure) -> float:
            return 1

        with pytest.raises(ConfigurationError, match=r"retry\[OSError\] is 5, .* use Fixed\(5\)"):
            read_policy({OSError: 5})
        for wrong in (
            "soon",
            True,
            3,
            1.5,
            lambda: 3,
            object,
            coroutine,
            [],
            ["x"],
            {1: 2},
            {ValueError: "x"},
            -1,
            3 + 4j,
        ):
            with pytest.raises(ConfigurationError):
                read_policy(wrong)
        for make in (
            lambda: Exponential(factor=0.5),
            lambda: Exponential(jitter=2),
            lambda: Fixed("x"),  # type: ignore[arg-type]
            lambda: Linear(-1),
            lambda: Exponential(cap=-1),
        ):
            with pytest.raises(ConfigurationError):
                make()

    def test_retry_policies_compare_by_value(self) -> None:
        assert Exponential(first=1) == Exponential(first=1) != Exponential(first=2)
        assert len({Fixed(1), Fixed(1), Linear(1)}) == 2
        assert repr(Fixed(1)) == "Fixed(every=1.0)"


OUTCOMES: dict[str, tuple[Any, int | None, str | None]] = {
    "return": (None, None, None),
    "raise": (ValueError("no"), 1, "no"),
    "retry": (Retry("busy", after=60), 1, "Retry in 60 s: busy"),
    "later": (
        Retry(at=datetime(2100, 1, 1, tzinfo=UTC)),
        1,
        "Retry at 2100-01-01 00:00:00+00:00",
    ),
    "fail": (Fail("never"), 25, "never"),
    "snooze": (Snooze(60, "not yet"), 0, "Snoozed for 60 s: not yet"),
    "cancel": (Cancel("off"), 25, "Cancelled: off"),
    "exit": (SystemExit(3), 1, "SystemExit: 3"),
}
"""What a job does, its attempts afterwards (None if the job is deleted), and its last error."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prefetch", [0, 50])
async def test_jobs_with_different_outcomes_do_not_affect_each_other(
    database: str, seed: int, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "graphile_worker")
    generator = random.Random(seed)
    chosen = [generator.choice([*OUTCOMES]) for _ in range(300)]
    ran: list[int] = []

    def act(n: int) -> None:
        ran.append(n)
        if (choice := OUTCOMES[chosen[n]][0]) is not None:
            raise choice

    # The default of 2.7 s is too short: a slow machine would run the jobs again in this test.
    @task(retry=Fixed(600))
    async def on_loop(n: int) -> None:
        await asyncio.sleep(generator.random() / 1000)
        act(n)

    @task(retry=Fixed(600))
    def on_thread(n: int) -> None:
        act(n)

    async with WorkerUtils(database) as utils:
        jobs = await utils.add_jobs(
            JobSpec(
                generator.choice(["on_loop", "on_thread"]),
                {"n": n},
                queue_name=generator.choice([None, "a", "b"]),
                job_key=generator.choice([None, f"key {n}"]),
            )
            for n in range(len(chosen))
        )
        drained = await once(
            {"on_loop": on_loop, "on_thread": on_thread}, database, concurrency=20, prefetch=prefetch
        )
        remaining = {job.payload["n"]: job for job in await utils.list_jobs(limit=1000)}
    assert sorted(ran) == list(range(len(chosen))), "each job must run once"
    counts = Counter(chosen)
    assert drained == RunSummary(
        counts["return"],
        sum(counts[name] for name in ("raise", "retry", "later", "fail", "exit")),
        counts["snooze"],
        counts["cancel"],
    )
    for n, outcome in enumerate(chosen):
        _, attempts, error = OUTCOMES[outcome]
        found = remaining.get(n)
        assert (found and found.attempts, found and found.last_error) == (attempts, error), (outcome, jobs[n])
        assert found is None or (found.locked_by, found.key) == (None, jobs[n].key)


class TestInvalidPayloads:
    async def test_invalid_payload_fails_the_job_with_the_path(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        recorder = EventRecorder()
        job = await add(db, "hello", payload={"name": 3})
        await once({"hello": hello}, database, events=recorder.events)
        row = await existing(db, job["id"])
        assert row["attempts"] == 1
        assert row["last_error"] == "Invalid payload: name: Expected `str`, got `int`"
        assert row["run_at"] > job["run_at"]
        error = recorder.named("job:error")[0].error
        assert isinstance(error, InvalidPayloadError)
        assert error.path == "name"

    @pytest.mark.parametrize("where", ["task", "worker"])
    async def test_invalid_payload_fails_permanently_if_configured(
        self, db: asyncpg.Connection, database: str, where: str
    ) -> None:
        recorder = EventRecorder()
        job = await add(db, "hello", payload={"name": 3})
        strict = task(on_invalid_payload="fail")(hello.function) if where == "task" else hello
        options: Any = {"on_invalid_payload": "fail"} if where == "worker" else {}
        await once({"hello": strict}, database, events=recorder.events, **options)
        assert (await existing(db, job["id"]))["attempts"] == 25
        assert recorder.counts["job:failed"] == 1

    async def test_type_error_of_the_task_is_not_an_invalid_payload(
        self, db: asyncpg.Connection, database: str
    ) -> None:
        job = await add(db, "hello", payload={"name": "explode"})
        strict = task(on_invalid_payload="fail")(hello.function)
        await once({"hello": strict}, database)
        assert (await existing(db, job["id"]))["attempts"] == 1


@task
async def hello(name: str) -> None:
    if name == "explode":
        raise TypeError("oops")


async def _half(items: list[int]) -> list[Any]:
    return [ValueError("no") if n == 2 else None for n in items]


async def _fail_always() -> None:
    raise ValueError("no")


def _job(attempts: int) -> Job:
    now = datetime.now(UTC)
    return Job(
        id=1, task_identifier="x", queue_name=None, payload=None, priority=0, run_at=now, attempts=attempts,
        max_attempts=25, last_error=None, created_at=now, updated_at=now, key=None, locked_at=now,
        locked_by="w", revision=0, flags=frozenset(), is_available=False, task_id=1, job_queue_id=None,
        state=JobState.RUNNING,
    )  # fmt: skip
