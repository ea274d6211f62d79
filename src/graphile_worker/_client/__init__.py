"""The parts of `WorkerUtils` and of `App` that talk to the queue without a worker.

`administration` manages existing jobs: `WorkerUtils` derives from it. `bulk` handles more jobs than fit into
one transaction: `WorkerUtils.many` returns it. `per_loop` keeps the connections of an app for each event
loop, and `sync_bridge` runs calls from code without a loop. Nothing in here knows how a worker runs jobs.
"""
