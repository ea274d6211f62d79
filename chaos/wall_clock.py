"""A wall clock that jumps, for one process and the code of the worker alone."""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta, tzinfo
from typing import Any

_real_time = time.time


class WallClock:
    """What `datetime.now` and `time.time` say in the worker's modules, once it is installed."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def install(self) -> None:
        """Let all modules of the worker see this clock; to be called when they are imported."""
        shown = self._datetime()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "graphile_worker" and vars(module).get("datetime") is datetime:
                module.__dict__["datetime"] = shown
        time.time = lambda: _real_time() + self.ahead

    def _datetime(self) -> type[datetime]:
        clock = self

        class AnyDatetime(type):
            def __instancecheck__(cls, instance: object) -> bool:
                # What others made is one too.
                return isinstance(instance, datetime)

        class Shown(datetime, metaclass=AnyDatetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Any:
                return datetime.now(tz) + timedelta(seconds=clock.ahead)

        return Shown
