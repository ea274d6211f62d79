"""Heartbeats and health: how a worker shows that it is alive, and stops its jobs when it cannot.

`heartbeat` records heartbeats, from its own thread and connection. `lease_state` knows until when the worker
may run its jobs, and `fencing` stops them in time if no heartbeat is recorded. `health_server` collects the
worker's health and serves it over HTTP. `loop_relay` calls functions on the worker's event loop from the
background thread.

`assembly` creates these parts. None of them claims jobs or decides their outcomes: they only tell the
worker's loop to stop and to continue.
"""
