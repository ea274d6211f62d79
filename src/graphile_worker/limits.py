"""How much may run at once: limits and pauses."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - msgspec reads the annotations
from typing import Literal

import msgspec

from graphile_worker.errors import ConfigurationError

_MAX_NAME_LENGTH = 128
MAX_CONCURRENCY = 1_000_000

PAUSED = "python:paused"
"""What a paused queue is locked by."""


class Limit(msgspec.Struct, frozen=True):
    """A limit on how many jobs run at once, across all Python workers: see docs/guides/limits.md.

    Tasks that have the same limit share it. `WorkerUtils.set_limit` and ``graphile-worker limits`` change the
    limit while workers run.

    An invalid value is refused with a `ConfigurationError`.

    Example:
        >>> from graphile_worker import App, Limit
        >>> app = App(dsn=dsn)
        >>> stripe = Limit("stripe", concurrency=10)
        >>> @app.task(limit=stripe)
        ... async def charge(order: int) -> None: ...
        >>> @app.task(limit=stripe, worker_limit=2)
        ... async def refund(order: int) -> None: ...
    """

    name: str
    """Name of the limit, up to 128 characters."""
    concurrency: int
    """Maximum number of jobs that run at once."""

    def __post_init__(self) -> None:
        check_limit_name(self.name)
        check_concurrency("concurrency", self.concurrency, 1)


class LimitState(msgspec.Struct, frozen=True, kw_only=True):
    """A limit as the database has it: see `WorkerUtils.limits`."""

    name: str
    concurrency: int
    """The value that holds."""
    declared: int
    """The value in the code of the worker that started last."""
    held: int
    """How many jobs the workers may run at the moment, together. It is above `concurrency` only while the
    limit was lowered and jobs have not ended yet."""
    waiting: int
    """How many jobs of the tasks are due."""
    tasks: list[str]
    """The tasks that have the limit, or had it."""
    workers: dict[str, int]
    """The share of each worker that has one."""

    @property
    def is_overridden(self) -> bool:
        """Whether the value was set at run time."""
        return self.concurrency != self.declared

    @property
    def is_full(self) -> bool:
        """Whether no more jobs may start now."""
        return self.held >= self.concurrency


def check_limit_name(name: object) -> None:
    """Check the name of a limit.

    Raises:
        ConfigurationError: It is invalid.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(
            f"Invalid name {name!r} of a limit: it must be a str with 1 to {_MAX_NAME_LENGTH} printable "
            "characters."
        )


def check_concurrency(argument: str, value: object, minimum: int) -> None:
    """Check a maximum number of jobs.

    Raises:
        ConfigurationError: It is invalid.
    """
    if type(value) is not int or not minimum <= value <= MAX_CONCURRENCY:
        raise ConfigurationError(
            f"{argument} is {value!r}; it must be an integer from {minimum} to {MAX_CONCURRENCY:,}."
        )


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of a task, of a serial queue, or of everything: see `WorkerUtils.pause`.

    Example:
        >>> import asyncio
        >>> from graphile_worker import WorkerUtils
        >>> async def main():
        ...     async with WorkerUtils(dsn=dsn) as utils:
        ...         await utils.migrate()
        ...         await utils.pause(task="charge", reason="the bank is down")
        ...         return await utils.pauses()
        >>> for pause in asyncio.run(main()):
        ...     print(pause.kind, pause.name, pause.reason)
        task charge the bank is down
    """

    kind: Literal["all", "task", "queue"]
    name: str
    """The task's identifier or the queue's name; empty if everything is paused."""
    paused_at: datetime
    until: datetime | None = None
    """When the pause ends by itself; None if it does not."""
    reason: str | None = None
    paused_by: str
    """Who paused it: by default the database role."""

    @property
    def subject(self) -> str:
        """What is paused, in words."""
        return "everything" if self.kind == "all" else f"{self.kind} {self.name!r}"

    @property
    def is_obeyed_by_all(self) -> bool:
        """Whether Node and Rust workers obey the pause too: they do not claim jobs of a paused queue."""
        return self.kind == "queue"
