"""A key means the same whoever added its job, whoever runs it, and whoever adds it again."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from support.jobs import existing, get, one
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
    """A job that one side has brought to a state, and how its key is added again by another side."""

    state: str
    mode: str
    adder: str

    @property
    def key(self) -> str:
        return ", ".join(self)

    @property
    def makes_a_new_one(self) -> bool:
        return self.mode != "unsafe_dedupe" and self.state in {"failed", "running"}


async def bring_about(holder: Any, case: Case) -> int:
    """Have one side bring a job to that state."""
    options: dict[str, Any] = {"job_key": case.key, "max_attempts": 1 if case.state == "failed" else 25}
    if case.state == "waiting":
        return int(await holder.add("hold", "old", run_at=SOON, **options))
    if case.state == "running":
        return int(await holder.add("hold", "old", **options))
    return int(await holder.add("fail", {"error": "old"}, **options))


async def is_there(db: asyncpg.Connection, case: Case, job_id: int) -> bool:
    """Whether that state is reached; a job that waits for its retry is made to wait for longer."""
    job = await existing(db, job_id)
    if case.state == "retrying":
        return bool(await db.fetchval(POSTPONE, job_id, SOON))
    if case.state == "failed":
        return job["last_error"] == "old" and job["locked_at"] is None
    return case.state == "waiting" or job["locked_at"] is not None


def assert_outcome(case: Case, old: asyncpg.Record, now: asyncpg.Record, keyed: asyncpg.Record) -> None:
    """What became of the old job, and of the one that has the key now."""
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
    if case.makes_a_new_one:
        assert keyed["id"] != old["id"]
        assert keyed["revision"] == 0
        changed = {name for name in old.keys() if old[name] != now[name]}  # noqa: SIM118
        assert changed <= {"key", "attempts", "updated_at", "is_available"}
        assert (now["key"], now["attempts"]) == (None, now["max_attempts"])
    else:
        assert (keyed["id"], keyed["revision"]) == (old["id"], 1)


@pytest.mark.parametrize("holder", ["python", "node"])
async def test_keys_are_replaced_across_languages_in_all_modes_and_states(
    shared: Shared, holder: str
) -> None:
    others = {"python", "node", "sql"} - {holder}
    cases = [Case(*case) for case in product(STATES, MODES, sorted(others))]
    jobs = {case: await bring_about(shared.side(holder), case) for case in cases}
    await shared.side(holder).start(*TASKS, concurrency=len(cases))
    for case, job_id in jobs.items():
        await until(partial(is_there, shared.db, case, job_id), case.key)

    for case, job_id in jobs.items():
        old = await existing(shared.db, job_id)
        await shared.side(case.adder).add("hold", "new", job_key=case.key, job_key_mode=case.mode, **NEW)
        now = await existing(shared.db, job_id)
        keyed = await one(shared.db, "select * from graphile_worker._private_jobs where key = $1", case.key)
        assert_outcome(case, old, now, keyed)

    running = {case: job_id for case, job_id in jobs.items() if case.state == "running"}
    await end_well_and_badly(shared, holder, running)


async def end_well_and_badly(shared: Shared, holder: str, running: dict[Case, int]) -> None:
    """A job that ran when its key was taken ends as usual; only, it is not tried again."""
    adders = sorted({case.adder for case in running})
    for case, job_id in running.items():
        error = "as told" if case.adder == adders[0] else None
        await shared.side(holder).until_begun(job_id)
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
            assert (job["last_error"], job["is_available"]) == ("as told", not case.makes_a_new_one)


REMOVED = "select id, key, locked_by is not null as runs from graphile_worker.remove_job($1)"


async def removed_by(beside: Shared, remover: str, key: str) -> tuple[int, str | None, bool]:
    """The job that was removed, its key now, and whether it runs; npm's library can do it in SQL only."""
    if remover == "python":
        job = await beside.utils.remove_job(key)
        assert job is not None
        return job.id, job.key, job.state == "running"
    if remover == "node":
        [row] = await beside.node.ask("query", REMOVED, [key])
    else:
        row = await one(beside.db, REMOVED, key)
    return int(row["id"]), row["key"], row["runs"]


@pytest.mark.parametrize("remover", ["python", "node", "sql"])
@pytest.mark.parametrize("holder", ["python", "node"])
async def test_a_running_job_that_others_remove_ends_as_usual_and_is_not_tried_again(
    beside: Shared, holder: str, remover: str
) -> None:
    side = beside.side(holder)
    ends = {"well": None, "badly": "as told"}
    jobs = {end: await side.add("hold", end, job_key=end, queue_name=end) for end in ends}
    await side.start("hold", concurrency=2)
    for end, job_id in jobs.items():
        await side.until_begun(job_id)
        assert await removed_by(beside, remover, end) == (job_id, None, True)
        await side.release(job_id, ends[end])

    async def free() -> bool:
        return not await beside.db.fetchval(
            "select exists (select from graphile_worker._private_job_queues where locked_at is not null)"
        )

    await until(free, "both queues are free")
    assert await get(beside.db, jobs["well"]) is None
    [left] = await beside.utils.list_jobs()
    assert (left.id, left.state, left.last_error) == (jobs["badly"], "failed", "as told")


async def test_lists_that_all_three_add_under_one_key_are_one_job(shared: Shared) -> None:
    ids = [
        await shared.side(side).add("task", [{"n": n, "by": side}], job_key="k", run_at=SOON)
        for n, side in enumerate(("python", "node", "sql", "node", "python"))
    ]
    assert len(set(ids)) == 1
    [job] = await shared.utils.list_jobs()
    assert [item["n"] for item in job.payload] == [0, 1, 2, 3, 4]
    assert job.revision == 4


async def test_a_key_is_free_again_when_the_other_side_is_done_with_its_job(beside: Shared) -> None:
    first = await beside.python.add("see", 1, job_key="k")
    await beside.node.start("see")
    await beside.node.until("job:success", id=first)

    async def gone() -> bool:
        return await get(beside.db, first) is None

    await until(gone, "Node has recorded it")
    second = await beside.node.add("see here", 2, job_key="k")
    assert second != first
    assert await beside.utils.get_job(key="k") is not None
