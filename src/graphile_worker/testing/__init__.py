"""What tests of a queue need: a PostgreSQL server, and a fresh database for each test."""

from graphile_worker.testing.databases import Databases
from graphile_worker.testing.servers import running_server

__all__ = ["Databases", "running_server"]
