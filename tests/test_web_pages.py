"""The dashboard's pages: what they show, and that their forms do what they say, without a browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import asyncpg
import httpx
import pytest
from hypothesis import given, strategies as st
from markupsafe import escape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from graphile_worker import App
from graphile_worker.testing import Databases
from graphile_worker.web import Access, Dashboard
from graphile_worker.web.charts import Line, bar_chart, line_chart
from graphile_worker.web.filters import parse_filter
from graphile_worker.web.models import StateCounts
from graphile_worker.web.pages.formatting import qualifier
from graphile_worker.web.pages.rendering import CountTexts
from support.jobs import add, count, existing, get
from support.pages import Page as DocsPage
from support.web import HOST, NASTY, PAGES, Page, add_failed, fill, serving


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


@pytest.fixture
async def site(database: str) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(App(dsn=database)) as browser:
        yield browser


async def read(site: httpx.AsyncClient, address: str, status: int = 200) -> Page:
    answer = await site.get(address)
    assert answer.status_code == status, answer.text
    page = Page(answer.text)
    assert not page.mistakes, address
    return page


async def test_every_page_of_an_empty_queue_answers(site: httpx.AsyncClient) -> None:
    for address in PAGES:
        page = await read(site, address)
        assert "graphile-worker" in page.text


async def test_texts_of_jobs_are_escaped_on_every_page(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    ids = await fill(db)
    for address in (*PAGES, *(f"/jobs/{one}" for one in ids.values()), f"/add?copy={ids['ready']}"):
        answer = await site.get(address)
        assert answer.status_code == 200, (address, answer.text)
        assert not Page(answer.text).mistakes, address
        assert "<script>alert" not in answer.text, address
        assert "<img src=x" not in answer.text, address
    jobs = await site.get("/jobs?state=ready")
    assert str(escape(NASTY[:60])) in jobs.text


async def test_attributes_of_a_search_are_escaped(site: httpx.AsyncClient) -> None:
    answer = await site.get("/jobs", params={"q": NASTY, "state": "ready"})
    assert "<script>alert" not in answer.text
    assert not Page(answer.text).mistakes


async def test_list_of_each_state_has_its_jobs_only(site: httpx.AsyncClient, db: asyncpg.Connection) -> None:
    ids = await fill(db)
    for state in ("scheduled", "retrying", "running", "failed", "blocked"):
        page = await read(site, f"/jobs?state={state}")
        assert page.fields["id"] == [str(ids[state])], state


async def test_filter_in_the_address_selects_jobs_and_is_shown(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    wanted = await add(db, "mail", payload={"user": {"id": 7}})
    await add(db, "mail", payload={"user": {"id": 8}})
    await add(db, "other", payload={"user": {"id": 7}})
    answer = await site.get("/jobs", params={"q": "task:mail payload.user.id:7"})
    page = Page(answer.text)
    assert page.fields["id"] == [str(wanted["id"])]
    assert "task:mail payload.user.id:7" in page.fields["q"]
    assert "Remove the filter task:mail" in answer.text


async def test_mistake_in_a_filter_is_explained(site: httpx.AsyncClient) -> None:
    page = await read(site, "/jobs?q=task:", 400)
    assert "task: has no value" in page.text
    page = await read(site, "/jobs?state=lost", 400)
    assert "Unknown state" in page.text


async def test_pages_of_a_long_list_follow_each_other(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    ids = await add_failed(db, "mail", "no", 120)
    seen: list[str] = []
    address = "/jobs?state=failed"
    for _ in range(3):
        page = await read(site, address)
        seen += page.fields["id"]
        address = [link for link in page.links if "cursor=" in link][-1]  # "Older" stands after "Newer"
    assert seen == [str(one) for one in sorted(ids, reverse=True)]


async def test_retry_asks_with_a_count_then_retries(site: httpx.AsyncClient, db: asyncpg.Connection) -> None:
    ids = await add_failed(db, "mail", "no such host", 3)
    asked = await read(site, f"/jobs/confirm?state=failed&action=retry&id={ids[0]}&id={ids[1]}")
    assert "Retry 2 jobs?" in asked.text
    assert asked.fields["expected_count"] == ["2"]
    form = {name: values for name, values in asked.fields.items() if name not in {"q", "refresh"}}
    done = await site.post("/jobs/actions", data={**form, "back": "/jobs?state=failed"})
    assert (done.status_code, done.headers["location"]) == (303, "/jobs?state=failed")
    after = await site.get(done.headers["location"])
    assert "2 jobs will be retried." in after.text
    assert Page(after.text).fields["id"] == [str(ids[2])]
    assert (await existing(db, ids[0]))["attempts"] == 0
    assert "will be retried" not in (await site.get("/jobs")).text


@pytest.mark.parametrize(
    ("action", "state"),
    [
        ("retry", "failed"),
        ("run_now", "scheduled"),
        ("reschedule", "ready"),
        ("cancel", "ready"),
        ("fail", "ready"),
        ("complete", "failed"),
        ("remove", "failed"),
    ],
)
async def test_action_changes_the_job(
    site: httpx.AsyncClient, db: asyncpg.Connection, action: str, state: str
) -> None:
    [failed] = await add_failed(db, "mail", "no")
    ready = (await add(db, "mail"))["id"]
    scheduled = (await add(db, "mail", run_at=datetime.now(UTC) + timedelta(days=1)))["id"]
    one = {"failed": failed, "ready": ready, "scheduled": scheduled}[state]
    asked = await read(site, f"/jobs/confirm?action={action}&id={one}")
    assert "1 job?" in asked.text
    answer = await site.post(
        "/jobs/actions",
        data={
            "action": action,
            "id": str(one),
            "expected_count": "1",
            "delay": "2 h",
            "reason": "because",
            "priority": "7",
        },
    )
    assert answer.status_code == 303, answer.text
    row = await get(db, one)
    if action in {"complete", "remove"}:
        assert row is None
        return
    assert row is not None
    now = await db.fetchval("select now()")
    found = {
        "retry": (row["attempts"], row["is_available"]),
        "run_now": row["run_at"] <= now,
        "reschedule": (row["priority"], row["run_at"] > now + timedelta(hours=1)),
        "cancel": (row["attempts"], "because" in row["last_error"]) if row["last_error"] else None,
        "fail": (row["attempts"], row["last_error"]),
    }[action]
    most = row["max_attempts"]
    wanted = {
        "retry": (0, True),
        "run_now": True,
        "reschedule": (7, True),
        "cancel": (most, True),
        "fail": (most, "because"),
    }
    assert found == wanted[action]


async def test_all_matching_jobs_are_changed_although_one_page_shows_fifty(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    await add_failed(db, "mail", "no", 120)
    other = await add_failed(db, "other", "no")
    asked = await read(site, "/jobs/confirm?state=failed&q=task:mail&action=remove&all=1")
    assert "Remove 120 jobs?" in asked.text
    answer = await site.post(
        "/jobs/actions",
        data={"action": "remove", "all": "1", "state": "failed", "q": "task:mail", "expected_count": "120"},
    )
    assert answer.status_code == 303
    assert await db.fetchval("select array_agg(id) from graphile_worker._private_jobs") == other


async def test_changed_count_asks_again_and_changes_nothing(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    await add_failed(db, "mail", "no", 4)
    answer = await site.post(
        "/jobs/actions",
        data={"action": "remove", "all": "1", "state": "failed", "q": "", "expected_count": "3"},
    )
    assert answer.status_code == 409
    page = Page(answer.text)
    assert "Remove 4 jobs?" in page.text
    assert page.fields["expected_count"] == ["4"]
    assert await count(db) == 4


async def test_mistakes_in_an_action_are_explained(site: httpx.AsyncClient, db: asyncpg.Connection) -> None:
    job = await add(db, "mail")
    assert "No job is selected" in (await read(site, "/jobs/confirm?action=retry", 400)).text
    assert "Unknown action" in (await read(site, f"/jobs/confirm?action=eat&id={job['id']}", 400)).text
    for field, value, text in (
        ("delay", "soon", "write for example 10 min"),
        ("run_at", "tomorrow", "write for example 2030"),
        ("priority", "high", "must be a whole number"),
        ("priority", "99999", "must be from"),
        ("delay", "", "Nothing is to be changed"),
    ):
        answer = await site.post(
            "/jobs/actions", data={"action": "reschedule", "id": str(job["id"]), field: value}
        )
        assert answer.status_code == 400, (field, answer.text)
        assert text in answer.text


async def test_job_page_has_exact_numbers_and_the_way_of_the_job(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    ids = await fill(db)
    for state, text in (
        ("ready", "waits for a worker"),
        ("retrying", "attempts left"),
        ("failed", "no attempts left"),
        ("running", "Running"),
        ("blocked", "Blocked by its queue"),
        ("scheduled", "Due"),
    ):
        page = await read(site, f"/jobs/{ids[state]}")
        assert text in page.text, state
        assert "12345678901234567890123" in page.text, state


async def test_job_page_shows_attempts_with_tracebacks(database: str) -> None:
    app = App(dsn=database, history="all")

    @app.task("charge", max_attempts=1)
    async def charge(order: int) -> None:
        raise ValueError(f"order {order} has no card")

    job = await charge.enqueue(order=7)
    await app.run_once()
    async with serving(app) as site:
        page = await read(site, f"/jobs/{job.id}")
        assert "Attempt 1" in page.text
        assert "ValueError" in page.text
        assert 'raise ValueError(f"order {order} has no card")' in page.text
        failures = await read(site, "/failures")
        assert "order # has no card" in failures.text


async def test_job_that_is_gone_is_explained(site: httpx.AsyncClient) -> None:
    page = await read(site, "/jobs/999999", 404)
    assert "There is no job 999999" in page.text
    assert (await site.get("/jobs/abc")).status_code in {400, 404}
    assert (await site.get("/nowhere")).status_code == 404


async def test_failures_of_one_error_are_retried_together(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    wanted = await add_failed(db, "invoice", "card 1 was declined", 2)
    more = await add_failed(db, "invoice", "card 22 was declined")
    other = await add_failed(db, "invoice", "no such customer")
    page = await read(site, "/failures")
    assert "card # was declined" in page.text
    query = next(value for value in page.fields["q"] if "declined" in value)
    asked = Page((await site.get("/jobs/confirm", params={"action": "retry", "all": "1", "q": query})).text)
    assert "Retry 3 jobs?" in asked.text
    await site.post("/jobs/actions", data={"action": "retry", "all": "1", "q": query, "expected_count": "3"})
    for one in (*wanted, *more):
        assert (await existing(db, one))["attempts"] == 0
    assert (await existing(db, other[0]))["attempts"] == 3


async def test_job_is_added_by_the_form_with_exact_numbers(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    answer = await site.post(
        "/add",
        data={
            "task": "mail",
            "payload": '{"n": 12345678901234567890}',
            "queue_name": "q",
            "job_key": "k",
            "priority": "-3",
            "max_attempts": "4",
            "delay": "1 d",
            "flags": "a b",
        },
    )
    assert answer.status_code == 303, answer.text
    row = await existing(db, int(answer.headers["location"].rpartition("/")[2]))
    assert row["payload"] == '{"n": 12345678901234567890}' or "12345678901234567890" in row["payload"]
    assert (row["key"], row["priority"], row["max_attempts"]) == ("k", -3, 4)
    assert row["run_at"] > await db.fetchval("select now() + interval '23 hours'")
    after = await site.get(answer.headers["location"])
    assert "was added" in after.text


async def test_mistakes_in_the_add_form_keep_what_was_typed(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    for fields, text in (
        ({"task": "", "payload": "{}"}, "identifier"),
        ({"task": "mail", "payload": "{oops"}, "JSON"),
        ({"task": "mail", "payload": "{}", "priority": "x"}, "whole number"),
        ({"task": "mail", "payload": "{}", "delay": "soon"}, "10 min"),
    ):
        answer = await site.post("/add", data=fields)
        page = Page(answer.text)
        assert (answer.status_code, page.mistakes) == (400, []), answer.text
        assert text in page.text
        assert str(escape(fields["payload"])) in answer.text
    assert await count(db) == 0


async def test_job_is_copied_into_the_add_form(site: httpx.AsyncClient, db: asyncpg.Connection) -> None:
    job = await add(db, "mail", payload={"to": "Ann"}, queue_name="q", job_key="k", priority=4)
    page = await read(site, f"/add?copy={job['id']}")
    assert (page.fields["task"], page.fields["queue_name"], page.fields["job_key"]) == (["mail"], ["q"], [""])
    assert '"to": "Ann"' in page.text


async def test_redacted_payload_is_not_copied_into_the_add_form(
    database: str, db: asyncpg.Connection
) -> None:
    job = await add(db, "mail", payload={"to": "Ann", "card": "4242"}, queue_name="q")
    async with serving(App(dsn=database), redact=lambda _, payload: {**payload, "card": "xxxx"}) as site:
        text = (await site.get(f"/jobs/{job['id']}")).text
        assert "xxxx" in text
        assert "/add?copy=" not in text
        answer = await site.get(f"/add?copy={job['id']}")
        assert "xxxx" not in answer.text
        page = Page(answer.text)
        assert page.fields["queue_name"] == ["q"]
        assert "Payloads are redacted here, so it cannot be copied." in page.text


async def test_long_error_is_cut_on_the_page_of_its_job(
    site: httpx.AsyncClient, db: asyncpg.Connection
) -> None:
    [job] = await add_failed(db, "mail", "x" * 2_000_000)
    answer = await site.get(f"/jobs/{job}")
    assert answer.status_code == 200
    assert 90_000 < len(answer.text) < 300_000
    whole = (await site.get(f"/api/v1/jobs/{job}")).json()
    assert len(whole["error"]) == 2_000_000


async def test_theme_and_refresh_are_kept_in_cookies(site: httpx.AsyncClient) -> None:
    answer = await site.post("/preferences", data={"theme": "dark", "refresh": "15", "back": "/tasks"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/tasks")
    text = (await site.get("/tasks")).text
    assert 'data-theme="dark"' in text
    assert 'data-refresh="15"' in text
    for back in ("https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)"):
        answer = await site.post("/preferences", data={"theme": "odd", "back": back})
        assert answer.headers["location"] == "/"


async def test_read_only_dashboard_has_no_buttons_and_refuses_changes(
    database: str, db: asyncpg.Connection
) -> None:
    [job] = await add_failed(db, "mail", "no")
    async with serving(App(dsn=database), read_only=True) as site:
        page = await read(site, "/jobs?state=failed")
        assert page.buttons == []
        assert "/add" not in page.links
        for address, data in (
            ("/jobs/actions", {"action": "remove", "id": str(job)}),
            ("/add", {"task": "mail", "payload": "{}"}),
            ("/maintenance/cleanup", {}),
            ("/maintenance/unlock", {"worker": "w"}),
        ):
            answer = await site.post(address, data=data)
            assert answer.status_code == 403, (address, answer.text)
        assert (await site.get("/add")).status_code == 403
    assert await count(db) == 1


@pytest.mark.parametrize(
    ("missing", "address", "data"),
    [
        ("retry", "/jobs/actions", {"action": "retry"}),
        ("retry", "/jobs/actions", {"action": "run_now"}),
        ("edit", "/jobs/actions", {"action": "reschedule", "priority": "1"}),
        ("cancel", "/jobs/actions", {"action": "cancel"}),
        ("cancel", "/jobs/actions", {"action": "fail"}),
        ("cancel", "/jobs/actions", {"action": "complete"}),
        ("remove", "/jobs/actions", {"action": "remove"}),
        ("add", "/add", {"task": "mail", "payload": "{}"}),
        ("maintain", "/maintenance/cleanup", {}),
    ],
)
async def test_each_permission_is_checked_by_the_server(
    database: str, db: asyncpg.Connection, missing: str, address: str, data: dict[str, str]
) -> None:
    [job] = await add_failed(db, "mail", "no")
    granted = {"view", "add", "retry", "cancel", "edit", "remove", "maintain"} - {missing}
    access = Access(user="ann", permissions=frozenset(granted))  # type: ignore[arg-type]
    async with serving(App(dsn=database), auth=lambda _: access) as site:
        page = await read(site, "/jobs?state=failed")
        assert data.get("action") not in page.buttons
        answer = await site.post(address, data={**data, "id": str(job)})
        assert answer.status_code == 403, answer.text
    assert (await existing(db, job))["attempts"] == 3


async def test_payload_is_hidden_without_its_permission(database: str, db: asyncpg.Connection) -> None:
    job = await add(db, "mail", payload={"secret": "swordfish"})
    access = Access(user="ann", permissions=frozenset({"view", "add"}))  # type: ignore[arg-type]
    async with serving(App(dsn=database), auth=lambda _: access) as site:
        for address in (f"/jobs/{job['id']}", f"/add?copy={job['id']}", "/jobs?q=swordfish"):
            answer = await site.get(address)
            assert "secret" not in answer.text, address
            if "q=" in address:
                assert "id" not in Page(answer.text).fields


async def test_changes_from_other_sites_are_refused(database: str, db: asyncpg.Connection) -> None:
    [job] = await add_failed(db, "mail", "no")
    async with serving(App(dsn=database)) as site:
        del site.headers["Sec-Fetch-Site"]
        data = {"action": "remove", "id": str(job)}
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site", "Origin": f"http://{HOST}"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {},
        ):
            answer = await site.post("/jobs/actions", data=data, headers=headers)
            assert answer.status_code == 403, headers
        answer = await site.post("/jobs/actions", data=data, headers={"Origin": f"http://{HOST}"})
        assert answer.status_code == 303
    assert await count(db) == 0


async def test_forms_of_other_kinds_and_sizes_are_refused(site: httpx.AsyncClient) -> None:
    answer = await site.post("/add", content=b"{}", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    large = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await site.post("/add", content=b"payload=" + b"x" * 2_000_001, headers=large)
    assert answer.status_code == 413
    answer = await site.post("/add", content=b"payload=\xff", headers=large)
    assert answer.status_code == 400


async def test_mounted_dashboard_links_below_its_prefix(database: str, db: asyncpg.Connection) -> None:
    [job] = await add_failed(db, "mail", "no")
    dashboard = Dashboard(App(dsn=database))
    outer = Starlette(routes=[Mount("/admin/queue", dashboard)])
    transport = httpx.ASGITransport(app=outer, client=("127.0.0.1", 50_000))
    headers = {"Sec-Fetch-Site": "same-origin", "Accept": "text/html"}
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}", headers=headers) as site:
        for address in ("/", "/jobs?state=failed", f"/jobs/{job}", "/tasks"):
            answer = await site.get(f"/admin/queue{address}")
            assert answer.status_code == 200, answer.text
            page = Page(answer.text)
            assert all(link.startswith(("/admin/queue/", "#")) and "//" not in link for link in page.links)
        style = next(link for link in page.links if "dashboard.css" in link)
        assert (await site.get(style)).headers["content-type"].startswith("text/css")
        answer = await site.post("/admin/queue/jobs/actions", data={"action": "remove", "id": str(job)})
        assert answer.headers["location"] == "/admin/queue/jobs"
    await dashboard.close()


async def test_unreachable_database_shows_a_banner_and_the_page_comes_back(database: str) -> None:
    app = App(dsn="postgresql://me@127.0.0.1:1/none", pool_timeout=1)
    async with serving(app) as site:
        for address in ("/", "/jobs", "/failures", "/workers", "/add"):
            page = await read(site, address, 503)
            assert "unavailable" in page.text
    async with serving(App(dsn=database)) as site:
        assert (await site.get("/")).status_code == 200


async def test_missing_schema_is_explained(empty_database: str) -> None:
    async with serving(App(dsn=empty_database)) as site:
        page = await read(site, "/", 503)
        assert "migrate" in page.text


@given(st.text(min_size=1, max_size=60).filter(lambda found: "\0" not in found))
def test_qualifier_is_read_as_it_was_written(value: str) -> None:
    assert parse_filter(qualifier("task", value)).task == value


async def test_odd_payloads_are_shown(site: httpx.AsyncClient, db: asyncpg.Connection) -> None:
    deep = '{"a":' * 500 + "1" + "}" * 500
    for payload in (
        '"\\ud800"',
        '{"n": 1e999}',
        deep,
        '{"a": 1, "a": 2}',
        "[[], {}, null, true, 0.10]",
        '""',
    ):
        job = await db.fetchval(
            "select id from graphile_worker.add_job('mail', $1::json, priority => 1)", payload
        )
        page = await read(site, f"/jobs/{job}")
        assert "Payload" in page.text


async def test_export_has_a_line_per_job(site: httpx.AsyncClient, db: asyncpg.Connection) -> None:
    ids = await add_failed(db, "mail", "no", 3)
    answer = await site.get("/jobs/export?state=failed")
    assert re.findall(r'^\{"id":"(\d+)"', answer.text, re.MULTILINE) == [
        str(one) for one in sorted(ids, reverse=True)
    ]
    assert "attachment" in answer.headers["content-disposition"]


async def test_static_files_and_headers_need_no_other_host(site: httpx.AsyncClient) -> None:
    page = await read(site, "/")
    files = [link for link in page.links if "/static/" in link]
    assert len(files) == 3
    for link in files:
        answer = await site.get(link)
        assert answer.status_code == 200
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), link
    assert "default-src 'none'" in (await site.get("/")).headers["content-security-policy"]


async def test_dashboard_page_examples_run(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database)
    page = DocsPage("production/dashboard.md")
    names = await page.run()
    transport = httpx.ASGITransport(app=names["site"])
    async with httpx.AsyncClient(
        transport=transport, base_url="http://site", auth=("bob", "battery staple")
    ) as site:
        assert (await site.get("/admin/queue/jobs")).status_code == 200
        assert (await site.get("/admin/queue/jobs", auth=("bob", "wrong"))).status_code == 401
    await names["dashboard"].close()
    names = await page.run()
    request = Request({"type": "http", "headers": [], "session": {"user": "ann"}})
    assert (await names["auth"](request)).user == "ann"
    page.assert_done()


def test_estimated_counts_are_marked() -> None:
    counts = StateCounts(ready=1200, failed=3)
    assert [CountTexts(counts).text(name) for name in ("ready", "all")] == ["1,200", "1,203"]
    assert CountTexts(counts, exact=False).text("ready") == "≈ 1,200"


def test_charts_draw_every_step_and_mark_the_smallest_failure() -> None:
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute) for minute in range(4)]
    chart = bar_chart(
        "Jobs <done>",
        times,
        [
            Line(name="Done", values=[1000, 0, None, 5]),
            Line(name="Failed", values=[1, 0, None, 0], colour="orange"),
        ],
        format_value=lambda value: f"{value:.0f}",
        format_time=lambda at: f"{at:%H:%M}",
        marks=[(times[1], "2.0 started"), (times[0] - timedelta(days=1), "before")],
    )
    assert (chart.top, chart.is_empty) == (2000.0, False)
    assert chart.svg.count("<title>") == 5
    assert "Jobs &lt;done&gt;" in chart.svg
    assert 'class="orange"' in chart.svg
    assert [values for _, values in chart.rows()] == [["5", "0"], ["1000", "1"]]
    assert "style=" not in chart.svg


def test_line_chart_leaves_a_gap_where_nothing_is_known() -> None:
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute) for minute in range(5)]
    chart = line_chart(
        "Run time",
        times,
        [Line(name="p95", values=[1.0, 2.0, None, 1.0, None], colour="line")],
        format_value=str,
        format_time=str,
    )
    [path] = re.findall(r' d="([^"]+)"', chart.svg)
    assert path.count("M") == 2
    nothing = line_chart("x", times, [Line(name="x", values=[None] * 5)], format_value=str, format_time=str)
    assert nothing.is_empty
