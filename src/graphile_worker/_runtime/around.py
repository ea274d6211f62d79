"""Middleware around the running of a job."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.context import JobContext
from graphile_worker.errors import BatchError, TaskError
from graphile_worker.middleware.base import close_unbegun, insist_on_their_end

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from datetime import datetime

    from graphile_worker._runtime.deadline import Deadline
    from graphile_worker._runtime.handlers import Handler
    from graphile_worker.context import Stopping, Surroundings
    from graphile_worker.durations import Duration
    from graphile_worker.job import Job
    from graphile_worker.middleware import Middleware

    Perform: TypeAlias = Callable[[Handler, Job, Deadline | None], Coroutine[Any, Any, Any]]

_AS_IT_IS: Any = object()


def around(middleware: Iterable[Middleware], perform: Perform, surroundings: Surroundings) -> Perform:
    """All of them around the innermost, the first outside."""
    for one in reversed(list(middleware)):
        perform = _Around(one, perform, surroundings)
    return perform


class _LimitOfRuns:
    """The time that a job has, as middleware sees it, which may let it run more than once."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._given: Duration | None = None

    @property
    def stopping(self) -> Stopping:
        """What the run is warned by."""
        return self._deadline.stopping

    @property
    def at(self) -> datetime:
        """Until when it may run."""
        return self._deadline.at

    def extend(self, duration: Duration) -> None:
        """So long from now; for the next run, if this one's time is over."""
        self._given = duration if self._deadline.expired else None
        self._deadline.extend(duration)

    def anew(self, stopping: Stopping) -> Deadline:
        """For another run."""
        self._deadline = self._deadline.anew(stopping)
        if self._given is not None:
            self._deadline.extend(self._given)
        self._given = None
        return self._deadline


class _Around:
    """One middleware, and what is inside of it."""

    def __init__(self, middleware: Middleware, inner: Perform, surroundings: Surroundings) -> None:
        self._middleware, self._inner, self._surroundings = middleware, inner, surroundings

    async def __call__(self, handler: Handler, job: Job, deadline: Deadline | None) -> Any:
        begun: list[Coroutine[Any, Any, Any]] = []
        limit = None if deadline is None else _LimitOfRuns(deadline)
        ctx: JobContext[Any] = JobContext(job, self._surroundings, limit)

        def proceed(payload: Any = _AS_IT_IS, /) -> Coroutine[Any, Any, Any]:
            nonlocal deadline
            if begun and limit is not None:
                # Or a task that is tried again after a timeout has no time, and is told to stop at once.
                deadline = limit.anew(self._surroundings.told_anew(job, limit.stopping))
                ctx._told, ctx._stopping = deadline.stopping, None  # noqa: SLF001 - now it is that run's
            if payload is _AS_IT_IS:
                begun.append(self._inner(handler, job, deadline))
            else:
                begun.append(self._with_payload(payload, handler, job, deadline))
            return begun[-1]

        try:
            value = self._middleware.execute(ctx, proceed)
            if inspect.isawaitable(value):
                value = await value
        except BaseException:
            close_unbegun(begun)
            raise
        insist_on_their_end(begun, f"{type(self._middleware).__name__}.execute")
        return value

    async def _with_payload(self, payload: Any, handler: Handler, job: Job, deadline: Deadline | None) -> Any:
        changed = msgspec.structs.replace(job, payload=payload)
        try:
            return await self._inner(handler, changed, deadline)
        except BatchError as error:
            # Which items are left is said by their places, in the payload that is stored.
            both = isinstance(job.payload, list) and isinstance(payload, list)
            if both and len(payload) == len(job.payload):
                raise
            raise TaskError(
                f"{error}. All items are tried again, for {type(self._middleware).__name__} gave the batch "
                "another number of them."
            ) from error
