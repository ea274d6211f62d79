"""The context of OpenTelemetry: suppressed for a worker's own statements, and carried into task processes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context, propagate
from opentelemetry.trace import INVALID_SPAN, set_span_in_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The instrumentations of libraries check both keys. The API has no public name for the first.
_SUPPRESSED = [
    *filter(None, [getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None)]),
    "suppress_instrumentation",
]
_OWN_WORK = context.create_key("graphile-worker-own-work")


@contextmanager
def own_work() -> Iterator[None]:
    """Suppress the instrumentation of libraries inside the block, and in everything that it starts.

    The current span is left too: a worker that was started inside a span is not a part of it.
    """
    changed = set_span_in_context(INVALID_SPAN)
    for key in (*_SUPPRESSED, _OWN_WORK):
        changed = context.set_value(key, True, changed)
    token = context.attach(changed)
    try:
        yield
    finally:
        context.detach(token)


def is_suppressed() -> bool:
    """Return whether the user's code has suppressed instrumentation."""
    return any(map(context.get_value, _SUPPRESSED)) and not context.get_value(_OWN_WORK)


def without_own_work() -> context.Context:
    """Return the current context, in which nothing is suppressed if it was for the worker's own work."""
    current = context.get_current()
    if context.get_value(_OWN_WORK):
        for key in (*_SUPPRESSED, _OWN_WORK):
            current = context.set_value(key, None, current)
    return current


def capture() -> dict[str, str]:
    """Return the current context in the form of the program's propagators."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


@contextmanager
def restored(values: Mapping[str, str]) -> Iterator[None]:
    """Restore the context inside the block."""
    token = context.attach(propagate.extract(values))
    try:
        yield
    finally:
        context.detach(token)
