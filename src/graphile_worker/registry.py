"""Which tasks an app has."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from graphile_worker.errors import ConfigurationError
from graphile_worker.specs import Specs
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from graphile_worker.tasks import Queue, Task

    AnyTask: TypeAlias = Task[Any, Any, Any]


class Registry:
    """The tasks of a queue, by their identifiers.

    Args:
        queue: Where their jobs go.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.tasks: dict[str, AnyTask] = {}
        self.specs = Specs(self.tasks)
        """Of jobs that are to be added."""

    def include(self, things: Iterable[Any]) -> None:
        """Add what was declared elsewhere: tasks, modules or their names, lists of any of these."""
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
                    f"include takes tasks, modules that have some, and lists of them, not {thing!r}. A "
                    "function becomes a task by @task."
                )

    def _include_module(self, module: ModuleType) -> None:
        found = {id(task): task for thing in vars(module).values() if (task := task_of(thing)) is not None}
        if not found:
            raise ConfigurationError(
                f"The module {module.__name__} has no tasks. Declare them by @task, from graphile_worker."
            )
        # It may have imported some of another app in order to add jobs.
        ours = [task for task in found.values() if task.owner in {None, self._queue}]
        if not ours:
            raise ConfigurationError(f"The tasks of the module {module.__name__} are all of another app.")
        for task in ours:
            self._include(task)

    def _include(self, task: AnyTask) -> None:
        if task.owner not in {None, self._queue}:
            raise ConfigurationError(
                f"{task!r} was declared by another app, and belongs to that one. Declare what several "
                "apps are to have by @task, from graphile_worker."
            )
        if task.owner is None and self._is_new(task):
            task.attach(self._queue)
            self.tasks[task.identifier] = task.attached(self._queue)

    def declare(self, task: AnyTask) -> None:
        """Add one that is declared here, and belongs here."""
        if self._is_new(task):
            task.attach(self._queue)
            task.owner = self._queue
            self.tasks[task.identifier] = task

    def _is_new(self, task: AnyTask) -> bool:
        if not task.identifier:
            raise ConfigurationError(
                f'{task.function!r} has no name to call a task by. Give it one: @app.task("…").'
            )
        known = self.tasks.get(task.identifier)
        if known is not None and known.binding is not task.binding:  # neither it nor its twin
            raise ConfigurationError(
                f"There are two tasks {task.identifier!r}: {_place(known)} and {_place(task)}. Give one of "
                'them another name: @app.task("…").'
            )
        return known is None


def _place(task: AnyTask) -> str:
    code = getattr(task.function, "__code__", None)
    name = getattr(task.function, "__qualname__", repr(task.function))
    return (
        name if code is None else f"{name} ({os.path.relpath(code.co_filename)}, line {code.co_firstlineno})"
    )
