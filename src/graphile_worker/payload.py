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
from graphile_worker.wording import without_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

RESERVED_KEYS = frozenset({"_cron", "_trace"})
"""Top-level keys that are about the job and not for the task: they are at `ctx.cron` and `ctx.trace`."""


class _UnknownTypeError(TypeError):
    """The encoder cannot write values of the type."""


def _jsonable(value: Any) -> Any:
    """For what msgspec does not know: a model of pydantic's, which nobody has who has not imported that."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    raise _UnknownTypeError(f"its type is {type(value).__name__}")


_encode = msgspec.json.Encoder(enc_hook=_jsonable).encode
_decode = msgspec.json.Decoder().decode
_DECIMALS = re.compile(rb'"-?s?(NaN|Infinity)"')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
_ESCAPE_IN_BYTES = re.compile(rb"\\(?:x([0-9a-f]{2})|.)")
"""JSON has no escapes with x: so bytes of a SQL_ASCII database are read that are not UTF-8."""
_RAW_LINE_BREAKS = str.maketrans("\n\r", "  ")
_LONGEST_PATH = 500
_SEQUENCES = frozenset({list, tuple, set, frozenset})
MAX_PAYLOAD_SIZE = 16_000_000
"""By default: bytes of JSON that a payload may have when it is added."""


def encode_payload(payload: object, *, max_size: int | None = None) -> str:
    r"""The payload as JSON text.

    Beside JSON's own types it takes what msgspec takes: dataclasses, structs, enums, dates, UUIDs,
    decimals and so on. What PostgreSQL would refuse, or would give back as something else, is refused.

    >>> encode_payload({"n": 2**60, "when": None})
    '{"n":1152921504606846976,"when":null}'
    >>> encode_payload({"ratio": float("nan")})
    Traceback (most recent call last):
    graphile_worker.errors.InvalidJobError: The argument 'ratio' holds nan, which JSON does not have.
    """
    try:
        encoded = _encode(payload)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise why_not_written(payload, error) from error
    if max_size is not None and len(encoded) > max_size:
        raise InvalidJobError(
            f"The payload has {len(encoded):,} bytes of JSON, and max_payload_size is {max_size:,}. Store "
            "large data elsewhere, for example in a table or an object store, and pass a reference to it.",
            argument="payload",
        )
    try:
        _refuse_unusual(payload, encoded)
    except RecursionError as error:  # it needs a little more of the stack than writing
        raise why_not_written(payload, error) from error
    return encoded.decode()


def _refuse_unusual(payload: object, encoded: bytes) -> None:
    """Refuse numbers that JSON does not have, and NUL characters."""
    # The encoder writes null, or for decimals a word, for numbers that JSON does not have. Where there is one
    # we look closer, and only then.
    if b"null" in encoded or _DECIMALS.search(encoded):
        plain = msgspec.to_builtins(payload, builtin_types=(Decimal,), enc_hook=_jsonable)
        if _has_unusual_number(plain):
            path, number = _locate(plain, _has_unusual_number)
            raise InvalidJobError(
                f"{_name(path)} holds {number}, which JSON does not have.", argument="payload"
            )
    # An escaped NUL passes as json, but fails as soon as anything reads it as text or jsonb.
    if b"\\u0000" in encoded:
        plain = _decode(encoded)
        if any(map(_has_nul, _leaves(plain))):
            path, _ = _locate(plain, lambda part: any(map(_has_nul, _leaves(part))))
            raise InvalidJobError(
                f"{_name(path)} holds a NUL character, which PostgreSQL cannot store as text.",
                argument="payload",
            )


def decode_payload(text: str | bytes) -> Any:
    """The value of a JSON text. Integers stay exact.

    Raises:
        ValueError: Python cannot read it, though PostgreSQL accepts it; the message says why.
    """
    error: Exception
    try:
        return _decode(text)
    except msgspec.MsgspecError as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is about this text alone
        raise ValueError(_why_not_read(text, raised)) from None
    # Numbers beyond all floats and halves of surrogate pairs: legal in PostgreSQL's json, rare, and taken by
    # the standard library. Not inside of the handler: that may fail as well, in other ways.
    try:
        return json.loads(text)
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is about this text alone
        error = raised
    raise ValueError(_why_not_read(text, error))


def as_decoded(payload: object) -> Any:
    """The payload as a worker will get it: JSON's own values."""
    text = encode_payload(payload)
    try:
        return decode_payload(text)
    except ValueError as error:
        raise InvalidJobError(f"The payload cannot be decoded: {error}.", argument="payload") from None


def decode_or_raw(text: str) -> Any:
    """The value of a JSON text or, if Python cannot read it, a `msgspec.Raw` with the text itself.

    For lists of jobs, in which one payload must not hide the others.
    """
    try:
        return decode_payload(text)
    except ValueError:
        return msgspec.Raw(text.encode())


def as_one_line(text: str) -> msgspec.Raw:
    r"""A stored JSON text as a part of a JSON document that has one line.

    >>> bytes(as_one_line('{"n":\n1e999, "name": "Ren\\xe9"}'))
    b'{"n": 1e999, "name": "Ren\\\\xe9"}'
    """
    # Between the parts of a JSON text a line break is as good as a space, and inside a string there is none.
    line = text.translate(_RAW_LINE_BREAKS)
    if "\\x" in line:
        line = _ESCAPE.sub(lambda found: found[0] if found[1] is None else "\\" + found[0], line)
    return msgspec.Raw(line.encode(errors="surrogatepass"))


def stored_bytes(text: str) -> bytes:
    r"""A stored JSON text in one line, byte for byte, with those bytes that are not UTF-8.

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
    """The payload without what is not for the task."""
    if isinstance(payload, dict) and not RESERVED_KEYS.isdisjoint(payload):
        return {key: value for key, value in payload.items() if key not in RESERVED_KEYS}
    return payload


def encode_stored(value: object) -> bytes:
    """The JSON of something that came out of a database.

    PostgreSQL's json may have halves of surrogate pairs, and Node makes them; here they are escaped. A number
    beyond all floats stays one.
    """
    try:
        encoded = _encode(value)
        if b"null" not in encoded or not _has_unusual_number(value):
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


def _why_not_read(text: str | bytes, error: Exception) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply for Python"
        case MemoryError():
            return "there is not enough memory for it"
        case json.JSONDecodeError() | UnicodeError() | msgspec.MsgspecError():
            shown = text if isinstance(text, str) else ""
            for escape in _ESCAPE.finditer(shown):
                if escape[1] is not None:
                    return f"it holds the byte 0x{escape[1]}, which is not UTF-8"
            return str(error)
        case ValueError():  # of the conversion of a number, which is all that is left
            return f"it holds an integer of more than {sys.get_int_max_str_digits()} digits"
    return str(error) or type(error).__name__


def why_not_written(payload: object, error: Exception) -> InvalidJobError:
    """The error for a payload that cannot be written as JSON, with the part of it that is the reason."""
    if isinstance(error, RecursionError):
        return InvalidJobError(
            "The payload cannot be written as JSON: it is nested too deeply, or it contains itself.",
            argument="payload",
        )
    path, part = _locate(payload, _cannot_be_written)
    where = _name(path)
    if isinstance(part, str):
        return InvalidJobError(
            f"{where} holds half of a surrogate pair, which is not text.", argument="payload"
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
    except Exception as error:  # noqa: BLE001 - it may come from a method of the value
        return without_end(str(error))
    return ""


def _cannot_be_written(part: object) -> bool:
    try:
        _encode(part)
    except Exception:  # noqa: BLE001 - it may come from a method of the value
        return True
    return False


def _locate(value: Any, is_wrong: Callable[[Any], bool]) -> tuple[str, Any]:
    """The smallest part of a value that is wrong, and its path.

    >>> _locate({"order": {"items": [1, 2.5]}}, lambda part: "2.5" in str(part))
    ('order.items[1]', 2.5)
    """
    path = ""
    while len(path) < _LONGEST_PATH:
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
                yield f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_key(key)}]", part
        case list() | tuple() | set() | frozenset():
            for index, part in enumerate(value):
                yield f"[{index}]", part
        case _:
            of_struct = getattr(value, "__struct_fields__", ())
            fields: Iterable[str] = of_struct or getattr(value, "__dataclass_fields__", ())
            for name in () if isinstance(value, type) else fields:
                yield f".{name}", getattr(value, name, None)


def _key(key: object) -> str:
    try:
        return repr(key)
    except Exception:  # noqa: BLE001 - an integer with too many digits, or a method of the key
        return f"<{type(key).__name__}>"


def _name(path: str) -> str:
    if not path:
        return "The payload"
    return f"The item {path!r} of the payload" if path.startswith("[") else f"The argument {path!r}"


def _leaves(value: Any) -> Iterator[Any]:
    """All keys of dictionaries, and all that contains nothing else; as deep as it goes."""
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


def _has_unusual_number(value: Any) -> bool:
    """Whether there is a number in it that JSON does not have. It looks at every payload with a null."""
    rest = [value]
    for one in rest:  # which grows meanwhile
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
