"""A private PostgreSQL server for development and tests. It is never used unless requested.

Connection strings that begin with ``embedded:``, the testing package and users call this package. It knows
nothing of jobs and queues.

The server's folder holds ``data`` (the cluster), ``run`` (socket and log), ``password`` (for TCP) and three
lock files. With them, processes that name the same folder share one server:

- ``start.lock``, exclusive: a process holds it while it finds, creates or starts the server.
- ``users.lock``, shared: each process holds it for as long as it uses the server. The kernel releases it
  when a process ends, however it ends.
- ``watcher.lock``, exclusive: the watcher holds it, a detached process that waits for the exclusive
  ``users.lock``. When it gets that lock, the server has no users left, and the watcher stops the server.
"""

from graphile_worker.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres"]
