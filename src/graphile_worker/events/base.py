"""Base classes of the events, and the values that identify a worker in them."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class WorkerPool(msgspec.Struct, frozen=True):
    """One call of `run`, usually one worker process. It holds the locks of its jobs."""

    id: str
    """The value of the column `locked_by`."""
    schema: str
    concurrency: int
    tasks: tuple[str, ...]


class Worker(msgspec.Struct, frozen=True):
    """One slot of a pool. It runs one job at a time."""

    id: str
    """The pool's id and the slot's number."""
    number: int
    """From 1 to the pool's concurrency."""
    worker_id: str
    """The pool's id: the value of `locked_by`, in log records, and of `JobContext.worker_id`."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all events."""

    name: ClassVar[str] = "*"


class PoolEvent(Event, frozen=True, kw_only=True):
    """Base class of the events about a worker process."""

    worker_pool: WorkerPool


class SlotEvent(Event, frozen=True, kw_only=True):
    """Base class of the events about one slot of a worker."""

    worker: Worker
