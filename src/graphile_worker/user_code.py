"""Calling what users bring, from code that must go on whatever it raises."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class StrayExitError(Exception):
    """User code raised CancelledError, SystemExit or KeyboardInterrupt, and was not cancelled by us."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"it raised {error!r}")


def is_being_cancelled() -> bool:
    """Whether the current task was asked to end.

    A CancelledError in a task that was not asked is stray: the code that raised it has cancelled itself.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call_user_code(function: Callable[..., Any], *arguments: object) -> Any:
    """Call the function, which may be async, in a task of its own; return what it returns.

    In its own task, because code that cancels the task it runs in must not cancel ours.

    Raises:
        Exception: The function raised it; or it raised something worse, and this is a `StrayExitError`.
    """
    call = asyncio.create_task(outcome_of(function, *arguments), name="graphile-worker user code")
    try:
        value, error = await call
    except asyncio.CancelledError as cancelled:
        if is_being_cancelled():
            raise
        raise StrayExitError(cancelled) from cancelled
    if error is not None:
        raise error
    return value


async def outcome_of(function: Callable[..., Any], *arguments: object) -> tuple[Any, Exception | None]:
    """What the function, which may be async, returned or raised.

    For tasks: one that raises SystemExit would end its event loop.
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
