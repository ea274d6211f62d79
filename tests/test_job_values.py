"""What a job may be is decided before the database sees it."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphile_worker import InvalidJobError, Job, JobKeyMode, JobSpec, JobState
from graphile_worker.payload import decode_payload, encode_payload, encode_stored
from graphile_worker.task_options import check_job_options, with_timeout

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children) | st.dictionaries(TEXT, children),
)


@dataclasses.dataclass
class Parcel:
    to: str
    weight: Decimal


class Unknown:
    pass


@dataclasses.dataclass
class Box:
    thing: object


class Size(enum.Enum):
    SMALL = "s"


@pytest.mark.parametrize(
    ("arguments", "argument", "code", "says"),
    [
        ({"identifier": "x" * 129}, "identifier", "GWBID", "129 characters, and at most 128"),
        ({"identifier": ""}, "identifier", "GWBID", "1 to 128"),
        ({"identifier": 5}, "identifier", "GWBID", "must be a str"),
        ({"identifier": "a\0"}, "identifier", "GWBID", "cannot store"),
        ({"queue_name": "x" * 129}, "queue_name", "GWBQN", "at most 128"),
        ({"queue_name": ""}, "queue_name", "GWBQN", "1 to 128"),
        ({"job_key": "x" * 513}, "job_key", "GWBJK", "at most 512"),
        ({"job_key": ""}, "job_key", "GWBJK", "1 to 512"),
        ({"job_key": "\ud800"}, "job_key", "GWBJK", "cannot store"),
        ({"max_attempts": 0}, "max_attempts", "GWBMA", "from 1 to 32767"),
        ({"max_attempts": 32768}, "max_attempts", "GWBMA", "from 1 to 32767"),
        ({"max_attempts": 2.5}, "max_attempts", "GWBMA", "must be an integer"),
        ({"max_attempts": True}, "max_attempts", "GWBMA", "must be an integer"),
        ({"job_key_mode": "upsert"}, "job_key_mode", "GWBKM", "replace, preserve_run_at, unsafe_dedupe"),
        ({"priority": -32769}, "priority", None, "from -32768 to 32767"),
        ({"priority": "high"}, "priority", None, "must be an integer"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at", None, "no time zone"),  # noqa: DTZ001
        ({"run_at": "tomorrow"}, "run_at", None, "ISO 8601 with an offset"),
        ({"run_at": 5}, "run_at", None, "an aware datetime, an ISO 8601 text with an offset, or a timedelta"),
        ({"run_at": timedelta(days=400_000)}, "run_at", None, "more than 365000 days"),
        ({"flags": ["a", None]}, "flags", None, "list or set of strings"),
        ({"flags": "abc"}, "flags", None, "list or set of strings"),
        ({"flags": 5}, "flags", None, "list or set of strings"),
        ({"flags": ["a\0"]}, "flags", None, "list or set of strings"),
    ],
)
def test_a_bad_argument_is_refused_naming_it_and_its_limit(
    arguments: dict[str, Any], argument: str, code: str | None, says: str
) -> None:
    with pytest.raises(InvalidJobError) as caught:
        JobSpec(**({"identifier": "t"} | arguments))

    assert (caught.value.argument, caught.value.code) == (argument, code)
    assert argument in str(caught.value)
    assert says in str(caught.value)


def test_the_limits_themselves_are_fine() -> None:
    most = JobSpec("x" * 128, queue_name="é" * 128, job_key="é" * 512, max_attempts=32767, priority=-32768)
    least = JobSpec("x", max_attempts=1, priority=32767, run_at=timedelta(-1), job_key="k")
    assert (most.max_attempts, most.priority, least.max_attempts) == (32767, -32768, 1)


def test_flags_may_come_from_an_iterator() -> None:
    assert JobSpec("t", flags=iter(["a", "b", "a"])).flags == frozenset({"a", "b"})


def test_values_are_frozen() -> None:
    spec = JobSpec("t")
    with pytest.raises(AttributeError):
        spec.priority = 1  # type: ignore[misc]


def test_modes_and_states_are_their_words() -> None:
    assert [*JobKeyMode] == ["replace", "preserve_run_at", "unsafe_dedupe"]
    assert [*JobState] == ["ready", "scheduled", "running", "failed"]
    assert JobSpec("t", job_key_mode="replace").job_key_mode == JobKeyMode.REPLACE


def test_a_job_has_the_columns_and_the_names() -> None:
    assert set(Job.__struct_fields__) == {
        *("id", "job_queue_id", "task_id", "payload", "priority", "run_at", "attempts", "max_attempts"),
        *("last_error", "created_at", "updated_at", "key", "locked_at", "locked_by", "revision", "flags"),
        *("is_available", "task_identifier", "queue_name", "state"),
    }


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (math.nan, "nan"),
        ({"a": [1, None, math.inf]}, "inf"),
        ([(-math.inf,)], "-inf"),
        ({"x": Parcel("a", Decimal(1)), "y": math.nan}, "nan"),
        ({"d": Decimal("NaN")}, "NaN"),
        ([Decimal("-Infinity")], "-Infinity"),
        ({"d": Decimal("sNaN")}, "sNaN"),
        ("a\0b", "NUL"),
        ({"a\0": 1}, "NUL"),
        (["\ud800"], "surrogate"),
        (object(), "cannot be written as JSON"),
        ({None: 1}, "cannot be written as JSON"),
        ({10**5000: 1}, "cannot be written as JSON: Exceeds the limit"),
        ({10**5000: 1, "x": object()}, "'x' cannot be written as JSON"),
    ],
)
def test_a_payload_that_json_or_postgresql_cannot_keep_is_refused(payload: object, says: str) -> None:
    with pytest.raises(InvalidJobError, match=says) as caught:
        encode_payload(payload)
    assert caught.value.argument == "payload"


def test_what_only_looks_like_a_problem_passes() -> None:
    for payload in ("\\u0000", "null", "NaN", "-Infinity", {"a": None}, "\\\\u0000", {"null": [None, 1.5]}):
        assert decode_payload(encode_payload(payload)) == payload


def test_python_values_are_written_as_one_expects() -> None:
    payload = {
        "parcel": Parcel("Ann", Decimal("1.10")),
        "when": datetime(2030, 1, 1, 12, tzinfo=UTC),
        "id": UUID(int=5),
        "size": Size.SMALL,
        "tags": {"a"},
        "big": 2**70,
    }
    assert decode_payload(encode_payload(payload)) == {
        "parcel": {"to": "Ann", "weight": "1.10"},
        "when": "2030-01-01T12:00:00Z",
        "id": "00000000-0000-0000-0000-000000000005",
        "size": "s",
        "tags": ["a"],
        "big": 2**70,
    }


@given(JSON)
def test_json_comes_back_as_it_went(payload: object) -> None:
    text = encode_payload(payload)
    assert decode_payload(text) == payload
    assert json.loads(text) == payload


@pytest.mark.parametrize("text", ['"\\ud800"', "1e999", '{"a": 1, "a": 2}', " [1] "])
def test_whatever_json_postgresql_holds_can_be_read(text: str) -> None:
    assert decode_payload(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 200_000 + "]" * 200_000, "it is nested too deeply for Python"),
        ("[1e999," + "[" * 1500 + "]" * 1501, "it is nested too deeply for Python"),
        ('["\\ud800",' + "[" * 1500 + "]" * 1501, "it is nested too deeply for Python"),
        ("[" + "9" * 5000 + "]", "it holds an integer of more than 4300 digits"),
        ('["C:\\\\x00\\xe9"]', "it holds the byte 0xe9, which is not UTF-8"),
        (b"[1", "Expecting ',' delimiter"),
    ],
)
def test_json_that_python_cannot_read_is_a_value_error_that_says_why(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_payload(text)


def test_nesting_up_to_what_python_can_follow_is_read_or_refused() -> None:
    for levels in range(0, 2000, 10):
        text = "[" * levels + "null" + "]" * levels
        try:
            payload = decode_payload(text)
            assert encode_payload(payload) == text
        except (ValueError, InvalidJobError):
            assert levels > 500


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (
            {"order": {"items": [1, 2, 3, Unknown()]}},
            "The argument 'order.items[3]' cannot be written as JSON",
        ),
        ({"order": {"items": [1, 2, 3, Unknown()]}}, "its type is Unknown. Pass a str, int, float"),
        ({"a key": [Unknown()]}, """The item "['a key'][0]" of the payload"""),
        ([1, Unknown()], "The item '[1]' of the payload cannot be written"),
        (Unknown(), "The payload cannot be written as JSON: its type is Unknown"),
        ({"box": Box(Unknown())}, "The argument 'box.thing' cannot be written as JSON"),
        ({"a": {None: 1}}, "The argument 'a' cannot be written as JSON: "),
        (
            {"n": [10**5000]},
            "The argument 'n[0]' cannot be written as JSON: it is an integer of more than 4300",
        ),
        ({"a": ["\ud800"]}, "The argument 'a[0]' holds half of a surrogate pair"),
        ({"a": {"b": [None, math.nan]}}, "The argument 'a.b[1]' holds nan"),
        ({"a": {"b": ["x", "\0"]}}, "The argument 'a.b[1]' holds a NUL character"),
    ],
)
def test_error_of_an_unstorable_payload_names_the_part(payload: object, says: str) -> None:
    with pytest.raises(InvalidJobError) as caught:
        encode_payload(payload)
    assert says in str(caught.value)
    assert caught.value.argument == "payload"


def test_payload_that_contains_itself_is_refused() -> None:
    payload: dict[str, object] = {"a": None}
    payload["b"] = payload
    for given_payload in (payload, {"first": Unknown(), "then": payload}):
        with pytest.raises(InvalidJobError, match="cannot be written as JSON"):
            encode_payload(given_payload)


def test_payload_that_is_nested_too_deeply_is_refused_at_any_depth() -> None:
    payload: list[object] = [None]
    refusals: set[str] = set()
    for _ in range(sys.getrecursionlimit() + 5):
        payload = [payload]
        try:
            encode_payload(payload)
        except InvalidJobError as error:
            refusals.add(str(error))
    assert len(refusals) == 1
    assert "nested too deeply" in refusals.pop()


def test_payload_over_the_limit_is_refused_with_its_size() -> None:
    assert encode_payload("x" * 98, max_size=100)
    with pytest.raises(
        InvalidJobError, match=r"has 1,002 bytes of JSON, and max_payload_size is 100\."
    ) as caught:
        encode_payload("x" * 1000, max_size=100)
    assert caught.value.argument == "payload"


@pytest.mark.parametrize(
    "moment",
    [
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=12))),
        datetime.max.replace(tzinfo=ZoneInfo("America/New_York")),
    ],
)
def test_run_at_outside_of_the_range_of_utc_is_refused(moment: datetime) -> None:
    with pytest.raises(InvalidJobError, match=r"run_at is .*, which has no date in UTC") as caught:
        JobSpec("task", run_at=moment)
    assert caught.value.argument == "run_at"


@pytest.mark.parametrize("timeout", [0, -1, "5", math.inf, 10**400, True])
def test_bad_timeout_is_an_invalid_job(timeout: object) -> None:
    for check in (with_timeout, partial(check_job_options, "add_job")):
        with pytest.raises(InvalidJobError, match="timeout is ") as caught:
            check({"timeout": timeout})
        assert caught.value.argument == "timeout"


def test_numbers_beyond_all_floats_stay_numbers_where_stored_values_are_written() -> None:
    stored = [math.inf, {"a": -math.inf}, None, "null"]
    assert encode_stored(stored) == b'[1e999,{"a":-1e999},null,"null"]'
    assert decode_payload(encode_stored(stored)) == stored


def test_a_struct_is_written_too() -> None:
    class Point(msgspec.Struct):
        x: int

    assert encode_payload(Point(1)) == '{"x":1}'
