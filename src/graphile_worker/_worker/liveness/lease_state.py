"""`LeaseState`: until when a worker may run its jobs, because no other worker may claim them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphile_worker.workers import since_boot

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.workers import Lease


class LeaseState:
    """The state of a worker's lease. Two threads use it: the heartbeat's and the worker's.

    They need no lock, because each reads and writes single values.

    Other workers declare a worker dead when no heartbeat was recorded for as long as its lease. If none of
    its sessions is left, they wait only for its fast lease. Both count from the time when the heartbeat was
    recorded. To be on the safe side, the lease here counts from the time when it was sent.

    Args:
        lease: The worker's lease; None without recovery.
        clock: Returns the seconds since boot.
    """

    def __init__(self, lease: Lease | None, clock: Callable[[], float] = since_boot) -> None:
        self.lease = lease
        self.clock = clock
        self._shortest = min(lease.seconds - lease.margin, lease.fast - lease.fast_margin) if lease else 0.0
        self.confirmed: float | None = None
        """The time when the last recorded heartbeat was sent."""
        self.last_exchange = -math.inf
        """The time when the last answered exchange was sent. Its session existed then."""
        self.has_session = False
        """Whether the heartbeat has a connection, as far as it knows."""
        self.sessions_announced = False
        """Whether the worker's row names its sessions, so that other workers check whether they exist."""
        self.server_down = False
        """Whether the server was seen to be down. Then no other worker can declare this one dead."""
        self.dead = False
        """Whether another worker has declared this one dead, or the worker's row was removed."""
        self.on_confirm: Callable[[float], None] = lambda _sent: None
        """Called with the time of each confirmed heartbeat, on the thread that confirms it."""

    def confirm(self, sent: float) -> None:
        """Record that a heartbeat sent at this time is in the database."""
        self.confirmed = max(sent, self.confirmed or sent)
        self.on_confirm(self.confirmed)
        self.server_down = False

    def exchanged(self, sent: float) -> None:
        """Record that an exchange sent at this time was answered."""
        self.last_exchange = sent

    def ends(self, task: str | None = None) -> float:
        """Return when, by `clock`, a job of the task has to be given up unless a heartbeat is recorded."""
        if self.lease is None:
            return math.inf
        if self.confirmed is None:
            return -math.inf
        end = self.confirmed + self.lease.of(task) - self.lease.margin
        longer = self.lease.of(task) > self.lease.seconds
        if self.sessions_announced and not (longer or self.has_session or self.server_down):
            fast = max(self.confirmed, self.last_exchange) + self.lease.fast - self.lease.fast_margin
            end = min(end, fast)
        return end

    def max_silence(self, task: str | None = None) -> float | None:
        """Return for how long after a heartbeat a process may run a job of the task; None for no limit.

        It is longer than the time after which the worker gives up the job itself, and shorter than the time
        that other workers wait.
        """
        return None if self.lease is None else self.lease.of(task) - self.lease.margin / 2

    def exchange_lost(self) -> None:
        """Record that the exchange's session is gone, so other workers may not have seen it."""
        self.last_exchange = -math.inf

    def takeover_time(self, task: str | None = None) -> float:
        """Return the earliest time when other workers may claim a job of the task."""
        if self.lease is None or self.confirmed is None:
            return math.inf
        slow = self.confirmed + self.lease.of(task)
        ends = self.ends(task)
        return slow if ends >= slow - self.lease.margin else ends + self.lease.fast_margin

    def may_work(self, task: str | None = None) -> bool:
        """Return whether no other worker may claim a job of the task now."""
        if self.lease is None:
            return True
        # This is called for each job. Nearly always the last heartbeat is recent enough for any task.
        if self.confirmed is not None and not self.dead and self.clock() < self.confirmed + self._shortest:
            return True
        # A worker that was declared dead has lost all jobs except those with a longer lease.
        if self.dead and self.lease.of(task) <= self.lease.seconds:
            return False
        return self.clock() < self.ends(task)
