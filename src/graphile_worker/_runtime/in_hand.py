"""The jobs in hand: from the moment that they are claimed until it is recorded what became of them."""

from __future__ import annotations

from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from graphile_worker import events as event
from graphile_worker._runtime.adoption import reconcile
from graphile_worker._runtime.gates import Gates
from graphile_worker._runtime.prefetch import Prefetched
from graphile_worker._runtime.results import Results
from graphile_worker._runtime.slots import Slots
from graphile_worker.outcome import Cancelled, Completed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from graphile_worker._db.exchange import Held, Locked, Refusal, Reply, Result
    from graphile_worker._runtime.executor import Executor
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.options import WorkerOptions
    from graphile_worker.outcome import Cancel, Outcome


class InHand:
    """Begins jobs in their order, and keeps what became of them until it is recorded.

    Args:
        pool: Whose they are.
        options: How the worker is to run.
        executor: Runs a job.
        vitals: Whether they are ours.
        events: Where to tell.
        logger: The same, for people.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        options: WorkerOptions,
        executor: Executor,
        vitals: Vitals,
        events: Events,
        logger: ScopedLogger,
    ) -> None:
        self._pool = pool
        self._options = options
        self._vitals = vitals
        self._events = events
        self._logger = logger
        self.on_end: Callable[[], None] = lambda: None
        """Called when a job has ended."""
        # Not by their ids: a job that somebody freed while it ran may be claimed a second time.
        self.all: set[Held] = set()
        self.prefetched = Prefetched(events, pool)
        self.slots = Slots(pool, options.concurrency, executor, events, self._end_run)
        self.results = Results()
        self.gates = Gates(options.middleware, pool.tasks, logger, executor.abandoned)
        self._released = self._starting = False
        self.fenced = False
        """Whether we had to give up what we hold, because others may take it."""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def unended(self) -> Iterator[Held]:
        """Those that run, or wait for a slot."""
        return chain(self.slots.running, self.prefetched)

    def announce(self) -> None:
        """Tell what there is."""
        self.slots.announce()
        if self._options.prefetch:
            self._events.emit(event.LocalQueueInit(worker_pool=self._pool, size=self._options.prefetch))

    def receive(self, claimed: Sequence[Held]) -> None:
        """These are ours now."""
        self._hold(claimed)
        if self._options.prefetch and claimed:
            jobs = [held.job for held in claimed]
            self._events.emit(event.LocalQueueGetJobsComplete(worker_pool=self._pool, jobs=jobs))
        self._start()

    def settle(self, results: list[Result], reply: Reply) -> bool:
        """The database was told of these, and answered. Returns whether it refused one for the first time."""
        found = self.results.sort_out(results, reply)
        self._settle(found.recorded, event.JobComplete)
        self._settle(found.lost, event.JobLost)
        for result in found.late:
            job = result.held.job
            self._logger.info("The outcome of job %d (%s) is recorded after all", job.id, job.task_identifier)
        new = [result for result, refusal in found.refused if self._refuse(result, refusal)]
        return bool(new)

    def _refuse(self, result: Result, refusal: Refusal) -> bool:
        """Keep a result that the server refused. Returns whether it is the first time."""
        job = result.held.job
        if refusal.is_about_data and not isinstance(result.outcome, Completed) and not result.plain:
            # Something that the task said of its job cannot be stored.
            self._logger.warning(
                "The database refuses the outcome of job %d (%s): %s. Recording less of it",
                *(job.id, job.task_identifier, refusal.message),
            )
            self.results.send_plain(replace(result, plain=True))
            return True
        is_new = self.results.park(result)
        if is_new:
            self._logger.warning(
                "The database refuses to record the outcome of job %d (%s): %s. The job stays locked until "
                "that is recorded; other jobs are not affected",
                *(job.id, job.task_identifier, refusal.message),
            )
        return is_new

    def adopt(self, locked: Locked) -> dict[int, datetime]:
        """Take in hand what an exchange of which we got no answer claimed; returns queues to let go."""
        found = reconcile(self.all, locked)
        gone = self.results.confirm(found.still_ours)
        self._settle([one for one in gone if one.held.claim not in locked.taken], event.JobComplete)
        self._settle([one for one in gone if one.held.claim in locked.taken], event.JobLost)
        if self.fenced:  # somebody may have freed even what has a longer lease
            self.slots.stop_all_but(found.still_ours)
        self._hold(found.adopted)
        self._start()
        return found.spare_queues

    def release(self) -> None:
        """Begin nothing more, and give back what was not begun."""
        self._released = True
        self.slots.release()
        self.results.add(self.prefetched.give_back("RELEASED"))

    def fence(self) -> None:
        """Others may take what we hold: stop it. May be called again, when more leases are over."""
        if not self.fenced:
            self.fenced = True
            silence = self._vitals.clock() - (self._vitals.confirmed or 0.0)
            self._say_fenced(silence)
            self._events.emit(event.PoolFenced(worker_pool=self._pool, silence=silence))
        self.results.add(self.prefetched.give_back("RELEASED"))
        self.slots.fence(self._vitals.may_work)

    def _say_fenced(self, silence: float) -> None:
        why = (
            f"Others declared this worker dead, after {silence:.0f} s without a heartbeat"
            if self._vitals.dead
            else f"For {silence:.1f} s no heartbeat was recorded, so others may take this worker for dead"
        )
        given_up = [
            str(held.job.id)
            for held in self.slots.running
            if not self._vitals.may_work(held.job.task_identifier)
        ]
        if given_up:
            self._logger.error("%s. Giving up the jobs that it runs: %s", why, ", ".join(given_up))
        else:
            self._logger.warning("%s. It runs no job that it has to give up, and claims none for now", why)

    def unfence(self, *, forgive: bool) -> None:
        """They may not, or not any more; whether what could not be stopped was never taken."""
        self.fenced = False
        if not self._released:
            self.slots.unfence(forgive=forgive)
        self._logger.info("The heartbeat is recorded: claiming jobs again")
        self._events.emit(event.PoolUnfenced(worker_pool=self._pool))

    @property
    def oldest(self) -> float | None:
        """When (on the monotonic clock) the first of those that were not begun has waited too long."""
        oldest = self.prefetched.oldest
        return None if oldest is None else oldest + self._options.prefetch_ttl

    def expire(self) -> bool:
        """Give back what has waited too long for a slot; whether there was something."""
        if self.oldest is None or self.oldest > monotonic():
            return False
        horizon = monotonic() - self._options.prefetch_ttl
        self.results.add(self.prefetched.give_back("TTL_EXPIRED", claimed_until=horizon))
        return True

    def return_prefetched(self) -> None:
        """Give back what was claimed ahead: jobs of a task may be among it that is not to run any more."""
        self.results.add(self.prefetched.give_back("RELEASED"))

    def cancel(self, held: Held, choice: Cancel) -> None:
        """Somebody does not want it any more. If it has ended, what it came to stands."""
        if held in self.prefetched:
            outcome = Cancelled(choice)
            self.slots.skip(held, outcome)
            self.results.append(self.prefetched.withdraw(held, outcome))
            self.on_end()
        else:
            self.slots.cancel(held, choice)

    def _hold(self, claimed: Sequence[Held]) -> None:
        self.all.update(claimed)
        self.prefetched.add(claimed)
        if self._released or self.fenced:
            self.results.add(self.prefetched.give_back("RELEASED"))

    def go_on(self) -> None:
        """A beat is recorded: begin what was not begun while it could not be said whether it is ours."""
        self._start()

    def _start(self) -> None:
        # With an eager task factory a job may have ended when it is started, and come back here. Then the
        # loop below goes on: calls inside of calls would be as many as there are jobs.
        if self._starting or not (self.prefetched.ready and self.slots.free):
            return
        # One that woke up from a long sleep must not begin what may be somebody else's by now.
        if not (self._released or self.fenced) and self._vitals.may_work():
            self._starting = True
            try:
                while self.prefetched.ready and self.slots.free:
                    self.slots.start(self.prefetched.take())
            finally:
                self._starting = False

    def _end_run(self, held: Held, outcome: Outcome) -> None:
        self.results.append(self.prefetched.finish(held, outcome))
        self._start()
        self.on_end()

    def _settle(self, results: Iterable[Result], kind: type[event.JobComplete | event.JobLost]) -> None:
        held = [result.held for result in results]
        self.all.difference_update(held)
        self.slots.settle(held, kind)
