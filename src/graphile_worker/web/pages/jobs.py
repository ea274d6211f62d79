"""The list of jobs, and its export."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import StreamingResponse

from graphile_worker.web.auth import Permission
from graphile_worker.web.filters import Filter, FilterError, format_filter, parse_filter, read_tab
from graphile_worker.web.pages.links import Links, access_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.auth import Access
    from graphile_worker.web.pages.rendering import Renderer

PAGE_SIZE = 50
_EXPORT_PAGE = 200
MAX_EXPORTED = 10_000
SEARCH_HELP = (
    ("task:send_email", "Jobs of a task"),
    ("queue:customer-7", "Jobs of a serial queue"),
    ("key:welcome-7", "The job with a key"),
    ("flag:slow", "Jobs with a flag"),
    ("worker:…", "Jobs that a worker has locked"),
    ("id:17,18", "Jobs by id"),
    ("error:TimeoutError", "Jobs whose last attempt failed with a type of exception"),
    ("failed:24h", "Jobs whose last attempt failed within 1h, 3h, 24h, 3d or 7d"),
    ("payload.user.id:7", "Jobs with a value in their payload"),
    ('"no such card"', "Text in payloads, errors, keys and names: among the newest jobs"),
)
ACTION_TEXTS = {
    "retry": "Retry",
    "run_now": "Run now",
    "reschedule": "Reschedule",
    "cancel": "Cancel",
    "fail": "Fail",
    "complete": "Complete",
    "remove": "Remove",
}
ACTION_PERMISSIONS = {
    "retry": Permission.RETRY,
    "run_now": Permission.RETRY,
    "reschedule": Permission.EDIT,
    "cancel": Permission.CANCEL,
    "fail": Permission.CANCEL,
    "complete": Permission.CANCEL,
    "remove": Permission.REMOVE,
}
_ACTIONS_BY_STATE = {
    "ready": ("reschedule", "cancel", "fail", "complete", "remove"),
    "blocked": ("reschedule", "cancel", "fail", "complete", "remove"),
    "scheduled": ("run_now", "reschedule", "cancel", "fail", "complete", "remove"),
    "retrying": ("retry", "run_now", "reschedule", "cancel", "fail", "complete", "remove"),
    "running": ("cancel",),
    "failed": ("retry", "reschedule", "complete", "remove"),
}
_EMPTY_TITLES = {
    "ready": "Nothing waits",
    "scheduled": "Nothing is scheduled",
    "retrying": "Nothing is retried",
    "running": "Nothing runs",
    "failed": "Nothing has failed",
    "blocked": "Nothing is blocked",
}
_EMPTY_TEXTS = {
    "ready": "Every job that is due has been claimed.",
    "scheduled": "Jobs with a run_at in the future appear here.",
    "retrying": "Jobs that failed and have attempts left appear here.",
    "running": "Jobs that a worker has locked appear here.",
    "failed": "Jobs without attempts left appear here.",
    "blocked": "Ready jobs whose serial queue is busy appear here.",
}


def allowed_actions(state: str | None, access: Access) -> list[tuple[str, str]]:
    """Return the actions that make sense for jobs in a state, and that the viewer may do: names and texts."""
    names = _ACTIONS_BY_STATE.get(state or "", tuple(ACTION_TEXTS))
    return [(name, ACTION_TEXTS[name]) for name in names if access.allows(ACTION_PERMISSIONS[name])]


def read_selection(values: Mapping[str, Any], access: Access) -> Filter:
    """Return the filter that an address or a form carries.

    Raises:
        FilterError: It cannot be read.
    """
    selected = parse_filter(str(values.get("q") or ""), str(values.get("state") or "") or None)
    return selected.replace(search_payload=access.allows(Permission.VIEW_PAYLOAD))


async def show_jobs(pages: Renderer, request: Request) -> Response:
    """Answer ``/jobs``."""
    access = access_of(request)
    query, state = request.query_params.get("q", "").strip(), request.query_params.get("state") or None
    values: dict[str, Any] = {"listing": None, "problem": None, "chips": []}
    status = 200
    try:
        tab = read_tab(state)
    except FilterError as error:
        values["problem"], state, tab, status = str(error), None, None, 400
    try:
        selected = read_selection({"q": query, "state": tab}, access)
        values["chips"] = _chips(selected, state, Links(request))
        if status == 200:  # noqa: PLR2004 - nothing was wrong
            values["listing"] = await pages.dashboard.data.jobs(
                selected, access, cursor=request.query_params.get("cursor") or None, limit=PAGE_SIZE
            )
    except FilterError as error:
        values["problem"], status = str(error), 400
    return await pages.page(
        request,
        "jobs.html",
        current="jobs",
        status=status,
        current_state=state,
        query=query,
        actions=allowed_actions(state, access),
        search_help=SEARCH_HELP,
        empty_titles=_EMPTY_TITLES,
        empty_texts=_EMPTY_TEXTS,
        **values,
    )


def _chips(selected: Filter, state: str | None, links: Links) -> list[tuple[str, str]]:
    """Return the parts of a filter: the text of each, and the address without it."""
    parts: list[tuple[Filter, Filter]] = []
    nothing = Filter(tab=selected.tab, search_payload=selected.search_payload)
    for field in Filter.__struct_fields__:
        value = getattr(selected, field)
        if value == getattr(nothing, field):
            continue
        for one in value if isinstance(value, tuple) else [value]:
            is_many = isinstance(value, tuple)
            rest = tuple(other for other in value if other != one) if is_many else None
            parts.append(
                (nothing.replace(**{field: (one,) if is_many else one}), selected.replace(**{field: rest}))
            )
    return [
        (format_filter(part), links.to("/jobs", state=state, q=format_filter(rest))) for part, rest in parts
    ]


async def export_jobs(pages: Renderer, request: Request) -> Response:
    """Answer ``/jobs/export``: the matching jobs as JSON lines, the newest first, without payloads."""
    access = access_of(request)
    selected = read_selection(request.query_params, access)
    first = await pages.dashboard.data.jobs(selected, access, limit=_EXPORT_PAGE)

    async def lines() -> AsyncIterator[bytes]:
        page, written = first, 0
        while True:
            for job in page.items:
                yield msgspec.json.encode(job) + b"\n"
            written += len(page.items)
            if page.next is None:
                return
            if written >= MAX_EXPORTED:
                yield (
                    json.dumps({"truncated": f"The export ends after {MAX_EXPORTED} jobs."}).encode() + b"\n"
                )
                return
            page = await pages.dashboard.data.jobs(selected, access, cursor=page.next, limit=_EXPORT_PAGE)

    return StreamingResponse(
        lines(),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="jobs.jsonl"', "Cache-Control": "no-store"},
    )
