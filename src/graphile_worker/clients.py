"""Connections of an app: each event loop has its own, opened when they are needed, closed with the loop."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._runtime.references import refuse_while_importing
from graphile_worker.client import WorkerUtils
from graphile_worker.errors import ConfigurationError
from graphile_worker.payload import MAX_PAYLOAD_SIZE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

DEFAULTS: dict[str, Any] = {
    "dsn": None,
    "pool": None,
    "schema": None,
    "max_pool_size": 10,
    "pool_timeout": None,
    "prepared_statements": True,
    "use_local_time": False,
    "max_payload_size": MAX_PAYLOAD_SIZE,
    "middleware": (),
    "logger": None,
}


class _Client(NamedTuple):
    """Connections of one event loop."""

    utils: WorkerUtils
    lifetime: AsyncGenerator[None] | None
    """Closes them; none if they are a worker's."""


class Clients:
    """A `WorkerUtils` for each event loop.

    Args:
        settings: What each is made with: a value for each of the `DEFAULTS`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        WorkerUtils(**settings)  # what is wrong with them is better said now
        self.settings = settings
        self._of_loops: dict[asyncio.AbstractEventLoop, _Client] = {}
        self._process = os.getpid()
        self.everywhere: WorkerUtils | None = None
        """For all event loops, if it is not None."""
        self.home: asyncio.AbstractEventLoop | None = None
        """Where calls from threads without an event loop go, if not to one of their own."""

    def sets(self, setting: str) -> bool:
        """Whether it has another value than by default."""
        return bool(self.settings[setting] != DEFAULTS[setting])

    def configure(self, changes: dict[str, Any]) -> None:
        """Make them in another way."""
        if unknown := changes.keys() - DEFAULTS.keys():
            raise ConfigurationError(
                f"{', '.join(sorted(unknown))}: configure does not know that. It takes {', '.join(DEFAULTS)}."
            )
        self._forget_closed_loops()
        if self._of_loops:
            raise ConfigurationError("The app has connections already. Configure it before, or close it.")
        # One takes the place of the other.
        other = {"pool": None} if "dsn" in changes else {"dsn": None} if "pool" in changes else {}
        settings = {**self.settings, **other, **changes}
        WorkerUtils(**settings)
        self.settings = settings

    @property
    def utils(self) -> WorkerUtils:
        """That of this event loop."""
        refuse_while_importing()
        if self.everywhere is not None:
            return self.everywhere
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError(
                "Here is no event loop, to which the connections could belong. Without one: "
                "app.blocking(lambda: app.utils.stats())."
            ) from None
        client = self._of_loops.get(loop)
        if client is None or client.utils.is_closing:  # a worker that stops takes its connections along
            client = self._of_loops[loop] = self._open(loop)
        return client.utils

    @contextmanager
    def lent(self, utils: WorkerUtils) -> Iterator[None]:
        """For a while use that one, if there is none for this event loop."""
        loop = asyncio.get_running_loop()
        client = self._of_loops.setdefault(loop, _Client(utils, None))
        try:
            yield
        finally:
            if client.utils is utils and self._of_loops.get(loop) is client:
                del self._of_loops[loop]

    @contextmanager
    def replaced(self, utils: WorkerUtils | None, settings: dict[str, Any]) -> Iterator[None]:
        """For a while use that one on this event loop, if it is given, and these settings for others."""
        loop = None if utils is None else asyncio.get_running_loop()
        before = self.settings, self.home, self._of_loops
        self.settings = {**self.settings, **settings}
        self._of_loops = {} if loop is None or utils is None else {loop: _Client(utils, None)}
        self.home = loop
        try:
            yield
        finally:
            self.settings, self.home, self._of_loops = before

    async def close(self) -> None:
        """Close that of this event loop."""
        client = self._of_loops.get(asyncio.get_running_loop())
        if client is not None and client.lifetime is not None:
            await client.lifetime.aclose()

    def _forget_closed_loops(self) -> None:
        """Their connections are of no use, nor are those that a parent process has."""
        if self._process != os.getpid():
            self._of_loops, self._process = {}, os.getpid()
        for loop in list(self._of_loops):  # other threads have event loops too
            if loop.is_closed():
                self._of_loops.pop(loop, None)

    def _open(self, loop: asyncio.AbstractEventLoop) -> _Client:
        self._forget_closed_loops()
        utils = WorkerUtils(**self.settings)

        async def live() -> AsyncGenerator[None]:
            try:
                yield
            finally:
                self._of_loops.pop(loop, None)
                await utils.close()

        # When a loop ends, asyncio closes the generators that were begun on it, after all tasks have ended.
        lifetime = live()
        with suppress(StopIteration):
            lifetime.asend(None).send(None)
        return _Client(utils, lifetime)
