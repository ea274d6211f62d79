"""`WorkerOptions`: the options of a worker, checked."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from graphile_worker._base.durations import seconds
from graphile_worker._worker.run_options import OPTIONS
from graphile_worker.cron import parse_cron_items
from graphile_worker.errors import ConfigurationError
from graphile_worker.events.emitter import Events
from graphile_worker.middleware.base import check_middleware
from graphile_worker.workers import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    import asyncpg

    from graphile_worker._base.logs import AnyLogger
    from graphile_worker._worker.run_options import FlagsOption
    from graphile_worker.cron import CronItem
    from graphile_worker.history import History
    from graphile_worker.middleware import Middleware
    from graphile_worker.workers import OnRecovery

_MAX_LEASE = 10_800.0
"""Graphile Worker releases every lock that is older than four hours, and workers renew theirs every hour."""
NOT_WORKER_OPTIONS = {"tasks", "task_directory", "crontab", "crontab_file"}
"""Arguments of `run` that are read before the worker is created."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The arguments of `run` and `run_once` except the tasks, checked; durations are in seconds.

    The defaults, and what each option means, are declared in `run_options`.
    """

    dsn: str | None
    pool: asyncpg.Pool | None
    schema: str | None
    concurrency: int
    max_task_processes: int | None
    max_jobs_per_task_process: int | None
    max_pool_size: int
    pool_timeout: float | None
    poll_interval: float
    listen: bool
    listen_dsn: str | None
    prefetch: int | Literal["auto"]
    prefetch_ttl: float | None
    forbidden_flags: FlagsOption
    use_local_time: bool
    max_payload_size: int
    require_transaction: bool
    interrupted_delay: float
    shutdown_grace: float
    min_reset_locked_interval: float
    max_reset_locked_interval: float
    recovery: bool
    heartbeat_interval: float
    lease: float
    fast_lease: float
    task_leases: Mapping[str, float]
    recovery_delay: float
    refund_attempt_on_recovery: bool
    on_recovery: OnRecovery | None
    exit_if_stuck: bool
    on_invalid_payload: str
    history: History
    history_keep: float
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None
    middleware: Sequence[Middleware]
    cron_items: Sequence[CronItem]
    health: str | int | None
    statistics: bool
    handle_signals: bool
    migrate: bool
    prepared_statements: bool
    events: Events
    logger: AnyLogger | None
    once: bool = False
    """Whether to end when no job is left to run."""

    @classmethod
    def of(cls, *, once: bool = False, **given: Any) -> Self:
        """Check the arguments that the user passed, and complete them with the defaults.

        Raises:
            ConfigurationError: An argument is wrong.
        """
        values = {
            name: option.kind.check(name, given.get(name, option.default))
            for name, option in OPTIONS.items()
            if name not in NOT_WORKER_OPTIONS
        }
        values["task_leases"] = _read_task_leases(values["task_leases"] or {})
        values["middleware"] = check_middleware(values["middleware"])
        values["cron_items"] = parse_cron_items(values["cron_items"] or ())
        if values["events"] is None:
            values["events"] = Events()
        return cls(**values, once=once)

    def __post_init__(self) -> None:
        if self.dsn is not None and self.pool is not None:
            raise ConfigurationError("Pass dsn or pool, not both.")
        if not self.listen and self.listen_dsn is not None:
            raise ConfigurationError("Pass listen_dsn, or listen=False, not both.")
        self._check_types()
        self._check_leases()
        if self.min_reset_locked_interval > self.max_reset_locked_interval:
            raise ConfigurationError(
                f"min_reset_locked_interval ({self.min_reset_locked_interval} s) is longer than "
                f"max_reset_locked_interval ({self.max_reset_locked_interval} s)."
            )

    def _check_types(self) -> None:
        if not isinstance(self.events, Events):
            raise ConfigurationError(f"events takes an Events object, not {type(self.events).__name__}.")
        if self.logger is not None and not isinstance(self.logger, logging.Logger | logging.LoggerAdapter):
            raise ConfigurationError(f"logger takes a logger, not {type(self.logger).__name__}.")
        if self.on_invalid_payload not in {"retry", "fail"}:
            raise ConfigurationError(
                f"on_invalid_payload is {self.on_invalid_payload!r}; it must be 'retry' or 'fail'."
            )
        function = self.lifespan.func if isinstance(self.lifespan, partial) else self.lifespan
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                f"The lifespan {function.__name__} is a generator function. Decorate it with "
                "@asynccontextmanager."
            )
        if self.lifespan is not None and not callable(self.lifespan):
            raise ConfigurationError(
                f"lifespan is {self.lifespan!r}; it must be a function that returns an async context manager."
            )
        if self.on_recovery is not None and not callable(self.on_recovery):
            raise ConfigurationError(f"on_recovery is {self.on_recovery!r}; it must be callable.")

    def _check_leases(self) -> None:
        if self.lease > _MAX_LEASE:
            raise ConfigurationError(f"lease is {self.lease:g} s; it must be at most {_MAX_LEASE:g} s.")
        if not 2 * self.heartbeat_interval <= self.fast_lease <= self.lease / 2:
            raise ConfigurationError(
                f"heartbeat_interval is {self.heartbeat_interval:g} s, fast_lease {self.fast_lease:g} s, and "
                f"lease {self.lease:g} s. Each must be at least twice the one before it; otherwise a slow "
                "worker could be declared dead."
            )
        for task, value in self.task_leases.items():
            if not self.lease <= value <= _MAX_LEASE:
                raise ConfigurationError(
                    f"The lease of the task {task!r} is {value:g} s; it must be from {self.lease:g} s (the "
                    f"lease option) to {_MAX_LEASE:g} s."
                )

    @property
    def terms(self) -> Lease | None:
        """The lease that the worker announces; None without recovery."""
        if not self.recovery:
            return None
        return Lease(
            interval=self.heartbeat_interval,
            seconds=self.lease,
            fast=self.fast_lease,
            tasks=dict(self.task_leases),
        )

    @property
    def own_connections(self) -> int:
        """Number of connections from its pool that the worker keeps: one for exchanges, one to listen."""
        return 2 if self.listen and self.listen_dsn is None else 1


def _read_task_leases(leases: object) -> dict[str, float]:
    if not isinstance(leases, Mapping):
        raise ConfigurationError(f"task_leases is {leases!r}; it must be a mapping of tasks to seconds.")
    return {task: seconds(f"task_leases[{task!r}]", value) for task, value in leases.items()}
