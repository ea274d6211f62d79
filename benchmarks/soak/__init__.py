"""The soak test: many jobs through one worker, to see what grows: memory, dead rows, tables, latency.

`python -m benchmarks.soak` runs it. `run` runs one `scenarios.Scenario` and returns a
`result.ScenarioResult`, `verdict` checks the result, and `page` writes the report.
"""
