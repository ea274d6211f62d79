"""Many jobs through one worker, to see what grows with them: memory, dead rows, tables, latency.

`python -m benchmarks.soak` runs it. `run` feeds and watches one `scenarios.Scenario`, what it saw is a
`course.Course`, `verdict` judges that, and `page` shows it.
"""
