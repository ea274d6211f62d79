"""`Events`: where listeners are added, and events sent."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, overload

from graphile_worker.errors import ConfigurationError
from graphile_worker.events import EVENTS, Event
from graphile_worker.logs import library_logger as logger

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[Any], object]

E = TypeVar("E", bound=Event)


class Events:
    """Where listeners are added, and events sent.

    Listeners are called at once, in the order in which they were added. They observe: what they return is
    ignored, what they raise is logged.

    Example:
        >>> from graphile_worker import Events
        >>> from graphile_worker.events import GracefulShutdown, Stop
        >>> events = Events()
        >>> heard = []
        >>> _ = events.on(Stop, lambda event: heard.append(event.name))
        >>> @events.on("gracefulShutdown")
        ... def note(event):
        ...     heard.append(event.signal)
        >>> events.emit(Stop())
        >>> events.emit(GracefulShutdown(signal="SIGTERM"))
        >>> heard
        ['stop', 'SIGTERM']
    """

    def __init__(self) -> None:
        self._listeners: dict[str, tuple[Listener, ...]] = {}
        self._wanted: set[str] = set()

    @overload
    def on(self, event: type[E], listener: Callable[[E], object]) -> Callable[[E], object]: ...

    @overload
    def on(self, event: str, listener: Listener) -> Listener: ...

    @overload
    def on(self, event: type[Event] | str) -> Callable[[Listener], Listener]: ...

    def on(self, event: type[Event] | str, listener: Listener | None = None) -> Any:
        """Call the listener with each such event; ``"*"`` and `Event` mean all. Also a decorator."""
        if listener is None:
            return lambda decorated: self.on(event, decorated)
        if not callable(listener):
            raise ConfigurationError(f"A listener is a function, not {listener!r}.")
        if inspect.iscoroutinefunction(listener):
            raise ConfigurationError(
                "A listener is a plain function. In it, asyncio.create_task can start what takes longer."
            )
        name = _name(event)
        self._listen(name, (*self._listeners.get(name, ()), listener))
        return listener

    def off(self, event: type[Event] | str, listener: Listener) -> None:
        """Do not call that listener any more."""
        name = _name(event)
        self._listen(name, tuple(known for known in self._listeners.get(name, ()) if known != listener))

    def _listen(self, name: str, listeners: tuple[Listener, ...]) -> None:
        self._listeners[name] = listeners
        self._wanted = {name for name, listeners in self._listeners.items() if listeners}
        if "*" in self._wanted:
            self._wanted.update(EVENTS)

    def wants(self, event: type[Event]) -> bool:
        """Whether anybody listens: if not, there is no need to make the event."""
        return event.name in self._wanted

    def emit(self, event: Event) -> None:
        """Tell all who listen. Nothing that they raise gets out of here."""
        for listener in (*self._listeners.get(event.name, ()), *self._listeners.get("*", ())):
            try:
                listener(event)
            except BaseException:  # one that calls sys.exit() must not end the worker
                logger.exception("A listener of %r failed", event.name)


def _name(event: type[Event] | str) -> str:
    name = getattr(event, "name", event)
    if name not in EVENTS and name != "*":
        near = difflib.get_close_matches(str(name), EVENTS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "docs/events.md lists them."
        raise ConfigurationError(f"There is no event {name!r}. {hint}")
    return str(name)
