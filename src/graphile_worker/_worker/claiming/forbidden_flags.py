"""`ForbiddenFlags`: the option ``forbidden_flags``, the flags of jobs that the worker does not claim."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from graphile_worker._base.user_code import StrayExitError, capture_result, is_being_cancelled
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._worker.run_options import FlagsOption

_LONGEST_WAIT = 0.05


class ForbiddenFlags:
    """Reads the option, which may be a function, before each claim."""

    def __init__(self, option: FlagsOption, logger: ScopedLogger) -> None:
        self._option = option if callable(option) else _checked(option)
        self.fixed: Sequence[str] | None = None if callable(self._option) else self._option
        """The flags, unless the option is a function."""
        self._logger = logger
        self._context = copy_context()  # the user's, and not that of the worker's own work
        self._pending: asyncio.Future[Any] | None = None
        self.error: Exception | None = None
        """The error of the last call, until one succeeds."""
        self.on_return: Callable[[], None] = lambda: None
        """Called when a slow function has returned."""

    @property
    def unused(self) -> bool:
        """Whether no flag is ever forbidden."""
        return self.fixed is not None and not self.fixed

    async def current(self) -> Sequence[str] | None:
        """Return the flags that are forbidden now; None if the function failed or is still running."""
        if not callable(self._option):
            return self._option
        try:
            flags = await self._call(self._option)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            self._pending = None
            if self.error is None:
                self._logger.warning(
                    "forbidden_flags failed; no jobs are claimed until it succeeds", exc_info=True
                )
            self.error = error if isinstance(error, Exception) else StrayExitError(error)
            return None
        if flags is not None:
            self.error = None
        return flags

    async def _call(self, option: Callable[[], Any]) -> Sequence[str] | None:
        """Call the user's function. Returns None if it takes long, because results wait to be recorded."""
        if self._pending is None:
            value = self._context.copy().run(option)
            if not inspect.isawaitable(value):
                return _checked(value)
            self._pending = asyncio.get_running_loop().create_task(
                capture_result(lambda: value), context=self._context.copy()
            )
        if not self._pending.done():
            await asyncio.wait([self._pending], timeout=_LONGEST_WAIT)
        if not self._pending.done():
            self._pending.add_done_callback(lambda _: self.on_return())
            return None
        pending, self._pending = self._pending, None
        if pending.cancelled():
            raise RuntimeError("its coroutine was cancelled")
        value, error = pending.result()
        if error is not None:
            raise error
        return _checked(value)

    async def close(self) -> None:
        """Cancel a function that is still running."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait([self._pending])


def _checked(value: object) -> list[str]:
    if value is None:
        return []
    # A string is iterable too, but was meant as one flag.
    if isinstance(value, Iterable) and not isinstance(value, str):
        flags = list(value)
        if all(isinstance(flag, str) for flag in flags):
            return flags
    raise ConfigurationError(
        f"Invalid forbidden_flags {value!r}: must be a list of strings, None, or a function that returns one."
    )
