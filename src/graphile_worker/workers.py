"""The values that describe workers: their leases, their health, and the recovery of their jobs."""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from graphile_worker._base.durations import seconds
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime, timedelta
    from typing import TypeAlias

    from graphile_worker.job import Job

    OnRecovery: TypeAlias = Callable[
        [Job, "WorkerInfo"], "RecoveryAction | Awaitable[RecoveryAction | None] | None"
    ]

MAX_TASK_NAMES_BYTES = 1000
"""Maximum size of the task names that a worker publishes: every exchange reads the row that holds them."""
_MARGIN = 8.0
_FAST_MARGIN = 1.0
_RUST_LEASE = 300.0
"""Seconds without a heartbeat after which the Rust port declares one of its workers dead."""
_ADDRESS = re.compile(r"(?:(?P<host>[^:]*|\[[0-9a-fA-F:.]+\]):)?(?P<port>\d{1,5})")


def _clock_since_boot() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # On macOS this clock continues while the machine sleeps, unlike time.monotonic.
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    return time.monotonic


since_boot = _clock_since_boot()
"""The time in seconds, by a clock that cannot be set and that continues while the machine sleeps."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker without a heartbeat keeps its jobs. All times are in seconds."""

    interval: float = 3.0
    """The time between two heartbeats."""
    seconds: float = 38.0
    """After this time without a heartbeat the worker is declared dead, even if it still has sessions."""
    fast: float = 8.0
    """After this time without a heartbeat the worker is declared dead if its sessions are gone too."""
    tasks: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Longer leases of single tasks."""

    def of(self, task: str | None) -> float:
        """Return the lease of a job of this task."""
        return max(self.seconds, self.tasks.get(task or "", 0.0))

    @property
    def margin(self) -> float:
        """How long before the end of a lease its worker gives up its jobs."""
        return min(_MARGIN, self.seconds / 4)

    @property
    def fast_margin(self) -> float:
        """The margin of a worker whose sessions are gone."""
        return min(_FAST_MARGIN, self.fast / 8)


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is known to the database. Unknown values are None: Node and Rust workers publish less."""

    id: str
    """The value of the column `locked_by`."""
    language: str | None = None
    version: str | None = None
    host: str | None = None
    pid: int | None = None
    concurrency: int | None = None
    tasks: Sequence[str] | None = None
    started_at: datetime | None = None
    last_heartbeat_at: datetime | None = None
    seconds_since_heartbeat: float | None = None
    """Seconds since the last heartbeat, by the database's clock."""
    state: str | None = None
    """The last state that the worker published, see `Health`; or ``silent``, or ``dead``."""
    died_at: datetime | None = None
    """When the worker was declared dead; None if it was not."""
    lease: Mapping[str, Any] | None = None
    """The worker's lease; None if it is not a Python worker."""
    reason: str | None = None
    """Why the worker is not ready. For a worker that is ready, what else fails: see `Health`."""
    jobs: int = 0
    """The number of jobs that the worker has locked."""
    queues: int = 0
    """The number of serial queues that the worker has locked."""

    @property
    def is_ours(self) -> bool:
        """Whether it is a Python worker. These release the jobs of dead workers and publish their tasks."""
        return self.lease is not None

    @property
    def is_alive(self) -> bool:
        """Whether a recent heartbeat is recorded. False for workers that send no heartbeats."""
        return self.status not in {"silent", "dead"} if self.is_ours else self.status == "alive"

    @property
    def status(self) -> str:
        """The status in one word: for a Python worker, its state.

        For other workers ``alive`` or ``silent`` if they send heartbeats, as the Rust port does, and
        ``unknown`` if they don't, like Node workers.
        """
        if not self.is_ours and self.seconds_since_heartbeat is not None:
            return "alive" if self.seconds_since_heartbeat < _RUST_LEASE else "silent"
        return self.state or "unknown"

    @property
    def name(self) -> str:
        """The worker's id, with its process id and host if they are known."""
        return f"{self.id} (pid {self.pid} on {self.host})" if self.host else self.id


class RecoveryAction(msgspec.Struct, frozen=True):
    """What to do with a job whose worker died. Create one with a class method.

    An `on_recovery` hook returns it.
    """

    action: Literal["default", "reschedule", "fail", "leave"] = "default"
    delay: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.action not in {"default", "reschedule", "fail", "leave"}:
            raise ConfigurationError(
                f"Unknown recovery action {self.action!r}: it must be 'default', 'reschedule', 'fail' or "
                "'leave'."
            )

    @classmethod
    def default(cls) -> Self:
        """Run the job again at once, as without a hook. If its next worker dies too, delay the next run."""
        return cls()

    @classmethod
    def reschedule(cls, delay: float | timedelta) -> Self:
        """Run the job again after a delay, in seconds or as a timedelta."""
        return cls("reschedule", seconds("delay", delay))

    @classmethod
    def fail(cls, reason: str | None = None) -> Self:
        """Fail the job permanently."""
        return cls("fail", None, reason)

    @classmethod
    def leave(cls) -> Self:
        """Leave the job and its serial queue locked, until they are unlocked by hand or after four hours."""
        return cls("leave")


class RecoveredWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A dead worker, and the jobs and queues that were released, or would be in a dry run."""

    worker: WorkerInfo
    silence: float
    """How long no heartbeat of the worker was observed, in seconds."""
    jobs: Sequence[Job]
    queues: Sequence[str]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a worker."""

    state: str
    """``starting``, ``ready``, ``unreachable`` (no database), ``fenced`` (it had to give up its jobs),
    ``blocked`` (a task blocks the event loop), ``exhausted`` (too many threads still run after the timeouts
    of their jobs), ``refused`` (the database rejects too many outcomes), ``flags_unavailable``
    (forbidden_flags fails), ``incomplete`` (a service of the worker has ended), ``stopping`` or
    ``stopped``."""
    live: bool
    """Whether the worker can recover without a restart."""
    ready: bool
    """Whether the worker claims jobs when some are due and a slot is free."""
    reason: str | None = None
    """Why the worker is not ready. For a ready worker: calls that wait for a connection, services that fail,
    and how many jobs the database refuses to record or to let be claimed."""
    worker_id: str
    running: int
    """The number of running jobs."""
    prefetched: int = 0
    """The number of claimed jobs that wait for a slot."""
    abandoned: int = 0
    """The number of threads that still run after the timeouts of their jobs."""
    concurrency: int
    last_exchange: float | None
    """Seconds since the database last answered an exchange."""
    last_heartbeat: float | None
    """Seconds since the last recorded heartbeat; None if there are none."""
    listening: bool
    """Whether the worker receives notifications about new jobs."""
    loop_lag: float = 0.0
    """Seconds for which a callback last had to wait until the event loop ran it; a running task that blocks
    the loop counts too."""
    connection_wait: float | None = None
    """Seconds that a call has waited for a connection, if more than ten. `reason` names the tasks that hold
    the connections. The worker itself uses other connections, so it may still be ready."""
    failing: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Services of the worker that have ended, or have failed for a minute, with the reason. Jobs run without
    them, so a service that fails and retries does not make the worker unready."""


def parse_address(address: str | int) -> tuple[str | None, int]:
    """Return the host and port of an address.

    Without a host it is this machine only (127.0.0.1). An empty host means all addresses of the machine.

    Raises:
        ConfigurationError: The address is not a port or ``host:port``.

    >>> parse_address(8080), parse_address("0.0.0.0:80"), parse_address(":80")
    (('127.0.0.1', 8080), ('0.0.0.0', 80), (None, 80))
    """
    match = None if isinstance(address, bool) else _ADDRESS.fullmatch(str(address))
    if match is None or not 0 < int(match["port"]) <= 65535:  # noqa: PLR2004 - the highest port
        raise ConfigurationError(f"health is {address!r}; it must be a port, or host:port.")
    host = "127.0.0.1" if match["host"] is None else match["host"].strip("[]")
    return host or None, int(match["port"])
