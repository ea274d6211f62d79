"""A private PostgreSQL for development and tests; never used unless asked for.

Its folder holds ``data`` (the cluster), ``run`` (socket and log), ``password`` (for TCP) and three
lock files, by which processes that name the same folder share one server:

- ``start.lock``, exclusive, is held by whoever looks for, makes or starts the server.
- ``users.lock``, shared, is held by each user for as long as it uses the server. The kernel lets go
  of it when a process ends, however it ends.
- ``watcher.lock``, exclusive, is held by the watcher, a detached process that waits for the exclusive
  ``users.lock``: once it has it nobody is left, and it stops the server.
"""

from graphile_worker.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres"]
