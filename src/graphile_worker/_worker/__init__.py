"""The worker: claims jobs, runs them, and records their outcomes.

`runner` calls this package. `lifecycle` holds `Runner`, which starts and stops a worker, `assembly` builds
its parts from `options`, and `loop` is its main loop. The loop decides what to claim with `claiming`, and
runs jobs with `execution`, some of them in `processes`. `liveness` records heartbeats and reports health,
`maintenance` holds the services that run next to the jobs. `service` is their base class, `lifespan` opens
the application's state, and `signals` handles the process's signals.

Nothing in here contains SQL (that is in `_db`), reads the command line, or depends on `testing`.
"""
