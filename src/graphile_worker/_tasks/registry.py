"""The tasks of an app."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from graphile_worker._base.text import join_truncated
from graphile_worker._tasks.specs import Specs
from graphile_worker.errors import ConfigurationError
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from graphile_worker._tasks.queue import Queue
    from graphile_worker.tasks import Task

    AnyTask: TypeAlias = Task[Any, Any, Any]


class _TasksByIdentifier(dict[str, "AnyTask"]):
    """Tasks by identifier. The error for an unknown identifier suggests a similar one."""

    def __missing__(self, identifier: object) -> NoReturn:
        near = difflib.get_close_matches(str(identifier), self, n=1)
        hint = (
            f"Did you mean {near[0]!r}?" if near else f"Its tasks: {join_truncated(sorted(self)) or 'none'}."
        )
        raise KeyError(f"The app has no task {identifier!r}. {hint}")


class Registry:
    """The tasks of a queue, by identifier.

    Args:
        queue: The queue to which their jobs are added.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.tasks: dict[str, AnyTask] = _TasksByIdentifier()
        self.specs = Specs(self.tasks)
        """Builds the specs of new jobs."""

    def include(self, things: Iterable[Any]) -> None:
        """Add tasks that were declared elsewhere.

        Args:
            things: Tasks, modules, names of modules, or lists of these.
        """
        for thing in things:
            if isinstance(thing, str):
                thing = importlib.import_module(thing)  # noqa: PLW2901
            if isinstance(thing, ModuleType):
                self._include_module(thing)
            elif (found := task_of(thing)) is not None:
                self._include(found)
            elif isinstance(thing, Iterable) and not isinstance(thing, type | Mapping | bytes):
                self.include(thing)
            else:
                raise ConfigurationError(
                    f"include takes tasks, modules with tasks, and lists of these, not {thing!r}. Decorate "
                    "a function with @task to make it a task."
                )

    def _include_module(self, module: ModuleType) -> None:
        found = {id(task): task for thing in vars(module).values() if (task := task_of(thing)) is not None}
        if not found:
            raise ConfigurationError(
                f"The module {module.__name__} has no tasks. Declare them with @task from graphile_worker."
            )
        # The module may have imported tasks of another app, to add jobs there.
        available = [task for task in found.values() if task.owner in {None, self._queue}]
        if not available:
            raise ConfigurationError(
                f"All tasks of the module {module.__name__} belong to another app. To share a task, declare "
                "it with @task from graphile_worker."
            )
        for task in available:
            self._include(task)

    def _include(self, task: AnyTask) -> None:
        if task.owner not in {None, self._queue}:
            raise ConfigurationError(
                f"{task!r} belongs to another app. To share a task between apps, declare it with @task from "
                "graphile_worker."
            )
        if task.owner is None and self._is_new(task):
            task._attach(self._queue)
            self.tasks[task.identifier] = task._attached_copy(self._queue)

    def declare(self, task: AnyTask) -> None:
        """Add a task that was declared with this queue and belongs to it."""
        if self._is_new(task):
            task._attach(self._queue)
            task.owner = self._queue
            self.tasks[task.identifier] = task

    def _is_new(self, task: AnyTask) -> bool:
        if not task.identifier:
            raise ConfigurationError(
                f'{task.function!r} has no name. Pass a name for the task: @app.task("…").'
            )
        known = self.tasks.get(task.identifier)
        if known is not None and known.binding is not task.binding:  # copies of a task share its binding
            raise ConfigurationError(
                f"There are two tasks named {task.identifier!r}: {_location(known)} and {_location(task)}. "
                'Give one of them another name: @app.task("…").'
            )
        return known is None


def _location(task: AnyTask) -> str:
    code = getattr(task.function, "__code__", None)
    name = getattr(task.function, "__qualname__", repr(task.function))
    return (
        name if code is None else f"{name} ({os.path.relpath(code.co_filename)}, line {code.co_firstlineno})"
    )
