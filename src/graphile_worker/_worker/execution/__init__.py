"""Execution: from a claimed job to its recorded outcome.

`claimed_jobs` holds every job that this worker has claimed until its outcome is recorded. `local_queue` keeps
those that wait for a slot, `slots` runs them, `results` keeps the outcomes that are not recorded yet.
`executor` runs one job: it finds the task's function through `handlers`, wraps it in middleware
(`middleware_chain`) and calls it on the event loop, on a thread (`threads`) or in a process. `deadline`
enforces timeouts, `batch` settles the items of a batch. `job_events` and `job_log` report each run.

The worker's loop calls this package. Nothing in here knows SQL, or decides how many jobs to claim.
"""
