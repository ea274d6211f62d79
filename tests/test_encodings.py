"""The schema can be installed and jobs can run in databases of any encoding."""

from __future__ import annotations

from secrets import token_hex

import asyncpg
import pytest

from graphile_worker import WorkerUtils, run_migrations, run_once
from graphile_worker._db.schema.databases import drop_database, dsn_of

ENCODINGS = ("LATIN1", "LATIN2", "LATIN10", "KOI8R", "WIN866", "EUC_JP", "EUC_KR", "EUC_CN", "SQL_ASCII")


@pytest.mark.sample(3)
@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_job_runs_in_a_database_of_any_encoding(server: str, encoding: str) -> None:
    ran: list[object] = []

    async def task(payload: object) -> None:
        ran.append(payload)
        raise ValueError("no")

    name = f"encoded_{token_hex(4)}"
    db = await asyncpg.connect(server)
    await db.execute(
        f"create database {name} template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
    )
    try:
        dsn = dsn_of(server, name)
        await run_migrations(dsn=dsn)
        async with WorkerUtils(dsn) as utils:
            await utils.add_job("t", {"n": 1}, queue_name="q")
            await run_once({"t": task}, dsn)
            [job] = await utils.list_jobs()
    finally:
        await drop_database(db, name)
        await db.close()

    assert ran == [{"n": 1}]
    assert "no" in str(job.last_error)
