"""`Events`: adds listeners and calls them."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, overload

from graphile_worker._base.logs import library_logger as logger
from graphile_worker.errors import ConfigurationError
from graphile_worker.events import EVENTS, Event

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[Any], object]

E = TypeVar("E", bound=Event)


class Events:
    """An event emitter.

    Listeners are called synchronously, in the order in which they were added. They only observe: their return
    values are ignored, and their exceptions are logged.

    Example:
        >>> from graphile_worker import Events
        >>> from graphile_worker.events import GracefulShutdown, Stop
        >>> events = Events()
        >>> received = []
        >>> _ = events.on(Stop, lambda event: received.append(event.name))
        >>> @events.on("gracefulShutdown")
        ... def log_signal(event):
        ...     received.append(event.signal)
        >>> events.emit(Stop())
        >>> events.emit(GracefulShutdown(signal="SIGTERM"))
        >>> received
        ['stop', 'SIGTERM']
    """

    def __init__(self) -> None:
        self._listeners: dict[str, tuple[Listener, ...]] = {}
        self._called: dict[str, tuple[Listener, ...]] = {}
        """The listeners of each event that has any, including those for all events."""

    @overload
    def on(self, event: type[E], listener: Callable[[E], object]) -> Callable[[E], object]: ...

    @overload
    def on(self, event: str, listener: Listener) -> Listener: ...

    @overload
    def on(self, event: type[Event] | str) -> Callable[[Listener], Listener]: ...

    def on(self, event: type[Event] | str, listener: Listener | None = None) -> Any:
        """Call the listener for each event of this kind; ``"*"`` and `Event` mean all. Also a decorator."""
        if listener is None:
            return lambda decorated: self.on(event, decorated)
        if not callable(listener):
            raise ConfigurationError(f"Invalid listener {listener!r}: it must be a function.")
        if inspect.iscoroutinefunction(listener):
            raise ConfigurationError(
                "A listener must be a plain function. It may start async work with asyncio.create_task."
            )
        name = _name(event)
        self._listen(name, (*self._listeners.get(name, ()), listener))
        return listener

    def off(self, event: type[Event] | str, listener: Listener) -> None:
        """Remove a listener."""
        name = _name(event)
        self._listen(name, tuple(known for known in self._listeners.get(name, ()) if known != listener))

    def _listen(self, name: str, listeners: tuple[Listener, ...]) -> None:
        self._listeners[name] = listeners
        for_all = self._listeners.get("*", ())
        called = {name: (*self._listeners.get(name, ()), *for_all) for name in EVENTS}
        self._called = {name: listeners for name, listeners in called.items() if listeners}

    def wants(self, event: type[Event]) -> bool:
        """Return whether the event has listeners. If not, callers need not create it."""
        return event.name in self._called

    def emit(self, event: Event) -> None:
        """Call all listeners of the event. Their exceptions are logged, never raised."""
        for listener in self._called.get(event.name, ()):
            try:
                listener(event)
            except BaseException:  # a listener that calls sys.exit() must not end the worker
                logger.exception("A listener for %r failed", event.name)


def _name(event: type[Event] | str) -> str:
    name = getattr(event, "name", event)
    if name not in EVENTS and name != "*":
        near = difflib.get_close_matches(str(name), EVENTS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "docs/reference/events.md lists them."
        raise ConfigurationError(f"Unknown event {name!r}. {hint}")
    return str(name)
