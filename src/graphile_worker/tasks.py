"""`Task`: a function or class that jobs can run."""

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

from graphile_worker._base.checked_connection import in_transaction_if_required
from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import library_logger as logger
from graphile_worker._base.payload import RESERVED_KEYS, without_reserved
from graphile_worker._tasks.binding import Binding, read_class, read_function
from graphile_worker._tasks.computed_options import read_computed, take_computed
from graphile_worker._tasks.conversion import MisfitError
from graphile_worker._tasks.key_options import expand_key_options
from graphile_worker._tasks.options import (
    JobOptions,
    TaskOptions,
    as_spec_options,
    check_iterable,
    check_job_options,
    merge_job_options,
    read_executor,
    read_history_options,
    read_limits,
    read_timeout,
    reject_queue_braces,
)
from graphile_worker._tasks.results import ResultType, TaskResults
from graphile_worker.cron.line import TASK as CRONTAB_TASK_NAME
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import AwaitedJob, Job, JobHandle, JobSpec, check_integer
from graphile_worker.retry import read_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphile_worker._base.durations import Duration
    from graphile_worker._db.connection.drivers import AnyConnection
    from graphile_worker._tasks.queue import Queue

P = ParamSpec("P")
"""The parameters of the function."""
Q = ParamSpec("Q")
"""The parameters of the function without its context: those that `enqueue` takes."""
R = TypeVar("R")
"""What the function returns: a coroutine, if it is a coroutine function."""
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # included in type checkers

    V = TypeVarWithDefault("V", default=Any)
else:
    V = TypeVar("V")
"""The value of the function's result: what a coroutine function returns when it is awaited."""


class HandlerClass(Protocol):
    """A class whose instances are payloads: a dataclass, a msgspec Struct or a pydantic model."""

    identifier: ClassVar[str]

    @property
    def run(self) -> Callable[..., Any]:
        """The method that runs the job. It takes a `JobContext`, or no argument."""


_OTHER_QUEUES_NAMES = {
    **dict.fromkeys(("delay", "send", "defer", "defer_async", "enqueue_async", "kiq"), "enqueue(...)"),
    **dict.fromkeys(
        ("apply_async", "send_with_options", "enqueue_in", "enqueue_at", "schedule"),
        "using(run_at=..., priority=...).enqueue(...)",
    ),
    **dict.fromkeys(("s", "si", "signature", "message"), "spec(...)"),
}
"""Method names of other job queues, and what to write instead."""


class Enqueuer(Generic[Q, V]):
    """Adds jobs of one task: a `Task`, or the return value of its `using` method."""

    _task: Task[Any, Q, Any, V]
    _options: JobOptions
    _connection: AnyConnection | None
    _require_transaction: bool
    _wait: float | None = None

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

        def __getattr__(self, name: str) -> object:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OTHER_QUEUES_NAMES:
                task = vars(self).get("_task")
                message = _describe_alternative(name, getattr(task, "__name__", None) or "task")
            raise AttributeError(message, name=name, obj=self)

    def using(
        self,
        *,
        connection: AnyConnection | None = None,
        require_transaction: bool = False,
        wait: Duration | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueuer[Q, V]:
        """Return an enqueuer for the same task with other job options.

        Args:
            connection: The caller's connection or session. The job is added in its transaction.
            require_transaction: Whether to refuse to add a job if the connection is not in a transaction, or
                if none is given.
            wait: How long `call` waits for the result, in seconds or as a timedelta; by default without
                limit.
            options: Job options of `WorkerUtils.add_job`: queue_name, run_at, delay, max_attempts, job_key,
                job_key_mode, priority, flags and timeout. They override those of the task.

        Raises:
            InvalidJobError: An option is unknown or invalid.

        Example:
            >>> from graphile_worker import task
            >>> @task
            ... async def hello(name: str) -> None:
            ...     print(f"Hello, {name}")
            >>> hello.using(delay=300, priority=-1).spec(name="Ann").priority
            -1
        """
        check_job_options("using", options)
        reject_queue_braces(options.get("queue_name"))
        new: Enqueuer[Q, V] = Enqueuer()
        new._task = self._task
        new._options = merge_job_options(self._options, options)
        new._connection = self._connection if connection is None else connection
        new._require_transaction = self._require_transaction or require_transaction
        new._wait = self._wait if wait is None else seconds("wait", wait, "more than 0")
        return new

    @property
    def _checked_connection(self) -> AnyConnection | None:
        checked: AnyConnection | None = in_transaction_if_required(
            self._connection, require_transaction=self._require_transaction
        )
        return checked

    def spec(self, /, *args: Q.args, **kwargs: Q.kwargs) -> JobSpec:
        """Return the `JobSpec` for a call with these arguments, without adding the job: for `App.add_jobs`.

        Raises:
            InvalidJobError: The arguments do not match the function's parameters or their types.
        """
        return self._task._make_spec(args, kwargs, self._options)

    async def enqueue(self, /, *args: Q.args, **kwargs: Q.kwargs) -> JobHandle[V]:
        """Add a job. A worker will call the function with these arguments.

        Returns:
            The added job. Its method `JobHandle.result` waits for what the function returns.

        Raises:
            InvalidJobError: The arguments do not match the function's parameters or their types. Nothing was
                added.
            JobSkippedError: A middleware did not add the job.
            ConfigurationError: The task belongs to no app.
        """
        spec = self.spec(*args, **kwargs)
        return self._handle(await self._task.queue.add_spec(spec, connection=self._checked_connection))

    def enqueue_sync(self, /, *args: Q.args, **kwargs: Q.kwargs) -> JobHandle[V]:
        """Add a job like `enqueue`, from code without an event loop. Blocks until the job is added.

        A sync connection or session that was given to `using` is used in this thread.

        Raises:
            ConfigurationError: This thread has a running event loop, or the connection belongs to one.
        """
        spec = self.spec(*args, **kwargs)
        return self._handle(self._task.queue.add_spec_sync(spec, connection=self._checked_connection))

    def _handle(self, job: Job) -> JobHandle[V]:
        return JobHandle.of(job, TaskResults(self._task), in_transaction=self._connection is not None)

    async def call(self, /, *args: Q.args, **kwargs: Q.kwargs) -> V:
        """Add a job, wait until a worker has run it, and return what the function returned.

        The job's result is kept, whatever the task's options are. If the wait ends early, by
        ``using(wait=…)`` or `asyncio.timeout`, the job goes on. See docs/guides/results.md.

        Raises:
            InvalidJobError: The arguments do not match the function's parameters or their types. Nothing was
                added.
            JobFailedError: The job has failed permanently. Attempts that are retried do not end the wait.
            JobCancelledError: The job was cancelled.
            ResultUnknownError: A Node worker has run the job, for example, or the result is too large.
            ResultTimeoutError: The job has not ended within ``using(wait=…)``. It is also a `TimeoutError`.
            ConfigurationError: The task belongs to no app, JSON cannot carry its result, or the connection
                is in a transaction, which no worker sees.

        Example:
            >>> import asyncio
            >>> from graphile_worker import App
            >>> app = App(dsn=dsn)
            >>> @app.task
            ... async def total(prices: list[int]) -> int:
            ...     return sum(prices)
            >>> async def main():
            ...     await app.migrate()
            ...     async with app.running():
            ...         return await total.using(wait=30).call([3, 4])
            >>> asyncio.run(main())
            7
        """
        task = self._task
        spec = self._called_spec(args, kwargs)
        value = await task.queue._call_spec(spec, self._wait, connection=self._connection)  # noqa: SLF001 - the library's own
        result: V = task.result_type.convert(None, task.identifier, value)
        return result

    def call_sync(self, /, *args: Q.args, **kwargs: Q.kwargs) -> V:
        """Add a job and wait for its result like `call`, from code without an event loop."""
        task = self._task
        spec = self._called_spec(args, kwargs)
        value = task.queue._call_spec_sync(spec, self._wait, connection=self._connection)  # noqa: SLF001 - the library's own
        result: V = task.result_type.convert(None, task.identifier, value)
        return result

    def _called_spec(self, args: Any, kwargs: Any) -> JobSpec:
        self._task.result_type.check(self._task.identifier)
        return self._task._make_spec(args, kwargs, self._options)

    async def enqueue_many(self, payloads: Iterable[Any]) -> list[Job]:
        """Add a job for each payload in few round trips: all of them, or none if one is rejected.

        Args:
            payloads: An iterable of any length. For a function with a parameter ``payload``, or a batch task,
                each item is the payload itself. For any other function it is a mapping of arguments by name.

        Returns:
            The added jobs, in the same order.

        Raises:
            InvalidJobError: A payload is invalid. No job was added.
        """
        specs = self._specs(payloads)
        if isinstance(payloads, list | tuple):
            specs = list(specs)  # a list can be sent again after an error that is worth a retry
        return await self._task.queue.add_jobs(specs, connection=self._checked_connection)

    def enqueue_many_sync(self, payloads: Iterable[Any]) -> list[Job]:
        """Add many jobs like `enqueue_many`, from code without an event loop."""
        return self._task.queue.add_jobs_sync(self._specs(payloads), connection=self._checked_connection)

    def _specs(self, payloads: Iterable[Any]) -> Iterable[JobSpec]:
        check_iterable("enqueue_many", "payloads", payloads)
        return self._iterate_specs(payloads)

    def _iterate_specs(self, payloads: Iterable[Any]) -> Iterable[JobSpec]:
        for number, payload in enumerate(payloads):
            try:
                yield self._task.spec_for(payload, self._options)
            except InvalidJobError as error:
                raise InvalidJobError(
                    f"Payload number {number}: {error}", argument=error.argument, code=error.code
                ) from error


class Task(Enqueuer[Q, V], Generic[P, Q, R, V]):
    """A function that jobs can run. Calling a task still calls the function directly.

    Attributes:
        identifier: The name of the task in jobs.
        function: The decorated function or class.
        options: Default options of the task's jobs.
        retry: The retry policy; None for Graphile Worker's delays.
        timeout: How long a job may run: seconds, a function of the job, or None.
        executor: ``"process"`` if the task runs in a separate process, else None.
        batch: Whether the payload is a list whose items succeed or fail one by one.
        on_invalid_payload: ``"retry"`` or ``"fail"`` for a job whose payload does not match the parameters;
            None for the app's setting.

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
        RunSummary(succeeded=1, failed=0, snoozed=0, cancelled=0, errors=())
    """

    __name__: str
    __qualname__: str
    _process_queue: ClassVar[Queue | None] = None
    """The queue of tasks without an app, in a task process."""

    def __init__(self, function: Callable[P, R], identifier: str | None, options: TaskOptions) -> None:
        functools.update_wrapper(self, function, updated=())
        if inspect.iscoroutinefunction(function):
            _mark_as_async(self)
        self._is_named = identifier is not None or isinstance(function, type)
        """Whether the identifier was given explicitly. If not, it is the function's name, or the name of the
        file in a task folder."""
        self.identifier = identifier if identifier is not None else _default_identifier(function)
        """Empty if the function has no usable name. Then only the file in a task folder can name the task."""
        self.function: Callable[P, R] = function
        self.handler_class: type[Any] | None = function if isinstance(function, type) else None
        self.retry = read_policy(options.get("retry"))
        self.timeout = read_timeout(options.get("timeout"))
        self.executor = read_executor(options.get("executor"), self)
        self.batch = _read_batch(options.get("batch"))
        self.on_invalid_payload = options.get("on_invalid_payload")
        self.history, self.keep_result = read_history_options(
            options.get("history"), options.get("keep_result")
        )
        self.limit, self.worker_limit = read_limits(options.get("limit"), options.get("worker_limit"))
        expanded = expand_key_options(options)
        given: Any = {name: expanded.get(name) for name in JobOptions.__annotations__ if name != "timeout"}
        chosen: Any = {name: value for name, value in given.items() if value is not None}
        computed = take_computed(chosen)
        self.options: JobOptions = chosen
        _check_identifier(self)
        self.binding: Binding = self._read_binding()
        self.result_type = ResultType(self.binding.function, batch=self.batch)
        if self.keep_result:
            self.result_type.check(self.identifier)
        self._computed = {
            name: read_computed(name, value, self.binding, self.identifier)
            for name, value in computed.items()
        }
        """Functions that compute job options from the arguments, by the names of the options."""
        self._task, self._options, self._connection, self._require_transaction = self, {}, None, False
        self._queue: Queue | None = None
        self.owner: Queue | None = None
        """The app that declared the task. Other apps cannot include it."""
        self.loaded_from: tuple[str, str] | None = None
        """The task folder or file that the task was loaded from, and its name there; None if the task's
        module was imported."""

    def __repr__(self) -> str:
        return f"<Task {self.identifier!r}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # another process imports it from the module that declared it

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, without a job."""
        return self.function(*args, **kwargs)

    @property
    def queue(self) -> Queue:
        """The queue that the task's jobs go to.

        Raises:
            ConfigurationError: The task belongs to no app.
        """
        if self._queue is None and self._process_queue is not None:
            return self._process_queue
        if self._queue is None:
            raise ConfigurationError(
                f"Task {self.identifier!r} belongs to no app, so it has no queue to add jobs to. Add it to "
                f"an app with app.include, or inside another task use ctx.add_job({self.identifier!r}, ...)."
            )
        return self._queue

    async def result_of(self, job: Job | int, timeout: Duration | None = None) -> V:  # noqa: ASYNC109 - the error names the job
        """Wait for the result of a job of this task: see `JobHandle.result`.

        Args:
            job: The job, for example from `enqueue_many`, or its id.
            timeout: How long to wait, in seconds or as a timedelta; 0 only checks. By default without limit.
        """
        return await TaskResults(self).read(self._awaited(job), timeout)

    def result_of_sync(self, job: Job | int, timeout: Duration | None = None) -> V:
        """Wait for the result of a job of this task, from code without an event loop."""
        return TaskResults(self).read_sync(self._awaited(job), timeout)

    def _awaited(self, job: Job | int) -> AwaitedJob:
        if isinstance(job, Job):
            return AwaitedJob(job.id, job.task_identifier, job.created_at)
        check_integer("job", job, range(2**63))
        return AwaitedJob(job, self.identifier)

    @property
    def _is_unattached(self) -> bool:
        """Whether the task belongs to no app."""
        return self._queue is None

    @property
    def _has_job_key(self) -> bool:
        """Whether the task itself gives its jobs a key."""
        return "job_key" in self._computed

    def _attach(self, queue: Queue) -> None:
        """Send the task's jobs to this queue from now on."""
        self._queue = queue

    def _attached_copy(self, queue: Queue) -> Task[P, Q, R, V]:
        """Return a copy whose jobs always go to this queue, even if the task is attached to another one."""
        copy: Task[P, Q, R, V] = object.__new__(type(self))
        vars(copy).update(vars(self))
        copy._attach(queue)
        copy._task = copy
        return copy

    def _rename(self, identifier: str) -> None:
        """Change the identifier, unless it was given explicitly."""
        if not self._is_named:
            self.identifier = identifier
            _check_identifier(self)

    def spec_for(self, payload: Any, given: JobOptions | None = None) -> JobSpec:
        """Return the `JobSpec` for a payload, without adding the job.

        Args:
            payload: The payload as a worker would receive it.
            given: Job options that override those of the task.

        Raises:
            InvalidJobError: The payload does not match the function's parameters.
        """
        with _naming_task(self.identifier):
            args, kwargs = self.binding.call_for(without_reserved(payload))
        spec = self._make_spec(args, kwargs, given or {})
        if isinstance(payload, dict) and (kept := RESERVED_KEYS & payload.keys()):
            reserved = {key: payload[key] for key in kept}
            spec = msgspec.structs.replace(spec, payload={**spec.payload, **reserved})
        return spec

    def _make_spec(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: JobOptions) -> JobSpec:
        """Return the `JobSpec` for a call with these arguments."""
        for name in JobOptions.__annotations__.keys() & kwargs.keys():
            if not self.binding.takes(name):
                raise InvalidJobError(
                    f"Task {self.identifier!r} has no parameter {name!r}. To set the job option, write "
                    f"{self.identifier}.using({name}=...).enqueue(...).",
                    argument=name,
                )
        with _naming_task(self.identifier):
            payload, (args, kwargs) = self.binding.payload(args, kwargs)
        options: dict[str, Any] = {**merge_job_options(self.options, given)}
        for name, compute in self._computed.items():
            if name not in given and not (name == "run_at" and "delay" in given):
                options[name] = compute(*args, **kwargs)
        return JobSpec(self.identifier, payload, **as_spec_options(options))

    def _read_binding(self) -> Binding:
        if self.on_invalid_payload not in {None, "retry", "fail"}:
            raise ConfigurationError(
                f"on_invalid_payload is {self.on_invalid_payload!r}; it must be 'retry' or 'fail'."
            )
        if self.handler_class is not None:
            if self.batch:
                raise ConfigurationError(
                    f"Invalid task {self.identifier!r}: a class cannot be a batch task. Use a function."
                )
            return read_class(self.handler_class, self.identifier)
        return read_function(self.function, self.identifier, batch=self.batch)


def task_of(thing: object) -> Task[Any, Any, Any] | None:
    """Return the task itself, or the task that a class was decorated as; None for anything else."""
    if isinstance(thing, type):
        thing = vars(thing).get("__graphile_worker_task__")
    return thing if isinstance(thing, Task) else None


class _naming_task:  # noqa: N801 - used like a function
    """Turns errors about arguments into an `InvalidJobError` that names the task."""

    def __init__(self, identifier: str) -> None:
        self._identifier = identifier

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, MisfitError):
            raise InvalidJobError(
                f"Invalid arguments for task {self._identifier!r}: {error}.", argument="payload"
            ) from None
        if isinstance(error, TypeError) and error.__traceback__ is not None:
            raise InvalidJobError(
                f"Invalid arguments for task {self._identifier!r}: {error}.", argument="payload"
            ) from error


def _mark_as_async(task: Any) -> None:
    """Make `inspect.iscoroutinefunction` true for the task, because web frameworks call it."""
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(task)
    else:  # Python 3.11
        task._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001


def _read_batch(given: object) -> bool:
    if given is not None and not isinstance(given, bool):
        raise ConfigurationError(f"batch is {given!r}; it must be True or False.")
    return bool(given)


def _describe_alternative(name: str, task: str) -> str:
    call = _OTHER_QUEUES_NAMES[name]
    if "enqueue" not in call:
        return f"A task has no {name!r}. To describe a job without adding it, use {task}.{call}."
    sync_call = call.replace("enqueue(", "enqueue_sync(")
    return (
        f"A task has no {name!r}. To add a job, use await {task}.{call}, or without an event loop "
        f"{task}.{sync_call}."
    )


def _default_identifier(function: Any) -> str:
    if isinstance(function, type):
        identifier = getattr(function, "identifier", None)
        if not isinstance(identifier, str):
            raise ConfigurationError(
                f"Class {function.__qualname__} has no identifier, so it cannot be a task. Add "
                'identifier: ClassVar[str] = "…" to the class.'
            )
        return identifier
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else ""


def _check_identifier(new: Task[Any, Any, Any]) -> None:
    if not new.identifier and not new._is_named:
        return
    options: Any = {**new.options, "job_key": None}
    try:
        checked = JobSpec(new.identifier, **as_spec_options(options))  # checks the default options too
    except InvalidJobError as error:
        raise ConfigurationError(f"Invalid task {new.identifier!r}: {error}") from None
    if checked.flags is not None:
        new.options["flags"] = checked.flags  # an iterator could be read only once
    if not CRONTAB_TASK_NAME.fullmatch(new.identifier):
        logger.warning(
            "Task %r cannot be used in a crontab, where a name is a letter or _ followed by letters, digits "
            "and : / _ -",
            new.identifier,
        )
