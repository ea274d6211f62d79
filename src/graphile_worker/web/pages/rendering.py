"""Turn templates into responses, with what every page shows: navigation, counts, theme, banners."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import jinja2
from starlette.responses import HTMLResponse

from graphile_worker import __version__
from graphile_worker.errors import DatabaseError, SchemaError
from graphile_worker.web.errors import QueryTimeoutError
from graphile_worker.web.models import Tab
from graphile_worker.web.pages import formatting
from graphile_worker.web.pages.links import Links, access_of, cookie_path, read_choice
from graphile_worker.web.pages.notices import NOTICE, read_notice

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from graphile_worker.web.dashboard import Dashboard
    from graphile_worker.web.models import Count, Problem, StateCounts

    Handler = Callable[[Request], Awaitable[Response]]

TEMPLATES = Path(__file__).parent.parent / "templates"
STATIC = Path(__file__).parent.parent / "static"
PAGES = (
    ("overview", "Overview", "/"),
    ("jobs", "Jobs", "/jobs"),
    ("failures", "Failures", "/failures"),
    ("queues", "Queues", "/queues"),
    ("tasks", "Tasks", "/tasks"),
    ("cron", "Cron", "/cron"),
    ("workers", "Workers", "/workers"),
    ("operations", "Operations", "/operations"),
    ("doctor", "Doctor", "/doctor"),
)
REFRESHES = (
    ("live", "Live"),
    ("1", "1 s"),
    ("5", "5 s"),
    ("15", "15 s"),
    ("60", "1 min"),
    ("off", "Off"),
)
THEMES = ("system", "light", "dark")
_FILTERS = (
    "count",
    "duration",
    "exact",
    "first_line",
    "in_order",
    "iso",
    "join_names",
    "percent",
    "quoted",
    "raw_json",
    "relative",
    "shorten",
    "time_of_day",
    "day_and_time",
)


class Outage(NamedTuple):
    """Why a page has no numbers."""

    title: str
    text: str


class CountTexts:
    """The jobs by state, as text. Numbers that a sample of a very large table gave are marked."""

    def __init__(self, counts: StateCounts, *, exact: bool = True) -> None:
        self._counts = counts
        self._sign = "" if exact else "≈ "

    def text(self, state: str) -> str:
        """Return the number of jobs in a state; of all jobs for ``all``."""
        number = self._counts.total if state == "all" else getattr(self._counts, state)
        return self._sign + formatting.count(number)


class Renderer:
    """Renders the pages of one dashboard."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard

    async def page(
        self,
        request: Request,
        template: str,
        *,
        current: str | None = None,
        status: int = 200,
        outage: Outage | None = None,
        **values: Any,
    ) -> Response:
        """Render a page.

        Args:
            request: The request.
            template: Name of the template.
            current: The page's name in the navigation.
            status: The response's status.
            outage: Why the page has no numbers.
            values: What the template shows.
        """
        counts = None
        if outage is None:
            seen = await self.dashboard.data.look()
            counts = CountTexts(seen.total, exact=seen.look.exact)
        shell = self._shell(request)
        text = (
            make_environment()
            .get_template(template)
            .render(
                {
                    **shell,
                    "current": current,
                    "counts": counts,
                    "outage": outage,
                    "current_state": None,
                    **values,
                }
            )
        )
        response = HTMLResponse(encode(text), status)
        if NOTICE in request.cookies and template != "confirm.html":
            response.delete_cookie(NOTICE, path=cookie_path(request))
        return response

    def _shell(self, request: Request) -> dict[str, Any]:
        access = access_of(request)
        link = Links(request)

        def url(path: str, **query: object) -> str:
            return link.to(path, **query)

        here = quote(request.scope["path"].removeprefix(request.scope["root_path"])) or "/"
        if query := request.scope["query_string"].decode("latin-1"):  # request.url fails on odd hosts
            here += f"?{query}"
        return {
            "url": url,
            "asset": lambda name: asset(request, name),
            "root": link.root,
            "here": here,
            "here_url": link.root + here,
            "pages": PAGES,
            "states": [tab.value for tab in Tab],
            "refreshes": REFRESHES,
            "refresh": read_choice(request.cookies.get("gw_refresh"), [value for value, _ in REFRESHES]),
            "theme": read_choice(request.cookies.get("gw_theme"), THEMES),
            "access": access,
            "may": access.allows,
            "read_only": self.dashboard.read_only,
            "schema": self.dashboard.queue.schema,
            "schemas": [(name, self.dashboard.schema_path(request, name)) for name in self.dashboard.schemas],
            "version": __version__,
            "now": datetime.now(UTC),
            "notice": read_notice(request),
            "query": request.query_params.get("q", ""),
        }

    def handle(self, handler: Callable[[Renderer, Request], Awaitable[Response]]) -> Handler:
        """Return a route's endpoint, with a banner if the database is away. `Dashboard` has other errors."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(self, request)
            except QueryTimeoutError as error:
                return await self._away(request, Outage("The database took too long.", str(error)))
            except SchemaError as error:
                return await self._away(request, Outage("The queue is not ready.", str(error)))
            except DatabaseError as error:
                outage = Outage("The database is unavailable.", f"{error} This page tries again by itself.")
                return await self._away(request, outage)

        return endpoint

    async def problem(
        self, request: Request, title: str, text: str, status: int, back_url: str | None = None
    ) -> Response:
        """Render a page that says why there is nothing else."""
        values: dict[str, Any] = {
            "title": title,
            "text": text,
            "back_url": back_url or Links(request).to("/jobs"),
        }
        try:
            return await self.page(request, "problem.html", status=status, **values)
        except DatabaseError:
            # The counts beside it cannot be read.
            return await self._away(request, Outage(title, text))

    async def _away(self, request: Request, outage: Outage) -> Response:
        values: dict[str, Any] = {"title": outage.title, "text": "", "back_url": None}
        return await self.page(
            request, "outage.html", status=HTTPStatus.SERVICE_UNAVAILABLE, outage=outage, **values
        )


@cache
def make_environment() -> jinja2.Environment:
    """Return the templates' environment, with all filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update({name: getattr(formatting, name) for name in _FILTERS})
    environment.filters.update(
        json=formatting.short_json,
        counted=counted,
        path=lambda text: quote(str(text), safe=""),
        rate=lambda value: f"{value:,.1f}/s" if value >= 1 else f"{value * 60:,.1f}/min",
        sentence=lambda text: text[:1].upper() + text[1:],
    )
    environment.globals.update(qualifier=formatting.qualifier)
    return environment


def counted(count: Count) -> str:
    """Write a count that may not be exact."""
    text = formatting.count(count.value)
    if count.at_least:
        return f"{text}+"
    return text if count.exact else f"≈ {text}"


def encode(text: str) -> bytes:
    """Encode a page. Payloads may have half a surrogate pair, which UTF-8 cannot."""
    return text.encode(errors="backslashreplace")


def asset(request: Request, name: str) -> str:
    """Return the address of a static file, which changes with its content."""
    return f"{quote(request.state.root)}/static/{name}?v={_fingerprints()[name]}"


@cache
def _fingerprints() -> dict[str, str]:
    files = [path for path in STATIC.iterdir() if path.is_file()]
    return {path.name: blake2b(path.read_bytes(), digest_size=6).hexdigest() for path in files}


async def error_page(dashboard: Dashboard, request: Request, problem: Problem) -> Response:
    """Render a page for a request that is not answered otherwise: a stranger, a wrong address, a failure."""
    if request.scope["state"].get("access") is not None:
        title = "This does not work" if problem.status == HTTPStatus.BAD_REQUEST else problem.title
        return await Renderer(dashboard).problem(
            request, title, problem.detail or "", problem.status, Links(request).to("/")
        )
    text = (
        make_environment()
        .get_template("stranger.html")
        .render(problem=problem, asset=lambda name: asset(request, name), target=None)
    )
    return HTMLResponse(encode(text), problem.status)


def signed_in_page(request: Request, target: str) -> Response:
    """Render a page that opens another one at once.

    A browser that came from another site's link does not send the new cookie after a redirect, because the
    whole navigation then counts as that site's. It does after this page.
    """
    text = (
        make_environment()
        .get_template("stranger.html")
        .render(problem=None, asset=lambda name: asset(request, name), target=target)
    )
    return HTMLResponse(encode(text))
