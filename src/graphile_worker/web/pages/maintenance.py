"""Run a recurring task now, release the jobs of dead workers, and clean up: each asks first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphile_worker.web.errors import NotFoundError
from graphile_worker.web.pages.formatting import shorten
from graphile_worker.web.pages.forms import read_form
from graphile_worker.web.pages.links import Links, access_of
from graphile_worker.web.pages.notices import redirect_with_notice

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.pages.rendering import Renderer

_MOST_NAMED = 20
_SWEEP = (
    "Running workers do this by themselves all the time. Only workers that sent heartbeats and stopped count "
    "as dead."
)


async def confirm_run(pages: Renderer, request: Request) -> Response:
    """Answer ``/cron/run``: ask before a recurring task runs out of its schedule."""
    links = Links(request)
    identifier = request.query_params.get("id", "")
    found = next((row for row in (await pages.dashboard.data.cron()).items if row.id == identifier), None)
    if found is None:
        raise NotFoundError(f"There is no recurring task {shorten(identifier, 80)!r}.")
    return await _ask(
        pages,
        request,
        current="cron",
        question=f"Run {shorten(identifier, 60)} now?",
        consequence="A job is added at once. The schedule stays as it is.",
        button="Run now",
        action_url=links.to("/cron/run"),
        hidden=[("id", identifier)],
        back_url=links.to("/cron"),
    )


async def run_cron(pages: Renderer, request: Request) -> Response:
    """Answer the form of ``/cron/run``."""
    form = await read_form(request)
    job = await pages.dashboard.operations.run_cron(form.get("id", ""), access_of(request))
    return redirect_with_notice(request, Links(request).to("/cron"), "added", int(job.id))


async def confirm_maintenance(pages: Renderer, request: Request) -> Response:
    """Answer ``/maintenance/{what}``: ask, and say what would be done."""
    what = request.path_params["what"]
    links, operations = Links(request), pages.dashboard.operations
    values: dict[str, Any] = {
        "back_url": links.to("/workers"),
        "action_url": links.to(f"/maintenance/{what}"),
    }
    if what == "unlock":
        worker = request.query_params.get("worker", "")
        values |= {
            "question": f"Unlock {shorten(worker, 60)}?",
            "consequence": "All its jobs and queues are released. If it still runs, its jobs run twice.",
            "button": "Unlock",
            "hidden": [("worker", worker)],
            "dangerous": True,
        }
    elif what == "sweep":
        found = await operations.maintain("sweep", access_of(request), dry_run=True)
        lines = _describe_sweep(found)
        values |= {
            "question": "Release the jobs of dead workers?",
            "consequence": _SWEEP
            if lines
            else f"{_SWEEP} No worker is dead now: there is nothing to release.",
            "button": "Sweep" if lines else "",
            "lines": lines,
        }
    elif what == "cleanup":
        values |= {
            "question": "Clean up?",
            "consequence": "Queues without jobs are removed. A queue that is used again is made again.",
            "button": "Clean up",
        }
    else:
        raise NotFoundError(f"There is no maintenance {shorten(what, 40)!r}.")
    return await _ask(pages, request, current="workers", **values)


async def maintain(pages: Renderer, request: Request) -> Response:
    """Answer the form of ``/maintenance/{what}``."""
    what = request.path_params["what"]
    if what not in {"unlock", "sweep", "cleanup"}:
        raise NotFoundError(f"There is no maintenance {shorten(what, 40)!r}.")
    form = await read_form(request)
    workers = [one for one in form.getlist("worker") if one]
    result = await pages.dashboard.operations.maintain(what, access_of(request), worker_ids=workers)
    done = {"unlock": "unlocked", "sweep": "swept", "cleanup": "cleaned"}[what]
    number = sum(_size(value) for value in result.values())
    return redirect_with_notice(request, Links(request).to("/workers"), done, number)


def _size(value: object) -> int:
    if isinstance(value, bool) or value is None:
        return 0
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, (list, dict)) else 0


def _describe_sweep(found: dict[str, Any]) -> list[str]:
    workers = found["workers"]
    lines = [
        f"{shorten(one['id'], 60)}: {_length(one['jobs'])} jobs, {_length(one['queues'])} queues"
        for one in workers[:_MOST_NAMED]
    ]
    left = len(workers) - len(lines)
    return [*lines, f"and {left} more workers"] if left else lines


def _length(found: object) -> int:
    return len(found) if isinstance(found, list) else int(str(found))


async def _ask(pages: Renderer, request: Request, *, current: str, **values: Any) -> Response:
    defaults: dict[str, Any] = {"dangerous": False, "hidden": [], "lines": [], "error": ""}
    return await pages.page(request, "question.html", current=current, **{**defaults, **values})
