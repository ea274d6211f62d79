"""The decorators `@task`, which declares a task, and `@app.cron`, which schedules its jobs."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from graphile_worker._base.text import relative_path
from graphile_worker._tasks.options import JobOptions, TaskOptions, option_hint
from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.cron.item import set_location
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.tasks import HandlerClass, Task, task_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from datetime import datetime
    from zoneinfo import ZoneInfo

    from graphile_worker._base.durations import Duration
    from graphile_worker.context import JobContext
    from graphile_worker.cron.item import Overlap

P = ParamSpec("P")
V = TypeVar("V")
S = TypeVar("S")
T = TypeVar("T")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
H = TypeVar("H", bound=HandlerClass)


class _Unannotated:
    """A type that only an unannotated parameter accepts, for the overloads below."""


class TaskDecorator:
    """Decorator that declares a function or a class as a task.

    Use ``@app.task`` to declare a task of an app, and ``@task`` for a task that an app includes later. Both
    work with and without arguments. With options only, the result is a decorator that several tasks can
    share: ``mail = app.task(queue_name="mail")``.

    Args:
        identifier: The task's name, up to 128 characters. Default: the function's name.
        queue_name: The serial queue of its jobs. Jobs in one queue run one after another. It may be a
            template such as ``"customer:{customer}"``, or a function of the arguments.
        priority: The priority of its jobs. Lower numbers run first. It may be a function of the arguments.
        run_at: A function of the arguments that returns the earliest start of a job, or None.
        max_attempts: The maximum number of attempts.
        job_key: A template such as ``"welcome:{user_id}"``, or a function of the arguments; see
            docs/guides/job-keys.md.
        job_key_mode: The effect of adding a second job with the same key.
        debounce: Run a job only after no job with the same `key` was added for this long: seconds, a
            timedelta, or a text such as ``"30s"``.
        throttle: Run at most one job with the same `key` in this interval, given like `debounce`.
        unique: Whether at most one job with the same `key` waits.
        key: The job key for `debounce`, `throttle` or `unique`: a template or a function, like `job_key`.
        flags: Labels of its jobs, or a function of the arguments that returns them.
        retry: When to retry: a policy from `graphile_worker.retry`, a timedelta, a list of delays, a
            mapping from exceptions to any of these, or a function of a `Failure`.
        timeout: How long a job may run: seconds, a timedelta, or a function of the job that returns either.
            After that, an ``async def`` is cancelled. A thread is notified through ``ctx.stop_requested``
            and abandoned.
        executor: ``"process"`` runs a CPU-bound function in a separate process, which is killed after the
            timeout. See docs/guides/tasks.md.
        batch: Whether the function takes a list whose items succeed or fail individually.
        on_invalid_payload: Whether a payload of the wrong type fails the attempt (``"retry"``, because a
            newer deployment may understand it) or the job (``"fail"``).
        history: Which attempts are kept in the history: ``"none"``, ``"failures"`` or ``"all"``. Default: as
            the app's. See docs/guides/history.md.
        keep_result: Whether the history keeps what the function returns. It implies ``history="all"``.
        limit: A `Limit` on how many jobs run at once, across all Python workers; several tasks can share it.
            See docs/guides/limits.md.
        worker_limit: How many jobs of the task run at once in each worker.

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
        on_declare: Callable[[Task[Any, Any, Any]], None] = lambda _task: None,
        identifier: str | None = None,
        options: TaskOptions | None = None,
    ) -> None:
        self._on_declare = on_declare
        self._identifier = identifier
        self._options: TaskOptions = options or {}

    @overload
    def __call__(self, handler: type[H], /) -> type[H]: ...  # type: ignore[overload-overlap]

    # A coroutine function before any other function: the type of its result is inside the coroutine.

    @overload
    def __call__(
        self, function: Callable[Concatenate[_Unannotated, P], Coroutine[Any, Any, V]], /
    ) -> Task[..., ..., Coroutine[Any, Any, V], V]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[_Unannotated, P], V], /
    ) -> Task[..., ..., V, V]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[JobContext[S], P], Coroutine[Any, Any, V]], /
    ) -> Task[Concatenate[JobContext[S], P], P, Coroutine[Any, Any, V], V]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[JobContext[S], P], V], /
    ) -> Task[Concatenate[JobContext[S], P], P, V, V]: ...

    @overload
    def __call__(
        self, function: Callable[[T, JobContext[S]], Coroutine[Any, Any, V]], /
    ) -> Task[[T, JobContext[S]], [T], Coroutine[Any, Any, V], V]: ...

    @overload
    def __call__(
        self, function: Callable[[T, JobContext[S]], V], /
    ) -> Task[[T, JobContext[S]], [T], V, V]: ...

    @overload
    def __call__(
        self, function: Callable[[T, T2, JobContext[S]], Coroutine[Any, Any, V]], /
    ) -> Task[[T, T2, JobContext[S]], [T, T2], Coroutine[Any, Any, V], V]: ...

    @overload
    def __call__(
        self, function: Callable[[T, T2, JobContext[S]], V], /
    ) -> Task[[T, T2, JobContext[S]], [T, T2], V, V]: ...

    @overload
    def __call__(
        self, function: Callable[[T, T2, T3, JobContext[S]], Coroutine[Any, Any, V]], /
    ) -> Task[[T, T2, T3, JobContext[S]], [T, T2, T3], Coroutine[Any, Any, V], V]: ...

    @overload
    def __call__(
        self, function: Callable[[T, T2, T3, JobContext[S]], V], /
    ) -> Task[[T, T2, T3, JobContext[S]], [T, T2, T3], V, V]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, V]], /
    ) -> Task[P, P, Coroutine[Any, Any, V], V]: ...

    @overload
    def __call__(self, function: Callable[P, V], /) -> Task[P, P, V, V]: ...

    @overload
    def __call__(self, identifier: str | None = None, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...

    def __call__(self, what: Any = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Declare a task, or return a decorator with these options."""
        for name in options.keys() - TaskOptions.__annotations__.keys():
            hint = option_hint(name, TaskOptions.__annotations__)
            if name in {"name", "identifier"}:
                hint = 'Pass the name first, without a keyword: task("mail/send").'
            raise ConfigurationError(f"A task has no option {name!r}. {hint}")
        merged: TaskOptions = {**self._options, **options}
        if what is None or isinstance(what, str):
            return TaskDecorator(self._on_declare, what if what is not None else self._identifier, merged)
        if isinstance(what, Task):
            raise ConfigurationError(f"{what!r} is already a task. Pass it to app.include instead.")
        new: Task[Any, Any, Any] = Task(what, self._identifier, merged)
        self._on_declare(new)
        if new.handler_class is None:
            return new
        new.handler_class.__graphile_worker_task__ = new
        return new.handler_class


task = TaskDecorator()


class CronDecorator:
    """Decorator that schedules jobs of a task: ``@app.cron``, above ``@app.task``.

    The app's workers add the jobs, with the options that the task declares. A task can have several
    schedules with different identifiers.

    Args:
        match: A pattern such as ``"0 8 * * *"``, or a function: see `CronItem`.
        payload: The payload of the jobs. It is validated at once.
        identifier: The name of the schedule in the database. Default: the task's identifier.
        backfill: How far back to add jobs for minutes in which no worker ran: ``"2h"``, a timedelta, or
            seconds.
        tz: The time zone of the pattern. Default: UTC.
        overlap: ``"skip"`` adds no job while the previous one is waiting or running.
        options: queue_name, max_attempts, job_key, job_key_mode, priority, flags, timeout: as for any job.

    Example:
        >>> from graphile_worker import App
        >>> app = App()
        >>> @app.cron("0 8 * * MON-FRI", payload={"copies": 2}, tz="Europe/Paris", backfill="2h")
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
        backfill: Duration | str = 0,
        tz: str | ZoneInfo | None = None,
        overlap: Overlap = "allow",
        **options: Unpack[JobOptions],
    ) -> Callable[[T], T]:
        """Decorate a task."""
        _check_cron(match, options)
        caller = sys._getframe(1)  # noqa: SLF001 - an error about duplicate schedules names file and line
        location = f"{relative_path(caller.f_code.co_filename)}, line {caller.f_lineno}"

        def decorate(thing: T) -> T:
            task = task_of(thing)
            if task is None:
                name = getattr(thing, "__qualname__", repr(thing))
                raise ConfigurationError(f"{name} is not a task. Put @app.cron(…) above @app.task.")
            try:
                spec = task.spec_for({} if payload is None else payload, options)
            except InvalidJobError as error:
                raise ConfigurationError(
                    f"Invalid cron item {identifier or task.identifier!r}: {error}"
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
                backfill=backfill,
            )
            set_location(item, location)
            known = any(one.identifier == (identifier or task.identifier) for one in self.items)
            self.items += parse_cron_items([*self.items, item])[-1:] if known else parse_cron_items([item])
            return thing

        return decorate


def _check_cron(match: object, options: Mapping[str, Any]) -> None:
    """Reject a missing pattern and unknown options."""
    if task_of(match) is not None:
        raise ConfigurationError('@app.cron needs a pattern: @app.cron("0 8 * * *"), above @app.task.')
    for name in options.keys() - JobOptions.__annotations__.keys():
        own = [*inspect.signature(CronDecorator.__call__).parameters][2:-1]
        hint = option_hint(name, [*own, *JobOptions.__annotations__])
        raise ConfigurationError(f"A cron item has no option {name!r}. {hint}")
    for name in options.keys() & {"run_at", "delay"}:
        raise ConfigurationError(f"A cron item has no option {name!r}: its pattern sets the times.")
