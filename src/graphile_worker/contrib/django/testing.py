"""Run jobs in Django's tests, in the transaction of the test.

In a `TestCase`, jobs that the code adds are in the test's transaction, so no worker sees them. `run_jobs`
runs them there: plain functions on the thread of the test, so that they use the same connection.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections

from graphile_worker._db.connection.adapted import AdaptedConnection
from graphile_worker._worker.execution.threads import Threads
from graphile_worker.contrib.django import app as default_app
from graphile_worker.contrib.django.emptying import empty_queue
from graphile_worker.testing import assertions, drain
from graphile_worker.testing.single_job_worker import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextvars import Context

    from graphile_worker.contrib.django.django_app import DjangoApp
    from graphile_worker.job import Job
    from graphile_worker.outcome import RunSummary
    from graphile_worker.testing.clocks import Clock

__all__ = ["GraphileWorkerMixin", "arun_jobs", "empty_queue", "run_jobs"]


def run_jobs(
    app: DjangoApp | None = None,
    *,
    clock: Clock | None = None,
    limit: int | None = 1000,
    raise_errors: bool = True,
) -> RunSummary:
    """Run the jobs that are due, one after the other, and the jobs that they add, until none is due.

    Jobs are claimed, run and recorded as by a worker, on Django's connection and in its transaction.

    Args:
        app: The app [that of the project].
        clock: The clock to use [the real time]. Move it to run jobs that are scheduled for later.
        limit: The number of jobs that may run; more than that is an endless loop. None means no limit.
        raise_errors: Whether to stop at the first failure, once it is recorded, and raise the task's error.

    Returns:
        How many jobs succeeded, failed, were snoozed and were cancelled.

    Example:
        >>> from graphile_worker.contrib.django.testing import run_jobs
        >>> run_jobs().succeeded
        0
    """
    return async_to_sync(arun_jobs)(app, clock=clock, limit=limit, raise_errors=raise_errors)


async def arun_jobs(
    app: DjangoApp | None = None,
    *,
    clock: Clock | None = None,
    limit: int | None = 1000,
    raise_errors: bool = True,
) -> RunSummary:
    """Run the jobs that are due like `run_jobs`, in an async test."""
    app = default_app if app is None else app
    connection: Any = await sync_to_async(lambda: AdaptedConnection(connections[app.database]))()
    with _plain_functions_on_djangos_thread():
        return await drain(app, connection=connection, clock=clock, limit=limit, raise_errors=raise_errors)


@contextmanager
def _plain_functions_on_djangos_thread() -> Iterator[None]:
    token = THREADS.set(_DjangosThread)
    try:
        yield
    finally:
        THREADS.reset(token)


class _DjangosThread(Threads):
    """Runs plain functions on the thread that has the test's connection."""

    def run(self, context: Context, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        """Run the function there. The future's result is a pair: the returned value, and the error."""

        def call() -> tuple[Any, BaseException | None]:
            try:
                return context.run(function, *arguments), None
            except BaseException as error:  # noqa: BLE001 - it is passed to the event loop
                return None, error

        return asyncio.ensure_future(sync_to_async(call, thread_sensitive=True)())


class GraphileWorkerMixin:
    """A mixin for Django's test cases: ``self.run_jobs()`` and assertions about jobs.

    Example:
        >>> from django.test import TestCase
        >>> from graphile_worker.contrib.django.testing import GraphileWorkerMixin
        >>> class OrderTests(GraphileWorkerMixin, TestCase):
        ...     def test_order_is_invoiced(self):
        ...         place_order(item="tea")
        ...         self.assert_enqueued(write_invoice, item="tea")
        ...         assert self.run_jobs().succeeded == 1
    """

    def run_jobs(self, app: DjangoApp | None = None, **options: Any) -> RunSummary:
        """Run the jobs that are due: see `run_jobs`."""
        return run_jobs(app, **options)

    async def arun_jobs(self, app: DjangoApp | None = None, **options: Any) -> RunSummary:
        """Run the jobs that are due, in an async test: see `run_jobs`."""
        return await arun_jobs(app, **options)

    def assert_enqueued(self, task: Any, payload: Any = None, /, **arguments: Any) -> Job:
        """Fail unless a matching job waits to run: see `graphile_worker.testing.assert_enqueued`."""
        job: Job = _checked(assertions.assert_enqueued, task, payload, arguments)
        return job

    def assert_not_enqueued(self, task: Any, payload: Any = None, /, **arguments: Any) -> None:
        """Fail if a matching job waits to run."""
        _checked(assertions.assert_not_enqueued, task, payload, arguments)


def _checked(assertion: Any, task: Any, payload: Any, arguments: dict[str, Any]) -> Any:
    connection = AdaptedConnection(connections[default_app.database])
    return async_to_sync(assertion)(task, payload, on=connection, **arguments)
