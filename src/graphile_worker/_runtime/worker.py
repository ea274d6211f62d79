"""The worker: claims jobs for its slots, runs them, and has the database record what became of them.

All of it happens in one loop of exchanges. While one is under way finished jobs gather for the next, so that
under load few exchanges do much, and without load none waits. With prefetch the next one is sent before the
answer to the last one is read, so that the server works while we do.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from graphile_worker import events as event
from graphile_worker._db.exchange import NOTHING, Wish
from graphile_worker._runtime.demand import Demand
from graphile_worker._runtime.exchanger import OutageError, UnderWay
from graphile_worker._runtime.looks import AFTER_A_VAIN_LOOK, Looks
from graphile_worker._runtime.refusals import Refusals
from graphile_worker._runtime.service import Service
from graphile_worker._runtime.spare_queues import SpareQueues
from graphile_worker._runtime.weather import Weather
from graphile_worker.errors import ConfigurationError, GraphileWorkerError
from graphile_worker.wording import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from graphile_worker._db.exchange import Answer, Held, Refusal, Reply
    from graphile_worker._runtime.clock import Clock
    from graphile_worker._runtime.exchanger import Exchanger
    from graphile_worker._runtime.flags import ForbiddenFlags
    from graphile_worker._runtime.in_hand import InHand
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker.emitter import Events
    from graphile_worker.events import WorkerPool
    from graphile_worker.logs import ScopedLogger
    from graphile_worker.options import WorkerOptions

_HOUSEKEEPING = 60.0
_MOST_NAMED = 20
_MOST_REFUSED = 1000
GIVE_UP_AFTER = 10.0
"""Seconds for which a worker that stops waits for a database that does not answer."""


class Worker(Service):
    name = "worker"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        options: WorkerOptions,
        exchanger: Exchanger,
        in_hand: InHand,
        vitals: Vitals,
        flags: ForbiddenFlags,
        clock: Clock,
        events: Events,
        logger: ScopedLogger,
    ) -> None:
        super().__init__(logger)
        self._pool, self._options = pool, options
        self._exchanger = exchanger
        self._vitals = vitals
        self._flags = flags
        self._clock = clock
        self._events = events
        self._looks = Looks(options.poll_interval)
        self._in_hand = in_hand
        self._in_hand.on_end = self._end_run
        self._slots, self._results = in_hand.slots, in_hand.results
        self._slots.watch_worker(lambda: self._task is not None and self._task.cancelling() > 0)
        self.abandoned = in_hand.slots.abandoned
        """Threads that go on though the timeouts of their jobs are over."""
        self.abandoned.on_change = self._on_exhausted
        self._demand = Demand(options, in_hand, flags, self._looks, clock, vitals)
        self._sent_ahead: UnderWay | None = None
        self._refusals = Refusals()
        self._spare_queues = SpareQueues()
        self._named, self._full = 0, False
        self._weather = Weather(logger)
        self._house_kept = monotonic()
        flags.answered = self.look
        self._claims_unknown = self._nothing_left = self._declared_dead = self._mourned = False
        self._stopping = self._interrupted = self._saving = self._given_up = self._last_try = False
        self.idle = asyncio.Event()
        """Set when the worker was told to stop, or to end when nothing is left, and nothing is in hand."""
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error that the worker cannot go on after."""
        self.on_reconciled: Callable[[], None] = lambda: None
        """Called when it was declared dead, and has read back what is still its own."""
        self.on_saved: Callable[[], Awaitable[None]] | None = None
        """Called when the event loop is being closed, and all is recorded that could be."""
        self.asking: float | None = None
        """Since when, by the clock of our vitals, the database owes us an answer."""
        self.answered: float | None = None
        """When the question was asked that it last answered."""
        self.complaint: GraphileWorkerError | None = None
        """Why it ended by itself before everything was done."""

    def announce(self) -> None:
        """Tell what there is."""
        self._in_hand.announce()

    async def connect(self) -> None:
        """Connect for the first time; an error is the caller's."""
        try:
            self._in_hand.adopt(await self._exchanger.connect())
        except OutageError as outage:
            raise outage.error or outage from None

    def look(self, count: int | None = None) -> None:
        """There may be jobs, so many if that is known."""
        self._looks.wake(count)
        self.wake()

    def begin_stop(self) -> None:
        """Claim nothing more, and give back what was not begun."""
        if self._stopping:
            return
        self._stopping = self._demand.ended = True
        self._in_hand.release()
        self._weather.hurry()
        self.wake()

    def fence(self) -> None:
        """Others may take what we hold, or have: stop it. May be called again, when more leases are over."""
        if not self._vitals.may_work():  # or a beat was recorded meanwhile, and nobody has taken anything
            self._in_hand.fence()
            self.wake()

    def mourn(self) -> None:
        """Others have declared us dead: read back what is ours after all, then come back to life."""
        self.fence()
        self._declared_dead = self._mourned = True
        self._exchanger.abandon()

    def unfence(self) -> None:
        """A heartbeat is recorded: what we claim from now on is ours."""
        if not self._weather.fair:  # the database is back
            self._weather.hurry()
            self.wake()
        if self._in_hand.fenced and self._vitals.may_work():
            # If others had not declared us dead, nobody has taken anything.
            self._in_hand.unfence(forgive=not self._mourned)
            self._mourned = False
            self.look()
        self._in_hand.go_on()  # if the beat was faster than the fence, nobody else would

    def interrupt(self) -> None:
        """Stop what runs."""
        if self._interrupted:
            return
        self._interrupted = True
        self._slots.interrupt()

    def give_up(self, error: BaseException) -> None:
        """What is in hand will not be recorded."""
        self._slots.give_up(error)

    @property
    def ended(self) -> tuple[int, int]:
        """How many jobs were done, and how many failed."""
        return self._slots.done, self._slots.failed

    @property
    def in_hand(self) -> Sequence[Held]:
        """Jobs that are ours, and whose outcome is not recorded."""
        return tuple(self._in_hand.all)

    @property
    def leaves_nothing(self) -> bool:
        """Whether nothing can be locked under our name any more."""
        return not (self._in_hand or self._claims_unknown or self._sent_ahead or self._spare_queues)

    @property
    def running(self) -> Sequence[Held]:
        """Jobs that run now."""
        return self._slots.running

    @property
    def stuck(self) -> Sequence[Held]:
        """Jobs that run though they are not ours any more. May be asked from another thread."""
        return self._slots.stuck(self._vitals.may_work)

    @property
    def reachable(self) -> bool:
        """Whether the database answers."""
        return self._weather.fair

    @property
    def outage(self) -> str:
        """The reason why the database does not answer."""
        return self._weather.why

    @property
    def refused(self) -> str | None:
        """What the server refuses to do to how many jobs. May be asked from another thread."""
        refused, left_out = self._results.refused, self._refusals.left_out
        found = [f"to record the outcomes of {counted(refused, 'job')}"] if refused else []
        found += [f"to let {counted(left_out, 'job')} be claimed"] if left_out else []
        return f"The database refuses {' and '.join(found)}; the log names them." if found else None

    @property
    def too_many_refused(self) -> bool:
        """Whether no jobs are claimed, because the server refuses to record so many outcomes."""
        return self._results.refused >= _MOST_REFUSED

    async def end(self) -> None:
        """Let the connection go, whether or not all is recorded."""
        self._given_up = True
        if self._saving and self._task is not None:
            await asyncio.wait([self._task])
        await self.stop()
        await self._recall()
        if self.leaves_nothing:
            await self._exchanger.leave()
        await self._exchanger.disconnect()
        self._slots.close(self.fatal.exception() if self.fatal.done() else None)

    async def _run(self) -> None:
        try:
            await super()._run()
        except asyncio.CancelledError:
            if not self.idle.is_set() and not self.fatal.done() and not self._given_up:
                await self._save()
            raise

    async def _save(self) -> None:
        """The event loop is being closed under us, and waits for us: what we hold would stay locked."""
        self._saving = True
        self.begin_stop()
        self.interrupt()
        await self._recall()
        await self._exchanger.disconnect()
        quiet_since = monotonic()
        while monotonic() - quiet_since < GIVE_UP_AFTER:
            self._woken.clear()
            delay = await self.tick()
            if self.idle.is_set() or self.fatal.done():
                break
            was_running = bool(self._slots.running)  # on threads: nobody can hurry them
            await self._sleep(min(delay if delay is not None else 1.0, 1.0))
            quiet_since = monotonic() if was_running else quiet_since
        if self._in_hand:
            self.logger.error("The event loop was closed before %d jobs were recorded", len(self._in_hand))
        elif self.leaves_nothing:
            await self._exchanger.leave()
        await self._exchanger.disconnect()
        if self.on_saved is not None:
            await self.on_saved()

    async def tick(self) -> float | None:
        """One exchange, if there is a reason for one."""
        self._check_idle()
        if not self._exchanger.connected:
            self._vitals.unproven()
        if self._weather.pause:
            return self._weather.pause
        try:
            return await self._tick()
        except OutageError as outage:
            if outage.is_given_up:
                return 0.0  # on another connection
            self._weather.outage(outage)
            return self._weather.pause
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
        # Without a connection what we give back would be nobody's.
        if self._exchanger.connected and self._in_hand.expire():
            self._demand.prefetching = False  # until a slot is free
        exchange, self._sent_ahead = self._sent_ahead or await self._next_exchange(), None
        if exchange is not None:
            await self._finish_exchange(exchange)
            # Jobs that were begun take their first step before we go on, and for many it is the last.
            await asyncio.sleep(0)
        self._check_idle()
        return self._delay()

    async def _next_exchange(self) -> UnderWay | None:
        try:
            if not self._exchanger.connected:
                await self._reconnect()
            if monotonic() - self._house_kept >= (
                AFTER_A_VAIN_LOOK if self._looks.in_vain else _HOUSEKEEPING
            ):
                await self._keep_house()
            if self._spare_queues.due:
                await self._release_spare_queues()
        except OutageError as outage:
            if self._slots.free and not self._stopping:
                self._emit_claim_error(outage)
            raise
        wish = await self._wish()
        return self._begin_exchange(wish) if self._results or wish.wanted else None

    def _begin_exchange(self, wish: Wish) -> UnderWay:
        wish, careful = self._refusals.prepare(wish, retries=self._results.retries)
        results = self._results.take(self._refusals.limit)
        if wish.wanted and self._events.wants(event.WorkerGetJobStart):
            self._events.emit(event.WorkerGetJobStart(worker=self._slots.any))
        answer = self._exchanger.exchange(results, wish, careful=careful)
        return UnderWay(results, wish, monotonic(), self._vitals.clock(), answer, careful)

    async def _finish_exchange(self, exchange: UnderWay) -> None:
        self.asking = exchange.alive
        try:
            answer = await exchange.answer
        except OutageError as outage:
            repeated = self._otherwise(exchange, outage)
            self._not_answered(exchange if repeated is None else repeated, outage)
            if repeated is None:
                raise
            return
        except BaseException as error:
            # Cancelled only when the event loop is closed under us, or we were given up.
            self._not_answered(exchange, error)
            raise
        finally:
            self.asking = None
        self.answered = exchange.alive
        try:
            if not (exchange.careful or self._refusals) and self._may_send_ahead(exchange.wish, answer):
                await self._send_ahead(answer)
        finally:
            self._take_in(exchange, answer)

    def _otherwise(self, exchange: UnderWay, outage: OutageError) -> UnderWay | None:
        """See to it that the next exchange is made in another way; None if that is of no use."""
        size = max(len(exchange.results), exchange.wish.wanted)
        if outage.is_timeout:
            return exchange if self._refusals.shrink(size) else None
        if outage.is_given_up:
            return exchange  # on another connection
        # A conflict passes as a rule, unless it is a trigger that says so again and again.
        is_refusal = outage.is_refusal or (outage.is_conflict and not self._weather.fair)
        if is_refusal and not exchange.careful:
            self.logger.debug("The database refuses an exchange: %s. Repeating it job by job", outage)
            self._refusals.be_careful()
            return exchange
        if outage.is_about_data and not all(result.plain for result in exchange.results):
            # It cannot even be read which job it is about.
            self.logger.warning("The database refuses results: %s. Recording less of them", outage)
            return exchange._replace(results=[replace(result, plain=True) for result in exchange.results])
        return None

    def _take_in(self, exchange: UnderWay, answer: Answer) -> None:
        try:
            self._take_in_reply(exchange, answer.read())
        except BaseException as error:
            # What it claimed can only be found out by asking again, on another connection.
            self._exchanger.abandon()
            self._not_answered(exchange, error)
            if isinstance(error, Exception):
                raise OutageError(error, unknown=True) from error
            raise

    def _take_in_reply(self, exchange: UnderWay, reply: Reply) -> None:
        self._weather.answered()
        if self._exchanger.holds_session:
            self._vitals.exchanged(exchange.alive)
        self._clock.observe(reply.now)
        self._leave_out(self._refusals.answered(exchange.wish, reply))
        if exchange.results and self._in_hand.settle(exchange.results, reply):
            self._refusals.be_careful()
        if exchange.wish.wanted:
            self._looks.end(exchange.sent, exchange.wish, reply)
            self._receive(exchange.wish, reply)

    def _leave_out(self, unclaimable: dict[int, Refusal]) -> None:
        for job_id, refusal in unclaimable.items():
            self._named += 1
            self.logger.log(
                logging.WARNING if self._named <= _MOST_NAMED else logging.DEBUG,
                "The database refuses to let job %d (%s) be claimed: %s. It is left out for a while%s",
                *(job_id, refusal.task, refusal.message),
                "; more such jobs are named at level DEBUG" if self._named == _MOST_NAMED else "",
            )

    def _not_answered(self, exchange: UnderWay, error: BaseException) -> None:
        unknown = not isinstance(error, OutageError) or error.unknown
        self._results.put_back(exchange.results, perhaps_recorded=unknown)
        if exchange.wish.wanted:
            self._claims_unknown = self._claims_unknown or unknown
            self._looks.wake()
            self._emit_claim_error(error)

    def _emit_claim_error(self, error: BaseException) -> None:
        why = error.error if isinstance(error, OutageError) and error.error else error
        self._events.emit(event.WorkerGetJobError(worker=self._slots.any, error=why))

    def _may_send_ahead(self, wish: Wish, answer: Answer) -> bool:
        """Whether we know what to ask for next without having read the answer."""
        return (
            bool(self._demand.foreseeable and self._results)
            and 0 < wish.wanted <= answer.only_jobs < self._demand.room
            and not self._looks.slow
            and monotonic() - self._house_kept < _HOUSEKEEPING
        )

    async def _send_ahead(self, answer: Answer) -> None:
        wish = await self._wish(coming=answer.only_jobs)
        exchange = self._begin_exchange(wish)
        self._sent_ahead = exchange._replace(answer=asyncio.ensure_future(exchange.answer))
        await asyncio.sleep(0)  # until it is sent

    async def _recall(self) -> None:
        """Nobody will wait for the answer to what was sent ahead."""
        exchange, self._sent_ahead = self._sent_ahead, None
        if exchange is not None:
            sending = asyncio.ensure_future(exchange.answer)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._not_answered(exchange, asyncio.CancelledError())

    async def _wish(self, *, coming: int = 0) -> Wish:
        if self.too_many_refused:
            self._refuse_more()
            return NOTHING
        self._full = False
        wish = await self._demand.wish(has_results=bool(self._results), coming=coming)
        if wish is not None:
            return wish
        # Nobody can say what is forbidden: nothing is claimed until somebody can.
        self._nothing_left = False
        self._looks.postpone()
        if self._options.once and self._flags.error is not None:
            self.complaint = ConfigurationError(f"forbidden_flags failed: {self._flags.error!r}.")
            self.begin_stop()
        return NOTHING

    def _refuse_more(self) -> None:
        """Claim nothing for a while: the server may refuse the outcomes of all jobs."""
        if not self._full:
            self._full = True
            self.logger.error(
                "The database refuses to record the outcomes of %d jobs. No more jobs are claimed until it "
                "accepts some",
                self._results.refused,
            )
        self._looks.postpone()
        if self._options.once:
            self.begin_stop()

    def _delay(self) -> float | None:
        """Seconds until there is something to do, if nobody wakes us."""
        if self._results or self._sent_ahead:
            return 0.0
        delays = [_HOUSEKEEPING]
        if self._demand.room > 0:
            delays.append(self._looks.delay)
        now = monotonic()
        if self._results.again is not None:
            delays.append(self._results.again - now)
        if self._spare_queues.again is not None:
            delays.append(self._spare_queues.again - now)
        if self._in_hand.oldest is not None:
            delays.append(self._in_hand.oldest - now)
        return max(0.0, min(delays))

    def _check_idle(self) -> None:
        done = self._stopping or (self._options.once and (self._nothing_left or self._demand.closed))
        if not done or self._claims_unknown or self._sent_ahead:
            return
        if self._results.refused and not self._last_try:
            self._last_try = True
            self._results.try_all_again()
        # What the server refuses to the last is not waited for. The queues are freed with our other locks.
        if len(self._in_hand) == len(self._results.hopeless):
            self.idle.set()

    def _receive(self, wish: Wish, reply: Reply) -> None:
        if not reply.claimed:
            self._events.emit(event.WorkerGetJobEmpty(worker=self._slots.any))
        seen_all = not (reply.contended or wish.mark or wish.partial) and reply.next_queue == 0
        self._nothing_left = seen_all and not reply.claimed and not self._looks.due()
        self._in_hand.receive(reply.claimed)

    def _on_exhausted(self) -> None:
        """A task has too many abandoned threads, or not any more."""
        if self.abandoned.exhausted:
            self._in_hand.return_prefetched()
        self.look()

    def _end_run(self) -> None:
        self._demand.resume()
        self.wake()

    async def _reconnect(self) -> None:
        self._spare_queues.replace(self._in_hand.adopt(await self._exchanger.connect()))
        self._claims_unknown = False
        self._weather.answered()
        self._looks.wake()
        if self._declared_dead:
            self._declared_dead = False
            self.on_reconciled()

    async def _release_spare_queues(self) -> None:
        still_locked = await self._exchanger.unlock_queues(self._spare_queues.due)
        self._spare_queues.keep(still_locked)
        self._looks.wake()  # there may be jobs in those that were released

    async def _keep_house(self) -> None:
        """Now and then: see to what changes slowly."""
        self._house_kept, self._looks.in_vain = monotonic(), False
        await self._exchanger.refresh_tasks()
        await self._exchanger.renew(self._in_hand.all, self._clock.database_now())
