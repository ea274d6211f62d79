"""Theme and refresh of a viewer, kept in cookies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker.web.pages.forms import read_form
from graphile_worker.web.pages.links import Links, cookie_path, redirect
from graphile_worker.web.pages.rendering import REFRESHES, THEMES
from graphile_worker.web.security import is_secure

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.pages.rendering import Renderer

_YEAR = 365 * 86_400


async def set_preferences(_pages: Renderer, request: Request) -> Response:
    """Answer the form in the bar."""
    links, form = Links(request), await read_form(request)
    response = redirect(links.back(form.get("back"), "/"))
    for name, allowed in (("refresh", [value for value, _ in REFRESHES]), ("theme", THEMES)):
        if form.get(name) in allowed:
            response.set_cookie(
                f"gw_{name}",
                form[name],
                max_age=_YEAR,
                path=cookie_path(request),
                httponly=True,
                samesite="lax",
                secure=is_secure(request),
            )
    return response
