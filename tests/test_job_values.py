"""Job options and payloads are checked before they reach the database."""

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
from hypothesis import given, strategies as st

from graphile_worker import InvalidJobError, Job, JobKeyMode, JobSpec, JobState
from graphile_worker._base.payload import decode_payload, encode_payload, encode_stored
from graphile_worker._tasks.options import as_spec_options, check_job_options
from support.odd_payloads import TOO_DEEP, nested

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
    ("arguments", "argument", "code", "message"),
    [
        ({"identifier": "x" * 129}, "identifier", "GWBID", "128"),
        ({"identifier": ""}, "identifier", "GWBID", "1 to 128"),
        ({"identifier": 5}, "identifier", "GWBID", "must be a str"),
        ({"identifier": "a\0"}, "identifier", "GWBID", "cannot store"),
        ({"queue_name": "x" * 129}, "queue_name", "GWBQN", "128"),
        ({"queue_name": ""}, "queue_name", "GWBQN", "1 to 128"),
        ({"job_key": "x" * 513}, "job_key", "GWBJK", "512"),
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
        ({"run_at": 5}, "run_at", None, "an aware datetime, ISO 8601 text with an offset, or a timedelta"),
        ({"run_at": timedelta(days=400_000)}, "run_at", None, "365000 days"),
        ({"flags": ["a", None]}, "flags", None, "list or set of strings"),
        ({"flags": "abc"}, "flags", None, "list or set of strings"),
        ({"flags": 5}, "flags", None, "list or set of strings"),
        ({"flags": ["a\0"]}, "flags", None, "list or set of strings"),
    ],
)
def test_invalid_argument_is_rejected_with_its_name_and_limit(
    arguments: dict[str, Any], argument: str, code: str | None, message: str
) -> None:
    with pytest.raises(InvalidJobError) as caught:
        JobSpec(**({"identifier": "t"} | arguments))

    assert (caught.value.argument, caught.value.code) == (argument, code)
    assert argument in str(caught.value)
    assert message in str(caught.value)


def test_values_at_the_limits_are_accepted() -> None:
    most = JobSpec("x" * 128, queue_name="é" * 128, job_key="é" * 512, max_attempts=32767, priority=-32768)
    least = JobSpec("x", max_attempts=1, priority=32767, run_at=timedelta(-1), job_key="k")
    assert (most.max_attempts, most.priority, least.max_attempts) == (32767, -32768, 1)


def test_flags_are_accepted_from_an_iterator() -> None:
    assert JobSpec("t", flags=iter(["a", "b", "a"])).flags == frozenset({"a", "b"})


def test_job_spec_is_immutable() -> None:
    spec = JobSpec("t")
    with pytest.raises(AttributeError):
        spec.priority = 1  # type: ignore[misc]


def test_job_key_modes_and_states_equal_their_strings() -> None:
    assert [*JobKeyMode] == ["replace", "preserve_run_at", "unsafe_dedupe"]
    assert [*JobState] == ["ready", "scheduled", "running", "failed"]
    assert JobSpec("t", job_key_mode="replace").job_key_mode == JobKeyMode.REPLACE


def test_job_has_the_columns_and_the_names_of_task_and_queue() -> None:
    assert set(Job.__struct_fields__) == {
        *("id", "job_queue_id", "task_id", "payload", "priority", "run_at", "attempts", "max_attempts"),
        *("last_error", "created_at", "updated_at", "key", "locked_at", "locked_by", "revision", "flags"),
        *("is_available", "task_identifier", "queue_name", "state", "failed_at"),
        *("error_type", "traceback"),
    }


@pytest.mark.parametrize(
    ("payload", "message"),
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
def test_payload_that_json_or_postgresql_cannot_store_is_rejected(payload: object, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message) as caught:
        encode_payload(payload)
    assert caught.value.argument == "payload"


def test_strings_that_look_like_invalid_json_are_accepted() -> None:
    for payload in ("\\u0000", "null", "NaN", "-Infinity", {"a": None}, "\\\\u0000", {"null": [None, 1.5]}):
        assert decode_payload(encode_payload(payload)) == payload


def test_python_values_are_encoded_as_json() -> None:
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
def test_json_payload_survives_a_round_trip(payload: object) -> None:
    text = encode_payload(payload)
    assert decode_payload(text) == payload
    assert json.loads(text) == payload


@pytest.mark.parametrize("text", ['"\\ud800"', "1e999", '{"a": 1, "a": 2}', " [1] "])
def test_unusual_stored_json_can_be_decoded(text: str) -> None:
    assert decode_payload(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000 + "]" * 200_000, "it is nested too deeply for Python"),
        (f"[1e999,{nested(TOO_DEEP)}]", "it is nested too deeply for Python"),
        (f'["\\ud800",{nested(TOO_DEEP)}]', "it is nested too deeply for Python"),
        ("[" + "9" * 5000 + "]", "it holds an integer of more than 4300 digits"),
        ('["C:\\\\x00\\xe9"]', "it holds the byte 0xe9, which is not UTF-8"),
        (b"[1", "Expecting ',' delimiter"),
    ],
)
def test_undecodable_json_is_a_value_error_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_payload(text)


def test_nested_payload_is_decoded_or_rejected_at_any_depth() -> None:
    for levels in range(0, 2000, 10):
        text = "[" * levels + "null" + "]" * levels
        try:
            payload = decode_payload(text)
            assert encode_payload(payload) == text
        except (ValueError, InvalidJobError):
            assert levels > 500


@pytest.mark.parametrize(
    ("payload", "message"),
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
def test_error_for_an_unstorable_payload_names_the_item(payload: object, message: str) -> None:
    with pytest.raises(InvalidJobError) as caught:
        encode_payload(payload)
    assert message in str(caught.value)
    assert caught.value.argument == "payload"


def test_payload_that_contains_itself_is_rejected() -> None:
    payload: dict[str, object] = {"a": None}
    payload["b"] = payload
    for given_payload in (payload, {"first": Unknown(), "then": payload}):
        with pytest.raises(InvalidJobError, match="cannot be written as JSON"):
            encode_payload(given_payload)


def test_too_deeply_nested_payload_is_rejected_with_one_message() -> None:
    limit = sys.getrecursionlimit()
    messages: set[str] = set()
    for levels in [*range(limit - 100, limit + 5), TOO_DEEP]:
        payload: list[object] = [None]
        for _ in range(levels):
            payload = [payload]
        try:
            encode_payload(payload)
        except InvalidJobError as error:
            messages.add(str(error))
    assert len(messages) == 1
    assert "nested too deeply" in messages.pop()


def test_payload_over_the_limit_is_rejected_with_its_size() -> None:
    assert encode_payload("x" * 98, max_size=100)
    with pytest.raises(InvalidJobError, match=r"1,002 bytes.*max_payload_size.*\b100\b") as caught:
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
def test_run_at_outside_the_range_of_utc_is_rejected(moment: datetime) -> None:
    with pytest.raises(InvalidJobError, match=r"run_at.*UTC") as caught:
        JobSpec("task", run_at=moment)
    assert caught.value.argument == "run_at"


@pytest.mark.parametrize("timeout", [0, -1, "5", math.inf, 10**400, True])
def test_invalid_timeout_is_an_invalid_job_error(timeout: object) -> None:
    for check in (as_spec_options, partial(check_job_options, "add_job")):
        with pytest.raises(InvalidJobError, match=r"\btimeout\b") as caught:
            check({"timeout": timeout})
        assert caught.value.argument == "timeout"


def test_infinite_stored_numbers_are_encoded_as_numbers() -> None:
    stored = [math.inf, {"a": -math.inf}, None, "null"]
    assert encode_stored(stored) == b'[1e999,{"a":-1e999},null,"null"]'
    assert decode_payload(encode_stored(stored)) == stored


def test_msgspec_struct_is_encoded() -> None:
    class Point(msgspec.Struct):
        x: int

    assert encode_payload(Point(1)) == '{"x":1}'
