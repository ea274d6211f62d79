"""Sync twins of async methods: ``stats_sync`` for ``stats``.

Without ``connection=``, the coroutine runs on an event loop in another thread. With the caller's connection,
it runs in the caller's thread without an event loop, because a sync connection belongs to that thread. Then
only a middleware could wait for something, and that is an error.

The object has two methods for its twins: `_run_on_own_loop` runs a coroutine on the event loop, and
`_on_own_loop` returns the object to use there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from graphile_worker._db.connection.any_connection import SuspendedError, run_blocking
from graphile_worker.errors import ConfigurationError
from graphile_worker.middleware.adding import suspended_middleware

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def sync_twin(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], *, listed: str | None = None
) -> Callable[Concatenate[S, P], T]:
    """Return the sync twin of a method.

    Args:
        method: The method.
        listed: A parameter that takes an iterable. It is read in the caller's thread, because it may use the
            caller's connection, as a Django queryset does.
    """
    name, signature = method.__name__, inspect.signature(method)
    place = None if listed is None else list(signature.parameters).index(listed) - 1

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def start(on: Any, given: tuple[Any, ...]) -> Coroutine[Any, Any, T]:
            coroutine: Coroutine[Any, Any, T] = getattr(on, name)(*given, **kwargs)  # of a subclass too
            return coroutine

        if kwargs.get("connection") is not None:
            return run_in_this_thread(start(self, args))
        read: list[Any] = list(args)
        if listed is not None and listed in kwargs:
            kwargs[listed] = _as_list(kwargs[listed])
        elif place is not None and place < len(read):
            read[place] = _as_list(read[place])
        result: T = self._run_on_own_loop(lambda: start(self._on_own_loop(), tuple(read)))
        return result

    functools.update_wrapper(call, method)
    vars(call).pop("__wrapped__")  # otherwise it would be taken for a coroutine function
    vars(call)["__signature__"] = signature
    call.__name__ = f"{name}_sync"
    call.__qualname__ = f"{method.__qualname__}_sync"
    call.__doc__ = f"Do the same as `{name}`, from code without an event loop."
    return call


def _as_list(given: Any) -> Any:
    """Read an iterable. The method itself refuses anything else, and what only looks like one."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return list(given)
    return given


def run_in_this_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses a sync connection of the caller, in this thread and without an event loop.

    Raises:
        ConfigurationError: A middleware waits for something, which needs an event loop.
    """
    try:
        return run_blocking(coroutine)
    except SuspendedError as error:
        name = suspended_middleware(error.coroutine)
        error.coroutine.close()
        raise ConfigurationError(
            f"{name or 'The call'} waits for something while a job is added on a sync connection, where no "
            "event loop runs. Between its beginning and its end it may only await proceed()."
        ) from None
