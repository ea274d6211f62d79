"""Django's database connections around jobs: lost ones are not used, and old ones are closed.

Django keeps a connection for each thread, and closes it between requests. A worker has no requests, so this
middleware does it around jobs, on the thread that the task uses: the task's own, or for a coroutine the
thread on which ``sync_to_async`` runs Django's ORM.
"""

from __future__ import annotations

import inspect
import select
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from graphile_worker.middleware import Middleware
from graphile_worker.testing.overrides import IN_TEST_JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphile_worker.context import JobContext
    from graphile_worker.contrib.django.django_app import DjangoApp
    from graphile_worker.middleware.base import Running


class _Closer:
    """Closes the connections of a thread when the thread ends.

    Python would do so only when it next collects garbage, because Django's connections refer to themselves.
    """

    connections: Sequence[Any] = ()

    def __del__(self) -> None:
        for connection in self.connections:
            with suppress(Exception):
                connection.inc_thread_sharing()
                connection.close()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.closer = _Closer()


_THREAD = _Thread()


class DjangoConnections(Middleware):
    """Closes Django's connections around jobs, when they are lost or older than ``CONN_MAX_AGE``.

    Args:
        app: The app, which knows which of its tasks are coroutine functions.
    """

    def __init__(self, app: DjangoApp) -> None:
        self._app = app
        self._running = 0
        """The number of coroutines that run, all of which share one thread for Django's connections."""
        self._shared_thread: int | None = None
        self._threads_with_connections: set[int] = set()
        self._is_connected = False

    def __repr__(self) -> str:
        return "DjangoConnections()"

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function between two checks of this thread's connections."""
        if IN_TEST_JOB.get():  # the test's transaction is on them
            return function()
        _before()
        try:
            return function()
        finally:
            _after()
            _THREAD.closer.connections = _open_connections()

    async def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:
        """Run a coroutine between two checks of the connections of Django's thread."""
        task = self._app.tasks.get(ctx.job.task_identifier)
        if task is None or not inspect.iscoroutinefunction(task.function) or IN_TEST_JOB.get():
            return await proceed()
        self._running += 1
        try:
            await self._on_shared_thread(_before)
            return await proceed()
        finally:
            self._running -= 1
            # Another coroutine may be reading from the connection. A lost one is closed in any case.
            await self._on_shared_thread(_after if not self._running else _close_lost)

    async def close(self) -> None:
        """Close the connections of Django's thread, because the worker has ended."""
        from asgiref.sync import sync_to_async  # noqa: PLC0415 - Django has it

        if not self._running:
            await sync_to_async(self._call_there)(_close)

    async def _on_shared_thread(self, function: Callable[[], None]) -> None:
        """Call the function on Django's thread, unless that certainly has no connection."""
        from asgiref.sync import sync_to_async  # noqa: PLC0415 - Django has it

        self._listen()
        if self._shared_thread is not None and self._shared_thread not in self._threads_with_connections:
            return
        await sync_to_async(self._call_there)(function)

    def _call_there(self, function: Callable[[], None]) -> None:
        function()
        self._shared_thread = threading.get_ident()
        if _open_connections():
            self._threads_with_connections.add(self._shared_thread)
        else:
            self._threads_with_connections.discard(self._shared_thread)

    def _listen(self) -> None:
        if not self._is_connected:
            from django.db.backends.signals import connection_created  # noqa: PLC0415 - needs settings

            connection_created.connect(self._on_connection_created)
            self._is_connected = True

    def _on_connection_created(self, **_: object) -> None:
        self._threads_with_connections.add(threading.get_ident())


def _open_connections() -> list[Any]:
    """Return this thread's connections that are open."""
    from django.db import connections  # noqa: PLC0415 - needs settings

    return [one for one in connections.all(initialized_only=True) if one.connection is not None]


def _before() -> None:
    """Close connections that Django would close before a request, and those that the server has closed."""
    from django.db import reset_queries  # noqa: PLC0415 - needs settings

    reset_queries()
    for connection in _open_connections():
        connection.close_if_unusable_or_obsolete()
    _close_lost()


def _after() -> None:
    for connection in _open_connections():
        connection.close_if_unusable_or_obsolete()


def _close() -> None:
    for connection in _open_connections():
        if not connection.in_atomic_block:
            connection.close()


def _close_lost() -> None:
    """Close the connections that the server has closed. Otherwise the next job would fail."""
    for connection in _open_connections():
        is_suspect = connection.errors_occurred or _has_something_to_read(connection.connection)
        if is_suspect and not connection.in_atomic_block and not connection.is_usable():
            connection.close()


def _has_something_to_read(raw: Any) -> bool:
    """Return whether the server has sent something between statements: usually, that it ends the session.

    That costs no round trip, unlike Django's CONN_HEALTH_CHECKS.
    """
    with suppress(Exception):
        poll = select.poll()
        poll.register(raw.fileno(), select.POLLIN | select.POLLERR | select.POLLHUP)
        return bool(poll.poll(0))
    return True  # it is closed, or the platform has no poll
