"""`@task`, which makes a function, or a class, a task; and `@app.cron`, which says when it is due."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.cron.item import remember_place
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.task_options import JobOptions, TaskOptions, unknown_option
from graphile_worker.tasks import HandlerClass, Task, task_of
from graphile_worker.wording import relative_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime
    from zoneinfo import ZoneInfo

    from graphile_worker.context import JobContext
    from graphile_worker.cron.item import Overlap
    from graphile_worker.durations import Duration

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


class CronDecorator:
    """Says when jobs of a task are to be added, by workers of the app: ``@app.cron``, above ``@app.task``.

    Its jobs have what the task says of its jobs. May be used more than once, with different identifiers.

    Args:
        match: A pattern such as ``"0 8 * * *"``, or a function: see `CronItem`.
        payload: What the task gets; it is checked here and now.
        identifier: What the schedule is known by in the database; by default the task's.
        fill: How far to look back for minutes without a worker: ``"2h"``, a timedelta, or seconds.
        tz: The time zone of the pattern; by default UTC.
        overlap: ``"skip"`` to add no job while the one before is waiting or running.
        options: queue_name, max_attempts, job_key, job_key_mode, priority, flags, timeout: as for any job.

    Example:
        >>> from graphile_worker import App
        >>> app = App()
        >>> @app.cron("0 8 * * MON-FRI", payload={"copies": 2}, tz="Europe/Paris", fill="2h")
        ... @app.task
        ... async def report(copies: int = 1) -> None: ...
        >>> app.cron.items[0].identifier
        'report'
    """

    def __init__(self) -> None:
        self.items: list[CronItem] = []

    def __call__(
        self,
        match: str | Callable[[datetime], object],
        /,
        *,
        payload: Any = None,
        identifier: str = "",
        fill: Duration | str | None = None,
        tz: str | ZoneInfo | None = None,
        overlap: Overlap = "allow",
        **options: Unpack[JobOptions],
    ) -> Callable[[T], T]:
        """Decorate a task."""
        _check_cron(match, options)
        caller = sys._getframe(1)  # noqa: SLF001 - where it stands, for a message that two are the same
        place = f"{relative_path(caller.f_code.co_filename)}, line {caller.f_lineno}"

        def decorate(thing: T) -> T:
            task = task_of(thing)
            if task is None:
                name = getattr(thing, "__qualname__", repr(thing))
                raise ConfigurationError(f"{name} is not a task. Put @app.cron(…) above @app.task.")
            try:
                spec = task.spec_for({} if payload is None else payload, options)
            except InvalidJobError as error:
                raise ConfigurationError(
                    f"The cron item {identifier or task.identifier!r}: {error}"
                ) from None
            item = CronItem(
                spec.identifier,
                match,
                identifier=identifier,
                payload=spec.payload,
                max_attempts=spec.max_attempts,
                queue_name=spec.queue_name,
                priority=spec.priority,
                job_key=None if overlap == "skip" and "job_key" not in options else spec.job_key,
                job_key_mode=spec.job_key_mode,
                flags=spec.flags,
                tz=tz,
                overlap=overlap,
                fill=fill,
            )
            remember_place(item, place)
            known = any(one.identifier == (identifier or task.identifier) for one in self.items)
            self.items += parse_cron_items([*self.items, item])[-1:] if known else parse_cron_items([item])
            return thing

        return decorate


def _check_cron(match: object, options: Mapping[str, Any]) -> None:
    """Refuse what `CronDecorator` was not made for."""
    if task_of(match) is not None:
        raise ConfigurationError('@app.cron needs a pattern: @app.cron("0 8 * * *"), above @app.task.')
    for name in options.keys() - JobOptions.__annotations__.keys():
        own = [*inspect.signature(CronDecorator.__call__).parameters][2:-1]
        hint = unknown_option(name, [*own, *JobOptions.__annotations__])
        raise ConfigurationError(f"A cron item takes no {name!r}. {hint}")
    if "run_at" in options:
        raise ConfigurationError("A cron item takes no 'run_at': its pattern says when.")
