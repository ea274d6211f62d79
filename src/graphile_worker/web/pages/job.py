"""The page of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from graphile_worker.web.errors import NotFoundError
from graphile_worker.web.pages import formatting
from graphile_worker.web.pages.jobs import allowed_actions
from graphile_worker.web.pages.links import access_of

if TYPE_CHECKING:
    from datetime import datetime

    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.models import Attempt, JobDetail
    from graphile_worker.web.pages.rendering import Renderer

T = TypeVar("T", "JobDetail", "Attempt")
_ERRORS = ("error", "traceback")
_MOST_SHOWN = 100_000
"""Characters of a payload that are shown as a tree; of a larger one the beginning is shown as text."""


class Step(NamedTuple):
    """A step on the way of a job."""

    title: str
    shape: str
    kind: Literal["past", "now", "future"]
    at: datetime | None = None
    text: str = ""


async def show_job(pages: Renderer, request: Request) -> Response:
    """Answer ``/jobs/{id}``."""
    access = access_of(request)
    identifier = request.path_params["id"]
    job = await pages.dashboard.data.job(identifier, access)
    if job is None:
        raise NotFoundError(
            f"There is no job {formatting.shorten(identifier, 40)}, and the history has no attempt of it. "
            "It was completed or removed."
        )
    job = _shorten_errors(job)
    size = 0 if job.payload is None else len(bytes(job.payload))
    is_large = size > _MOST_SHOWN
    values: dict[str, Any] = {
        "payload_size": size,
        "payload_is_large": is_large,
        "payload": None,
        "has_tree": False,
        "raw_payload": "",
    }
    if job.payload is not None:
        text = bytes(job.payload)[:_MOST_SHOWN].decode(errors="replace")
        values["raw_payload"] = text + "…" if is_large else formatting.raw_json(job.payload)
        read = None if is_large else formatting.plain(job.payload)
        values["payload"] = read
        values["has_tree"] = not is_large and not isinstance(read, msgspec.Raw)
    return await pages.page(
        request,
        "job.html",
        current="jobs",
        job=job,
        way=_find_way(job),
        actions=allowed_actions("blocked" if job.blocked_by else job.state, access)
        if job.exists and job.state in {"ready", "scheduled", "retrying", "running", "failed"}
        else [],
        similar=job.fingerprint,
        # What is redacted would be added as it is shown.
        may_copy=job.payload is not None and pages.dashboard.redact is None,
        **values,
    )


def _shorten_errors(job: JobDetail) -> JobDetail:
    """Return the job with no error or traceback that is too long for a page."""

    def shorten(one: T) -> T:
        texts = {name: formatting.shorten(getattr(one, name) or "", _MOST_SHOWN) for name in _ERRORS}
        return msgspec.structs.replace(one, **{name: text or None for name, text in texts.items()})

    return msgspec.structs.replace(shorten(job), history=[shorten(one) for one in job.history])


def _find_way(job: JobDetail) -> list[Step]:
    """Return the steps of a job's way: what it has passed, where it is, and what comes."""
    steps = [Step("Added", "added", "past", job.created_at)]
    if job.attempts and job.state != "running" and job.error and job.failed_at:
        steps.append(Step("Failed", "warning", "past", job.failed_at, f"attempt {job.attempts}"))
    match job.state:
        case "scheduled":
            steps += [Step("Due", "scheduled", "now", job.run_at), Step("Run", "other", "future")]
        case "retrying":
            left = job.max_attempts - job.attempts
            text = f"{left} {'attempt' if left == 1 else 'attempts'} left"
            steps += [Step("Retry", "retrying", "now", job.run_at, text), Step("Run", "other", "future")]
        case "ready" if job.blocked_by:
            steps.append(Step("Due", "scheduled", "past", job.run_at))
            steps += [Step("Blocked by its queue", "blocked", "now"), Step("Run", "other", "future")]
        case "ready":
            steps += [
                Step("Ready", "ready", "now", job.run_at, "waits for a worker"),
                Step("Run", "other", "future"),
            ]
        case "running":
            steps.append(Step("Due", "scheduled", "past", job.run_at))
            steps.append(Step("Running", "running", "now", job.locked_at, f"attempt {job.attempts}"))
            steps.append(Step("Done", "other", "future"))
        case "failed":
            steps = [step for step in steps if step.title != "Failed"]
            steps.append(Step("Due", "scheduled", "past", job.run_at))
            steps.append(Step("Failed", "failed", "now", job.failed_at, "no attempts left"))
        case _:
            steps += _end(job)
    return steps


def _end(job: JobDetail) -> list[Step]:
    last = job.history[-1] if job.history else None
    if last is None:
        return [Step("Gone", "other", "now", None, "the history has nothing about its end")]
    steps = [Step("Due", "scheduled", "past", last.run_at)]
    if last.started_at is not None:
        steps.append(Step("Started", "ready", "past", last.started_at, f"attempt {last.attempt}"))
    title = {"completed": "Completed", "cancelled": "Cancelled"}.get(job.state, "Gone")
    shape = {"completed": "done", "cancelled": "cancelled"}.get(job.state, "other")
    ran = "" if last.duration is None else f"ran {formatting.duration(last.duration)}"
    return [*steps, Step(title, shape, "now", last.ended_at, ran)]
