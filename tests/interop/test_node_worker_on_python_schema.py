"""A Node worker runs jobs on a schema installed by Python, without warnings."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from support import node
from support.jobs import add, count, get

if TYPE_CHECKING:
    from pathlib import Path

    import asyncpg

RECORD = """
module.exports = async (payload, helpers) => {
  await helpers.query("insert into ran values ($1, $2)", [helpers.job.id, payload]);
  if (payload.fail) throw new Error("as told");
};
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", ["0.18.0", "0.17.3"])
async def test_node_worker_runs_jobs_added_in_sql_without_a_warning(
    db: asyncpg.Connection, database: str, tmp_path: Path, version: str
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "record.js").write_text(RECORD)
    await db.execute("create table ran (id bigint, payload json)")
    plain = await add(db, "record", payload={"n": 1})
    await add(db, "record", payload={"n": 2}, job_key="k")
    replaced = await add(db, "record", payload={"n": 3}, job_key="k", flags=["f"], priority=-1)
    queued = await add(db, "record", payload={"n": 4}, queue_name="q")
    failing = await add(db, "record", payload={"fail": True}, queue_name="other")
    unknown = await add(db, "no worker has this task")

    finished = await node.run(version, database, "--once", cwd=str(tmp_path))

    assert finished.status == 0, finished.output
    warnings = re.findall(r".*(?:WARN|Warning).*", finished.output)
    # 0.17 warns that revision 20 is newer than the revisions it knows, which is true.
    assert [line for line in warnings if version == "0.18.0" or "20" not in line] == []
    ran = await db.fetch("select * from ran order by id")
    assert {row["id"]: json.loads(row["payload"]) for row in ran} == {
        plain["id"]: {"n": 1},
        replaced["id"]: {"n": 3},
        queued["id"]: {"n": 4},
        failing["id"]: {"fail": True},
    }
    failed = await get(db, failing["id"])
    assert failed is not None
    assert (failed["attempts"], failed["last_error"], failed["locked_by"]) == (1, "as told", None)
    assert await get(db, unknown["id"])
    assert await count(db) == 2
