"""The crontab parser accepts and reads the same crontabs as Node's parser."""

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
"""Another seed generates other crontabs."""
# For each text: its items, or null if it is rejected. A pattern is described by the times that it matches.
NODE_PARSER = """
const { parseCrontab } = require("graphile-worker");
const { texts, moments } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const describe = (item) => ({
  task: item.task,
  identifier: item.identifier,
  options: item.options,
  payload: item.payload === null ? null : JSON.stringify({ ...item.payload }),
  fits: moments.map(([min, hour, date, month, dow]) =>
    +item.match({ min, hour, date, month, dow })).join(""),
});
console.log(JSON.stringify(texts.map((text) => {
  try { return parseCrontab(text).map(describe); } catch (error) { return null; }
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


class CrontabGenerator:
    """Generates valid and invalid crontabs, always the same ones for a seed."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)

    def _choose(self, good: list[str], bad: list[str]) -> str:
        return self._random.choice(bad if self._random.random() < 0.03 else good)

    def _payload(self, depth: int = 0) -> str:
        chance = self._random
        members = [
            f"{self._choose(KEYS, BAD_KEYS)}:"
            + (
                self._payload(depth + 1)
                if depth < 2 and chance.random() < 0.2
                else self._choose(GOOD_VALUES, BAD_VALUES)
            )
            for _ in range(chance.choice([0, 1, 1, 2, 3]))
        ]
        ends = ["", "", "", ",", " ", "}", "//"] if members else [""]
        return "{" + ",".join(members) + chance.choice(ends) + "}"

    def _options(self) -> str:
        count = self._random.choice([1, 1, 1, 1, 2, 2, 3, 0])
        return "?" + "&".join(self._choose(GOOD_OPTIONS, BAD_OPTIONS) for _ in range(count))

    def _line(self) -> str:
        chance = self._random
        words = [
            ",".join(self._choose(GOOD_PARTS, BAD_PARTS) for _ in range(chance.choice([1, 1, 1, 2, 3])))
            for _ in range(5 if chance.random() < 0.98 else chance.choice([4, 6]))
        ]
        words += [self._choose(TASKS[:7], TASKS)] if chance.random() < 0.99 else []
        words += [self._options()] if chance.random() < 0.5 else []
        words += [self._payload()] if chance.random() < 0.5 else []
        words += [chance.choice(["# x", "x", "{}", "[]", "?max=1", "{"])] if chance.random() < 0.03 else []
        blank = chance.choice([" ", " ", " ", chance.choice(BLANKS)])
        return (
            chance.choice(["", "", "", " ", "\t", "\ufeff"])
            + blank.join(words)
            + chance.choice(["", "", " ", "\r"])
        )

    def crontab(self) -> str:
        chance = self._random
        other_lines = ["", "  ", "# x", "  # * * * * * t", "@daily t"]
        lines = [
            self._line() if chance.random() < 0.9 else chance.choice(other_lines)
            for _ in range(chance.choice([1, 1, 1, 1, 2, 3]))
        ]
        text = chance.choice(["\n", "\n", "\r\n"]).join(lines)
        return self._mutated(text) if chance.random() < 0.2 else text

    def _mutated(self, text: str) -> str:
        """Return the text with chance characters added, removed or replaced."""
        chance = self._random
        for _ in range(chance.choice([1, 1, 2, 3])):
            start, length = chance.randrange(len(text) + 1), chance.choice([0, 1])
            text = text[:start] + chance.choice(["", *MUTANTS]) + text[start + length :]
        return text


def parse(text: str) -> list[CronItem] | None:
    try:
        return parse_crontab(text)
    except CrontabError:
        return None


def describe(item: CronItem) -> dict[str, Any]:
    pattern = parse_pattern(str(item.match))
    assert isinstance(pattern, Pattern)
    options = {
        "backfillPeriod": item.backfill_period / timedelta(milliseconds=1),
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
        "fits": "".join(str(int(pattern.matches(*moment))) for moment in MOMENTS),
    }


def in_order(value: Any) -> Any:
    """Return the value with the order of its keys, which JSON in PostgreSQL keeps."""
    if isinstance(value, dict):
        return [(key, in_order(item)) for key, item in value.items()]
    return [in_order(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module", params=[600, pytest.param(6000, marks=pytest.mark.slow)])
def compared(request: pytest.FixtureRequest) -> list[tuple[str, Any]]:
    generator = CrontabGenerator()
    texts = [generator.crontab() for _ in range(request.param)]
    parsed = node.script(VERSION, NODE_PARSER, {"texts": texts, "moments": MOMENTS})
    return list(zip(texts, parsed, strict=True))


def test_python_and_node_accept_the_same_crontabs(compared: list[tuple[str, Any]]) -> None:
    accepted = sum(by_node is not None for _, by_node in compared)
    assert 0.25 < accepted / len(compared) < 0.75, "neither valid nor invalid crontabs are rare"
    differ = [
        (text, "accepted by Node" if by_node is not None else "accepted by Python")
        for text, by_node in compared
        if (by_node is None) != (parse(text) is None)
    ]
    assert differ == []


def test_python_and_node_read_the_same_items(compared: list[tuple[str, Any]]) -> None:
    for text, by_node in compared:
        if by_node is None:
            continue
        for item in by_node:
            item["payload"] = in_order(json.loads(item["payload"] or "null"))
        by_python = [describe(item) for item in parse(text) or []]
        for item in by_python:
            item["payload"] = in_order(item["payload"])
        assert by_python == by_node, text
