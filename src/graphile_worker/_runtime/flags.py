"""Flags of jobs that are not to be run now."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphile_worker.errors import ConfigurationError
from graphile_worker.user_code import StrayExitError, is_being_cancelled, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker.logs import ScopedLogger
    from graphile_worker.options import FlagsOption

_PATIENCE = 0.05


class ForbiddenFlags:
    """What the option says, each time it is asked."""

    def __init__(self, option: FlagsOption, logger: ScopedLogger) -> None:
        self._option = option if callable(option) else _checked(option)
        self.fixed: Sequence[str] | None = None if callable(self._option) else self._option
        """The flags, if there is nobody to be asked."""
        self._logger = logger
        self._asking: asyncio.Future[Any] | None = None
        self.error: Exception | None = None
        """Why nobody can say."""
        self.answered: Callable[[], None] = lambda: None
        """Called when an answer comes that we did not wait for."""

    @property
    def unused(self) -> bool:
        """Whether no flag is ever forbidden; otherwise a job claimed ahead would be judged too early."""
        return self.fixed is not None and not self.fixed

    async def current(self) -> Sequence[str] | None:
        """The flags that are forbidden now; None if that cannot be said."""
        if not callable(self._option):
            return self._option
        try:
            flags = await self._ask(self._option)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            self._asking = None
            if self.error is None:
                self._logger.warning(
                    "forbidden_flags failed; no jobs are claimed until it works", exc_info=True
                )
            self.error = error if isinstance(error, Exception) else StrayExitError(error)
            return None
        if flags is not None:
            self.error = None
        return flags

    async def _ask(self, option: Callable[[], Any]) -> Sequence[str] | None:
        """What the user's function says; None if it does not say so within a moment: results wait for it."""
        if self._asking is None:
            value = option()
            if not inspect.isawaitable(value):
                return _checked(value)
            self._asking = asyncio.ensure_future(outcome_of(lambda: value))
        if not self._asking.done():
            await asyncio.wait([self._asking], timeout=_PATIENCE)
        if not self._asking.done():
            self._asking.add_done_callback(lambda _: self.answered())
            return None
        asking, self._asking = self._asking, None
        if asking.cancelled():
            raise RuntimeError("it was cancelled")
        value, error = asking.result()
        if error is not None:
            raise error
        return _checked(value)

    async def close(self) -> None:
        """Do not wait for an answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


def _checked(value: object) -> list[str]:
    if value is None:
        return []
    # A string is iterable too, but was meant as one flag.
    if isinstance(value, Iterable) and not isinstance(value, str):
        flags = list(value)
        if all(isinstance(flag, str) for flag in flags):
            return flags
    raise ConfigurationError(
        f"forbidden_flags is {value!r}; it must be a list of strings, None, or a function that returns one."
    )
