"""Add a job from the page, also a copy of another job with its payload edited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker.errors import DatabaseError, GraphileWorkerError
from graphile_worker.web.auth import Permission
from graphile_worker.web.errors import ForbiddenError
from graphile_worker.web.pages import formatting
from graphile_worker.web.pages.forms import read_form, read_number, read_text, read_time
from graphile_worker.web.pages.links import Links, access_of
from graphile_worker.web.pages.notices import redirect_with_notice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.pages.rendering import Renderer

_FIELDS = ("task", "queue_name", "delay", "payload", "job_key", "priority", "max_attempts", "flags")


async def show_add(pages: Renderer, request: Request) -> Response:
    """Answer ``/add``: an empty form, or one filled from a job."""
    access = access_of(request)
    if not access.allows(Permission.ADD):
        raise ForbiddenError("You may not add jobs.")
    form = dict.fromkeys(_FIELDS, "")
    form["payload"] = "{}"
    form["task"] = request.query_params.get("task", "")[:128]
    note = ""
    copy = request.query_params.get("copy", "")[:19]
    if copy:
        job = await pages.dashboard.data.job(copy, access)
        if job is not None:
            is_redacted = pages.dashboard.redact is not None
            if is_redacted or job.payload is None:
                note = "Payloads are redacted here" if is_redacted else "The payload of this job is not shown"
                note += ", so it cannot be copied. Write it anew."
            form |= {
                "task": job.task,
                "queue_name": job.queue or "",
                "payload": "{}" if note or job.payload is None else formatting.raw_json(job.payload),
                "priority": str(job.priority or ""),
                "max_attempts": str(job.max_attempts or ""),
                "flags": " ".join(job.flags),
            }
    return await _show_form(pages, request, form, copy=copy, note=note)


async def _show_form(
    pages: Renderer,
    request: Request,
    form: Mapping[str, str],
    *,
    copy: str = "",
    error: str = "",
    note: str = "",
) -> Response:
    names = [row.task for row in (await pages.dashboard.data.tasks()).items][:500]
    return await pages.page(
        request,
        "add.html",
        current="jobs",
        status=400 if error else 200,
        form=form,
        tasks=names,
        copy=copy,
        error=error,
        note=note,
        back_url=Links(request).to(f"/jobs/{copy}" if copy else "/jobs"),
    )


async def add_job(pages: Renderer, request: Request) -> Response:
    """Answer the form of ``/add``."""
    form = await read_form(request)
    given = {name: form.get(name, "") for name in _FIELDS}
    try:
        options: dict[str, Any] = {
            "queue_name": read_text(form, "queue_name"),
            "job_key": read_text(form, "job_key"),
            "run_at": read_time(form),
            "priority": read_number(form, "priority"),
            "max_attempts": read_number(form, "max_attempts"),
            "flags": given["flags"].split() or None,
        }
        chosen = {name: value for name, value in options.items() if value is not None}
        payload = given["payload"].strip() or "{}"
        job = await pages.dashboard.operations.add(
            given["task"].strip(), payload, access_of(request), **chosen
        )
    except (DatabaseError, ForbiddenError):
        raise
    except GraphileWorkerError as error:
        return await _show_form(pages, request, given, error=str(error))
    return redirect_with_notice(request, Links(request).to(f"/jobs/{job.id}"), "added", int(job.id))
