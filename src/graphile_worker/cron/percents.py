"""Percent codes, as in a web address, and as Node decodes them."""

from __future__ import annotations

import re

_CODES = re.compile(r"(?:%[0-9a-fA-F]{2})+")
_CODE_OF_A_BYTE = re.compile(r"%([0-9a-fA-F]{2})")


def decode_percents(text: str) -> str:
    """What the text means.

    >>> decode_percents("a+b%20c%E2%82%AC"), decode_percents("100%")
    ('a b c€', '100%')
    """
    text = text.replace("+", " ")
    if not _CODES.search(text):
        return text
    try:
        decoded = _CODES.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode(), text)
    except UnicodeDecodeError:
        return _decode_broken(text)
    return _decode_broken(text) if "%" in _CODES.sub("", text) else decoded


def _decode_broken(text: str) -> str:
    """If one code is wrong, Node takes bytes for all of it: of what is no ASCII half of each unit is lost."""
    parts = _CODE_OF_A_BYTE.split(text)  # every other one is a code's digits
    return b"".join(
        bytes.fromhex(part) if place % 2 else part.encode("utf-16-le", "surrogatepass")[::2]
        for place, part in enumerate(parts)
    ).decode(errors="replace")
