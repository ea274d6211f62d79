"""Priorities and forbidden flags have the same meaning in Python and Node."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from support.python_peer import LEDGER
from support.waiting import until

if TYPE_CHECKING:
    from interop.conftest import Shared

SIDES = ("python", "node", "sql")


@pytest.mark.sample(2)
async def test_both_sides_claim_by_priority(shared: Shared) -> None:
    """Both are busy until all jobs are added; then each claims by priority."""
    await shared.db.execute(LEDGER)
    workers: dict[str, Any] = {"python": shared.python, "node": shared.node}
    busy = {}
    for name, side in workers.items():
        busy[name] = await side.add("hold", priority=-100)
        await side.start("hold", "record", concurrency=1)
        await side.until_started(busy[name])
    priorities = [n - 20 for n in range(40)]
    random.Random(5).shuffle(priorities)
    jobs = {
        await shared.side(SIDES[n % 3]).add("record", {"ms": 3}, priority=priority): priority
        for n, priority in enumerate(priorities)
    }
    for name, side in workers.items():
        await side.release(busy[name])

    async def all_ran() -> bool:
        return not await shared.utils.list_jobs()

    await until(all_ran, "all ran")
    order = defaultdict(list)
    for run in await shared.db.fetch("select job_id, who from ledger order by run"):
        order[run["who"]].append(jobs[run["job_id"]])
    assert sorted(order["python"] + order["node"]) == sorted(priorities)
    assert all(taken == sorted(taken) for taken in order.values())


@pytest.mark.sample(2)
async def test_job_with_a_flag_forbidden_on_one_side_runs_on_the_other(shared: Shared) -> None:
    flags = {"python": ["not in node"], "node": ["not here"], "neither": ["not in node", "not here"]}
    jobs = {
        where: [await shared.side(side).add("see", where, flags=names) for side in SIDES]
        for where, names in flags.items()
    }
    await shared.node.start("see", concurrency=2, forbidden_flags=["not in node"])
    await shared.python.start("see", concurrency=2, forbidden_flags=["not here"])

    async def the_rest_waits() -> bool:
        return len(await shared.utils.list_jobs()) == 3

    await until(the_rest_waits, "all allowed jobs have run")
    left = await shared.utils.list_jobs()
    assert {(job.id, job.attempts, job.state) for job in left} == {(n, 0, "ready") for n in jobs["neither"]}
    assert [payload for _, payload in shared.python.ran] == ["python"] * 3
    assert [sent["payload"] for sent in shared.node.messages if sent["what"] == "seen"] == ["node"] * 3
