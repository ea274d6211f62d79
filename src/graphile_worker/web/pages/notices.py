"""What the next page says about an action: kept in a cookie until then, so that addresses stay clean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.web.pages.formatting import count
from graphile_worker.web.pages.links import Links, cookie_path, redirect
from graphile_worker.web.security import is_secure

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

NOTICE = "gw_notice"
_SECONDS = 60
_KEPT = re.compile(r"(?P<what>[a-z_]{1,20})\.(?P<number>\d{1,19})\.(?P<requested>\d{1,19})")
_DONE = {
    "retry": "will be retried",
    "run_now": "will run now",
    "reschedule": "rescheduled",
    "cancel": "cancelled",
    "fail": "failed",
    "complete": "completed",
    "remove": "removed",
}
_MAINTAINED = {
    "swept": "Swept. Dead workers whose jobs were released: {}.",
    "unlocked": "Unlocked: its jobs and queues are free again.",
    "cleaned": "Cleaned up. Rows removed: {}.",
    "stopping": "The operation stops after its current batch.",
}


class Notice(NamedTuple):
    """What a page says about an action that was done."""

    text: str
    link: str | None = None
    link_text: str = ""


def redirect_with_notice(
    request: Request, address: str, what: str, number: int, requested: int = 0
) -> Response:
    """Show another page, which says what was done.

    Args:
        request: The request.
        address: Where to go.
        what: An action, or ``added``, ``swept``, ``unlocked``, ``cleaned``.
        number: How many jobs were changed; for ``added`` the id of the job.
        requested: How many running jobs were asked to stop.
    """
    response = redirect(address)
    response.set_cookie(
        NOTICE,
        f"{what}.{number}.{requested}",
        max_age=_SECONDS,
        path=cookie_path(request),
        httponly=True,
        samesite="strict",
        secure=is_secure(request),
    )
    return response


def read_notice(request: Request) -> Notice | None:
    """Return what the last action did, if it was a moment ago."""
    kept = _KEPT.fullmatch(request.cookies.get(NOTICE, ""))
    if kept is None:
        return None
    what, number, requested = kept["what"], int(kept["number"]), int(kept["requested"])
    if what == "added":
        return Notice(f"Job {number} was added.", Links(request).to(f"/jobs/{number}"), "Show it")
    if what in _MAINTAINED:
        return Notice(_MAINTAINED[what].format(count(number)))
    if what not in _DONE:
        return None
    changed = f"{_jobs(number)} {_DONE[what]}." if number or not requested else ""
    asked = f"{_jobs(requested)} asked to stop." if requested else ""
    return Notice(f"{changed} {asked}".strip())


def _jobs(number: int) -> str:
    return f"{count(number)} {'job' if number == 1 else 'jobs'}"
