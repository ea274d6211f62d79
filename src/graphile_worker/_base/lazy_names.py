"""Public names that are imported when they are first used.

A package lists its public names once, in an ``__init__.pyi`` next to its ``__init__.py``: type checkers and
editors read that file, and so does this module. Importing the package stays quick, because nothing that the
names need is imported with it.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_names(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package with an ``__init__.pyi``."""
    homes = _read_stub(package)
    public = sorted(name for name, home in homes.items() if home is not None)

    def get_attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{package}.{name}") if home is None else getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return public, get_attribute, list_names


def _read_stub(package: str) -> dict[str, str | None]:
    """Return the module that defines each name, or None for a name that is a module itself."""
    folder = sys.modules[package].__path__[0]
    with open(f"{folder}/__init__.pyi", encoding="utf-8") as stub:  # noqa: PTH123 - pathlib doubles the import time
        tree = ast.parse(stub.read())
    return {
        alias.name: None if statement.module == package else statement.module
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
