"""Write what the installed schema is: for reading and for reviews, and for the doctor to compare with."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

from graphile_worker import run_migrations
from graphile_worker._db import contract
from graphile_worker._db.connect import connect
from graphile_worker._db.migrate import inspect_schema
from graphile_worker._db.sql import Schema
from graphile_worker._db.symptoms import describe_schema
from graphile_worker.embedded.binaries import Binaries
from graphile_worker.testing import Databases, running_server

DUMP = Path(__file__).parent.parent / "docs" / "schema.sql"
"""As pg_dump shows it."""
CONTRACT = Path(contract.__file__).with_suffix(".json")
"""As the doctor sees it."""
HEADER = "-- The installed schema. Written by `make db-dump`; do not edit.\n\n"


def pg_dump(dsn: str) -> str:
    """What the program prints."""
    program = Binaries.of_extra().program("pg_dump")
    command = [program, "--schema=graphile_worker", "--schema-only", "--no-owner", dsn]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


async def describe(dsn: str) -> str:
    """Its objects, one a line."""
    async with connect(dsn) as connection, connection.transaction():
        found = await inspect_schema(connection, Schema())
        objects = await describe_schema(connection, Schema())
    return json.dumps({"own_revision": found.own_revision, "objects": objects}, indent=1) + "\n"


async def dump(server_dsn: str) -> tuple[str, str]:
    """The schema on a fresh database, without what differs from run to run; and its objects."""
    databases = Databases(server_dsn)
    async with databases.fresh(empty=True) as dsn:
        await run_migrations(dsn=dsn)
        text = await asyncio.to_thread(pg_dump, dsn)
        objects = await describe(dsn)
    lines = [line for line in text.splitlines() if not re.match(r"--|\\|SET |SELECT pg_catalog", line)]
    return HEADER + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n", objects


def main() -> None:
    """Write the files."""
    with running_server(binaries=Binaries.of_extra().root) as dsn:
        for path, text in zip((DUMP, CONTRACT), asyncio.run(dump(dsn)), strict=True):
            path.write_text(text)
            print(f"Wrote {path}")


if __name__ == "__main__":
    main()
