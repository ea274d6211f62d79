"""Parses and formats crontabs.

A line is ``minute hour day month weekday task ?options {payload}``. Strict mode, the default, accepts exactly
what Graphile Worker for Node accepts, with the same meaning. Extended mode accepts a little more. A crontab
selects it by its first line::

    # graphile-worker: extended
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from graphile_worker._base.payload import encode_payload
from graphile_worker.cron.expression import Word, split_words
from graphile_worker.cron.item import CronItem, format_fill, set_location
from graphile_worker.cron.line import EXTENDED, EXTENDED_OPTIONS, OPTIONS, TASK, Line
from graphile_worker.cron.payloads import parse_payload
from graphile_worker.errors import ConfigurationError, CrontabError, CrontabProblem
from graphile_worker.job import JobKeyMode

if TYPE_CHECKING:
    from collections.abc import Iterable

_EXTENDED_HEADER = re.compile(r"#\s*graphile-worker\s*:\s*extended\s*")


def parse_crontab(text: str, *, strict: bool | None = True, source: str = "crontab") -> list[CronItem]:
    """Parse a crontab.

    Args:
        text: The crontab.
        strict: Whether to accept exactly what Graphile Worker for Node accepts. If False, also accept the
            options ``tz`` and ``overlap``, names of months and days, steps on ranges, and nicknames such as
            ``@daily``. None means False if the first line is ``# graphile-worker: extended``, otherwise True.
        source: The name of the crontab in errors, for example a file name.

    Raises:
        CrontabError: Lines are invalid. The error lists all problems, with lines and columns.

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
    """Parse a crontab for a worker, in the mode its first line selects.

    Values that Node accepts but the database would reject are errors too.
    """
    return _read(text, strict=None, source=source, storable=True)


def _read(text: object, *, strict: bool | None, source: str, storable: bool) -> list[CronItem]:
    if not isinstance(text, str):
        raise ConfigurationError(
            f"A crontab must be a string, not {type(text).__name__!r}. Pass a file as crontab_file=… and "
            "CronItem objects as cron_items=…."
        )
    lines = re.split(r"\r?\n", text)
    if strict is None:
        strict = not _EXTENDED_HEADER.fullmatch(lines[0].strip("\ufeff"))
    problems: list[CrontabProblem] = []
    items: list[CronItem] = []
    known: dict[str, int] = {}
    for number, content in enumerate(lines, 1):
        line = Line(content, strict=strict, storable=storable)
        if line.is_empty:
            continue
        item = line.read()
        if item is not None:
            set_location(item, f"{source}, line {number}")
            items.append(item)
        if line.identifier is not None and (first := known.setdefault(line.identifier, number)) != number:
            line.add_fault(
                Word(line.start, line.identifier),
                f"the identifier {line.identifier!r} is already used in line {first}; give one of the lines "
                "another: ?id=…",
            )
        problems += [
            CrontabProblem(number, fault.word.column + 1, fault.word.text, fault.message)
            for fault in sorted(line.faults)
        ]
    if problems:
        raise CrontabError(problems, source)
    return items


def format_crontab(items: Iterable[CronItem]) -> str:
    """Format items as a crontab, in extended mode if an item needs it.

    Raises:
        ConfigurationError: A crontab cannot express an item, for example because `match` is a function.

    Example:
        >>> from graphile_worker import CronItem, format_crontab
        >>> print(format_crontab([CronItem("report", "0 8 * * *", payload={"to": "Ann"}, backfill="2h")]))
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
    reject = partial(_reject, item)
    if not isinstance(item.match, str):
        reject("its match is a function")
    if not TASK.fullmatch(item.task):
        reject(f"the task name {item.task!r} is not valid in a crontab")
    if item.flags:
        reject("it has flags")
    if item.backfill_period.microseconds:
        reject(f"its backfill {item.backfill_period} has fractions of a second")
    values = {
        "id": None if item.identifier == item.task else item.identifier,
        "fill": format_fill(item.backfill_period) if item.backfill_period else None,
        "max": item.max_attempts,
        "queue": item.queue_name,
        "jobKey": item.job_key,
        "jobKeyMode": _non_default_mode(item),
        "priority": item.priority,
        "tz": item.tz,
        "overlap": None if item.overlap == "allow" else item.overlap,
    }
    words = [*split_words(str(item.match)), Word(0, item.task)]
    options = []
    for key, value in values.items():
        if value is None:
            continue
        option = {**OPTIONS, **EXTENDED_OPTIONS}[key]
        if not option.allowed.fullmatch(str(value)):
            reject(f"{option.argument}={value!r} is not valid in a crontab; expected {option.expected}")
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
        _reject(item, "its payload is not a JSON object")
    compact = json.dumps(payload, separators=(",", ":"))  # escaped, because some characters end a line
    if parse_payload(compact) != payload:
        _reject(item, "its payload has a number with more digits than JavaScript keeps")
    return compact


def _non_default_mode(item: CronItem) -> str | None:
    mode = item.job_key_mode
    return None if mode is None or (item.job_key and mode == JobKeyMode.REPLACE) else str(mode)


def _reject(item: CronItem, reason: str) -> None:
    raise ConfigurationError(f"{item} cannot be written in a crontab: {reason}.")
