"""Carries context, such as the current trace, from a worker to its task processes and back.

A module with `capture` and `restored` takes part once a worker has called `carry`. Its name crosses the pipe,
and the other process imports it, so a task process needs no setup. Without such a module nothing is carried.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Captured: TypeAlias = dict[str, dict[str, str]]
"""What each module has captured, by the module's name."""

_MODULES: list[str] = []


def carry(module: str) -> None:
    """Let a module capture context. It has ``capture() -> dict`` and a context manager ``restored(dict)``."""
    if module not in _MODULES:
        _MODULES.append(module)


def capture() -> Captured:
    """Return the current context."""
    return {module: values for module in _MODULES if (values := sys.modules[module].capture())}


@contextmanager
def restored(captured: Captured) -> Iterator[None]:
    """Restore a captured context inside the block, in another process."""
    with ExitStack() as stack:
        for module, values in captured.items():
            carry(module)
            stack.enter_context(import_module(module).restored(values))
        yield
