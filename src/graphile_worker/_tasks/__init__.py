"""Tasks: declaring them, loading them from files, and converting payloads to their arguments.

`decorator` declares tasks, `loader` finds them in files, and `registry` holds those of an app. `binding`,
`parameters` and `conversion` read a function's signature and convert payloads. `specs` and `job_keys`
describe new jobs. `App`, `Task` and the worker call this package. It does not access the database.
"""
