"""What a worker tells those who watch it: a class for each event.

The `name` of an event is the one it has in Graphile Worker.
"""

from graphile_worker.events.of_schedules import *  # noqa: F403
from graphile_worker.events.of_workers import *  # noqa: F403
from graphile_worker.events.of_workers import Event


def _all_events(base: type[Event] = Event) -> dict[str, type[Event]]:
    found = {base.name: base} if "name" in vars(base) and base is not Event else {}
    for derived in base.__subclasses__():
        found |= _all_events(derived)
    return found


EVENTS = _all_events()
"""All events by name."""
