"""From a claimed job to its outcome."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._runtime.threads import Threads
from graphile_worker.context import JobContext
from graphile_worker.errors import ConfigurationError, TaskError
from graphile_worker.job import MOST_IDENTIFIER, check_text
from graphile_worker.outcome import Completed, Failed, Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    from graphile_worker._db.exchange import Held
    from graphile_worker.context import Surroundings
    from graphile_worker.outcome import Outcome

    Tasks = Mapping[str, Callable[..., Any]]

COMPLETED = Completed()
_PAYLOAD_AND_CONTEXT = 2


class Handler(NamedTuple):
    """A task's function, and how to call it."""

    function: Callable[..., Any]
    takes_context: bool
    is_async: bool


def read_handlers(tasks: Tasks) -> dict[str, Handler]:
    """The functions by the identifiers of their tasks; refuses what cannot be one."""
    if not isinstance(tasks, Mapping):
        raise ConfigurationError(
            f"tasks is a {type(tasks).__name__}; it must be a mapping of task identifiers to functions."
        )
    if not tasks:
        raise ConfigurationError(
            'There are no tasks: pass tasks={"identifier": function}, with at least one.'
        )
    return {identifier: _read_handler(identifier, function) for identifier, function in tasks.items()}


def _read_handler(identifier: str, function: Callable[..., Any]) -> Handler:
    check_text("identifier", identifier, most=MOST_IDENTIFIER, code="GWBID")
    if not callable(function):
        hint = " Pass the function itself, without calling it." if inspect.isawaitable(function) else ""
        raise ConfigurationError(f"The task {identifier!r} is {function!r}, which is no function.{hint}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"The task {identifier!r} yields, so calling it would run nothing of it.")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C do not tell
        return Handler(function, takes_context=False, is_async=is_async)
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
    return Handler(function, takes_any or len(by_position) >= _PAYLOAD_AND_CONTEXT, is_async)


class Executor:
    """Runs tasks: on the event loop, or on threads if they are plain functions.

    Args:
        handlers: The tasks.
        surroundings: What all jobs share.
        interrupted_delay: Seconds until a job that was interrupted is available again.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], surroundings: Surroundings, interrupted_delay: float
    ) -> None:
        self._handlers = handlers
        self._surroundings = surroundings
        self.interrupted = Interrupted(interrupted_delay)
        self._threads = Threads()
        self._context = copy_context()

    def context(self) -> Context:
        """The context variables that a job starts with: those of whoever started the worker."""
        return self._context.copy()

    def warn(self, concerned: Callable[[str | None], bool] = lambda _task: True) -> None:
        """Let running tasks know that they are to stop: see `Surroundings.warn`."""
        self._surroundings.warn(concerned)

    def calm(self) -> None:
        """Tasks that begin from now on need not stop."""
        self._surroundings.calm()

    def close(self) -> None:
        """Nothing more will run."""
        self._threads.close()

    async def execute(self, held: Held) -> Outcome:
        """Run the job to its end. Whatever is raised belongs to this job alone."""
        try:
            handler = self._handlers.get(held.job.task_identifier)
            if handler is None:
                raise TaskError(f"This worker has no task {held.job.task_identifier!r}.")  # noqa: TRY301
            if held.unreadable is not None:
                raise TaskError(f"The payload cannot be read: {held.unreadable}.") from held.unreadable  # noqa: TRY301
            arguments: tuple[Any, ...] = (held.job.payload,)
            if handler.takes_context:
                arguments = (held.job.payload, JobContext(held.job, self._surroundings))
            if handler.is_async:
                await handler.function(*arguments)
            else:
                await self._call_on_thread(handler.function, arguments)
        except asyncio.CancelledError as error:
            # Somebody cancelled the job from outside; or it gave up by itself, which is a failure.
            task = asyncio.current_task()
            return self.interrupted if task and task.cancelling() else Failed(error)
        except BaseException as error:  # noqa: BLE001 - a task that calls sys.exit() must not end the worker
            return Failed(error)
        return COMPLETED

    async def _call_on_thread(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        future = self._threads.run(copy_context(), function, *arguments)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                # A thread cannot be stopped. Until it ends the job is ours, and its queue.
                continue
        value, error = future.result()
        if error is not None:
            raise error
        if inspect.isawaitable(value):
            await value
