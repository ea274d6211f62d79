"""Who a request is from, and what they may do."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import secrets
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from starlette.requests import HTTPConnection

    Auth: TypeAlias = Callable[[HTTPConnection], "Access | Awaitable[Access | None] | None"]


class Permission(StrEnum):
    """What a user may do. Each permission is granted by itself, but none is of use without `VIEW`."""

    VIEW = "view"
    """See jobs without their payloads, queues, tasks, workers and statistics."""
    VIEW_PAYLOAD = "view_payload"
    """See payloads and results, and search in payloads."""
    ADD = "add"
    """Add jobs, and run recurring tasks now."""
    RETRY = "retry"
    """Retry failed jobs, and run scheduled ones now."""
    CANCEL = "cancel"
    """Cancel jobs, fail them, and complete them."""
    EDIT = "edit"
    """Change when a job runs, its priority and its attempts."""
    REMOVE = "remove"
    """Remove jobs."""
    MAINTAIN = "maintain"
    """Release the jobs of dead workers, unlock workers, and clean up."""


ALL = frozenset(Permission)
_MIN_TOKEN = 16
READ_ONLY = frozenset({Permission.VIEW, Permission.VIEW_PAYLOAD})


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What `auth` returns for a request that is allowed.

    >>> access = Access(user="ann", permissions={"view", "retry"})
    >>> access.allows("retry"), access.allows("remove")
    (True, False)
    """

    user: str = "anonymous"
    """The name that audit events carry."""
    permissions: frozenset[Permission] = ALL

    def __post_init__(self) -> None:
        try:
            given = frozenset(Permission(one) for one in self.permissions)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Invalid permissions {self.permissions!r}: each must be one of {', '.join(Permission)}."
            ) from error
        msgspec.structs.force_setattr(self, "permissions", given)

    def allows(self, permission: Permission | str) -> bool:
        """Return whether the user has the permission."""
        return permission in self.permissions and Permission.VIEW in self.permissions

    def limited_to(self, permissions: Iterable[Permission]) -> Access:
        """Return the access without all other permissions."""
        return Access(user=self.user, permissions=self.permissions & frozenset(permissions))


class _TokenAuth:
    """Accepts bearer tokens, and the cookie that a browser gets for one."""

    challenge = "Bearer"

    def __init__(self, tokens: Mapping[str, Access]) -> None:
        self._tokens = {token.encode(): access for token, access in tokens.items()}
        # The cookie does not reveal the token, and ends with it.
        self._cookies = {_cookie_for(token): access for token, access in self._tokens.items()}

    def __call__(self, request: HTTPConnection) -> Access | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return _find(self._tokens, token.strip().encode())
        return self.from_cookie(request.cookies.get(cookie_name(request), ""))

    def from_cookie(self, cookie: str) -> Access | None:
        """Return the access that a browser's cookie stands for."""
        return _find(self._cookies, cookie.encode())

    def log_in(self, token: str) -> str | None:
        """Return the cookie for a token from a link; None if the token is wrong."""
        known = _find(self._tokens, token.encode())
        return None if known is None else _cookie_for(token.encode()).decode()


class OneTimeLinks:
    """Accepts browsers that have opened a link with a token, each of which works once.

    Args:
        access: What these browsers may do.
        on_used: Called after a link was used, with the token of the next one.
    """

    challenge = "Bearer"
    accepts_bearer = False

    def __init__(self, access: Access, on_used: Callable[[str], object] | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        """The token of the next link."""
        self._access = access
        self._on_used = on_used
        self._cookies: dict[bytes, Access] = {}

    def __call__(self, request: HTTPConnection) -> Access | None:
        return _find(self._cookies, request.cookies.get(cookie_name(request), "").encode())

    def log_in(self, token: str) -> str | None:
        """Return the cookie for a token; None if the token is wrong, or was used."""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        cookie = secrets.token_urlsafe(32)
        self._cookies[cookie.encode()] = self._access
        self.token = secrets.token_urlsafe(32)
        if self._on_used is not None:
            self._on_used(self.token)
        return cookie


def token_auth(tokens: str | Mapping[str, Access]) -> Auth:
    """Accept requests with a token: ``Authorization: Bearer …``, or ``?token=…`` once in a browser.

    A browser that opens a page with ``?token=…`` gets a cookie, and is redirected to the page without it.

    Args:
        tokens: The token; or several tokens, and what each of them may do.

    Raises:
        ConfigurationError: A token has fewer than 16 characters.

    >>> from graphile_worker.web import Access, token_auth
    >>> auth = token_auth({"a-long-random-secret": Access(user="ci", permissions={"view"})})
    """
    given = {tokens: Access(user="token")} if isinstance(tokens, str) else dict(tokens)
    if not given:
        raise ConfigurationError("token_auth has no token. Pass one, or several with their Access.")
    for token, access in given.items():
        if len(token) < _MIN_TOKEN or not token.isascii() or " " in token:
            raise ConfigurationError(
                f"A token must be ASCII text without spaces, of at least {_MIN_TOKEN} characters. Make one: "
                'python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        _check_access(access)
    return _TokenAuth(given)


class _BasicAuth:
    """Accepts names with passwords."""

    challenge = 'Basic realm="graphile-worker", charset="UTF-8"'
    accepts_bearer = False

    def __init__(self, users: Mapping[str, str | tuple[str, Access]]) -> None:
        self._users = {
            name: (given, Access(user=name)) if isinstance(given, str) else given
            for name, given in users.items()
        }

    def __call__(self, request: HTTPConnection) -> Access | None:
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:  # not base64, or not UTF-8
            return None
        expected, access = self._users.get(name, ("", None))
        # Compared even if the name is unknown, so that the time does not tell which names exist.
        is_right = secrets.compare_digest(password.encode(), expected.encode())
        return access if is_right and expected else None


def basic_auth(users: Mapping[str, str | tuple[str, Access]]) -> Auth:
    """Accept requests with a name and a password, for which browsers ask. Use it with TLS only.

    Args:
        users: Passwords by name; or pairs of a password and what the user may do.

    >>> from graphile_worker.web import Access, basic_auth
    >>> viewer = Access(user="bob", permissions={"view"})
    >>> auth = basic_auth({"ann": "correct horse", "bob": ("battery staple", viewer)})
    """
    if not users:
        raise ConfigurationError("basic_auth has no user. Pass passwords by name.")
    for name, given in users.items():
        password = given if isinstance(given, str) else given[0]
        if not name or ":" in name or not password:
            raise ConfigurationError(
                f"Invalid user {name!r}: the name must not be empty or contain a colon, and needs a password."
            )
        if not isinstance(given, str):
            _check_access(given[1])
    return _BasicAuth(users)


class _ProxyAuth:
    """Accepts the name that a trusted proxy sends."""

    challenge = None
    accepts_bearer = False

    def __init__(
        self, header: str, trusted: Iterable[str], access: Callable[[str], Access | None] | None
    ) -> None:
        self._header = header
        self._networks = [ipaddress.ip_network(one, strict=False) for one in trusted]
        self._access = access or (lambda user: Access(user=user))

    def __call__(self, request: HTTPConnection) -> Access | None:
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not names[0].strip() or not self._is_trusted(request):
            return None
        return self._access(names[0].strip())

    def _is_trusted(self, request: HTTPConnection) -> bool:
        host = "" if request.client is None else request.client.host
        try:
            address = read_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def proxy_auth(
    header: str = "X-Forwarded-User",
    *,
    trusted: Iterable[str],
    access: Callable[[str], Access | None] | None = None,
) -> Auth:
    """Accept the user whom a reverse proxy has authenticated and names in a header.

    The proxy must remove the header from what clients send. The address that counts is that of the
    connection, so the server must not replace it by ``X-Forwarded-For``: with uvicorn, pass
    ``proxy_headers=False``.

    Args:
        header: The header with the user's name.
        trusted: Addresses or networks of the proxies. Requests from elsewhere are refused.
        access: Returns what a user may do, or None to refuse; by default everything.

    >>> from graphile_worker.web import proxy_auth
    >>> auth = proxy_auth("X-Remote-User", trusted=["10.0.0.0/8"])
    """
    networks = [trusted] if isinstance(trusted, str) else list(trusted)
    for one in networks:
        try:
            ipaddress.ip_network(one, strict=False)
        except ValueError as error:
            raise ConfigurationError(f"Invalid proxy address {one!r}: {error}.") from None
    if not networks:
        raise ConfigurationError(
            "proxy_auth trusts no proxy. Pass trusted=, a list of addresses or networks."
        )
    return _ProxyAuth(header, networks, access)


def read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that a text stands for. A server that listens on ``::`` names IPv4 as IPv6.

    Raises:
        ValueError: It is not an address.

    >>> read_address("::ffff:127.0.0.1")
    IPv4Address('127.0.0.1')
    """
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def cookie_name(request: HTTPConnection) -> str:
    """Return the name of the cookie. Cookies ignore ports, so it differs between dashboards of a machine."""
    server = request.scope.get("server") or ("", 0)
    return f"graphile_worker_{server[1] or 0}"


def _cookie_for(token: bytes) -> bytes:
    return hmac.new(token, b"graphile-worker dashboard", "sha256").hexdigest().encode()


def _find(known: Mapping[bytes, Access], given: bytes) -> Access | None:
    found = None
    for secret, access in known.items():
        if secrets.compare_digest(secret, given):
            found = access
    return found


def _check_access(access: Any) -> None:
    if not isinstance(access, Access):
        raise ConfigurationError(f"{access!r} is not an Access. Pass Access(user=..., permissions=...).")
