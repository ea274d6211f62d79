"""Serial queues that the worker holds without a job of theirs, until they are released.

They are found after a lost connection. A queue whose row another transaction has locked at that moment
cannot be released at once, and no other worker may release it while this one lives.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

_SHORTEST = 0.05
_LONGEST = 30.0


class SpareQueues:
    """Each queue by its id and the time of its lock: by that a later lock of our own is told apart."""

    def __init__(self) -> None:
        self._queues: dict[int, datetime] = {}
        self._tries = 0
        self.again: float | None = None
        """When (on the monotonic clock) to try again to release them; None if there are none."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def due(self) -> Mapping[int, datetime]:
        """Those to release now."""
        return self._queues if self.again is not None and self.again <= monotonic() else {}

    def replace(self, queues: Mapping[int, datetime]) -> None:
        """Forget all others: these were just read."""
        self._queues, self._tries = dict(queues), 0
        self.again = monotonic() if queues else None

    def keep(self, still_locked: Collection[int]) -> None:
        """All others are released, or locked by another worker."""
        self._queues = {queue_id: at for queue_id, at in self._queues.items() if queue_id in still_locked}
        self.again = monotonic() + min(_SHORTEST * 2.0**self._tries, _LONGEST) if self._queues else None
        self._tries = min(self._tries + 1, 20)
