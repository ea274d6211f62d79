"""Whether the database can be used; said once when it cannot, and once when it can again."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from graphile_worker._runtime.service import pause_after

if TYPE_CHECKING:
    from graphile_worker.logs import ScopedLogger


class Weather:
    """Outages of the database, as a worker sees them."""

    def __init__(self, logger: ScopedLogger) -> None:
        self._logger = logger
        self._since: float | None = None
        self._why = ""
        self._failures = 0
        self._ask_again = 0.0

    @property
    def pause(self) -> float:
        """Seconds for which it is not to be asked, whatever else happens."""
        return max(0.0, self._ask_again - monotonic()) if self._ask_again else 0.0

    @property
    def fair(self) -> bool:
        """Whether the database answered when it was last asked."""
        return self._since is None

    @property
    def why(self) -> str:
        """The reason of the current outage, or of the last one."""
        return self._why

    def outage(self, why: Exception) -> None:
        """It did not."""
        self._failures += 1
        self._why = str(why)
        if self._since is None:
            self._since = monotonic()
            self._logger.warning(
                "The database cannot be used: %s. Jobs that run go on; trying again until it can.", why
            )
        self._ask_again = monotonic() + pause_after(self._failures)

    def hurry(self) -> None:
        """Ask again at once: there is not much time left."""
        self._ask_again = 0.0

    def answered(self) -> None:
        """It did."""
        if self._since is None:
            return
        self._logger.info("The database is back after %.1f s", monotonic() - self._since)
        self._since, self._failures, self._ask_again = None, 0, 0.0
