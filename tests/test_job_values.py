"""What a job may be is decided before the database sees it."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphile_worker import InvalidJobError, Job, JobKeyMode, JobSpec, JobState
from graphile_worker.payload import decode_payload, encode_payload

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children) | st.dictionaries(TEXT, children),
)


@dataclasses.dataclass
class Parcel:
    to: str
    weight: Decimal


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
        ("a\0b", "NUL"),
        ({"a\0": 1}, "NUL"),
        (["\ud800"], "surrogate"),
        (object(), "cannot be written as JSON"),
        ({None: 1}, "cannot be written as JSON"),
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


def test_json_nested_too_deep_for_python_stays_text() -> None:
    text = "[" * 200_000 + "]" * 200_000
    assert decode_payload(text) == text


def test_a_struct_is_written_too() -> None:
    class Point(msgspec.Struct):
        x: int

    assert encode_payload(Point(1)) == '{"x":1}'
