"""Calls of user functions, from code that must continue whatever the function raises."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class StrayExitError(Exception):
    """User code raised CancelledError, SystemExit or KeyboardInterrupt, without having been cancelled."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"it raised {error!r}")


def is_being_cancelled() -> bool:
    """Return whether cancellation of the current task was requested.

    Without a request, a CancelledError comes from the code itself: it has cancelled itself.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call_user_code(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function, which may be async, in a separate task, and return its result.

    The separate task protects the caller from code that cancels the task it runs in.

    Raises:
        Exception: The exception that the function raised. It is a `StrayExitError` if the function raised a
            CancelledError, SystemExit or KeyboardInterrupt.
    """
    call = asyncio.create_task(capture_result(function, *arguments), name="graphile-worker user code")
    try:
        value, error = await call
    except asyncio.CancelledError as cancelled:
        if is_being_cancelled():
            raise
        raise StrayExitError(cancelled) from cancelled
    if error is not None:
        raise error
    return value


async def capture_result(function: Callable[..., Any], *arguments: object) -> tuple[Any, Exception | None]:
    """Return the result and the exception of a function, which may be async. One of them is None.

    Tasks need it, because a task that raises SystemExit ends its event loop.
    """
    try:
        value = function(*arguments)
        return (await value if inspect.isawaitable(value) else value), None
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return None, error
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
            raise
        stray = StrayExitError(error)
        stray.__cause__ = error
        return None, stray
