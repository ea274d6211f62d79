"""Processes for tasks that compute: ``executor="process"``.

They are started when they are first needed, and never forked: a child that was would keep the connections by
which others see that this worker lives. One that dies takes the job that it runs along, and no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import pickle
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._runtime.carried import carry, record_of
from graphile_worker._runtime.member import Member, spawn
from graphile_worker._runtime.pulse import Pulse
from graphile_worker._runtime.references import Program
from graphile_worker._runtime.threads import Threads
from graphile_worker._runtime.wire import (
    Answer,
    Asked,
    Done,
    Extended,
    Load,
    Logged,
    Raised,
    Request,
    Run,
    Setup,
    Stop,
    written,
)
from graphile_worker.durations import shown
from graphile_worker.errors import TaskError, TaskProcessError, TaskTimeoutError
from graphile_worker.liveness import since_boot
from graphile_worker.logs import report_lost_record
from graphile_worker.payload import decode_payload, encode_stored

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._runtime.deadline import Deadline
    from graphile_worker._runtime.member import Spawned
    from graphile_worker._runtime.references import Reference
    from graphile_worker._runtime.vitals import Vitals
    from graphile_worker.context import Stopping, Surroundings
    from graphile_worker.job import Job

_PATIENCE = 5.0
_LONG_IMPORT = 10.0
"""Seconds after which an import is worth a warning."""


class Processes:
    """Runs jobs in processes, each of which runs one at a time.

    Args:
        surroundings: What all jobs of the worker share.
        most: How many there may be at once; None: as many as there are processors for us.
        jobs_each: After how many jobs one is replaced; None: never.
        on_invalid_payload: What the worker says of payloads that do not fit.
        vitals: Until when its jobs are the worker's, if it says that it lives.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        most: int | None = None,
        jobs_each: int | None = None,
        on_invalid_payload: str = "retry",
        vitals: Vitals | None = None,
    ) -> None:
        self._surroundings = surroundings
        self._jobs_each = jobs_each
        self._on_invalid_payload = on_invalid_payload
        self._vitals = vitals
        self._pulse: Pulse | None = None
        self._places = asyncio.Semaphore(most or usable_processors())
        self._threads = Threads()
        self._numbers = itertools.count(1)
        self._idle: list[Member] = []
        self._all: set[Member] = set()
        self._starting: set[asyncio.Future[Any]] = set()
        self._left: list[asyncio.Future[Any]] = []  # begun, and nobody waits for them any more
        self._closed = False

    async def run(self, task: Reference, job: Job, deadline: Deadline | None) -> Any:
        """What the task returns for that job; if that is no longer of interest, the process is killed."""
        payload = _encoded(job)
        async with self._places:
            member = await self._take()
            try:
                reply = await self._have_run(member, task, job, payload, deadline)
            except BaseException:
                await member.kill()
                raise
            self._give_back(member)
        if isinstance(reply, Raised):
            raise reply.error.error()
        return None if reply.value is None else decode_payload(reply.value)

    def close(self) -> None:
        """Nothing more will run."""
        self._closed = True
        self._threads.close()
        while self._idle:
            self._idle.pop().leave()

    async def closed(self) -> None:
        """Until none of them is left."""
        self.close()
        if self._starting:
            await asyncio.wait(self._starting)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await asyncio.gather(*[member.exited.wait() for member in self._all])
        await asyncio.gather(*[member.kill() for member in self._all])
        if self._pulse is not None:
            if self._vitals is not None:
                self._vitals.on_confirm = lambda _sent: None
            self._pulse.close()

    async def _take(self) -> Member:
        while not self._closed:
            while self._idle:
                member = self._idle.pop()  # the one that was busy last: the others may be in swap by now
                if not member.exited.is_set():
                    member.in_use = True
                    return member
            await self._start()
        raise TaskError("The worker has stopped, and its processes have ended.")

    def _give_back(self, member: Member) -> None:
        member.jobs += 1
        if self._closed or (self._jobs_each is not None and member.jobs >= self._jobs_each):
            member.leave()
        else:
            self._idle.append(member)
        member.in_use = False

    async def _start(self) -> None:
        """Have one more that is idle. Whoever stops waiting for it leaves it to others."""
        if self._left:
            starting = self._left.pop()
        else:
            try:
                pulse = self._felt()  # here, for two threads would make two of it, and one would never beat
            except OSError as full:
                raise _no_process(full) from full
            starting = self._threads.run(copy_context(), self._spawn, pulse)
            self._starting.add(starting)
            starting.add_done_callback(self._started)
        try:
            _started, error = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if not starting.done():
                self._left.append(starting)
            raise
        if error is not None:
            raise _no_process(error) from error

    def _started(self, starting: asyncio.Future[Any]) -> None:
        self._starting.discard(starting)
        with suppress(ValueError):
            self._left.remove(starting)
        if starting.cancelled() or starting.result()[1] is not None:
            return
        member = Member(*starting.result()[0], on_exit=self._all.discard)
        self._all.add(member)
        if self._closed:
            member.leave()
        else:
            self._idle.append(member)

    def _spawn(self, pulse: Pulse) -> Spawned:
        """On a thread: it takes its time, the more so if there is much of a state."""
        return spawn(written(self._setup()), pulse.file)

    def _felt(self) -> Pulse:
        if self._pulse is None:
            shortest = None if self._vitals is None else self._vitals.patience()
            self._pulse = Pulse(shortest_silence=math.inf if shortest is None else shortest)
            if self._vitals is not None:
                self._vitals.on_confirm = self._pulse.beat
                self._pulse.beat(self._vitals.confirmed or 0.0)
        return self._pulse

    def _setup(self) -> Setup:
        state, stateless = None, ""
        if self._surroundings.state is not None:
            try:
                state = pickle.dumps(self._surroundings.state)
            except Exception as error:  # noqa: BLE001 - classes of the user's may do anything
                kind = type(self._surroundings.state).__name__
                stateless = f"it is a {kind}, and that cannot be pickled: {error}"
        return Setup(
            program=Program.ours(),
            worker_id=self._surroundings.worker_id,
            schema=self._surroundings.utils.schema,
            logger=self._logger().name,
            levels=_levels(),
            on_invalid_payload=self._on_invalid_payload,
            state=state,
            stateless=stateless,
        )

    async def _have_run(
        self, member: Member, task: Reference, job: Job, payload: bytes, deadline: Deadline | None
    ) -> Done | Raised:
        if task not in member.loaded:
            reply = await self._load(member, task, job)
            if isinstance(reply, Raised):
                return reply
            member.loaded.add(task)
        timeout = stopping = None
        if deadline is not None:
            deadline.begin()  # that there is a process, and that it has imported the task, is not its doing
            timeout, stopping = deadline.remaining, deadline.stopping
        bare = msgspec.structs.replace(job, payload=None)
        patience = None if self._vitals is None else self._vitals.patience(job.task_identifier)
        request, begun = self._request(member, job), since_boot()
        await member.send(Run(request, task, bare, payload, timeout, self._surroundings.now(), patience))
        stopping = stopping or self._surroundings.stopping(job.task_identifier)
        telling = asyncio.create_task(_tell(member, stopping), name="graphile-worker process")
        try:
            replying = self._listen(member, request, deadline)
            return await (replying if deadline is None else deadline.watch(replying))
        except (TaskProcessError, TaskTimeoutError) as error:
            # A freeze may be longer than the timeout too; then the process has ended itself before that.
            may_be_silence = member.was_killed or isinstance(error, TaskTimeoutError)
            if patience is None or not (may_be_silence and self._felt().was_silent(patience, since=begun)):
                raise
            self._surroundings.logger.warning(
                "Job %d (%s) is interrupted: its process ended itself because no heartbeat of this worker "
                "was recorded for %s",
                *(job.id, job.task_identifier, shown(patience)),
            )
            raise TaskProcessError(f"{error}, because its worker was silent", interrupted=True) from None
        finally:
            telling.cancel()

    async def _load(self, member: Member, task: Reference, job: Job) -> Done | Raised:
        """Have it import the task. That may take long, and longer than the task's timeout; or hang."""
        saying = asyncio.get_running_loop().call_later(
            _LONG_IMPORT,
            self._surroundings.logger.warning,
            "Job %d (%s) has waited for %s until its process has imported the task, and waits on",
            *(job.id, job.task_identifier, shown(_LONG_IMPORT)),
        )
        try:
            request = self._request(member, job)
            await member.send(Load(request, task))
            return await self._listen(member, request, None)
        finally:
            saying.cancel()

    def _request(self, member: Member, job: Job) -> Request:
        return Request(member.pid, next(self._numbers), job.id, job.attempts)

    async def _listen(self, member: Member, request: Request, deadline: Deadline | None) -> Done | Raised:
        """What it comes to; until then do what the process asks for."""
        while True:
            match await member.receive():
                case (Done() | Raised()) as reply:
                    if reply.request != request:
                        raise self._misdirected(request, reply.request)
                    return reply
                case Logged(record):
                    self._log(record)
                case Extended(seconds):
                    if deadline is not None:
                        deadline.extend(seconds)
                case Asked() as asked:
                    await member.send(await self._answer(asked))

    def _misdirected(self, request: Request, reply: Request) -> TaskProcessError:
        """Say that a process cannot be trusted any more; the code that gets the error ends it."""
        self._surroundings.logger.warning(
            "Process %d answered for another job than %d, so it is ended and the job runs again: %s instead "
            "of %s",
            *(request.process, request.job_id, reply, request),
        )
        return TaskProcessError("The process that ran it answered for another job", interrupted=True)

    async def _answer(self, asked: Asked) -> Answer:
        utils = self._surroundings.utils
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "add_job": self._surroundings.add_job,
            "add_spec": utils.add_spec,
            "add_jobs": utils.add_jobs,
        }
        try:
            value = await methods[asked.method](*asked.arguments, **asked.options)
        except Exception as error:  # noqa: BLE001 - it belongs to the task
            return Answer(asked.number, None, carry(error))
        return Answer(asked.number, value, None)

    def _log(self, carried: bytes) -> None:
        try:
            record, own = record_of(carried), self._logger()
            logger = own if record.name == own.name else logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        except BaseException as error:  # noqa: BLE001 - the job whose record this is goes on
            report_lost_record(error)

    def _logger(self) -> logging.Logger:
        logger: Any = self._surroundings.logger
        while isinstance(logger, logging.LoggerAdapter):
            logger = logger.logger
        found: logging.Logger = logger
        return found


def usable_processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _encoded(job: Job) -> bytes:
    try:
        return encode_stored(job.payload)
    except Exception as error:
        raise TaskError(
            f"The payload cannot be sent to the process that is to run {job.task_identifier!r}: {error}. "
            "What a middleware makes of a payload must be what JSON can carry, if the task runs in a process."
        ) from error


def _no_process(error: BaseException) -> TaskError:
    return TaskError(f"No process can be started for it: {error}.")


async def _tell(member: Member, stopping: Stopping) -> None:
    await stopping
    with suppress(OSError, TaskError):
        await member.send(Stop())


def _levels() -> dict[str, int]:
    known = {"": logging.root, **logging.root.manager.loggerDict}
    levels = {name: found.level for name, found in known.items() if isinstance(found, logging.Logger)}
    return {name: level for name, level in levels.items() if level}
