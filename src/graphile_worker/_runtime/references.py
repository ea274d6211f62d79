"""Where another process finds a task: in the module that it was written in, or in its folder of tasks."""

from __future__ import annotations

import importlib
import runpy
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker.errors import ConfigurationError
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from graphile_worker.tasks import Task

MAIN = "__main__"
IMPORTED_MAIN = "__mp_main__"
"""What the program's own file is called where it is only imported: the same as with multiprocessing."""


class Reference(NamedTuple):
    """Where a task is."""

    module: str
    name: str
    """In the module; or the task's, in a folder."""
    folder: str | None = None
    """The folder of tasks, or the file, that it was loaded from."""


class Program(NamedTuple):
    """What another process has to know in order to import what this one has."""

    path: list[str]
    arguments: list[str]
    main_name: str | None
    """Of the module that was run by ``python -m``."""
    main_file: str | None

    @classmethod
    def ours(cls) -> Program:
        """This one."""
        main = sys.modules[MAIN]
        spec = getattr(main, "__spec__", None)
        sys.modules.setdefault(IMPORTED_MAIN, main)  # what comes back may be of a class that is called so
        return cls(
            path=[entry or "." for entry in sys.path],
            arguments=list(sys.argv),
            main_name=None if spec is None else spec.name,
            main_file=getattr(main, "__file__", None),
        )

    def import_main(self) -> ModuleType:
        """The program's own file, as a module: what is under ``if __name__ == "__main__"`` is left out."""
        if Importing.main is not None:
            return Importing.main
        main = ModuleType(IMPORTED_MAIN)
        if self.main_name is not None:
            content = runpy.run_module(self.main_name, run_name=IMPORTED_MAIN, alter_sys=True)
        else:
            content = runpy.run_path(str(self.main_file), run_name=IMPORTED_MAIN)
        vars(main).update(content)
        sys.modules[MAIN] = sys.modules[IMPORTED_MAIN] = Importing.main = main
        return main


class Importing:
    """Whether this process imports, in order to run a task, what another one runs; and what came of it."""

    now = False
    main: ModuleType | None = None


def refuse_while_importing() -> None:
    """What a file does when it is run is not to be done again by a process that only imports it."""
    if Importing.now:
        raise ConfigurationError(
            "A process has imported this file in order to run a task of it. That must neither start another "
            'worker nor use the queue: put what does so under if __name__ == "__main__":'
        )


def reference_to(task: Task[Any, Any, Any]) -> Reference:
    """Where another process finds it; refuses what cannot be found there."""
    if task.loaded_from is not None:
        return Reference("", task.loaded_from[1], task.loaded_from[0])
    module = sys.modules.get(task.__module__)
    if task.__module__ == MAIN and Program.ours()[2:] == (None, None):
        raise ConfigurationError(
            f"The task {task.identifier!r} cannot run in a process: it was typed in, and a process has no "
            "file to import it from. Put it in one."
        )
    known = vars(module) if module is not None else {}
    names = (task.__qualname__, *(name for name, thing in known.items() if _is(thing, task)))
    for name in names:
        if module is not None and _is(_inside(module, name), task):
            return Reference(task.__module__, name)
    raise ConfigurationError(
        f"The task {task.identifier!r} cannot run in a process, which would look for it as "
        f"{task.__module__}.{task.__qualname__}: it is not there. Declare it at the top level of a module."
    )


def follow(reference: Reference, program: Program) -> Any:
    """What is there, in a module."""
    if reference.module in {MAIN, IMPORTED_MAIN}:
        return _inside(program.import_main(), reference.name)
    return _inside(importlib.import_module(reference.module), reference.name)


def _inside(module: ModuleType, name: str) -> Any:
    thing: Any = module
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return thing


def _is(thing: object, task: Task[Any, Any, Any]) -> bool:
    """Whether it is that task, or the one of which it is a twin."""
    found = task_of(thing)
    return found is not None and found.binding is task.binding
