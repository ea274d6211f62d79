"""Jobs with odd texts: no verb fails because of one, or shows it wrongly."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import asyncpg
import pytest

from graphile_worker.cli.logs import PrettyFormatter, TextFormatter
from graphile_worker.testing import Databases
from support.commands import Cli
from support.odd_payloads import UNDECODABLE, UNUSUAL, add_raw, in_one_line

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def databases(graphile_worker_databases: Databases) -> Databases:
    return graphile_worker_databases


async def test_odd_payload_does_not_hide_other_jobs(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    cli = Cli(database, tmp_path)
    texts = [*UNDECODABLE.values(), *UNUSUAL]
    await add_raw(db, *texts)
    printed = await cli.out("list", "--json")
    assert f'"payload":{UNDECODABLE["an integer of 5,000 digits"]},' in printed
    assert '"payload":1e999,' in printed
    assert await db.fetchval("select json_array_length($1::text::json)", printed) == len(texts)
    assert len((await cli.out("list")).splitlines()) == len(texts)
    shown = await cli.out("show", *(str(job_id) for job_id, _ in enumerate(texts, 1)))
    assert all(text in shown for text in UNDECODABLE.values())
    assert "payload          1e999\n" in shown


async def test_export_and_import_preserve_odd_payloads(
    db: asyncpg.Connection, database: str, databases: Databases, tmp_path: Path
) -> None:
    await add_raw(db, *UNDECODABLE.values(), *UNUSUAL)
    await Cli(database, tmp_path).out("export", "--output", "jobs.jsonl")
    stored = "select id, payload::text from graphile_worker._private_jobs order by id"
    async with databases.fresh() as other:
        connection = await asyncpg.connect(other)
        await Cli(other, tmp_path).out("import", "jobs.jsonl")
        assert in_one_line(await connection.fetch(stored)) == in_one_line(await db.fetch(stored))
        await connection.close()


async def test_bidirectional_control_characters_are_escaped(
    db: asyncpg.Connection, database: str, tmp_path: Path
) -> None:
    cli = Cli(database, tmp_path)
    odd = "a\u202eb\u2066c\u200fd\x9be\x1b[2Jf"
    await db.execute(
        "select graphile_worker.add_job('task', to_json($1::text), queue_name => $1, job_key => $1)",
        odd,
    )
    await db.execute("update graphile_worker._private_jobs set last_error = $1", odd)
    escaped = "a\\u202eb\\u2066c\\u200fd\\x9be\\x1b[2Jf"
    for verb in (["list"], ["show", "1"], ["queues"]):
        printed = await cli.out(*verb)
        assert escaped in printed
        assert not set(odd) - set("abcdef[2J") & set(printed)
    assert (await cli.json("show", "1"))[0]["key"] == odd


@pytest.mark.parametrize("formatter", [TextFormatter(with_process=False), PrettyFormatter()])
def test_text_logs_escape_control_characters(formatter: TextFormatter) -> None:
    record = logging.LogRecord("shop", logging.INFO, "", 0, "Got %s", ("\u202eevil\x1b]0;title\x07",), None)
    record.job_id, record.task_identifier = 7, "task\u2066"
    record.exc_text = "Traceback\n  ValueError: \x9b2J"
    line = formatter.format(record)
    assert "Got \\u202eevil\\x1b]0;title\\x07" in line
    assert "[task\\u2066 7]" in line
    assert line.endswith("\nTraceback\n  ValueError: \\x9b2J")
    try:
        int("\u202e")
    except ValueError:
        record = logging.LogRecord("shop", logging.ERROR, "", 0, "Failed", (), sys.exc_info())
    assert formatter.format(record).endswith("base 10: '\\u202e'")
