"""JSON5, the notation of payloads in a crontab, as Node understands and stores it."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_PLAIN = 1e21
"""JavaScript writes integers from here on with an exponent."""
_WHERE = re.compile(r"<string>:\d+ (?P<what>.*) at column (?P<column>\d+)", re.DOTALL)
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_MOST_INDEX = 2**32 - 2


_STRING_OR_COMMENT = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n\r\u2028\u2029]*"""
_NAME = re.compile(rf"{_STRING_OR_COMMENT}|(?P<name>[^\s:,{{}}\[\]'\"/]+)", re.DOTALL)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


class PayloadFaultError(ValueError):
    """It is no JSON5.

    Attributes:
        column: Where; the first is 0.
    """

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


def parse_payload(text: str) -> dict[str, Any]:
    """The object that a text in JSON5 means, once Node has written it as JSON.

    >>> parse_payload("{big: 0xFFFFFFFFFFFFFFFF, none: NaN, again: 1, again: 2.0, }")
    {'big': 18446744073709552000, 'none': None, 'again': 2}
    """
    try:
        return _read(json.loads, text)
    except ValueError:
        pass  # it is more than JSON, which is read a hundred times faster
    except RecursionError:
        raise PayloadFaultError("the payload is nested too deeply", 0) from None
    import json5  # noqa: PLC0415 - it takes its time, and most programs have no use for it

    try:
        payload = _read(json5.loads, text)
    except ValueError as error:
        found = _WHERE.fullmatch(str(error))
        if found is None:
            raise PayloadFaultError(f"the payload is no JSON5: {error}", 0) from None
        what = found["what"].replace("Unexpected", "unexpected")
        raise PayloadFaultError(f"the payload is no JSON5: {what}", int(found["column"]) - 1) from None
    except RecursionError:
        raise PayloadFaultError("the payload is nested too deeply", 0) from None
    _check_names(text)
    return payload


def _check_names(text: str) -> None:
    """Refuse keys without quotes in which an escape stands for what could not stand there itself."""
    if "\\u" not in text:
        return
    for found in _NAME.finditer(text):
        name = found["name"] or ""
        if "\\" in name and not _is_name(_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), name)):
            raise PayloadFaultError(f"the payload is no JSON5: {name!r} is no key", found.start())


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
    return _double(text) if base != 16 else _shown(_of_hex(text))  # noqa: PLR2004


def _of_hex(text: str) -> float:
    try:
        return float(int(text, 16))
    except OverflowError:
        return math.inf


def _double(text: str) -> int | float | None:
    return _shown(float(text))


def _shown(number: float) -> int | float | None:
    """JavaScript has no numbers but doubles, and JSON no infinity; integers are written by their digits."""
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < _MOST_PLAIN:
        return int(Decimal(repr(number)))
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keys that are indexes come first, in JavaScript; the last value of a key counts, at its first place."""
    found = {_text(key): _text(value) for key, value in pairs}
    indexes = sorted((int(key), key) for key in found if _INDEX.fullmatch(key) and int(key) <= _MOST_INDEX)
    return {key: found[key] for key in [*(key for _, key in indexes), *found]} if indexes else found


def _text(value: Any) -> Any:
    r"""Pairs of surrogates that were written one by one (``\ud83d\ude00``) are one character."""
    if isinstance(value, list):
        return [_text(item) for item in value]
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
