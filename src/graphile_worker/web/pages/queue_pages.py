"""The pages about more than a single job: failures, queues, tasks, recurring tasks, workers, doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker.web.auth import Permission
from graphile_worker.web.errors import NotFoundError
from graphile_worker.web.filters import QUALIFIERS
from graphile_worker.web.pages.activity import WINDOWS, draw_activity
from graphile_worker.web.pages.formatting import shorten
from graphile_worker.web.pages.links import access_of, read_choice

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.models import TaskRow
    from graphile_worker.web.pages.rendering import Renderer

FAILURE_WINDOWS = (
    ("1h", "1 h"),
    ("3h", "3 h"),
    ("24h", "24 h"),
    ("3d", "3 d"),
    ("7d", "7 d"),
    ("all", "All"),
)
_TASK_COLUMNS = (
    ("ready", "Ready"),
    ("running", "Running"),
    ("permanent", "Failed"),
    ("done", "Done"),
    ("failing", "Failing"),
    ("p50", "p50"),
    ("p95", "p95"),
)


async def show_failures(pages: Renderer, request: Request) -> Response:
    """Answer ``/failures``."""
    names = [name for name, _ in FAILURE_WINDOWS]
    window = read_choice(request.query_params.get("window"), ["all", *names])
    page = await pages.dashboard.data.failures(window)
    access = access_of(request)
    actions = [
        (name, text)
        for name, text, permission in (
            ("retry", "Retry", Permission.RETRY),
            ("remove", "Remove", Permission.REMOVE),
        )
        if access.allows(permission)
    ]
    return await pages.page(
        request,
        "failures.html",
        current="failures",
        page=page,
        windows=FAILURE_WINDOWS,
        actions=actions,
        filters_windows="failed" in QUALIFIERS,
    )


async def show_queues(pages: Renderer, request: Request) -> Response:
    """Answer ``/queues``."""
    search = request.query_params.get("name", "").strip()[:128]
    page = await pages.dashboard.data.queues(search)
    return await pages.page(request, "queues.html", current="queues", page=page, search=search)


async def show_tasks(pages: Renderer, request: Request) -> Response:
    """Answer ``/tasks``."""
    sort = read_choice(
        request.query_params.get("sort"), ["ready", "task", *(name for name, _ in _TASK_COLUMNS)]
    )
    page = await pages.dashboard.data.tasks()
    rows = sorted(page.items, key=lambda row: row.task)
    if sort != "task":
        rows.sort(key=lambda row: _sort_value(row, sort), reverse=True)
    return await pages.page(
        request, "tasks.html", current="tasks", page=page, rows=rows, sort=sort, columns=_TASK_COLUMNS
    )


def _sort_value(row: TaskRow, column: str) -> float:
    values: dict[str, float | None] = {
        "ready": row.counts.ready,
        "running": row.counts.running,
        "permanent": row.counts.failed,
        "done": row.done,
        "failing": row.failure_ratio,
        "p50": row.run_p50,
        "p95": row.run_p95,
    }
    value = values[column]
    return -1.0 if value is None else value


async def show_task(pages: Renderer, request: Request) -> Response:
    """Answer ``/tasks/{identifier}``."""
    identifier = request.path_params["identifier"]
    data = pages.dashboard.data
    task = await data.task(identifier)
    if task is None:
        raise NotFoundError(f"Nothing is known about the task {shorten(identifier, 80)!r}.")
    window = read_choice(request.query_params.get("window"), [name for name, _ in WINDOWS])
    drawn = await draw_activity(data, window, task=identifier)
    counts = {name: getattr(task.row.counts, name) for name in task.row.counts.__struct_fields__}
    return await pages.page(request, "task.html", current="tasks", task=task, task_counts=counts, **drawn)


async def show_cron(pages: Renderer, request: Request) -> Response:
    """Answer ``/cron``."""
    page = await pages.dashboard.data.cron()
    return await pages.page(request, "cron.html", current="cron", page=page)


async def show_workers(pages: Renderer, request: Request) -> Response:
    """Answer ``/workers``."""
    page = await pages.dashboard.data.workers()
    return await pages.page(request, "workers.html", current="workers", page=page)


async def show_doctor(pages: Renderer, request: Request) -> Response:
    """Answer ``/doctor``."""
    report = await pages.dashboard.data.doctor()
    return await pages.page(request, "doctor.html", current="doctor", report=report)
