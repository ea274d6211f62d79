"""A job that one side adds has the same fields on the other side, and runs there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from graphile_worker import Job, JobContext, JobSpec, RunSummary, run_once
from support.workers import EventRecorder, running

if TYPE_CHECKING:
    from interop.conftest import Shared

BEYOND_DOUBLES = 2**53 + 1
DUE = datetime(2020, 2, 29, 12, 30, 15, 123000, tzinfo=UTC)
PAYLOAD: Any = {
    "text": 'Bobby "Tables" ünï 🐘 \\ \n',
    "numbers": [0, -1, 1.5, 1e-7, 2**53 - 1],
    "nothing": None,
    "nested": {"a": [[], {}, [{"b": True}]]},
    "_trace": {"traceparent": "00-1-2-01"},
}
FLAGS = frozenset({"f", "g"})
SIDES = ("python", "node", "sql")
ROW = """
    select job.*, task.identifier as task_identifier from graphile_worker._private_jobs as job
    join graphile_worker._private_tasks as task on task.id = job.task_id where job.id = $1"""
PAYLOADS = [PAYLOAD, {}, [], [1, {"a": 2}], "text", 7, -0.5, True, False]
"""All kinds of JSON values except null, for which each side stores an empty object."""


def instant(text: str | None) -> datetime | None:
    """Parse a time from Node, which has milliseconds."""
    return datetime.fromisoformat(text) if text else None


def in_milliseconds(moment: datetime | None) -> datetime | None:
    return moment and moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def assert_the_same(by_node: dict[str, Any], by_python: Job) -> None:
    """Compare every field that Node has."""
    moments = ("run_at", "created_at", "updated_at", "locked_at")
    plain = ("payload", "priority", "attempts", "max_attempts", "last_error", "key", "locked_by", "revision")
    assert int(by_node["id"]) == by_python.id
    assert by_node["task_identifier"] == by_python.task_identifier
    assert {name: by_node[name] for name in plain} == {name: getattr(by_python, name) for name in plain}
    assert {name: instant(by_node[name]) for name in moments} == {
        name: in_milliseconds(getattr(by_python, name)) for name in moments
    }
    assert by_node["flags"] == (dict.fromkeys(by_python.flags, True) or None)
    assert (by_node["task_id"], by_node["job_queue_id"]) == (by_python.task_id, by_python.job_queue_id)


def all_options(side: str) -> dict[str, Any]:
    """Return every option that a job can have."""
    return {
        "queue_name": f"queue of {side}",
        "run_at": DUE,
        "max_attempts": 7,
        "job_key": f"key of {side}",
        "priority": -3,
        "flags": list(FLAGS),
    }


def assert_all_options(job: Job, side: str) -> None:
    assert (job.queue_name, job.key, job.run_at) == (f"queue of {side}", f"key of {side}", DUE)
    assert (job.priority, job.max_attempts, job.flags, job.payload) == (-3, 7, FLAGS, PAYLOAD)


def assert_default_options(job: Job) -> None:
    assert (job.queue_name, job.max_attempts, job.key, job.priority) == (None, 25, None, 0)
    assert (job.flags, job.payload, job.revision, job.last_error) == (frozenset(), {"n": 2}, 0, None)


@pytest.mark.sample(2)
async def test_fields_of_a_job_running_in_node_are_the_same_in_python(shared: Shared) -> None:
    await shared.db.execute(
        f"alter table graphile_worker._private_jobs alter column id restart with {BEYOND_DOUBLES}"
    )
    added = {side: await shared.side(side).add("hold", PAYLOAD, **all_options(side)) for side in SIDES}
    bare = [await shared.side(side).add("hold", {"n": 2}) for side in SIDES]

    pool = await shared.node.start("hold", concurrency=6)
    await shared.node.until("started", 6)
    there = {
        int(message["job"]["id"]): message for message in shared.node.messages if message["what"] == "started"
    }
    here = {job.id: job for job in await shared.utils.list_jobs(locked_by=pool)}

    assert set(there) == set(here) == {*added.values(), *bare}
    assert min(here) >= BEYOND_DOUBLES
    for job in here.values():
        assert (job.attempts, job.state) == (1, "running")
        assert_the_same(there[job.id]["job"], job)
        assert there[job.id]["payload"] == job.payload
    for side, job_id in added.items():
        assert_all_options(here[job_id], side)
    for job_id in bare:
        assert_default_options(here[job_id])


@pytest.mark.sample(2)
async def test_fields_of_a_job_running_in_python_are_the_same_in_node(shared: Shared) -> None:
    added = {side: await shared.side(side).add("compare", PAYLOAD, **all_options(side)) for side in SIDES}
    bare = [await shared.side(side).add("compare", {"n": 2}) for side in SIDES]
    here: dict[int, Job] = {}

    async def compare(payload: Any, ctx: JobContext) -> None:
        here[ctx.job.id] = ctx.job
        assert payload == ctx.job.payload
        [row] = await shared.node.request("query", ROW, [str(ctx.job.id)])
        assert_the_same(row, ctx.job)

    assert await run_once({"compare": compare}, shared.dsn, handle_signals=False) == RunSummary(6, 0)
    for side, job_id in added.items():
        assert_all_options(here[job_id], side)
    for job_id in bare:
        assert_default_options(here[job_id])


async def test_job_returned_by_add_job_in_node_is_the_job_that_python_reads(shared: Shared) -> None:
    options = {"queueName": "q", "runAt": DUE.isoformat(), "jobKey": "k", "priority": -3, "flags": ["f"]}
    added = await shared.node.utils("addJob", "task", PAYLOAD, options)
    read = await shared.utils.get_job(key="k")
    assert read is not None
    assert_the_same(added, read)
    assert (read.queue_name, read.run_at, read.state) == ("q", DUE, "ready")


@pytest.mark.sample(2)
async def test_jobs_added_in_bulk_run_on_the_other_side(shared: Shared) -> None:
    specs = [{"identifier": "see", "payload": n, "queueName": f"q{n % 3}"} for n in range(30)]
    await shared.node.utils("addJobs", specs)
    await shared.python.once("see")
    assert sorted(payload for _, payload in shared.python.ran) == list(range(30))

    await shared.utils.add_jobs(JobSpec("see", n, priority=n % 5) for n in range(30))
    await shared.node.start("see", concurrency=4)
    await shared.node.until("seen", 30)
    assert sorted(sent["payload"] for sent in shared.node.messages if sent["what"] == "seen") == list(
        range(30)
    )


async def test_payloads_of_all_kinds_arrive_unchanged(newest: Shared) -> None:
    for _ in range(2):
        for side in SIDES:
            for payload in PAYLOADS:
                await newest.side(side).add("see", payload)
        if not newest.python.ran:
            await newest.python.once("see")
    await newest.node.start("see", concurrency=4)
    await newest.node.until("job:success", 3 * len(PAYLOADS))

    here = sorted(repr(payload) for _, payload in newest.python.ran)
    there = sorted(repr(sent["payload"]) for sent in newest.node.messages if sent["what"] == "seen")
    assert here == there == sorted(map(repr, PAYLOADS * 3))


async def test_missing_payload_is_an_empty_object_on_all_sides(newest: Shared) -> None:
    for side in ("python", "node"):
        await newest.side(side).add("see")
    await newest.db.execute("select graphile_worker.add_job('see')")
    await newest.python.once("see")
    assert newest.python.ran == [("see", {})] * 3


@pytest.mark.sample(1)
async def test_each_side_is_notified_of_jobs_added_by_the_other(mixed: Shared) -> None:
    """Neither side polls within the test."""
    recorder, seen = EventRecorder(), list[object]()
    await mixed.node.start("see", pollInterval=3_600_000)
    async with running({"see here": seen.append}, mixed.dsn, recorder=recorder, poll_interval=3600):
        for number in range(3):
            for adder in (mixed.python, mixed.sql):
                job_id = await adder.add("see", number)
                await mixed.node.until("job:success", id=job_id)
            await mixed.node.add("see here", number)
            await recorder.until("job:complete", number + 1)
    assert seen == [0, 1, 2]
