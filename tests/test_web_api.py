"""The dashboard's JSON API: what it returns, what it refuses, and what it does without the database."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import httpx
import pytest

from graphile_worker import App, Fail
from graphile_worker.testing import Databases
from graphile_worker.web import Access, Dashboard
from graphile_worker.web.api.openapi import describe
from graphile_worker.web.api.routes import ENDPOINTS
from graphile_worker.web.english import describe as in_english
from graphile_worker.web.filters import FilterError, format_filter, parse_filter
from support.jobs import add, count, lock
from support.waiting import until
from support.web_api import api, client

JOBS = "/api/v1/jobs"
BIG = 123456789012345678901234567890


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def get(found: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await found.get(f"/api/v1{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ids(found: httpx.AsyncClient, **params: Any) -> list[str]:
    return [job["id"] for job in (await get(found, "/jobs", **params))["items"]]


async def in_each_state(db: asyncpg.Connection) -> dict[str, str]:
    """Add a job in each state, and return the ids."""
    jobs = {
        "ready": await add(db, "mail", payload={"user": {"id": 7, "name": "Ann"}}, job_key="k"),
        "scheduled": await add(db, "mail", flags=["slow", "big"]),
        "retrying": await add(db, "charge"),
        "running": await add(db, "charge", queue_name="q one"),
        "failed": await add(db, "charge"),
        "blocked": await add(db, "mail", queue_name="q one"),
    }
    found = {state: job["id"] for state, job in jobs.items()}
    table = "graphile_worker._private_jobs"
    await db.execute(
        f"update {table} set run_at = now() + interval '1 day' where id = $1", found["scheduled"]
    )
    await db.execute(
        f"update {table} set run_at = now() + interval '1 day', attempts = 1, "
        "last_error = 'order 17: declined' where id = $1",
        found["retrying"],
    )
    await lock(db, found["running"], by="worker-1")
    await db.execute(
        f"update {table} set attempts = max_attempts, last_error = 'order 18: declined' where id = $1",
        found["failed"],
    )
    return {state: str(one) for state, one in found.items()}


async def test_jobs_are_listed_by_state_and_by_each_qualifier(database: str, db: asyncpg.Connection) -> None:
    one = await in_each_state(db)
    async with api(database) as found:
        for state in ("scheduled", "retrying", "running", "failed", "blocked"):
            assert await ids(found, state=state) == [one[state]], state
        assert await ids(found, state="ready") == [one["blocked"], one["ready"]]
        expected = {
            "task:charge": ["failed", "running", "retrying"],
            'queue:"q one"': ["blocked", "running"],
            "key:k": ["ready"],
            "flag:slow flag:big": ["scheduled"],
            "flag:slow flag:none": [],
            "worker:worker-1": ["running"],
            f"id:{one['ready']},{one['failed']}": ["failed", "ready"],
            'fingerprint:"order #: declined"': ["failed", "retrying"],
            "payload.user.id:7": ["ready"],
            "payload.user.id:7 payload.user.name:Ann": ["ready"],
            "payload.user.id:8": [],
            "payload.user:7": [],
            "DECLINED": ["failed", "retrying"],
            "ann": ["ready"],
            "task:nothing": [],
        }
        for query, states in expected.items():
            assert await ids(found, q=query) == [one[state] for state in states], query
        assert await ids(found, task="mail", state="ready", sort="oldest") == [one["ready"], one["blocked"]]
        blocked = (await get(found, "/jobs", state="blocked"))["items"][0]
        assert blocked["blocked_by"] == "worker-1"


async def test_pages_follow_each_other_in_both_directions(database: str, db: asyncpg.Connection) -> None:
    every = [str((await add(db))["id"]) for _ in range(7)][::-1]
    async with api(database) as found:
        first = await get(found, "/jobs", limit=3)
        second = await get(found, "/jobs", limit=3, cursor=first["next"])
        third = await get(found, "/jobs", limit=3, cursor=second["next"])
        pages = [[job["id"] for job in page["items"]] for page in (first, second, third)]
        assert pages == [every[:3], every[3:6], every[6:]]
        assert (first["prev"], third["next"]) == (None, None)
        back = await get(found, "/jobs", limit=3, cursor=third["prev"])
        assert [job["id"] for job in back["items"]] == every[3:6]
        start = await get(found, "/jobs", limit=3, cursor=back["prev"])
        assert [job["id"] for job in start["items"]] == every[:3]
        assert start["prev"] is None
        await add(db)  # does not shift the pages
        again = await get(found, "/jobs", limit=3, cursor=first["next"])
        assert [job["id"] for job in again["items"]] == every[3:6]
        assert first["count"] == {"value": 7, "exact": True, "at_least": False}


@pytest.mark.parametrize(
    "params",
    [
        {"cursor": "x"},
        {"cursor": "W10"},
        {"cursor": "é\0"},
        {"limit": "0"},
        {"limit": "201"},
        {"limit": "many"},
        {"limit": ""},
        {"state": "odd"},
        {"sort": "odd"},
        {"q": 'task:"open'},
        {"q": "task:"},
        {"q": "id:x"},
        {"q": "id:99999999999999999999"},
        {"q": "task:a task:b"},
        {"q": "x" * 2001},
        {"q": "failed:9h"},
        {"q": "a\0b"},
        {"task": "a", "q": "task:b"},
        {"unknown": "1"},
        {"task": "x" * 129},
    ],
    ids=str,
)
async def test_invalid_query_is_a_problem_document(database: str, params: dict[str, str]) -> None:
    async with api(database) as found:
        answer = await found.get(JOBS, params=params)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "invalid_request"
    assert answer.json()["detail"]


@pytest.mark.parametrize("job", ["0", "-1", "x", "9" * 30, "99", "%00", "1e3", "%EF%BC%91"])
async def test_unknown_id_is_not_found(database: str, job: str) -> None:
    async with api(database) as found:
        for path in (
            f"{JOBS}/{job}",
            f"{JOBS}/{job}/history",
            f"/api/v1/operations/{job}",
            f"/api/v1/tasks/{job}",
        ):
            answer = await found.get(path)
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path


async def test_payload_keeps_every_digit_and_ids_are_text(database: str) -> None:
    async with api(database) as found:
        added = await found.post(
            JOBS, content=json.dumps({"task": "t", "payload": {"n": BIG, "z": 1, "a": 1.10}})
        )
        assert added.status_code == 400  # no content type
        kind = {"Content-Type": "application/json"}
        text = json.dumps({"task": "t", "payload": {"n": BIG, "z": "é"}})
        added = await found.post(JOBS, content=text, headers=kind)
        assert added.status_code == 201, added.text
        assert isinstance(added.json()["id"], str)
        shown = await found.get(f"{JOBS}/{added.json()['id']}")
        assert str(BIG) in shown.text


HOSTILE = [
    r'{"a": "\u0000"}',
    r'{"a": "\ud800"}',
    r'{"a": "\udc00\ud800"}',
    r'{"a": "\ud83d\ude00"}',
    '{"a": 1e999}',
    '{"a": ' + "[" * 300 + "]" * 300 + "}",
    '{"a": 1, "a": 2}',
    '"text"',
    "[1]",
    "null",
    '{"<script>alert(1)</script>": "</script>"}',
]


async def test_hostile_payloads_and_texts_break_no_page(database: str, db: asyncpg.Connection) -> None:
    names = ["<script>", "'; drop table x", "%00", "a/b", "..", "\u202egnp", "😀" * 20, "a\nb"]
    for number, payload in enumerate(HOSTILE):
        name = names[number % len(names)]
        await db.execute(
            "select graphile_worker.add_job($1, $2::text::json, queue_name => $1, job_key => $3, "
            "flags => array[$1])",
            name,
            payload,
            f"{name}{number}",
        )
    await db.execute(
        "update graphile_worker._private_jobs set attempts = 1, last_error = E'\\n \\n<b>\\t' || id "
        "where id % 2 = 0"
    )
    await db.execute("update graphile_worker._private_jobs set run_at = 'infinity' where id = 3")
    await db.execute(
        "update graphile_worker._private_jobs set run_at = '-infinity', flags = '[1]' where id = 4"
    )
    async with api(database) as found:
        every = await ids(found)
        assert len(every) == len(HOSTILE)
        for path in [
            *(f"/jobs/{one}" for one in every),
            "/jobs",
            "/failures",
            "/queues",
            "/tasks",
            "/workers",
            "",
        ]:
            for prefix in ("/api/v1", ""):
                address = "/overview" if not path and prefix else path
                answer = await found.get(prefix + (address or "/"), headers={"Accept": "text/html"})
                assert answer.status_code == 200, (path, answer.text[-500:])
                assert "<script>alert" not in answer.text or "json" in answer.headers["content-type"]
        for name in names:
            query = parse_filter("").replace(task=name)
            assert await ids(found, q=format_filter(query))
            assert (await found.get(JOBS, params={"q": f'payload.a:"{name.strip()}"'})).status_code in {
                200,
                400,
            }
        assert len(await ids(found, q="payload.a:😀")) == 1


async def test_job_has_its_error_history_and_earlier_runs(database: str) -> None:
    app = App(dsn=database, history="all")

    @app.task(max_attempts=2)
    async def charge(order: int) -> str:
        if order == 8:
            raise Fail(f"order {order} has no card")
        return "paid"

    done = await charge.using(job_key="o").enqueue(order=7)
    await app.run_once()
    failed = await charge.using(job_key="o").enqueue(order=8)
    await app.run_once()
    async with api(app) as found:
        shown = await get(found, f"/jobs/{failed.id}")
        assert shown["state"] == "failed"
        assert shown["error"] == "order 8 has no card"
        assert shown["fingerprint"] == "order # has no card"
        assert [one["outcome"] for one in shown["history"]] == ["failed"]
        assert shown["earlier_ids"] == [str(done.id)]
        gone = await get(found, f"/jobs/{done.id}")
        assert (gone["exists"], gone["state"]) == (False, "completed")
        assert await get(found, f"/jobs/{done.id}/history") == gone["history"]
        [group] = (await get(found, "/failures", window="1h"))["groups"]
        assert (group["task"], group["jobs"], group["windows"]["1h"]) == ("charge", 1, 1)
        assert await ids(found, q="failed:1h") == [str(failed.id)]
        assert (await get(found, "/failures", task="other"))["groups"] == []
        overview = await get(found, "/overview")
        assert overview["failures"][0]["id"] == str(failed.id)
        assert overview["counts"]["failed"] == 1


async def test_workers_tasks_queues_and_scaling(database: str, db: asyncpg.Connection) -> None:
    one = await in_each_state(db)
    await add(db, "mail", queue_name="free")
    await add(db, "mail", queue_name="free")
    async with api(database) as found:
        [worker] = (await get(found, "/workers"))["items"]
        assert (worker["id"], worker["status"], worker["jobs"], worker["queues"]) == (
            "worker-1",
            "unknown",
            1,
            1,
        )
        assert worker["running"][0]["id"] == one["running"]
        tasks = {task["task"]: task for task in (await get(found, "/tasks"))["items"]}
        others = {"ready": 0, "scheduled": 0, "blocked": 0}
        assert tasks["charge"]["counts"] == {**others, "retrying": 1, "running": 1, "failed": 1}
        assert (await get(found, "/tasks/charge"))["row"] == tasks["charge"]
        queues = (await get(found, "/queues"))["items"]
        assert [(queue["queue"], queue["jobs"], queue["ready"]) for queue in queues] == [
            ("q one", 2, 1),
            ("free", 2, 2),
        ]
        assert [queue["queue"] for queue in (await get(found, "/queues", search="FRE"))["items"]] == ["free"]
        assert (await get(found, "/queues", search="%"))["items"] == []
        scaling = await get(found, "/scaling")
        # ready: ready, blocked and two of the free queue, of which one can run.
        assert (scaling["ready"], scaling["blocked"], scaling["claimable"], scaling["desired"]) == (
            4,
            1,
            2,
            3,
        )


async def test_recurring_tasks_are_described_and_run_now(database: str, db: asyncpg.Connection) -> None:
    app = App(dsn=database)

    @app.cron("0 4 * * *", identifier="at night/é", payload={"copies": 2})
    @app.task
    async def report(copies: int) -> None: ...

    await db.execute("insert into graphile_worker._private_known_crontabs values ('of node', now(), now())")
    async with api(app) as found:
        ours, node = (await get(found, "/cron"))["items"]
        assert (ours["id"], ours["english"], ours["can_run"]) == ("at night/é", "at 04:00 every day", True)
        assert len(ours["next_runs"]) == 3
        assert (node["id"], node["task"], node["can_run"]) == ("of node", None, False)
        added = await found.post("/api/v1/cron/at night/é/run")
        assert added.status_code == 201
        payload = (await get(found, f"/jobs/{added.json()['id']}"))["payload"]
        assert payload["copies"] == 2
        assert (await found.post("/api/v1/cron/of node/run")).status_code == 404


async def test_series_of_statistics_and_of_depths(database: str) -> None:
    async with api(database) as found:
        done = await get(found, "/series", metric="done", since=600)
        assert (done["step"], done["source"], len(done["points"])) == (60, "python", 11)
        assert (await get(found, "/series", metric="ready"))["source"] == "table"
        assert len((await get(found, "/series", metric="run_p95", since=86400, step=3600))["points"]) in {
            24,
            25,
        }
        for params in (
            {"metric": "odd"},
            {},
            {"metric": "done", "since": "1"},
            {"metric": "done", "step": "61"},
        ):
            assert (await found.get("/api/v1/series", params=params)).status_code == 400, params


async def test_schema_that_only_node_has_used_has_every_page(database: str, db: asyncpg.Connection) -> None:
    await in_each_state(db)
    tables = await db.fetch(
        "select relname from pg_class where relnamespace = 'graphile_worker'::regnamespace "
        "and relkind in ('r', 'p') and not relispartition "
        "and (relname like '\\_private\\_python%' or relname = '_private_workers')"
    )
    for [name] in tables:
        await db.execute(f"drop table graphile_worker.{name} cascade")
    async with api(database) as found:
        for endpoint in ENDPOINTS:
            if (
                endpoint.method == "GET"
                and "{" not in endpoint.path
                and endpoint.path not in {"/events", "/doctor"}
            ):
                query = {"metric": "done"} if endpoint.path == "/series" else {}
                await get(found, endpoint.path, **query)
        [group] = (await get(found, "/failures"))["groups"]
        assert group["jobs"] == 2
        assert (await get(found, "/failures"))["timed"] is False
        for one in await ids(found):
            await get(found, f"/jobs/{one}")
        retried = await found.post(f"{JOBS}/actions", json={"action": "retry", "filter": {"state": "failed"}})
        assert retried.json()["changed"] == 1


async def test_role_that_may_only_read_sees_everything_and_changes_nothing(
    database: str, db: asyncpg.Connection
) -> None:
    one = await in_each_state(db)
    role = "reader_" + (await db.fetchval("select current_database()"))
    await db.execute(f"create role {role} login bypassrls")
    await db.execute(f"grant usage on schema graphile_worker to {role}")
    await db.execute(f"grant select on all tables in schema graphile_worker to {role}")
    try:
        async with api(database.replace("postgres@", f"{role}@")) as found:
            for path in (
                "/overview",
                "/jobs",
                f"/jobs/{one['failed']}",
                "/workers",
                "/queues",
                "/tasks",
                "/failures",
            ):
                await get(found, path)
            for body in (
                {"action": "retry", "ids": [one["failed"]]},
                {"action": "remove", "ids": [one["failed"]]},
            ):
                answer = await found.post(f"{JOBS}/actions", json=body)
                assert (answer.status_code, answer.json()["code"]) == (503, "database")
                assert "may not use" in answer.json()["detail"]
        await db.execute(f"alter role {role} nobypassrls")
        async with api(database.replace("postgres@", f"{role}@")) as found:
            answer = await found.get(JOBS)
            assert answer.status_code == 503
            assert "Row level security" in answer.json()["detail"]
    finally:
        await db.execute(f"drop owned by {role}; drop role {role}")


async def test_missing_schema_says_how_to_install_it(empty_database: str) -> None:
    async with api(empty_database) as found:
        answer = await found.get("/api/v1/overview")
        assert (answer.status_code, answer.json()["code"]) == (503, "schema")
        assert "migrate" in answer.json()["detail"]


async def test_several_schemas_are_apart(database: str, db: asyncpg.Connection) -> None:
    app = App(dsn=database)
    other = App(dsn=database, schema='odd "name"')
    await other.migrate()
    job = await other.add_job("hello")
    await other.close()
    await add(db, "main")
    await add(db, "main")
    async with api(app, schemas=['odd "name"']) as found:
        prefix = "/schemas/odd%20%22name%22"
        listed = (await found.get(f"{prefix}/api/v1/jobs")).json()
        assert [one["task"] for one in listed["items"]] == ["hello"]
        page = await found.get(f"{prefix}/jobs/{job.id}", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert f'href="{prefix}/failures"' in page.text
        missing = await found.get(f"{prefix}/jobs/999", headers={"Accept": "text/html"})
        assert missing.status_code == 404
        assert f'href="{prefix}/failures"' in missing.text
        assert "<small>odd &#34;name&#34;</small>" in missing.text
        assert len(await ids(found)) == 2
        assert (await found.get("/schemas/unknown/api/v1/jobs")).status_code == 404


async def test_recurring_task_of_the_app_cannot_be_run_in_another_schema(
    database: str, db: asyncpg.Connection
) -> None:
    app = App(dsn=database)

    @app.cron("0 4 * * *", identifier="nightly")
    @app.task
    async def report() -> None: ...

    other = App(dsn=database, schema="other")
    await other.migrate()
    await other.close()
    async with api(app, schemas=["other"]) as found:
        assert (await get(found, "/cron"))["items"][0]["can_run"]
        assert (await found.get("/schemas/other/api/v1/cron")).json()["items"] == []
        assert (await found.post("/schemas/other/api/v1/cron/nightly/run")).status_code == 404
    assert await db.fetchval("select count(*) from other._private_jobs") == 0
    assert await count(db) == 0


async def test_slow_query_is_cut_and_told(database: str, db: asyncpg.Connection) -> None:
    await add(db)
    locker = await asyncpg.connect(database)
    async with api(database, query_timeout=0.2) as found:
        await get(found, "/jobs")
        async with locker.transaction():
            await locker.execute("lock table graphile_worker._private_jobs in access exclusive mode")
            answer = await found.get(JOBS)
            assert answer.status_code == 503
            assert answer.json()["code"] in {"query_timeout", "database"}
        await get(found, "/jobs")
    await locker.close()


async def test_outage_is_a_problem_and_ends_by_itself(database: str, db: asyncpg.Connection) -> None:
    name = await db.fetchval("select current_database()")
    admin = await asyncpg.connect(database.replace(f"/{name}", "/postgres"))
    async with api(database) as found:
        await get(found, "/jobs")
        await admin.execute(f'alter database "{name}" allow_connections false')
        await admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = $1 and pid <> pg_backend_pid()",
            name,
        )
        for path in ("/api/v1/jobs", "/api/v1/overview"):
            answer = await found.get(path)
            assert (answer.status_code, answer.json()["code"]) == (503, "database")
        page = await found.get("/jobs", headers={"Accept": "text/html"})
        assert page.status_code == 503
        assert "unavailable" in page.text
        await admin.execute(f'alter database "{name}" allow_connections true')

        async def is_back() -> bool:
            return (await found.get(JOBS)).status_code == 200

        await until(is_back, "the dashboard works again")
    await admin.close()


async def test_stream_is_for_get_only_and_for_few_browsers_of_one_user(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphile_worker.web.broadcaster.MAX_VIEWERS_OF_USER", 1)
    dashboard = Dashboard(App(dsn=database), auth=lambda _: Access(user="ann"))
    broadcaster = dashboard.queue.broadcaster
    async with client(dashboard) as found:
        async with asyncio.timeout(20):
            assert (await found.head("/api/v1/events")).status_code == 405
        async with broadcaster.viewer("ann"):
            assert (await found.get("/api/v1/events")).status_code == 429
            assert broadcaster.accepts("bob")
        assert broadcaster.accepts("ann")
    await dashboard.close()
    await dashboard.app.close()


async def test_stream_tells_which_regions_changed(database: str, db: asyncpg.Connection) -> None:
    dashboard = Dashboard(App(dsn=database))
    async with dashboard.queue.broadcaster.viewer() as viewer:
        stream = viewer.changes()
        assert await anext(stream) == "retry: 3000\n\n"

        async def next_change() -> list[str]:
            while True:
                text = await anext(stream)
                if text.startswith("event: changed\n"):
                    names: list[str] = json.loads(text.partition("data: ")[2])
                    return names

        dashboard.queue.broadcaster.tell("operations")
        async with asyncio.timeout(20):
            assert "operations" in await next_change()
            await add(db)
            while "jobs" not in await next_change():
                pass
        await stream.aclose()
    await dashboard.close()
    await dashboard.app.close()


async def test_openapi_describes_every_endpoint() -> None:
    document = describe(ENDPOINTS, "/ops")
    assert document["openapi"] == "3.1.0"
    assert len([1 for path in document["paths"].values() for _ in path]) == len(ENDPOINTS)
    text = json.dumps(document)
    assert "#/components/schemas/JobPage" in text
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/api/v1/jobs", "PUT", 405),
        ("/api/v1/nothing", "GET", 404),
        ("/jobs", "DELETE", 405),
        ("/static/../models.py", "GET", 404),
        ("/static/%2e%2e/models.py", "GET", 404),
    ],
)
async def test_odd_requests_are_refused(database: str, path: str, method: str, status: int) -> None:
    async with api(database) as found:
        assert (await found.request(method, path)).status_code == status


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"task": 3}', '{"task": "x", "odd": 1}', '{"task": ""}', "\ud800"]
)
async def test_invalid_body_is_a_problem_document(database: str, body: str) -> None:
    async with api(database) as found:
        content = body.encode(errors="surrogatepass")
        answer = await found.post(JOBS, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


async def test_too_large_body_is_refused(database: str) -> None:
    async with api(App(dsn=database, max_payload_size=1000)) as found:
        kind = {"Content-Type": "application/json"}
        answer = await found.post(f"{JOBS}/actions", content=b" " * 1_100_000, headers=kind)
        assert answer.status_code == 413
        body = json.dumps({"task": "x", "payload": {"a": "x" * 2000}})
        answer = await found.post(JOBS, content=body, headers=kind)
        assert answer.status_code == 400
        assert "1,000" in answer.json()["detail"]


async def test_two_dashboards_in_one_program(database: str, db: asyncpg.Connection) -> None:
    await add(db)
    app = App(dsn=database)
    first, second = Dashboard(app), Dashboard(app, read_only=True)
    async with client(first) as one, client(second) as other:
        assert len(await ids(one)) == len(await ids(other)) == 1
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    "text",
    [
        'task:a payload."x.y".z:"1 2" foo',
        "http://x.y/z",
        '"task:a"',
        "id:1 id:2",
        'payload.a:1 payload.b:"x\\"y"',
        "flag:a flag:b",
        "",
        'a"b',
        'error:"a b" \\"',
        "failed:3d",
    ],
)
def test_filter_is_written_as_it_was_read(text: str) -> None:
    read = parse_filter(text)
    assert parse_filter(format_filter(read)) == read


def test_filter_with_a_mistake_is_refused() -> None:
    for text in ("task:", 'task:"', "id:1.5", "worker:a worker:b"):
        with pytest.raises(FilterError):
            parse_filter(text)


@pytest.mark.parametrize(
    ("pattern", "english"),
    [
        ("*/5 * * * *", "every 5 minutes"),
        ("0 * * * *", "every hour"),
        ("1 * * * *", "at 1 minute past every hour"),
        ("0 8,20 * * 1-5", "at 08:00 and 20:00 Monday to Friday"),
        ("0 0 1 1 *", "at 00:00 on the 1st of January"),
        ("0 0 13 * 5", "at 00:00 on the 13th of every month, and on Friday"),
        ("@weekly", "at 00:00 on Sunday"),
        ("odd", None),
    ],
)
def test_patterns_in_english(pattern: str, english: str | None) -> None:
    assert (in_english(pattern) or "").replace("on Monday to", "Monday to") == (english or "")
