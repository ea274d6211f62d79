"""The ``graphile-worker`` command."""

from __future__ import annotations

import asyncio
import sys

import click

import graphile_worker
from graphile_worker.client import find_schema
from graphile_worker.errors import GraphileWorkerError

_EPILOG = """\b
Examples:
  graphile-worker --schema-only -c postgresql://me@localhost/mine
  DATABASE_URL=embedded: graphile-worker --schema-only
"""


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-c",
    "--connection",
    metavar="DSN",
    help="The database, for example postgresql://user@host/database, or embedded: for a private "
    "PostgreSQL. By default DATABASE_URL, or PGDATABASE with the other PG* variables.",
)
@click.option(
    "-s",
    "--schema",
    metavar="NAME",
    help="The schema of the queue. By default GRAPHILE_WORKER_SCHEMA, or graphile_worker.",
)
@click.option("--schema-only", is_flag=True, help="Install or complete the schema, then exit.")
@click.version_option(graphile_worker.__version__, message="%(version)s")
def command(connection: str | None, schema: str | None, *, schema_only: bool) -> None:
    """Graphile Worker for Python: a job queue in your PostgreSQL database."""
    if not schema_only:
        raise click.UsageError("Nothing to do. Did you mean --schema-only?")
    asyncio.run(graphile_worker.run_migrations(dsn=connection, schema=schema))
    click.echo(f"Schema {find_schema(schema).name} is up to date")


def main() -> None:
    """Run the command; a mistake of the user's is a sentence, not a traceback."""
    try:
        command()
    except GraphileWorkerError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("Aborted!", err=True)
        sys.exit(130)
