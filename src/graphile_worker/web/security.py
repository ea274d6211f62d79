"""Guards that every request and every response pass: hosts, users, changes from other sites, headers."""

from __future__ import annotations

import inspect
import ipaddress
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders

from graphile_worker.errors import ConfigurationError
from graphile_worker.web.auth import Access, cookie_name, read_address
from graphile_worker.web.errors import WebError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import HTTPConnection
    from starlette.types import Message, Scope, Send

    from graphile_worker.web.auth import Auth

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_FORWARDING = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, browsers send forms over plain HTTP with "Origin: null".
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class NotAuthenticatedError(WebError):
    """It is not known who the request is from."""

    status = HTTPStatus.UNAUTHORIZED
    code = "not_authenticated"


class RefusedError(WebError):
    """The request comes from a place that may not send it."""

    status = HTTPStatus.FORBIDDEN
    code = "refused"


class WrongHostError(WebError):
    """The request names a host that is not this dashboard's."""

    status = HTTPStatus.MISDIRECTED_REQUEST
    code = "wrong_host"


def host_of(connection: HTTPConnection) -> str:
    """Return the host that the request names, in lower case and without the port."""
    return host_name(connection.headers.get("host", ""))


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine only."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return read_address(host).is_loopback
    except ValueError:
        return False


def is_secure(connection: HTTPConnection) -> bool:
    """Return whether the browser uses TLS. A client that lies about it only harms itself."""
    forwarded = connection.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return connection.scope["scheme"] == "https" or forwarded == "https"


def host_name(text: str) -> str:
    """Return the host of a ``Host`` header, in lower case and without the port; empty if it is invalid."""
    try:
        return urlsplit(f"//{text}").hostname or ""
    except ValueError:
        return ""


def is_address(host: str) -> bool:
    """Return whether a host is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_host(connection: HTTPConnection, allowed: Iterable[str] | None) -> None:
    """Refuse names that another site has pointed at this dashboard (DNS rebinding). Addresses cannot be.

    Raises:
        WrongHostError: The host is not allowed.
    """
    if allowed is None:
        return
    host = host_of(connection)
    if host not in {*allowed, "localhost"} and not is_address(host):
        raise WrongHostError(
            f"This dashboard is not served as {host[:100]!r}. Allow that name with --allowed-host."
        )


def check_origin(connection: HTTPConnection, method: str, auth: Auth | None) -> None:
    """Refuse changes that another site's page has sent with the viewer's cookie or password.

    Raises:
        RefusedError: The request does not come from a page of this dashboard.
    """
    if method in SAFE_METHODS:
        return
    headers = connection.headers
    is_bearer = headers.get("authorization", "").lower().startswith("bearer ")
    site = headers.get("sec-fetch-site")
    if site is not None:
        if site == "same-origin":
            return
        raise RefusedError(
            "Another site's page has sent this request. Repeat the action on the dashboard itself."
        )
    origin = headers.get("origin")
    if origin is not None:
        if origin.lower().partition("://")[2] == headers.get("host", "").lower():
            return
    elif is_bearer and _signs_in_by_bearer(auth) and "cookie" not in headers:
        return  # no browser sends a token by itself, or a change without an Origin
    raise RefusedError(
        "It is not known which page has sent this request. Programs send 'Authorization: Bearer ...' and no "
        "cookie, or the header 'Sec-Fetch-Site: same-origin'."
    )


def _signs_in_by_bearer(auth: Auth | None) -> bool:
    """Return whether a bearer token can be what signs in; functions of the program may accept one."""
    return auth is not None and getattr(auth, "accepts_bearer", True)


async def authenticate(connection: HTTPConnection, auth: Auth | None) -> Access:
    """Return what the request's user may do.

    Raises:
        NotAuthenticatedError: The user is unknown.
        RefusedError: There is no `auth`, and the request is not from this machine.
    """
    if auth is None:
        client = "" if connection.client is None else connection.client.host
        # By default, nginx tells that it forwards a request only by the version that it uses.
        is_old = connection.scope.get("http_version") == "1.0"
        forwarded = is_old or any(name in connection.headers for name in _FORWARDING)
        if is_loopback(client) and is_loopback(host_of(connection)) and not forwarded:
            return Access(user="local")
        raise RefusedError(
            "Without auth=, the dashboard answers only requests from the machine that it runs on. Pass "
            "Dashboard(app, auth=...)."
        )
    found = auth(connection)
    access = await found if inspect.isawaitable(found) else found
    if access is None:
        raise NotAuthenticatedError("Sign in, or open the link with the token that the program printed.")
    if not isinstance(access, Access):
        raise ConfigurationError(f"auth= returned {type(access).__name__}; it must return an Access or None.")
    if not access.allows("view"):
        raise RefusedError(f"{access.user} may not view this dashboard.")
    return access


def guarding(send: Send, *, caches: bool) -> Send:
    """Return a `send` that adds the security headers to the response.

    Args:
        send: The server's function.
        caches: Whether the browser may keep the response, and asks whether it has changed.
    """

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "://" in (place := headers.get("location", "")):
                # The router redirects to the scheme that it sees, which is not the browser's behind a proxy.
                parts = urlsplit(place)
                headers["location"] = _on_this_host(parts.path, parts.query)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers["Cache-Control"] = "no-cache" if caches else "no-store"
        await send(message)

    return guarded


def login_redirect(connection: HTTPConnection, auth: Auth | None) -> tuple[str, str] | None:
    """Return where to redirect a request with a token in its URL, and the cookie to set; None if it has none.

    Raises:
        NotAuthenticatedError: The token is wrong, or was used.
    """
    log_in = getattr(auth, "log_in", None)
    query = connection.scope["query_string"].decode("latin-1")
    if log_in is None or "token=" not in query:
        return None
    pairs = parse_qsl(query, keep_blank_values=True)
    tokens = [value for name, value in pairs if name == "token"]
    if not tokens:
        return None
    cookie = log_in(tokens[0])
    if cookie is None and auth is not None and auth(connection) is None:
        raise NotAuthenticatedError(
            "This link was used before, or is wrong. The program prints the current one."
        )
    rest = urlencode([(name, value) for name, value in pairs if name != "token"])
    return _on_this_host(quote(connection.scope["path"]), rest), cookie or ""


def _on_this_host(path: str, query: str) -> str:
    # Two slashes at the beginning would name another host.
    return "/" + path.lstrip("/") + (f"?{query}" if query else "")


def cookie_header(connection: HTTPConnection, value: str, path: str) -> str:
    """Return the Set-Cookie header of a session."""
    secure = "; Secure" if is_secure(connection) else ""
    return f"{cookie_name(connection)}={value}; Path={quote(path) or '/'}; HttpOnly; SameSite=Strict{secure}"


def wants_json(scope: Scope, path: str) -> bool:
    """Return whether a problem is told as JSON and not as a page."""
    return path.startswith("/api/") or "text/html" not in Headers(scope=scope).get("accept", "*/*")
