"""Decide which database errors are transient, and how long to wait before a retry.

A retry must be safe: the server rolled the statement back or never received it, or no connection was made. A
connection lost in the middle of a statement is not retried, because the statement may have been committed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import asyncpg

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._db.connection.error_mapping import message_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._base.logs import AnyLogger

T = TypeVar("T")


class _Wait(NamedTuple):
    shortest: float
    longest: float


_NEVER_SENT = _Wait(0.01, 1.0)
_ROLLED_BACK = _Wait(0.05, 5.0)
_UNREACHABLE = _Wait(3.0, 120.0)
_FACTOR = 1.5


def _wait_for(error: BaseException) -> _Wait | None:
    if _found_connection_dead(error):
        return _NEVER_SENT
    if isinstance(error, asyncpg.SerializationError | asyncpg.DeadlockDetectedError):
        return _ROLLED_BACK
    if isinstance(error, asyncpg.CannotConnectNowError):
        return _UNREACHABLE
    if isinstance(error, OSError) and error.errno in {errno.EHOSTUNREACH, errno.ETIMEDOUT}:
        return _UNREACHABLE
    return None


def _found_connection_dead(error: BaseException) -> bool:
    """Return whether the driver found the connection closed before it sent anything."""
    if type(error) is asyncpg.InternalClientError:
        return "another operation" in str(error)  # the driver is just reading the end of the connection
    return type(error) is asyncpg.InterfaceError and "connection is closed" in str(error)


def is_retryable(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    return _wait_for(error) is not None


def retry_delay(error: BaseException, attempt: int) -> float:
    """Return how many seconds to wait after attempt number `attempt`, from 0 on, with jitter."""
    wait = _wait_for(error)
    if wait is None:
        raise ValueError(f"{error!r} is not retryable")
    return min(wait.shortest * _FACTOR**attempt, wait.longest) * (0.5 + random.random())  # noqa: S311


async def retrying(operation: Callable[[], Awaitable[T]], *, attempts: int, logger: AnyLogger = logger) -> T:
    """Return the result of the operation, and retry it while it fails with a transient error."""
    for attempt in range(attempts - 1):
        try:
            return await operation()
        except Exception as error:
            if not is_retryable(error):
                raise
            delay = retry_delay(error, attempt)
            # Without the server's details, which may quote a whole row.
            why = "The connection is closed" if _found_connection_dead(error) else message_of(error)
            # During an outage, each part of a worker retries; the worker logs the outage once.
            level = logging.WARNING if _wait_for(error) is _ROLLED_BACK else logging.DEBUG
            logger.log(level, "%s: retrying in %.2f s", why, delay)
        await asyncio.sleep(delay)
    return await operation()
