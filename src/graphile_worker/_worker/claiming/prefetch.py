"""How many jobs to claim beyond the free slots.

A slot that finishes a tiny job would wait a whole exchange for the next one. `AutoPrefetch` claims ahead
what the slots will finish during an exchange: nothing for long jobs, hundreds for tiny ones. `FixedPrefetch`
claims as many as the user configured.
"""

from __future__ import annotations

import math
from typing import Protocol

MAX_AUTO = 500
"""The maximum number of jobs that `AutoPrefetch` claims ahead."""
AUTO_TTL = 0.05
"""Seconds after which a job that `AutoPrefetch` claimed goes back, because no slot has started it."""
FIXED_TTL = 300.0
_FIRST_STEP = 4
_MARGIN = 2.0  # exchanges, because the next one is sent while the jobs of the last one still run
_MAX_WAIT = 0.4  # of the TTL: a job claimed ahead should start long before it goes back
_LONG = 0.01  # seconds: the estimated run time follows a longer job at once
_EXCHANGE_WEIGHT, _INTERVAL_WEIGHT, _JOB_WEIGHT, _LONG_JOB_WEIGHT = 0.2, 0.3, 0.05, 0.5
_PROBE = 0.7  # how much faster the slots are assumed to be after they had nothing to do


class Prefetch(Protocol):
    """The policy that decides how many jobs to claim ahead."""

    ttl: float
    """Seconds after which a job goes back if no slot has started it."""
    maximum: int
    """The largest possible `size`."""

    @property
    def size(self) -> int:
        """How many jobs to claim beyond the free slots."""
        ...

    @property
    def run_length(self) -> int:
        """How many consecutive jobs of one serial queue to claim."""
        ...

    def record_job(self, duration: float) -> None:
        """Learn that a job has ended after so many seconds."""
        ...

    def record_claim(self, duration: float, *, is_limited: bool, queued: int, now: float) -> None:
        """Learn from the reply to a claim.

        Args:
            duration: How long the exchange took, in seconds.
            is_limited: Whether there may be more jobs than it was allowed to claim.
            queued: How many jobs still waited for a slot when the reply came.
            now: The time in seconds.
        """
        ...

    def record_expiry(self) -> None:
        """Learn that jobs claimed ahead went back unstarted."""
        ...


class FixedPrefetch:
    """Always the same number of jobs."""

    def __init__(self, size: int, ttl: float = FIXED_TTL) -> None:
        self.size = self.run_length = self.maximum = size
        self.ttl = ttl

    def record_job(self, duration: float) -> None:
        """Ignore the job."""

    def record_claim(self, duration: float, *, is_limited: bool, queued: int, now: float) -> None:
        """Ignore the claim."""

    def record_expiry(self) -> None:
        """Ignore the expiry."""


class AutoPrefetch:
    """As many jobs as the slots will finish during an exchange.

    The number grows step by step, while there are more jobs than claims may take. It falls at once when jobs
    turn out to be long.

    Args:
        concurrency: The number of slots.
        ttl: Seconds after which a job goes back if no slot has started it.
    """

    maximum = MAX_AUTO

    def __init__(self, concurrency: int, ttl: float = AUTO_TTL) -> None:
        self.ttl = ttl
        self.concurrency = concurrency
        self._run_time: float | None = None
        self._interval = 0.0  # between two jobs that end, while the slots are never without a job
        self._exchange_time = 0.0
        self._allowed = 0
        self._ended = 0
        self._last_claim = 0.0

    @property
    def size(self) -> int:
        """How many jobs to claim beyond the free slots."""
        # While the worker is mostly idle, there is nothing to compute.
        return self._allowed and min(self._allowed, int(self._horizon / self._fastest_interval))

    @property
    def run_length(self) -> int:
        """How many consecutive jobs of one serial queue to claim: what one slot will finish."""
        return max(1, min(self.size, int(self._horizon / (self._run_time or math.inf))))

    @property
    def _horizon(self) -> float:
        """Seconds within which a job claimed ahead should start."""
        return min(_MARGIN * self._exchange_time, _MAX_WAIT * self.ttl)

    @property
    def _fastest_interval(self) -> float:
        """Seconds between two jobs that end, if all slots are busy."""
        if self._run_time is None:
            return math.inf
        return max(self._interval, self._run_time / self.concurrency)

    def record_job(self, duration: float) -> None:
        """Learn that a job has ended after so many seconds."""
        self._ended += 1
        duration = max(duration, 1e-6)
        run_time = self._run_time
        if run_time is None:
            self._run_time = duration
        else:
            is_long = duration > _LONG and duration > run_time
            self._run_time = run_time + (duration - run_time) * (_LONG_JOB_WEIGHT if is_long else _JOB_WEIGHT)

    def record_claim(self, duration: float, *, is_limited: bool, queued: int, now: float) -> None:
        """Learn from the reply to a claim.

        Args:
            duration: How long the exchange took, in seconds.
            is_limited: Whether there may be more jobs than it was allowed to claim.
            queued: How many jobs still waited for a slot when the reply came.
            now: The time in seconds.
        """
        self._exchange_time += (duration - self._exchange_time) * _EXCHANGE_WEIGHT
        if queued and self._ended:
            interval = (now - self._last_claim) / self._ended
            self._interval += (interval - self._interval) * _INTERVAL_WEIGHT
        elif is_limited:
            self._interval *= _PROBE
        self._ended, self._last_claim = 0, now
        most = MAX_AUTO if is_limited else self._allowed
        self._allowed = min(most, max(_FIRST_STEP, 2 * self.size))

    def record_expiry(self) -> None:
        """Learn that jobs claimed ahead went back unstarted: the running jobs are longer than estimated."""
        self._run_time = max(self._run_time or 0.0, self.ttl)
        self._allowed = 0
