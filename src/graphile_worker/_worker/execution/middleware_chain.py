"""Middleware around the call of a job's function."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.context import JobContext
from graphile_worker.errors import BatchError, TaskError
from graphile_worker.middleware.base import check_proceed_awaited, close_never_awaited

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from datetime import datetime

    from graphile_worker._base.durations import Duration
    from graphile_worker._base.stop_signals import StopSignal
    from graphile_worker._worker.execution.deadline import Deadline
    from graphile_worker._worker.execution.handlers import Handler
    from graphile_worker.context import WorkerEnvironment
    from graphile_worker.job import Job
    from graphile_worker.middleware import Middleware

    Perform: TypeAlias = Callable[[Handler, Job, Deadline | None], Coroutine[Any, Any, Any]]

_UNCHANGED: Any = object()


def wrap(middleware: Iterable[Middleware], perform: Perform, environment: WorkerEnvironment) -> Perform:
    """Wrap `perform` in all middleware. The first one is the outermost."""
    for layer in reversed(list(middleware)):
        perform = _MiddlewareStep(layer, perform, environment)
    return perform


class _RenewableDeadline:
    """The deadline of a job, as middleware uses it. Middleware may run the job more than once."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._next_timeout: Duration | None = None

    @property
    def stop_requested(self) -> StopSignal:
        """The signal that asks the current run to stop."""
        return self._deadline.stop_requested

    @property
    def at(self) -> datetime:
        """The deadline of the current run."""
        return self._deadline.at

    def extend(self, duration: Duration) -> None:
        """Set the deadline to this long from now. If this run has timed out, it applies to the next run."""
        self._next_timeout = duration if self._deadline.expired else None
        self._deadline.extend(duration)

    def renew(self, stop_requested: StopSignal) -> Deadline:
        """Return a new deadline for another run."""
        self._deadline = self._deadline.renew(stop_requested)
        if self._next_timeout is not None:
            self._deadline.extend(self._next_timeout)
        self._next_timeout = None
        return self._deadline


class _MiddlewareStep:
    """A middleware and what it wraps."""

    def __init__(self, middleware: Middleware, inner: Perform, environment: WorkerEnvironment) -> None:
        self._middleware = middleware
        self._inner = inner
        self._environment = environment

    async def __call__(self, handler: Handler, job: Job, deadline: Deadline | None) -> Any:
        runs: list[Coroutine[Any, Any, Any]] = []
        limit = None if deadline is None else _RenewableDeadline(deadline)
        ctx: JobContext[Any] = JobContext(job, self._environment, limit)

        def proceed(payload: Any = _UNCHANGED, /) -> Coroutine[Any, Any, Any]:
            nonlocal deadline
            if runs and limit is not None:
                # With the old signal, a second run after a timeout would be asked to stop at once.
                signal = self._environment.stop_signals.renew(job, limit.stop_requested)
                deadline = limit.renew(signal)
                ctx._renew_stop_signal(signal)  # noqa: SLF001 - only here a context has more than one run
            if payload is _UNCHANGED:
                runs.append(self._inner(handler, job, deadline))
            else:
                runs.append(self._with_payload(payload, handler, job, deadline))
            return runs[-1]

        try:
            value = self._middleware.execute(ctx, proceed)
            if inspect.isawaitable(value):
                value = await value
        except BaseException:
            close_never_awaited(runs)
            raise
        check_proceed_awaited(runs, f"{type(self._middleware).__name__}.execute")
        return value

    async def _with_payload(self, payload: Any, handler: Handler, job: Job, deadline: Deadline | None) -> Any:
        changed = msgspec.structs.replace(job, payload=payload)
        try:
            return await self._inner(handler, changed, deadline)
        except BatchError as error:
            # The failed items are known by their indexes in the stored payload.
            are_lists = isinstance(job.payload, list) and isinstance(payload, list)
            if are_lists and len(payload) == len(job.payload):
                raise
            raise TaskError(
                f"{error}. All items are retried, because {type(self._middleware).__name__} changed the "
                "number of items."
            ) from error
