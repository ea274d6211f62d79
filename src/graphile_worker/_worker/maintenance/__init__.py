"""Services that run next to the jobs, each in its own loop (see `service`).

`notifier` listens for notifications of new jobs, cancellations and migrations. `cron_scheduler` adds the
jobs of recurring tasks, and `cron_jobs` does so through middleware. `cancellations` stops cancelled jobs.
`stale_locks` releases locks that are older than four hours, and `sweep_service` releases the jobs of dead
workers through `_recovery`.

`assembly` creates and starts them. A service that fails is retried: its errors never end the worker.
"""
