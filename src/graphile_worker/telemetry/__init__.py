"""Metrics: the integration with Prometheus.

An integration is a middleware. It listens to the events of a worker, wraps running and adding jobs if it has
to, and needs an extra package, so it has a module of its own that users import. `metric_table` declares
the metrics once, and `worker_totals` counts them from events; neither knows a metrics library. Nothing below
this package imports it, and a worker without an integration does no work for it.
"""
