"""`Middleware`: the base class of all middleware."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from graphile_worker.errors import ConfigurationError, TaskError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from graphile_worker.context import JobContext
    from graphile_worker.job import Job, JobSpec
    from graphile_worker.middleware.attached import AttachedWorker


class Running(Protocol):
    """The rest of running a job: other middleware, then the task."""

    def __call__(self, payload: Any = ..., /) -> Awaitable[Any]:
        """Run the job, with another payload if one is given, and return the task's return value."""


class Adding(Protocol):
    """The rest of adding jobs: other middleware, then the database."""

    def __call__(self, specs: Sequence[JobSpec] = ..., /) -> Awaitable[Sequence[Job]]:
        """Add the jobs, or the given ones instead, and return the added jobs."""


class Middleware:
    """Base class for code that runs around jobs, around adding jobs, or before claims.

    Override one or more of `execute`, `call`, `enqueue`, `claim_limit` and `attach`. The first middleware of
    a list is the outermost. `execute` and `enqueue` may be ``async def``, or a plain ``def`` that returns the
    value of `proceed`.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App, Middleware
        >>> class Tenants(Middleware):
        ...     async def enqueue(self, specs, proceed):
        ...         tagged = [spec.replace(payload={**spec.payload, "tenant": 7}) for spec in specs]
        ...         return await proceed(tagged)
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
        """Run a job. Called on the event loop, even if the task runs on a thread or in a process.

        ``await proceed()`` runs the job, and ``await proceed(payload)`` runs it with another payload. Both
        raise the task's exception. Without a call of `proceed` the job succeeds, and its task is not called.
        An exception fails the job. `Retry`, `Fail`, `Snooze` and `Cancel` have the same meaning as in a task.

        Args:
            ctx: The job's context, as the task receives it.
            proceed: Calls the next middleware or the task.
        """
        return proceed()  # pragma: no cover - only called if overridden

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a task's function that is a plain ``def``, where it runs: on its thread, or in its process.

        Override it for what belongs to that place, such as connections that are kept for each thread. It runs
        inside `execute`. A task with ``executor="process"`` uses the middleware of the app that its module
        creates.

        Args:
            function: Calls the next middleware or the function. It takes no arguments.

        Returns:
            The value that the function returned.
        """
        return function()  # pragma: no cover - only called if overridden

    def enqueue(self, specs: Sequence[JobSpec], proceed: Adding) -> Any:  # noqa: ARG002
        """Add jobs: one or many at once, from an application, a task or a crontab.

        ``await proceed()`` adds the jobs as they are. ``await proceed(specs)`` adds other jobs instead, which
        may be fewer or none.

        Args:
            specs: The jobs to add.
            proceed: Calls the next middleware or adds the jobs to the database.

        Returns:
            The added jobs. None means the jobs that `proceed` added.
        """
        return proceed()  # pragma: no cover - only called if overridden

    def claim_limit(self, task: str, claimed: int) -> int | None:  # noqa: ARG002
        """Return how many more jobs of a task the worker may claim; None for no limit.

        The worker calls it before each claim, so it must be a plain ``def`` and fast. It is called again when
        a job has ended, when jobs are added, and at the latest at the next poll.

        Args:
            task: Identifier of the task.
            claimed: Number of jobs of the task that the worker has claimed and not finished.
        """
        return None  # pragma: no cover - only called if overridden

    def attach(self, worker: AttachedWorker) -> None:
        """Observe a worker: listen to its events, read its health, or serve a page on its health port.

        Called once for each worker that has this middleware, before the worker starts.

        Args:
            worker: The worker.
        """


def overriding(middleware: Iterable[Middleware], method: str) -> list[Middleware]:
    """Return the middleware that override the method."""
    return [one for one in middleware if getattr(type(one), method) is not getattr(Middleware, method)]


def check_proceed_awaited(calls: Sequence[Coroutine[Any, Any, Any]], name: str) -> None:
    """Check that a middleware method awaited all its calls of `proceed`.

    Args:
        calls: The coroutines that `proceed` returned.
        name: Name of the middleware method, for the message.

    Raises:
        TaskError: A call was not awaited, or has not ended.
    """
    if any(inspect.getcoroutinestate(call) != inspect.CORO_CLOSED for call in calls):
        close_never_awaited(calls)
        raise TaskError(
            f"{name} called proceed() and did not wait for it. Write await proceed(), or return proceed()."
        )


def close_never_awaited(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Close the coroutines that were never awaited. Otherwise Python warns about them."""
    for call in calls:
        if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
            call.close()


def check_middleware(given: object) -> tuple[Middleware, ...]:
    """Return the middleware that a user passed, as a tuple.

    Raises:
        ConfigurationError: The value is not a list of `Middleware`, or one of them has an invalid method.
    """
    if given is None:
        return ()
    if isinstance(given, Middleware) or not isinstance(given, Iterable):
        raise ConfigurationError(f"middleware is {given!r}; it must be a list, such as [SlowJobs()].")
    found = tuple(given)
    for one in found:
        if isinstance(one, type) and issubclass(one, Middleware):
            raise ConfigurationError(
                f"{one.__name__} is a middleware class, not an instance. Pass {one.__name__}(…)."
            )
        if not isinstance(one, Middleware):
            raise ConfigurationError(
                f"{one!r} is not a middleware. Derive its class from graphile_worker.Middleware."
            )
        _check_methods(one)
    return found


def _check_methods(middleware: Middleware) -> None:
    """Check the methods now: a misspelled one would never be called, and a wrong one would fail each job."""
    name = type(middleware).__name__
    methods = {
        "execute": "ctx, proceed",
        "call": "function",
        "enqueue": "specs, proceed",
        "claim_limit": "task, claimed",
    }
    if not any(overriding([middleware], method) for method in (*methods, "attach")):
        raise ConfigurationError(
            f"{name} has no effect, because it overrides none of execute, call, enqueue, claim_limit and "
            "attach."
        )
    for method, parameters in methods.items():
        function = getattr(middleware, method)
        try:
            inspect.signature(function).bind(*parameters.split(", "))
        except TypeError:
            raise ConfigurationError(f"{name}.{method} must take (self, {parameters}).") from None
    if inspect.iscoroutinefunction(middleware.claim_limit):
        raise ConfigurationError(
            f"{name}.claim_limit is async; it must be a plain def, because it is called before each claim."
        )
    if inspect.iscoroutinefunction(middleware.call):
        raise ConfigurationError(
            f"{name}.call is async; it must be a plain def, because it runs on the thread of the task. Use "
            "execute for what runs on the event loop."
        )


def around_call(layers: Sequence[Middleware], function: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap the call of a function in the `call` methods of middleware. The first one is the outermost."""
    for layer in reversed(layers):
        function = partial(layer.call, function)
    return function
