"""What the dashboard changes: one job, a page of jobs, and very many in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import asyncpg
import httpx
import pytest

from graphile_worker import App, WorkerUtils
from graphile_worker._client.bulk import BatchResult, BulkOperations
from graphile_worker.events.dashboard import DashboardAction
from graphile_worker.testing import Databases
from graphile_worker.web import Access, Dashboard
from graphile_worker.web.data import QueueData
from graphile_worker.web.errors import QueryTimeoutError
from support.jobs import add, count, existing, get, lock
from support.waiting import until
from support.web_api import api, client

ACTIONS = "/api/v1/jobs/actions"
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def act(found: httpx.AsyncClient, status: int = 200, **body: Any) -> Any:
    answer = await found.post(ACTIONS, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def add_many(db: asyncpg.Connection, number: int, *, failed: bool = True) -> None:
    await db.execute(
        "insert into graphile_worker._private_tasks (identifier) values ('charge') on conflict do nothing"
    )
    await db.execute(
        "insert into graphile_worker._private_jobs (task_id, attempts, max_attempts, last_error) "
        "select id, $2, 3, 'order ' || n || ': declined' "
        "from graphile_worker._private_tasks, generate_series(1, $1) as n where identifier = 'charge'",
        number,
        3 if failed else 0,
    )


async def test_each_action_changes_the_job_as_it_says(database: str, db: asyncpg.Connection) -> None:
    table = "graphile_worker._private_jobs"

    async def job(**columns: Any) -> int:
        row = await add(db, "t")
        for name, value in columns.items():
            await db.execute(f"update {table} set {name} = {value} where id = $1", row["id"])
        found: int = row["id"]
        return found

    async with api(database) as found:
        failed = await job(attempts="max_attempts", last_error="'x'")
        await act(found, action="retry", ids=[str(failed)])
        assert (await existing(db, failed))["attempts"] == 0

        later = await job(run_at="now() + interval '1 day'", attempts="2")
        await act(found, action="run_now", ids=[str(later)])
        row = await existing(db, later)
        assert row["run_at"] <= await db.fetchval("select now()")
        assert row["attempts"] == 2

        await act(
            found,
            action="reschedule",
            ids=[str(later)],
            run_at="2031-01-02T03:04:05+01:00",
            priority=-7,
            max_attempts=9,
        )
        row = await existing(db, later)
        assert (row["run_at"].isoformat(), row["priority"], row["max_attempts"]) == (
            "2031-01-02T02:04:05+00:00",
            -7,
            9,
        )

        await act(found, action="fail", ids=[str(later)], reason="not needed")
        row = await existing(db, later)
        assert (row["attempts"], row["last_error"]) == (9, "not needed")

        cancelled = await job()
        await act(found, action="cancel", ids=[str(cancelled)], reason="stop")
        assert (await existing(db, cancelled))["last_error"] == "Cancelled: stop"

        for action in ("complete", "remove"):
            gone = await job()
            assert (await act(found, action=action, ids=[str(gone)]))["changed"] == 1
            assert await get(db, gone) is None


async def test_running_jobs_are_only_asked_to_stop(database: str, db: asyncpg.Connection) -> None:
    job = await add(db)
    await lock(db, job["id"])
    async with api(database) as found:
        for action in ("remove", "complete", "fail", "retry", "run_now"):
            result = await act(found, action=action, ids=[str(job["id"])])
            assert (result["changed"], result["unchanged"]) == (0, 1), action
        result = await act(found, action="cancel", ids=[str(job["id"])])
        assert (result["changed"], result["requested"]) == (1, 1)


async def test_preview_counts_what_would_change_and_changes_nothing(
    database: str, db: asyncpg.Connection
) -> None:
    await add_many(db, 30)
    running = await add(db, "charge")
    await lock(db, running["id"])
    async with api(database) as found:
        preview = await act(found, action="retry", filter={"q": "task:charge"}, dry_run=True)
        assert preview["count"] == {"value": 30, "exact": True, "at_least": False}
        assert len(preview["sample"]) == 10
        some = [str(running["id"]), preview["sample"][0]["id"], "999999"]
        preview = await act(found, action="retry", ids=some, dry_run=True)
        assert (preview["count"]["value"], preview["skipped"]) == (1, 2)
    assert await db.fetchval("select count(*) from graphile_worker._private_jobs where attempts = 3") == 30


async def test_action_on_another_number_of_jobs_than_expected_is_refused(
    database: str, db: asyncpg.Connection
) -> None:
    await add_many(db, 5)
    async with api(database) as found:
        problem = await act(found, 409, action="remove", filter={"state": "failed"}, expected_count=4)
        assert problem["code"] == "count_changed"
        assert await count(db) == 5
        assert (await act(found, action="remove", filter={"state": "failed"}, expected_count=5))[
            "changed"
        ] == 5
    assert await count(db) == 0


async def fail_more(db: asyncpg.Connection) -> None:
    """Let all jobs fail that have not."""
    await db.execute(
        "update graphile_worker._private_jobs set attempts = max_attempts, last_error = 'late' "
        "where attempts = 0"
    )


@pytest.mark.parametrize("expected", [3, 1200])
async def test_jobs_that_fail_after_the_count_do_not_raise_the_number_of_changed_jobs(
    database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    await add_many(db, 600, failed=False)
    await add_many(db, expected)
    change = BulkOperations.change

    def late(self: BulkOperations, *arguments: Any, **options: Any) -> AsyncGenerator[BatchResult]:
        async def batches() -> AsyncGenerator[BatchResult]:
            await fail_more(db)
            async for batch in change(self, *arguments, **options):
                yield batch

        return batches()

    monkeypatch.setattr(BulkOperations, "change", late)
    async with api(database) as found:
        body = {"action": "remove", "filter": {"state": "failed"}, "expected_count": expected}
        answer = await found.post(ACTIONS, json=body)
        assert answer.is_success, answer.text

        async def is_done() -> bool:
            return all(one["status"] == "done" for one in (await found.get("/api/v1/operations")).json())

        await until(is_done, "the jobs are removed")
    assert await count(db) == 600


async def test_action_with_an_expected_count_is_refused_if_counting_takes_too_long(
    database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_many(db, 1001)

    async def too_long(*_: Any) -> int:
        raise QueryTimeoutError("The query was stopped.")

    monkeypatch.setattr(QueueData, "count_changeable", too_long)
    async with api(database) as found:
        body = {"action": "remove", "filter": {"state": "failed"}, "expected_count": 3}
        assert (await act(found, 409, **body))["code"] == "count_unknown"
        form = {"action": "remove", "all": "1", "state": "failed", "expected_count": "3"}
        page = await found.post("/jobs/actions", data=form, headers={"Accept": "text/html"})
        assert page.status_code == 409
        assert "could not be counted in time" in page.text
    assert await count(db) == 1001


async def test_expected_count_must_be_a_whole_number(database: str, db: asyncpg.Connection) -> None:
    job = await add(db)
    async with api(database) as found:
        for number in ("9" * 5000, "many"):
            form = {"action": "remove", "id": str(job["id"]), "expected_count": number}
            page = await found.post("/jobs/actions", data=form, headers={"Accept": "text/html"})
            assert page.status_code == 400
            assert "whole number" in page.text
    assert await count(db) == 1


async def test_five_thousand_jobs_are_retried_in_the_background(
    database: str, db: asyncpg.Connection
) -> None:
    await add_many(db, 5000)
    other = await add(db, "other")
    app, told = App(dsn=database), list[DashboardAction]()
    app.events.on(DashboardAction, told.append)
    async with api(app) as found:
        answer = await found.post(
            ACTIONS,
            json={
                "action": "retry",
                "filter": {"q": "task:charge", "state": "failed"},
                "expected_count": 5000,
            },
        )
        assert answer.status_code == 202
        place = answer.headers["location"]

        async def is_done() -> bool:
            return bool((await found.get(place)).json()["status"] == "done")

        await until(is_done, "all jobs are retried")
        operation = (await found.get(place)).json()
        assert (operation["changed"], operation["total"]["value"], operation["filter"]) == (
            5000,
            5000,
            "failed: task:charge",
        )
        assert (await found.get("/api/v1/operations")).json() == [operation]
        assert (await found.get("/api/v1/overview")).json()["counts"]["ready"] == 5001
    assert (await existing(db, other["id"]))["updated_at"] == other["updated_at"]
    assert [(one.user, one.action, one.target, one.count) for one in told] == [
        ("local", "retry", "failed: task:charge", 5000)
    ]


async def test_viewer_without_payloads_does_not_see_what_operations_search_in_them(
    database: str, db: asyncpg.Connection
) -> None:
    await add_many(db, 1001)
    permissions: set[str] = {"view", "view_payload", "remove"}

    def auth(_: Any) -> Access:
        return Access(user="ann", permissions=frozenset(permissions))  # type: ignore[arg-type]

    async with api(database, auth=auth) as found:
        answer = await act(found, 202, action="remove", filter={"q": "declined"})
        place = f"/api/v1/operations/{answer['operation']}"
        pages = ("/operations", f"/operations/{answer['operation']}")

        async def shown() -> list[str]:
            whole = [(await found.get(place)).text, (await found.get("/api/v1/operations")).text]
            return [
                *whole,
                *[(await found.get(page, headers={"Accept": "text/html"})).text for page in pages],
            ]

        assert all("declined" in text for text in await shown())
        permissions.remove("view_payload")
        for text in await shown():
            assert "declined" not in text
            assert "a filter that you may not see" in text
        stopped = await found.post(f"{place}/stop")
        assert stopped.json()["filter"] == "a filter that you may not see"


async def test_log_of_a_change_stays_on_its_line(
    database: str, db: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    job = await add(db)
    caplog.set_level("INFO", "graphile_worker")
    async with api(database, auth=lambda _: Access(user="ann\nroot did remove")) as found:
        await act(found, action="remove", ids=[str(job["id"])])
        await found.post("/api/v1/jobs", json={"task": "a\nb"})
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Dashboard:")]
    assert len(told) == 2
    assert not any("\n" in one for one in told)


async def test_operation_stops_after_its_batch(database: str, db: asyncpg.Connection) -> None:
    await add_many(db, 4000)
    dashboard = Dashboard(App(dsn=database))
    async with client(dashboard, headers=SAME_ORIGIN) as found:
        answer = await found.post(ACTIONS, json={"action": "remove", "filter": {"state": "failed"}})
        name = answer.json()["operation"]
        assert dashboard.operations.stop(name, Access()) is not None  # at once, before the first batch ends
        assert (await found.post(f"/api/v1/operations/{name}/stop")).status_code == 200

        async def has_ended() -> bool:
            return bool((await found.get(f"/api/v1/operations/{name}")).json()["status"] != "running")

        await until(has_ended, "the operation ends")
        ended = (await found.get(f"/api/v1/operations/{name}")).json()
        assert ended["status"] == "stopped"
        assert await count(db) == 4000 - ended["changed"] > 0
    await dashboard.close()


async def test_two_people_who_retry_the_same_jobs_do_not_fight(database: str, db: asyncpg.Connection) -> None:
    await add_many(db, 300)
    async with api(database) as ann, api(database) as bob:
        results = await asyncio.gather(
            *(act(one, action="retry", filter={"state": "failed"}) for one in (ann, bob, ann, bob))
        )
    assert sum(result["changed"] for result in results) == 300


@pytest.mark.parametrize(
    "body",
    [
        {"action": "explode", "ids": ["1"]},
        {"action": "retry"},
        {"action": "retry", "ids": ["1"], "filter": {}},
        {"action": "retry", "ids": []},
        {"action": "retry", "ids": [1]},
        {"action": "retry", "ids": ["x"]},
        {"action": "retry", "filter": {"q": "id:x"}},
        {"action": "reschedule", "ids": ["1"]},
        {"action": "reschedule", "ids": ["1"], "run_at": "2030-01-01T00:00:00"},
        {"action": "reschedule", "ids": ["1"], "priority": 40000},
        {"action": "reschedule", "ids": ["1"], "max_attempts": 0},
        {"action": "fail", "ids": ["1"], "reason": "a\0"},
    ],
    ids=str,
)
async def test_invalid_action_is_refused(database: str, body: dict[str, Any]) -> None:
    async with api(database) as found:
        assert (await act(found, 400, **body))["code"] == "invalid_request"


async def test_job_of_the_apps_task_gets_its_options_and_its_check(database: str) -> None:
    app = App(dsn=database)

    @app.task(queue_name="cards", max_attempts=4)
    async def charge(order: int) -> None: ...

    async with api(app) as found:
        added = (await found.post("/api/v1/jobs", json={"task": "charge", "payload": {"order": 1}})).json()
        assert (added["queue"], added["max_attempts"]) == ("cards", 4)
        refused = await found.post("/api/v1/jobs", json={"task": "charge", "payload": {"ordre": 1}})
        assert refused.status_code == 400
        assert "ordre" in refused.json()["detail"]
        body = {
            "task": "of_node",
            "payload": [1],
            "run_at": "2031-01-01T00:00:00Z",
            "job_key": "k",
            "flags": ["a"],
        }
        added = (await found.post("/api/v1/jobs", json=body)).json()
        assert (added["state"], added["key"], added["flags"]) == ("scheduled", "k", ["a"])


async def test_maintenance_unlocks_dead_workers_only_and_removes_unused_queues(
    database: str, db: asyncpg.Connection
) -> None:
    job = await add(db, queue_name="q")
    await lock(db, job["id"], by="node-1")
    await db.execute(
        "insert into graphile_worker._private_workers (id, last_heartbeat_at) values ('rust-1', now())"
    )
    await db.execute("insert into graphile_worker._private_job_queues (queue_name) values ('unused')")
    async with api(database) as found:

        async def maintain(what: str, status: int = 200, **body: Any) -> Any:
            answer = await found.post(f"/api/v1/maintenance/{what}", json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        assert await maintain("unlock", dry_run=True, worker_ids=["node-1"]) == {"jobs": 1, "queues": 1}
        assert (await existing(db, job["id"]))["locked_by"] == "node-1"
        await maintain("unlock", worker_ids=["node-1"])
        assert (await existing(db, job["id"]))["locked_by"] is None
        assert "alive" in (await maintain("unlock", 403, worker_ids=["rust-1"]))["detail"]
        await maintain("unlock", 400)
        assert await maintain("cleanup", dry_run=True) == {"queues": 1}
        assert await maintain("cleanup") == {"queues": 1}
        assert await maintain("sweep", dry_run=True) == {"workers": []}
        await maintain("explode", 404)


async def test_dashboard_that_is_closed_ends_its_operations_and_connections(
    database: str, db: asyncpg.Connection
) -> None:
    await add_many(db, 3000)
    async with api(database) as found:
        await act(found, 202, action="retry", filter={"state": "failed"})
    name = (
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )

    async def is_alone() -> bool:
        return bool(await db.fetchval(name) == 0)

    await until(is_alone, "the connections are closed")


async def test_changes_that_wait_for_a_lock_end_and_pages_stay_readable(
    database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphile_worker.web.dashboard._LOCK_SECONDS", 0.2)
    jobs = [await add(db) for _ in range(4)]
    await lock(db, (await add(db))["id"], by="node-1")
    removals: list[dict[str, Any]] = [{"action": "remove", "ids": [str(job["id"])]} for job in jobs]
    async with api(database, query_timeout=60) as found:
        async with db.transaction():
            # Reading is possible, writing is not.
            await db.execute("lock table graphile_worker._private_jobs in share mode")
            changes = [asyncio.create_task(found.post(ACTIONS, json=one)) for one in removals]
            changes += [
                asyncio.create_task(found.post("/api/v1/jobs", json={"task": "hello"})),
                asyncio.create_task(
                    found.post("/api/v1/maintenance/unlock", json={"worker_ids": ["node-1"]})
                ),
            ]
            assert (await found.get("/jobs", headers={"Accept": "text/html"})).status_code == 200
            assert (await found.get("/api/v1/jobs")).status_code == 200
            answers = await asyncio.gather(*changes)
        for answer in answers:
            assert (answer.status_code, answer.json()["code"]) == (503, "query_timeout")
            assert "another transaction has a lock" in answer.json()["detail"]
        assert (await act(found, **removals[0]))["changed"] == 1


async def test_sweep_that_releases_nothing_is_stopped_if_it_takes_too_long(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerUtils, "sweep", endless)
    monkeypatch.setattr("graphile_worker.web.operations._MAX_DRY_SWEEP", 0.01)
    async with api(database) as found:
        answer = await found.post("/api/v1/maintenance/sweep", json={"dry_run": True})
        assert (answer.status_code, answer.json()["code"]) == (503, "query_timeout")


async def test_doctor_that_takes_too_long_is_stopped(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphile_worker.web.data._DOCTOR_SECONDS", 0.0)
    async with api(database) as found:
        answer = await found.get("/api/v1/doctor")
        assert (answer.status_code, answer.json()["code"]) == (503, "query_timeout")
