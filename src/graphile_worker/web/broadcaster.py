"""`Broadcaster`: tells browsers which regions of their pages have changed."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._db.connection.listen import listening
from graphile_worker.errors import GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from graphile_worker.web.dashboard import Queue

KEEPALIVE = 15.0
"""Seconds after which a comment is sent, so that no proxy closes the stream."""
_DEBOUNCE = 0.25
_TICK = 2.0
"""Seconds between two events without a notification: workers do not announce the ends of jobs."""
_RETRY = 5.0
_CHANNEL = "jobs:insert"
MAX_VIEWERS = 200
"""Open streams of a process. Further browsers poll."""
MAX_VIEWERS_OF_USER = 50
"""Open streams of one user, so that others find a place. Users of one token count as one."""


class Viewer:
    """A browser that listens, and what it has not been told yet."""

    def __init__(self, user: str) -> None:
        self.user = user
        self._names: set[str] = set()
        self._woken = asyncio.Event()

    def tell(self, names: set[str]) -> None:
        """Remember what has changed."""
        self._names |= names
        self._woken.set()

    async def changes(self) -> AsyncGenerator[str]:
        """Yield the text of the stream, without end."""
        yield "retry: 3000\n\n"
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE):
                    await self._woken.wait()
            except TimeoutError:
                yield ": nothing has changed\n\n"
                continue
            await asyncio.sleep(_DEBOUNCE)
            self._woken.clear()
            names, self._names = sorted(self._names), set()
            yield f"event: changed\ndata: {json.dumps(names)}\n\n"


class Broadcaster:
    """Listens once for all viewers of a queue, while there are any.

    Args:
        queue: The schema, and its client.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._viewers: set[Viewer] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def tell(self, *names: str) -> None:
        """Tell all viewers that regions have changed."""
        for viewer in self._viewers:
            viewer.tell(set(names))

    def accepts(self, user: str) -> bool:
        """Return whether one more viewer of this user is accepted."""
        of_user = sum(viewer.user == user for viewer in self._viewers)
        return len(self._viewers) < MAX_VIEWERS and of_user < MAX_VIEWERS_OF_USER

    @asynccontextmanager
    async def viewer(self, user: str = "") -> AsyncIterator[Viewer]:
        """Add a viewer for the duration of an ``async with`` block."""
        viewer = Viewer(user)
        self._viewers.add(viewer)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._tick())]
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                await self.close()

    async def close(self) -> None:
        """Stop listening."""
        tasks, self._tasks = self._tasks, []
        loop = asyncio.get_running_loop()
        own = [task for task in tasks if task.get_loop() is loop]
        for task in own:
            task.cancel()
        if own:
            await asyncio.wait(own)

    async def _listen(self) -> None:
        """Turn notifications of new jobs into changes. Without LISTEN, the ticks remain."""
        while True:
            with suppress(GraphileWorkerError, OSError):
                try:
                    pool = self._queue.utils._session.pool  # noqa: SLF001 - the library's own
                    async with listening(pool, [_CHANNEL], self._on_notification) as listener:
                        await listener.closed.wait()
                except Exception as error:  # noqa: BLE001 - the driver's errors too: the ticks go on
                    logger.debug("The dashboard cannot listen: %s", error)
            self.tell("counts")
            await asyncio.sleep(_RETRY)

    def _on_notification(self, _channel: str, _message: str) -> None:
        self.tell("jobs", "counts")

    async def _tick(self) -> None:
        """Look for changes without a notification: ends of jobs, and workers that start and stop."""
        last = None
        while True:
            await asyncio.sleep(_TICK)
            state = None
            with suppress(Exception):  # an outage shows on the pages themselves
                state = await self._queue.data.fingerprint()
            if state != last:
                self.tell("jobs", "counts", "workers", "cron")
            last = state
