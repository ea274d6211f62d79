"""How long a worker may be silent, and what it promises for that."""

from __future__ import annotations

from typing import NamedTuple


class Leases(NamedTuple):
    """The settings of `run` that decide when others take over; by default its defaults."""

    heartbeat_interval: float = 3.0
    lease: float = 38.0
    fast_lease: float = 8.0
    shutdown_grace: float = 5.0

    @classmethod
    def scaled(cls, scale: float) -> Leases:
        """All of them, so many times as long."""
        return cls(*(seconds * scale for seconds in cls()))

    @property
    def scale(self) -> float:
        """How they compare with the defaults."""
        return self.lease / Leases().lease

    @property
    def long_silence(self) -> float:
        """After how long without a beat a worker may have lost its jobs, or given them up.

        Less than the lease, because a beat is due only now and then, and because a worker that cannot
        confirm one gives up a quarter of the lease before others take over.
        """
        return self.lease * 3 / 4 - self.heartbeat_interval

    @property
    def short_silence(self) -> float:
        """The same, if its sessions are gone too."""
        return self.fast_lease - 2 * self.heartbeat_interval

    @property
    def promise_after_death(self) -> float:
        """Within how long the jobs of a killed worker run again."""
        return 15.0 * self.scale

    @property
    def promise_after_silence(self) -> float:
        """Within how long those of a worker run again that is frozen or cut off."""
        return 45.0 * self.scale
