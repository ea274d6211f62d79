"""Write docs/schema.sql: the installed schema as pg_dump shows it, for reading and for reviews."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from graphile_worker import run_migrations
from graphile_worker.embedded.binaries import Binaries
from graphile_worker.testing import Databases, running_server

DUMP = Path(__file__).parent.parent / "docs" / "schema.sql"
HEADER = "-- The installed schema. Written by `make db-dump`; do not edit.\n\n"


def pg_dump(dsn: str) -> str:
    """What the program prints."""
    program = Binaries.of_extra().program("pg_dump")
    command = [program, "--schema=graphile_worker", "--schema-only", "--no-owner", dsn]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


async def dump(server_dsn: str) -> str:
    """The schema on a fresh database, without what differs from run to run."""
    databases = Databases(server_dsn)
    async with databases.fresh(empty=True) as dsn:
        await run_migrations(dsn=dsn)
        text = await asyncio.to_thread(pg_dump, dsn)
    lines = [line for line in text.splitlines() if not re.match(r"--|\\|SET |SELECT pg_catalog", line)]
    return HEADER + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main() -> None:
    """Write the file."""
    with running_server(binaries=Binaries.of_extra().root) as dsn:
        DUMP.write_text(asyncio.run(dump(dsn)))
    print(f"Wrote {DUMP}")


if __name__ == "__main__":
    main()
