"""Which database errors pass by themselves, and how long to wait for them.

The one place that decides it. What is repeated must be safe to repeat: a statement that the server rolled
back or never got, or a connection that never came to be. A connection lost in the middle of a statement is
none of these, for nobody knows whether the statement was done.
"""

from __future__ import annotations

import asyncio
import errno
import random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import asyncpg

from graphile_worker._db.failures import message_of
from graphile_worker.logs import library_logger as logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker.logs import AnyLogger

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
    """Whether the driver noticed, before it sent anything, that the server had closed the connection."""
    if type(error) is asyncpg.InternalClientError:
        return "another operation" in str(error)  # the end of the connection is being read at this moment
    return type(error) is asyncpg.InterfaceError and "connection is closed" in str(error)


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return _wait_for(error) is not None


def retry_delay(error: BaseException, attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`, from 0 on, with jitter."""
    wait = _wait_for(error)
    if wait is None:
        raise ValueError(f"{error!r} is not worth a retry")
    return min(wait.shortest * _FACTOR**attempt, wait.longest) * (0.5 + random.random())  # noqa: S311


async def retrying(operation: Callable[[], Awaitable[T]], *, attempts: int, logger: AnyLogger = logger) -> T:
    """The result of the operation, repeated while it fails with an error that passes by itself."""
    for attempt in range(attempts - 1):
        try:
            return await operation()
        except Exception as error:
            if not is_retryable(error):
                raise
            delay = retry_delay(error, attempt)
            # Without the server's details, which may quote a whole row.
            why = "The connection is closed" if _found_connection_dead(error) else message_of(error)
            logger.warning("%s: trying again in %.2f s", why, delay)
        await asyncio.sleep(delay)
    return await operation()
