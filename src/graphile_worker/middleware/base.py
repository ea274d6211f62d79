"""`Middleware`: the class to derive from."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from graphile_worker.errors import ConfigurationError, TaskError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Sequence

    from graphile_worker.context import JobContext
    from graphile_worker.job import Job, JobSpec


class Running(Protocol):
    """The rest of running a job: other middleware, then the task."""

    def __call__(self, payload: Any = ..., /) -> Awaitable[Any]:
        """Run it, with another payload if one is given; returns what the task returned."""


class Adding(Protocol):
    """The rest of adding jobs: other middleware, then the database."""

    def __call__(self, specs: Sequence[JobSpec] = ..., /) -> Awaitable[Sequence[Job]]:
        """Add them, or others in their place."""


class Middleware:
    """Stands around the running of jobs, the adding of jobs, or both: override what you need.

    The first of a list is the outermost. A method may be ``async def``, or a plain ``def`` that returns what
    `proceed` returned.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App, Middleware
        >>> class Tenants(Middleware):
        ...     async def enqueue(self, specs, proceed):
        ...         ours = [spec.replace(payload={**spec.payload, "tenant": 7}) for spec in specs]
        ...         return await proceed(ours)
        ...
        ...     async def execute(self, ctx, proceed):
        ...         print("tenant", ctx.job.payload["tenant"])
        ...         await proceed({"name": ctx.job.payload["name"]})
        >>> app = App(dsn=dsn, middleware=[Tenants()])
        >>> @app.task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> async def main():
        ...     await app.migrate()
        ...     await hello.enqueue(name="Ann")
        ...     await app.run_once()
        >>> asyncio.run(main())
        tenant 7
        Hello, Ann
    """

    def execute(self, ctx: JobContext[Any], proceed: Running) -> Any:  # noqa: ARG002
        """A job is to run. Called on the event loop, wherever its task runs.

        ``await proceed()`` runs the job, ``await proceed(payload)`` with another payload, and raises what the
        task raised. Without it the job is done, and its task was not called. To raise is to fail;
        `Retry`, `Fail`, `Snooze` and `Cancel` mean what they mean in a task.
        """
        return proceed()  # pragma: no cover - who does not override it is not asked

    def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:  # noqa: ARG002
        """Jobs are to be added: one, or many at once; by an application, by a task, or by a crontab.

        Returns the jobs: ``await proceed()`` adds them as they are, ``await proceed(specs)`` others in their
        place: fewer, or none, too.
        """
        return proceed()  # pragma: no cover - the same

    def room(self, task: str, in_hand: int) -> int | None:  # noqa: ARG002
        """How many more jobs of the task may be claimed now, if the worker has so many of it in hand.

        None for as many as there is room for in the worker. Asked before each claim, and so when a job has
        ended; whoever says 0 for another reason is asked again at the next poll.
        """
        return None  # pragma: no cover - the same


def overriding(middleware: Iterable[Middleware], method: str) -> list[Middleware]:
    """Those that do something there."""
    return [one for one in middleware if getattr(type(one), method) is not getattr(Middleware, method)]


def insist_on_their_end(begun: Sequence[Coroutine[Any, Any, Any]], name: str) -> None:
    """Refuse that a method of that name began one, and did not wait until it had ended."""
    if any(inspect.getcoroutinestate(one) != inspect.CORO_CLOSED for one in begun):
        close_unbegun(begun)
        raise TaskError(
            f"{name} called proceed() and did not wait for it: write await proceed(), or return proceed()."
        )


def close_unbegun(proceedings: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Close those that nobody awaited, or Python complains of them too."""
    for one in proceedings:
        if inspect.getcoroutinestate(one) == inspect.CORO_CREATED:
            one.close()


def check_middleware(given: object) -> tuple[Middleware, ...]:
    """What the user gave, as a tuple; refuses what is none."""
    if given is None:
        return ()
    if isinstance(given, Middleware) or not isinstance(given, Iterable):
        raise ConfigurationError(f"middleware= takes a list, such as [SlowJobs()], not {given!r}.")
    found = tuple(given)
    for one in found:
        if isinstance(one, type) and issubclass(one, Middleware):
            raise ConfigurationError(f"{one.__name__} is a class of middleware: pass {one.__name__}(…).")
        if not isinstance(one, Middleware):
            raise ConfigurationError(f"{one!r} is no middleware: derive a class from Middleware.")
        _check_methods(one)
    return found


def _check_methods(middleware: Middleware) -> None:
    """A slip would be noticed by nobody, or by each job."""
    name = type(middleware).__name__
    methods = {"execute": "ctx, proceed", "enqueue": "specs, proceed", "room": "task, in_hand"}
    if not any(overriding([middleware], method) for method in methods):
        raise ConfigurationError(f"{name} does nothing: it has neither execute, nor enqueue, nor room.")
    for method, parameters in methods.items():
        function = getattr(middleware, method)
        try:
            inspect.signature(function).bind(None, None)
        except TypeError:
            raise ConfigurationError(f"{name}.{method} must take (self, {parameters}).") from None
    if inspect.iscoroutinefunction(middleware.room):
        raise ConfigurationError(f"{name}.room is asked before each claim, and must be a plain def.")
