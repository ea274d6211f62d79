"""What tests of a queue need: databases, jobs that run when they are told to, and a look at them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphile_worker.testing.clocks import Clock
    from graphile_worker.testing.contexts import FakeContext, context, job
    from graphile_worker.testing.databases import Databases
    from graphile_worker.testing.draining import Summary, drain
    from graphile_worker.testing.inlining import inline
    from graphile_worker.testing.looking import assert_enqueued, assert_not_enqueued, enqueued
    from graphile_worker.testing.places import using
    from graphile_worker.testing.servers import running_server

__all__ = [
    "Clock",
    "Databases",
    "FakeContext",
    "Summary",
    "assert_enqueued",
    "assert_not_enqueued",
    "context",
    "drain",
    "enqueued",
    "inline",
    "job",
    "running_server",
    "using",
]

# Imported when they are needed: pytest loads the plugin of this package for every run, also for one that has
# nothing to do with jobs.
_HOMES = {
    name: module
    for module, names in {
        "clocks": ("Clock",),
        "contexts": ("FakeContext", "context", "job"),
        "databases": ("Databases",),
        "draining": ("Summary", "drain"),
        "inlining": ("inline",),
        "looking": ("assert_enqueued", "assert_not_enqueued", "enqueued"),
        "places": ("using",),
        "servers": ("running_server",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
