"""Temporary errors are retried, and only where a retry is safe."""

from __future__ import annotations

import asyncio
import errno

import asyncpg
import pytest

from graphile_worker import DatabaseError, WorkerUtils
from graphile_worker._db.connection.retryable import is_retryable, retry_delay, retrying
from support.jobs import count

ROLLED_BACK = [asyncpg.SerializationError("x"), asyncpg.DeadlockDetectedError("x")]
UNREACHABLE = [
    asyncpg.CannotConnectNowError("starting up"),
    OSError(errno.EHOSTUNREACH, "no route"),
    OSError(errno.ETIMEDOUT, "timed out"),
]
PERMANENT = [
    asyncpg.UniqueViolationError("x"),
    asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    asyncpg.InterfaceError("pool is closed"),
    ValueError("x"),
]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the delays instead of sleeping."""
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(delay: float) -> None:
        slept.append(delay)
        await real_sleep(0)

    monkeypatch.setattr("graphile_worker._db.connection.retryable.asyncio.sleep", sleep)
    return slept


@pytest.mark.parametrize("error", [*ROLLED_BACK, *UNREACHABLE])
def test_temporary_error_is_retryable(error: Exception) -> None:
    assert is_retryable(error)


@pytest.mark.parametrize("error", PERMANENT)
def test_permanent_error_is_not_retryable(error: Exception) -> None:
    assert not is_retryable(error)
    with pytest.raises(ValueError, match="not retryable"):
        retry_delay(error, 0)


@pytest.mark.parametrize(
    ("errors", "shortest", "longest"), [(ROLLED_BACK, 0.05, 5.0), (UNREACHABLE, 3.0, 120.0)]
)
def test_retry_delays_grow_by_half_with_jitter_up_to_a_limit(
    errors: list[Exception], shortest: float, longest: float
) -> None:
    for error in errors:
        for attempt in range(30):
            nominal = min(shortest * 1.5**attempt, longest)
            for _ in range(20):
                assert nominal * 0.5 <= retry_delay(error, attempt) <= nominal * 1.5


async def test_retrying_repeats_until_success_or_the_last_attempt(delays: list[float]) -> None:
    failures = [asyncpg.SerializationError("x")] * 3

    async def operation() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert await retrying(operation, attempts=4) == "done"
    assert len(delays) == 3

    failures[:] = [asyncpg.SerializationError("x")] * 4
    with pytest.raises(asyncpg.SerializationError):
        await retrying(operation, attempts=4)


async def create_failing_trigger(db: asyncpg.Connection, times: int) -> None:
    """Make the next inserts of jobs fail with a serialization error.

    A sequence counts them, because it survives a rollback.
    """
    await db.execute(f"""
        create sequence failures;
        create function fail() returns trigger language plpgsql as $$
        begin
          if nextval('public.failures') <= {times} then
            raise exception 'try again' using errcode = 'serialization_failure';
          end if;
          return new;
        end $$;
        create trigger fail before insert on graphile_worker._private_jobs
          for each row execute function fail()""")


async def test_add_job_is_retried_after_a_rollback(
    db: asyncpg.Connection, database: str, delays: list[float]
) -> None:
    await create_failing_trigger(db, 3)
    async with WorkerUtils(dsn=database) as utils:
        await utils.add_job("t")
    assert len(delays) == 3
    assert await count(db) == 1


async def test_add_job_is_not_retried_in_the_callers_transaction(
    db: asyncpg.Connection, delays: list[float]
) -> None:
    await create_failing_trigger(db, 1)
    utils = WorkerUtils()
    with pytest.raises(DatabaseError, match="Try again") as caught:
        async with db.transaction():
            await utils.add_job("t", connection=db)
    assert isinstance(caught.value.__cause__, asyncpg.SerializationError)
    assert delays == []
    assert await count(db) == 0
