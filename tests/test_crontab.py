"""Crontab texts: parsing, errors and formatting."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from graphile_worker import (
    ConfigurationError,
    CronItem,
    CrontabError,
    JobKeyMode,
    format_crontab,
    parse_crontab,
)
from graphile_worker._tasks.loader import load_cron_items, load_crontab
from graphile_worker.cron.expression import FIELDS, NICKNAMES, Pattern, parse_pattern
from graphile_worker.cron.item import Overlap

SAMPLE = """
# ┌ a comment, and a blank line

* * * * * simple
0 4 * * * with_id ?id=nightly
*/15,7 8-10 1,15 */3 5-7 everything ?fill=4w3d2h1m&max=3&queue=reports&priority=-5 {to: 'ann#1', n: 0x1F,}
   5   5\t5   5 5    spaced      {  }
0 0 * * 7 keyed ?jobKey=a+b%2Fc
0 0 * * 0 kept ?jobKey=k&jobKeyMode=preserve_run_at
0 0 * * 0 images/re-size:now
"""


def parsed(pattern: str) -> Pattern:
    [item] = parse_crontab(f"{pattern} t")
    return parse_pattern(str(item.match))


def problems_in(text: str, *, strict: bool = True) -> list[tuple[int, int, str, str]]:
    with pytest.raises(CrontabError) as caught:
        parse_crontab(text, strict=strict)
    assert isinstance(caught.value, ConfigurationError)
    return [tuple(problem) for problem in caught.value.problems]  # type: ignore[misc]


def problem_in(text: str, *, strict: bool = True) -> tuple[int, int, str, str]:
    [found] = problems_in(text, strict=strict)
    return found


class TestParsing:
    def test_sample_crontab_is_parsed(self) -> None:
        simple, nightly, everything, spaced, keyed, kept, nested = parse_crontab(SAMPLE)
        assert simple == CronItem("simple", "* * * * *")
        assert (simple.identifier, simple.payload, simple.backfill) == ("simple", None, timedelta(0))
        assert (nightly.task, nightly.identifier) == ("with_id", "nightly")
        assert everything == CronItem(
            "everything",
            "*/15,7 8-10 1,15 */3 5-7",
            backfill=timedelta(minutes=44_761),
            max_attempts=3,
            queue_name="reports",
            priority=-5,
            payload={"to": "ann#1", "n": 31},
        )
        assert (spaced.match, spaced.payload) == ("5 5 5 5 5", {})
        assert (keyed.job_key, keyed.job_key_mode) == ("a b/c", JobKeyMode.REPLACE)
        assert (kept.job_key, kept.job_key_mode) == ("k", JobKeyMode.PRESERVE_RUN_AT)
        assert nested.task == "images/re-size:now"

    def test_fields_take_numbers_ranges_lists_stars_and_steps(self) -> None:
        pattern = parsed("*/15,7 8-10 1,15 */3 5-7")
        assert sorted(pattern.minutes) == [0, 7, 15, 30, 45]
        assert sorted(pattern.hours) == [8, 9, 10]
        assert sorted(pattern.days) == [1, 15]
        assert sorted(pattern.months) == [1, 4, 7, 10]
        assert sorted(pattern.weekdays) == [0, 5, 6], "Sunday is 0 and 7"

    def test_steps_count_from_the_first_value_of_a_field(self) -> None:
        pattern = parsed("*/100 */12 */10 */6 */2")
        assert sorted(pattern.minutes) == [0]
        assert sorted(pattern.hours) == [0, 12]
        assert sorted(pattern.days) == [1, 11, 21, 31]
        assert sorted(pattern.months) == [1, 7]
        assert sorted(pattern.weekdays) == [0, 2, 4, 6]

    def test_step_of_one_equals_a_star(self) -> None:
        assert parsed("*/1 */1 */1 */1 */1") == parsed("* * * * *") == parsed("0-59 0-23 1-31 1-12 0-6")

    @pytest.mark.parametrize("sunday", ["0", "7"])
    def test_sunday_has_two_numbers(self, sunday: str) -> None:
        assert parsed(f"* * * * {sunday}").weekdays == {0}

    def test_windows_line_endings_are_accepted(self) -> None:
        assert [item.task for item in parse_crontab("* * * * * a\r\n\r\n* * * * * b\r\n")] == ["a", "b"]

    def test_empty_text_has_no_items(self) -> None:
        assert parse_crontab("") == parse_crontab("\n # x\n") == []

    @pytest.mark.parametrize(
        ("text", "stored"),
        [
            ("{a: NaN, b: -Infinity, c: 1e999}", {"a": None, "b": None, "c": None}),
            ("{a: 9007199254740993}", {"a": 9007199254740992}),
            ("{a: 18446744073709551615}", {"a": 18446744073709552000}),
            ("{a: 1.0, b: -0, c: .5, d: 5.}", {"a": 1, "b": 0, "c": 0.5, "d": 5}),
            ("{a: 1, b: 2, a: 3}", {"a": 3, "b": 2}),
            (r"{a: '\ud83d\ude00', $b: 'x' /* why */}", {"a": "\U0001f600", "$b": "x"}),
        ],
    )
    def test_payload_equals_what_node_would_store(self, text: str, stored: dict[str, Any]) -> None:
        [item] = parse_crontab(f"* * * * * t {text}")
        assert item.payload == stored
        assert list(item.payload) == list(stored)


class TestErrors:
    def test_all_errors_of_a_file_are_reported(self, tmp_path: Path) -> None:
        file = tmp_path / "crontab"
        file.write_text("# x\n60 24 * * * a\n\n* * * * * b ?maxx=1&id=_\n* * * * * c ?\n")
        with pytest.raises(CrontabError) as caught:
            load_crontab(file)
        assert str(caught.value).splitlines() == [
            f"{file}:2:1: the minute '60' is too large; expected 0 to 59",
            f"{file}:2:4: the hour '24' is too large; expected 0 to 23",
            f"{file}:4:14: there is no option 'maxx'; did you mean 'max'?",
            f"{file}:5:13: there are no options after '?'; expected some, such as ?max=3",
        ]

    def test_line_with_too_few_fields_is_rejected(self) -> None:
        line, column, text, message = problem_in("\n * * * * task")
        assert (line, column, text) == (2, 2, "* * * * task")
        assert message == (
            "'* * * * task' is too short; "
            "expected five fields (minute, hour, day of month, month, day of week) and a task"
        )

    def test_task_of_two_words_is_rejected(self) -> None:
        assert problem_in("* * * * * two words")[:3] == (1, 15, "words")

    @pytest.mark.parametrize(
        ("line", "column", "text", "message"),
        [
            ("60 * * * * t", 1, "60", "the minute '60' is too large; expected 0 to 59"),
            ("* * 1,0 * * t", 7, "0", "the day of month '0' is too small; expected 1 to 31"),
            ("* * * 13 * t", 7, "13", "the month '13' is too large; expected 1 to 12"),
            ("* * * * 8 t", 9, "8", "the day of week '8' is too large; expected 0 to 7"),
            ("*/0 * * * * t", 1, "*/0", "the minute '*/0' has a step of 0; expected 1 or more"),
            (
                "5-5 * * * * t",
                1,
                "5-5",
                "the minute '5-5' is",
            ),
            ("1,,2 * * * * t", 1, "1,,2", "the minute '1,,2' has an empty part next to a comma"),
            ("1/5 * * * * t", 1, "1/5", "the minute '1/5' has a step but no range; expected 1-59/5"),
            ("x * * * * t", 1, "x", "the minute 'x' is not valid; expected a number from 0 to 59"),
            ("* * * * MON t", 9, "MON", "the day of week 'MON' is only valid in extended mode"),
            ("0-30/5 * * * * t", 1, "0-30/5", "the minute '0-30/5' is only valid in extended mode"),
            ("* * * * * a.b", 11, "a.b", "'a.b' is not a valid task name in a crontab; expected"),
            ("* * * * * t ?", 13, "?", "there are no options after '?'"),
            ("* * * * * t ?id=1", 14, "id=1", "the option 'id' has the value '1'; expected a letter or _"),
            ("* * * * * t ?max=1&max=2", 20, "max=2", "the option 'max' is given more than once"),
            (
                "* * * * * t ?fill=2",
                14,
                "fill=2",
                "the option 'fill' has the value '2'; expected numbers, each",
            ),
            (
                "* * * * * t ?size=2",
                14,
                "size=2",
                "there is no option 'size'; expected id, fill, max, queue, job",
            ),
            (
                "* * * * * t ?tz=UTC",
                14,
                "tz=UTC",
                "the option 'tz' is only valid in extended mode: the first line must be",
            ),
            ("* * * * * t {a: }", 17, "}", "the payload is"),
            ("* * * * * t # x", 13, "# x", "'#' is not valid here; expected ?options or a {payload}, up to"),
            ("@daily t", 1, "@daily", "'@daily' is only valid in extended mode: the first line must be"),
            ("@daily * * * * t", 1, "@daily", "'@daily' is only valid in extended mode"),
        ],
    )
    def test_error_has_line_column_and_expectation(
        self, line: str, column: int, text: str, message: str
    ) -> None:
        found = problem_in(line)
        assert found[:3] == (1, column, text)
        assert found[3].startswith(message)

    def test_duplicate_identifier_is_rejected(self) -> None:
        line, column, _, message = problem_in("* * * * * t\n* * * * * u\n * * * * * t")
        assert (line, column) == (3, 2)
        assert message.startswith("the identifier 't' is already used in line 1")
        assert "?id=" in message
        assert len(parse_crontab("* * * * * t\n* * * * * t ?id=t2")) == 2

    def test_duplicate_identifier_is_found_in_lines_with_other_errors(self) -> None:
        found = problems_in("60 * * * * t\n* * * * * t\n* * * * * u ?id=t&maxx=1\n* * * * * t ?id=1")
        assert [(line, column) for line, column, _, _ in found] == [(1, 1), (2, 1), (3, 1), (3, 19), (4, 14)]
        assert found[1][3].startswith("the identifier 't' is already used in line 1")

    def test_values_that_the_database_would_reject_are_reported_with_their_position(
        self, tmp_path: Path
    ) -> None:
        file = tmp_path / "crontab"
        lines = [
            "* * * * * a ?max=0&priority=99999",
            "60 * * * * b",
            f"* * * * * c ?jobKey={'k' * 600}&queue={'q' * 200}",
            "* * * * * " + "t" * 200,
            r"* * * * * d {a: '\u0000'}",
            r"* * * * * e {a: '\ud800'}",
            "* * * * * f ?jobKey=a%00b",
            "* * * * * a ?id=a",
        ]
        file.write_text("\n".join(lines))
        for read in (load_crontab, lambda path: load_cron_items(path.read_text(), None, None)):
            with pytest.raises(CrontabError) as caught:
                read(file)
            assert [(one.line, one.column, one.message[-52:]) for one in caught.value.problems] == [
                (1, 14, "not be used: max_attempts is 0; it must be from 1 to 32767"[-52:]),
                (1, 20, "cannot be used: priority is 99999; it must be from -32768 to 32767"[-52:]),
                (2, 1, "the minute '60' is too large; expected 0 to 59"),
                (3, 14, "kkkkkkkkkkkk…; it has 600 characters; the maximum is 512"[-52:]),
                (3, 622, "qqqqqqqqqqqq…; it has 200 characters; the maximum is 128"[-52:]),
                (4, 11, "tttttttttttt…; it has 200 characters; the maximum is 128"[-52:]),
                (5, 13, "holds a NUL character, which PostgreSQL cannot store as text"[-52:]),
                (6, 13, "'a' holds half of a surrogate pair, which is not valid text"[-52:]),
                (7, 14, "job_key is 'a\\x00b'; PostgreSQL cannot store it as text"[-52:]),
                (8, 1, "is already used in line 1; give one of the lines another: ?id=…"[-52:]),
            ]
        assert [item.max_attempts for item in parse_crontab(lines[0])] == [0], "as Node reads it"

    def test_deeply_nested_payload_is_rejected(self) -> None:
        payload = "{a:" + "[" * 5000 + "]" * 5000 + "}"
        assert problem_in(f"* * * * * t {payload}")[3] == "the payload is nested too deeply"

    def test_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"crontab '.*nowhere'"):
            load_crontab(tmp_path / "nowhere")

    def test_file_that_is_not_utf_8_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "crontab").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigurationError, match="cannot be read"):
            load_crontab(tmp_path / "crontab")

    @pytest.mark.parametrize("text", [b"* * * * * t", ["* * * * * t"], None, 5])
    def test_crontab_that_is_not_a_string_is_rejected(self, text: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"must be a string, not '.*crontab_file"):
            parse_crontab(text)

    @given(st.text())
    @example("\ufeff")
    @example("9" * 5000 + " * * * * t ?max=" + "9" * 5000 + "&fill=" + "9" * 5000 + "w")
    @example(
        "0" * 5000 + " * * * * t ?max=" + "9" * 5000 + "&fill=" + "9" * 5000 + "w {a:" + "9" * 5000 + "}"
    )
    def test_any_text_raises_only_crontab_error(self, text: str) -> None:
        for strict in (True, False, None):
            with contextlib.suppress(CrontabError):
                parse_crontab(text, strict=strict)


class TestExtendedMode:
    @pytest.mark.parametrize(
        ("extended", "plain"),
        [
            ("0 8 * * MON-FRI", "0 8 * * 1-5"),
            ("0 8 * JAN,jul sun", "0 8 * 1,7 0"),
            ("0 8 * * SAT-SUN", "0 8 * * 6-7"),
            ("1-30/5 */2 * * *", "1,6,11,16,21,26 */2 * * *"),
            ("0 0 * FEB-NOV/3 *", "0 0 * 2,5,8,11 *"),
            ("@hourly", "0 * * * *"),
            ("@daily", "0 0 * * *"),
            ("@midnight", "0 0 * * *"),
            ("@Weekly", "0 0 * * 0"),
            ("@monthly", "0 0 1 * *"),
            ("@yearly", "0 0 1 1 *"),
            ("@annually", "0 0 1 1 *"),
        ],
    )
    def test_names_range_steps_and_nicknames_are_parsed(self, extended: str, plain: str) -> None:
        [item] = parse_crontab(f"{extended} t", strict=False)
        assert parse_pattern(str(item.match)) == parse_pattern(plain)

    def test_tz_and_overlap_options_are_parsed(self) -> None:
        [item] = parse_crontab("0 8 * * * t ?tz=Europe/Paris&overlap=skip", strict=False)
        assert (item.tz, item.overlap) == ("Europe/Paris", "skip")

    @pytest.mark.parametrize(
        ("line", "text", "message"),
        [
            ("0 8 * * * t ?tz=Paris/Europe", "tz=Paris/Europe", "there is no time zone 'Paris/Europe'"),
            ("0 8 * * * t ?tz=Europe", "tz=Europe", "there is no time zone 'Europe'"),
            ("0 8 * * * t ?tz=../etc/passwd", "tz=../etc/passwd", "there is no time zone '../etc/passwd'"),
            (
                "0 8 * * * t ?overlap=no",
                "overlap=no",
                "the option 'overlap' has the value 'no'; expected skip",
            ),
            ("0 8 * * MOO t", "MOO", "the day of week 'MOO' is not a known name; expected one of SUN, MON"),
            ("MON 8 * * * t", "MON", "the minute 'MON' is not a known name; expected a number"),
            ("0 8 * * FRI-MON t", "FRI-MON", "the day of week 'FRI-MON' is"),
            ("@reboot t", "@reboot", "there is no '@reboot'; expected one of @yearly"),
            ("@dayly t", "@dayly", "there is no '@dayly'; did you mean @daily?"),
            ("@every t", "@every", "there is no '@every'; expected one of @yearly"),
            ("@daily", "@daily", "there is nothing after '@daily'; expected a task"),
            (
                "0 8 * * * t ?overlap=skip&jobKey=a",
                "overlap=skip",
                "the options 'overlap' and 'jobKey' cannot be combined",
            ),
        ],
    )
    def test_errors_in_extended_mode_name_the_text(self, line: str, text: str, message: str) -> None:
        found = problem_in(line, strict=False)
        assert found[2] == text
        assert found[3].startswith(message)

    def test_first_line_of_a_file_enables_extended_mode(self, tmp_path: Path) -> None:
        file = tmp_path / "crontab"
        file.write_text("# graphile-worker: extended\n@daily t\n")
        assert [item.match for item in load_crontab(file)] == ["@daily"]
        file.write_text("\n# graphile-worker: extended\n@daily t\n")
        with pytest.raises(CrontabError):
            load_crontab(file)

    def test_strict_mode_treats_the_extended_line_as_a_comment(self) -> None:
        text = "# graphile-worker: extended\n@daily t\n"
        assert problem_in(text)[0] == 2
        assert len(parse_crontab(text, strict=None)) == 1


def fields() -> st.SearchStrategy[str]:
    def field(first: int, last: int) -> st.SearchStrategy[str]:
        number = st.integers(first, last)
        pairs = st.tuples(number, number).filter(lambda pair: pair[0] < pair[1])
        part = st.one_of(
            st.just("*"),
            number.map(str),
            st.integers(1, 99).map(lambda step: f"*/{step}"),
            pairs.map(lambda pair: f"{pair[0]}-{pair[1]}"),
        )
        return st.lists(part, min_size=1, max_size=3).map(",".join)

    return st.tuples(field(0, 59), field(0, 23), field(1, 31), field(1, 12), field(0, 7)).map(" ".join)


def extended_fields() -> st.SearchStrategy[str]:
    """Generate fields with names and with steps on ranges."""

    def field(first: int, last: int, names: Sequence[str] = ()) -> st.SearchStrategy[str]:
        pairs = st.tuples(st.integers(first, last), st.integers(first, last)).filter(lambda p: p[0] < p[1])

        def shown(number: int, by_name: bool) -> str:
            return names[number - first] if by_name and number - first < len(names) else str(number)

        return st.one_of(
            st.just("*"),
            st.builds(shown, st.integers(first, last), st.booleans()),
            st.builds(
                lambda pair, name, step: f"{shown(pair[0], name)}-{shown(pair[1], name)}/{step}",
                *(pairs, st.booleans(), st.integers(1, 99)),
            ),
        )

    months, days = FIELDS[3].names, [*FIELDS[4].names, "Sun"]
    return st.tuples(field(0, 59), field(0, 23), field(1, 31), field(1, 12, months), field(0, 7, days)).map(
        " ".join
    )


def cron_item(*, overlap: Overlap, job_key: str | None, **arguments: Any) -> CronItem:
    return CronItem(overlap=overlap, job_key=None if overlap == "skip" else job_key, **arguments)


NAMES = st.from_regex(r"[_a-zA-Z][_a-zA-Z0-9]{0,5}", fullmatch=True)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer())
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
ITEMS = st.builds(
    cron_item,
    task=st.from_regex(r"[_a-zA-Z][_a-zA-Z0-9:/-]{0,5}", fullmatch=True),
    match=fields() | extended_fields() | st.sampled_from(list(NICKNAMES)),
    identifier=NAMES | st.just(""),
    payload=st.none() | st.dictionaries(NAMES, JSON, max_size=3),
    backfill=st.timedeltas(timedelta(0), timedelta(days=800)).map(lambda t: t - t % timedelta(seconds=1)),
    max_attempts=st.none() | st.integers(1, 9),
    queue_name=st.none() | st.from_regex(r"[-a-zA-Z0-9_:]{1,5}", fullmatch=True),
    priority=st.none() | st.integers(-9, 9),
    job_key=st.none()
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\u2028\u2029")),
    job_key_mode=st.sampled_from([None, JobKeyMode.REPLACE, JobKeyMode.PRESERVE_RUN_AT]),
    overlap=st.sampled_from(["allow", "skip"]),
    tz=st.sampled_from([None, None, "Europe/Paris", "America/Argentina/Buenos_Aires", "Etc/GMT+5"]),
)


class TestFormatting:
    @given(st.lists(ITEMS, max_size=3, unique_by=lambda item: item.identifier))
    def test_formatted_items_are_parsed_unchanged(self, items: list[CronItem]) -> None:
        text = format_crontab(items)
        once = parse_crontab(text, strict=None)
        assert once == items
        assert format_crontab(once) == text

    def test_sample_survives_parsing_and_formatting(self) -> None:
        items = parse_crontab(SAMPLE)
        assert parse_crontab(format_crontab(items)) == items

    def test_formatted_crontab_starts_with_the_extended_line_if_needed(self) -> None:
        plain, zoned = (
            CronItem("a", "0 8 * * *"),
            CronItem("b", "0 8 * * MON", tz="Europe/Paris", overlap="skip"),
        )
        assert format_crontab([plain]) == "0 8 * * * a\n"
        assert format_crontab([plain, zoned]).splitlines() == [
            "# graphile-worker: extended",
            "0 8 * * * a",
            "0 8 * * MON b ?tz=Europe/Paris&overlap=skip",
        ]

    @pytest.mark.parametrize(
        ("item", "why"),
        [
            (CronItem("t", lambda _: True), "its match is a function"),
            (CronItem("send mail", "* * * * *"), "the task name 'send mail' is not valid"),
            (CronItem("t", "* * * * *", identifier="é"), "identifier='é' is not valid"),
            (CronItem("t", "* * * * *", queue_name="a b"), "queue_name='a b' is not valid"),
            (CronItem("t", "* * * * *", job_key="a\nb"), "job_key="),
            (CronItem("t", "* * * * *", backfill=timedelta(seconds=0.5)), "has fractions of a second"),
            (
                CronItem("t", "* * * * *", payload={"a": [2**53 + 1]}),
                "a number with more digits than JavaScript",
            ),
            (CronItem("t", "* * * * *", payload=[1]), "payload"),
        ],
    )
    def test_item_that_a_crontab_cannot_express_is_rejected(self, item: CronItem, why: str) -> None:
        with pytest.raises(ConfigurationError, match="crontab") as caught:
            format_crontab([item])
        assert why in str(caught.value)
