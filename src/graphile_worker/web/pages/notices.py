"""What the next page says about an action: kept in a cookie until then, so that addresses stay clean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker.web.pages.formatting import count
from graphile_worker.web.pages.links import Links, redirect

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
        path=f"{request.state.root}/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


def read_notice(request: Request) -> Notice | None:
    """Return what the last action did, if it was a moment ago."""
    kept = _KEPT.fullmatch(request.cookies.get(NOTICE, ""))
    if kept is None:
        return None
    what, number, requested = kept["what"], int(kept["number"]), int(kept["requested"])
    links = Links(request)
    jobs = f"{count(number)} {'job' if number == 1 else 'jobs'}"
    match what:
        case "added":
            return Notice(f"Job {number} was added.", links.to(f"/jobs/{number}"), "Show it")
        case "swept":
            return Notice(f"Swept: the jobs of {number} dead {'worker' if number == 1 else 'workers'} were released.")
        case "unlocked":
            return Notice("Unlocked: its jobs and queues are free again.")
        case "cleaned":
            return Notice(f"Cleaned up: {count(number)} {'row' if number == 1 else 'rows'} removed.")
        case "stopping":
            return Notice("The operation stops after its current batch.")
        case _ if what not in _DONE:
            return None
    stopping = f" {count(requested)} running {'job was' if requested == 1 else 'jobs were'} asked to stop."
    if not number:
        return Notice("No job was changed." if not requested else stopping.strip())
    return Notice(f"{jobs} {_DONE[what]}.{stopping if requested else ''}")
