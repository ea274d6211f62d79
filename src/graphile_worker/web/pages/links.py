"""Addresses of the dashboard, and who a request is from."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from starlette.responses import RedirectResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.auth import Access


class Links:
    """Makes addresses of the dashboard, under the path where it is mounted."""

    def __init__(self, request: Request) -> None:
        self.root: str = request.state.link_root

    def to(self, path: str, **query: object) -> str:
        """Return the address of a page. Empty values are left out of the query."""
        found = [(name, str(value)) for name, value in query.items() if value not in (None, "")]
        return self.root + path + (f"?{urlencode(found)}" if found else "")

    def back(self, given: object, default: str) -> str:
        """Return the address that a form names, if it is one of the dashboard."""
        path = str(given or "")
        is_ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
        return self.root + (path if is_ours else default)


def access_of(request: Request) -> Access:
    """Return who the request is from, and what they may do."""
    access: Access = request.state.access
    return access


def cookie_path(request: Request) -> str:
    """Return the path for which cookies of the dashboard are set: all its schemas share them."""
    return f"{quote(request.state.root)}/"


def redirect(address: str) -> Response:
    """Answer a form that was sent: the browser shows another page."""
    return RedirectResponse(address, 303)


def read_choice(given: str | None, allowed: Sequence[str]) -> str:
    """Return what was chosen, or the first choice."""
    return given if given is not None and given in allowed else allowed[0]
