"""Whatever stands in a crontab, we read what npm's parser reads, and it means the same."""

from __future__ import annotations

import json
import os
import random
from datetime import timedelta
from typing import Any

import pytest

from graphile_worker import CronItem, CrontabError, parse_crontab
from graphile_worker.cron.expression import Pattern, parse_pattern
from support import node

VERSION = "0.18.0"
SEED = int(os.environ.get("CRONTAB_SEED", "18"))
"""Another one writes other crontabs."""
# For each text: its items, or that it is refused. A pattern is told by the moments that it fits.
THEIRS = """
const { parseCrontab } = require("graphile-worker");
const { texts, moments } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const told = (item) => ({
  task: item.task,
  identifier: item.identifier,
  options: item.options,
  payload: item.payload === null ? null : JSON.stringify({ ...item.payload }),
  fits: moments.map(([min, hour, date, month, dow]) =>
    +item.match({ min, hour, date, month, dow })).join(""),
});
console.log(JSON.stringify(texts.map((text) => {
  try { return parseCrontab(text).map(told); } catch (error) { return null; }
})));
"""
RANDOM = random.Random(20)
MOMENTS = [
    (RANDOM.randrange(60), RANDOM.randrange(24), RANDOM.randint(1, 31), RANDOM.randint(1, 12), dow)
    for dow in range(7)
    for _ in range(40)
] + [(n, n % 24, n % 31 + 1, n % 12 + 1, n % 7) for n in range(60)]
BLANKS = [
    *(" ", " ", " ", " ", " ", "\t", "  ", "\u00a0", "\u3000", "\ufeff", "\u2028", "\r", "\u0085", "\x1c"),
    *("\v",),
]
GOOD_PARTS = ["*", "*/1", "*/2", "*/5", "*/7", "*/15", "*/99", "1", "2", "5", "07", "3-6", "1-4"]
BAD_PARTS = [
    *("0", "7", "11", "12", "23", "31", "59", "", "**", "*/", "*/0", "*/00", "1/2", "1-5/2", "5-1", "3-3"),
    *("-1", "1-", "60", "24", "32", "13", "8", "61-70", "a", "MON", "jan", "1-2-3", "+1", "1.5", "0x1"),
    *("\u0661", "99999999999999999999999", "5-7", "0-7", "6-8"),
]
TASKS = [
    *("t", "_", "Task_1", "a/b", "a:b-c", "a/b/c", "a_", "-a", "1a", "a.b", "é", "a?", "a{}", "a,b", ""),
    *("a b",),
]
GOOD_OPTIONS = [
    *("id=x", "id=a-1_", "fill=4w3d2h1m", "fill=1s1s", "fill=0s", "fill=10m5w", "max=3", "max=007", "max=0"),
    *("queue=q", "queue=a:b-c_1", "priority=5", "priority=-5", "priority=-0", "jobKey=k"),
    *("jobKey=a+b%20c%2Bd", "jobKey=", "jobKey", "jobKey=a=b", "jobKey=%E2%82%AC", "jobKey=€"),
    *(
        "jobKey=a?b#c",
        "jobKey=%zz",
        "jobKey=%a2%8\U0001f6002\u0660%AC",
        "jobKey=\u0125%41%",
        "jobKey=100%",
        "jobKeyMode=replace",
        "jobKeyMode=preserve_run_at",
    ),
    *("%69d=y", "id=%7a", ""),
]
BAD_OPTIONS = [
    *("id=", "id", "id=-a", "id=1", "id=a:b", "id=a/b", "fill=1", "fill=", "fill=1x", "fill=1d2", "fill=-1d"),
    *("max=", "max=-1", "max=1.5", "max=1e3", "queue=", "queue=a/b", "queue=a%20b", "priority=+5"),
    *("priority=", "priority=--1", "jobKeyMode=", "jobKeyMode=unsafe_dedupe", "jobKeyMode=Replace"),
    *("tz=Europe/Paris", "overlap=skip", "ID=x", "job_key=x", "__proto__=1", "constructor=1", "=x", "="),
    *("jobKey=a%0Ab", "jobKey=a%0D", "jobKey=%E2%80%A8", "id=a;b"),
]
GOOD_VALUES = [
    *("1", "-1", "+1", "1.0", "1.5", ".5", "5.", "1e3", "1E-3", "-0", "0x1F", "0XaB", "-0x10"),
    *("9007199254740993", "12345678901234567890", "18446744073709551615", "1e21"),
    *("123456789012345678901234567890", "1e400", "-1e400", "0xFFFFFFFFFFFFFFFFFFFFF", "5e-324", "1e-400"),
    *("NaN", "-NaN", "Infinity", "-Infinity", "+Infinity", "null", "true", "false", "'x'", '"x"', "'#'"),
    *("'}'", "'{'", "'a\"b'", r"'\''", r"'\x41\u0042\n'", r"'\uD83D\uDE00'", r"'\a\v\0'", "'\U0001f600'"),
    *("[]", "[1,]", "[1,[2,],{}]", "{}", "{a:{b:[{}]}}", "1 /* x */", "/**/2", "'\x85'"),
]
BAD_VALUES = [
    *("", "01", "1e", "0x", "--1", "+ 1", "1n", "nan", "undefined", "True", "'", "'a", "`a`", r"'\x4'"),
    *(r"'\u12'", "[", "[,]", "[1,,2]", "{a}", "{,}", "1 2", "1 // x", "1 /*", r"'\1'", r"'\01'", "1;", "/x/"),
    *("'a' 'b'", "'\u2028'"),
]
MUTANTS = "*/-,0579aXé_:?&=%+#{}[]'\"\\. \t\u2028\U0001f600"
KEYS = [
    *("a", "b", "$c", "_d", "'e f'", '"g"', "é", "a1", "null", "__proto__", "'10'", "'9'", "'01'", "'-1'"),
    *("_cron", "''", r"\u0061\u0031", r"a\u200d", r"'\u0031a'", r"\u0024"),
]
BAD_KEYS = ["1", "a-b", "a b", "1a", "'", "#", r"\u0031a", r"a\u0020b", r"\u00", r"\u200da"]


class Writer:
    """Writes crontabs, good ones and bad ones, always the same."""

    def __init__(self) -> None:
        self._some = random.Random(SEED)

    def _one(self, good: list[str], bad: list[str]) -> str:
        return self._some.choice(bad if self._some.random() < 0.03 else good)

    def _payload(self, depth: int = 0) -> str:
        some = self._some
        members = [
            f"{self._one(KEYS, BAD_KEYS)}:"
            + (
                self._payload(depth + 1)
                if depth < 2 and some.random() < 0.2
                else self._one(GOOD_VALUES, BAD_VALUES)
            )
            for _ in range(some.choice([0, 1, 1, 2, 3]))
        ]
        ends = ["", "", "", ",", " ", "}", "//"] if members else [""]
        return "{" + ",".join(members) + some.choice(ends) + "}"

    def _options(self) -> str:
        count = self._some.choice([1, 1, 1, 1, 2, 2, 3, 0])
        return "?" + "&".join(self._one(GOOD_OPTIONS, BAD_OPTIONS) for _ in range(count))

    def _line(self) -> str:
        some = self._some
        words = [
            ",".join(self._one(GOOD_PARTS, BAD_PARTS) for _ in range(some.choice([1, 1, 1, 2, 3])))
            for _ in range(5 if some.random() < 0.98 else some.choice([4, 6]))
        ]
        words += [self._one(TASKS[:7], TASKS)] if some.random() < 0.99 else []
        words += [self._options()] if some.random() < 0.5 else []
        words += [self._payload()] if some.random() < 0.5 else []
        words += [some.choice(["# x", "x", "{}", "[]", "?max=1", "{"])] if some.random() < 0.03 else []
        blank = some.choice([" ", " ", " ", some.choice(BLANKS)])
        return (
            some.choice(["", "", "", " ", "\t", "\ufeff"])
            + blank.join(words)
            + some.choice(["", "", " ", "\r"])
        )

    def crontab(self) -> str:
        some = self._some
        others = ["", "  ", "# x", "  # * * * * * t", "@daily t"]
        lines = [
            self._line() if some.random() < 0.9 else some.choice(others)
            for _ in range(some.choice([1, 1, 1, 1, 2, 3]))
        ]
        text = some.choice(["\n", "\n", "\r\n"]).join(lines)
        return self._mutated(text) if some.random() < 0.2 else text

    def _mutated(self, text: str) -> str:
        """With some characters more, or less, or others."""
        some = self._some
        for _ in range(some.choice([1, 1, 2, 3])):
            place, length = some.randrange(len(text) + 1), some.choice([0, 1])
            text = text[:place] + some.choice(["", *MUTANTS]) + text[place + length :]
        return text


def ours(text: str) -> list[CronItem] | None:
    try:
        return parse_crontab(text)
    except CrontabError:
        return None


def told(item: CronItem) -> dict[str, Any]:
    pattern = parse_pattern(str(item.match))
    assert isinstance(pattern, Pattern)
    options = {
        "backfillPeriod": item.backfill / timedelta(milliseconds=1),
        "maxAttempts": item.max_attempts,
        "queueName": item.queue_name,
        "priority": item.priority,
        "jobKey": item.job_key,
        "jobKeyMode": item.job_key_mode,
    }
    return {
        "task": item.task,
        "identifier": item.identifier,
        "options": {key: value for key, value in options.items() if value is not None},
        "payload": item.payload,
        "fits": "".join(str(int(pattern.fits(*moment))) for moment in MOMENTS),
    }


def in_order(value: Any) -> Any:
    """With the order of keys, which JSON in PostgreSQL keeps."""
    if isinstance(value, dict):
        return [(key, in_order(item)) for key, item in value.items()]
    return [in_order(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def compared() -> list[tuple[str, Any]]:
    writer = Writer()
    texts = [writer.crontab() for _ in range(6000)]
    given = {"texts": texts, "moments": MOMENTS}
    return list(zip(texts, node.script(VERSION, THEIRS, given), strict=True))


def test_the_same_crontabs_are_accepted(compared: list[tuple[str, Any]]) -> None:
    accepted = sum(theirs is not None for _, theirs in compared)
    assert 1500 < accepted < 4500, "neither good nor bad ones are rare"
    differ = [
        (text, "theirs" if theirs is not None else "ours")
        for text, theirs in compared
        if (theirs is None) != (ours(text) is None)
    ]
    assert differ == []


def test_they_mean_the_same(compared: list[tuple[str, Any]]) -> None:
    for text, theirs in compared:
        if theirs is None:
            continue
        for item in theirs:
            item["payload"] = in_order(json.loads(item["payload"] or "null"))
        mine = [told(item) for item in ours(text) or []]
        for item in mine:
            item["payload"] = in_order(item["payload"])
        assert mine == theirs, text
