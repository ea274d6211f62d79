"""Empties the queue between tests."""

from __future__ import annotations

import asyncio
from typing import Any

from graphile_worker._db.connection.adapted import AdaptedConnection
from graphile_worker._db.queries.emptying import empty_queue as empty_on
from graphile_worker.client import find_schema
from graphile_worker.contrib.django import configuration


def empty_queue(connection: Any) -> None:
    """Remove all jobs, and what is known about jobs that have ended, if the schema is installed."""
    schema = find_schema(configuration.read_setting("SCHEMA"))
    asyncio.run(empty_on(AdaptedConnection(connection), schema))  # type: ignore[arg-type]
