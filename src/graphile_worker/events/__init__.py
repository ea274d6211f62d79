"""The events that a worker emits: one class per event.

The modules are named after the subject of their events: `job`, `worker` (a slot of a worker), `pool` (a
worker process), `cron` and `dashboard`. `emitter` calls the listeners. The worker's packages emit events,
and users listen. Nothing in here knows how a worker works.

The `name` of an event is the same as in Graphile Worker.
"""

from graphile_worker.events.base import *  # noqa: F403
from graphile_worker.events.base import Event
from graphile_worker.events.cron import *  # noqa: F403
from graphile_worker.events.dashboard import *  # noqa: F403
from graphile_worker.events.job import *  # noqa: F403
from graphile_worker.events.pool import *  # noqa: F403
from graphile_worker.events.worker import *  # noqa: F403


def _all_events(base: type[Event] = Event) -> dict[str, type[Event]]:
    found = {base.name: base} if "name" in vars(base) and base is not Event else {}
    for derived in base.__subclasses__():
        found |= _all_events(derived)
    return found


EVENTS = _all_events()
"""All events by name."""
