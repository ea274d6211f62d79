"""When a worker was last known to live, for its processes, which go on while it is frozen."""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from graphile_worker.liveness import since_boot

_MOMENT = struct.Struct("d")


_MOST_KEPT = 32


class _Silence(NamedTuple):
    """A time without a beat, by the clock that counts since boot."""

    since: float
    until: float


class Pulse:
    """A moment in a piece of memory that processes share. Any thread may write it.

    Args:
        file: The file that holds it, if another process has made it.
        shortest_silence: How many seconds without a beat are remembered, for `was_silent`.
    """

    def __init__(self, file: int | None = None, *, shortest_silence: float = math.inf) -> None:
        self._shortest_silence = shortest_silence
        self._silences: deque[_Silence] = deque(maxlen=_MOST_KEPT)
        self._writing = threading.Lock()
        if file is None:
            with tempfile.TemporaryFile() as made:
                made.write(_MOMENT.pack(0.0))
                made.flush()
                file = os.dup(made.fileno())
        self.file = file
        self._memory = mmap.mmap(file, _MOMENT.size)

    @property
    def last(self) -> float:
        """When the last beat that was confirmed was sent."""
        moment: float = _MOMENT.unpack(self._memory[:])[0]
        return moment

    def beat(self, sent: float) -> None:
        """One that was sent then is confirmed."""
        with suppress(ValueError), self._writing:  # it was closed meanwhile
            last = self.last
            self._memory[:] = _MOMENT.pack(sent)
            # The clock is read after writing: until then processes saw the last moment.
            silence = _Silence(last, since_boot())
            if last and silence.until - silence.since >= self._shortest_silence:
                self._silences.append(silence)

    def was_silent(self, seconds: float, *, since: float) -> bool:
        """Whether processes may have seen no beat for so many seconds, at some time since then."""
        with self._writing:
            current = _Silence(self.last, since_boot())
            return any(
                silence.until >= since and silence.until - silence.since >= seconds
                for silence in (*self._silences, current)
            )

    def close(self) -> None:
        """It is not needed any more."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.file)
