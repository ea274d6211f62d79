"""The progress of a run, on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """A progress line that is updated on a terminal, or one line per step elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._begin = time.monotonic()
        self._terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._begin

    def step(self, name: str) -> None:
        """Show the next step."""
        text = f"{self._done + 1}/{self._steps} {name}, {_clock(self.seconds)}"
        if self._done:
            # Steps differ in length, so this is an estimate.
            text += f", about {_clock(self.seconds / self._done * (self._steps - self._done))} left"
        self._done += 1
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
