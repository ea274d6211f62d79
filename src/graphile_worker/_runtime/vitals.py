"""What a worker knows of its own life: until when nobody else may take its jobs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphile_worker.liveness import since_boot

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphile_worker.liveness import Lease


class Vitals:
    """Written by the heartbeat's thread and by the worker's, read by both: one value at a time.

    Others declare a worker dead when its beat stands still for as long as its lease says. If none of its
    sessions is there either they wait for less. Both count from when a beat was written, which is not before
    it was sent; so what we promise ourselves counts from when the last confirmed one was sent.
    """

    def __init__(self, lease: Lease | None, clock: Callable[[], float] = since_boot) -> None:
        self.lease = lease
        self.clock = clock
        self._surely = min(lease.seconds - lease.margin, lease.fast - lease.fast_margin) if lease else 0.0
        self.confirmed: float | None = None
        """When the last beat that was recorded was sent."""
        self.proven = -math.inf
        """When the last exchange that was answered was sent: its session was there then."""
        self.has_session = False
        """Whether the heartbeat has a connection, as far as it knows."""
        self.says_sessions = False
        """Whether we told others that our sessions mean something."""
        self.server_down = False
        """Whether the server was seen to be down: then nobody can declare us dead."""
        self.dead = False
        """Whether others have declared us dead, or somebody removed our row."""
        self.on_confirm: Callable[[float], None] = lambda _sent: None
        """Called by whoever confirms a beat, with when it was sent."""

    def confirm(self, sent: float) -> None:
        """A beat that was sent then is recorded; the answer may be late."""
        self.confirmed = max(sent, self.confirmed or sent)
        self.on_confirm(self.confirmed)
        self.server_down = False

    def exchanged(self, sent: float) -> None:
        """An exchange that was sent then was answered."""
        self.proven = sent

    def ends(self, task: str | None = None) -> float:
        """When a job of that task is to be given up, by our clock, if no other beat is recorded."""
        if self.lease is None:
            return math.inf
        if self.confirmed is None:
            return -math.inf
        end = self.confirmed + self.lease.of(task) - self.lease.margin
        longer = self.lease.of(task) > self.lease.seconds
        if self.says_sessions and not (longer or self.has_session or self.server_down):
            fast = max(self.confirmed, self.proven) + self.lease.fast - self.lease.fast_margin
            end = min(end, fast)
        return end

    def patience(self, task: str | None = None) -> float | None:
        """For how long after a beat what runs a job of that task may do so on its own; None: for ever.

        It is longer than we have ourselves to stop it, and shorter than others wait.
        """
        return None if self.lease is None else self.lease.of(task) - self.lease.margin / 2

    def unproven(self) -> None:
        """The session of the exchange is gone, and was perhaps seen by nobody."""
        self.proven = -math.inf

    def taken_from(self, task: str | None = None) -> float:
        """When others may take a job of that task at the earliest."""
        if self.lease is None or self.confirmed is None:
            return math.inf
        slow = self.confirmed + self.lease.of(task)
        ends = self.ends(task)
        return slow if ends >= slow - self.lease.margin else ends + self.lease.fast_margin

    def may_work(self, task: str | None = None) -> bool:
        """Whether a job of that task is ours for now."""
        if self.lease is None:
            return True
        # This is asked for each job, and nearly always answered by a beat that is young enough for any case.
        if self.confirmed is not None and not self.dead and self.clock() < self.confirmed + self._surely:
            return True
        # Who was declared dead has lost all but what has a longer lease.
        if self.dead and self.lease.of(task) <= self.lease.seconds:
            return False
        return self.clock() < self.ends(task)
