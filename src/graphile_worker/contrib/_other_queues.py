"""What the adapters for people from other job queues share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping


def reject_options(where: str, given: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Raise an error for options that have no counterpart here.

    Args:
        where: The name of the method, for the message.
        given: The options that the caller passed.
        advice: What to do instead, for each option of the other queue.
    """
    for name in given:
        instead = advice.get(name, "For the options that there are, see Task.using.")
        raise InvalidJobError(f"{where} does not support {name}=. {instead}", argument=name)


def change_class(thing: object, kind: type[Any], decorator: str) -> Any:
    """Give a task the methods of another class.

    The task stays the same object, because its app knows it already.

    Raises:
        ConfigurationError: The object is not a task.
    """
    if not isinstance(thing, Task):
        name = getattr(thing, "__qualname__", repr(thing))
        raise ConfigurationError(f"{name} is not a task. Put @{decorator} above @app.task, on a function.")
    thing.__class__ = kind
    return thing
