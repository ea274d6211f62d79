"""The chain of middleware around adding jobs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import Job, JobSpec
from graphile_worker.middleware.base import check_proceed_awaited, close_never_awaited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from graphile_worker.middleware.base import Middleware

    Add: TypeAlias = Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]


def chain_enqueue(middleware: Iterable[Middleware], add: Add) -> Add:
    """Return a function that adds jobs through all middleware, the first one outermost."""
    for one in reversed(list(middleware)):
        add = _EnqueueStep(one, add)
    return add


def suspended_middleware(coroutine: Any) -> str | None:
    """Return the name of the middleware in which a suspended coroutine waits; None if it waits elsewhere."""
    name = None
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        step = frame.f_locals.get("self")
        if isinstance(step, _EnqueueStep):
            name = f"{type(step.middleware).__name__}.enqueue"
        coroutine = coroutine.cr_await
    return name


class _EnqueueStep:
    """One middleware in the chain, and the rest of the chain."""

    def __init__(self, middleware: Middleware, inner: Add) -> None:
        self.middleware, self._inner = middleware, inner

    async def __call__(self, specs: Sequence[JobSpec]) -> Sequence[Job]:
        calls: list[Coroutine[Any, Any, Sequence[Job]]] = []
        added: list[Job] = []

        async def add(changed: Iterable[JobSpec]) -> Sequence[Job]:
            jobs = await self._inner(self._checked("proceed() takes", changed, JobSpec)) if changed else []
            added.extend(jobs)
            return jobs

        def proceed(changed: Iterable[JobSpec] = specs, /) -> Coroutine[Any, Any, Sequence[Job]]:
            calls.append(add(changed))
            return calls[-1]

        try:
            answer = self.middleware.enqueue(specs, proceed)
            if inspect.isawaitable(answer):
                answer = await answer
        except BaseException:
            close_never_awaited(calls)
            raise
        check_proceed_awaited(calls, f"{type(self.middleware).__name__}.enqueue")
        # A middleware that returns None returns the jobs that it added.
        return added if answer is None else self._checked("it must return", answer, Job)

    def _checked(self, what: str, given: Any, kind: type[Any]) -> list[Any]:
        found = list(given) if isinstance(given, Iterable) and not isinstance(given, JobSpec) else [None]
        if not all(isinstance(one, kind) for one in found):
            name = f"{type(self.middleware).__name__}.enqueue"
            error = ConfigurationError if kind is Job else InvalidJobError
            raise error(f"{name}: {what} a list of {kind.__name__}, not {given!r}.")
        return found
