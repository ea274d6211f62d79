"""Handlers: how to call a task's function, and which outcomes its errors have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from graphile_worker._base.durations import seconds
from graphile_worker._base.logs import library_logger as logger
from graphile_worker._tasks.binding import BatchBinding
from graphile_worker._tasks.conversion import MisfitError
from graphile_worker._tasks.plain_functions import takes_job_context
from graphile_worker._tasks.specs import Specs
from graphile_worker._tasks.task_reference import reference_to
from graphile_worker._worker.execution.batch import (
    BatchItems,
    chosen_retry_time,
    close_coroutines,
    failed_items,
    partial_failure,
)
from graphile_worker.context import JobContext
from graphile_worker.errors import BatchError, ConfigurationError, InvalidPayloadError
from graphile_worker.job import MAX_IDENTIFIER_LENGTH, TIMEOUT_FLAG, check_text
from graphile_worker.outcome import ControlFlow, Fail, Failed, outcome_of_choice
from graphile_worker.retry import Failure, check_decision
from graphile_worker.tasks import Task, task_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._tasks.task_reference import Reference
    from graphile_worker.context import JobDeadline, JobEnvironment
    from graphile_worker.job import Job
    from graphile_worker.outcome import Outcome

    Tasks = Mapping[str, Callable[..., Any]]


class Call(msgspec.Struct, frozen=True, gc=False):
    """The arguments of one call of a task's function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: BatchItems | None = None
    items: int | None = None
    """The number of items, if the payload of a plain function is a list. The function may change the list."""

    def covers_all_items(self, value: Any) -> bool:
        """Return whether the function returned a result for each item."""
        return isinstance(value, list | tuple) and (self.batch is not None or self.items == len(value))


class Handler(Protocol):
    """A task, as the executor uses it."""

    function: Callable[..., Any]
    is_async: bool
    reference: Reference | None
    """Where a task process finds the function; None if it runs in the worker's process."""
    may_time_out: bool
    """Whether the task has a timeout for jobs that do not have one themselves."""
    is_direct: bool
    """Whether the event loop can call the function, with no treatment of single items."""
    takes_context: bool
    """Whether the function takes a `JobContext`."""

    def timeout(self, job: Job) -> float | None:
        """Return the job's timeout in seconds, if it has one."""

    def call(self, job: Job, environment: JobEnvironment, deadline: JobDeadline | None = None) -> Call:
        """Return the arguments for the function.

        Raises:
            InvalidPayloadError: The payload does not fit the function's parameters.
        """

    async def check_result(self, job: Job, call: Call, value: Any) -> None:
        """Raise an error if the value that the function returned stands for one."""

    def failure_outcome(self, job: Job, error: BaseException) -> Outcome:
        """Return the outcome of a job that failed with the error."""


class PlainFunctionHandler:
    """A function without ``@task``. It gets the payload and, if it takes two arguments, the context."""

    def __init__(self, function: Callable[..., Any], *, takes_context: bool) -> None:
        self.function = function
        self.is_async = is_async(function)
        self.reference: Reference | None = None
        self.may_time_out = False
        self.is_direct = self.is_async
        self.takes_context = takes_context

    def timeout(self, job: Job) -> float | None:
        """Return the timeout that the job was added with."""
        return timeout_of(job)

    def call(self, job: Job, environment: JobEnvironment, deadline: JobDeadline | None = None) -> Call:
        """Return the payload as it is, and the context if the function takes it."""
        items = len(job.payload) if isinstance(job.payload, list) else None
        if self.takes_context:
            return Call((job.payload, JobContext(job, environment, deadline)), {}, None, items)
        return Call((job.payload,), {}, None, items)

    async def check_result(self, job: Job, call: Call, value: Any) -> None:
        """Treat a list returned for a list payload as one result per item, as Graphile Worker does."""
        if call.items is None or not isinstance(value, list | tuple):
            return
        if len(value) != call.items:
            logger.warning(
                "Job %d (%s) has %d items, but its task returned %d results. They are ignored: the job "
                "is complete",
                job.id,
                job.task_identifier,
                call.items,
                len(value),
            )
            close_coroutines(value)
        elif errors := await failed_items(value):
            raise partial_failure(call.items, errors)

    def failure_outcome(self, job: Job, error: BaseException) -> Outcome:  # noqa: ARG002
        """Return the outcome that the task chose, or a failure with Graphile Worker's retry delay."""
        return failure(error)


class TaskHandler:
    """A function with ``@task``. It gets the values of the payload as arguments."""

    def __init__(self, task: Task[Any, Any, Any], *, on_invalid_payload: str) -> None:
        self._binding = task.binding
        self._policy = task.retry
        self._timeout = task.timeout
        self.may_time_out = task.timeout is not None
        self._fails_invalid = (task.on_invalid_payload or on_invalid_payload) == "fail"
        self.function = task.binding.function
        self.is_async = is_async(self.function)
        self.reference: Reference | None = None
        self.is_direct = self.is_async
        self.takes_context = task.binding.takes_context

    def timeout(self, job: Job) -> float | None:
        """Return the timeout that the job was added with, or else the task's."""
        job_timeout = timeout_of(job)
        if job_timeout is not None or self._timeout is None:
            return job_timeout
        timeout = self._timeout(job) if callable(self._timeout) else self._timeout
        return None if timeout is None else seconds("timeout", timeout, "more than 0")

    def call(self, job: Job, environment: JobEnvironment, deadline: JobDeadline | None = None) -> Call:
        """Convert the payload to the function's parameters."""
        context = JobContext(job, environment, deadline) if self.takes_context else None
        try:
            args, kwargs = self._binding.arguments(job.payload, context)
            return Call(args, kwargs)
        except MisfitError as error:
            raise InvalidPayloadError(f"Invalid payload: {error}", path=error.path) from None

    async def check_result(self, job: Job, call: Call, value: Any) -> None:
        """Accept any value, because only batch tasks return results."""

    def failure_outcome(self, job: Job, error: BaseException) -> Outcome:
        """Return the outcome that the task or its retry policy chose, or a failure with the default delay."""
        if isinstance(error, InvalidPayloadError) and self._fails_invalid:
            return failure(error, final=True)
        task_chose = isinstance(error, ControlFlow) or (
            isinstance(error, BatchError) and chosen_retry_time(error)
        )
        if self._policy is None or task_chose:
            return failure(error)
        try:
            delay, at = check_decision(self._policy(Failure(job, error)))
        except ControlFlow as choice:
            # A Fail without a reason is recorded with the task's error.
            if isinstance(choice, Fail) and not choice.reason:
                return failure(error, final=True)
            choice.__cause__ = choice.__cause__ or error
            return outcome_of_choice(choice)
        except Exception:
            logger.exception(
                "The retry policy of task %r failed. The job is retried after the default delay",
                job.task_identifier,
            )
            return failure(error)
        return failure(error, delay=delay, at=at)


class BatchTaskHandler(TaskHandler):
    """A function with ``@task`` that takes a batch. It gets the payload's items."""

    def __init__(self, task: Task[Any, Any, Any], *, on_invalid_payload: str) -> None:
        super().__init__(task, on_invalid_payload=on_invalid_payload)
        self.is_direct = False

    def call(self, job: Job, environment: JobEnvironment, deadline: JobDeadline | None = None) -> Call:
        """Convert each item. Items of the wrong type are not passed on, and fail."""
        assert isinstance(self._binding, BatchBinding)  # noqa: S101 - for the type checker
        batch = BatchItems(job.payload, self._binding.item, final=self._fails_invalid)
        args, kwargs = self._binding.arguments_for(batch.valid_items)
        if self.takes_context:
            args, kwargs = self._binding.with_context(args, kwargs, JobContext(job, environment, deadline))
        return Call(args, kwargs, batch)

    async def check_result(self, job: Job, call: Call, value: Any) -> None:  # noqa: ARG002
        """Raise `BatchError` if items failed."""
        if call.batch is not None:
            await call.batch.settle(value)


class ProcessTaskHandler(TaskHandler):
    """A function that a task process calls. Only the outcome of its errors is chosen in the worker."""

    def __init__(self, task: Task[Any, Any, Any], *, on_invalid_payload: str) -> None:
        super().__init__(task, on_invalid_payload=on_invalid_payload)
        self.reference = reference_to(task)
        self.is_direct = False

    def call(self, job: Job, environment: JobEnvironment, deadline: JobDeadline | None = None) -> Call:  # noqa: ARG002
        """Return no arguments: the task process converts the payload."""
        return Call((), {})


def task_handler(task: Task[Any, Any, Any], *, on_invalid_payload: str) -> TaskHandler:
    """Return the handler that calls the task's function in this process."""
    kind = BatchTaskHandler if isinstance(task.binding, BatchBinding) else TaskHandler
    return kind(task, on_invalid_payload=on_invalid_payload)


def timeout_of(job: Job) -> float | None:
    """Return the timeout that the job was added with, in seconds."""
    for flag in job.flags:
        if flag.startswith(TIMEOUT_FLAG):
            try:
                return seconds("timeout", float(flag.removeprefix(TIMEOUT_FLAG)), "more than 0")
            except (ValueError, ConfigurationError):  # a flag that only looks like a timeout
                return None
    return None


def failure(error: BaseException, **when: Any) -> Outcome:
    """Return the outcome of an error, without the task's retry policy."""
    if isinstance(error, ControlFlow):
        return outcome_of_choice(error)
    if isinstance(error, BatchError):
        when["final"] = error.final or when.get("final", False)
        when = chosen_retry_time(error) | when
        return Failed(error, left=error.indexes, batch_errors=error.errors, **when)
    return Failed(error, **when)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether the function returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def read_handlers(tasks: Tasks, *, on_invalid_payload: str = "retry") -> dict[str, Handler]:
    """Return the handlers by task identifier.

    Raises:
        ConfigurationError: There are no tasks, or one of them is not valid.
    """
    if not isinstance(tasks, Mapping):
        raise ConfigurationError(
            f"tasks is a {type(tasks).__name__}; it must be a mapping of task identifiers to functions."
        )
    if not tasks:
        raise ConfigurationError('No tasks: pass tasks={"identifier": function} with at least one function.')
    handlers: dict[str, Handler] = {}
    for identifier, function in tasks.items():
        check_text("identifier", identifier, max_length=MAX_IDENTIFIER_LENGTH, code="GWBID")
        if (task := task_of(function)) is not None:
            make = ProcessTaskHandler if task.executor == "process" else task_handler
            handlers[identifier] = make(task, on_invalid_payload=on_invalid_payload)
        else:
            takes_context = takes_job_context(identifier, function)
            handlers[identifier] = PlainFunctionHandler(function, takes_context=takes_context)
    return handlers


def read_specs(tasks: Tasks) -> Specs:
    """Return a maker of job specs that knows the tasks made with ``@task``."""
    found = ((identifier, task_of(function)) for identifier, function in tasks.items())
    return Specs({identifier: task for identifier, task in found if task is not None})
