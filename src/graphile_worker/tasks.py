"""`Task`: a function, or a class, that jobs can be made for."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
)

import msgspec

from graphile_worker.binding import Binding, read_class, read_function
from graphile_worker.conversion import MisfitError
from graphile_worker.cron.line import TASK as IN_A_CRONTAB
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import Job, JobSpec
from graphile_worker.job_keys import read_job_key
from graphile_worker.logs import library_logger as logger
from graphile_worker.payload import RESERVED_KEYS, without_reserved
from graphile_worker.retry import read_policy
from graphile_worker.task_options import (
    JobOptions,
    TaskOptions,
    check_job_options,
    check_many,
    read_executor,
    read_timeout,
    refuse_queue_braces,
    refuse_queue_template,
    with_timeout,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from graphile_worker._db.connect import Connection

P = ParamSpec("P")
"""What the function takes."""
Q = ParamSpec("Q")
"""The same without a context: what a job is added with."""
R = TypeVar("R")
T = TypeVar("T")


class Queue(Protocol):
    """Where the jobs of a task go."""

    async def add_spec(self, spec: JobSpec, *, connection: Connection | None = None) -> Job:
        """Add a job."""

    async def add_jobs(
        self, jobs: Iterable[JobSpec], /, *, connection: Connection | None = None
    ) -> list[Job]:
        """Add many jobs."""

    def blocking(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for it in a thread that has no event loop."""


class HandlerClass(Protocol):
    """A class whose instances are payloads: a dataclass, a Struct of msgspec's, a model of pydantic's."""

    identifier: ClassVar[str]

    @property
    def run(self) -> Callable[..., Any]:
        """Called with a context, or with nothing."""


_ELSEWHERE = {
    **dict.fromkeys(("delay", "send", "defer", "defer_async", "enqueue_async", "kiq"), "enqueue(...)"),
    **dict.fromkeys(
        ("apply_async", "send_with_options", "enqueue_in", "enqueue_at", "schedule"),
        "using(run_at=..., priority=...).enqueue(...)",
    ),
    **dict.fromkeys(("s", "si", "signature", "message"), "spec(...)"),
}
"""What other job queues call it, and how it is written here."""


class Enqueuer(Generic[Q]):
    """Adds jobs of one task: `Task` itself, or what its `using` returns."""

    _task: Task[Any, Q, Any]
    _options: JobOptions
    _connection: Connection | None

    if not TYPE_CHECKING:  # a type checker would take any attribute for possible

        def __getattr__(self, name: str) -> object:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ELSEWHERE:
                task = vars(self).get("_task")
                message = _hint_at(name, getattr(task, "__name__", None) or "task")
            raise AttributeError(message, name=name, obj=self)

    def using(self, *, connection: Connection | None = None, **options: Unpack[JobOptions]) -> Enqueuer[Q]:
        """The same task, with other options than it has by itself.

        Args:
            connection: A connection of the caller's: the job is added in its transaction.
            options: queue_name, run_at, max_attempts, job_key, job_key_mode, priority, flags: those of
                `WorkerUtils.add_job`; and `timeout`, in place of the task's.
        """
        check_job_options("using", options)
        refuse_queue_braces(options.get("queue_name"))
        new: Enqueuer[Q] = Enqueuer()
        new._task = self._task
        new._options = {**self._options, **options}
        new._connection = self._connection if connection is None else connection
        return new

    def spec(self, /, *args: Q.args, **kwargs: Q.kwargs) -> JobSpec:
        """The job for a call with these arguments, not added yet: for `App.add_jobs`.

        Raises:
            InvalidJobError: The function cannot be called like that, or an argument is not of its type.
        """
        return self._task.make_spec(args, kwargs, self._options)

    async def enqueue(self, /, *args: Q.args, **kwargs: Q.kwargs) -> Job:
        """Add a job that calls the function with these arguments, later and in a worker.

        Raises:
            InvalidJobError: The function cannot be called like that, or an argument is not of its type.
                Nothing was added.
            ConfigurationError: The task belongs to no app.
        """
        spec = self.spec(*args, **kwargs)
        return await self._task.queue.add_spec(spec, connection=self._connection)

    def enqueue_sync(self, /, *args: Q.args, **kwargs: Q.kwargs) -> Job:
        """The same for code without an event loop, in any thread: waits until the job is added."""
        spec = self.spec(*args, **kwargs)
        self._refuse_connection("enqueue_sync")
        return self._task.queue.blocking(self._task.queue.add_spec(spec))

    async def enqueue_many(self, payloads: Iterable[Any]) -> list[Job]:
        """Add a job for each payload, in few round trips: all of them or, if one cannot be added, none.

        Args:
            payloads: For a function that takes ``payload`` (or a list, in batches) what it takes; for others
                mappings of the names of their parameters to values. May be an iterator of any length.
        """
        specs = self._specs(payloads)
        if isinstance(payloads, list | tuple):
            specs = list(specs)  # which can be sent again if the server asks for that
        return await self._task.queue.add_jobs(specs, connection=self._connection)

    def enqueue_many_sync(self, payloads: Iterable[Any]) -> list[Job]:
        """The same for code without an event loop."""
        self._refuse_connection("enqueue_many_sync")
        return self._task.queue.blocking(self._task.queue.add_jobs(list(self._specs(payloads))))

    def _specs(self, payloads: Iterable[Any]) -> Iterable[JobSpec]:
        check_many("enqueue_many", "payloads", payloads)
        return self._spec_after_spec(payloads)

    def _spec_after_spec(self, payloads: Iterable[Any]) -> Iterable[JobSpec]:
        for number, payload in enumerate(payloads):
            try:
                yield self._task.spec_for(payload, self._options)
            except InvalidJobError as error:
                raise InvalidJobError(
                    f"Payload number {number}: {error}", argument=error.argument, code=error.code
                ) from error

    def _refuse_connection(self, method: str) -> None:
        if self._connection is not None:
            raise ConfigurationError(
                f"{method} cannot use that connection: one of asyncpg's belongs to an event loop. Call "
                f"{method.removesuffix('_sync')} there, with await."
            )


class Task(Enqueuer[Q], Generic[P, Q, R]):
    """A function that jobs can be made for. It can be called as before: then it just runs.

    Attributes:
        identifier: Under which name jobs ask for it.
        function: The function.
        options: What its jobs have unless they say otherwise.
        retry: When it is tried again after a failure; None: as Graphile Worker has it.
        timeout: How long a job may run, in seconds, or a function of the job.
        executor: ``"process"`` if it runs in a process of its own.
        batch: Whether it takes a list, of which each item succeeds or fails by itself.
        on_invalid_payload: What becomes of a job whose payload does not fit; None: what the app says.

    Example:
        >>> import asyncio
        >>> from graphile_worker import App
        >>> app = App(dsn=dsn)
        >>> @app.task(queue_name="greetings")
        ... async def hello(name: str) -> None:
        ...     print(f"Hello, {name}")
        >>> asyncio.run(hello(name="Ann"))
        Hello, Ann
        >>> async def main():
        ...     await app.migrate()
        ...     await hello.using(priority=-1).enqueue(name="Bobby Tables")
        ...     return await app.run_once()
        >>> asyncio.run(main())
        Hello, Bobby Tables
        Drained(done=1, failed=0)
    """

    __name__: str
    __qualname__: str
    queue_of_process: ClassVar[Queue | None] = None
    """Where jobs of a task without an app go, in a process that runs tasks for a worker."""

    def __init__(self, function: Callable[P, R], identifier: str | None, options: TaskOptions) -> None:
        functools.update_wrapper(self, function, updated=())
        if inspect.iscoroutinefunction(function):
            _mark_as_async(self)
        self.named = identifier is not None or isinstance(function, type)
        """Whether it was given a name; otherwise it has the function's, or in a folder the file's."""
        self.identifier = identifier if identifier is not None else _name_of(function)
        """Empty if it has none: then only a file can give it one."""
        self.function: Callable[P, R] = function
        self.handler_class: type[Any] | None = function if isinstance(function, type) else None
        self.retry = read_policy(options.get("retry"))
        self.timeout = read_timeout(options.get("timeout"))
        self.executor = read_executor(options.get("executor"), self)
        self.batch = _read_batch(options.get("batch"))
        self.on_invalid_payload = options.get("on_invalid_payload")
        given: Any = {name: options.get(name) for name in JobOptions.__annotations__ if name != "timeout"}
        chosen: Any = {name: value for name, value in given.items() if value is not None}
        self.options: JobOptions = chosen
        refuse_queue_template(self.identifier, chosen.get("queue_name"))
        _check_identifier(self)
        self.binding: Binding = self._read()
        self._job_key = read_job_key(self.options.pop("job_key", None), self.binding, self.identifier)
        self._task, self._options, self._connection = self, {}, None
        self._queue: Queue | None = None
        self.owner: Queue | None = None
        """The app that it was declared with; others cannot have it."""
        self.loaded_from: tuple[str, str] | None = None
        """The folder, or the file, that it was loaded from without being imported, and its name there."""

    def __repr__(self) -> str:
        return f"<Task {self.identifier!r}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # in another process it is found where it was declared

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function, here and now: for tests, and for code that does not want a job."""
        return self.function(*args, **kwargs)

    @property
    def queue(self) -> Queue:
        """Where its jobs go."""
        if self._queue is None and self.queue_of_process is not None:
            return self.queue_of_process
        if self._queue is None:
            raise ConfigurationError(
                f"The task {self.identifier!r} belongs to no app, so nobody knows which database its jobs "
                "go to. Have an app include it; inside of another task, ctx.add_job adds a job by its name."
            )
        return self._queue

    @property
    def is_loose(self) -> bool:
        """Whether its jobs have nowhere to go."""
        return self._queue is None

    @property
    def makes_keys(self) -> bool:
        """Whether its jobs have keys without being given one."""
        return self._job_key is not None

    def attach(self, queue: Queue) -> None:
        """From now on its jobs go there."""
        self._queue = queue

    def attached(self, queue: Queue) -> Task[P, Q, R]:
        """The same task, whose jobs go there whatever becomes of this one."""
        twin: Task[P, Q, R] = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin.attach(queue)
        twin._task = twin
        return twin

    def rename(self, identifier: str) -> None:
        """Give it a name, if it was not given one."""
        if not self.named:
            self.identifier = identifier
            _check_identifier(self)

    def spec_for(self, payload: Any, given: JobOptions | None = None) -> JobSpec:
        """The job with that payload, not added yet.

        Raises:
            InvalidJobError: The function cannot be called with it.
        """
        with _refusing(self.identifier):
            args, kwargs = self.binding.call_for(without_reserved(payload))
        spec = self.make_spec(args, kwargs, given or {})
        if isinstance(payload, dict) and (kept := RESERVED_KEYS & payload.keys()):
            about = {key: payload[key] for key in kept}
            spec = msgspec.structs.replace(spec, payload={**spec.payload, **about})
        return spec

    def make_spec(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: JobOptions) -> JobSpec:
        """The job for a call with these arguments."""
        for name in JobOptions.__annotations__.keys() & kwargs.keys():
            if not self.binding.takes(name):
                raise InvalidJobError(
                    f"The task {self.identifier!r} has no parameter {name!r}. What is about the job is said "
                    f"by using: {self.identifier}.using({name}=...).enqueue(...).",
                    argument=name,
                )
        with _refusing(self.identifier):
            payload, (args, kwargs) = self.binding.payload(args, kwargs)
        options: dict[str, Any] = {**self.options, **given}
        if self._job_key is not None and "job_key" not in given:
            options["job_key"] = self._job_key(*args, **kwargs)
        return JobSpec(self.identifier, payload, **with_timeout(options))

    def _read(self) -> Binding:
        if self.on_invalid_payload not in {None, "retry", "fail"}:
            raise ConfigurationError(
                f"on_invalid_payload is {self.on_invalid_payload!r}; it must be 'retry' or 'fail'."
            )
        if self.handler_class is not None:
            if self.batch:
                raise ConfigurationError(f"The task {self.identifier!r} is a class, which has no batches.")
            return read_class(self.handler_class, self.identifier)
        return read_function(self.function, self.identifier, batch=self.batch)


def task_of(thing: object) -> Task[Any, Any, Any] | None:
    """The task that it is, or that the class was made."""
    if isinstance(thing, type):
        thing = vars(thing).get("__graphile_worker_task__")
    return thing if isinstance(thing, Task) else None


class _refusing:  # noqa: N801 - used like a function
    """Says whose arguments are wrong."""

    def __init__(self, identifier: str) -> None:
        self._identifier = identifier

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, MisfitError):
            raise InvalidJobError(
                f"The task {self._identifier!r} cannot be given that: {error}.", argument="payload"
            ) from None
        if isinstance(error, TypeError) and error.__traceback__ is not None:
            raise InvalidJobError(
                f"The task {self._identifier!r} cannot be called like that: {error}.", argument="payload"
            ) from error


def _mark_as_async(task: Any) -> None:
    """For those who ask whether to await what it returns, as web frameworks do."""
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(task)
    else:  # Python 3.11
        task._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001


def _read_batch(given: object) -> bool:
    if given is not None and not isinstance(given, bool):
        raise ConfigurationError(f"batch is {given!r}; it must be True or False.")
    return bool(given)


def _hint_at(name: str, task: str) -> str:
    how = _ELSEWHERE[name]
    if "enqueue" not in how:
        return f"A task has no {name!r}. To describe a job without adding it: {task}.{how}."
    without_loop = how.replace("enqueue(", "enqueue_sync(")
    return (
        f"A task has no {name!r}. To add a job: await {task}.{how}; without an event loop: "
        f"{task}.{without_loop}."
    )


def _name_of(function: Any) -> str:
    if isinstance(function, type):
        identifier = getattr(function, "identifier", None)
        if not isinstance(identifier, str):
            raise ConfigurationError(
                f"The class {function.__qualname__} has no identifier, so it cannot be a task. Add one: "
                'identifier: ClassVar[str] = "…".'
            )
        return identifier
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else ""


def _check_identifier(new: Task[Any, Any, Any]) -> None:
    if not new.identifier and not new.named:
        return
    options: Any = {**new.options, "job_key": None}
    try:
        checked = JobSpec(new.identifier, **options)  # it checks the defaults too
    except InvalidJobError as error:
        raise ConfigurationError(f"The task {new.identifier!r} cannot be: {error}") from None
    if checked.flags is not None:
        new.options["flags"] = checked.flags  # what was given may be readable only once
    if not IN_A_CRONTAB.fullmatch(new.identifier):
        logger.warning(
            "The task %r cannot be named in a crontab: that takes a letter or _, then letters, digits and "
            ": / _ -",
            new.identifier,
        )
