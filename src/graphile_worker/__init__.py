"""Graphile Worker for Python: a PostgreSQL job queue shared with Node, Rust and plain SQL."""

from graphile_worker._base.lazy_names import lazy_names

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = lazy_names(__name__)  # names are listed in __init__.pyi
