"""`@task`: what makes a function, or a class, a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from graphile_worker.errors import ConfigurationError
from graphile_worker.task_options import TaskOptions, unknown_option
from graphile_worker.tasks import HandlerClass, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.context import JobContext

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
H = TypeVar("H", bound=HandlerClass)


class _Unannotated:
    """Only a parameter without a type takes one of these."""


class TaskDecorator:
    """Makes a function, or a class, a task: ``@app.task``, and ``@task`` for one that an app includes later.

    Bare, or with a name and options. With options but without a function it is a decorator again, so that
    several tasks can share them: ``mail = app.task(queue_name="mail")``.

    Args:
        identifier: The task's name, up to 128 characters; by default the function's.
        queue_name: Its jobs run one after another, in that queue.
        priority: Lower runs first.
        max_attempts: How often to try.
        job_key: A template such as ``"welcome:{user_id}"``, or a function of the arguments; see
            docs/job-keys.md.
        job_key_mode: What adding a job with that key again does.
        flags: Labels of its jobs.
        retry: When to try again: a policy of `graphile_worker.retry`, a timedelta, a list of delays, a
            mapping of exceptions to any of these, or a function of a `Failure`.
        timeout: How long a job may run: seconds, a timedelta, or a function of the job that returns one. An
            ``async def`` is cancelled then; a thread is told, by ``ctx.stopping``, and abandoned.
        executor: ``"process"`` for a function that computes for long: it runs in a process of its own, and is
            killed when its time is over. See docs/tasks.md.
        batch: Whether the function takes a list, of which each item succeeds or fails by itself.
        on_invalid_payload: Whether a payload that does not fit fails this attempt (``"retry"``, for a newer
            deploy may understand it) or the job (``"fail"``).

    Example:
        >>> from graphile_worker import JobContext, task
        >>> @task
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> @task("mail/send", queue_name="mail", job_key="mail:{to}")
        ... def send(ctx: JobContext, to: str, copies: int = 1) -> None:
        ...     ctx.logger.info("%s to %s", copies, to)
        >>> send.spec("ann@example.com").job_key
        'mail:ann@example.com'
    """

    def __init__(
        self,
        declared: Callable[[Task[Any, Any, Any]], None] = lambda _task: None,
        identifier: str | None = None,
        options: TaskOptions | None = None,
    ) -> None:
        self._declared = declared
        self._identifier = identifier
        self._options: TaskOptions = options or {}

    @overload
    def __call__(self, handler: type[H], /) -> type[H]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[Concatenate[_Unannotated, P], R], /) -> Task[..., ..., R]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[JobContext[S], P], R], /
    ) -> Task[Concatenate[JobContext[S], P], P, R]: ...

    @overload
    def __call__(self, function: Callable[[T, JobContext[S]], R], /) -> Task[[T, JobContext[S]], [T], R]: ...

    @overload
    def __call__(
        self, function: Callable[[T, T2, JobContext[S]], R], /
    ) -> Task[[T, T2, JobContext[S]], [T, T2], R]: ...

    @overload
    def __call__(
        self, function: Callable[[T, T2, T3, JobContext[S]], R], /
    ) -> Task[[T, T2, T3, JobContext[S]], [T, T2, T3], R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, P, R]: ...

    @overload
    def __call__(self, identifier: str | None = None, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...

    def __call__(self, what: Any = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Declare a task, or say more about tasks to be declared."""
        for name in options.keys() - TaskOptions.__annotations__.keys():
            hint = unknown_option(name, TaskOptions.__annotations__)
            if name in {"name", "identifier"}:
                hint = 'Its name comes first, without a keyword: task("mail/send").'
            raise ConfigurationError(f"A task takes no {name!r}. {hint}")
        known: TaskOptions = {**self._options, **options}
        if what is None or isinstance(what, str):
            return TaskDecorator(self._declared, what if what is not None else self._identifier, known)
        if isinstance(what, Task):
            raise ConfigurationError(f"{what!r} is a task already. Have an app include it.")
        new: Task[Any, Any, Any] = Task(what, self._identifier, known)
        self._declared(new)
        if new.handler_class is None:
            return new
        new.handler_class.__graphile_worker_task__ = new
        return new.handler_class


task = TaskDecorator()
