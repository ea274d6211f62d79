"""`AttachedWorker`: a worker, as middleware sees it that observes the whole worker and not only its jobs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime

    from graphile_worker.cron import CronItem
    from graphile_worker.events import Event, WorkerPool
    from graphile_worker.events.emitter import Events
    from graphile_worker.workers import Health

    MetricsPage = Callable[[], tuple[str, bytes]]


class AttachedWorker:
    """A worker that `Middleware.attach` receives.

    Listeners and pages that are added here belong to the worker, and are removed when it has ended.

    Args:
        worker_pool: The worker's identity.
        events: The worker's event emitter.
        health: Returns the worker's health.
        now: Returns the current time, as the queue sees it.
        pages: The pages of the worker's health port, by path.
        server: Returns the host and the port of the database, as far as they are known.
        cron_items: The recurring tasks that the worker schedules.
        recorded_listeners: The functions that the worker calls with recorded runs.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        events: Events,
        health: Callable[[], Health],
        now: Callable[[], datetime],
        pages: dict[str, MetricsPage],
        server: Callable[[], tuple[str | None, int | None]] = lambda: (None, None),
        cron_items: Sequence[CronItem] = (),
        recorded_listeners: list[Callable[[Sequence[Any]], object]] | None = None,
    ) -> None:
        self.worker_pool = worker_pool
        self._events = events
        self._pages = pages
        self._listeners: list[tuple[type[Event] | str, Callable[[Any], object]]] = []
        self._recorded_listeners = [] if recorded_listeners is None else recorded_listeners
        self._on_end: list[Callable[[], object]] = []
        self._around_own_work: list[Callable[[], AbstractContextManager[object]]] = []
        self.cron_items = tuple(cron_items)
        """The recurring tasks that the worker schedules."""
        self.server = server
        """Returns the host and the port of the database; each None if it is not known (yet)."""
        self.health = health
        """Returns the worker's health. May be called from any thread."""
        self.now = now
        """Returns the current time: the database's, unless the worker uses the local time."""

    def on(self, event: type[Event] | str, listener: Callable[[Any], object]) -> None:
        """Call the listener for each event of this kind from this worker's emitter, until the worker ends."""
        self._events.on(event, listener)
        self._listeners.append((event, listener))

    def on_recorded(self, listener: Callable[[Sequence[Any]], object]) -> None:
        """Call the listener with all runs whose outcomes an exchange has recorded, until the worker ends.

        It costs less than a listener for `JobComplete`, which is called for each job. A run has the job in
        ``claimed.job``, and `duration`, `since`, `error` and `outcome`. It must not be kept.
        """
        self._recorded_listeners.append(listener)

    def on_end(self, function: Callable[[], object]) -> None:
        """Call a function when the worker has ended."""
        self._on_end.append(function)

    def around_own_work(self, block: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter a context manager around what the worker does itself: connecting, claiming, listening.

        Context variables that it sets are not seen by jobs.
        """
        self._around_own_work.append(block)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Enter the context managers of `around_own_work`. The worker calls this method."""
        with ExitStack() as stack:
            for block in self._around_own_work:
                stack.enter_context(block())
            yield

    def serve(self, path: str, page: MetricsPage) -> None:
        """Serve a page on the worker's health port, if it has one.

        Args:
            path: The path, such as ``/metrics``.
            page: Returns the content type and the body. It is called on a thread.
        """
        self._pages[path] = page

    def detach(self) -> None:
        """Remove all listeners, because the worker has ended. The worker calls this method."""
        for event, listener in self._listeners:
            self._events.off(event, listener)
        self._listeners.clear()
        self._recorded_listeners.clear()
        functions, self._on_end = self._on_end, []
        for function in functions:
            function()
