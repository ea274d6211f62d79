"""Payloads: Python values to JSON that PostgreSQL keeps as it is, and back."""

from __future__ import annotations

import json
import math
import re
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker.errors import InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Iterator

RESERVED_KEYS = frozenset({"_cron", "_trace"})
"""Top-level keys that are about the job and not for the task: they are at `ctx.cron` and `ctx.trace`."""


def _jsonable(value: Any) -> Any:
    """For what msgspec does not know: a model of pydantic's, which nobody has who has not imported that."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_encode = msgspec.json.Encoder(enc_hook=_jsonable).encode
_decode = msgspec.json.Decoder().decode
_DECIMALS = re.compile(rb'"-?s?(NaN|Infinity)"')


def encode_payload(payload: object) -> str:
    r"""The payload as JSON text.

    Beside JSON's own types it takes what msgspec takes: dataclasses, structs, enums, dates, UUIDs,
    decimals and so on. What PostgreSQL would refuse, or would give back as something else, is refused.

    >>> encode_payload({"n": 2**60, "when": None})
    '{"n":1152921504606846976,"when":null}'
    >>> encode_payload({"ratio": float("nan")})
    Traceback (most recent call last):
    graphile_worker.errors.InvalidJobError: The payload holds nan, which JSON does not have.
    """
    try:
        encoded = _encode(payload)
    except UnicodeEncodeError as error:
        raise InvalidJobError(
            "The payload holds half of a surrogate pair, which is no text.", argument="payload"
        ) from error
    except (TypeError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidJobError(
            f"The payload cannot be written as JSON: {error}.", argument="payload"
        ) from error
    # The encoder writes null, or for decimals a word, for numbers that JSON does not have. Where there is one
    # we look closer, and only then.
    if b"null" in encoded or _DECIMALS.search(encoded):
        for number in _unusual_numbers(
            msgspec.to_builtins(payload, builtin_types=(Decimal,), enc_hook=_jsonable)
        ):
            raise InvalidJobError(
                f"The payload holds {number}, which JSON does not have.", argument="payload"
            )
    text = encoded.decode()
    # An escaped NUL passes as json, but fails as soon as anything reads it as text or jsonb.
    if "\\u0000" in text and any("\0" in found for found in _strings(_decode(encoded))):
        raise InvalidJobError(
            "The payload holds a NUL character, which PostgreSQL cannot store as text.", argument="payload"
        )
    return text


def decode_payload(text: str | bytes) -> Any:
    """The value of a JSON text. Integers stay exact, whatever their size.

    A text that is nested deeper than Python can follow stays text, so that it spoils no list it is in.
    """
    try:
        return _decode(text)
    except msgspec.MsgspecError:
        # Numbers beyond all floats and halves of surrogate pairs: legal in PostgreSQL's json, rare, and
        # taken by the standard library.
        return json.loads(text)
    except RecursionError:
        return text if isinstance(text, str) else text.decode()


def without_reserved(payload: Any) -> Any:
    """The payload without what is not for the task."""
    if isinstance(payload, dict) and not RESERVED_KEYS.isdisjoint(payload):
        return {key: value for key, value in payload.items() if key not in RESERVED_KEYS}
    return payload


def encode_stored(value: object) -> bytes:
    """The JSON of something that came out of a database.

    PostgreSQL's json may have halves of surrogate pairs, and Node makes them; here they are escaped.
    """
    try:
        return _encode(value)
    except (ValueError, msgspec.MsgspecError):
        return json.dumps(value, default=str).encode()


def _unusual_numbers(value: object) -> Iterator[float | Decimal]:
    match value:
        case float() | Decimal():
            if not math.isfinite(value):
                yield value
        case dict():
            for item in value.values():
                yield from _unusual_numbers(item)
        case list() | tuple() | set() | frozenset():
            for item in value:
                yield from _unusual_numbers(item)


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield str(key)
                yield from _strings(item)
        case list():
            for item in value:
                yield from _strings(item)
