"""Which calls may use a connection now, and which must wait: the bookkeeping of `Pool`, without any I/O.

There are two lanes. `own` is for statements of this library: adding jobs, cron, recovery. They are short.
`lent` is for user code, which may hold a connection for hours. Both share `most` connections. When user code
holds so many that fewer than `reserve` are left, own statements use up to `reserve` connections beyond
`most`. So user code never stops cron, recovery or adding.

After each method this holds: every call that still waits must wait. A new call therefore needs no look at the
queues, and no call overtakes another one of its lane.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C")


class Lane(Generic[C]):
    """What one kind of calls uses: how many connections, which calls wait, which connections are idle."""

    def __init__(self) -> None:
        self.used = 0
        self.waiting: deque[Ticket[C]] = deque()
        self.idle: list[C] = []
        self.is_closed = False
        """Whether connections that come back are not kept."""

    @property
    def is_quiet(self) -> bool:
        """Whether no connection is used, and no call waits for one."""
        return not self.used and not self.waiting

    def pick(self) -> C | None:
        """Return the idle connection that was used last, for a call that has a place."""
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
        """Take a place if there is one, and return whether there was."""
        if not self._has_place(lane):
            return False
        lane.used += 1
        return True

    def queue(self, lane: Lane[C], wake: Callable[[], None]) -> Ticket[C]:
        """Wait for a place; `wake` is called once it is taken. Call this only if `take` returned False."""
        self._numbers += 1
        ticket = Ticket(lane, self._numbers, wake)
        lane.waiting.append(ticket)
        return ticket

    def leave(self, ticket: Ticket[C]) -> None:
        """Stop waiting, and give the place back if it was granted meanwhile."""
        if ticket.granted:
            self.release(ticket.lane)
        elif ticket in ticket.lane.waiting:
            ticket.lane.waiting.remove(ticket)

    def release(self, lane: Lane[C]) -> None:
        """Give a place back, and grant it to a call that waits."""
        lane.used -= 1
        while (ticket := self._next()) is not None:
            ticket.lane.used += 1
            ticket.granted = True
            ticket.wake()

    def surplus(self, lane: Lane[C]) -> C | None:
        """Return the connection to close before a call that has a place in `lane` opens another.

        There is one if the server would see more than `most` and `reserve` together. It is idle, and of the
        other lane, because a call opens a connection only if its own lane has no idle one.
        """
        own, lent = self.own, self.lent
        opened = own.used + lent.used + len(own.idle) + len(lent.idle)
        other = lent if lane is own else own
        return other.idle.pop(0) if other.idle and opened > self.most + self.reserve else None

    def clear(self) -> list[C]:
        """Return all idle connections, and keep them no longer."""
        idle = [*self.own.idle, *self.lent.idle]
        self.own.idle.clear()
        self.lent.idle.clear()
        return idle

    def _has_place(self, lane: Lane[C]) -> bool:
        own = self.own
        return own.used + self.lent.used < self.most or (lane is own and own.used < self.reserve)

    def _next(self) -> Ticket[C] | None:
        """The call to grant a place now: of all that may have one, that which has waited longest."""
        own, lent = self.own.waiting, self.lent.waiting
        if not own and not lent:
            return None
        heads = [lane.waiting[0] for lane in (self.own, self.lent) if lane.waiting and self._has_place(lane)]
        if not heads:
            return None
        first = min(heads, key=lambda ticket: ticket.number)
        return first.lane.waiting.popleft()
