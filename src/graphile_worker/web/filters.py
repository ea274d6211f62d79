"""The text with which people select jobs: ``task:send_email error:TimeoutError ann``.

A qualifier is a name, a colon and a value. A value with spaces stands in double quotes. All other words are
text to search for. Every qualifier and the text must match.

>>> read = parse_filter('queue:"a b" flag:slow payload.user.id:7 Ann')
>>> read.queue_name, read.flags, read.payload, read.search
('a b', ('slow',), ((('user', 'id'), '7'),), 'Ann')
>>> format_filter(read)
'queue:"a b" flag:slow payload.user.id:7 Ann'
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._client.bulk import JobFilter
from graphile_worker.errors import InvalidJobError
from graphile_worker.job import check_text
from graphile_worker.web.models import Tab

if TYPE_CHECKING:
    from collections.abc import Iterable

QUALIFIERS = ("task", "queue", "key", "flag", "worker", "id", "error", "fingerprint", "failed")
"""The qualifiers; and ``payload.``, which is followed by a path."""
MAX_LENGTH = 2000
"""Characters of a filter."""
_FIELDS = {
    "task": "task",
    "queue": "queue_name",
    "key": "key",
    "worker": "locked_by",
    "error": "error_type",
    "fingerprint": "fingerprint",
    "failed": "failed_within",
}
FAILED_WITHIN = {"1h": 3600, "3h": 10_800, "24h": 86_400, "3d": 259_200, "7d": 604_800}
"""The values of ``failed:``, in seconds."""
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_WORD = re.compile(
    rf'(?:(?P<name>payload(?:\.(?:{_QUOTED}|[^\s".:]+))+|[a-z]+):)?(?P<value>{_QUOTED}|[^\s"][^\s]*|)(?=\s|$)'
    r"|(?P<odd>\S+)"
)
_UNFINISHED = re.compile(rf"(?:{'|'.join(QUALIFIERS)}|payload\..+):\"")
_PART = re.compile(rf'{_QUOTED}|[^\s".:]+')
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_PLAIN = re.compile(r'[^\s"]+')
_MAX_IDS = 1000
_MAX_PATHS = 4


class FilterError(InvalidJobError):
    """A filter cannot be read."""


class Filter(JobFilter, frozen=True, kw_only=True):
    """Which jobs to list or to change. A value that is None or empty selects everything."""

    tab: Tab | None = None
    flags: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    fingerprint: str | None = None
    failed_within: str | None = None
    """One of `FAILED_WITHIN`: only jobs whose last failure is not older."""
    payload: tuple[tuple[tuple[str, ...], str], ...] = ()
    """Pairs of a path in the payload and the text of the value there."""
    search_payload: bool = True
    """Whether `search` may look into payloads. Set for viewers who may not see them."""
    above_id: int | None = None
    """Only jobs with a higher id. Set for filters that have to read each job."""

    @property
    def reads_payloads(self) -> bool:
        """Whether payloads decide which jobs match."""
        return bool(self.payload) or (self.search is not None and self.search_payload)

    @property
    def is_slow(self) -> bool:
        """Whether each job has to be read, because no index helps."""
        return bool(self.payload) or self.search is not None

    @property
    def is_empty(self) -> bool:
        """Whether it selects all jobs of its tab."""
        return self == Filter(tab=self.tab, search_payload=self.search_payload, above_id=self.above_id)

    def replace(self, **changes: Any) -> Filter:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def parameters(self) -> dict[str, object]:
        """Return the filter as parameters of the SQL statements."""
        filters = super().parameters()
        text = filters.pop("having_text")
        tab = self.tab
        filters["having_state"] = "first_run" if tab is Tab.SCHEDULED else tab
        return {
            "having_id_any": list(self.ids) or None,
            **filters,
            "having_flags": list(self.flags) or None,
            "having_fingerprint": self.fingerprint,
            "having_failed_within": FAILED_WITHIN[self.failed_within] if self.failed_within else None,
            **{
                f"having_payload_{place}": [value, *path]
                for place, (path, value) in enumerate(self.payload, 1)
            },
            "having_text": text if self.search_payload else None,
            "having_text_outside_payload": None if self.search_payload else text,
            "above_id": self.above_id,
        }


def parse_filter(text: str, tab: Tab | str | None = None) -> Filter:
    """Return the filter that a text describes.

    Raises:
        FilterError: The text is not a filter. The message says why.
    """
    if len(text) > MAX_LENGTH:
        raise FilterError(f"The filter has {len(text)} characters; the maximum is {MAX_LENGTH}.")
    found: dict[str, Any] = {"flags": (), "ids": (), "payload": ()}
    words: list[str] = []
    for match in _WORD.finditer(text):
        name, value, odd = match["name"], match["value"], match["odd"]
        if name is None or not (name in QUALIFIERS or name.startswith("payload.")):
            if _UNFINISHED.match(match[0]):
                odd = match[0]
            elif match[0]:  # an unknown name is text, for example https://...
                words.append(_unquote(match[0]))
        else:
            _add_qualifier(found, name, _unquote(value))
        if odd is not None:
            raise FilterError(
                f'A quotation mark is not closed in {odd[:100]!r}. Close it, or write \\" inside quotes.'
            )
    if words:
        found["search"] = " ".join(words)
    for field, value in found.items():
        for one in [value] if isinstance(value, str) else []:
            _check(field, one)
    return Filter(tab=read_tab(tab), **found)


def read_tab(tab: Tab | str | None) -> Tab | None:
    """Return the tab with this name; None for all jobs.

    Raises:
        FilterError: There is none.
    """
    if not tab:
        return None
    if tab not in set(Tab):
        raise FilterError(f"Unknown state {str(tab)[:60]!r}: it must be one of {', '.join(Tab)}.")
    return Tab(tab)


def format_filter(selected: Filter) -> str:
    """Return the text that `parse_filter` reads as this filter, without its tab."""
    parts = [
        f"{name}:{_quote(value)}"
        for name, field in _FIELDS.items()
        if (value := getattr(selected, field)) is not None
    ]
    parts += [f"flag:{_quote(flag)}" for flag in selected.flags]
    parts += [f"id:{one}" for one in selected.ids]
    for path, value in selected.payload:
        name = ".".join(part if re.fullmatch(r'[^\s".:]+', part) else _quoted(part) for part in path)
        parts.append(f"payload.{name}:{_quote(value)}")
    if selected.search is not None:
        text = selected.search
        parts.append(text if parse_filter_text(text) == text else _quoted(text))
    return " ".join(parts)


def parse_filter_text(text: str) -> str | None:
    """Return what `parse_filter` would search for; None if the text has qualifiers or cannot be read."""
    try:
        read = parse_filter(text)
    except FilterError:
        return None
    return read.search if read == Filter(search=read.search) else None


def _add_qualifier(found: dict[str, Any], name: str, value: str) -> None:
    if not value:
        raise FilterError(f"{name}: has no value. Write it right after the colon.")
    if name == "flag":
        _check("flag", value)
        found["flags"] = (*found["flags"], value)
    elif name == "id":
        found["ids"] = (*found["ids"], *_read_ids(value.split(",")))
        if len(found["ids"]) > _MAX_IDS:
            raise FilterError(f"The filter has {len(found['ids'])} ids; the maximum is {_MAX_IDS}.")
    elif name.startswith("payload."):
        path = tuple(_unquote(part) for part in _PART.findall(name.removeprefix("payload.")))
        for one in (*path, value):
            _check(name, one)
        found["payload"] = (*found["payload"], (path, value))
        if len(found["payload"]) > _MAX_PATHS:
            raise FilterError(f"The filter has more than {_MAX_PATHS} values of payloads.")
    elif _FIELDS[name] in found:
        raise FilterError(f"The filter has {name}: twice. A job has only one.")
    elif name == "failed" and value not in FAILED_WITHIN:
        raise FilterError(f"failed: has {value[:20]!r}; it must be one of {', '.join(FAILED_WITHIN)}.")
    else:
        _check(name, value)
        found[_FIELDS[name]] = value


def read_ids(texts: Iterable[str]) -> list[int]:
    """Return ids of jobs, which are text in forms and in JSON.

    Raises:
        FilterError: One of them is not an id.
    """
    return list(_read_ids(texts))


def _read_ids(texts: Iterable[str]) -> Iterable[int]:
    for text in texts:
        if not (text.isascii() and text.isdigit() and len(text) <= 19):  # noqa: PLR2004
            raise FilterError(f"Invalid id {str(text)[:60]!r}: it must be a whole number.")
        if (number := int(text)) >= 2**63:
            raise FilterError(f"Invalid id {text}: it is too large.")
        yield number


def _check(name: str, value: str) -> None:
    try:
        check_text(name, value, max_length=MAX_LENGTH)
    except InvalidJobError as error:
        raise FilterError(str(error)) from None


def _quote(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else _quoted(value)


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquote(word: str) -> str:
    if len(word) > 1 and word.startswith('"') and word.endswith('"'):
        return _ESCAPED.sub(r"\1", word[1:-1])
    return word
