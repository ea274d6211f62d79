"""The connections of an app: each event loop has its own, opened when needed and closed with the loop.

Code without an event loop uses the methods with ``_sync``. They run on a thread with an event loop, which has
its own connections too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from graphile_worker._base.payload import MAX_PAYLOAD_SIZE
from graphile_worker._client.sync_bridge import SyncBridge
from graphile_worker._db.connection.any_connection import is_blocking
from graphile_worker._db.connection.connect import Pool
from graphile_worker._db.connection.session import Session
from graphile_worker._tasks.task_reference import reject_while_importing
from graphile_worker.client import WorkerUtils, find_schema
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

T = TypeVar("T")
DEFAULTS: dict[str, Any] = {
    "dsn": None,
    "pool": None,
    "schema": None,
    "max_pool_size": 10,
    "pool_timeout": None,
    "prepared_statements": True,
    "use_local_time": False,
    "max_payload_size": MAX_PAYLOAD_SIZE,
    "require_transaction": False,
    "middleware": (),
    "logger": None,
}


class _NoLoopPool(Pool):
    """A pool that refuses to open connections, because no event loop is running."""

    def connection(self) -> NoReturn:
        """Refuse."""
        raise ConfigurationError(
            "app.utils was read without a running event loop, and connections belong to one. Use the method "
            "with _sync, for example app.utils.stats_sync(). In a coroutine, read app.utils there."
        )

    lend = dedicated = connection


class _SyncUtils(WorkerUtils):
    """The utils of an app for code without an event loop."""

    _clients: PerLoopClients

    @classmethod
    def of_app(cls, clients: PerLoopClients) -> _SyncUtils:
        """Create utils with the settings of the app. They open no connections themselves."""
        settings = clients.settings
        logger = settings["logger"] or logging.getLogger("graphile_worker")
        session = Session(
            find_schema(settings["schema"]), _NoLoopPool(), logger, settings["max_payload_size"]
        )
        utils = cls._on_session(
            session,
            use_local_time=settings["use_local_time"],
            require_transaction=settings["require_transaction"],
            middleware=settings["middleware"],
        )
        utils._clients = clients  # noqa: SLF001 - its own
        return utils

    def _run_on_own_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._clients.run_sync(work)

    def _on_own_loop(self) -> WorkerUtils:  # type: ignore[override] # the twins only call its methods
        return self._clients.utils


class _LoopClient(NamedTuple):
    """The connections of one event loop."""

    utils: WorkerUtils
    lifetime: AsyncGenerator[None] | None
    """Closes the connections; None if they belong to a worker."""


class PerLoopClients:
    """A `WorkerUtils` for each event loop.

    Args:
        settings: The arguments of each `WorkerUtils`: a value for each of the `DEFAULTS`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        WorkerUtils(**settings)  # raises at once if a setting is invalid
        self.settings = settings
        self._by_loop: dict[asyncio.AbstractEventLoop, _LoopClient] = {}
        self._pid = os.getpid()
        self._sync_bridge = SyncBridge()
        self._sync_utils: tuple[dict[str, Any], WorkerUtils] | None = None
        """The utils for code without an event loop, and the settings that they were made with."""
        self.override: WorkerUtils | None = None
        """The utils for all event loops, if it is not None."""
        self.sync_loop: asyncio.AbstractEventLoop | None = None
        """The event loop for calls from threads without one; None for that of `SyncBridge`."""

    def is_set(self, setting: str) -> bool:
        """Return whether a setting differs from its default."""
        return bool(self.settings[setting] != DEFAULTS[setting])

    def configure(self, changes: dict[str, Any]) -> None:
        """Change the settings of connections that are opened later.

        Raises:
            ConfigurationError: A setting is invalid, or connections are open.
        """
        if unknown := changes.keys() - DEFAULTS.keys():
            raise ConfigurationError(
                f"configure takes no setting {', '.join(sorted(unknown))}. It takes {', '.join(DEFAULTS)}."
            )
        self._forget_closed_loops()
        if self._by_loop:
            raise ConfigurationError(
                "The app has open connections. Call configure before the app is used, or after app.close()."
            )
        # dsn and pool replace each other.
        other = {"pool": None} if "dsn" in changes else {"dsn": None} if "pool" in changes else {}
        settings = {**self.settings, **other, **changes}
        WorkerUtils(**settings)
        self.settings = settings

    @property
    def utils(self) -> WorkerUtils:
        """The utils of the running event loop, or for code without one."""
        reject_while_importing()
        if self.override is not None:
            return self.override
        loop = asyncio._get_running_loop()  # noqa: SLF001 - asyncio.get_running_loop raises
        if loop is None or is_blocking():
            return self._utils_without_loop()
        client = self._by_loop.get(loop)
        if client is None or client.utils.is_closing:  # a worker that stops closes its connections
            client = self._by_loop[loop] = self._open(loop)
        return client.utils

    def _utils_without_loop(self) -> WorkerUtils:
        if self.sync_loop is not None and self.sync_loop in self._by_loop:
            return self._by_loop[self.sync_loop].utils
        if self._sync_utils is None or self._sync_utils[0] is not self.settings:
            self._sync_utils = self.settings, _SyncUtils.of_app(self)
        return self._sync_utils[1]

    def run_sync(self, work: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine from code without an event loop, and return its result."""
        if self.sync_loop is not None and self.sync_loop.is_running():
            return self._sync_bridge.run_on(self.sync_loop, work)
        return self._sync_bridge.run(work)

    def close_sync(self) -> None:
        """Close the connections of code without an event loop."""
        self._sync_bridge.close(self.stop_waiting)

    @contextmanager
    def using_client(self, utils: WorkerUtils) -> Iterator[None]:
        """Use these utils for a while, if the event loop has none."""
        loop = asyncio.get_running_loop()
        client = self._by_loop.setdefault(loop, _LoopClient(utils, None))
        try:
            yield
        finally:
            if client.utils is utils and self._by_loop.get(loop) is client:
                del self._by_loop[loop]

    @contextmanager
    def replaced(self, utils: WorkerUtils | None, settings: dict[str, Any]) -> Iterator[None]:
        """Use these utils for a while on this event loop, if given, and these settings on other loops."""
        loop = None if utils is None else asyncio.get_running_loop()
        before = self.settings, self.sync_loop, self._by_loop
        self.settings = {**self.settings, **settings}
        self._by_loop = {} if loop is None or utils is None else {loop: _LoopClient(utils, None)}
        self.sync_loop = loop
        try:
            yield
        finally:
            self.settings, self.sync_loop, self._by_loop = before

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        client = self._by_loop.get(asyncio.get_running_loop())
        if client is not None and client.lifetime is not None:
            await client.lifetime.aclose()

    async def stop_waiting(self) -> None:
        """Let everything fail that waits for the result of a job on the running event loop."""
        client = self._by_loop.get(asyncio.get_running_loop())
        if client is not None and client.lifetime is not None:
            await client.utils._stop_waiting()  # noqa: SLF001 - the library's own

    def _forget_closed_loops(self) -> None:
        """Drop connections of closed event loops and of the parent process, which cannot be used."""
        if self._pid != os.getpid():
            self._by_loop, self._pid = {}, os.getpid()
        for loop in list(self._by_loop):  # other threads have event loops too
            if loop.is_closed():
                self._by_loop.pop(loop, None)

    def _open(self, loop: asyncio.AbstractEventLoop) -> _LoopClient:
        self._forget_closed_loops()
        utils = WorkerUtils(**self.settings)

        async def close_at_end() -> AsyncGenerator[None]:
            try:
                yield
            finally:
                self._by_loop.pop(loop, None)
                await utils.close()

        # When a loop ends, asyncio closes the generators that were started on it, after all tasks have ended.
        lifetime = close_at_end()
        with suppress(StopIteration):
            lifetime.asend(None).send(None)
        return _LoopClient(utils, lifetime)
