"""Recovery: declaring silent workers dead, and releasing their jobs.

`sweeper` observes the heartbeats of all workers. It releases the jobs and queues of a worker whose lease has
ended while it was observed. The worker's maintenance and the administration of `_client` call it. It knows
the database only through `_db`, and nothing about running jobs.
"""
