"""The schema: installing it, adopting one that Graphile Worker created, and checking what is installed.

`migrate` is called by the client and by each worker when it starts; the doctor compares a schema with
`contract`. `databases` creates whole databases, for tests. Nothing in here reads or changes jobs.
"""
