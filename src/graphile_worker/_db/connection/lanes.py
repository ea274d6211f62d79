"""Decide which calls may use a connection now, and which must wait: the state of `Pool`, without any I/O.

There are two lanes. `own` is for the library's statements: adding jobs, cron, recovery. They are short.
`lent` is for user code, which may hold a connection for hours. Both share `most` connections. When user code
holds so many that fewer than `reserve` are left, own statements use up to `reserve` connections beyond
`most`. So user code never blocks cron, recovery or adding jobs.

Invariant after each method: no waiting call could get a connection. So a new call doesn't have to check the
queues, and no call overtakes an earlier call in its lane.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from graphile_worker.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C")
RESERVE = 2
"""How many connections are kept for own statements, if there are enough."""


class Lane(Generic[C]):
    """The connections in use, the waiting calls and the idle connections of one kind of call."""

    def __init__(self) -> None:
        self.used = 0
        self.waiting: deque[Ticket[C]] = deque()
        self.idle: list[C] = []
        self.is_closed = False
        """Whether returned connections are closed instead of kept."""

    @property
    def is_quiet(self) -> bool:
        """Whether no connection is in use and no call waits for one."""
        return not self.used and not self.waiting

    def pick(self) -> C | None:
        """Remove and return the idle connection that was used last, for a call that has a place."""
        return self.idle.pop() if self.idle else None


class Ticket(Generic[C]):
    """A call that waits for a connection."""

    def __init__(self, lane: Lane[C], number: int, wake: Callable[[], None]) -> None:
        self.lane = lane
        self.number = number
        self.wake = wake
        self.granted = False


class Lanes(Generic[C]):
    """The two lanes of a pool.

    Args:
        most: How many connections both lanes may use together.
        reserve: How many connections `own` may always use, beyond `most` if necessary.
    """

    def __init__(self, most: int, reserve: int) -> None:
        self.most = most
        self.reserve = reserve
        self.own: Lane[C] = Lane()
        self.lent: Lane[C] = Lane()
        self._numbers = 0

    def take(self, lane: Lane[C]) -> bool:
        """Take a place if one is free, and return whether it was."""
        if not self._has_place(lane):
            return False
        lane.used += 1
        return True

    def queue(self, lane: Lane[C], wake: Callable[[], None]) -> Ticket[C]:
        """Queue a call for a place, after `take` returned False. `wake` is called once it has one."""
        self._numbers += 1
        ticket = Ticket(lane, self._numbers, wake)
        lane.waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket[C]) -> None:
        """Stop waiting, and release the place if it was granted meanwhile."""
        if ticket.granted:
            self.release(ticket.lane)
        elif ticket in ticket.lane.waiting:
            ticket.lane.waiting.remove(ticket)

    def release(self, lane: Lane[C]) -> None:
        """Release a place, and grant it to a waiting call."""
        lane.used -= 1
        while (ticket := self._next()) is not None:
            ticket.lane.used += 1
            ticket.granted = True
            ticket.wake()

    def surplus(self, lane: Lane[C]) -> C | None:
        """Return the connection to close before a call that has a place in `lane` opens another.

        Returns a connection if more than `most` + `reserve` would be open. It is an idle connection of the
        other lane, because a call opens a connection only if its own lane has no idle one.
        """
        own, lent = self.own, self.lent
        opened = own.used + lent.used + len(own.idle) + len(lent.idle)
        other = lent if lane is own else own
        return other.idle.pop(0) if other.idle and opened > self.most + self.reserve else None

    def clear(self) -> list[C]:
        """Remove and return all idle connections."""
        idle = [*self.own.idle, *self.lent.idle]
        self.own.idle.clear()
        self.lent.idle.clear()
        return idle

    def _has_place(self, lane: Lane[C]) -> bool:
        own = self.own
        return own.used + self.lent.used < self.most or (lane is own and own.used < self.reserve)

    def _next(self) -> Ticket[C] | None:
        """Remove and return the call to grant a place: of the eligible ones, the one that waited longest."""
        own, lent = self.own.waiting, self.lent.waiting
        if not own and not lent:
            return None
        heads = [lane.waiting[0] for lane in (self.own, self.lent) if lane.waiting and self._has_place(lane)]
        if not heads:
            return None
        first = min(heads, key=lambda ticket: ticket.number)
        return first.lane.waiting.popleft()


def divide_pool(max_size: int, dedicated: int) -> tuple[int, int]:
    """Return how many connections of a caller's pool both lanes share, and how many own statements add."""
    share = max_size - dedicated
    if dedicated and share < 2:  # noqa: PLR2004 - one for each lane
        raise ConfigurationError(
            f"The pool passed as pool= is too small: max_size is {max_size}. A worker keeps {dedicated} "
            "connections for itself and needs one to add jobs and recover other workers, and its tasks need "
            f"one. Create the pool with max_size={dedicated + 2} or more."
        )
    reserve = RESERVE if share > RESERVE + 1 else min(1, share - 1)
    return share - reserve, reserve
