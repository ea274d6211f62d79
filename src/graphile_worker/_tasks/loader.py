"""Loads tasks from files.

In a folder, ``hello.py`` holds the task ``hello``, and ``mail/send.py`` the task ``mail/send``. The task is
the function named ``task``, the function named like the file, or the function with ``@task``. Any other
executable file is a task too. Instead of a folder, a single module ``tasks.py`` can hold many tasks.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphile_worker._base.logs import library_logger as logger
from graphile_worker._tasks.decorator import task
from graphile_worker._tasks.executable import Executable
from graphile_worker._tasks.plain_functions import takes_job_context
from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.cron.crontab import read_crontab
from graphile_worker.errors import ConfigurationError
from graphile_worker.job import MAX_IDENTIFIER_LENGTH, check_text
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec

    from graphile_worker._worker.run_options import CronItems

    Functions = dict[str, Callable[..., Any]]

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NON_WORD = re.compile(r"\W")
_NOT_USER_CODE = ("<", str(Path(__file__).parents[1]) + os.sep, functools.__file__)
"""Files that an error message never names: it names the line in the user's code that called them."""


def load_tasks(path: str | os.PathLike[str]) -> Functions:
    """Load the tasks of a folder or a module, by identifier.

    Args:
        path: The folder. If it does not exist, but a module with that name does, load the module.

    Raises:
        ConfigurationError: There are no tasks, or a file cannot be loaded. The message names file and line.
    """
    where = Path(path).absolute()
    module = where.with_name(f"{where.name}.py")
    if module.is_file() and not where.exists():
        where = module
    elif module.is_file() and where.is_dir():
        logger.warning(
            "Ignoring %s: tasks are loaded from the folder %s", _relative(module), _relative(where)
        )
    importlib.invalidate_caches()  # a file may be newer than the import system's caches
    if where.is_dir():
        found = _load_folder(where)
    elif where.suffix == ".py" and where.is_file():
        found = _load_module(where)
    elif where.exists():
        raise ConfigurationError(f"No tasks found: {where} is neither a folder nor a .py file.")
    else:
        raise ConfigurationError(
            f"No tasks found: {where} does not exist. Create the folder, with one file per task, or pass "
            "another folder, or pass an app: graphile-worker run module:app."
        )
    if not found:
        raise ConfigurationError(
            f"No tasks found in {_relative(where)}. To add a task named hello, create hello.py there, with a "
            "function hello(payload)."
        )
    for name, function in found.items():
        if (declared := task_of(function)) is not None:
            declared.loaded_from = str(where), name
    return found


def load_crontab(path: str | os.PathLike[str]) -> list[CronItem]:
    """Load the items of a crontab file. Its first line may be ``# graphile-worker: extended``.

    Raises:
        ConfigurationError: The file cannot be read.
        CrontabError: A line is invalid.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The crontab {str(path)!r} cannot be read: {error}.") from error
    return read_crontab(text, source=str(path))


def check_one_crontab(*given: object) -> None:
    """Reject more than one source of cron items."""
    if sum(one is not None for one in given) > 1:
        raise ConfigurationError("Pass only one of crontab, crontab_file and cron_items.")


def load_cron_items(
    crontab: str | None, crontab_file: str | os.PathLike[str] | None, cron_items: CronItems | None
) -> list[CronItem]:
    """Load cron items from the one source that is given, if any."""
    check_one_crontab(crontab, crontab_file, cron_items)
    if crontab is not None:
        return parse_cron_items(read_crontab(crontab))
    if crontab_file is not None:
        return parse_cron_items(load_crontab(crontab_file))
    return parse_cron_items(cron_items or ())


def load_object(target: str) -> Any:
    """Import the object that ``module:name`` names."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigurationError(f"Invalid app {target!r}: it must have the form module:app.")
    spec = _find_module(module_name)
    module = _import(module_name, Path(spec.origin or module_name))
    value: Any = module
    for name in attribute.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(value), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigurationError(
                f"The module {module_name} has no attribute {attribute}.{hint}"
            ) from None
    return value


def _find_module(module_name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        spec = None
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{module_name} cannot be imported: {_describe(error)}") from error
    if spec is None:
        hint = "Run the command in the module's folder, or install the module."
        if module_name.endswith(".py"):
            name = ".".join(Path(module_name).with_suffix("").parts)
            hint = f"Write the module's name without .py: {name}."
        raise ConfigurationError(f"There is no module {module_name}. {hint}")
    return spec


def _load_folder(folder: Path) -> Functions:
    package = _create_package(folder)
    found: Functions = {}
    files: dict[str, Path] = {}
    for file, parts in _files(folder, ()):
        identifier = "/".join(parts)
        if file.suffix == ".py":
            module = _import(".".join((package, *parts)), file)
            if (subfolder := file.with_suffix("")).is_dir() and not hasattr(module, "__path__"):
                module.__path__ = [str(subfolder)]  # so that mail.py and mail/send.py can both exist
            loaded = _tasks_of_file(module, identifier, file)
        else:
            loaded = {identifier: Executable(file)}
        for name, function in loaded.items():
            if name in files:
                raise ConfigurationError(
                    f"The task {name!r} is in {_relative(files[name])} and in {_relative(file)}. Remove one."
                )
            files[name], found[name] = file, function
    return found


def _files(folder: Path, parents: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the files that hold tasks, with the parts of their identifiers. Files come before subfolders."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_dir(), entry.name))
    except OSError as error:
        raise ConfigurationError(f"{_relative(folder)} cannot be read: {error.strerror}.") from None
    for entry in entries:
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        name, *extensions = (entry.name,) if is_folder else entry.name.split(".")
        if not name or name.startswith((".", "_")):
            continue  # hidden, or not meant to be a task
        is_python = extensions[-1:] == ["py"]
        if not all(_NAME.fullmatch(part) for part in (name, *extensions)) or (is_python and extensions[:-1]):
            logger.info("Ignoring %s: its name is not a valid task name", _relative(path))
        elif is_folder:
            yield from _files(path, (*parents, name))
        elif not entry.is_file():
            logger.info("Ignoring %s: it is not a file, or it is a link to a folder", _relative(path))
        elif is_python or os.access(path, os.X_OK):
            yield path, (*parents, name)
        elif _is_script(path):
            logger.warning(
                "Ignoring %s: it is a script, but not executable. Run chmod +x %s",
                _relative(path),
                _relative(path),
            )
        else:
            logger.debug("Ignoring %s: it is neither a Python file nor executable", _relative(path))


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _tasks_of_file(module: ModuleType, identifier: str, file: Path) -> Functions:
    found, unnamed = _declared_tasks(module, file)
    function = file.stem.replace("-", "_")
    by_name = [vars(module).get(name) for name in ("task", function)]
    candidates = [thing for thing in by_name if callable(thing) and thing is not task]
    candidates = candidates or list(unnamed.values())
    if not candidates and not found:
        raise ConfigurationError(
            f"{_relative(file)} has no task. Add a function {function}(payload), or a function with @task. "
            f"If the file is not a task, start its name with an underscore: _{file.name}."
        )
    if any(thing is not candidates[0] for thing in unnamed.values()):
        raise ConfigurationError(
            f"{_relative(file)} has more than one task without a name. Name the others: "
            f'@task("{identifier}/other").'
        )
    if candidates and candidates[0] not in found.values():
        found[identifier] = candidates[0]
        if (declared := task_of(candidates[0])) is not None:
            declared._rename(identifier)
    return found


def _load_module(file: Path) -> Functions:
    """Load all functions with ``@task``, or if there are none, all public functions."""
    module = _import_file(_unused_module_name(file.stem, file), file)
    named, unnamed = _declared_tasks(module, file)
    if named or unnamed:
        for name, thing in unnamed.items():
            if (declared := task_of(thing)) is not None:
                declared._rename(name)
        return {**unnamed, **named}
    found: Functions = {}
    for name, thing in _own_callables(module).items():
        hidden = name.startswith("_") or name not in getattr(module, "__all__", [name])
        if hidden or not inspect.isroutine(thing):
            continue
        try:
            check_text("identifier", name, max_length=MAX_IDENTIFIER_LENGTH, code="GWBID")
            takes_job_context(name, thing)
        except ConfigurationError as error:
            logger.warning("Ignoring %s in %s: %s", name, _relative(file), error)
        else:
            found[name] = thing
    return found


def _declared_tasks(module: ModuleType, file: Path) -> tuple[Functions, Functions]:
    """Return functions with ``@task``: the named ones by their identifier, the others by function name."""
    named: Functions = {}
    unnamed: Functions = {}
    for name, thing in _own_callables(module).items():
        declared = task_of(thing)
        if declared is None:
            continue
        if declared.identifier in named:
            raise ConfigurationError(
                f"{_relative(file)} has two tasks named {declared.identifier!r}. Rename one."
            )
        if declared._is_named:
            named[declared.identifier] = thing
        else:
            unnamed[name] = thing
    return named, unnamed


def _own_callables(module: ModuleType) -> Functions:
    """Return the callables defined in a module, by name. One with several names is returned once."""
    things: dict[int, str] = {}
    for name, thing in vars(module).items():
        if callable(thing) and getattr(thing, "__module__", None) == module.__name__:
            things.setdefault(id(thing), name)
    return {name: vars(module)[name] for name in things.values()}


def _create_package(folder: Path) -> str:
    """Make the folder a package, so that its modules can import each other. Return its name."""
    name = _unused_module_name(folder.name, folder)
    if name not in sys.modules:
        init = folder / "__init__.py"
        if init.is_file():
            _import_file(name, init)
        else:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(folder)]
    return name


def _unused_module_name(name: str, path: Path) -> str:
    """Return the name, with a suffix if another module already has it."""
    known = sys.modules.get(name)
    if known is None and name.isidentifier() and name not in sys.stdlib_module_names:
        return name
    locations = (getattr(known, "__file__", None), *getattr(known, "__path__", ()))
    if str(path) in locations:
        return name
    digest = hashlib.sha256(bytes(path)).hexdigest()[:8]
    return f"{_NON_WORD.sub('_', name)}_{digest}"


def _import(name: str, file: Path) -> ModuleType:
    """Import a module by name. The file is for error messages."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        logger.debug("%s cannot be imported", _relative(file), exc_info=True)
        raise ConfigurationError(f"{_location(error, file)}: {_describe(error)}") from error


def _import_file(name: str, file: Path) -> ModuleType:
    """Import a file under a module name, even if the file is not on the import path."""
    folder = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    finder = _Finder(spec)
    sys.meta_path.insert(0, finder)
    try:
        return _import(name, file)
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finder that makes one module known to the import system."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the module's spec, if the name matches."""
        return self._spec if self._spec is not None and self._spec.name == name else None


def _location(error: BaseException, file: Path) -> str:
    """Return the file and line of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    locations = [
        (frame.filename, frame.lineno) for frame in frames if not frame.filename.startswith(_NOT_USER_CODE)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        locations.append((error.filename, error.lineno))
    own = [line for name, line in locations if name == str(file)]
    if not own:
        return _relative(file)
    name, line = locations[-1]
    innermost = "" if name == str(file) else f", in {_relative(Path(name))}, line {line}"
    return f"{_relative(file)}, line {own[-1]}{innermost}"


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "the file exits the program when it is imported."
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _relative(path: Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
