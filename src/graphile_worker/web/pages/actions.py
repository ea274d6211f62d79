"""Actions on jobs: a page that asks first, with a count and a sample, and the change itself."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from graphile_worker.errors import InvalidJobError
from graphile_worker.web.errors import ChangedCountError, UnknownCountError, WebError
from graphile_worker.web.filters import FilterError, format_filter
from graphile_worker.web.pages.forms import read_form, read_number, read_text, read_time
from graphile_worker.web.pages.jobs import ACTION_PERMISSIONS, ACTION_TEXTS, read_selection
from graphile_worker.web.pages.links import Links, access_of, redirect
from graphile_worker.web.pages.notices import redirect_with_notice
from graphile_worker.web.pages.rendering import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.auth import Access
    from graphile_worker.web.filters import Filter
    from graphile_worker.web.pages.forms import Form
    from graphile_worker.web.pages.rendering import Renderer

MOST_IDS = 1000
_CONSEQUENCES = {
    "retry": "They run again as soon as a worker is free, with all their attempts.",
    "run_now": "They run as soon as a worker is free. Their attempts stay as they are.",
    "reschedule": "Empty fields stay as they are. Running jobs are not changed.",
    "cancel": "Jobs that have not started never run. Workers are asked to stop those that run.",
    "fail": "They are not retried. They stay in the list of failed jobs.",
    "complete": "They are deleted as if they had succeeded.",
    "remove": "They are deleted for good. This cannot be undone.",
}
_NOTHING = "No job matches, or none of these jobs is in a state that this applies to."
_DANGEROUS = {"cancel", "fail", "complete", "remove"}


async def confirm_action(pages: Renderer, request: Request) -> Response:
    """Answer ``/jobs/confirm``: ask before an action."""
    return await _ask(pages, request, request.query_params)


async def _ask(
    pages: Renderer, request: Request, given: QueryParams | Form, *, problem: str = "", status: int = 200
) -> Response:
    access, links = access_of(request), Links(request)
    action = _read_action(given)
    ids = [str(one) for one in given.getlist("id")]
    everything = bool(given.get("all"))
    selected = _select(given, access)
    if not everything and not ids:
        return await pages.problem(request, "No job is selected", "Tick some jobs first.", 400)
    preview = await pages.dashboard.operations.preview(action, selected, access)
    back = str(given.get("back") or "") or _list_address(given)
    verb = ACTION_TEXTS[action]
    jobs = f"{counted(preview.count)} {'job' if preview.count.value == 1 else 'jobs'}"
    return await pages.page(
        request,
        "confirm.html",
        current="jobs",
        status=status,
        problem=problem,
        form=given,
        action=action,
        verb=verb,
        question=f"{_question(verb)} {jobs}?" if preview.count.value else f"{verb}: nothing to do",
        button=f"{verb} {jobs}",
        consequence=_CONSEQUENCES[action],
        dangerous=action in _DANGEROUS,
        nothing=_NOTHING,
        preview=preview,
        ids=ids if not everything else [],
        everything=everything,
        filter_text=_text_of(selected, given) if everything else "",
        query=str(given.get("q") or ""),
        current_state=str(given.get("state") or "") or None,
        back=back,
        back_url=links.back(back, "/jobs"),
    )


def _question(verb: str) -> str:
    return verb if verb != "Run now" else "Run now:"


def _text_of(selected: Filter | Sequence[str], given: QueryParams | Form) -> str:
    text = "" if isinstance(selected, (list, tuple)) else format_filter(selected)  # type: ignore[arg-type]
    state = str(given.get("state") or "")
    return " ".join(part for part in (state, text) if part) or "all jobs"


def _list_address(given: QueryParams | Form) -> str:
    query = {name: value for name in ("state", "q") if (value := given.get(name))}
    return "/jobs" + (f"?{urlencode(query)}" if query else "")


def _read_action(given: QueryParams | Form) -> str:
    action = str(given.get("action") or "")
    if action not in ACTION_PERMISSIONS:
        raise WebError(f"Unknown action {action[:40]!r}: it must be one of {', '.join(ACTION_PERMISSIONS)}.")
    return action


def _select(given: QueryParams | Form, access: Access) -> Filter | list[str]:
    if given.get("all"):
        return read_selection(given, access)
    ids = [str(one) for one in given.getlist("id")]
    if len(ids) > MOST_IDS:
        raise WebError(f"{len(ids)} jobs are selected one by one; the maximum is {MOST_IDS}. Use a filter.")
    return ids


async def act_on_jobs(pages: Renderer, request: Request) -> Response:
    """Answer the form of ``/jobs/confirm``."""
    access, links = access_of(request), Links(request)
    form = await read_form(request)
    action = _read_action(form)
    try:
        result = await pages.dashboard.operations.act(
            action,
            _select(form, access),
            access,
            expected_count=read_number(form, "expected_count"),
            **_read_options(action, form),
        )
    except (ChangedCountError, UnknownCountError) as error:
        return await _ask(pages, request, form, problem=str(error), status=HTTPStatus.CONFLICT)
    except FilterError:
        raise
    except InvalidJobError as error:
        return await _ask(pages, request, form, problem=str(error), status=HTTPStatus.BAD_REQUEST)
    if result.operation is not None:
        return redirect(links.to(f"/operations/{result.operation}"))
    back = links.back(form.get("back"), "/jobs")
    return redirect_with_notice(request, back, action, result.changed, result.requested)


def _read_options(action: str, form: Form) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if action in {"fail", "cancel"}:
        options["reason"] = read_text(form, "reason")
    if action == "reschedule":
        options["run_at"] = read_time(form)
        for name in ("priority", "max_attempts"):
            options[name] = read_number(form, name)
        if not any(value is not None for value in options.values()):
            raise InvalidJobError("Nothing is to be changed. Fill in a field.", argument="run_at")
    return options


async def list_operations(pages: Renderer, request: Request) -> Response:
    """Answer ``/operations``."""
    found = pages.dashboard.operations.list(access_of(request))
    return await pages.page(request, "operations.html", current="operations", operations=found)


async def show_operation(pages: Renderer, request: Request) -> Response:
    """Answer ``/operations/{id}``."""
    found = pages.dashboard.operations.get(request.path_params["id"], access_of(request))
    if found is None:
        return await pages.problem(
            request,
            "This operation is not known",
            "Operations are remembered by the process that runs them, until it ends.",
            404,
            Links(request).to("/operations"),
        )
    return await pages.page(request, "operation.html", current="operations", operation=found)


async def stop_operation(pages: Renderer, request: Request) -> Response:
    """Answer the button that stops an operation."""
    pages.dashboard.operations.stop(request.path_params["id"], access_of(request))
    address = Links(request).to(f"/operations/{request.path_params['id']}")
    return redirect_with_notice(request, address, "stopping", 0)
