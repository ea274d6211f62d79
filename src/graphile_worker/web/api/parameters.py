"""What requests to the API carry: queries and bodies."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from graphile_worker.job import MAX_IDENTIFIER_LENGTH, MAX_JOB_KEY_LENGTH, SMALLINT
from graphile_worker.stats import Metric  # noqa: TC001
from graphile_worker.web.filters import MAX_LENGTH
from graphile_worker.web.models import Action, Tab  # noqa: TC001

_NO_NUL = r"^[^\x00]*$"
Name = Annotated[str, Meta(min_length=1, max_length=MAX_IDENTIFIER_LENGTH, pattern=_NO_NUL)]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_JOB_KEY_LENGTH, pattern=_NO_NUL)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_LENGTH, pattern=_NO_NUL)]
Search = Annotated[str, Meta(max_length=MAX_LENGTH, pattern=_NO_NUL)]
JobId = Annotated[
    str, Meta(min_length=1, max_length=18, pattern="^[0-9]+$", description="A job's id, as text.")
]
Limit = Annotated[int, Meta(ge=1, le=200)]
Priority = Annotated[int, Meta(ge=SMALLINT.start, le=SMALLINT.stop - 1)]
Attempts = Annotated[int, Meta(ge=0, le=SMALLINT.stop - 1)]
MaxAttempts = Annotated[int, Meta(ge=1, le=SMALLINT.stop - 1)]
Moment = Annotated[datetime, Meta(tz=True)]


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An endpoint without parameters."""


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs to list. All given parameters must match."""

    q: Annotated[
        Search, Meta(description="A filter as in the search field: task:send_email error:TimeoutError")
    ] = ""
    state: Tab | None = None
    task: Name | None = None
    queue: Name | None = None
    key: Key | None = None
    flag: tuple[Text, ...] = ()
    worker: Text | None = None
    error: Annotated[Text, Meta(description="Type of the exception, with or without its module.")] | None = (
        None
    )
    fingerprint: Text | None = None
    search: Annotated[Text, Meta(description="Text in payload, error, key or worker.")] | None = None
    limit: Limit = 50
    sort: Literal["newest", "oldest"] = "newest"
    cursor: Annotated[str, Meta(max_length=200, description="next or prev of another page.")] | None = None


class FailuresQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failures to group."""

    window: Literal["1h", "3h", "24h", "3d", "7d", "all"] = "all"
    task: Name | None = None


class QueuesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which queues to list."""

    search: Annotated[str, Meta(max_length=MAX_IDENTIFIER_LENGTH, pattern=_NO_NUL)] = ""
    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class SeriesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which metric to return."""

    metric: Metric
    task: Name | None = None
    since: Annotated[int, Meta(ge=60, le=7_776_000, description="Seconds before now.")] = 3600
    step: Annotated[int, Meta(ge=60, le=7_776_000, description="Seconds.")] | None = None


class JobFilterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs to change."""

    q: Annotated[Search, Meta(description="A filter as in the search field.")] = ""
    state: Tab | None = None


class AddJobBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to add."""

    task: Name
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    queue_name: Name | None = None
    run_at: Moment | None = None
    max_attempts: MaxAttempts | None = None
    job_key: Key | None = None
    job_key_mode: Literal["replace", "preserve_run_at", "unsafe_dedupe"] | None = None
    priority: Priority | None = None
    flags: Annotated[list[Text], Meta(max_length=100)] | None = None


class ActionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do, and to which jobs: either `ids` or `filter`."""

    action: Action
    ids: Annotated[list[JobId], Meta(max_length=1000)] | None = None
    filter: JobFilterBody | None = None
    dry_run: bool = False
    expected_count: Annotated[int, Meta(ge=0)] | None = None
    run_at: Moment | None = None
    priority: Priority | None = None
    attempts: Attempts | None = None
    max_attempts: MaxAttempts | None = None
    reason: Annotated[str, Meta(max_length=10_000, pattern=_NO_NUL)] | None = None


class MaintenanceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to do it."""

    dry_run: bool = False
    worker_ids: Annotated[list[Text], Meta(max_length=100)] = []


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body without values."""
