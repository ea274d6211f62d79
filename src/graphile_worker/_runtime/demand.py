"""How many jobs to claim, and which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphile_worker._db.exchange import NOTHING, Wish
from graphile_worker._runtime.gates import Passage

if TYPE_CHECKING:
    from graphile_worker._runtime.clock import Clock
    from graphile_worker._runtime.flags import ForbiddenFlags
    from graphile_worker._runtime.in_hand import InHand
    from graphile_worker._runtime.looks import Looks
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker.options import WorkerOptions


class Demand:
    """Knows what there is room for: in the slots, and with prefetch beside them."""

    def __init__(
        self,
        options: WorkerOptions,
        in_hand: InHand,
        flags: ForbiddenFlags,
        looks: Looks,
        clock: Clock,
        vitals: Vitals,
    ) -> None:
        self._vitals = vitals
        self._prefetch = options.prefetch
        self._in_hand = in_hand
        self._slots, self._prefetched = in_hand.slots, in_hand.prefetched
        self._gates = in_hand.gates
        self._flags = flags
        self._looks = looks
        self._clock = clock
        self.prefetching = options.prefetch > 0
        """Off while jobs that were claimed ahead have waited too long for a slot."""
        self.ended = self.closed = False
        """Whether nothing more is to be claimed; whether nothing is for now, because middleware says so."""

    def resume(self) -> None:
        """A slot has become free: claim ahead (again)."""
        self.prefetching = self._prefetch > 0

    @property
    def ahead(self) -> int:
        """How many jobs to claim beyond the slots."""
        return self._prefetch if self.prefetching and self._flags.unused else 0

    @property
    def foreseeable(self) -> bool:
        """Whether we can say what to claim before we know which jobs the last claim brought."""
        return self.ahead > 0 and not self._gates

    @property
    def room(self) -> int:
        """How many jobs we would take."""
        if self.ended or not self._vitals.may_work():
            return 0
        room = self._slots.free + self.ahead - len(self._prefetched)
        # What is in hand may all be waiting for its queue: then the free slots want something else.
        return max(room, self._slots.free - self._prefetched.ready)

    async def wish(self, *, has_results: bool, coming: int = 0) -> Wish | None:
        """What to claim now; None if nobody can say which flags are forbidden.

        Args:
            has_results: Whether there are results to be recorded: then a look costs little.
            coming: How many jobs are claimed that we have not in hand yet.
        """
        self.closed = False
        if self.room <= coming or not (has_results or self._looks.due()):
            return NOTHING
        flags = self._flags.fixed
        if flags is None and (flags := await self._flags.current()) is None:
            return None
        wanted = self.room - coming
        if wanted <= 0:
            return NOTHING
        # Without prefetch a queue gives one job at a time: the next may run elsewhere. And so if there is
        # room in the slots alone, because all that is in hand waits for its queue.
        for_slots = self._slots.free - self._prefetched.ready - coming
        run_length = self._prefetch if self.ahead and wanted > for_slots else 1
        if not has_results:
            wanted = min(wanted, self._looks.told or wanted)
        passage = self._gates.pass_through(wanted, self._in_hand.unended) if self._gates else Passage(wanted)
        self.closed = passage.wanted <= 0
        if self.closed:
            self._looks.postpone()  # until a job has ended, as a rule
            return NOTHING
        return Wish(
            wanted=passage.wanted,
            tasks=passage.tasks,
            partial=passage.partial,
            run_length=run_length,
            forbidden_flags=flags or None,
            as_of=self._clock.as_of,
            mark=self._looks.begin(),
            after_queue=self._looks.after_queue(has_results=has_results),
        )
