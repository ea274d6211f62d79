"""References by which another process imports a task: from its module, or from its folder of tasks."""

from __future__ import annotations

import importlib
import runpy
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from graphile_worker.errors import ConfigurationError
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from graphile_worker.tasks import Task

MAIN = "__main__"
IMPORTED_MAIN = "__mp_main__"
"""Name of the program's main module in a process that only imports it, as in multiprocessing."""


class Reference(NamedTuple):
    """Where a task can be imported from."""

    module: str
    name: str
    """Qualified name in the module, or the task's identifier in the folder."""
    folder: str | None = None
    """The folder or file that the task was loaded from by the loader."""


class Program(NamedTuple):
    """What another process needs to import the modules of this one."""

    path: list[str]
    arguments: list[str]
    main_name: str | None
    """The module that was started with ``python -m``."""
    main_file: str | None
    first: list[str]
    """Modules to import before any other, because they prepare the process."""

    @classmethod
    def current(cls) -> Program:
        """Describe this process."""
        main = sys.modules[MAIN]
        spec = getattr(main, "__spec__", None)
        sys.modules.setdefault(IMPORTED_MAIN, main)  # results may refer to a class in a module of this name
        return cls(
            path=[entry or "." for entry in sys.path],
            arguments=list(sys.argv),
            main_name=None if spec is None else spec.name,
            main_file=getattr(main, "__file__", None),
            first=list(ImportState.first),
        )

    def import_first(self) -> None:
        """Import the modules that prepare the process."""
        for name in self.first:
            importlib.import_module(name)

    def import_main(self) -> ModuleType:
        """Import the program's main file without the code under ``if __name__ == "__main__"``."""
        if ImportState.main is not None:
            return ImportState.main
        main = ModuleType(IMPORTED_MAIN)
        if self.main_name is not None:
            content = runpy.run_module(self.main_name, run_name=IMPORTED_MAIN, alter_sys=True)
        else:
            content = runpy.run_path(str(self.main_file), run_name=IMPORTED_MAIN)
        vars(main).update(content)
        sys.modules[MAIN] = sys.modules[IMPORTED_MAIN] = ImportState.main = main
        return main


class ImportState:
    """State of a process that imports another program's modules to run a task."""

    is_importing = False
    main: ModuleType | None = None
    """The imported main module, if it has been imported."""
    first: ClassVar[list[str]] = []
    """Modules that a task process imports before a task's own module."""


def reject_while_importing() -> None:
    """Raise an error if a task process is importing the caller, which must not start workers or add jobs."""
    if ImportState.is_importing:
        raise ConfigurationError(
            "A task process imported this file to run one of its tasks. The import must not start a worker "
            'or use the queue. Put that code under if __name__ == "__main__":'
        )


def reference_to(task: Task[Any, Any, Any]) -> Reference:
    """Return where another process can import a task from.

    Raises:
        ConfigurationError: Another process cannot import the task.
    """
    if task.loaded_from is not None:
        return Reference("", task.loaded_from[1], task.loaded_from[0])
    module = sys.modules.get(task.__module__)
    if task.__module__ == MAIN and Program.current()[2:4] == (None, None):
        raise ConfigurationError(
            f"The task {task.identifier!r} cannot run in a process: it was declared interactively, and a "
            "process can only import it from a file. Move it to a file."
        )
    known = vars(module) if module is not None else {}
    names = (task.__qualname__, *(name for name, thing in known.items() if _is_task(thing, task)))
    for name in names:
        if module is not None and _is_task(_get(module, name), task):
            return Reference(task.__module__, name)
    raise ConfigurationError(
        f"The task {task.identifier!r} cannot run in a process: there is no "
        f"{task.__module__}.{task.__qualname__} to import. Declare it at the top level of a module."
    )


def import_reference(reference: Reference, program: Program) -> Any:
    """Import the object that a reference to a module names."""
    if reference.module in {MAIN, IMPORTED_MAIN}:
        return _get(program.import_main(), reference.name)
    return _get(importlib.import_module(reference.module), reference.name)


def _get(module: ModuleType, name: str) -> Any:
    thing: Any = module
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return thing


def _is_task(thing: object, task: Task[Any, Any, Any]) -> bool:
    """Return whether an object is the task or a copy of it."""
    found = task_of(thing)
    return found is not None and found.binding is task.binding
