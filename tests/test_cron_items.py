"""Items of a schedule, as they are made in code."""

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
from graphile_worker.cron.item import parse_fill
from graphile_worker.payload import encode_payload

EVERY_MINUTE = "* * * * *"
AT = datetime(2030, 1, 1, 8, tzinfo=UTC)


class TestItems:
    def test_what_is_not_said_has_a_default(self) -> None:
        item = CronItem("report", EVERY_MINUTE)
        assert (item.identifier, item.payload, item.backfill) == ("report", None, timedelta(0))
        assert (item.max_attempts, item.queue_name, item.priority) == (None, None, None)
        assert (item.job_key, item.job_key_mode, item.tz, item.overlap) == (None, None, None, "allow")

    def test_pattern_is_another_name_for_match(self) -> None:
        assert CronItem("t", pattern=EVERY_MINUTE) == CronItem("t", EVERY_MINUTE)
        with pytest.raises(ConfigurationError, match="match and pattern, which mean the same"):
            CronItem("t", EVERY_MINUTE, pattern=EVERY_MINUTE)

    def test_it_cannot_be_changed_but_copied_with_changes(self) -> None:
        item = CronItem("t", EVERY_MINUTE, identifier="i")
        with pytest.raises(FrozenInstanceError):
            item.task = "u"  # type: ignore[misc]
        assert replace(item, task="u") == CronItem("u", EVERY_MINUTE, identifier="i")

    def test_equal_ones_have_the_same_hash_whatever_the_payload(self) -> None:
        assert len({CronItem("t", EVERY_MINUTE, payload={"a": [1]}) for _ in range(2)}) == 1

    def test_it_can_be_sent_to_another_process(self) -> None:
        item = CronItem("t", "0 8 * * MON", tz="Europe/Paris", payload={"a": 1}, fill="1h")
        assert pickle.loads(pickle.dumps(item)) == item

    def test_a_time_zone_may_be_the_thing_itself(self) -> None:
        assert CronItem("t", EVERY_MINUTE, tz=ZoneInfo("Europe/Paris")) == CronItem(
            "t", EVERY_MINUTE, tz="Europe/Paris"
        )

    def test_it_tells_of_the_future_for_as_long_as_dates_go(self) -> None:
        leap = list(islice(CronItem("t", "0 0 29 2 *").occurrences(AT), 50))
        assert (leap[0].year, leap[-1].year) == (2032, 2236)
        assert list(CronItem("t", "0 0 31 2 *").occurrences(AT)) == []
        assert len(list(CronItem("t", "@yearly").occurrences(AT))) == 9999 - 2030

    def test_a_backfill_may_be_a_phrase(self) -> None:
        assert CronItem("t", EVERY_MINUTE, fill="1h30m").backfill == timedelta(minutes=90)
        with pytest.raises(ConfigurationError, match="backfill and fill, which mean the same"):
            CronItem("t", EVERY_MINUTE, fill="1h", backfill=timedelta(hours=1))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"task": "", "match": EVERY_MINUTE}, r"A cron item has the task ''"),
            ({"task": "t"}, r"'t': The pattern '' is wrong: it has 0 fields; expected 5: minute, hour"),
            ({"task": "t", "match": "every day"}, r"'t': The pattern 'every day' is wrong: it has 2 fields"),
            (
                {"task": "t", "match": "60 * * * x"},
                r"minute '60' is too large; expected 0 to 59; the day of w",
            ),
            ({"task": "t", "match": 5}, r"match=5; it must be a pattern, or a function of a datetime"),
            ({"task": "t", "match": lambda: True}, r"it must be a pattern, or a function of a datetime"),
            ({"task": "t", "match": EVERY_MINUTE, "tz": "Mars"}, r"'t': There is no time zone 'Mars'"),
            ({"task": "t", "match": EVERY_MINUTE, "tz": UTC}, r"'t': The time zone .* must be a name, such"),
            ({"task": "t", "match": EVERY_MINUTE, "tz": 5}, r"'t': The time zone 5 must be a name, such as"),
            (
                {"task": "t", "match": EVERY_MINUTE, "backfill": "soon"},
                r"A backfill of 'soon' is not understood",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "backfill": timedelta(-1)},
                r"A backfill of .* not understood",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "overlap": "no"},
                r"overlap='no'; it must be 'allow' or 'skip'",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "job_key_mode": "x"},
                r"job_key_mode='x'; it must be one of",
            ),
            (
                {"task": "t", "match": EVERY_MINUTE, "overlap": "skip", "job_key": "k"},
                r"needs the job's key for",
            ),
            ({"task": "t", "match": EVERY_MINUTE, "identifier": 5}, r"identifier 5, which is no text"),
        ],
    )
    def test_what_is_wrong_is_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            CronItem(**arguments)


class TestItsJobs:
    def test_the_job_of_a_minute(self) -> None:
        [item] = parse_crontab("0 8 * * * t ?max=3&queue=q&priority=-1&jobKey=k {a: 1, _cron: 'mine'}")
        job = item.job_at(AT, backfilled=True)
        assert (job.identifier, job.run_at) == ("t", AT)
        assert (job.max_attempts, job.queue_name, job.priority) == (3, "q", -1)
        assert (job.job_key, job.job_key_mode, job.flags) == ("k", JobKeyMode.REPLACE, None)
        assert encode_payload(job.payload) == (
            '{"a":1,"_cron":{"ts":"2030-01-01T08:00:00.000Z","backfilled":true}}'
        )

    def test_it_is_told_of_the_schedule_even_if_there_is_no_payload(self) -> None:
        job = CronItem("t", EVERY_MINUTE).job_at(AT)
        assert job.payload == {"_cron": {"ts": "2030-01-01T08:00:00.000Z", "backfilled": False}}

    def test_a_payload_may_be_anything_that_is_an_object_in_json(self) -> None:
        @dataclass
        class Report:
            month: int

        job = CronItem("t", EVERY_MINUTE, payload=Report(5)).job_at(AT)
        assert json.loads(encode_payload(job.payload))["month"] == 5


class TestManyItems:
    def test_items_and_dictionaries(self) -> None:
        items = parse_cron_items(
            [
                CronItem("a", EVERY_MINUTE),
                {"task": "b", "match": EVERY_MINUTE},
                {"task": "b", "pattern": EVERY_MINUTE, "identifier": "c", "fill": "1h"},
            ]
        )
        assert [item.identifier for item in items] == ["a", "b", "c"]
        assert [item.backfill for item in items] == [timedelta(0), timedelta(0), timedelta(hours=1)]

    def test_two_with_one_identifier_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="two cron items with the identifier 'a'"):
            parse_cron_items([CronItem("a", EVERY_MINUTE), CronItem("b", EVERY_MINUTE, identifier="a")])

    def test_two_with_one_identifier_are_both_located(self) -> None:
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
            (EVERY_MINUTE, "A crontab's text is read by parse_crontab"),
            ({"task": "t"}, "Cron items are a list"),
            (5, "Cron items are a list"),
            ([5], "A cron item is a CronItem or a dict, not 5"),
            ([{"match": EVERY_MINUTE}], "A cron item needs a task"),
            ([{"task": "t", "match": EVERY_MINUTE, "maxAttempts": 3}], "Did you mean 'max_attempts'"),
            ([{"task": "t", "match": EVERY_MINUTE, "zzz": 3}], "There are: task, match, identifier"),
            ([CronItem("t", EVERY_MINUTE, max_attempts=0)], "'t': max_attempts is 0; it must be from 1"),
            ([CronItem("t", EVERY_MINUTE, priority=40_000)], "'t': priority is 40000; it must be from"),
            ([CronItem("t", EVERY_MINUTE, payload=[1])], r"payload \[1\]; it must be a JSON object"),
            (
                [CronItem("t", EVERY_MINUTE, payload={"a": object()})],
                "'t': The argument 'a' cannot be written",
            ),
        ],
    )
    def test_what_could_not_be_added_is_refused(self, items: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            parse_cron_items(items)


class TestPhrases:
    @pytest.mark.parametrize(
        ("phrase", "minutes"),
        [("4w3d2h1m", 44_761), ("1h30m", 90), ("90m", 90), ("0s", 0), ("1d1d", 2880), ("5m1w", 10_085)],
    )
    def test_weeks_days_hours_minutes_and_seconds(self, phrase: str, minutes: int) -> None:
        assert parse_fill(phrase) == timedelta(minutes=minutes)

    def test_seconds(self) -> None:
        assert CronItem("t", EVERY_MINUTE, fill=7200).backfill == timedelta(hours=2)
        assert parse_fill(0.5) == timedelta(milliseconds=500)
        for wrong in (-1, True, float("nan"), float("inf")):
            with pytest.raises(ConfigurationError, match=r"must be seconds, a timedelta, or a phrase"):
                parse_fill(wrong)

    def test_beyond_all_dates_is_far_enough(self) -> None:
        assert parse_fill("99999999999999999w").days == 999_999_999


class TestTheBuilder:
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
    def test_patterns(self, pattern: str, expected: str) -> None:
        assert pattern == expected
        assert parse_crontab(f"{pattern} t")[0].match == expected, "Node reads it too"

    @pytest.mark.parametrize(
        ("call", "arguments", "message"),
        [
            (Cron.every, {}, "minutes, or hours: one of the two"),
            (Cron.every, {"minutes": 5, "hours": 1}, "minutes, or hours: one of the two"),
            (Cron.every, {"minutes": 0}, "minutes is 0; it must be a number from 1 to 59"),
            (Cron.every, {"minutes": 60}, "minutes is 60; it must be a number from 1 to 59"),
            (Cron.every, {"minutes": 7}, "would not be even, for 7 does not divide 60"),
            (Cron.every, {"hours": 5}, "would not be even, for 5 does not divide 24"),
            (Cron.every, {"minutes": True}, "minutes is True"),
            (Cron.hourly, {"at": 60}, "at is 60; it must be a number from 0 to 59"),
            (Cron.daily, {"at": "8 o'clock"}, "at is \"8 o'clock\"; it must be a time such as '08:00'"),
            (Cron.daily, {"at": "08:00:30"}, "it must be a time in hours and minutes"),
            (Cron.daily, {"at": time(8, tzinfo=UTC)}, "The zone is that of the item"),
            (Cron.weekly, {"on": "noday"}, "on is 'noday'; it must be one of sunday, monday"),
            (Cron.weekly, {"on": "m"}, "on is 'm'"),
            (Cron.weekly, {"on": 8}, "on is 8; it must be a number from 0 to 7"),
            (Cron.weekly, {"on": []}, "needs a day"),
            (Cron.weekly, {"on": None}, "on is None; it must be a number from 0 to 7"),
            (Cron.weekly, {"on": [None]}, "on is None; it must be a number from 0 to 7"),
            (Cron.yearly, {"month": 2, "on": 30}, "on is 30; it must be a number from 1 to 29"),
            (Cron.yearly, {"month": "apr", "on": 31}, "on is 31; it must be a number from 1 to 30"),
            (Cron.monthly, {"on": 0}, "on is 0; it must be a number from 1 to 31"),
            (Cron.yearly, {"month": 13}, "month is 13; it must be a number from 1 to 12"),
            (Cron.yearly, {"month": "smarch"}, "month is 'smarch'"),
        ],
    )
    def test_what_is_no_time_is_refused(self, call: Any, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            call(**arguments)
