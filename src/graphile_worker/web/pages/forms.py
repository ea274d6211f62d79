"""Read the forms that pages send."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.datastructures import ImmutableMultiDict

from graphile_worker.errors import InvalidJobError
from graphile_worker.web.errors import TooLargeError, WebError

if TYPE_CHECKING:
    from typing import TypeAlias

    from starlette.requests import Request

    Form: TypeAlias = ImmutableMultiDict[str, str]

MAX_BYTES = 2_000_000
_MAX_FIELDS = 5000
_MAX_DIGITS = 9
_DELAY = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,6})?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "s": 1, "sec": 1, "second": 1, "seconds": 1,
    "m": 60, "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600,
    "d": 86_400, "day": 86_400, "days": 86_400,
    "w": 604_800, "week": 604_800, "weeks": 604_800,
}  # fmt: skip


async def read_form(request: Request) -> Form:
    """Return the fields of a form that a browser sent.

    Raises:
        WebError: It is not a form, or too large.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in {"", "application/x-www-form-urlencoded"}:
        raise WebError(f"The body is {kind[:60]!r}; it must be application/x-www-form-urlencoded.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise TooLargeError(f"The form is larger than {MAX_BYTES:,} bytes. Use the API instead.")
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except (UnicodeDecodeError, ValueError) as error:
        raise WebError(f"The form cannot be read: {error}.") from error
    return ImmutableMultiDict(fields)


def read_text(form: Form, name: str) -> str | None:
    """Return a text that a form has; None if the field is empty."""
    return form.get(name, "").strip() or None


def read_number(form: Form, name: str) -> int | None:
    """Return a number that a form has; None if the field is empty.

    Raises:
        InvalidJobError: It is not a whole number.
    """
    text = form.get(name, "").strip()
    if not text:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
        raise InvalidJobError(f"{name} is {text[:40]!r}; it must be a whole number.", argument=name)
    return int(text)


def read_time(form: Form) -> str | None:
    """Return the time in the field ``delay`` or ``run_at`` as ISO 8601 text; None if both are empty.

    Raises:
        InvalidJobError: It cannot be read.
    """
    delay, moment = form.get("delay", "").strip(), form.get("run_at", "").strip()
    if delay:
        try:
            return (datetime.now(UTC) + timedelta(seconds=read_delay(delay))).isoformat()
        except OverflowError:
            raise InvalidJobError(f"The delay {delay[:60]!r} is too long.", argument="run_at") from None
    if not moment:
        return None
    try:
        read = datetime.fromisoformat(moment)
    except ValueError:
        raise InvalidJobError(
            f"The time is {moment[:60]!r}; write for example 2030-01-31T12:00:00.", argument="run_at"
        ) from None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).isoformat()


def read_delay(text: str) -> float:
    """Return a delay in seconds.

    Raises:
        InvalidJobError: It cannot be read.

    >>> read_delay("10 min"), read_delay("1.5h"), read_delay("30")
    (600.0, 5400.0, 30.0)
    """
    match = _DELAY.fullmatch(text.strip())
    factor = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise InvalidJobError(
            f"The delay is {text[:60]!r}; write for example 10 min, 2 h or 1 d.", argument="run_at"
        )
    return float(match["number"]) * factor
