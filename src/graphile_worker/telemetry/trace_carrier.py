"""The trace in a payload: the key ``_trace``, through which traces cross programs and languages.

Its value is an object with ``trace_id``, ``span_id`` and ``flags``, which the Rust port writes and reads, and
with ``traceparent`` and ``tracestate``, which the W3C defines. Reading accepts either form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanContext, TraceFlags, TraceState, format_span_id, format_trace_id

from graphile_worker._base.payload import as_decoded

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "_trace"
_ATOMS = (str, bytes, int, float, bool, list, tuple, set, frozenset)
"""Types of payloads that are certainly no JSON objects."""
_MAX_FLAGS = 255
_MAX_STATE = 512
"""The length of a ``tracestate`` that programs must pass on. A longer one is ignored."""
_VERSION_LENGTH, _TRACE_LENGTH, _SPAN_LENGTH, _FLAGS_LENGTH = 2, 32, 16, 2


def make_carrier(span: SpanContext) -> dict[str, Any] | None:
    """Return the value that names a span; None if the span is not valid."""
    if not span.is_valid:
        return None
    trace_id, span_id = format_trace_id(span.trace_id), format_span_id(span.span_id)
    carrier: dict[str, Any] = {
        "trace_id": trace_id,
        "span_id": span_id,
        "flags": int(span.trace_flags),
        "traceparent": f"00-{trace_id}-{span_id}-{span.trace_flags:02x}",
    }
    if span.trace_state:
        carrier["tracestate"] = span.trace_state.to_header()
    return carrier


def with_carrier(payload: Any, carrier: dict[str, Any]) -> Any:
    """Return the payload with the carrier, if it is a JSON object without one; otherwise as it is."""
    if payload is None:
        return {KEY: carrier}  # a job without a payload has an empty object
    if isinstance(payload, _ATOMS):
        return payload
    fields = payload if type(payload) is dict else as_decoded(payload)
    return {**fields, KEY: carrier} if isinstance(fields, dict) and KEY not in fields else payload


def read_carriers(payload: Any) -> Iterator[SpanContext]:
    """Yield the spans that a payload names: one for an object, and one per item that has one for a list."""
    for part in payload if isinstance(payload, list) else (payload,):
        carrier = part.get(KEY) if isinstance(part, dict) else None
        if isinstance(carrier, dict) and (span := _read_carrier(carrier)) is not None:
            yield span


def _read_carrier(carrier: dict[Any, Any]) -> SpanContext | None:
    """Return the span; None if other programs have written something else here."""
    parent = carrier.get("traceparent")
    parts = parent.strip().split("-") if isinstance(parent, str) else []
    span = None
    if len(parts) >= 4 and parts[0] != "ff" and _is_hex(parts[0], _VERSION_LENGTH):  # noqa: PLR2004
        span = _span(parts[1], parts[2], parts[3], carrier.get("tracestate"))
    if span is None:
        flags = carrier.get("flags", 0)
        if isinstance(flags, int) and 0 <= flags <= _MAX_FLAGS:
            span = _span(
                carrier.get("trace_id"), carrier.get("span_id"), f"{flags:02x}", carrier.get("tracestate")
            )
    return span


def _span(trace_id: Any, span_id: Any, flags: Any, state: Any) -> SpanContext | None:
    if not (
        _is_hex(trace_id, _TRACE_LENGTH) and _is_hex(span_id, _SPAN_LENGTH) and _is_hex(flags, _FLAGS_LENGTH)
    ):
        return None
    span = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state])
        if isinstance(state, str) and len(state) <= _MAX_STATE
        else None,
    )
    return span if span.is_valid else None


def _is_hex(text: Any, length: int) -> bool:
    return isinstance(text, str) and len(text) == length and all(c in "0123456789abcdef" for c in text)
