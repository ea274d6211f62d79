"""`SharedHeartbeat`: the time of a worker's last heartbeat, in memory that its task processes share.

A task process runs on while its worker is frozen, and reads here for how long.
"""

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

from graphile_worker.workers import since_boot

_TIME = struct.Struct("d")
_MAX_SILENCES = 32


class _Silence(NamedTuple):
    """A period without a heartbeat, by the clock that counts since boot."""

    since: float
    until: float


class SharedHeartbeat:
    """The time of the last heartbeat. Any thread may write it.

    Args:
        file: The file descriptor of the memory, if another process has created it.
        shortest_silence: Seconds without a heartbeat from which a silence is remembered for `was_silent`.
    """

    def __init__(self, file: int | None = None, *, shortest_silence: float = math.inf) -> None:
        self._shortest_silence = shortest_silence
        self._silences: deque[_Silence] = deque(maxlen=_MAX_SILENCES)
        self._writing = threading.Lock()
        if file is None:
            with tempfile.TemporaryFile() as created:
                created.write(_TIME.pack(0.0))
                created.flush()
                file = os.dup(created.fileno())
        self.file = file
        self._memory = mmap.mmap(file, _TIME.size)

    @property
    def last(self) -> float:
        """The time when the last confirmed heartbeat was sent."""
        sent: float = _TIME.unpack(self._memory[:])[0]
        return sent

    def beat(self, sent: float) -> None:
        """Record a confirmed heartbeat that was sent at this time."""
        with suppress(ValueError), self._writing:  # the memory may have been closed in the meantime
            last = self.last
            self._memory[:] = _TIME.pack(sent)
            # The clock is read after writing, because until then processes saw the previous time.
            silence = _Silence(last, since_boot())
            if last and silence.until - silence.since >= self._shortest_silence:
                self._silences.append(silence)

    def was_silent(self, seconds: float, *, since: float) -> bool:
        """Return whether processes may have seen no heartbeat for `seconds`, at any time after `since`."""
        with self._writing:
            current = _Silence(self.last, since_boot())
            return any(
                silence.until >= since and silence.until - silence.since >= seconds
                for silence in (*self._silences, current)
            )

    def close(self) -> None:
        """Release the memory and its file."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.file)
