"""The jobs that this worker has claimed and whose outcomes are not recorded yet."""

from __future__ import annotations

from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from graphile_worker import events as event
from graphile_worker._worker.claiming.claim_limits import ClaimLimiter
from graphile_worker._worker.claiming.prefetch import AUTO_TTL, FIXED_TTL, AutoPrefetch, FixedPrefetch
from graphile_worker._worker.claiming.reconcile import reconcile
from graphile_worker._worker.execution.local_queue import LocalQueue
from graphile_worker._worker.execution.results import Results
from graphile_worker._worker.execution.slots import Slots
from graphile_worker.outcome import Cancelled, Completed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.queries.exchange import ClaimedJob, ExchangeReply, Locked, Refusal, Result
    from graphile_worker._worker.claiming.prefetch import Prefetch
    from graphile_worker._worker.execution.attempts import AttemptRecorder
    from graphile_worker._worker.execution.executor import Executor
    from graphile_worker._worker.execution.job_events import JobRun
    from graphile_worker._worker.execution.tally import Tally
    from graphile_worker._worker.liveness.lease_state import LeaseState
    from graphile_worker._worker.options import WorkerOptions
    from graphile_worker.events import WorkerPool
    from graphile_worker.outcome import Cancel, Outcome


class ClaimedJobs:
    """Starts claimed jobs in their order, and keeps their outcomes until they are recorded.

    Args:
        pool: The worker's identity.
        options: The worker's options.
        executor: Runs a job.
        attempts: Decides what the history keeps about each attempt.
        lease_state: The state of the worker's lease.
        logger: The worker's logger.
        tally: Counts recorded outcomes for the statistics; None if there are none.
        worker_limits: How many jobs of a task the worker may have at once.
    """

    def __init__(
        self,
        *,
        pool: WorkerPool,
        options: WorkerOptions,
        executor: Executor,
        attempts: AttemptRecorder,
        lease_state: LeaseState,
        logger: ScopedLogger,
        tally: Tally | None = None,
        worker_limits: Mapping[str, int] | None = None,
    ) -> None:
        self._pool = pool
        self._options = options
        self._attempts = attempts
        self._lease_state = lease_state
        self._events = options.events
        self._logger = logger
        self.on_end: Callable[[float | None], None] = lambda _duration: None
        """Called when a job has ended, with its run time; None if it never started."""
        # Not by job id: a job whose lock was released while it ran may be claimed a second time.
        self.all: set[ClaimedJob] = set()
        self.local_queue = LocalQueue(options.events, pool)
        self.prefetch = _choose_prefetch(options)
        self.slots = Slots(pool, options.concurrency, executor, options.events, self._end_run, tally)
        self.results = Results()
        self.claim_limiter = ClaimLimiter(
            options.middleware, pool.tasks, logger, executor.abandoned, worker_limits
        )
        self._released = self._starting = False
        self.fenced = False
        """Whether the worker has given up its jobs, because other workers may claim them."""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def unended(self) -> Iterator[ClaimedJob]:
        """The jobs that run or wait for a slot."""
        return chain(self.slots.running, self.local_queue)

    def announce(self) -> None:
        """Emit the events for the slots and the local queue."""
        self.slots.announce()
        if self.prefetch.maximum:
            self._events.emit(event.LocalQueueInit(worker_pool=self._pool, size=self.prefetch.maximum))

    def receive(self, jobs: Sequence[ClaimedJob]) -> None:
        """Accept newly claimed jobs, and start as many as there are free slots."""
        self._hold(jobs)
        if jobs and self.prefetch.maximum and self._events.wants(event.LocalQueueGetJobsComplete):
            prefetched = [claimed.job for claimed in jobs]
            self._events.emit(event.LocalQueueGetJobsComplete(worker_pool=self._pool, jobs=prefetched))
        self._start()

    def settle(self, results: list[Result], reply: ExchangeReply) -> bool:
        """Process the reply to sent results. Returns whether the server refused one for the first time."""
        found = self.results.sort_out(results, reply)
        self._settle(found.recorded, event.JobComplete)
        self._settle(found.lost, event.JobLost)
        for result in found.late:
            job = result.held.job
            self._logger.info("The outcome of job %d (%s) is now recorded", job.id, job.task_identifier)
        new = [result for result, refusal in found.refused if self._refuse(result, refusal)]
        return bool(new)

    def _refuse(self, result: Result, refusal: Refusal) -> bool:
        """Keep a result that the server refused. Returns whether it is the first refusal."""
        job = result.held.job
        has_details = result.attempt is not None and result.attempt.details is not None
        may_be_cause = has_details or not isinstance(result.outcome, Completed)
        if refusal.is_about_data and may_be_cause and not result.plain:
            # A text or a payload of this outcome cannot be stored.
            self._logger.warning(
                "The database refuses the outcome of job %d (%s): %s. Recording it without details",
                job.id,
                job.task_identifier,
                refusal.message,
            )
            self.results.send_plain(replace(result, plain=True))
            return True
        is_new = self.results.park(result)
        if is_new:
            self._logger.warning(
                "The database refuses the outcome of job %d (%s): %s. The job stays locked until its outcome "
                "is recorded; other jobs are not affected",
                job.id,
                job.task_identifier,
                refusal.message,
            )
        return is_new

    def adopt(self, locked: Locked) -> dict[int, datetime]:
        """Accept jobs that an unanswered exchange has claimed. Returns the queues to release."""
        found = reconcile(self.all, locked)
        gone = self.results.confirm(found.still_locked)
        self._settle([result for result in gone if result.held.claim not in locked.taken], event.JobComplete)
        self._settle([result for result in gone if result.held.claim in locked.taken], event.JobLost)
        if self.fenced:  # even jobs with a longer lease may have been released
            self.slots.fence_all_except(found.still_locked)
        self._hold(found.adopted)
        self._start()
        return found.spare_queues

    def release(self) -> None:
        """Start no more jobs, and return those that wait for a slot to the database."""
        self._released = True
        self.slots.release()
        self.results.add(self.local_queue.give_back("RELEASED"))

    def fence(self) -> None:
        """Stop the jobs that other workers may claim. May be called again, when more leases have ended."""
        if not self.fenced:
            self.fenced = True
            silence = self._lease_state.clock() - (self._lease_state.confirmed or 0.0)
            self._log_fenced(silence)
            self._events.emit(event.PoolFenced(worker_pool=self._pool, silence=silence))
        self.results.add(self.local_queue.give_back("RELEASED"))
        self.slots.fence(self._lease_state.may_work)

    def _log_fenced(self, silence: float) -> None:
        why = (
            f"Another worker declared this one dead, after {silence:.0f} s without a heartbeat"
            if self._lease_state.dead
            else f"No heartbeat was recorded for {silence:.1f} s, so this worker may be declared dead"
        )
        given_up = [
            str(claimed.job.id)
            for claimed in self.slots.running
            if not self._lease_state.may_work(claimed.job.task_identifier)
        ]
        if given_up:
            self._logger.error("%s. Giving up its running jobs: %s", why, ", ".join(given_up))
        else:
            self._logger.warning("%s. It has no running job to give up, and claims none for now", why)

    def unfence(self, *, forgive: bool) -> None:
        """Claim and run jobs again.

        Args:
            forgive: Whether the jobs that still run are still locked by this worker.
        """
        self.fenced = False
        if not self._released:
            self.slots.unfence(forgive=forgive)
        self._logger.info("A heartbeat is recorded: claiming jobs again")
        self._events.emit(event.PoolUnfenced(worker_pool=self._pool))

    @property
    def oldest(self) -> float | None:
        """When, on the monotonic clock, the first prefetched job expires."""
        oldest = self.local_queue.oldest
        return None if oldest is None else oldest + self.prefetch.ttl

    def expire(self) -> bool:
        """Return prefetched jobs to the database after their TTL. Returns whether there were any."""
        if self.oldest is None or self.oldest > monotonic():
            return False
        horizon = monotonic() - self.prefetch.ttl
        self.results.add(self.local_queue.give_back("TTL_EXPIRED", claimed_until=horizon))
        return True

    def return_prefetched(self) -> None:
        """Return all prefetched jobs to the database, because their task may not run for now."""
        self.results.add(self.local_queue.give_back("RELEASED"))

    def pause(self, tasks: frozenset[str], queues: frozenset[str]) -> None:
        """Claim no jobs of paused tasks, and return prefetched jobs that are paused. No more is paused."""
        self.claim_limiter.paused = tasks
        if any(
            claimed.job.task_identifier in tasks or claimed.job.queue_name in queues
            for claimed in self.local_queue
        ):
            self.return_prefetched()

    def cancel(self, claimed: ClaimedJob, choice: Cancel) -> None:
        """Cancel a job. If it has already ended, its outcome stands."""
        if claimed in self.local_queue:
            outcome = Cancelled(choice)
            self.slots.skip(claimed, outcome)
            result = self.local_queue.withdraw(claimed, outcome)
            attempt = self._attempts.record_unstarted(claimed.job, outcome)
            self.results.append(result if attempt is None else replace(result, attempt=attempt))
            self.on_end(None)
        else:
            self.slots.cancel(claimed, choice)

    def _hold(self, jobs: Sequence[ClaimedJob]) -> None:
        self.all.update(jobs)
        self.local_queue.add(jobs)
        if self._released or self.fenced:
            self.results.add(self.local_queue.give_back("RELEASED"))

    def start_ready(self) -> None:
        """Start jobs that had to wait for a recorded heartbeat."""
        self._start()

    def _start(self) -> None:
        # With an eager task factory a job may end while it is started, which calls this method again. Then
        # the loop below continues: nested calls would be as deep as there are jobs.
        queue, slots = self.local_queue, self.slots
        if self._starting or not (queue.ready_jobs and slots.free_slots):
            return
        # A worker that was suspended must not start jobs that another worker may have claimed by now.
        if not (self._released or self.fenced) and self._lease_state.may_work():
            self._starting = True
            try:
                while queue.ready_jobs and slots.free_slots:
                    slots.start(queue.take())
            finally:
                self._starting = False

    def _end_run(self, run: JobRun, outcome: Outcome) -> None:
        result = self.local_queue.finish(run.claimed, outcome)
        if run.claimed.is_recorded and result.queue is None:
            self._settle([result], event.JobComplete)  # there is nothing left for an exchange to do
        elif run.claimed.is_recorded or (attempt := self._attempts.record(run, outcome)) is None:
            self.results.append(result)
        else:
            self.results.append(replace(result, attempt=attempt))
        self._start()
        self.on_end(run.duration)

    def _settle(self, results: Iterable[Result], kind: type[event.JobComplete | event.JobLost]) -> None:
        jobs = [result.held for result in results]
        self.all.difference_update(jobs)
        self.slots.settle(jobs, kind)


def _choose_prefetch(options: WorkerOptions) -> Prefetch:
    if options.forbidden_flags:  # they may change before a job starts
        return FixedPrefetch(0)
    if options.prefetch == "auto":
        return AutoPrefetch(options.concurrency, options.prefetch_ttl or AUTO_TTL)
    return FixedPrefetch(options.prefetch, options.prefetch_ttl or FIXED_TTL)
