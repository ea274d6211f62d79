"""Parses the JSON5 payloads of a crontab to the values that Node would store."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_EXPONENT_FROM = 1e21
"""JavaScript writes integers from this one on with an exponent."""
_PARSER_ERROR = re.compile(r"<string>:\d+ (?P<what>.*) at column (?P<column>\d+)", re.DOTALL)
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_INDEX = 2**32 - 2


_STRING_OR_COMMENT = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n\r\u2028\u2029]*"""
_NAME = re.compile(rf"{_STRING_OR_COMMENT}|(?P<name>[^\s:,{{}}\[\]'\"/]+)", re.DOTALL)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


class PayloadFaultError(ValueError):
    """A payload is not valid JSON5.

    Attributes:
        column: The column of the problem. The first is 0.
    """

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


def parse_payload(text: str) -> dict[str, Any]:
    """Parse a JSON5 object, with the values that Node writes as JSON.

    >>> parse_payload("{big: 0xFFFFFFFFFFFFFFFF, none: NaN, again: 1, again: 2.0, }")
    {'big': 18446744073709552000, 'none': None, 'again': 2}
    """
    try:
        return _read(json.loads, text)
    except ValueError:
        pass  # it may be JSON5; JSON is tried first because it is parsed a hundred times faster
    except RecursionError:
        raise PayloadFaultError("the payload is nested too deeply", 0) from None
    import json5  # noqa: PLC0415 - the import is slow, and most programs don't need it

    try:
        payload = _read(json5.loads, text)
    except ValueError as error:
        found = _PARSER_ERROR.fullmatch(str(error))
        if found is None:
            raise PayloadFaultError(f"the payload is not valid JSON5: {error}", 0) from None
        what = found["what"].replace("Unexpected", "unexpected")
        raise PayloadFaultError(f"the payload is not valid JSON5: {what}", int(found["column"]) - 1) from None
    except RecursionError:
        raise PayloadFaultError("the payload is nested too deeply", 0) from None
    _check_names(text)
    return payload


def _check_names(text: str) -> None:
    """Reject unquoted keys with an escape for a character that is not allowed in such a key."""
    if "\\u" not in text:
        return
    for found in _NAME.finditer(text):
        name = found["name"] or ""
        if "\\" in name and not _is_name(_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name)):
            raise PayloadFaultError(f"the payload is not valid JSON5: invalid key {name!r}", found.start())


def _is_name(text: str) -> bool:
    plain = re.sub("[$\u200c\u200d]", "_", text)
    return plain.isidentifier() and text[0] not in "\u200c\u200d"


def _read(loads: Callable[..., Any], text: str) -> dict[str, Any]:
    return loads(  # type: ignore[no-any-return]
        text,
        parse_int=_integer,
        parse_float=_double,
        parse_constant=lambda _: None,
        object_pairs_hook=_object,
    )


def _integer(text: str, base: int = 10) -> int | float | None:
    return _double(text) if base != 16 else _javascript_number(_from_hex(text))  # noqa: PLR2004


def _from_hex(text: str) -> float:
    try:
        return float(int(text, 16))
    except OverflowError:
        return math.inf


def _double(text: str) -> int | float | None:
    return _javascript_number(float(text))


def _javascript_number(number: float) -> int | float | None:
    """Return a double as JavaScript writes it to JSON: infinity as null, an integer by its digits."""
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < _EXPONENT_FROM:
        return int(Decimal(repr(number)))
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Order keys as JavaScript does, array indexes first. The last value of a repeated key counts."""
    found = {_join_surrogates(key): _join_surrogates(value) for key, value in pairs}
    indexes = sorted((int(key), key) for key in found if _INDEX.fullmatch(key) and int(key) <= _MAX_INDEX)
    return {key: found[key] for key in [*(key for _, key in indexes), *found]} if indexes else found


def _join_surrogates(value: Any) -> Any:
    r"""Join escaped surrogate pairs (``\ud83d\ude00``) into one character."""
    if isinstance(value, list):
        return [_join_surrogates(item) for item in value]
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
