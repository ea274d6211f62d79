"""`@task`: which functions of a module are tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from graphile_worker.errors import ConfigurationError
from graphile_worker.job import MOST_IDENTIFIER, check_text

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__graphile_worker_task__"


class Mark(NamedTuple):
    """What `@task` said about a function."""

    identifier: str | None
    """None: as the file is named, or in a module of many tasks as the function is."""


@overload
def task(function: F, /) -> F: ...


@overload
def task(identifier: str, /) -> Callable[[F], F]: ...


def task(what: Any, /) -> Any:
    """Mark a function as a task, for a worker that loads its tasks from files. It stays what it is.

    >>> from graphile_worker import task
    >>> @task
    ... async def hello(payload):
    ...     print(f"Hello, {payload['name']}")
    >>> @task("mail/send")
    ... def send(payload, ctx):
    ...     ctx.logger.info("to %s", payload["to"])
    """
    if isinstance(what, str):
        check_text("identifier", what, most=MOST_IDENTIFIER, code="GWBID")
        return lambda function: _marked(function, what)
    return _marked(what, None)


def _marked(function: Any, identifier: str | None) -> Any:
    if not callable(function):
        raise ConfigurationError(f"@task is for functions, not for {function!r}.")
    setattr(function, _MARK, Mark(identifier))
    return function


def mark_of(thing: object) -> Mark | None:
    """What `@task` said about it, if it did."""
    mark = getattr(thing, _MARK, None)
    return mark if isinstance(mark, Mark) else None
