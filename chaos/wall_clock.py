"""A wall clock that can be shifted, for one process and its `graphile_worker` modules."""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta, tzinfo
from typing import Any

_real_time = time.time


class WallClock:
    """The clock behind `datetime.now` and `time.time` in the worker's modules, once it is installed."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def install(self) -> None:
        """Make all modules of the worker use this clock. Call it after they are imported."""
        shifted = self._datetime()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "graphile_worker" and vars(module).get("datetime") is datetime:
                module.__dict__["datetime"] = shifted
        time.time = lambda: _real_time() + self.ahead

    def _datetime(self) -> type[datetime]:
        clock = self

        class AnyDatetime(type):
            def __instancecheck__(cls, instance: object) -> bool:
                # A plain datetime counts as an instance too.
                return isinstance(instance, datetime)

        class ShiftedDatetime(datetime, metaclass=AnyDatetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return datetime.now(tz) + timedelta(seconds=clock.ahead)

        return ShiftedDatetime
