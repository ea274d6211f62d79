"""`CronItem`, lists of items, and the pattern builder `Cron`."""

from __future__ import annotations

import inspect
import json
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace
from datetime import UTC, datetime, time, timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from graphile_worker import (
    App,
    ConfigurationError,
    Cron,
    CronItem,
    JobKeyMode,
    parse_cron_items,
    parse_crontab,
)
from graphile_worker._base.payload import encode_payload
from graphile_worker.cron.item import parse_fill

EVERY_MINUTE = "* * * * *"
AT = datetime(2030, 1, 1, 8, tzinfo=UTC)


class TestCronItem:
    def test_omitted_options_have_defaults(self) -> None:
        item = CronItem("report", EVERY_MINUTE)
        assert (item.identifier, item.payload, item.backfill) == ("report", None, timedelta(0))
        assert (item.max_attempts, item.queue_name, item.priority) == (None, None, None)
        assert (item.job_key, item.job_key_mode, item.tz, item.overlap) == (None, None, None, "allow")

    def test_pattern_is_an_alias_of_match(self) -> None:
        assert CronItem("t", pattern=EVERY_MINUTE) == CronItem("t", EVERY_MINUTE)
        with pytest.raises(ConfigurationError, match="match and pattern"):
            CronItem("t", EVERY_MINUTE, pattern=EVERY_MINUTE)

    def test_item_is_immutable_and_can_be_copied_with_changes(self) -> None:
        item = CronItem("t", EVERY_MINUTE, identifier="i")
        with pytest.raises(FrozenInstanceError):
            item.task = "u"  # type: ignore[misc]
        assert replace(item, task="u") == CronItem("u", EVERY_MINUTE, identifier="i")

    def test_equal_items_have_the_same_hash_with_any_payload(self) -> None:
        assert len({CronItem("t", EVERY_MINUTE, payload={"a": [1]}) for _ in range(2)}) == 1

    def test_item_can_be_pickled(self) -> None:
        item = CronItem("t", "0 8 * * MON", tz="Europe/Paris", payload={"a": 1}, backfill="1h")
        assert pickle.loads(pickle.dumps(item)) == item

    def test_tz_may_be_a_zoneinfo(self) -> None:
        assert CronItem("t", EVERY_MINUTE, tz=ZoneInfo("Europe/Paris")) == CronItem(
            "t", EVERY_MINUTE, tz="Europe/Paris"
        )

    def test_occurrences_extend_to_the_last_date(self) -> None:
        leap = list(islice(CronItem("t", "0 0 29 2 *").occurrences(AT), 50))
        assert (leap[0].year, leap[-1].year) == (2032, 2236)
        assert list(CronItem("t", "0 0 31 2 *").occurrences(AT)) == []
        assert len(list(CronItem("t", "@yearly").occurrences(AT))) == 9999 - 2030

    def test_backfill_may_be_a_phrase(self) -> None:
        assert CronItem("t", EVERY_MINUTE, backfill="1h30m").backfill == timedelta(minutes=90)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"task": "", "match": EVERY_MINUTE}, r"task ''"),
            ({"task": "t"}, r"'t'.*pattern ''.* 0 fields"),
            ({"task": "t", "match": "every day"}, r"'t'.*pattern 'every day'.* 2 fields"),
            (
                {"task": "t", "match": "60 * * * x"},
                r"minute '60'.* 0 to 59.*day of week 'x'",
            ),
            ({"task": "t", "match": 5}, r"match=5"),
            ({"task": "t", "match": lambda: True}, r"function of a datetime"),
            ({"task": "t", "match": EVERY_MINUTE, "tz": "Mars"}, r"'t'.*time zone 'Mars'"),
            ({"task": "t", "match": EVERY_MINUTE, "tz": UTC}, r"'t'.*time zone .* must be a name"),
            ({"task": "t", "match": EVERY_MINUTE, "tz": 5}, r"'t'.*time zone 5 must be a name"),
            (
                {"task": "t", "match": EVERY_MINUTE, "backfill": "soon"},
                r"backfill.*'soon'",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "backfill": timedelta(-1)},
                r"backfill.*days=-1",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "overlap": "no"},
                r"overlap='no'.*'allow' or 'skip'",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "job_key_mode": "x"},
                r"job_key_mode='x'",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "overlap": "skip", "job_key": "k"},
                r"key",
            ),
            ({"task": "t", "match": EVERY_MINUTE, "identifier": 5}, r"identifier 5"),
        ],
    )
    def test_invalid_item_is_rejected(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            CronItem(**arguments)


class TestJobsOfItems:
    def test_job_has_the_options_of_its_item_and_the_time(self) -> None:
        [item] = parse_crontab("0 8 * * * t ?max=3&queue=q&priority=-1&jobKey=k {a: 1, _cron: 'mine'}")
        job = item.job_at(AT, backfilled=True)
        assert (job.identifier, job.run_at) == ("t", AT)
        assert (job.max_attempts, job.queue_name, job.priority) == (3, "q", -1)
        assert (job.job_key, job.job_key_mode, job.flags) == ("k", JobKeyMode.REPLACE, None)
        assert encode_payload(job.payload) == (
            '{"a":1,"_cron":{"ts":"2030-01-01T08:00:00.000Z","backfilled":true}}'
        )

    def test_job_without_a_payload_still_has_the_scheduled_time(self) -> None:
        job = CronItem("t", EVERY_MINUTE).job_at(AT)
        assert job.payload == {"_cron": {"ts": "2030-01-01T08:00:00.000Z", "backfilled": False}}

    def test_payload_may_be_any_value_that_encodes_as_a_json_object(self) -> None:
        @dataclass
        class Report:
            month: int

        job = CronItem("t", EVERY_MINUTE, payload=Report(5)).job_at(AT)
        assert json.loads(encode_payload(job.payload))["month"] == 5


class TestParseCronItems:
    def test_parse_cron_items_takes_items_and_dicts(self) -> None:
        items = parse_cron_items(
            [
                CronItem("a", EVERY_MINUTE),
                {"task": "b", "match": EVERY_MINUTE},
                {"task": "b", "pattern": EVERY_MINUTE, "identifier": "c", "backfill": "1h"},
            ]
        )
        assert [item.identifier for item in items] == ["a", "b", "c"]
        assert [item.backfill for item in items] == [timedelta(0), timedelta(0), timedelta(hours=1)]

    def test_duplicate_identifier_is_rejected(self) -> None:
        with pytest.raises(ConfigurationError, match="identifier 'a'"):
            parse_cron_items([CronItem("a", EVERY_MINUTE), CronItem("b", EVERY_MINUTE, identifier="a")])

    def test_duplicate_identifier_error_names_both_places(self) -> None:
        here = Path(__file__).relative_to(Path.cwd())
        line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
        app = App(crontab="# a comment\n* * * * * a")

        @app.cron(EVERY_MINUTE)
        @app.task
        async def a() -> None: ...

        with pytest.raises(ConfigurationError, match=f"'a': {here}, line {line + 3} and crontab, line 2\\."):
            _ = app.cron_items
        with pytest.raises(ConfigurationError, match=f"'a': {here}, line {line + 3} and {here}, line"):
            app.cron(EVERY_MINUTE)(a)
        from_file = parse_crontab("* * * * * a", source="jobs/crontab")
        with pytest.raises(ConfigurationError, match=r"'a': jobs/crontab, line 1 and cron_items\[1\]"):
            parse_cron_items([*from_file, {"task": "a", "match": EVERY_MINUTE}])

    @pytest.mark.parametrize(
        ("items", "message"),
        [
            (EVERY_MINUTE, "parse_crontab"),
            ({"task": "t"}, "list"),
            (5, "list"),
            ([5], "not 5"),
            ([{"match": EVERY_MINUTE}], "needs a task"),
            ([{"task": "t", "match": EVERY_MINUTE, "maxAttempts": 3}], "'max_attempts'"),
            ([{"task": "t", "match": EVERY_MINUTE, "zzz": 3}], "task, match, identifier"),
            ([CronItem("t", EVERY_MINUTE, max_attempts=0)], "'t': max_attempts is 0;"),
            ([CronItem("t", EVERY_MINUTE, priority=40_000)], "'t': priority is 40000;"),
            ([CronItem("t", EVERY_MINUTE, payload=[1])], r"payload \[1\]"),
            (
                [CronItem("t", EVERY_MINUTE, payload={"a": object()})],
                "'t': .*'a'",
            ),
        ],
    )
    def test_item_whose_job_could_not_be_added_is_rejected(self, items: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            parse_cron_items(items)


class TestBackfillPhrases:
    @pytest.mark.parametrize(
        ("phrase", "minutes"),
        [("4w3d2h1m", 44_761), ("1h30m", 90), ("90m", 90), ("0s", 0), ("1d1d", 2880), ("5m1w", 10_085)],
    )
    def test_phrase_has_weeks_days_hours_minutes_and_seconds(self, phrase: str, minutes: int) -> None:
        assert parse_fill(phrase) == timedelta(minutes=minutes)

    def test_backfill_may_be_seconds(self) -> None:
        assert CronItem("t", EVERY_MINUTE, backfill=7200).backfill == timedelta(hours=2)
        assert parse_fill(0.5) == timedelta(milliseconds=500)
        for wrong in (-1, True, float("nan"), float("inf")):
            with pytest.raises(ConfigurationError, match=r"seconds, a timedelta"):
                parse_fill(wrong)

    def test_backfill_is_limited_to_the_longest_timedelta(self) -> None:
        assert parse_fill("99999999999999999w").days == 999_999_999


class TestCronBuilder:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            (Cron.every(minutes=1), "* * * * *"),
            (Cron.every(minutes=15), "*/15 * * * *"),
            (Cron.every(hours=1), "0 * * * *"),
            (Cron.every(hours=6), "0 */6 * * *"),
            (Cron.hourly(), "0 * * * *"),
            (Cron.hourly(at=59), "59 * * * *"),
            (Cron.daily(), "0 0 * * *"),
            (Cron.daily(at=time(23, 5)), "5 23 * * *"),
            (Cron.weekly(), "0 0 * * 0"),
            (Cron.weekly(on=7, at="09:15"), "15 9 * * 0"),
            (Cron.weekly(on=["Fri", "monday", 3, 1]), "0 0 * * 1,3,5"),
            (Cron.monthly(on=31, at="12:00"), "0 12 31 * *"),
            (Cron.yearly(), "0 0 1 1 *"),
            (Cron.yearly(month="February", on=29, at="12:30"), "30 12 29 2 *"),
            (Cron.yearly(month=12, on=24), "0 0 24 12 *"),
        ],
    )
    def test_builder_returns_the_pattern(self, pattern: str, expected: str) -> None:
        assert pattern == expected
        assert parse_crontab(f"{pattern} t")[0].match == expected, "Node can read it"

    @pytest.mark.parametrize(
        ("call", "arguments", "message"),
        [
            (Cron.every, {}, "minutes.* hours"),
            (Cron.every, {"minutes": 5, "hours": 1}, "minutes.* hours"),
            (Cron.every, {"minutes": 0}, "minutes is 0;"),
            (Cron.every, {"minutes": 60}, "minutes is 60;"),
            (Cron.every, {"minutes": 7}, "7 does not divide 60"),
            (Cron.every, {"hours": 5}, "5 does not divide 24"),
            (Cron.every, {"minutes": True}, "minutes is True"),
            (Cron.hourly, {"at": 60}, "at is 60;"),
            (Cron.daily, {"at": "8 o'clock"}, 'at is "8 o\'clock";'),
            (Cron.daily, {"at": "08:00:30"}, "hours and minutes"),
            (Cron.daily, {"at": time(8, tzinfo=UTC)}, "zone"),
            (Cron.weekly, {"on": "noday"}, "on is 'noday'; .*sunday, monday"),
            (Cron.weekly, {"on": "m"}, "on is 'm'"),
            (Cron.weekly, {"on": 8}, "on is 8;"),
            (Cron.weekly, {"on": []}, "needs a day"),
            (Cron.weekly, {"on": None}, "on is None;"),
            (Cron.weekly, {"on": [None]}, "on is None;"),
            (Cron.yearly, {"month": 2, "on": 30}, "on is 30; .* 29"),
            (Cron.yearly, {"month": "apr", "on": 31}, "on is 31; .* 30"),
            (Cron.monthly, {"on": 0}, "on is 0; .* 31"),
            (Cron.yearly, {"month": 13}, "month is 13;"),
            (Cron.yearly, {"month": "smarch"}, "month is 'smarch'"),
        ],
    )
    def test_invalid_time_is_rejected(self, call: Any, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            call(**arguments)
