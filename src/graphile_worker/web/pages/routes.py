"""The addresses of the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from graphile_worker.web.pages import (
    actions,
    adding,
    job,
    jobs,
    maintenance,
    overview,
    preferences,
    queue_pages,
)
from graphile_worker.web.pages.rendering import Renderer, error_page

if TYPE_CHECKING:
    from graphile_worker.web.dashboard import Dashboard


__all__ = ["error_page", "page_routes"]


def page_routes(dashboard: Dashboard) -> list[Route]:
    """Return the routes of all pages."""
    pages = Renderer(dashboard)
    shown = {
        "/": overview.show_overview,
        "/jobs": jobs.show_jobs,
        "/jobs/confirm": actions.confirm_action,
        "/jobs/export": jobs.export_jobs,
        "/jobs/{id}": job.show_job,
        "/failures": queue_pages.show_failures,
        "/queues": queue_pages.show_queues,
        "/tasks": queue_pages.show_tasks,
        "/tasks/{identifier:path}": queue_pages.show_task,
        "/cron": queue_pages.show_cron,
        "/cron/run": maintenance.confirm_run,
        "/workers": queue_pages.show_workers,
        "/operations": actions.list_operations,
        "/operations/{id}": actions.show_operation,
        "/doctor": queue_pages.show_doctor,
        "/add": adding.show_add,
        "/maintenance/{what}": maintenance.confirm_maintenance,
    }
    sent = {
        "/jobs/actions": actions.act_on_jobs,
        "/operations/{id}/stop": actions.stop_operation,
        "/add": adding.add_job,
        "/cron/run": maintenance.run_cron,
        "/maintenance/{what}": maintenance.maintain,
        "/preferences": preferences.set_preferences,
    }
    return [
        *(Route(path, pages.handle(handler), methods=["POST"]) for path, handler in sent.items()),
        *(Route(path, pages.handle(handler), methods=["GET"]) for path, handler in shown.items()),
    ]
