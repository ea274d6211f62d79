"""Payloads: from Python values to JSON that PostgreSQL stores unchanged, and back."""

from __future__ import annotations

import json
import math
import re
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._base.text import without_end
from graphile_worker.errors import InvalidJobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

RESERVED_KEYS = frozenset({"_cron", "_trace"})
"""Top-level keys that are not for the task. They are available as `ctx.cron` and `ctx.trace`."""


class _UnknownTypeError(TypeError):
    """The encoder does not support the type."""


def _encode_unknown_type(value: Any) -> Any:
    """Return an encodable form of a value that msgspec does not support: a pydantic model.

    A program that has such a model has imported pydantic, so this function does not.
    """
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    raise _UnknownTypeError(f"its type is {type(value).__name__}")


_encode = msgspec.json.Encoder(enc_hook=_encode_unknown_type).encode
_decode = msgspec.json.Decoder().decode
_NON_JSON_DECIMAL = re.compile(rb'"-?s?(NaN|Infinity)"')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
_ESCAPE_IN_BYTES = re.compile(rb"\\(?:x([0-9a-f]{2})|.)")
"""Bytes of a SQL_ASCII database that are not UTF-8 are read as ``\\xNN``, which is not a JSON escape."""
_RAW_LINE_BREAKS = str.maketrans("\n\r", "  ")
_MAX_PATH_LENGTH = 500
_SEQUENCES = frozenset({list, tuple, set, frozenset})
MAX_PAYLOAD_SIZE = 16_000_000
"""Default maximum size of a new job's payload, in bytes of JSON."""


def encode_payload(payload: object, *, max_size: int | None = None) -> str:
    r"""Return a payload as JSON text.

    Besides JSON's own types it accepts those that msgspec supports: dataclasses, structs, enums, dates,
    UUIDs, decimals and so on.

    Raises:
        InvalidJobError: PostgreSQL would reject the payload or return it changed, or it is too large.

    >>> encode_payload({"n": 2**60, "when": None})
    '{"n":1152921504606846976,"when":null}'
    >>> encode_payload({"ratio": float("nan")})
    Traceback (most recent call last):
    graphile_worker.errors.InvalidJobError: The argument 'ratio' holds nan, which JSON does not have.
    """
    try:
        encoded = _encode(payload)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise encoding_error(payload, error) from error
    if max_size is not None and len(encoded) > max_size:
        raise InvalidJobError(
            f"The payload has {len(encoded):,} bytes of JSON, and max_payload_size is {max_size:,}. Store "
            "large data elsewhere, for example in a table or an object store, and pass a reference to it.",
            argument="payload",
        )
    try:
        _reject_unstorable(payload, encoded)
    except RecursionError as error:  # the check needs a little more stack than encoding
        raise encoding_error(payload, error) from error
    return encoded.decode()


def _reject_unstorable(payload: object, encoded: bytes) -> None:
    """Reject numbers that JSON does not have, and NUL characters."""
    # The encoder writes such numbers as null, and such decimals as a word. Only payloads that contain one of
    # these need the slow check.
    if b"null" in encoded or _NON_JSON_DECIMAL.search(encoded):
        plain = msgspec.to_builtins(payload, builtin_types=(Decimal,), enc_hook=_encode_unknown_type)
        if _has_non_json_number(plain):
            path, number = _locate(plain, _has_non_json_number)
            raise InvalidJobError(
                f"{_describe_path(path)} holds {number}, which JSON does not have.", argument="payload"
            )
    # The type json accepts an escaped NUL, but reading it as text or jsonb fails.
    if b"\\u0000" in encoded:
        plain = _decode(encoded)
        if any(map(_has_nul, _leaves(plain))):
            path, _ = _locate(plain, lambda part: any(map(_has_nul, _leaves(part))))
            raise InvalidJobError(
                f"{_describe_path(path)} holds a NUL character, which PostgreSQL cannot store as text.",
                argument="payload",
            )


def decode_payload(text: str | bytes) -> Any:
    """Return the value of JSON text. Integers stay exact.

    Raises:
        ValueError: PostgreSQL accepts the text, but Python cannot decode it. The message gives the reason.
    """
    error: Exception
    try:
        return _decode(text)
    except msgspec.MsgspecError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - any error concerns only this text
        raise ValueError(_describe_decoding_error(text, raised)) from None
    # Numbers larger than any float, and halves of surrogate pairs, are legal in PostgreSQL's json. They are
    # rare, and the standard library accepts them. This is outside of the handler because it may fail too.
    try:
        return json.loads(text)
    except Exception as raised:  # noqa: BLE001 - any error concerns only this text
        error = raised
    raise ValueError(_describe_decoding_error(text, error))


def as_decoded(payload: object) -> Any:
    """Return a payload as a worker receives it, with JSON's own types.

    Raises:
        InvalidJobError: The payload cannot be encoded, or not decoded again.
    """
    text = encode_payload(payload)
    try:
        return decode_payload(text)
    except ValueError as error:
        raise InvalidJobError(f"The payload cannot be decoded: {error}.", argument="payload") from None


def decode_or_raw(text: str) -> Any:
    """Return the value of JSON text or, if Python cannot decode it, a `msgspec.Raw` with the text itself.

    Lists of jobs use it, so that one payload does not hide the other jobs.
    """
    try:
        return decode_payload(text)
    except ValueError:
        return msgspec.Raw(text.encode())


def as_one_line(text: str) -> msgspec.Raw:
    r"""Return stored JSON text as part of a JSON document on one line.

    >>> bytes(as_one_line('{"n":\n1e999, "name": "Ren\\xe9"}'))
    b'{"n": 1e999, "name": "Ren\\\\xe9"}'
    """
    # Between the tokens of JSON a line break means the same as a space. Strings contain no raw line breaks.
    line = text.translate(_RAW_LINE_BREAKS)
    if "\\x" in line:
        line = _ESCAPE.sub(lambda found: found[0] if found[1] is None else "\\" + found[0], line)
    return msgspec.Raw(line.encode(errors="surrogatepass"))


def stored_bytes(text: str) -> bytes:
    r"""Return stored JSON text as bytes on one line, including bytes that are not UTF-8.

    >>> stored_bytes('"Ren\\xe9"')
    b'"Ren\xe9"'
    """
    line = text.translate(_RAW_LINE_BREAKS).encode(errors="surrogatepass")
    if b"\\x" not in line:
        return line
    return _ESCAPE_IN_BYTES.sub(
        lambda found: found[0] if found[1] is None else bytes([int(found[1], 16)]), line
    )


def without_reserved(payload: Any) -> Any:
    """Return a payload without its reserved keys."""
    if isinstance(payload, dict) and not RESERVED_KEYS.isdisjoint(payload):
        return {key: value for key, value in payload.items() if key not in RESERVED_KEYS}
    return payload


def encode_stored(value: object) -> bytes:
    """Return the JSON of a value that was read from the database.

    PostgreSQL's json may contain halves of surrogate pairs, for example from Node. They are escaped. A number
    larger than any float stays one.
    """
    try:
        encoded = _encode(value)
        if b"null" not in encoded or not _has_non_json_number(value):
            return encoded
        return _encode(_with_large_numbers(value))
    except (ValueError, msgspec.MsgspecError):
        return json.dumps(value, default=str).encode()


def _with_large_numbers(value: Any) -> Any:
    match value:
        case float() if math.isinf(value):
            return msgspec.Raw(b"1e999" if value > 0 else b"-1e999")
        case dict():
            return {key: _with_large_numbers(item) for key, item in value.items()}
        case list():
            return [_with_large_numbers(item) for item in value]
    return value


def _describe_decoding_error(text: str | bytes, error: Exception) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply for Python"
        case MemoryError():
            return "there is not enough memory to decode it"
        case json.JSONDecodeError() | UnicodeError() | msgspec.MsgspecError():
            shown = text if isinstance(text, str) else ""
            for escape in _ESCAPE.finditer(shown):
                if escape[1] is not None:
                    return f"it holds the byte 0x{escape[1]}, which is not UTF-8"
            return str(error)
        case ValueError():  # the only remaining cause is the conversion of an integer
            return f"it holds an integer of more than {sys.get_int_max_str_digits()} digits"
    return str(error) or type(error).__name__


def encoding_error(payload: object, error: Exception) -> InvalidJobError:
    """Return the error for a payload that cannot be written as JSON. It names the part that causes it."""
    if isinstance(error, RecursionError):
        return InvalidJobError(
            "The payload cannot be written as JSON: it is nested too deeply, or it contains itself.",
            argument="payload",
        )
    path, part = _locate(payload, _is_unencodable)
    where = _describe_path(path)
    if isinstance(part, str):
        return InvalidJobError(
            f"{where} holds half of a surrogate pair, which is not valid text.", argument="payload"
        )
    if isinstance(part, int):
        most = sys.get_int_max_str_digits()
        return InvalidJobError(
            f"{where} cannot be written as JSON: it is an integer of more than {most} digits. Pass it as a "
            "str, for example in hexadecimal.",
            argument="payload",
        )
    return InvalidJobError(
        f"{where} cannot be written as JSON: {_reason(part) or error}. Pass a str, int, float, bool, None, "
        "list or dict, or a dataclass, a msgspec.Struct or a pydantic model.",
        argument="payload",
    )


def _reason(part: object) -> str:
    try:
        _encode(part)
    except Exception as error:  # noqa: BLE001 - a method of the value may raise anything
        return without_end(str(error))
    return ""


def _is_unencodable(part: object) -> bool:
    try:
        _encode(part)
    except Exception:  # noqa: BLE001 - a method of the value may raise anything
        return True
    return False


def _locate(value: Any, is_wrong: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the path of the smallest invalid part of a value, and the part itself.

    >>> _locate({"order": {"items": [1, 2.5]}}, lambda part: "2.5" in str(part))
    ('order.items[1]', 2.5)
    """
    path = ""
    while len(path) < _MAX_PATH_LENGTH:
        for step, part in _parts(value):
            if is_wrong(part):
                path, value = path + step if path else step.removeprefix("."), part
                break
        else:
            break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            for key, part in value.items():
                yield (
                    f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_format_key(key)}]",
                    part,
                )
        case list() | tuple() | set() | frozenset():
            for index, part in enumerate(value):
                yield f"[{index}]", part
        case _:
            of_struct = getattr(value, "__struct_fields__", ())
            fields: Iterable[str] = of_struct or getattr(value, "__dataclass_fields__", ())
            for name in () if isinstance(value, type) else fields:
                yield f".{name}", getattr(value, name, None)


def _format_key(key: object) -> str:
    try:
        return repr(key)
    except Exception:  # noqa: BLE001 - an integer with too many digits, or the key's own __repr__
        return f"<{type(key).__name__}>"


def _describe_path(path: str) -> str:
    if not path:
        return "The payload"
    return f"The item {path!r} of the payload" if path.startswith("[") else f"The argument {path!r}"


def _leaves(value: Any) -> Iterator[Any]:
    """Yield all keys of dictionaries and all values that are not containers, at any depth."""
    rest = [value]
    while rest:
        one = rest.pop()
        match one:
            case dict():
                yield from one
                rest += one.values()
            case list() | tuple() | set() | frozenset():
                rest += one
            case _:
                yield one


def _has_non_json_number(value: Any) -> bool:
    """Return whether a value contains a number that JSON does not have.

    It runs for every payload with a null, so it is optimized for speed.
    """
    rest = [value]
    for one in rest:  # the loop appends to the list
        kind = type(one)
        if kind is str or kind is int or one is None:
            continue
        if kind is dict:
            rest += one.values()
        elif kind in _SEQUENCES:
            rest += one
        elif (isinstance(one, float) and not math.isfinite(one)) or (
            isinstance(one, Decimal) and not one.is_finite()  # math cannot read Decimal("sNaN")
        ):
            return True
    return False


def _has_nul(value: object) -> bool:
    return isinstance(value, str) and "\0" in value
