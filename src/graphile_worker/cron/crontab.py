"""Crontabs: text to items, and back.

A line is ``minute hour day month weekday task ?options {payload}``. In strict mode, which is the default,
that is what Graphile Worker for Node reads, and means the same. Extended mode has a few things more; a text
is read in it if its first line says so::

    # graphile-worker: extended
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote_plus

from graphile_worker.cron.expression import (
    FIELDS,
    NICKNAMES,
    SPACE,
    WORD,
    Fault,
    Word,
    integer,
    read_pattern,
    words_of,
)
from graphile_worker.cron.item import FILL, CronItem, fill_phrase, parse_fill
from graphile_worker.cron.payloads import PayloadFaultError, parse_payload
from graphile_worker.cron.schedule import zone_of
from graphile_worker.errors import ConfigurationError, CrontabError, CrontabProblem
from graphile_worker.job import JobKeyMode
from graphile_worker.payload import encode_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

EXTENDED = "# graphile-worker: extended"
"""The first line of a crontab that Node need not understand."""
_EXTENDED = re.compile(r"#\s*graphile-worker\s*:\s*extended\s*")
_TASK = re.compile(r"[_a-zA-Z][_a-zA-Z0-9:/-]*")
_ENDS_A_LINE = re.compile("[\r\u2028\u2029]")
_BLANK = re.compile(f"[{SPACE}]*")
_MOST_OPTIONS = 1000
"""Node does not look at more."""


class _Option(NamedTuple):
    argument: str
    """The argument of `CronItem`."""
    allowed: re.Pattern[str]
    expected: str
    read: Callable[[str], Any] = str


_OPTIONS = {
    "id": _Option(
        "identifier", re.compile(r"[_a-zA-Z][-_a-zA-Z0-9]*"), "a letter or _, then also digits and -"
    ),
    "fill": _Option("backfill", FILL, "numbers, each with w, d, h, m or s, such as 1d12h", parse_fill),
    "max": _Option("max_attempts", re.compile(r"[0-9]+"), "a number", integer),
    "queue": _Option("queue_name", re.compile(r"[-a-zA-Z0-9_:]+"), "letters, digits, -, _ and :"),
    "jobKey": _Option("job_key", re.compile(r"[^\n\r\u2028\u2029]*"), "anything but the end of a line"),
    "jobKeyMode": _Option(
        "job_key_mode", re.compile(r"replace|preserve_run_at"), "replace or preserve_run_at", JobKeyMode
    ),
    "priority": _Option("priority", re.compile(r"-?[0-9]+"), "an integer", integer),
}
_ONLY_EXTENDED = {
    "tz": _Option("tz", re.compile(r".+"), "a time zone such as Europe/Paris"),
    "overlap": _Option("overlap", re.compile(r"allow|skip"), "skip or allow"),
}


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
    lines = re.split(r"\r?\n", text)
    if strict is None:
        strict = not _EXTENDED.fullmatch(lines[0].strip("\ufeff"))
    problems: list[CrontabProblem] = []
    items: dict[str, tuple[int, CronItem]] = {}
    for number, line in enumerate(lines, 1):
        start = _skip_blank(line, 0)
        if start == len(line) or line[start] == "#":
            continue
        reader = _Line(_without_trailing_blank(line), strict=strict)
        item = reader.read(start)
        if item is not None and item.identifier in items:
            first = items[item.identifier][0]
            reader.fault(
                Word(start, item.identifier),
                f"the identifier {item.identifier!r} is that of line {first} too; give one of them another: "
                "?id=…",
            )
        elif item is not None:
            items[item.identifier] = number, item
        problems += [
            CrontabProblem(number, fault.word.column + 1, fault.word.text, fault.message)
            for fault in sorted(reader.faults)
        ]
    if problems:
        raise CrontabError(problems, source)
    return [item for _, item in items.values()]


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


@dataclass
class _Line:
    """One line that is being read."""

    text: str
    strict: bool
    faults: list[Fault] = field(default_factory=list)

    def fault(self, word: Word, message: str) -> None:
        self.faults.append(Fault(word, message))

    def read(self, start: int) -> CronItem | None:
        """The item; None if there are faults."""
        words = words_of(self.text, start)
        count = 1 if words[0].text.startswith("@") and not self.strict else len(FIELDS)
        if self.strict and words[0].text.lower() in NICKNAMES:
            self.fault(
                words[0],
                f"{words[0].text!r} is only understood in extended mode: the first line must be {EXTENDED!r}",
            )
            return None
        if len(words) <= count:
            names = ", ".join(field.name for field in FIELDS)
            whole = Word(start, self.text[start:])
            self.fault(whole, f"{whole.text!r} is too short; expected five fields ({names}) and a task")
            return None
        pattern = read_pattern(words[:count], self.faults, strict=self.strict)
        arguments = self._read_command(words[count])
        if pattern is None or arguments is None or self.faults:
            return None
        try:
            return CronItem(match=" ".join(word.text for word in words[:count]), **arguments)
        except ConfigurationError as error:
            self.fault(words[count], str(error))
            return None

    def _read_command(self, task: Word) -> dict[str, Any] | None:
        if ended := _ENDS_A_LINE.search(self.text, task.column):
            self.fault(Word(ended.start(), ended.group()), "there is a line break that is none in a crontab")
            return None
        if not _TASK.fullmatch(task.text):
            self.fault(
                task,
                f"{task.text!r} cannot be a task's name here; expected a letter or _, then also digits, :, / "
                "and -",
            )
        arguments: dict[str, Any] = {"task": task.text}
        rest = _skip_blank(self.text, task.column + len(task.text))
        if self.text.startswith("?", rest):
            options = WORD.match(self.text, rest)
            assert options is not None  # noqa: S101 - it begins with ?
            arguments |= self._read_options(Word(rest, options.group()))
            rest = _skip_blank(self.text, options.end())
        if rest < len(self.text):
            arguments |= self._read_payload(Word(rest, self.text[rest:]))
        return arguments

    def _read_options(self, given: Word) -> dict[str, Any]:
        if given.text == "?":
            self.fault(given, "there are no options after '?'; expected some, such as ?max=3")
            return {}
        found: dict[str, Any] = {}
        known = _OPTIONS if self.strict else {**_OPTIONS, **_ONLY_EXTENDED}
        column = given.column + 1
        for part in given.text[1:].split("&", _MOST_OPTIONS)[:_MOST_OPTIONS]:
            if part:
                self._read_option(Word(column, part), known, found)
            column += len(part) + 1
        if found.get("job_key") and "job_key_mode" not in found:
            found["job_key_mode"] = JobKeyMode.REPLACE
        return found

    def _read_option(self, part: Word, known: dict[str, _Option], found: dict[str, Any]) -> None:
        key, value = (unquote_plus(text) for text in part.text.partition("=")[::2])
        option = known.get(key)
        if option is None:
            self.fault(part, self._no_such(key, known))
        elif option.argument in found:
            self.fault(part, f"the option {key!r} is given more than once")
        elif not option.allowed.fullmatch(value):
            self.fault(part, f"the option {key!r} has the value {value!r}; expected {option.expected}")
        else:
            found[option.argument] = option.read(value)
            if key == "tz":
                self._check_zone(part, value)

    def _check_zone(self, part: Word, name: str) -> None:
        try:
            zone_of(name)
        except ConfigurationError as error:
            self.fault(part, str(error).rstrip("."))

    @staticmethod
    def _no_such(key: str, known: dict[str, _Option]) -> str:
        if key in _ONLY_EXTENDED:
            return (
                f"the option {key!r} is only understood in extended mode: the first line must be {EXTENDED!r}"
            )
        near = difflib.get_close_matches(key, known, n=1)
        *others, last = known
        hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(others)} or {last}"
        return f"there is no option {key!r}; {hint}"

    def _read_payload(self, given: Word) -> dict[str, Any]:
        if not given.text.startswith("{") or not given.text.endswith("}"):
            what = given.text.split()[0]
            expected = "?options or a {payload}, up to the end of the line"
            if what.startswith("#"):
                expected += "; a comment has a line of its own"
            self.fault(given, f"{what!r} is not understood; expected {expected}")
            return {}
        try:
            return {"payload": parse_payload(given.text)}
        except PayloadFaultError as problem:
            where = given.column + problem.column
            self.fault(Word(where, self.text[where:]), str(problem))
            return {}


def _skip_blank(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start


_TRAILING = re.compile(f"[{SPACE}]+\\Z")


def _without_trailing_blank(text: str) -> str:
    return _TRAILING.sub("", text)


def _format(item: CronItem) -> str:
    cannot = partial(_cannot, item)
    if not isinstance(item.match, str):
        cannot("its match is a function")
    if not _TASK.fullmatch(item.task):
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
        option = {**_OPTIONS, **_ONLY_EXTENDED}[key]
        if not option.allowed.fullmatch(str(value)):
            cannot(f"{option.argument}={value!r} is not possible there; expected {option.expected}")
        options.append(f"{key}={quote(str(value), safe='/:')}")
    line = " ".join(word.text for word in words)
    if options:
        line += f" ?{'&'.join(options)}"
    if item.payload is not None:
        # Escaped, for some characters end a line.
        compact = json.dumps(json.loads(encode_payload(item.payload)), separators=(",", ":"))
        line += f" {compact}"
    return line


def _mode_to_say(item: CronItem) -> str | None:
    mode = item.job_key_mode
    return None if mode is None or (item.job_key and mode == JobKeyMode.REPLACE) else str(mode)


def _cannot(item: CronItem, why: str) -> None:
    raise ConfigurationError(f"{item} cannot be written in a crontab: {why}.")
