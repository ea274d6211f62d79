"""Decodes percent-encoded text, as in a URL, the way Node does."""

from __future__ import annotations

import re

_CODES = re.compile(r"(?:%[0-9a-fA-F]{2})+")
_ENCODED_BYTE = re.compile(r"%([0-9a-fA-F]{2})")


def decode_percents(text: str) -> str:
    """Decode a percent-encoded text.

    >>> decode_percents("a+b%20c%E2%82%AC"), decode_percents("100%")
    ('a b c€', '100%')
    """
    text = text.replace("+", " ")
    if not _CODES.search(text):
        return text
    try:
        decoded = _CODES.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode(), text)
    except UnicodeDecodeError:
        return _decode_invalid(text)
    return _decode_invalid(text) if "%" in _CODES.sub("", text) else decoded


def _decode_invalid(text: str) -> str:
    """Decode a text with an invalid code. Node then keeps only the low byte of each UTF-16 unit."""
    parts = _ENCODED_BYTE.split(text)  # every second part holds the digits of a code
    return b"".join(
        bytes.fromhex(part) if index % 2 else part.encode("utf-16-le", "surrogatepass")[::2]
        for index, part in enumerate(parts)
    ).decode(errors="replace")
