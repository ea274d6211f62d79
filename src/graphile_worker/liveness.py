"""Which workers live, what is promised about those that do not, and what becomes of their jobs."""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from graphile_worker.durations import seconds
from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime, timedelta
    from typing import TypeAlias

    from graphile_worker.job import Job

    OnRecovery: TypeAlias = Callable[[Job, "WorkerInfo"], "Recovery | Awaitable[Recovery | None] | None"]

MOST_OF_TASKS = 1000
"""How many bytes of its tasks' names a worker tells: they are in a row that is read for each exchange."""
_MARGIN = 8.0
_FAST_MARGIN = 1.0
_PATIENCE = 300.0
"""After so many seconds the Rust port takes a worker of its own for dead."""
_ADDRESS = re.compile(r"(?:(?P<host>[^:]*|\[[0-9a-fA-F:.]+\]):)?(?P<port>\d{1,5})")


def _clock_since_boot() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)  # there it does, unlike time.monotonic
    return time.monotonic


since_boot = _clock_since_boot()
"""Seconds on a clock that nobody sets, and that goes on while the machine sleeps."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """For how long a worker that is not heard from keeps its jobs. All in seconds."""

    interval: float = 3.0
    """How often it says that it lives."""
    seconds: float = 38.0
    """Without a beat for so long it is dead, whatever else there is to see."""
    fast: float = 8.0
    """Without a beat for so long it is dead, if its sessions are gone too."""
    tasks: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Longer leases of single tasks."""

    def of(self, task: str | None) -> float:
        """The lease of a job of that task."""
        return max(self.seconds, self.tasks.get(task or "", 0.0))

    @property
    def margin(self) -> float:
        """How long before the end of a lease its worker gives the work up."""
        return min(_MARGIN, self.seconds / 4)

    @property
    def fast_margin(self) -> float:
        """The same, for one whose sessions are gone."""
        return min(_FAST_MARGIN, self.fast / 8)


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as the database knows it. What is not known is None: Node's and Rust's workers say less."""

    id: str
    """As in the column locked_by."""
    language: str | None = None
    version: str | None = None
    host: str | None = None
    pid: int | None = None
    concurrency: int | None = None
    tasks: Sequence[str] | None = None
    started_at: datetime | None = None
    last_heartbeat_at: datetime | None = None
    silence: float | None = None
    """Seconds since then, by the database's clock."""
    state: str | None = None
    """What it last said of itself: see `Health`; or ``silent``, or ``dead``."""
    died_at: datetime | None = None
    """When it was declared dead, if it was."""
    lease: Mapping[str, Any] | None = None
    """What it asks of others, if it is one of ours."""
    reason: str | None = None
    """Why it is not ready; or if it is ready, what does not work as it should: see `Health`."""
    jobs: int = 0
    """How many jobs it holds."""
    queues: int = 0
    """How many serial queues it holds."""

    @property
    def is_ours(self) -> bool:
        """Whether this library runs it: it frees what others leave behind, and tells which tasks it has."""
        return self.lease is not None

    @property
    def lives(self) -> bool:
        """Whether it was heard from lately. Of one that sends no heartbeats that is not known: False."""
        return self.condition not in {"silent", "dead"} if self.is_ours else self.condition == "beats"

    @property
    def condition(self) -> str:
        """How it is, in a word: its state, if it is one of ours.

        Otherwise ``beats`` or ``silent`` if it sends heartbeats, as those of the Rust port do; ``unknown`` if
        it does not, as those of Node.
        """
        if not self.is_ours and self.silence is not None:
            return "beats" if self.silence < _PATIENCE else "silent"
        return self.state or "unknown"

    @property
    def name(self) -> str:
        """Its id, and where it runs."""
        return f"{self.id} (pid {self.pid} on {self.host})" if self.host else self.id


class Recovery(msgspec.Struct, frozen=True):
    """What is to become of a job whose worker died. Made by its class methods."""

    action: Literal["default", "reschedule", "fail", "leave"] = "default"
    delay: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.action not in {"default", "reschedule", "fail", "leave"}:
            raise ConfigurationError(f"There is no recovery {self.action!r}.")

    @classmethod
    def default(cls) -> Self:
        """As if there were no hook: it runs again at once, and if its next worker dies too, with back-off."""
        return cls()

    @classmethod
    def reschedule(cls, delay: float | timedelta) -> Self:
        """It runs again after so many seconds."""
        return cls("reschedule", seconds("delay", delay))

    @classmethod
    def fail(cls, reason: str | None = None) -> Self:
        """It does not run again."""
        return cls("fail", None, reason)

    @classmethod
    def leave(cls) -> Self:
        """It stays locked, until somebody frees it or four hours are over; and so does its queue."""
        return cls("leave")


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that died, and what was freed; or of a dry run, what would be."""

    worker: WorkerInfo
    silence: float
    """For how many seconds it was not heard from."""
    jobs: Sequence[Job]
    queues: Sequence[str]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is."""

    state: str
    """``starting``, ``ready``, ``unreachable`` (no database), ``fenced`` (it had to give up its jobs),
    ``blocked`` (a task blocks the event loop), ``exhausted`` (too many threads still run after the timeouts
    of their jobs), ``refused`` (the database refuses to record too many outcomes), ``unsure``
    (forbidden_flags fails), ``incomplete`` (a service of the worker has ended), ``stopping`` or
    ``stopped``."""
    live: bool
    """False if it will not get better by itself."""
    ready: bool
    """Whether it claims jobs when there are any and it has a free slot."""
    reason: str | None = None
    """Why it is not ready. Of a worker that is ready: calls that wait for a connection, services that fail,
    and how many jobs the database refuses to record or to let be claimed."""
    worker_id: str
    running: int
    """How many jobs run."""
    abandoned: int = 0
    """How many threads go on though the timeouts of their jobs are over."""
    concurrency: int
    last_exchange: float | None
    """Seconds since the database last answered the worker."""
    last_heartbeat: float | None
    """Seconds since the last heartbeat that was recorded; None if there are none."""
    listening: bool
    connection_wait: float | None = None
    """Seconds that a call has waited for a connection, if that is more than ten; `reason` names the tasks
    that hold them. The worker itself has other connections, so it may be ready."""
    failing: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Services of the worker that have ended, or have failed for a minute, each with the reason. Jobs run
    without them, so one that fails and tries again does not make the worker unready."""


def parse_address(address: str | int) -> tuple[str | None, int]:
    """Host and port; without a host it is this machine alone, with an empty one all its addresses.

    >>> parse_address(8080), parse_address("0.0.0.0:80"), parse_address(":80")
    (('127.0.0.1', 8080), ('0.0.0.0', 80), (None, 80))
    """
    match = None if isinstance(address, bool) else _ADDRESS.fullmatch(str(address))
    if match is None or not 0 < int(match["port"]) <= 65535:  # noqa: PLR2004 - the highest port
        raise ConfigurationError(f"health is {address!r}; it must be a port, or host:port.")
    host = "127.0.0.1" if match["host"] is None else match["host"].strip("[]")
    return host or None, int(match["port"])
