"""Task processes, for tasks with ``executor="process"``.

In the worker, `pool` starts processes and runs jobs in them, and `child_process` is one of them. In a
process, `_task_process` is the main program. It uses `context`, the job context without a worker, and
`forks`, which ends children that tasks fork. Both sides use `protocol`, the messages between them,
`remote_errors`, exceptions and log records that cross over, and `shared_heartbeat`, by which a process
sees that its worker is frozen.

The executor calls this package. A task process has no database connection: it asks its worker to add jobs.
"""
