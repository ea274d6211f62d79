"""Crontabs: text to items, and back.

A line is ``minute hour day month weekday task ?options {payload}``. In strict mode, which is the default,
that is what Graphile Worker for Node reads, and means the same. Extended mode has a few things more; a text
is read in it if its first line says so::

    # graphile-worker: extended
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from graphile_worker.cron.expression import Word, words_of
from graphile_worker.cron.item import CronItem, fill_phrase, remember_place
from graphile_worker.cron.line import EXTENDED, ONLY_EXTENDED, OPTIONS, TASK, Line
from graphile_worker.cron.payloads import parse_payload
from graphile_worker.errors import ConfigurationError, CrontabError, CrontabProblem
from graphile_worker.job import JobKeyMode
from graphile_worker.payload import encode_payload

if TYPE_CHECKING:
    from collections.abc import Iterable

_SAYS_EXTENDED = re.compile(r"#\s*graphile-worker\s*:\s*extended\s*")


def parse_crontab(text: str, *, strict: bool | None = True, source: str = "crontab") -> list[CronItem]:
    """The items of a crontab.

    Args:
        text: Its lines.
        strict: What is read: on, exactly what Graphile Worker for Node reads; off, also the options ``tz``
            and ``overlap``, names of months and days, steps on ranges, and ``@daily`` and its kin. None means
            off if the first line is ``# graphile-worker: extended``, and otherwise on.
        source: What to call it in errors: the name of a file.

    Raises:
        CrontabError: It tells all that is wrong, with lines and columns.

    Example:
        >>> from graphile_worker import parse_crontab
        >>> [item] = parse_crontab("*/5 8-17 * * 1-5 sync ?fill=1h&max=3 {full: false}")
        >>> item.task, item.match, item.max_attempts, item.payload
        ('sync', '*/5 8-17 * * 1-5', 3, {'full': False})
        >>> parse_crontab("61 * * * * sync ?prio=3")
        Traceback (most recent call last):
        graphile_worker.errors.CrontabError: crontab:1:1: the minute '61' is too large; expected 0 to 59
        crontab:1:18: there is no option 'prio'; did you mean 'priority'?
    """
    return _read(text, strict=strict, source=source, storable=False)


def read_crontab(text: str, *, source: str = "crontab") -> list[CronItem]:
    """The items of a crontab that is to be used: what Node reads, and the database refuses, is wrong too."""
    return _read(text, strict=None, source=source, storable=True)


def _read(text: object, *, strict: bool | None, source: str, storable: bool) -> list[CronItem]:
    if not isinstance(text, str):
        raise ConfigurationError(
            f"A crontab is a text, not a {type(text).__name__!r}. A file is read by crontab_file=…; items "
            "that are made in code are cron_items=…."
        )
    lines = re.split(r"\r?\n", text)
    if strict is None:
        strict = not _SAYS_EXTENDED.fullmatch(lines[0].strip("\ufeff"))
    problems: list[CrontabProblem] = []
    items: list[CronItem] = []
    known: dict[str, int] = {}
    for number, content in enumerate(lines, 1):
        line = Line(content, strict=strict, storable=storable)
        if line.is_empty:
            continue
        item = line.read()
        if item is not None:
            remember_place(item, f"{source}, line {number}")
            items.append(item)
        if line.identifier is not None and (first := known.setdefault(line.identifier, number)) != number:
            line.fault(
                Word(line.start, line.identifier),
                f"the identifier {line.identifier!r} is that of line {first} too; give one of them another: "
                "?id=…",
            )
        problems += [
            CrontabProblem(number, fault.word.column + 1, fault.word.text, fault.message)
            for fault in sorted(line.faults)
        ]
    if problems:
        raise CrontabError(problems, source)
    return items


def format_crontab(items: Iterable[CronItem]) -> str:
    """A crontab with these items, in extended mode if one of them needs it.

    Raises:
        ConfigurationError: An item has something that a crontab cannot say, such as a function for `match`.

    Example:
        >>> from graphile_worker import CronItem, format_crontab
        >>> print(format_crontab([CronItem("report", "0 8 * * *", payload={"to": "Ann"}, fill="2h")]))
        0 8 * * * report ?fill=2h {"to":"Ann"}
        <BLANKLINE>
    """
    lines = [_format(item) for item in items]
    text = "".join(f"{line}\n" for line in lines)
    try:
        parse_crontab(text)
    except CrontabError:
        text = f"{EXTENDED}\n{text}"
        parse_crontab(text, strict=False)
    return text


def _format(item: CronItem) -> str:
    cannot = partial(_cannot, item)
    if not isinstance(item.match, str):
        cannot("its match is a function")
    if not TASK.fullmatch(item.task):
        cannot(f"the task's name {item.task!r} is not possible there")
    if item.flags:
        cannot("it has flags")
    if item.backfill.microseconds:
        cannot(f"its backfill {item.backfill} has fractions of a second")
    values = {
        "id": None if item.identifier == item.task else item.identifier,
        "fill": fill_phrase(item.backfill) if item.backfill else None,
        "max": item.max_attempts,
        "queue": item.queue_name,
        "jobKey": item.job_key,
        "jobKeyMode": _mode_to_say(item),
        "priority": item.priority,
        "tz": item.tz,
        "overlap": None if item.overlap == "allow" else item.overlap,
    }
    words = [*words_of(str(item.match)), Word(0, item.task)]
    options = []
    for key, value in values.items():
        if value is None:
            continue
        option = {**OPTIONS, **ONLY_EXTENDED}[key]
        if not option.allowed.fullmatch(str(value)):
            cannot(f"{option.argument}={value!r} is not possible there; expected {option.expected}")
        options.append(f"{key}={quote(str(value), safe='/:')}")
    line = " ".join(word.text for word in words)
    if options:
        line += f" ?{'&'.join(options)}"
    if item.payload is not None:
        line += f" {_format_payload(item)}"
    return line


def _format_payload(item: CronItem) -> str:
    payload = json.loads(encode_payload(item.payload))
    if not isinstance(payload, dict):
        _cannot(item, "its payload is no object")
    compact = json.dumps(payload, separators=(",", ":"))  # escaped, for some characters end a line
    if parse_payload(compact) != payload:
        _cannot(item, "its payload has a number of more digits than JavaScript keeps")
    return compact


def _mode_to_say(item: CronItem) -> str | None:
    mode = item.job_key_mode
    return None if mode is None or (item.job_key and mode == JobKeyMode.REPLACE) else str(mode)


def _cannot(item: CronItem, why: str) -> None:
    raise ConfigurationError(f"{item} cannot be written in a crontab: {why}.")
