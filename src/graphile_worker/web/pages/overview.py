"""The overview: the state of the queue on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker.web.models import ActivityWindow
from graphile_worker.web.pages.activity import WINDOWS, draw_activity
from graphile_worker.web.pages.links import read_choice

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.pages.rendering import Renderer


async def show_overview(pages: Renderer, request: Request) -> Response:
    """Answer ``/``."""
    data = pages.dashboard.data
    window = read_choice(request.query_params.get("window"), [name for name, _ in WINDOWS])
    overview = await data.overview()
    marks = [
        (mark.at, f"{mark.workers} {mark.language or ''} workers started with {mark.version}")
        for mark in overview.deploys
    ]
    drawn = await draw_activity(data, window, marks=marks)
    figures = next(
        (one for one in overview.windows if one.window == window),
        ActivityWindow(window=window, done=0, failed=0),
    )
    return await pages.page(
        request, "overview.html", current="overview", overview=overview, figures=figures, **drawn
    )
