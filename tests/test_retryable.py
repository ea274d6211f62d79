"""Errors that pass by themselves are waited for, and only where repeating is safe."""

from __future__ import annotations

import asyncio
import errno

import asyncpg
import pytest

from graphile_worker import DatabaseError, WorkerUtils
from graphile_worker._db.retryable import is_retryable, retry_delay, retrying
from support.jobs import count

ROLLED_BACK = [asyncpg.SerializationError("x"), asyncpg.DeadlockDetectedError("x")]
UNREACHABLE = [
    asyncpg.CannotConnectNowError("starting up"),
    OSError(errno.EHOSTUNREACH, "no route"),
    OSError(errno.ETIMEDOUT, "timed out"),
]
NOT_WORTH_IT = [
    asyncpg.UniqueViolationError("x"),
    asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    asyncpg.InterfaceError("pool is closed"),
    ValueError("x"),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept, without sleeping."""
    slept: list[float] = []
    really = asyncio.sleep

    async def sleep(delay: float) -> None:
        slept.append(delay)
        await really(0)

    monkeypatch.setattr("graphile_worker._db.retryable.asyncio.sleep", sleep)
    return slept


@pytest.mark.parametrize("error", [*ROLLED_BACK, *UNREACHABLE])
def test_what_passes_by_itself(error: Exception) -> None:
    assert is_retryable(error)


@pytest.mark.parametrize("error", NOT_WORTH_IT)
def test_what_does_not(error: Exception) -> None:
    assert not is_retryable(error)
    with pytest.raises(ValueError, match="not worth"):
        retry_delay(error, 0)


@pytest.mark.parametrize(
    ("errors", "shortest", "longest"), [(ROLLED_BACK, 0.05, 5.0), (UNREACHABLE, 3.0, 120.0)]
)
def test_delays_grow_by_half_with_jitter_up_to_a_limit(
    errors: list[Exception], shortest: float, longest: float
) -> None:
    for error in errors:
        for attempt in range(30):
            nominal = min(shortest * 1.5**attempt, longest)
            for _ in range(20):
                assert nominal * 0.5 <= retry_delay(error, attempt) <= nominal * 1.5


async def test_it_is_repeated_until_it_succeeds_or_the_attempts_are_used_up(waits: list[float]) -> None:
    failures = [asyncpg.SerializationError("x")] * 3

    async def operation() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert await retrying(operation, attempts=4) == "done"
    assert len(waits) == 3

    failures[:] = [asyncpg.SerializationError("x")] * 4
    with pytest.raises(asyncpg.SerializationError):
        await retrying(operation, attempts=4)


async def failing_trigger(db: asyncpg.Connection, times: int) -> None:
    """Let the next inserts of jobs fail with a serialization error. Sequences survive a rollback."""
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


async def test_a_job_that_the_server_rolled_back_is_added_in_the_end(
    db: asyncpg.Connection, database: str, waits: list[float]
) -> None:
    await failing_trigger(db, 3)
    async with WorkerUtils(dsn=database) as utils:
        await utils.add_job("t")
    assert len(waits) == 3
    assert await count(db) == 1


async def test_nothing_is_repeated_in_the_callers_transaction(
    db: asyncpg.Connection, waits: list[float]
) -> None:
    await failing_trigger(db, 1)
    utils = WorkerUtils()
    with pytest.raises(DatabaseError, match="Try again") as caught:
        async with db.transaction():
            await utils.add_job("t", connection=db)
    assert isinstance(caught.value.__cause__, asyncpg.SerializationError)
    assert waits == []
    assert await count(db) == 0
