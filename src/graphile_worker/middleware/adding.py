"""Middleware around the adding of jobs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import Job, JobSpec
from graphile_worker.middleware.base import close_unbegun, insist_on_their_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from graphile_worker.middleware.base import Middleware

    Add: TypeAlias = Callable[[Sequence[JobSpec]], Awaitable[Sequence[Job]]]


def around_adding(middleware: Iterable[Middleware], add: Add) -> Add:
    """All of them around that, the first outside."""
    for one in reversed(list(middleware)):
        add = _Around(one, add)
    return add


class _Around:
    """One middleware, and what is inside of it."""

    def __init__(self, middleware: Middleware, inner: Add) -> None:
        self._middleware, self._inner = middleware, inner

    async def __call__(self, specs: Sequence[JobSpec]) -> Sequence[Job]:
        begun: list[Coroutine[Any, Any, Sequence[Job]]] = []
        added: list[Job] = []

        async def add(changed: Iterable[JobSpec]) -> Sequence[Job]:
            jobs = await self._inner(self._checked("proceed(…) takes", changed, JobSpec)) if changed else []
            added.extend(jobs)
            return jobs

        def proceed(changed: Iterable[JobSpec] = specs, /) -> Coroutine[Any, Any, Sequence[Job]]:
            begun.append(add(changed))
            return begun[-1]

        try:
            answer = self._middleware.enqueue(specs, proceed)
            if inspect.isawaitable(answer):
                answer = await answer
        except BaseException:
            close_unbegun(begun)
            raise
        insist_on_their_end(begun, f"{type(self._middleware).__name__}.enqueue")
        # Whoever returns nothing means those that were added.
        return added if answer is None else self._checked("it must return", answer, Job)

    def _checked(self, what: str, given: Any, kind: type[Any]) -> list[Any]:
        found = list(given) if isinstance(given, Iterable) and not isinstance(given, JobSpec) else [None]
        if not all(isinstance(one, kind) for one in found):
            name = f"{type(self._middleware).__name__}.enqueue"
            error = ConfigurationError if kind is Job else InvalidJobError
            raise error(f"{name}: {what} a list of {kind.__name__}, not {given!r}.")
        return found
