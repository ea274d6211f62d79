"""Write the installed schema: as SQL for readers and reviews, and as JSON for the doctor to compare with."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

from graphile_worker import run_migrations
from graphile_worker._db.connection.connect import connect
from graphile_worker._db.queries.diagnostics import describe_schema
from graphile_worker._db.schema import contract
from graphile_worker._db.schema.migrate import inspect_schema
from graphile_worker._db.sql_files import Schema
from graphile_worker.embedded.binaries import Binaries
from graphile_worker.testing import Databases, running_server

DUMP = Path(__file__).parent.parent / "docs" / "reference" / "schema.sql"
"""The output of pg_dump."""
CONTRACT = Path(contract.__file__).with_suffix(".json")
"""The objects that the doctor compares."""
HEADER = "-- The installed schema. Written by `make db-dump`; do not edit.\n\n"


def pg_dump(dsn: str) -> str:
    """Return the output of pg_dump."""
    program = Binaries.from_extra().program("pg_dump")
    command = [program, "--schema=graphile_worker", "--schema-only", "--no-owner", dsn]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


async def describe(dsn: str) -> str:
    """Return the objects of the schema as JSON, one per line."""
    async with connect(dsn) as connection, connection.transaction():
        found = await inspect_schema(connection, Schema())
        objects = await describe_schema(connection, Schema())
    return json.dumps({"own_revision": found.own_revision, "objects": objects}, indent=1) + "\n"


async def dump(server_dsn: str) -> tuple[str, str]:
    """Return the schema of a fresh database, without parts that vary between runs, and its objects."""
    databases = Databases(server_dsn)
    async with databases.fresh(empty=True) as dsn:
        await run_migrations(dsn=dsn)
        text = await asyncio.to_thread(pg_dump, dsn)
        objects = await describe(dsn)
    lines = [line for line in text.splitlines() if not re.match(r"--|\\|SET |SELECT pg_catalog", line)]
    return HEADER + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n", objects


def main() -> None:
    """Write the files."""
    with running_server(binaries=Binaries.from_extra().root) as dsn:
        for path, text in zip((DUMP, CONTRACT), asyncio.run(dump(dsn)), strict=True):
            path.write_text(text)
            print(f"Wrote {path}")


if __name__ == "__main__":
    main()
