"""A job that one side added is the same to the other, in every field; and runs there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from graphile_worker import Drained, Job, JobContext, JobSpec, run_once
from support.workers import Heard, running

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
"""Of JSON's values all but null, for which each side stores an empty object."""


def instant(text: str | None) -> datetime | None:
    """Node has milliseconds."""
    return datetime.fromisoformat(text) if text else None


def in_milliseconds(moment: datetime | None) -> datetime | None:
    return moment and moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def assert_the_same(theirs: dict[str, Any], ours: Job) -> None:
    """Every field that Node has of a job."""
    moments = ("run_at", "created_at", "updated_at", "locked_at")
    plain = ("payload", "priority", "attempts", "max_attempts", "last_error", "key", "locked_by", "revision")
    assert int(theirs["id"]) == ours.id
    assert theirs["task_identifier"] == ours.task_identifier
    assert {name: theirs[name] for name in plain} == {name: getattr(ours, name) for name in plain}
    assert {name: instant(theirs[name]) for name in moments} == {
        name: in_milliseconds(getattr(ours, name)) for name in moments
    }
    assert theirs["flags"] == (dict.fromkeys(ours.flags, True) or None)
    assert (theirs["task_id"], theirs["job_queue_id"]) == (ours.task_id, ours.job_queue_id)


def full(side: str) -> dict[str, Any]:
    """Every option that a job can have."""
    return {
        "queue_name": f"queue of {side}",
        "run_at": DUE,
        "max_attempts": 7,
        "job_key": f"key of {side}",
        "priority": -3,
        "flags": list(FLAGS),
    }


def assert_full(job: Job, side: str) -> None:
    assert (job.queue_name, job.key, job.run_at) == (f"queue of {side}", f"key of {side}", DUE)
    assert (job.priority, job.max_attempts, job.flags, job.payload) == (-3, 7, FLAGS, PAYLOAD)


def assert_bare(job: Job) -> None:
    assert (job.queue_name, job.max_attempts, job.key, job.priority) == (None, 25, None, 0)
    assert (job.flags, job.payload, job.revision, job.last_error) == (frozenset(), {"n": 2}, 0, None)


async def test_every_field_of_a_job_that_runs_in_node_is_the_same_here(shared: Shared) -> None:
    await shared.db.execute(
        f"alter table graphile_worker._private_jobs alter column id restart with {BEYOND_DOUBLES}"
    )
    added = {side: await shared.side(side).add("hold", PAYLOAD, **full(side)) for side in SIDES}
    bare = [await shared.side(side).add("hold", {"n": 2}) for side in SIDES]

    pool = await shared.node.start("hold", concurrency=6)
    await shared.node.until("begun", 6)
    there = {int(one["job"]["id"]): one for one in shared.node.told if one["what"] == "begun"}
    here = {job.id: job for job in await shared.utils.list_jobs(locked_by=pool)}

    assert set(there) == set(here) == {*added.values(), *bare}
    assert min(here) >= BEYOND_DOUBLES
    for job in here.values():
        assert (job.attempts, job.state) == (1, "running")
        assert_the_same(there[job.id]["job"], job)
        assert there[job.id]["payload"] == job.payload
    for side, job_id in added.items():
        assert_full(here[job_id], side)
    for job_id in bare:
        assert_bare(here[job_id])


async def test_every_field_of_a_job_that_runs_here_is_the_same_in_node(shared: Shared) -> None:
    added = {side: await shared.side(side).add("look", PAYLOAD, **full(side)) for side in SIDES}
    bare = [await shared.side(side).add("look", {"n": 2}) for side in SIDES]
    here: dict[int, Job] = {}

    async def look(payload: Any, ctx: JobContext) -> None:
        here[ctx.job.id] = ctx.job
        assert payload == ctx.job.payload
        [row] = await shared.node.ask("query", ROW, [str(ctx.job.id)])
        assert_the_same(row, ctx.job)

    assert await run_once({"look": look}, shared.dsn, handle_signals=False) == Drained(6, 0)
    for side, job_id in added.items():
        assert_full(here[job_id], side)
    for job_id in bare:
        assert_bare(here[job_id])


async def test_what_node_returns_of_a_job_it_added_is_what_python_reads(shared: Shared) -> None:
    options = {"queueName": "q", "runAt": DUE.isoformat(), "jobKey": "k", "priority": -3, "flags": ["f"]}
    added = await shared.node.utils("addJob", "task", PAYLOAD, options)
    read = await shared.utils.get_job(key="k")
    assert read is not None
    assert_the_same(added, read)
    assert (read.queue_name, read.run_at, read.state) == ("q", DUE, "ready")


async def test_what_one_side_adds_in_bulk_the_other_runs(shared: Shared) -> None:
    specs = [{"identifier": "see", "payload": n, "queueName": f"q{n % 3}"} for n in range(30)]
    await shared.node.utils("addJobs", specs)
    await shared.python.once("see")
    assert sorted(payload for _, payload in shared.python.ran) == list(range(30))

    await shared.utils.add_jobs(JobSpec("see", n, priority=n % 5) for n in range(30))
    await shared.node.start("see", concurrency=4)
    await shared.node.until("seen", 30)
    assert sorted(one["payload"] for one in shared.node.told if one["what"] == "seen") == list(range(30))


async def test_payloads_of_all_kinds_arrive_as_they_were(newest: Shared) -> None:
    for _ in range(2):
        for side in SIDES:
            for payload in PAYLOADS:
                await newest.side(side).add("see", payload)
        if not newest.python.ran:
            await newest.python.once("see")
    await newest.node.start("see", concurrency=4)
    await newest.node.until("job:success", 3 * len(PAYLOADS))

    here = sorted(repr(payload) for _, payload in newest.python.ran)
    there = sorted(repr(one["payload"]) for one in newest.node.told if one["what"] == "seen")
    assert here == there == sorted(map(repr, PAYLOADS * 3))


async def test_no_payload_is_an_empty_object_for_all(newest: Shared) -> None:
    for side in ("python", "node"):
        await newest.side(side).add("see")
    await newest.db.execute("select graphile_worker.add_job('see')")
    await newest.python.once("see")
    assert newest.python.ran == [("see", {})] * 3


async def test_each_hears_what_the_other_adds(beside: Shared) -> None:
    """No poll would come within the test."""
    heard, seen = Heard(), list[object]()
    await beside.node.start("see", pollInterval=3_600_000)
    async with running({"see here": seen.append}, beside.dsn, heard=heard, poll_interval=3600):
        for number in range(3):
            for adder in (beside.python, beside.sql):
                job_id = await adder.add("see", number)
                await beside.node.until("job:success", id=job_id)
            await beside.node.add("see here", number)
            await heard.until("job:complete", number + 1)
    assert seen == [0, 1, 2]
