"""Tools for testing code that adds and runs jobs: test databases, jobs that run on demand, and assertions.

Tests call this package. It may use the worker's parts, the client and the embedded server; no other package
imports it. pytest loads its plugin in every run, so nothing here is imported until a test uses it.
"""

from graphile_worker._base.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)  # listed in __init__.pyi
