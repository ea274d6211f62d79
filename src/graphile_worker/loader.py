"""From files to tasks.

In a folder ``hello.py`` is the task ``hello``, and ``mail/send.py`` is ``mail/send``: its function ``task``,
or the one named like the file, or the one with ``@task``. Any other file that can be executed is a task too.
In place of a folder a single module, ``tasks.py``, may have many.
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

from graphile_worker._runtime.handlers import read_handlers
from graphile_worker.cron import CronItem, parse_cron_items
from graphile_worker.cron.crontab import read_crontab
from graphile_worker.decorator import task
from graphile_worker.errors import ConfigurationError
from graphile_worker.executable import Executable
from graphile_worker.logs import library_logger as logger
from graphile_worker.tasks import task_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec

    from graphile_worker.options import CronItems

    Functions = dict[str, Callable[..., Any]]

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NOT_IN_A_NAME = re.compile(r"\W")
_NEVER_THE_PLACE = ("<", str(Path(__file__).parent) + os.sep, functools.__file__)
"""Where a file of the user's called us, a property or what has no file, is the place of an error."""


def load_tasks(path: str | os.PathLike[str]) -> Functions:
    """The tasks of a folder, or of a module, by their identifiers.

    Args:
        path: The folder. If it is not there, but a module of that name is, that one.

    Raises:
        ConfigurationError: Nothing is there, or something cannot be loaded: then it names file and line.
    """
    where = Path(path).absolute()
    module = where.with_name(f"{where.name}.py")
    if module.is_file() and not where.exists():
        where = module
    elif module.is_file() and where.is_dir():
        logger.warning("%s is ignored: the tasks are those of the folder %s", _shown(module), _shown(where))
    importlib.invalidate_caches()  # files may be newer than what the import system knows
    if where.is_dir():
        found = _load_folder(where)
    elif where.suffix == ".py" and where.is_file():
        found = _load_module(where)
    elif where.exists():
        raise ConfigurationError(f"There are no tasks: {where} is neither a folder nor a .py file.")
    else:
        raise ConfigurationError(
            f"There are no tasks: {where} does not exist. Make that folder, with a file for each task, or "
            "name another; or name an app: graphile-worker run module:app."
        )
    if not found:
        raise ConfigurationError(
            f"There are no tasks in {_shown(where)}. For a task hello, add hello.py to it, with a function "
            "hello(payload)."
        )
    for name, function in found.items():
        if (declared := task_of(function)) is not None:
            declared.loaded_from = str(where), name
    return found


def load_crontab(path: str | os.PathLike[str]) -> list[CronItem]:
    """The items of a crontab; strict, unless its first line is ``# graphile-worker: extended``.

    Raises:
        ConfigurationError: It cannot be read; a `CrontabError` if that is because of what is in it.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The crontab {str(path)!r} cannot be read: {error}.") from error
    return read_crontab(text, source=str(path))


def check_one_crontab(*given: object) -> None:
    """Refuse items that are given in more than one way."""
    if sum(one is not None for one in given) > 1:
        raise ConfigurationError("Pass crontab, crontab_file or cron_items: one of the three.")


def load_cron_items(
    crontab: str | None, crontab_file: str | os.PathLike[str] | None, cron_items: CronItems | None
) -> list[CronItem]:
    """The items, which are given as one of the three, or not at all."""
    check_one_crontab(crontab, crontab_file, cron_items)
    if crontab is not None:
        return parse_cron_items(read_crontab(crontab))
    if crontab_file is not None:
        return parse_cron_items(load_crontab(crontab_file))
    return parse_cron_items(cron_items or ())


def load_named(target: str) -> Any:
    """What ``module:name`` names."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigurationError(f"{target!r} names no app and no tasks; it must look like module:app.")
    spec = _spec_of(module_name)
    module = _import(module_name, Path(spec.origin or module_name))
    value: Any = module
    for name in attribute.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(value), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"The module {module_name} has no {attribute}.{hint}") from None
    return value


def _spec_of(module_name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        spec = None
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{module_name} cannot be imported: {_what(error)}") from error
    if spec is None:
        how = "Run the command where it is, or install it."
        if module_name.endswith(".py"):
            name = ".".join(Path(module_name).with_suffix("").parts)
            how = f"A module is named without .py: {name}."
        raise ConfigurationError(f"There is no module {module_name}. {how}")
    return spec


def _load_folder(folder: Path) -> Functions:
    package = _package(folder)
    found: Functions = {}
    files: dict[str, Path] = {}
    for file, parts in _files(folder, ()):
        identifier = "/".join(parts)
        if file.suffix == ".py":
            module = _import(".".join((package, *parts)), file)
            if (folder_beside := file.with_suffix("")).is_dir() and not hasattr(module, "__path__"):
                module.__path__ = [str(folder_beside)]  # so that mail/send.py can stand beside mail.py
            loaded = _tasks_of_file(module, identifier, file)
        else:
            loaded = {identifier: Executable(file)}
        for name, function in loaded.items():
            if name in files:
                raise ConfigurationError(
                    f"The task {name!r} is in {_shown(files[name])} and in {_shown(file)}. Remove one."
                )
            files[name], found[name] = file, function
    return found


def _files(folder: Path, parents: tuple[str, ...]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Files that are tasks, with the parts of their identifiers; those of a folder before its folders."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_dir(), entry.name))
    except OSError as error:
        raise ConfigurationError(f"{_shown(folder)} cannot be read: {error.strerror}.") from None
    for entry in entries:
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        name, *extensions = (entry.name,) if is_folder else entry.name.split(".")
        if not name or name.startswith((".", "_")):
            continue  # hidden, or not meant to be a task
        is_python = extensions[-1:] == ["py"]
        if not all(_NAME.fullmatch(part) for part in (name, *extensions)) or (is_python and extensions[:-1]):
            logger.info("%s is ignored: its name cannot be that of a task", _shown(path))
        elif is_folder:
            yield from _files(path, (*parents, name))
        elif not entry.is_file():
            logger.info("%s is ignored: it is no file, or a link to a folder", _shown(path))
        elif is_python or os.access(path, os.X_OK):
            yield path, (*parents, name)
        elif _is_script(path):
            logger.warning("%s is ignored: it cannot be executed. Try: chmod +x %s", *[_shown(path)] * 2)
        else:
            logger.debug("%s is ignored: it is neither Python nor can it be executed", _shown(path))


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _tasks_of_file(module: ModuleType, identifier: str, file: Path) -> Functions:
    found, unnamed = _marked(module, file)
    function = file.stem.replace("-", "_")
    by_name = [vars(module).get(name) for name in ("task", function)]
    candidates = [thing for thing in by_name if callable(thing) and thing is not task]
    candidates = candidates or list(unnamed.values())
    if not candidates and not found:
        raise ConfigurationError(
            f"{_shown(file)} has no task: give it a function {function}(payload), or one with @task. If it "
            f"is not meant to have one, let its name begin with an underscore: _{file.name}."
        )
    if any(thing is not candidates[0] for thing in unnamed.values()):
        raise ConfigurationError(
            f"{_shown(file)} has more than one task without a name. Name the others: "
            f'@task("{identifier}/other").'
        )
    if candidates and candidates[0] not in found.values():
        found[identifier] = candidates[0]
        if (declared := task_of(candidates[0])) is not None:
            declared.rename(identifier)
    return found


def _load_module(file: Path) -> Functions:
    """All of its functions with ``@task``; if it has none, all that it has and does not hide."""
    module = _import_file(_free_name(file.stem, file), file)
    named, unnamed = _marked(module, file)
    if named or unnamed:
        for name, thing in unnamed.items():
            if (declared := task_of(thing)) is not None:
                declared.rename(name)
        return {**unnamed, **named}
    found: Functions = {}
    for name, thing in _own(module).items():
        hidden = name.startswith("_") or name not in getattr(module, "__all__", [name])
        if hidden or not inspect.isroutine(thing):
            continue
        try:
            read_handlers({name: thing})
        except ConfigurationError as error:
            logger.warning("%s: %s is ignored: %s", _shown(file), name, error)
        else:
            found[name] = thing
    return found


def _marked(module: ModuleType, file: Path) -> tuple[Functions, Functions]:
    """What has ``@task``: those that it names, by that name, and the others by theirs."""
    named: Functions = {}
    unnamed: Functions = {}
    for name, thing in _own(module).items():
        declared = task_of(thing)
        if declared is None:
            continue
        if declared.identifier in named:
            raise ConfigurationError(f"{_shown(file)} has two tasks {declared.identifier!r}. Rename one.")
        if declared.named:
            named[declared.identifier] = thing
        else:
            unnamed[name] = thing
    return named, unnamed


def _own(module: ModuleType) -> Functions:
    """What can be called and was made there, by its name there; each thing once."""
    things: dict[int, str] = {}
    for name, thing in vars(module).items():
        if callable(thing) and getattr(thing, "__module__", None) == module.__name__:
            things.setdefault(id(thing), name)
    return {name: vars(module)[name] for name in things.values()}


def _package(folder: Path) -> str:
    """The folder as a package, so that its modules can import each other."""
    name = _free_name(folder.name, folder)
    if name not in sys.modules:
        init = folder / "__init__.py"
        if init.is_file():
            _import_file(name, init)
        else:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(folder)]
    return name


def _free_name(name: str, path: Path) -> str:
    """That name for a module, unless it is another's."""
    known = sys.modules.get(name)
    if known is None and name.isidentifier() and name not in sys.stdlib_module_names:
        return name
    places = (getattr(known, "__file__", None), *getattr(known, "__path__", ()))
    if str(path) in places:
        return name
    digest = hashlib.sha256(bytes(path)).hexdigest()[:8]
    return f"{_NOT_IN_A_NAME.sub('_', name)}_{digest}"


def _import(name: str, file: Path) -> ModuleType:
    """The module of that name, which is in that file."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        logger.debug("%s cannot be imported", _shown(file), exc_info=True)
        raise ConfigurationError(f"{_place(error, file)}: {_what(error)}") from error


def _import_file(name: str, file: Path) -> ModuleType:
    """The file as a module of that name, wherever it is."""
    folder = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    finder = _Finder(spec)
    sys.meta_path.insert(0, finder)
    try:
        return _import(name, file)
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Makes one module known to the import system."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Where that module is, if it is the one."""
        return self._spec if self._spec is not None and self._spec.name == name else None


def _place(error: BaseException, file: Path) -> str:
    """Where in the file it went wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        (frame.filename, frame.lineno) for frame in frames if not frame.filename.startswith(_NEVER_THE_PLACE)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    own = [line for name, line in places if name == str(file)]
    if not own:
        return _shown(file)
    name, line = places[-1]
    deeper = "" if name == str(file) else f", in {_shown(Path(name))}, line {line}"
    return f"{_shown(file)}, line {own[-1]}{deeper}"


def _what(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "it ends the program when it is imported."
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(path: Path) -> str:
    """Relative, if it is here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
