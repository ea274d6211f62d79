"""One line of a crontab: ``minute hour day month weekday task ?options {payload}``."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
from graphile_worker.cron.item import FILL, CronItem, parse_fill
from graphile_worker.cron.payloads import PayloadFaultError, parse_payload
from graphile_worker.cron.percents import decode_percents
from graphile_worker.cron.schedule import zone_of
from graphile_worker.errors import ConfigurationError, InvalidJobError
from graphile_worker.job import JobKeyMode, JobSpec
from graphile_worker.payload import encode_payload

if TYPE_CHECKING:
    from collections.abc import Callable

EXTENDED = "# graphile-worker: extended"
"""The first line of a crontab that Node need not understand."""
TASK = re.compile(r"[_a-zA-Z][_a-zA-Z0-9:/-]*")
"""The names of tasks that a crontab can have."""
_ENDS_A_LINE = re.compile("[\r\u2028\u2029]")
_BLANK = re.compile(f"[{SPACE}]*")
_TRAILING = re.compile(f"[{SPACE}]+\\Z")
_MOST_OPTIONS = 1000
"""Node does not look at more."""


class Option(NamedTuple):
    """What may stand after the ``?``."""

    argument: str
    """The argument of `CronItem`."""
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
ONLY_EXTENDED = {
    "tz": Option("tz", re.compile(r".+"), "a time zone such as Europe/Paris"),
    "overlap": Option("overlap", re.compile(r"allow|skip"), "skip or allow"),
}


@dataclass
class Line:
    """One line that is being read.

    Args:
        text: It, without its end.
        strict: Whether it has to mean the same to Node.
        storable: Whether to refuse, too, what can be read but not be stored.
    """

    text: str
    strict: bool
    storable: bool
    faults: list[Fault] = field(default_factory=list)
    identifier: str | None = None
    """What it is known by, even if other things are wrong with it; None if that cannot be told."""
    _places: dict[str, Word] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = _TRAILING.sub("", self.text)
        self.start = _skip_blank(self.text, 0)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing on it, or a comment."""
        return self.text[self.start : self.start + 1] in {"", "#"}

    def fault(self, word: Word, message: str) -> None:
        """Something is wrong there."""
        self.faults.append(Fault(word, message))

    def read(self) -> CronItem | None:
        """The item; None if there are faults."""
        words = words_of(self.text, self.start)
        nickname = words[0].text.startswith("@") and not self.strict
        count = 1 if nickname else len(FIELDS)
        if self.strict and words[0].text.lower() in NICKNAMES:
            self.fault(
                words[0],
                f"{words[0].text!r} is only understood in extended mode: the first line must be {EXTENDED!r}",
            )
            return None
        if len(words) <= count and not nickname:
            names = ", ".join(field.name for field in FIELDS)
            whole = Word(self.start, self.text[self.start :])
            self.fault(whole, f"{whole.text!r} is too short; expected five fields ({names}) and a task")
            return None
        pattern = read_pattern(words[:count], self.faults, strict=self.strict)
        if len(words) <= count:
            self.fault(words[0], f"there is nothing after {words[0].text!r}; expected a task")
            return None
        arguments = self._read_command(words[count])
        if pattern is None or arguments is None or self.faults:
            return None
        return CronItem(match=" ".join(word.text for word in words[:count]), **arguments)

    def _read_command(self, task: Word) -> dict[str, Any] | None:
        if ended := _ENDS_A_LINE.search(self.text, task.column):
            self.fault(Word(ended.start(), ended.group()), "there is a line break that is none in a crontab")
            return None
        if not TASK.fullmatch(task.text):
            self.fault(
                task,
                f"{task.text!r} cannot be a task's name here; expected a letter or _, then also digits, :, / "
                "and -",
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
            self.fault(given, "there are no options after '?'; expected some, such as ?max=3")
            return {}
        found: dict[str, Any] = {}
        known = OPTIONS if self.strict else {**OPTIONS, **ONLY_EXTENDED}
        column = given.column + 1
        for part in given.text[1:].split("&", _MOST_OPTIONS)[:_MOST_OPTIONS]:
            if part:
                self._read_option(Word(column, part), known, found)
            column += len(part) + 1
        if "identifier" in self._places:
            self.identifier = found.get("identifier")
        if found.get("job_key") and "job_key_mode" not in found:
            found["job_key_mode"] = JobKeyMode.REPLACE
        if found.get("overlap") == "skip" and "job_key" in found:
            self.fault(
                self._places["overlap"],
                "the option 'overlap' needs the job's key for itself, and there is the option 'jobKey'; "
                "expected one of them",
            )
        return found

    def _read_option(self, part: Word, known: dict[str, Option], found: dict[str, Any]) -> None:
        key, value = (decode_percents(text) for text in part.text.partition("=")[::2])
        option = known.get(key)
        if option is None:
            self.fault(part, self._no_such(key, known))
            return
        if option.argument in self._places:
            self.fault(part, f"the option {key!r} is given more than once")
            return
        self._places[option.argument] = part
        if not option.allowed.fullmatch(value):
            self.fault(part, f"the option {key!r} has the value {value!r}; expected {option.expected}")
            return
        found[option.argument] = option.read(value)
        if key == "tz":
            self._check(part, "", partial(zone_of, value))
        if option.argument in JobSpec.__struct_fields__ and option.argument != "identifier":
            job = partial(JobSpec, "_", **{option.argument: found[option.argument]})
            self._check_storable(part, f"the option {key!r} cannot be used: ", job)

    def _check_storable(self, word: Word, before: str, check: Callable[[], object]) -> None:
        if self.storable:
            self._check(word, before, check)

    def _check(self, word: Word, before: str, check: Callable[[], object]) -> None:
        try:
            check()
        except (ConfigurationError, InvalidJobError) as error:
            said = str(error).rstrip(".")
            self.fault(word, f"{before}{said[:1].lower()}{said[1:]}")

    @staticmethod
    def _no_such(key: str, known: dict[str, Option]) -> str:
        if key in ONLY_EXTENDED:
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
            payload = parse_payload(given.text)
        except PayloadFaultError as problem:
            where = given.column + problem.column
            self.fault(Word(where, self.text[where:]), str(problem))
            return {}
        self._check_storable(given, "", partial(encode_payload, payload))
        return {"payload": payload}


def _skip_blank(text: str, start: int) -> int:
    found = _BLANK.match(text, start)
    return found.end() if found else start
