"""Occurrences of cron items: calendars, time zones, and daylight saving time."""

from __future__ import annotations

import time
import zoneinfo
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, strategies as st

from graphile_worker import ConfigurationError, CronItem

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def item(pattern: str, tz: str | None = None) -> CronItem:
    return CronItem("t", pattern, tz=tz)


def utc(*moment: int) -> datetime:
    return datetime(*moment, tzinfo=UTC)  # type: ignore[arg-type,misc]


def local_times(pattern: str, tz: str, start: datetime, *, days: int = 1) -> list[str]:
    """Return the local times of the occurrences, with their offsets."""
    found = item(pattern, tz).occurrences(start - MINUTE, start + days * DAY - MINUTE)
    return [f"{at.astimezone(ZoneInfo(tz)):%H:%M%z}" for at in found]


class TestMatching:
    def test_stars_match_every_minute(self) -> None:
        every = item("* * * * *")
        assert all(every.matches(utc(2030, 1, 1) + n * 997 * MINUTE) for n in range(2000))

    def test_weekday_range_matches_its_days(self) -> None:
        weekend = item("* * * * 5-6")
        assert [weekend.matches(utc(2030, 1, day)) for day in range(6, 13)] == [False] * 5 + [True] * 2

    def test_either_kind_of_day_matches_if_both_are_restricted(self) -> None:
        both = item("0 12 13 * 5")
        assert both.matches(utc(2030, 9, 13, 12)), "a Friday, and the 13th"
        assert both.matches(utc(2030, 9, 6, 12)), "a Friday"
        assert both.matches(utc(2030, 10, 13, 12)), "the 13th"
        assert not both.matches(utc(2030, 10, 14, 12))
        assert not both.matches(utc(2030, 9, 13, 11)), "the other fields must still match"
        assert not item("0 12 13 1 5").matches(utc(2030, 9, 13, 12))

    def test_only_the_restricted_kind_of_day_counts(self) -> None:
        assert not item("0 12 13 * *").matches(utc(2030, 9, 6, 12))
        assert not item("0 12 * * 5").matches(utc(2030, 10, 13, 12))
        assert not item("0 12 13 * 0-6").matches(utc(2030, 9, 6, 12)), "all weekdays do not restrict"

    def test_seconds_are_ignored(self) -> None:
        assert item("5 8 * * *").matches(datetime(2030, 1, 1, 8, 5, 59, 999_999, UTC))

    def test_time_in_another_zone_is_converted(self) -> None:
        assert item("0 8 * * *").matches(datetime(2030, 1, 1, 9, tzinfo=ZoneInfo("Europe/Paris")))

    def test_time_without_a_zone_is_utc(self) -> None:
        assert item("0 8 * * *").matches(datetime(2030, 1, 1, 8))  # noqa: DTZ001
        assert item("0 8 * * *", "Europe/Paris").matches(datetime(2030, 1, 1, 7))  # noqa: DTZ001

    def test_predicate_is_called_with_the_time_in_its_zone(self) -> None:
        received: list[datetime] = []

        def is_odd_hour(at: datetime) -> bool:
            received.append(at)
            return at.hour % 2 == 1 and at.minute == 0

        odd = CronItem("t", is_odd_hour, tz="Asia/Kolkata")
        assert odd.matches(utc(2030, 1, 1, 1, 30))
        assert [f"{at:%H:%M %Z}" for at in received] == ["07:00 IST"]
        assert odd.next_after(utc(2030, 1, 1, 2, 29)) == utc(2030, 1, 1, 3, 30)

    def test_search_for_a_matching_predicate_ends_after_a_year(self) -> None:
        assert CronItem("t", lambda _: False).next_after(utc(2030, 1, 1)) is None


class TestNextOccurrence:
    def test_next_occurrence_is_after_the_given_time_even_if_that_matches(self) -> None:
        assert item("0 8 * * *").next_after(utc(2030, 1, 1, 8)) == utc(2030, 1, 2, 8)
        assert item("0 8 * * *").next_after(utc(2030, 1, 1, 7, 59, 59)) == utc(2030, 1, 1, 8)

    def test_29_february_eight_years_away_is_found_quickly(self) -> None:
        started = time.process_time()
        assert item("59 23 29 2 *").next_after(utc(2096, 3, 1)) == utc(2104, 2, 29, 23, 59)
        paris = item("59 23 29 2 *", "Europe/Paris").next_after(utc(2096, 3, 1))
        assert paris == utc(2104, 2, 29, 22, 59)
        # A search minute by minute would visit millions. This limit only excludes such a search.
        assert time.process_time() - started < 2

    @pytest.mark.parametrize("tz", [None, "Europe/Paris"])
    def test_31_february_never_occurs(self, tz: str | None) -> None:
        never = item("0 0 31 2 *", tz)
        assert never.next_after(utc(2030, 1, 1)) is None
        assert list(never.occurrences(utc(2030, 1, 1), utc(2040, 1, 1))) == []

    @pytest.mark.parametrize("tz", [None, "Europe/Paris", "America/New_York"])
    def test_nothing_occurs_after_the_last_date(self, tz: str | None) -> None:
        assert item("0 0 1 1 *", tz).next_after(utc(9999, 6, 1)) is None
        assert item("* * * * *", tz).next_after(utc(9999, 12, 31, 23, 59)) is None

    def test_occurrence_at_an_offset_with_seconds_is_a_whole_minute_in_utc(self) -> None:
        at = item("0 12 * * *", "Europe/Amsterdam").next_after(utc(1930, 1, 1))
        assert at == utc(1930, 1, 1, 11, 41), "clocks there were 19 minutes and 32 seconds ahead"
        assert item("0 12 * * *", "Europe/Amsterdam").matches(at)


class TestDaylightSavingTime:
    """In Europe/Paris, 02:00 is followed by 03:00 on 31 March 2030, and 02:59 by 02:00 on 27 October."""

    SPRING, AUTUMN = utc(2030, 3, 30, 23), utc(2030, 10, 26, 22)

    def test_skipped_time_runs_once_right_after_the_gap(self) -> None:
        assert local_times("30 2 * * *", "Europe/Paris", self.SPRING) == ["03:00+0200"]
        assert local_times("*/10 2 * * *", "Europe/Paris", self.SPRING) == ["03:00+0200"]
        assert local_times("30 1-4 * * *", "Europe/Paris", self.SPRING) == [
            *("01:30+0100", "03:00+0200", "03:30+0200", "04:30+0200"),
        ]
        assert local_times("0 */2 * * *", "Europe/Paris", self.SPRING)[:3] == [
            "00:00+0100",
            "03:00+0200",
            "04:00+0200",
        ]

    def test_skipped_time_and_the_time_after_the_gap_run_once(self) -> None:
        assert local_times("0 2,3 * * *", "Europe/Paris", self.SPRING) == ["03:00+0200"]

    def test_repeated_time_runs_only_the_first_time(self) -> None:
        assert local_times("30 2 * * *", "Europe/Paris", self.AUTUMN) == ["02:30+0200"]
        assert local_times("0 1-3 * * *", "Europe/Paris", self.AUTUMN) == [
            "01:00+0200",
            "02:00+0200",
            "03:00+0100",
        ]

    @pytest.mark.parametrize(("start", "hours"), [(SPRING, 23), (AUTUMN, 25)])
    def test_hourly_pattern_runs_every_real_hour(self, start: datetime, hours: int) -> None:
        for pattern in ("30 * * * *", "30 0-23 * * *"):
            found = list(item(pattern, "Europe/Paris").occurrences(start, start + hours * HOUR))
            assert [at - start for at in found] == [HOUR * n + 30 * MINUTE for n in range(hours)]
        fives = item("*/5 * * * *", "Europe/Paris").occurrences(start, start + hours * HOUR)
        assert [at - start for at in fives] == [MINUTE * 5 * n for n in range(1, hours * 12 + 1)]

    def test_time_within_a_half_hour_clock_change_runs_once(self) -> None:
        # Lord Howe, 6 October 2030: 02:00 is followed by 02:30. 7 April: 01:59 by 01:30.
        assert local_times("15 2 * * *", "Australia/Lord_Howe", utc(2030, 10, 5, 13)) == ["02:30+1100"]
        assert local_times("45 1 * * *", "Australia/Lord_Howe", utc(2030, 4, 6, 13)) == ["01:45+1100"]

    def test_time_skipped_or_repeated_at_midnight_runs_once(self) -> None:
        # São Paulo, 4 November 2018: Saturday 23:59 is followed by Sunday 01:00.
        assert local_times("0 0 * * *", "America/Sao_Paulo", utc(2018, 11, 4, 2)) == ["01:00-0200"]
        # Saturday's 23:30 came twice on 17 February.
        found = item("30 23 * * 6", "America/Sao_Paulo").occurrences(utc(2018, 2, 17), utc(2018, 2, 19))
        assert list(found) == [utc(2018, 2, 18, 1, 30)]

    def test_times_of_a_skipped_day_run_once_after_it(self) -> None:
        # Samoa went from Thursday 29 to Saturday 31 December 2011.
        found = item("0 8 * * *", "Pacific/Apia").occurrences(utc(2011, 12, 29), utc(2011, 12, 31))
        shown = [f"{at.astimezone(ZoneInfo('Pacific/Apia')):%d. %H:%M}" for at in found]
        assert shown == ["29. 08:00", "31. 00:00", "31. 08:00"]
        fridays = item("0 8 * * 5", "Pacific/Apia").occurrences(utc(2011, 12, 24), utc(2012, 1, 7))
        shown = [f"{at.astimezone(ZoneInfo('Pacific/Apia')):%d. %H:%M}" for at in fridays]
        assert shown == ["31. 00:00", "06. 08:00"]

    def test_matches_agrees_with_occurrences_around_clock_changes(self) -> None:
        half_past_two = item("30 2 * * *", "Europe/Paris")
        assert half_past_two.matches(utc(2030, 3, 31, 1))
        assert half_past_two.matches(utc(2030, 10, 27, 0, 30))
        assert not half_past_two.matches(utc(2030, 10, 27, 1, 30))


class TestTimeZones:
    def test_unknown_time_zone_is_rejected_with_a_hint(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'t': .*'Europe/Pariss'.*Europe/Paris\?"):
            item("* * * * *", "Europe/Pariss")
        with pytest.raises(ConfigurationError, match=r"'XYZ'.*IANA"):
            item("* * * * *", "XYZ")

    def test_missing_time_zone_database_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(key: str) -> ZoneInfo:
            raise zoneinfo.ZoneInfoNotFoundError(key)

        monkeypatch.setattr(zoneinfo, "ZoneInfo", missing)
        monkeypatch.setattr(zoneinfo, "available_timezones", set)
        with pytest.raises(ConfigurationError, match="pip install tzdata"):
            item("* * * * *", "Europe/Paris")
        assert item("0 8 * * *", "UTC").matches(utc(2030, 1, 1, 8))


class Fields(NamedTuple):
    """A pattern and the values that it matches, independent of the parser under test."""

    minutes: set[int]
    hours: set[int]
    days: set[int]
    months: set[int]
    weekdays: set[int]

    @property
    def pattern(self) -> str:
        return " ".join(",".join(map(str, sorted(values))) for values in self)

    def fit(self, wall: datetime) -> bool:
        day, weekday = wall.day in self.days, wall.isoweekday() % 7 in self.weekdays
        restricted = len(self.days) < 31 and len(self.weekdays) < 7
        return (
            wall.minute in self.minutes
            and wall.hour in self.hours
            and wall.month in self.months
            and ((day or weekday) if restricted else (day and weekday))
        )


def field_values(first: int, last: int) -> st.SearchStrategy[set[int]]:
    everything = st.just(set(range(first, last + 1)))
    return everything | st.sets(st.integers(first, last), min_size=1, max_size=4)


FIELDS = st.builds(
    Fields,
    field_values(0, 59),
    field_values(0, 23),
    field_values(1, 31),
    field_values(1, 12),
    field_values(0, 6),
)
# Times shortly before a clock change or a skipped date in each zone.
CHANGES = st.sampled_from(
    [
        *(("Europe/Paris", utc(2030, 3, 30, 20)), ("Europe/Paris", utc(2030, 10, 26, 20))),
        *(("America/New_York", utc(2031, 3, 9)), ("America/New_York", utc(2031, 11, 2))),
        *(("Australia/Lord_Howe", utc(2030, 10, 5, 8)), ("Australia/Lord_Howe", utc(2030, 4, 6, 8))),
        *(("America/Sao_Paulo", utc(2018, 11, 3, 20)), ("America/Sao_Paulo", utc(2018, 2, 17, 20))),
        *(("Africa/Casablanca", utc(2027, 2, 6, 20)), ("Africa/Casablanca", utc(2027, 3, 13, 20))),
        *(("Pacific/Apia", utc(2011, 12, 30, 2)), ("America/St_Johns", utc(2010, 11, 6, 20))),
        *(("Antarctica/Troll", utc(2030, 3, 30, 20)), ("Asia/Kolkata", utc(2030, 1, 1))),
    ]
)


def fires(fields: Fields, zone: ZoneInfo, at: datetime) -> bool:
    """Return whether a pattern fires in this minute, by a simple implementation of the rule."""
    wall = at.astimezone(zone).replace(tzinfo=None)
    if len(fields.hours) == 24:
        return fields.fit(wall)
    before = (at - MINUTE).astimezone(zone).replace(tzinfo=None)
    skipped = [before + MINUTE * n for n in range(1, (wall - before) // MINUTE)]
    shown_before = any(
        (at - MINUTE * n).astimezone(zone).replace(tzinfo=None) == wall for n in range(30, 181, 30)
    )
    return (fields.fit(wall) and not shown_before) or any(map(fields.fit, skipped))


class TestAgainstBruteForce:
    @given(FIELDS, CHANGES, st.integers(0, 8 * 60))
    def test_occurrences_around_clock_changes_match_brute_force(
        self, fields: Fields, change: tuple[str, datetime], later: int
    ) -> None:
        tz, start = change
        start += later * MINUTE
        end = start + 20 * HOUR
        expected = [
            at
            for at in (start + MINUTE * n for n in range(1, 20 * 60 + 1))
            if fires(fields, ZoneInfo(tz), at)
        ]
        cron = item(fields.pattern, tz)
        assert list(cron.occurrences(start, end)) == expected
        following = cron.next_after(start)
        assert following == expected[0] if expected else following is None or following > end
        assert [
            at for at in (start + MINUTE * n for n in range(1, 20 * 60 + 1)) if cron.matches(at)
        ] == expected

    @pytest.mark.slow
    @given(
        FIELDS,
        st.sampled_from([2024, 2025, 2028, 2096, 2100, 2104]),
        st.integers(0, 6 * 24 * 60),
    )
    @example(Fields({0}, {0}, {29}, {2}, set(range(7))), 2096, 0)
    def test_occurrences_around_the_end_of_february_match_brute_force(
        self, fields: Fields, year: int, later: int
    ) -> None:
        start = utc(year, 2, 24) + later * MINUTE
        minutes = (start + MINUTE * n for n in range(1, 10 * 24 * 60))
        expected = list(islice(filter(fields.fit, minutes), 100))
        found = item(fields.pattern).occurrences(start, start + 10 * DAY - MINUTE)
        assert list(islice(found, 100)) == expected

    @given(FIELDS, st.datetimes(datetime(1990, 1, 1), datetime(2110, 1, 1)))  # noqa: DTZ001
    def test_next_after_skips_no_occurrence(self, fields: Fields, moment: datetime) -> None:
        """Compare days, because years have too many minutes."""
        following = item(fields.pattern).next_after(moment)
        noon = fields._replace(minutes={0}, hours={12})
        days = (moment.replace(hour=12, minute=0) + DAY * n for n in range(1, 366 * 9))
        fit = next((day.date() for day in days if noon.fit(day)), None)
        if following is None:
            assert fit is None
        elif following.date() != moment.date():
            assert following.date() == fit
