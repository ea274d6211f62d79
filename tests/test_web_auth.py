"""Who may open the dashboard, and what other sites cannot do with it."""

from __future__ import annotations

import base64
from typing import Any

import asyncpg
import pytest
from starlette.applications import Starlette

from graphile_worker import App
from graphile_worker.errors import ConfigurationError
from graphile_worker.testing import Databases
from graphile_worker.web import Access, Dashboard, Permission, basic_auth, proxy_auth, token_auth
from graphile_worker.web.auth import OneTimeLinks
from graphile_worker.web.server import check_exposed, under
from support.jobs import add, count, existing
from support.web_api import api, client

TOKEN = "a-long-random-secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}
JOBS = "/api/v1/jobs"


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


async def status(asgi: Any, path: str = JOBS, method: str = "GET", **options: Any) -> int:
    address = options.pop("address", ("127.0.0.1", 1))
    async with client(asgi, address=address) as found:
        return (await found.request(method, path, **options)).status_code


async def test_without_auth_only_this_machine_may_open_the_dashboard(database: str) -> None:
    dashboard = Dashboard(App(dsn=database))
    assert await status(dashboard) == 200
    assert await status(dashboard, address=("10.1.2.3", 5)) == 403
    assert await status(dashboard, headers={"Host": "evil.example"}) == 403
    forwarded = {
        "X-Forwarded-For": "10.1.2.3",
        "X-Forwarded-Proto": "https",
        "Via": "1.1 proxy",
        "Forwarded": "for=10.1.2.3",
    }
    for name, value in forwarded.items():
        assert await status(dashboard, headers={name: value}) == 403, name
    assert await status(dashboard, address=("::ffff:127.0.0.1", 5)) == 200
    await dashboard.close()


async def test_without_auth_a_request_from_a_proxy_that_uses_http_1_0_is_refused(database: str) -> None:
    dashboard = Dashboard(App(dsn=database))

    async def proxied(scope: Any, receive: Any, send: Any) -> None:  # as nginx passes requests on by default
        await dashboard({**scope, "http_version": "1.0"}, receive, send)

    assert await status(proxied) == 403
    await dashboard.close()


def test_dashboard_without_auth_warns_that_a_proxy_may_expose_it(caplog: pytest.LogCaptureFixture) -> None:
    Dashboard(App(), auth=token_auth(TOKEN))
    assert not caplog.records
    Dashboard(App())
    assert "proxy" in caplog.text


async def test_token_opens_the_api_as_a_bearer_and_a_browser_by_a_cookie(database: str) -> None:
    dashboard = Dashboard(App(dsn=database), auth=token_auth(TOKEN))
    assert await status(dashboard) == 401
    assert await status(dashboard, headers={"Authorization": "Bearer wrong"}) == 401
    assert await status(dashboard, headers=BEARER) == 200
    async with client(dashboard) as browser:
        answer = await browser.get(f"/jobs?state=failed&token={TOKEN}")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/jobs?state=failed"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly; SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert (await browser.get(JOBS)).status_code == 200
    assert await status(dashboard, f"{JOBS}?token=wrong") == 401
    await dashboard.close()


async def test_link_works_once_and_the_next_one_is_announced(database: str) -> None:
    announced: list[str] = []
    links = OneTimeLinks(Access(user="local"), on_used=announced.append)
    dashboard = Dashboard(App(dsn=database), auth=links)
    link = f"/?token={links.token}"
    async with client(dashboard) as browser:
        assert (await browser.get(link)).status_code == 303
        assert (await browser.get(JOBS)).status_code == 200
        assert (await browser.get(link)).status_code == 303  # this browser is signed in
    assert await status(dashboard, link) == 401
    assert announced == [links.token]
    await dashboard.close()


async def test_link_that_another_site_opens_shows_a_page_that_opens_the_dashboard(database: str) -> None:
    links = OneTimeLinks(Access(user="local"))
    dashboard = Dashboard(App(dsn=database), auth=links)
    async with client(dashboard, headers={"Accept": "text/html"}) as browser:
        answer = await browser.get(f"/jobs?q=%22%3E&token={links.token}")
        # After a redirect, the browser would not send the strict cookie: the other site began the navigation.
        assert answer.status_code == 200
        assert "SameSite=Strict" in answer.headers["set-cookie"]
        assert 'http-equiv="refresh" content="0; url=/jobs?q=%22%3E"' in answer.text
        assert 'href="/jobs?q=%22%3E"' in answer.text
        assert (await browser.get("/jobs")).status_code == 200
    await dashboard.close()


async def test_cookies_are_secure_behind_a_proxy_that_ends_tls(database: str) -> None:
    dashboard = Dashboard(App(dsn=database), auth=token_auth(TOKEN))
    for headers, is_secure in (({"X-Forwarded-Proto": "https"}, True), ({}, False)):
        async with client(dashboard, headers={**SAME_ORIGIN, **headers}) as browser:
            cookies = [(await browser.get(f"/?token={TOKEN}")).headers["set-cookie"]]
            browser.headers.update(BEARER)
            for path, form in (("/preferences", {"theme": "dark"}), ("/add", {"task": "hello"})):
                answer = await browser.post(path, data=form)
                assert answer.status_code == 303
                cookies.append(answer.headers["set-cookie"])
        assert [("; Secure" in cookie) for cookie in cookies] == [is_secure] * 3
    await dashboard.close()


async def test_redirect_to_an_address_without_a_slash_keeps_the_browsers_scheme(database: str) -> None:
    async with api(database) as found:
        answer = await found.get("/jobs/?state=failed")
    assert (answer.status_code, answer.headers["location"]) == (307, "/jobs?state=failed")


async def test_request_with_an_unreadable_host_is_answered(database: str) -> None:
    dashboard = Dashboard(App(dsn=database), auth=token_auth(TOKEN))
    for host in (b"[", b"[::1", b"\xff", b"a/b?token=x"):
        for path in ("/jobs", "/?token=x"):
            headers = [(b"host", host), (b"accept", b"text/html")]
            assert await status(dashboard, path, headers=headers) == 401, host
        headers = [(b"host", host), (b"accept", b"text/html"), (b"authorization", f"Bearer {TOKEN}".encode())]
        assert await status(dashboard, "/jobs?state=failed", headers=headers) == 200, host
    await dashboard.close()


async def test_browsers_that_are_refused_get_a_page(database: str) -> None:
    dashboard = Dashboard(App(dsn=database), auth=token_auth(TOKEN), allowed_hosts=["queue.example"])
    async with client(dashboard, headers={"Accept": "text/html"}) as browser:
        for method, headers, expected in (
            ("GET", {}, 401),
            ("POST", {"Sec-Fetch-Site": "cross-site"}, 403),
            ("GET", {"Host": "evil.example"}, 421),
        ):
            answer = await browser.request(method, "/jobs", headers=headers)
            assert answer.status_code == expected
            assert answer.text.startswith("<!doctype html>")
    await dashboard.close()


async def test_redirect_after_a_token_stays_on_the_host(database: str) -> None:
    dashboard = Dashboard(App(dsn=database), auth=token_auth(TOKEN))
    async with client(dashboard) as browser:
        answer = await browser.get(f"http://localhost:8900//evil.example/?token={TOKEN}")
    assert answer.headers["location"] == "/evil.example/"


async def test_basic_auth_compares_name_and_password(database: str) -> None:
    viewer = Access(user="bob", permissions=frozenset({Permission.VIEW}))
    dashboard = Dashboard(
        App(dsn=database), auth=basic_auth({"ann": "pass:word", "bob": ("battery", viewer)})
    )
    async with client(dashboard) as browser:
        answer = await browser.get(JOBS)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
    assert await status(dashboard, headers=basic("ann", "pass:word")) == 200
    assert await status(dashboard, headers=basic("ann", "")) == 401
    assert await status(dashboard, headers=basic("eve", "")) == 401
    for broken in ("!", "\xe9"):
        assert (
            await status(dashboard, headers=[(b"authorization", f"Basic {broken}".encode("latin-1"))]) == 401
        )
    assert await status(dashboard, headers=basic("bob", "battery")) == 200
    await dashboard.close()


async def test_proxy_header_counts_only_from_trusted_addresses(database: str) -> None:
    dashboard = Dashboard(App(dsn=database), auth=proxy_auth("X-User", trusted=["10.0.0.0/8"]))
    named = {"X-User": "ann"}
    assert await status(dashboard, headers=named, address=("10.9.9.9", 1)) == 200
    assert await status(dashboard, headers=named, address=("::ffff:10.9.9.9", 1)) == 200
    assert await status(dashboard, headers=named, address=("11.9.9.9", 1)) == 401
    assert await status(dashboard, headers=named) == 401
    assert await status(dashboard, address=("10.9.9.9", 1)) == 401
    await dashboard.close()


async def test_auth_function_may_be_async_and_needs_the_permission_to_view(database: str) -> None:
    async def auth(request: Any) -> Access | None:
        names: dict[str, set[str]] = {"ann": {"view"}, "bob": {"retry"}}
        name = request.headers.get("x-name")
        return Access(user=name, permissions=names[name]) if name in names else None  # type: ignore[arg-type]

    dashboard = Dashboard(App(dsn=database), auth=auth)
    assert await status(dashboard, headers={"X-Name": "ann"}) == 200
    assert await status(dashboard, headers={"X-Name": "bob"}) == 403
    assert await status(dashboard, headers={"X-Name": "eve"}) == 401
    await dashboard.close()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:8900"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:9999"},
        {"Origin": "null"},
        {"Origin": "http://[::1"},
        {"Authorization": "Bearer x", "Cookie": "a=b"},
        {"Authorization": "Bearer x"},
        {"Authorization": "Bearer x", "Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
async def test_other_sites_cannot_change_anything(
    database: str, db: asyncpg.Connection, headers: dict[str, str]
) -> None:
    job = await add(db)
    dashboard = Dashboard(App(dsn=database))
    body = {"action": "remove", "ids": [str(job["id"])]}
    for path in ("/api/v1/jobs/actions", "/jobs/actions"):
        assert await status(dashboard, path, "POST", json=body, headers=headers) == 403
    assert await count(db) == 1
    await dashboard.close()


async def test_own_pages_and_bearers_may_change_things(database: str) -> None:
    body = {"task": "hello"}
    dashboard = Dashboard(App(dsn=database))
    assert await status(dashboard, JOBS, "POST", json=body, headers=SAME_ORIGIN) == 201
    assert (
        await status(dashboard, JOBS, "POST", json=body, headers={"Origin": "http://localhost:8900"}) == 201
    )
    await dashboard.close()
    with_token = Dashboard(App(dsn=database), auth=token_auth(TOKEN))
    assert await status(with_token, JOBS, "POST", json=body, headers=BEARER) == 201
    for site in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        assert await status(with_token, JOBS, "POST", json=body, headers={**BEARER, **site}) == 403
    await with_token.close()
    by_proxy = Dashboard(App(dsn=database), auth=proxy_auth("X-User", trusted=["127.0.0.1"]))
    named = {"X-User": "ann", "Authorization": "Bearer x"}
    assert await status(by_proxy, JOBS, "POST", json=body, headers=named) == 403
    assert await status(by_proxy, JOBS, "POST", json=body, headers={**named, **SAME_ORIGIN}) == 201
    await by_proxy.close()


async def test_name_that_another_site_points_here_is_refused(database: str) -> None:
    names = ["queue.example", "Other.Example:8900", "::", ""]
    dashboard = Dashboard(App(dsn=database), auth=token_auth(TOKEN), allowed_hosts=names)
    for host, expected in {
        "queue.example": 200,
        "other.example": 200,
        "queue.example:8900": 200,
        "localhost:8900": 200,
        "127.0.0.1:8900": 200,
        "[::1]:8900": 200,
        "evil.example": 421,
        "127.0.0.1.evil.example": 421,
        "": 421,
        "[broken": 421,
    }.items():
        assert await status(dashboard, headers={**BEARER, "Host": host}) == expected, host
    await dashboard.close()


async def test_every_response_has_the_security_headers(database: str) -> None:
    async with api(database) as found:
        for path in ("/", "/jobs", JOBS, "/nothing", "/api/v1/nothing", "/static/dashboard.js"):
            headers = (await found.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"  # otherwise forms are sent with Origin: null
            assert headers["cache-control"] == ("no-cache" if "static" in path else "no-store")


ACTIONS = {
    "retry": Permission.RETRY,
    "run_now": Permission.RETRY,
    "reschedule": Permission.EDIT,
    "cancel": Permission.CANCEL,
    "fail": Permission.CANCEL,
    "complete": Permission.CANCEL,
    "remove": Permission.REMOVE,
}


async def test_each_change_needs_its_permission(database: str, db: asyncpg.Connection) -> None:
    job = await add(db)
    granted: set[Permission] = set()
    dashboard = Dashboard(
        App(dsn=database), auth=lambda _: Access(permissions=frozenset({Permission.VIEW, *granted}))
    )
    requests: list[tuple[Permission, str, dict[str, Any]]] = [
        (
            permission,
            "/jobs/actions",
            {"action": action, "ids": [str(job["id"])], "priority": 3, "dry_run": True},
        )
        for action, permission in ACTIONS.items()
    ]
    requests += [
        (Permission.ADD, "/jobs", {"task": "x"}),
        (Permission.MAINTAIN, "/maintenance/cleanup", {"dry_run": True}),
    ]
    for permission, path, body in requests:
        granted.clear()
        granted.update(set(Permission) - {permission})
        address = f"/api/v1{path}"
        assert await status(dashboard, address, "POST", json=body, headers=SAME_ORIGIN) == 403, body
        granted.clear()
        granted.add(permission)
        assert await status(dashboard, address, "POST", json=body, headers=SAME_ORIGIN) < 300, body
    await dashboard.close()


async def test_job_with_a_key_replaces_another_one_only_with_the_permission_to_edit(
    database: str, db: asyncpg.Connection
) -> None:
    job = await add(db, "pay", payload={"to": "ann"}, job_key="pay-1")
    granted = {Permission.VIEW, Permission.ADD}
    app = App(dsn=database)

    @app.task(job_key="pay-1")
    async def pay(to: str) -> None: ...

    async with api(app, auth=lambda _: Access(user="bob", permissions=frozenset(granted))) as found:
        keyed = {"task": "other", "payload": {"to": "bob"}, "job_key": "pay-1"}
        for body in (
            keyed,
            {**keyed, "job_key_mode": "replace"},
            {**keyed, "job_key_mode": "preserve_run_at"},
            {"task": "pay", "payload": {"to": "bob"}},  # the task's own key
        ):
            answer = await found.post(JOBS, json=body)
            assert answer.status_code == 403, body
            assert "'edit'" in answer.json()["detail"]
        answer = await found.post(JOBS, json={**keyed, "job_key_mode": "unsafe_dedupe"})
        assert answer.status_code == 201
        assert "ann" in str((await existing(db, job["id"]))["payload"])
        granted.add(Permission.EDIT)
        assert (await found.post(JOBS, json=keyed)).status_code == 201
    assert "bob" in str((await existing(db, job["id"]))["payload"])


async def test_read_only_dashboard_changes_nothing_for_anybody(database: str, db: asyncpg.Connection) -> None:
    job = await add(db)
    async with api(database, read_only=True) as found:
        for path, body in {
            "/jobs/actions": {"action": "remove", "ids": [str(job["id"])]},
            "/jobs": {"task": "x"},
            "/maintenance/cleanup": {},
            "/cron/x/run": {},
        }.items():
            answer = await found.post(f"/api/v1{path}", json=body)
            assert answer.status_code == 403, path
            assert answer.json()["code"] == "forbidden"
        assert (await found.get(JOBS)).status_code == 200
    assert await count(db) == 1


async def test_viewer_without_payloads_cannot_guess_them_by_searching(
    database: str, db: asyncpg.Connection
) -> None:
    job = await add(db, "mail", payload={"card": "4242"})
    auth = lambda _: Access(permissions=frozenset({Permission.VIEW}))  # noqa: E731
    async with api(database, auth=auth) as found:
        shown = (await found.get(f"{JOBS}/{job['id']}")).json()
        assert shown["payload"] is None
        assert "may not see" in shown["payload_hidden"]
        assert (await found.get(JOBS, params={"q": "4242"})).json()["items"] == []
        assert (await found.get(JOBS, params={"q": "payload.card:4242"})).status_code == 400
        assert (await found.get(JOBS, params={"search": "424"})).json()["count"]["value"] == 0


async def test_redacted_payloads_are_shown_redacted_and_never_searched(
    database: str, db: asyncpg.Connection
) -> None:
    job = await add(db, "mail", payload={"card": "4242", "to": "ann"})
    broken = await add(db, "broken", payload={"card": "4242"})

    def redact(task: str, payload: Any) -> Any:
        return {**payload, "card": "…"} if task == "mail" else payload["missing"]

    async with api(database, redact=redact) as found:
        assert (await found.get(f"{JOBS}/{job['id']}")).json()["payload"] == {"card": "…", "to": "ann"}
        hidden = (await found.get(f"{JOBS}/{broken['id']}")).json()
        assert hidden["payload"] is None
        assert (await found.get(JOBS, params={"q": "payload.card:4242"})).status_code == 400
        assert (await found.get(JOBS, params={"q": "4242"})).json()["items"] == []


async def test_mounted_dashboard_links_below_its_path(database: str) -> None:
    site = Starlette()
    dashboard = Dashboard(App(dsn=database))
    site.mount("/ops/jobs", dashboard)
    async with client(site, headers=SAME_ORIGIN) as browser:
        for address in ("/ops/jobs/", "/ops/jobs/jobs?state=ready"):
            page = await browser.get(address)
            assert page.status_code == 200
            assert 'href="/ops/jobs/failures"' in page.text
            assert 'href="/failures"' not in page.text
            assert "//" not in page.text.replace("http://www.w3.org", "").replace("://", "")
        assert (await browser.get("/ops/jobs/static/dashboard.css")).status_code == 200
        described = (await browser.get("/ops/jobs/api/v1/openapi.json")).json()
        assert described["servers"] == [{"url": "/ops/jobs/api/v1"}]
    await dashboard.close()


async def test_dashboard_behind_a_proxy_path_works_whether_or_not_the_path_is_passed_on(
    database: str,
) -> None:
    dashboard = Dashboard(App(dsn=database))
    async with client(under(dashboard, "/ops/")) as browser:
        for address in ("/jobs", "/ops/jobs"):
            page = await browser.get(address, headers={"Accept": "text/html"})
            assert page.status_code == 200
            assert 'href="/ops/failures"' in page.text
    await dashboard.close()


async def test_cookie_of_a_mounted_dashboard_is_for_its_path(database: str) -> None:
    site = Starlette()
    site.mount("/ops", Dashboard(App(dsn=database), auth=token_auth(TOKEN)))
    async with client(site) as browser:
        answer = await browser.get(f"/ops/jobs?token={TOKEN}")
    assert answer.headers["location"] == "/ops/jobs"
    assert "Path=/ops;" in answer.headers["set-cookie"]


def test_dashboard_for_other_machines_needs_auth() -> None:
    check_exposed("127.0.0.1", None)
    check_exposed("localhost", None)
    check_exposed("0.0.0.0", token_auth(TOKEN))
    for host in ("0.0.0.0", "::", "", "192.168.1.4", "queue.example"):
        with pytest.raises(ConfigurationError, match="sign in"):
            check_exposed(host, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: token_auth("short"), "16 characters"),
        (lambda: token_auth({}), "no token"),
        (lambda: basic_auth({}), "no user"),
        (lambda: basic_auth({"a:b": "x"}), "a:b"),
        (lambda: proxy_auth(trusted=[]), "trusts no proxy"),
        (lambda: proxy_auth(trusted=["nowhere"]), "nowhere"),
        (lambda: Access(permissions={"fly"}), "fly"),  # type: ignore[arg-type]
        (lambda: Dashboard(App(), auth="secret"), "secret"),  # type: ignore[arg-type]
        (lambda: Dashboard(App(), redact=3), "redact"),  # type: ignore[arg-type]
        (lambda: Dashboard(App(), schemas="other"), "list of names"),
    ],
)
def test_invalid_settings_of_the_dashboard_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
