"""Graphile Worker for Python: a PostgreSQL job queue shared with Node, Rust and plain SQL."""

from graphile_worker.client import run_migrations
from graphile_worker.errors import (
    ConfigurationError,
    DatabaseError,
    EmbeddedServerError,
    GraphileWorkerError,
    MissingExtraError,
    SchemaError,
    SchemaTooNewError,
    SchemaTooOldError,
)

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "DatabaseError",
    "EmbeddedServerError",
    "GraphileWorkerError",
    "MissingExtraError",
    "SchemaError",
    "SchemaTooNewError",
    "SchemaTooOldError",
    "run_migrations",
]
