"""When a worker was last known to live, for its processes, which go on while it is frozen."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from contextlib import suppress

_MOMENT = struct.Struct("d")


class Pulse:
    """A moment in a piece of memory that processes share. Any thread may write it, and nobody waits.

    Args:
        file: The file that holds it, if another process has made it.
    """

    def __init__(self, file: int | None = None) -> None:
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
        with suppress(ValueError):  # it was closed meanwhile
            self._memory[:] = _MOMENT.pack(sent)

    def close(self) -> None:
        """It is not needed any more."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.file)
