"""The leases of the workers, and the recovery limits that follow from them."""

from __future__ import annotations

from typing import NamedTuple


class Leases(NamedTuple):
    """The settings of `run` that decide when other workers recover a worker's jobs, with their defaults."""

    heartbeat_interval: float = 3.0
    lease: float = 38.0
    fast_lease: float = 8.0
    shutdown_grace: float = 5.0

    @classmethod
    def scaled(cls, scale: float) -> Leases:
        """Return the default leases, multiplied by a factor."""
        return cls(*(seconds * scale for seconds in cls()))

    @property
    def scale(self) -> float:
        """The factor by which the leases differ from the defaults."""
        return self.lease / Leases().lease

    @property
    def long_silence(self) -> float:
        """The seconds without a heartbeat after which a worker may have lost its jobs, or given them up.

        Less than the lease, for two reasons. When the silence starts, the last heartbeat may be one interval
        old. And a worker that cannot confirm a heartbeat gives up its jobs a quarter of the lease early.
        """
        return self.lease * 3 / 4 - self.heartbeat_interval

    @property
    def short_silence(self) -> float:
        """The same for a worker whose sessions are gone too."""
        return self.fast_lease - 2 * self.heartbeat_interval

    @property
    def recovery_limit_after_death(self) -> float:
        """The seconds within which a killed worker's jobs run again."""
        return 15.0 * self.scale

    @property
    def recovery_limit_after_silence(self) -> float:
        """The seconds within which the jobs of a frozen or disconnected worker run again."""
        return 45.0 * self.scale
