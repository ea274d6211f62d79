"""Job keys have the same meaning in Python, Node and SQL, for every side that adds or runs the job."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from support.jobs import existing, fetch_one, get
from support.waiting import until

if TYPE_CHECKING:
    import asyncpg

    from interop.conftest import Shared

STATES = ("waiting", "retrying", "failed", "running")
MODES = ("replace", "preserve_run_at", "unsafe_dedupe")
TASKS = ("fail", "hold")
SOON, LATER = datetime(2099, 1, 1, tzinfo=UTC), datetime(2099, 2, 2, tzinfo=UTC)
POSTPONE = """
    update graphile_worker._private_jobs set run_at = $2
    where id = $1 and locked_at is null and last_error = 'old' returning true"""
NEW = {"priority": 5, "max_attempts": 9, "queue_name": "new", "flags": ["new"], "run_at": LATER}


class Case(NamedTuple):
    """A job in a state reached on one side, and the way in which another side adds its key again."""

    state: str
    mode: str
    adder: str

    @property
    def key(self) -> str:
        return ", ".join(self)

    @property
    def adds_new_job(self) -> bool:
        return self.mode != "unsafe_dedupe" and self.state in {"failed", "running"}


async def add_for_state(holder: Any, case: Case) -> int:
    """Add a job that will reach that state on one side."""
    options: dict[str, Any] = {"job_key": case.key, "max_attempts": 1 if case.state == "failed" else 25}
    if case.state == "waiting":
        return int(await holder.add("hold", "old", run_at=SOON, **options))
    if case.state == "running":
        return int(await holder.add("hold", "old", **options))
    return int(await holder.add("fail", {"error": "old"}, **options))


async def has_reached_state(db: asyncpg.Connection, case: Case, job_id: int) -> bool:
    """Return whether the state is reached, and delay the retry of a job that waits for one."""
    job = await existing(db, job_id)
    if case.state == "retrying":
        return bool(await db.fetchval(POSTPONE, job_id, SOON))
    if case.state == "failed":
        return job["last_error"] == "old" and job["locked_at"] is None
    return case.state == "waiting" or job["locked_at"] is not None


def assert_outcome(case: Case, old: asyncpg.Record, now: asyncpg.Record, keyed: asyncpg.Record) -> None:
    """Check the old job, and the job that has the key now."""
    if case.mode == "unsafe_dedupe":
        changed = {name for name in old.keys() if old[name] != now[name]}  # noqa: SIM118 - a record's values iterate
        assert changed == {"revision", "updated_at"}
        assert (now["revision"], keyed["id"]) == (1, old["id"])
        return
    assert (keyed["payload"], keyed["attempts"], keyed["last_error"]) == ('"new"', 0, None)
    assert (keyed["priority"], keyed["max_attempts"], keyed["flags"]) == (5, 9, '{"new": true}')
    kept = case.mode == "preserve_run_at" and case.state == "waiting"
    assert keyed["run_at"] == (SOON if kept else LATER)
    assert keyed["locked_at"] is None
    if case.adds_new_job:
        assert keyed["id"] != old["id"]
        assert keyed["revision"] == 0
        changed = {name for name in old.keys() if old[name] != now[name]}  # noqa: SIM118
        assert changed <= {"key", "attempts", "updated_at", "is_available"}
        assert (now["key"], now["attempts"]) == (None, now["max_attempts"])
    else:
        assert (keyed["id"], keyed["revision"]) == (old["id"], 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("holder", ["python", "node"])
async def test_keys_are_replaced_across_languages_in_all_modes_and_states(
    shared: Shared, holder: str
) -> None:
    others = {"python", "node", "sql"} - {holder}
    cases = [Case(*case) for case in product(STATES, MODES, sorted(others))]
    jobs = {case: await add_for_state(shared.side(holder), case) for case in cases}
    await shared.side(holder).start(*TASKS, concurrency=len(cases))
    for case, job_id in jobs.items():
        await until(partial(has_reached_state, shared.db, case, job_id), case.key)

    for case, job_id in jobs.items():
        old = await existing(shared.db, job_id)
        await shared.side(case.adder).add("hold", "new", job_key=case.key, job_key_mode=case.mode, **NEW)
        now = await existing(shared.db, job_id)
        keyed = await fetch_one(
            shared.db, "select * from graphile_worker._private_jobs where key = $1", case.key
        )
        assert_outcome(case, old, now, keyed)

    running = {case: job_id for case, job_id in jobs.items() if case.state == "running"}
    await finish_running_jobs(shared, holder, running)


async def finish_running_jobs(shared: Shared, holder: str, running: dict[Case, int]) -> None:
    """Check that a job whose key was added again while it ran ends as usual, but is not retried."""
    adders = sorted({case.adder for case in running})
    for case, job_id in running.items():
        error = "as told" if case.adder == adders[0] else None
        await shared.side(holder).until_started(job_id)
        await shared.side(holder).release(job_id, error)

        async def ended(id: int = job_id) -> bool:
            job = await get(shared.db, id)
            return job is None or job["locked_at"] is None

        await until(ended, f"the end of {case.key}")
        job = await get(shared.db, job_id)
        if error is None:
            assert job is None
        else:
            assert job is not None
            assert (job["last_error"], job["is_available"]) == ("as told", not case.adds_new_job)


REMOVED = "select id, key, locked_by is not null as runs from graphile_worker.remove_job($1)"


async def removed_by(mixed: Shared, remover: str, key: str) -> tuple[int, str | None, bool]:
    """Remove a job; return its id, its key now, and whether it runs. Node's library can do it only in SQL."""
    if remover == "python":
        job = await mixed.utils.remove_job(key)
        assert job is not None
        return job.id, job.key, job.state == "running"
    if remover == "node":
        [row] = await mixed.node.request("query", REMOVED, [key])
    else:
        row = await fetch_one(mixed.db, REMOVED, key)
    return int(row["id"]), row["key"], row["runs"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("remover", ["python", "node", "sql"])
@pytest.mark.parametrize("holder", ["python", "node"])
async def test_running_job_removed_by_another_side_ends_but_is_not_retried(
    mixed: Shared, holder: str, remover: str
) -> None:
    side = mixed.side(holder)
    ends = {"well": None, "badly": "as told"}
    jobs = {end: await side.add("hold", end, job_key=end, queue_name=end) for end in ends}
    await side.start("hold", concurrency=2)
    for end, job_id in jobs.items():
        await side.until_started(job_id)
        assert await removed_by(mixed, remover, end) == (job_id, None, True)
        await side.release(job_id, ends[end])

    async def free() -> bool:
        return not await mixed.db.fetchval(
            "select exists (select from graphile_worker._private_job_queues where locked_at is not null)"
        )

    await until(free, "both queues are unlocked")
    assert await get(mixed.db, jobs["well"]) is None
    [left] = await mixed.utils.list_jobs()
    assert (left.id, left.state, left.last_error) == (jobs["badly"], "failed", "as told")


async def test_batch_items_added_by_all_sides_under_one_key_are_one_job(shared: Shared) -> None:
    ids = [
        await shared.side(side).add("task", [{"n": n, "by": side}], job_key="k", run_at=SOON)
        for n, side in enumerate(("python", "node", "sql", "node", "python"))
    ]
    assert len(set(ids)) == 1
    [job] = await shared.utils.list_jobs()
    assert [item["n"] for item in job.payload] == [0, 1, 2, 3, 4]
    assert job.revision == 4


async def test_key_can_be_used_again_after_the_other_side_has_run_its_job(mixed: Shared) -> None:
    first = await mixed.python.add("see", 1, job_key="k")
    await mixed.node.start("see")
    await mixed.node.until("job:success", id=first)

    async def gone() -> bool:
        return await get(mixed.db, first) is None

    await until(gone, "Node has recorded it")
    second = await mixed.node.add("see here", 2, job_key="k")
    assert second != first
    assert await mixed.utils.get_job(key="k") is not None
