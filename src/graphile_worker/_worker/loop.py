"""The worker's loop: claim jobs for its slots, run them, and record their outcomes.

Each tick is one exchange with the database. While an exchange is in flight, finished jobs gather for the next
one. So under load few exchanges do much, and without load no result waits. With prefetch, the next exchange
is sent before the reply to the last one is read: the server works while the worker does.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from graphile_worker import events as event
from graphile_worker._base.text import pluralize
from graphile_worker._db.queries.exchange import NOTHING, ClaimRequest
from graphile_worker._worker.claiming.claim_planner import TASK_REFRESH_DELAY, Capacity
from graphile_worker._worker.claiming.exchange_client import PendingExchange, emit_exchange
from graphile_worker._worker.claiming.outage import OutageError, OutageTracker
from graphile_worker._worker.claiming.reconcile import SpareQueues
from graphile_worker._worker.claiming.refusals import Refusals
from graphile_worker._worker.phases import Phase, Standing
from graphile_worker._worker.service import Service
from graphile_worker.errors import ConfigurationError, GraphileWorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from graphile_worker._base.logs import ScopedLogger
    from graphile_worker._db.queries.exchange import Answer, ClaimedJob, ExchangeReply, Refusal
    from graphile_worker._worker.claiming.claim_planner import ClaimPlanner
    from graphile_worker._worker.claiming.clock import Clock
    from graphile_worker._worker.claiming.exchange_client import ExchangeClient
    from graphile_worker._worker.claiming.forbidden_flags import ForbiddenFlags
    from graphile_worker._worker.claiming.named_limits import NamedLimits
    from graphile_worker._worker.claiming.outage import OutageLog
    from graphile_worker._worker.execution.claimed_jobs import ClaimedJobs
    from graphile_worker._worker.liveness.lease_state import LeaseState
    from graphile_worker._worker.options import WorkerOptions
    from graphile_worker.events import WorkerPool
    from graphile_worker.outcome import RunSummary

_MAINTENANCE_INTERVAL = 60.0
_MAX_NAMED = 20
_MAX_REFUSED = 1000
GIVE_UP_AFTER = 10.0
"""Seconds for which a stopping worker waits for a database that does not answer."""


class Worker(Service):
    """Claims, runs and records jobs."""

    name = "worker"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        options: WorkerOptions,
        exchange_client: ExchangeClient,
        claimed_jobs: ClaimedJobs,
        planner: ClaimPlanner,
        lease_state: LeaseState,
        flags: ForbiddenFlags,
        clock: Clock,
        outage_log: OutageLog,
        logger: ScopedLogger,
        limits: NamedLimits,
    ) -> None:
        super().__init__(logger)
        self._pool = pool
        self._limits = limits
        self._options = options
        self._exchange_client, self._lease_state, self._flags = exchange_client, lease_state, flags
        self._clock = clock
        self._events = options.events
        self._claimed = claimed_jobs
        self._claimed.on_end = self._on_job_end
        self._slots = claimed_jobs.slots
        self._results = claimed_jobs.results
        self._slots.watch_worker(lambda: self._task is not None and self._task.cancelling() > 0)
        self.abandoned = claimed_jobs.slots.abandoned
        """Threads that still run after their jobs' timeouts."""
        self.abandoned.on_change = self._on_abandoned_change
        self._planner = planner
        self._sent_ahead: PendingExchange | None = None
        self._refusals = Refusals()
        self._spare_queues = SpareQueues()
        self._outage = OutageTracker(pool, options.events, outage_log)
        self._last_maintenance = monotonic()
        flags.on_return, self._phase, self._standing = self.notify, Phase.RUNNING, Standing.ALIVE
        self._claims_unknown = False  # whether a lost exchange may have claimed jobs
        self._found_nothing = False  # whether the last claim saw every job and found none to run
        self._named_refusals = 0
        self._logged_refusing = False
        self.idle = asyncio.Event()
        """Set when all outcomes are recorded and the worker stops, or runs once and found no more jobs."""
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error that ends the worker."""
        self.on_reconciled: Callable[[], None] = lambda: None
        """Called after the worker was declared dead and has read which jobs it still has locked."""
        self.on_saved: Callable[[], Awaitable[None]] | None = None
        """Called when the event loop is being closed, after the last outcome that can be recorded."""
        self.is_notified: Callable[[], bool] = lambda: False
        """Return whether notifications of new jobs arrive."""
        self.exchange_sent_at: float | None = None
        """When the exchange in flight was sent, by the clock of `LeaseState`; None if none is in flight."""
        self.last_exchange_sent_at: float | None = None
        """When the last answered exchange was sent, by the same clock."""
        self.stop_error: GraphileWorkerError | None = None
        """The reason why a worker that runs once stopped before all jobs had run."""

    def announce(self) -> None:
        """Emit the events of the start."""
        self._claimed.announce()

    async def connect(self) -> None:
        """Connect for the first time.

        Raises:
            GraphileWorkerError: The database cannot be used.
        """
        try:
            self._claimed.adopt(await self._exchange_client.connect())
        except OutageError as outage:
            raise outage.error or outage from None

    def notify(self, count: int | None = None) -> None:
        """Claim soon, because there may be new jobs: `count` of them, if that is known."""
        self._planner.notify(count)
        self.wake()

    def begin_stop(self) -> None:
        """Claim nothing more, and return jobs that were not started."""
        if self._phase >= Phase.STOPPING:
            return
        self._phase = Phase.STOPPING
        self._planner.stop()
        self._claimed.release()
        self._outage.retry_now()
        self.wake()

    def fence(self) -> None:
        """Stop jobs that other workers may claim. May be called again, when more leases have run out."""
        if not self._lease_state.may_work():  # otherwise a heartbeat was recorded in the meantime
            self._claimed.fence()
            self.wake()

    def handle_declared_dead(self) -> None:
        """Give up all jobs, until the worker has read which of them it still has locked."""
        self.fence()
        self._standing = Standing.DECLARED_DEAD
        self._exchange_client.abandon()

    def unfence(self) -> None:
        """Claim again, because a heartbeat is recorded."""
        if not self._outage.is_available:
            self._outage.retry_now()
            self.wake()
        if self._claimed.fenced and self._lease_state.may_work():
            # Other workers have claimed its jobs only if one of them declared it dead.
            self._claimed.unfence(forgive=self._standing is Standing.ALIVE)
            if self._standing is Standing.RECONCILED:
                self._standing = Standing.ALIVE
            self.notify()
        self._claimed.start_ready()  # needed if the heartbeat came before the fence

    def interrupt(self) -> None:
        """Interrupt running jobs."""
        if self._phase < Phase.INTERRUPTING:
            self._phase = Phase.INTERRUPTING
            self._slots.interrupt()

    def give_up(self, error: BaseException) -> None:
        """Report that the outcomes of ended jobs will not be recorded."""
        self._slots.give_up(error)

    @property
    def summary(self) -> RunSummary:
        """The recorded outcomes of this worker's jobs so far."""
        return self._slots.summary

    @property
    def unrecorded(self) -> Sequence[ClaimedJob]:
        """Claimed jobs whose outcomes are not recorded."""
        return tuple(self._claimed.all)

    @property
    def holds_no_locks(self) -> bool:
        """Whether this worker certainly has no job or queue locked."""
        return not (self._claimed or self._claims_unknown or self._sent_ahead or self._spare_queues)

    @property
    def running(self) -> Sequence[ClaimedJob]:
        """Running jobs."""
        return self._slots.running

    @property
    def stuck(self) -> Sequence[ClaimedJob]:
        """Running jobs whose leases have run out. May be read from another thread."""
        return self._slots.stuck(self._lease_state.may_work)

    @property
    def reachable(self) -> bool:
        """Whether the last request to the database succeeded."""
        return self._outage.is_available

    @property
    def outage_reason(self) -> str:
        """The reason for the current outage."""
        return self._outage.reason

    @property
    def refusal_message(self) -> str | None:
        """A message about changes that the server refuses; None if there are none.

        May be read from another thread.
        """
        refused, left_out = self._results.refused, self._refusals.left_out
        found = [f"to record the outcomes of {pluralize(refused, 'job')}"] if refused else []
        found += [f"to let {pluralize(left_out, 'job')} be claimed"] if left_out else []
        return f"The database refuses {' and '.join(found)}; the log names them." if found else None

    @property
    def too_many_refused(self) -> bool:
        """Whether no job is claimed because the server refuses to record too many outcomes."""
        return self._results.refused >= _MAX_REFUSED

    async def end(self) -> None:
        """Close the connection, even if not all outcomes are recorded."""
        was_saving = self._phase is Phase.SAVING
        self._phase = Phase.ENDED
        if was_saving and self._task is not None:
            await asyncio.wait([self._task])
        await self.stop()
        await self._cancel_sent_ahead()
        if self.holds_no_locks:
            await self._exchange_client.leave()
        await self._exchange_client.disconnect()
        self._slots.close(self.fatal.exception() if self.fatal.done() else None)

    async def _run(self) -> None:
        try:
            await super()._run()
        except asyncio.CancelledError:
            if not self.idle.is_set() and not self.fatal.done() and self._phase < Phase.ENDED:
                await self._save()
            raise

    async def _save(self) -> None:
        """Record outcomes while the event loop is being closed. Otherwise the jobs would stay locked."""
        self.begin_stop()
        self.interrupt()
        self._phase = Phase.SAVING
        await self._cancel_sent_ahead()
        await self._exchange_client.disconnect()
        quiet_since = monotonic()
        while monotonic() - quiet_since < GIVE_UP_AFTER:
            self._woken.clear()
            delay = await self.tick()
            if self.idle.is_set() or self.fatal.done():
                break
            was_running = bool(self._slots.running)  # on threads, which cannot be interrupted
            await self._sleep(min(delay if delay is not None else 1.0, 1.0))
            quiet_since = monotonic() if was_running else quiet_since
        if self._claimed:
            self.logger.error(
                "The event loop was closed before the outcomes of %s were recorded",
                pluralize(len(self._claimed), "job"),
            )
        elif self.holds_no_locks:
            await self._exchange_client.leave()
        await self._exchange_client.disconnect()
        if self.on_saved is not None:
            await self.on_saved()

    async def tick(self) -> float | None:
        """Make one exchange if there is a reason for one. Returns the seconds until the next tick."""
        self._check_idle()
        if not self._exchange_client.connected:
            self._lease_state.exchange_lost()
        if self._outage.pause:
            return self._outage.pause
        try:
            return await self._tick()
        except OutageError as outage:
            if outage.is_stale_session:
                return 0.0  # on another connection
            self._outage.record_failure(outage)
            return self._outage.pause
        except GraphileWorkerError as error:
            if not self.fatal.done():
                self._events.emit(
                    event.PoolFatalError(worker_pool=self._pool, error=error, action="exchange")
                )
                self.fatal.set_exception(error)
            return None

    async def _tick(self) -> float | None:
        if self.fatal.done() or self.idle.is_set():
            return None
        # Without a connection an expired job is kept: its return cannot be recorded, and a slot may still
        # run it.
        if self._exchange_client.connected and self._claimed.expire():
            self._planner.pause_prefetch()
        exchange, self._sent_ahead = self._sent_ahead or await self._next_exchange(), None
        if exchange is not None:
            await self._finish_exchange(exchange)
            # Started jobs take their first step before the next exchange. Many end in that step, and the
            # exchange records them.
            await asyncio.sleep(0)
        # After an exchange and not before it, so that no new job waits for it.
        if self._is_maintenance_due and self._exchange_client.connected and self._sent_ahead is None:
            await self._run_maintenance()
        self._check_idle()
        return self._delay()

    async def _next_exchange(self) -> PendingExchange | None:
        try:
            if not self._exchange_client.connected:
                await self._reconnect()
            if self._spare_queues.due:
                await self._release_spare_queues()
        except OutageError as outage:
            if self._slots.free and self._phase is Phase.RUNNING:
                self._emit_claim_error(outage)
            raise
        request = await self._plan_claim()
        # A job that its own transaction completed needs no exchange, but leaves its share of a limit.
        if self._results or request.wanted or self._limits.has_spare_share(self._claimed.all):
            return self._begin_exchange(request)
        return None

    def _begin_exchange(self, request: ClaimRequest) -> PendingExchange:
        request, careful = self._refusals.prepare(request, retries=self._results.retries)
        results = self._results.take(self._refusals.limit)
        if self._limits:
            recorded = () if careful else [result.held for result in results]
            request = replace(request, limits=self._limits.count(self._claimed.all, recorded))
        if request.wanted and self._events.wants(event.WorkerGetJobStart):
            self._events.emit(event.WorkerGetJobStart(worker=self._slots.any))
        answer = self._exchange_client.exchange(results, request, careful=careful)
        return PendingExchange(results, request, monotonic(), self._lease_state.clock(), answer, careful)

    async def _finish_exchange(self, exchange: PendingExchange) -> None:
        self.exchange_sent_at = exchange.lease_time
        try:
            answer = await exchange.answer
        except OutageError as outage:
            repeated = self._prepare_repeat(exchange, outage)
            self._handle_no_answer(exchange if repeated is None else repeated, outage)
            if repeated is None:
                raise
            return
        except BaseException as error:
            # An exchange is cancelled only if the event loop is being closed or the worker was given up.
            self._handle_no_answer(exchange, error)
            raise
        finally:
            self.exchange_sent_at = None
        self.last_exchange_sent_at = exchange.lease_time
        try:
            if not (exchange.careful or self._refusals) and self._may_send_ahead(exchange.request, answer):
                await self._send_ahead(answer)
        finally:
            self._handle_answer(exchange, answer)

    def _prepare_repeat(self, exchange: PendingExchange, outage: OutageError) -> PendingExchange | None:
        """Return the failed exchange, changed so that it may succeed; None if no change would help."""
        size = max(len(exchange.results), exchange.request.wanted)
        if outage.is_timeout:
            return exchange if self._refusals.shrink(size) else None
        if outage.is_stale_session:
            return exchange  # on another connection
        # A conflict usually passes. One that repeats comes from a trigger.
        is_refusal = outage.is_refusal or (outage.is_conflict and not self._outage.is_available)
        if is_refusal and not exchange.careful:
            self.logger.debug("The database refuses an exchange: %s. Repeating it job by job", outage)
            self._refusals.be_careful()
            return exchange
        if outage.is_about_data and not all(result.plain for result in exchange.results):
            # The error does not name the job, so the details of all outcomes are left out.
            self.logger.warning("The database refuses outcomes: %s. Recording them without details", outage)
            return exchange._replace(results=[replace(result, plain=True) for result in exchange.results])
        return None

    def _handle_answer(self, exchange: PendingExchange, answer: Answer) -> None:
        try:
            self._handle_reply(exchange, answer.read())
        except BaseException as error:
            # The worker has to read on a new connection what this exchange claimed.
            self._exchange_client.abandon()
            self._handle_no_answer(exchange, error)
            if isinstance(error, Exception):
                raise OutageError(error, unknown=True) from error
            raise

    def _handle_reply(self, exchange: PendingExchange, reply: ExchangeReply) -> None:
        self._outage.record_success()
        emit_exchange(self._events, self._pool, exchange, reply)
        if self._exchange_client.holds_session:
            self._lease_state.exchanged(exchange.lease_time)
        self._clock.observe(reply.now)
        self._log_unclaimable(self._refusals.record_answer(exchange.request, reply))
        if exchange.request.limits is not None:
            counted = [] if exchange.careful else [result.held for result in exchange.results]
            busy = [held for held in counted if held.claim in reply.busy]
            self._limits.record(exchange.request.limits, [*reply.claimed, *busy])
        if exchange.results and self._claimed.settle(exchange.results, reply):
            self._refusals.be_careful()
        if exchange.request.wanted:
            self._planner.record(
                exchange.sent, exchange.request, reply, queued=len(self._claimed.local_queue)
            )
            self._receive(exchange.request, reply)

    def _log_unclaimable(self, unclaimable: dict[int, Refusal]) -> None:
        for job_id, refusal in unclaimable.items():
            self._named_refusals += 1
            self.logger.log(
                logging.WARNING if self._named_refusals <= _MAX_NAMED else logging.DEBUG,
                "The database refuses to let job %d (%s) be claimed: %s. It is left out for a while%s",
                job_id,
                refusal.task,
                refusal.message,
                "; further such jobs are logged at level DEBUG" if self._named_refusals == _MAX_NAMED else "",
            )

    def _handle_no_answer(self, exchange: PendingExchange, error: BaseException) -> None:
        unknown = not isinstance(error, OutageError) or error.unknown
        if unknown:
            self._limits.forget()
        self._results.put_back(exchange.results, perhaps_recorded=unknown)
        if exchange.request.wanted:
            self._claims_unknown = self._claims_unknown or unknown
            self._planner.notify()
            self._emit_claim_error(error)

    def _emit_claim_error(self, error: BaseException) -> None:
        cause = error.error if isinstance(error, OutageError) and error.error else error
        self._events.emit(event.WorkerGetJobError(worker=self._slots.any, error=cause))

    def _may_send_ahead(self, request: ClaimRequest, answer: Answer) -> bool:
        """Return whether the next exchange can be sent before this answer is read."""
        return (
            self._planner.is_predictable
            and bool(self._results)
            and 0 < request.wanted <= answer.only_jobs < self._planner.room(self._capacity())
            and not self._is_maintenance_due
        )

    async def _send_ahead(self, answer: Answer) -> None:
        request = await self._plan_claim(incoming=answer.only_jobs)
        exchange = self._begin_exchange(request)
        self._sent_ahead = exchange._replace(answer=asyncio.ensure_future(exchange.answer))
        await asyncio.sleep(0)  # so that the task sends the exchange

    async def _cancel_sent_ahead(self) -> None:
        """Cancel the exchange that was sent ahead, because nothing will wait for its answer."""
        exchange, self._sent_ahead = self._sent_ahead, None
        if exchange is not None:
            sending = asyncio.ensure_future(exchange.answer)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._handle_no_answer(exchange, asyncio.CancelledError())

    def _capacity(self) -> Capacity:
        queue = self._claimed.local_queue
        return Capacity(self._slots.free, len(queue), queue.ready, self._lease_state.may_work())

    async def _plan_claim(self, *, incoming: int = 0) -> ClaimRequest:
        if self.too_many_refused:
            self._claim_nothing_while_refused()
            return NOTHING
        if self._logged_refusing:
            self._logged_refusing = False
            self._planner.notify()
        flags, capacity, has_results = self._flags.fixed, self._capacity(), bool(self._results)
        eager = has_results and (
            not self.is_notified()
            or not self._flags.unused
            or self._planner.has_limits
            or self._results.free_jobs
        )
        if flags is None:
            # The user's function is called only before a claim.
            if not self._planner.wants_jobs(capacity, eager=eager, incoming=incoming):
                self._planner.is_blocked = False
                return NOTHING
            flags = await self._flags.current()
            if flags is None:
                self._claim_nothing_without_flags()
                return NOTHING
            capacity = self._capacity()
        return self._planner.plan(
            capacity,
            has_results=has_results,
            eager=eager,
            claimed=self._claimed.unended,
            forbidden_flags=flags,
            as_of=self._clock.as_of,
            incoming=incoming,
        )

    def _claim_nothing_without_flags(self) -> None:
        """Wait until forbidden_flags returns flags again."""
        self._found_nothing = self._planner.is_blocked = False
        self._planner.postpone()
        if self._options.once and self._flags.error is not None:
            self.stop_error = ConfigurationError(f"forbidden_flags failed: {self._flags.error!r}.")
            self.begin_stop()

    def _claim_nothing_while_refused(self) -> None:
        """Wait until the server accepts some of the refused outcomes, because it may refuse all of them."""
        if not self._logged_refusing:
            self._logged_refusing = True
            self.logger.error(
                "The database refuses to record the outcomes of %d jobs. No more jobs are claimed until it "
                "accepts some",
                self._results.refused,
            )
        self._planner.postpone()
        if self._options.once:
            self.begin_stop()

    def _delay(self) -> float | None:
        """Return the seconds until the next tick, unless the worker is woken earlier."""
        if self._results or self._sent_ahead or self._limits.has_spare_share(self._claimed.all):
            return 0.0
        now = monotonic()
        delays = [_MAINTENANCE_INTERVAL]
        if self._planner.room(self._capacity()) > 0:
            delays.append(self._planner.delay)
        deadlines = (self._results.again, self._spare_queues.again, self._claimed.oldest)
        delays += [at - now for at in deadlines if at is not None]
        return max(0.0, min(delays))

    def _check_idle(self) -> None:
        is_stopping = self._phase >= Phase.STOPPING
        is_drained = self._options.once and (self._found_nothing or self._planner.is_blocked)
        if not (is_stopping or is_drained) or self._claims_unknown or self._sent_ahead:
            return
        self._results.try_refused_once_more()
        # The worker does not wait for outcomes that the server still refuses. Their queues are released with
        # the worker's other locks.
        if len(self._claimed) == len(self._results.hopeless):
            self.idle.set()

    def _receive(self, request: ClaimRequest, reply: ExchangeReply) -> None:
        if not (reply.claimed or reply.partial):
            self._events.emit(event.WorkerGetJobEmpty(worker=self._slots.any))
        saw_all = not (reply.contended or request.mark or request.partial) and reply.next_queue == 0
        self._found_nothing = saw_all and not reply.claimed and not self._planner.is_due
        self._claimed.receive(reply.claimed)

    def _on_abandoned_change(self) -> None:
        """Claim with the new limits, because a task has reached or left the limit of abandoned threads."""
        if self.abandoned.exhausted:
            self._claimed.return_prefetched()
        self.notify()

    def _on_job_end(self, duration: float | None) -> None:
        if duration is not None:
            self._planner.record_job(duration)
        if not self._results:
            # The job is recorded already. But its slot needs another one, and its transaction may have added
            # jobs that no claim has seen yet.
            self._planner.make_due()
            self._found_nothing = False
        self.wake()

    async def _reconnect(self) -> None:
        self._spare_queues.replace(self._claimed.adopt(await self._exchange_client.connect()))
        self._claims_unknown = False
        self._outage.record_success()
        self._planner.notify()
        if self._standing is Standing.DECLARED_DEAD:
            self._standing = Standing.RECONCILED
            self.on_reconciled()

    async def _release_spare_queues(self) -> None:
        still_locked = await self._exchange_client.unlock_queues(self._spare_queues.due)
        self._spare_queues.keep(still_locked)
        self._planner.notify()  # the released queues may have jobs

    @property
    def _is_maintenance_due(self) -> bool:
        interval = TASK_REFRESH_DELAY if self._planner.missed_notification else _MAINTENANCE_INTERVAL
        return monotonic() - self._last_maintenance >= interval

    async def _run_maintenance(self) -> None:
        """Read task ids again, and renew locks that are an hour old."""
        self._last_maintenance, self._planner.missed_notification = monotonic(), False
        if await self._exchange_client.refresh_tasks():
            self._planner.notify()  # the last claim asked for jobs of other task ids
        await self._exchange_client.renew(self._claimed.all, self._clock.database_now())
