"""Parses one line of a crontab: ``minute hour day month weekday task ?options {payload}``."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from graphile_worker._base.payload import encode_payload
from graphile_worker.cron.expression import (
    FIELDS,
    NICKNAMES,
    SPACE,
    WORD,
    Fault,
    Word,
    integer,
    read_pattern,
    split_words,
)
from graphile_worker.cron.item import FILL, CronItem, parse_fill
from graphile_worker.cron.payloads import PayloadFaultError, parse_payload
from graphile_worker.cron.percents import decode_percents
from graphile_worker.cron.schedule import get_zone
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import JobKeyMode, JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

EXTENDED = "# graphile-worker: extended"
"""The first line of a crontab in extended mode, which Node may not be able to read."""
TASK = re.compile(r"[_a-zA-Z][_a-zA-Z0-9:/-]*")
"""Task names that are valid in a crontab."""
_LINE_BREAK = re.compile("[\r\u2028\u2029]")
_BLANK = re.compile(f"[{SPACE}]*")
_TRAILING = re.compile(f"[{SPACE}]+\\Z")
_MAX_OPTIONS = 1000
"""Node ignores further options."""


class Option(NamedTuple):
    """An option after the ``?``."""

    argument: str
    """The name of the `CronItem` argument."""
    allowed: re.Pattern[str]
    expected: str
    read: Callable[[str], Any] = str


OPTIONS = {
    "id": Option(
        "identifier", re.compile(r"[_a-zA-Z][-_a-zA-Z0-9]*"), "a letter or _, then also digits and -"
    ),
    "fill": Option("backfill", FILL, "numbers, each with w, d, h, m or s, such as 1d12h", parse_fill),
    "max": Option("max_attempts", re.compile(r"[0-9]+"), "a number", integer),
    "queue": Option("queue_name", re.compile(r"[-a-zA-Z0-9_:]+"), "letters, digits, -, _ and :"),
    "jobKey": Option("job_key", re.compile(r"[^\n\r\u2028\u2029]*"), "anything but the end of a line"),
    "jobKeyMode": Option(
        "job_key_mode", re.compile(r"replace|preserve_run_at"), "replace or preserve_run_at", JobKeyMode
    ),
    "priority": Option("priority", re.compile(r"-?[0-9]+"), "an integer", integer),
}
EXTENDED_OPTIONS = {
    "tz": Option("tz", re.compile(r".+"), "a time zone such as Europe/Paris"),
    "overlap": Option("overlap", re.compile(r"allow|skip"), "skip or allow"),
}


@dataclass
class Line:
    """Parser of one line.

    Args:
        text: The line, without its line break.
        strict: Whether to accept only what Node accepts.
        storable: Whether to reject values that the database cannot store.
    """

    text: str
    strict: bool
    storable: bool
    faults: list[Fault] = field(default_factory=list)
    identifier: str | None = None
    """The item's identifier, even if the line has other faults; None if it cannot be determined."""
    _options: dict[str, Word] = field(default_factory=dict)
    """Where each option was found, by the name of its argument."""

    def __post_init__(self) -> None:
        self.text = _TRAILING.sub("", self.text)
        self.start = _skip_blank(self.text, 0)

    @property
    def is_empty(self) -> bool:
        """Whether the line is blank or a comment."""
        return self.text[self.start : self.start + 1] in {"", "#"}

    def add_fault(self, word: Word, message: str) -> None:
        """Record a problem with a part of the line."""
        self.faults.append(Fault(word, message))

    def read(self) -> CronItem | None:
        """Parse the line. Returns None if there are faults."""
        words = split_words(self.text, self.start)
        nickname = words[0].text.startswith("@") and not self.strict
        count = 1 if nickname else len(FIELDS)
        if self.strict and words[0].text.lower() in NICKNAMES:
            self.add_fault(
                words[0],
                f"{words[0].text!r} is only valid in extended mode: the first line must be {EXTENDED!r}",
            )
            return None
        if len(words) <= count and not nickname:
            names = ", ".join(field.name for field in FIELDS)
            whole = Word(self.start, self.text[self.start :])
            self.add_fault(whole, f"{whole.text!r} is too short; expected five fields ({names}) and a task")
            return None
        pattern = read_pattern(words[:count], self.faults, strict=self.strict)
        if len(words) <= count:
            self.add_fault(words[0], f"there is nothing after {words[0].text!r}; expected a task")
            return None
        arguments = self._read_command(words[count])
        if pattern is None or arguments is None or self.faults:
            return None
        return CronItem(match=" ".join(word.text for word in words[:count]), **arguments)

    def _read_command(self, task: Word) -> dict[str, Any] | None:
        if ended := _LINE_BREAK.search(self.text, task.column):
            self.add_fault(
                Word(ended.start(), ended.group()),
                f"{ended.group()!r} does not end a line in a crontab; expected \\n or \\r\\n",
            )
            return None
        if not TASK.fullmatch(task.text):
            self.add_fault(
                task,
                f"{task.text!r} is not a valid task name in a crontab; expected a letter or _, then also "
                "digits, :, / and -",
            )
        else:
            self.identifier = task.text
            self._check_storable(task, "the task cannot be used: ", partial(JobSpec, task.text))
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
            self.add_fault(given, "there are no options after '?'; expected some, such as ?max=3")
            return {}
        found: dict[str, Any] = {}
        known = OPTIONS if self.strict else {**OPTIONS, **EXTENDED_OPTIONS}
        column = given.column + 1
        for part in given.text[1:].split("&", _MAX_OPTIONS)[:_MAX_OPTIONS]:
            if part:
                self._read_option(Word(column, part), known, found)
            column += len(part) + 1
        if "identifier" in self._options:
            self.identifier = found.get("identifier")
        if found.get("job_key") and "job_key_mode" not in found:
            found["job_key_mode"] = JobKeyMode.REPLACE
        if found.get("overlap") == "skip" and "job_key" in found:
            self.add_fault(
                self._options["overlap"],
                "the options 'overlap' and 'jobKey' cannot be combined, because 'overlap' sets the job key; "
                "expected one of them",
            )
        return found

    def _read_option(self, part: Word, known: dict[str, Option], found: dict[str, Any]) -> None:
        key, value = (decode_percents(text) for text in part.text.partition("=")[::2])
        option = known.get(key)
        if option is None:
            self.add_fault(part, self._unknown_option_message(key, known))
            return
        if option.argument in self._options:
            self.add_fault(part, f"the option {key!r} is given more than once")
            return
        self._options[option.argument] = part
        if not option.allowed.fullmatch(value):
            self.add_fault(part, f"the option {key!r} has the value {value!r}; expected {option.expected}")
            return
        found[option.argument] = option.read(value)
        if key == "tz":
            self._check(part, "", partial(get_zone, value))
        if option.argument in JobSpec.__struct_fields__ and option.argument != "identifier":
            job = partial(JobSpec, "_", **{option.argument: found[option.argument]})
            self._check_storable(part, f"the option {key!r} cannot be used: ", job)

    def _check_storable(self, word: Word, prefix: str, check: Callable[[], object]) -> None:
        if self.storable:
            self._check(word, prefix, check)

    def _check(self, word: Word, prefix: str, check: Callable[[], object]) -> None:
        try:
            check()
        except (ConfigurationError, InvalidJobError) as error:
            message = str(error).rstrip(".")
            self.add_fault(word, f"{prefix}{message[:1].lower()}{message[1:]}")

    @staticmethod
    def _unknown_option_message(key: str, known: dict[str, Option]) -> str:
        if key in EXTENDED_OPTIONS:
            return f"the option {key!r} is only valid in extended mode: the first line must be {EXTENDED!r}"
        near = difflib.get_close_matches(key, known, n=1)
        *others, last = known
        hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(others)} or {last}"
        return f"there is no option {key!r}; {hint}"

    def _read_payload(self, given: Word) -> dict[str, Any]:
        if not given.text.startswith("{") or not given.text.endswith("}"):
            what = given.text.split()[0]
            expected = "?options or a {payload}, up to the end of the line"
            if what.startswith("#"):
                expected += "; put a comment on a separate line"
            self.add_fault(given, f"{what!r} is not valid here; expected {expected}")
            return {}
        try:
            payload = parse_payload(given.text)
        except PayloadFaultError as problem:
            where = given.column + problem.column
            self.add_fault(Word(where, self.text[where:]), str(problem))
            return {}
        self._check_storable(given, "", partial(encode_payload, payload))
        return {"payload": payload}


def _skip_blank(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start
