"""How each task is called, and what its failures come to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from graphile_worker._runtime.batch import Batch, discard, failed_in_part, failures, time_chosen
from graphile_worker._runtime.references import reference_to
from graphile_worker.binding import Items
from graphile_worker.context import JobContext
from graphile_worker.conversion import MisfitError
from graphile_worker.durations import seconds
from graphile_worker.errors import BatchError, ConfigurationError, InvalidPayloadError
from graphile_worker.job import MOST_IDENTIFIER, TIMEOUT_FLAG, check_text
from graphile_worker.logs import library_logger as logger
from graphile_worker.outcome import ControlFlow, Fail, Failed, chosen
from graphile_worker.retry import Failure, check_decision
from graphile_worker.specs import Specs
from graphile_worker.tasks import Task, task_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker._runtime.references import Reference
    from graphile_worker.context import Around, Limit
    from graphile_worker.job import Job
    from graphile_worker.outcome import Outcome

    Tasks = Mapping[str, Callable[..., Any]]

_PAYLOAD_AND_CONTEXT = 2
_OF_ONE_KEY = {"str", "int", "float", "bool"}


class Call(msgspec.Struct, frozen=True, gc=False):
    """A call to be made."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Batch | None = None
    items: int | None = None
    """How many, if the payload of a plain function is a list: it may change that list."""

    def answered_by(self, value: Any) -> bool:
        """Whether what the function returned tells of each item what became of it."""
        return isinstance(value, list | tuple) and (self.batch is not None or self.items == len(value))


class Handler(Protocol):
    """A task, as the executor sees it."""

    function: Callable[..., Any]
    is_async: bool
    reference: Reference | None
    """Where a process finds it, if it is to run in one."""
    may_time_out: bool
    """Whether its jobs have a timeout that they do not name themselves."""

    def timeout(self, job: Job) -> float | None:
        """How many seconds the job may run."""

    def call(self, job: Job, surroundings: Around, deadline: Limit | None = None) -> Call:
        """What to call the function with; raises `InvalidPayloadError`."""

    async def conclude(self, job: Job, call: Call, value: Any) -> None:
        """The function returned that; raises what is wrong with it."""

    def failed(self, job: Job, error: BaseException) -> Outcome:
        """What the job comes to because of an error."""


class ByPosition:
    """A plain function: called with the payload and, if it takes two arguments, the context."""

    def __init__(self, function: Callable[..., Any], *, takes_context: bool) -> None:
        self.function = function
        self.is_async = is_async(function)
        self.reference: Reference | None = None
        self.may_time_out = False
        self._takes_context = takes_context

    def timeout(self, job: Job) -> float | None:
        """Only if the job itself says so."""
        return timeout_of(job)

    def call(self, job: Job, surroundings: Around, deadline: Limit | None = None) -> Call:
        """The payload as it is."""
        items = len(job.payload) if isinstance(job.payload, list) else None
        if self._takes_context:
            return Call((job.payload, JobContext(job, surroundings, deadline)), {}, None, items)
        return Call((job.payload,), {}, None, items)

    async def conclude(self, job: Job, call: Call, value: Any) -> None:
        """A list returned for a list has a result for each item, as with Graphile Worker."""
        if call.items is None or not isinstance(value, list | tuple):
            return
        if len(value) != call.items:
            logger.warning(
                "Job %d (%s) has %d items and returned %d results, which are ignored: the job is complete",
                *(job.id, job.task_identifier, call.items, len(value)),
            )
            discard(value)
        elif errors := await failures(value):
            raise failed_in_part(call.items, errors)

    def failed(self, job: Job, error: BaseException) -> Outcome:  # noqa: ARG002
        """As the task chose, or as Graphile Worker has it."""
        return failure(error)


class OfTask:
    """A function that was declared: called with what its parameters ask for."""

    def __init__(self, task: Task[Any, Any, Any], *, on_invalid_payload: str) -> None:
        self._binding = task.binding
        self._policy = task.retry
        self._timeout = task.timeout
        self.may_time_out = task.timeout is not None
        self._ends_invalid = (task.on_invalid_payload or on_invalid_payload) == "fail"
        self.function = task.binding.function
        self.is_async = is_async(self.function)
        self.reference: Reference | None = None
        self.call = self._call_with_batch if isinstance(task.binding, Items) else self._call
        self._takes_context = task.binding.takes_context

    def timeout(self, job: Job) -> float | None:
        """As the job says, or its task."""
        own = timeout_of(job)
        if own is not None or self._timeout is None:
            return own
        timeout = self._timeout(job) if callable(self._timeout) else self._timeout
        return None if timeout is None else seconds("timeout", timeout, "more than 0")

    def _call(self, job: Job, surroundings: Around, deadline: Limit | None = None) -> Call:
        context = JobContext(job, surroundings, deadline) if self._takes_context else None
        try:
            args, kwargs = self._binding.arguments(job.payload, context)
            return Call(args, kwargs)
        except MisfitError as error:
            raise InvalidPayloadError(f"The payload does not fit: {error}", path=error.path) from None

    def _call_with_batch(self, job: Job, surroundings: Around, deadline: Limit | None = None) -> Call:
        assert isinstance(self._binding, Items)  # noqa: S101 - for the type checker
        batch = Batch(job.payload, self._binding.item, final=self._ends_invalid)
        args, kwargs = self._binding.passing(batch.good)
        if self._takes_context:
            args, kwargs = self._binding.with_context(args, kwargs, JobContext(job, surroundings, deadline))
        return Call(args, kwargs, batch)

    async def conclude(self, job: Job, call: Call, value: Any) -> None:  # noqa: ARG002
        """What a batch returned says which items failed."""
        if call.batch is not None:
            await call.batch.settle(value)

    def failed(self, job: Job, error: BaseException) -> Outcome:
        """As the task chose, or its policy, or as Graphile Worker has it."""
        if isinstance(error, InvalidPayloadError) and self._ends_invalid:
            return failure(error, final=True)
        chose = isinstance(error, ControlFlow) or (isinstance(error, BatchError) and time_chosen(error))
        if self._policy is None or chose:
            return failure(error)
        try:
            delay, at = check_decision(self._policy(Failure(job, error)))
        except ControlFlow as choice:
            # Without a reason of its own it is the error that counts.
            if isinstance(choice, Fail) and not choice.reason:
                return failure(error, final=True)
            choice.__cause__ = choice.__cause__ or error
            return chosen(choice)
        except Exception:
            logger.exception(
                "The retry policy of %r failed, so its job has the usual delay", job.task_identifier
            )
            return failure(error)
        return failure(error, delay=delay, at=at)


class InProcess(OfTask):
    """One whose function is called in a process. Here is only decided what its failures come to."""

    def __init__(self, task: Task[Any, Any, Any], *, on_invalid_payload: str) -> None:
        super().__init__(task, on_invalid_payload=on_invalid_payload)
        self.reference = reference_to(task)
        self.call = self._no_call

    def _no_call(self, job: Job, surroundings: Around, deadline: Limit | None = None) -> Call:  # noqa: ARG002
        return Call((), {})

    async def conclude(self, job: Job, call: Call, value: Any) -> None:
        """Done there."""


def timeout_of(job: Job) -> float | None:
    """What the job itself says."""
    for flag in job.flags:
        if flag.startswith(TIMEOUT_FLAG):
            try:
                return seconds("timeout", float(flag.removeprefix(TIMEOUT_FLAG)), "more than 0")
            except (ValueError, ConfigurationError):  # somebody else's flag
                return None
    return None


def failure(error: BaseException, **when: Any) -> Outcome:
    """What an error comes to by itself."""
    if isinstance(error, ControlFlow):
        return chosen(error)
    if isinstance(error, BatchError):
        when["final"] = error.final or when.get("final", False)
        when = time_chosen(error) | when
        return Failed(error, left=error.places, batch_errors=error.errors, **when)
    return Failed(error, **when)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether what it returns is to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def read_handlers(tasks: Tasks, *, on_invalid_payload: str = "retry") -> dict[str, Handler]:
    """The tasks by their identifiers; refuses what cannot be one."""
    if not isinstance(tasks, Mapping):
        raise ConfigurationError(
            f"tasks is a {type(tasks).__name__}; it must be a mapping of task identifiers to functions."
        )
    if not tasks:
        raise ConfigurationError(
            'There are no tasks: pass tasks={"identifier": function}, with at least one.'
        )
    handlers: dict[str, Handler] = {}
    for identifier, function in tasks.items():
        check_text("identifier", identifier, most=MOST_IDENTIFIER, code="GWBID")
        if (task := task_of(function)) is not None:
            kind = InProcess if task.executor == "process" else OfTask
            handlers[identifier] = kind(task, on_invalid_payload=on_invalid_payload)
        else:
            handlers[identifier] = _read_function(identifier, function)
    return handlers


def read_specs(tasks: Tasks) -> Specs:
    """What makes the specs of jobs, by those of the tasks that were declared."""
    found = ((identifier, task_of(function)) for identifier, function in tasks.items())
    return Specs({identifier: task for identifier, task in found if task is not None})


def _read_function(identifier: str, function: Callable[..., Any]) -> ByPosition:
    if not callable(function):
        hint = " Pass the function itself, without calling it." if inspect.isawaitable(function) else ""
        raise ConfigurationError(f"The task {identifier!r} is {function!r}, which is no function.{hint}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"The task {identifier!r} yields, so calling it would run nothing of it.")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C do not tell
        return ByPosition(function, takes_context=False)
    by_position = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [
        p
        for p in parameters
        if p.default is p.empty
        if p.kind is p.KEYWORD_ONLY or p in by_position[_PAYLOAD_AND_CONTEXT:]
    ]
    if required or not (by_position or takes_any):
        raise ConfigurationError(
            f"The task {identifier!r} cannot be called with a payload and a context: its parameters are "
            f"{inspect.signature(function)}. It should take (payload) or (payload, ctx)."
        )
    _warn_of_keys(identifier, by_position[:_PAYLOAD_AND_CONTEXT])
    takes_context = takes_any or len(by_position) >= _PAYLOAD_AND_CONTEXT
    return ByPosition(function, takes_context=takes_context)


def _warn_of_keys(identifier: str, parameters: list[inspect.Parameter]) -> None:
    """Who forgets ``@task`` would have a dictionary in place of a text, and a job that seems to be done."""
    for one in parameters:
        annotation = getattr(one.annotation, "__name__", one.annotation)
        if isinstance(annotation, str) and annotation in _OF_ONE_KEY and one.name != "payload":
            logger.warning(
                "The task %r is a plain function, so it is called with the whole payload, and not with its "
                "key %r. To have the keys as parameters put @task above it, from graphile_worker; if the "
                "payload is no object, call the parameter payload",
                *(identifier, one.name),
            )
            return
