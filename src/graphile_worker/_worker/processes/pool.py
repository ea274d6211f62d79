"""`Processes`: the task processes of a worker, for tasks with ``executor="process"``.

A process is started when it is first needed. It is never forked, because a forked child would keep open the
connections by which other workers see that this worker is alive. If a process dies, only its job fails.
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

from graphile_worker._base import context_carrier
from graphile_worker._base.durations import format_seconds
from graphile_worker._base.logs import report_lost_record
from graphile_worker._base.payload import decode_payload, encode_stored
from graphile_worker._tasks.task_reference import Program
from graphile_worker._worker.execution.threads import Threads
from graphile_worker._worker.processes.child_process import ChildProcess, spawn
from graphile_worker._worker.processes.protocol import (
    Done,
    Extended,
    Load,
    Logged,
    MethodCall,
    MethodResult,
    Progressed,
    Raised,
    Request,
    Run,
    Setup,
    Stop,
    encode_message,
)
from graphile_worker._worker.processes.remote_errors import pack_error, unpack_record
from graphile_worker._worker.processes.shared_heartbeat import SharedHeartbeat
from graphile_worker.errors import TaskError, TaskProcessError, TaskTimeoutError
from graphile_worker.workers import since_boot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from graphile_worker._base.stop_signals import StopSignal
    from graphile_worker._tasks.task_reference import Reference
    from graphile_worker._worker.execution.deadline import Deadline
    from graphile_worker._worker.liveness.lease_state import LeaseState
    from graphile_worker._worker.processes.child_process import Spawned
    from graphile_worker.context import WorkerEnvironment
    from graphile_worker.job import Job

_TIME_TO_END = 5.0
"""Seconds that processes have to end by themselves, before they are killed."""
_LONG_IMPORT = 10.0
"""Seconds after which an import of a task is logged."""


class Processes:
    """Runs jobs in processes. Each process runs one job at a time.

    Args:
        environment: What the contexts of all jobs of the worker share.
        max_processes: The maximum number of processes; None for the number of usable processors.
        max_jobs_each: The number of jobs after which a process is replaced; None for never.
        on_invalid_payload: The worker's option of that name.
        lease_state: The state of the worker's lease; None without recovery.
    """

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        max_processes: int | None = None,
        max_jobs_each: int | None = None,
        on_invalid_payload: str = "retry",
        lease_state: LeaseState | None = None,
    ) -> None:
        self._environment = environment
        self._max_jobs_each = max_jobs_each
        self._on_invalid_payload = on_invalid_payload
        self._lease_state = lease_state
        self._heartbeat: SharedHeartbeat | None = None
        self._limit = asyncio.Semaphore(max_processes or usable_processors())
        self._threads = Threads()
        self._numbers = itertools.count(1)
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()
        self._starting: set[asyncio.Future[Any]] = set()
        self._unclaimed: list[asyncio.Future[Any]] = []  # starts whose jobs have stopped waiting
        self._closed = False

    async def run(self, task: Reference, job: Job, deadline: Deadline | None) -> Any:
        """Run the job in a process, and return the task's result. A cancellation kills the process."""
        payload = _encode(job)
        async with self._limit:
            process = await self._acquire()
            try:
                reply = await self._run(process, task, job, payload, deadline)
            except BaseException:
                await process.kill()
                raise
            self._release(process)
        if isinstance(reply, Raised):
            raise reply.error.rebuild()
        return None if reply.value is None else decode_payload(reply.value)

    def close(self) -> None:
        """Let idle processes exit. No job starts after that."""
        self._closed = True
        self._threads.close()
        while self._idle:
            self._idle.pop().leave()

    async def closed(self) -> None:
        """Close, and wait until all processes have exited. Kills those that do not exit in time."""
        self.close()
        if self._starting:
            await asyncio.wait(self._starting)
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIME_TO_END):
                await asyncio.gather(*[process.exited.wait() for process in self._all])
        await asyncio.gather(*[process.kill() for process in self._all])
        if self._heartbeat is not None:
            if self._lease_state is not None:
                self._lease_state.on_confirm = lambda _sent: None
            self._heartbeat.close()

    async def _acquire(self) -> ChildProcess:
        while not self._closed:
            while self._idle:
                process = self._idle.pop()  # the last one used, because the others may be swapped out
                if not process.exited.is_set():
                    process.in_use = True
                    return process
            await self._start()
        raise TaskError("The worker has stopped, so it starts no process.")

    def _release(self, process: ChildProcess) -> None:
        process.jobs += 1
        if self._closed or (self._max_jobs_each is not None and process.jobs >= self._max_jobs_each):
            process.leave()
        else:
            self._idle.append(process)
        process.in_use = False

    async def _start(self) -> None:
        """Start another process. If a job stops waiting for its start, the next job uses the process."""
        if self._unclaimed:
            starting = self._unclaimed.pop()
        else:
            try:
                # Not on the thread, because two threads could create two heartbeats. The worker would update
                # only one of them.
                heartbeat = self._shared_heartbeat()
            except OSError as error:
                raise _start_error(error) from error
            starting = self._threads.run(copy_context(), self._spawn, heartbeat)
            self._starting.add(starting)
            starting.add_done_callback(self._started)
        try:
            _started, failure = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if not starting.done():
                self._unclaimed.append(starting)
            raise
        if failure is not None:
            raise _start_error(failure) from failure

    def _started(self, starting: asyncio.Future[Any]) -> None:
        self._starting.discard(starting)
        with suppress(ValueError):
            self._unclaimed.remove(starting)
        if starting.cancelled() or starting.result()[1] is not None:
            return
        spawned: Spawned = starting.result()[0]
        process = ChildProcess(
            spawned.process, spawned.connection, spawned.life_pipe, on_exit=self._all.discard
        )
        self._all.add(process)
        if self._closed:
            process.leave()
        else:
            self._idle.append(process)

    def _spawn(self, heartbeat: SharedHeartbeat) -> Spawned:
        """Start a process. This runs on a thread, because it takes long if the state is large."""
        return spawn(encode_message(self._setup()), heartbeat.file)

    def _shared_heartbeat(self) -> SharedHeartbeat:
        if self._heartbeat is None:
            shortest = None if self._lease_state is None else self._lease_state.max_silence()
            self._heartbeat = SharedHeartbeat(shortest_silence=math.inf if shortest is None else shortest)
            if self._lease_state is not None:
                self._lease_state.on_confirm = self._heartbeat.beat
                self._heartbeat.beat(self._lease_state.confirmed or 0.0)
        return self._heartbeat

    def _setup(self) -> Setup:
        state, state_error = None, ""
        if self._environment.state is not None:
            try:
                state = pickle.dumps(self._environment.state)
            except Exception as error:  # noqa: BLE001 - the user's classes may raise anything
                kind = type(self._environment.state).__name__
                state_error = f"it is a {kind}, which cannot be pickled: {error}"
        return Setup(
            program=Program.current(),
            worker_id=self._environment.worker_id,
            schema=self._environment.utils.schema,
            logger=self._logger().name,
            levels=_logger_levels(),
            on_invalid_payload=self._on_invalid_payload,
            state=state,
            state_error=state_error,
        )

    async def _run(
        self, process: ChildProcess, task: Reference, job: Job, payload: bytes, deadline: Deadline | None
    ) -> Done | Raised:
        if task not in process.loaded:
            reply = await self._load(process, task, job)
            if isinstance(reply, Raised):
                return reply
            process.loaded.add(task)
        timeout = None
        if deadline is None:
            stop_signal = self._environment.stop_signals.shared(job.task_identifier)
        else:
            deadline.begin()  # starting the process and importing the task do not count
            timeout, stop_signal = deadline.remaining, deadline.stop_requested
        bare = msgspec.structs.replace(job, payload=None)
        max_silence = None
        if self._lease_state is not None:
            max_silence = self._lease_state.max_silence(job.task_identifier)
        request, started_at = self._request(process, job), since_boot()
        now, carried = self._environment.now(), context_carrier.capture() or None
        await process.send(Run(request, task, bare, payload, timeout, now, max_silence, carried))
        stopping = asyncio.create_task(_forward_stop(process, stop_signal), name="graphile-worker process")
        try:
            replying = self._receive_reply(process, request, job, deadline)
            return await (replying if deadline is None else deadline.watch(replying))
        except (TaskProcessError, TaskTimeoutError) as error:
            # The worker may have been frozen for longer than the timeout. Then the process has exited itself.
            may_be_silence = process.was_killed or isinstance(error, TaskTimeoutError)
            if max_silence is None or not (
                may_be_silence and self._shared_heartbeat().was_silent(max_silence, since=started_at)
            ):
                raise
            self._environment.logger.warning(
                "Job %d (%s) was interrupted: its process exited because this worker recorded no heartbeat "
                "for %s",
                job.id,
                job.task_identifier,
                format_seconds(max_silence),
            )
            raise TaskProcessError(
                f"{error}, because its worker recorded no heartbeat", interrupted=True
            ) from None
        finally:
            stopping.cancel()

    async def _load(self, process: ChildProcess, task: Reference, job: Job) -> Done | Raised:
        """Let the process import the task. The task's timeout does not cover it, so warn if it takes long."""
        warning = asyncio.get_running_loop().call_later(
            _LONG_IMPORT,
            self._environment.logger.warning,
            "Job %d (%s) has waited for %s while its process imports the task, and is still waiting",
            job.id,
            job.task_identifier,
            format_seconds(_LONG_IMPORT),
        )
        try:
            request = self._request(process, job)
            await process.send(Load(request, task))
            return await self._receive_reply(process, request, job, None)
        finally:
            warning.cancel()

    def _request(self, process: ChildProcess, job: Job) -> Request:
        return Request(process.pid, next(self._numbers), job.id, job.attempts)

    async def _receive_reply(
        self, process: ChildProcess, request: Request, job: Job, deadline: Deadline | None
    ) -> Done | Raised:
        """Wait for the reply to the request. Until then, handle the process's other messages."""
        while True:
            match await process.receive():
                case (Done() | Raised()) as reply:
                    if reply.request != request:
                        raise self._wrong_reply(request, reply.request)
                    return reply
                case Logged(record):
                    self._log(record)
                case Extended(seconds):
                    if deadline is not None:
                        deadline.extend(seconds)
                case Progressed(job_id, attempt, progress):
                    if (job_id, attempt) == (job.id, job.attempts):  # not a thread of an earlier job
                        self._environment.progress.report(job, progress)
                case MethodCall() as call:
                    await process.send(await self._call_method(call))

    def _wrong_reply(self, request: Request, reply: Request) -> TaskProcessError:
        """Log a reply to another request. The caller then ends the process."""
        self._environment.logger.warning(
            "Process %d replied for another job than %d: %s instead of %s. The worker kills the process, and "
            "the job runs again",
            request.process,
            request.job_id,
            reply,
            request,
        )
        return TaskProcessError("The job's process replied for another job", interrupted=True)

    async def _call_method(self, call: MethodCall) -> MethodResult:
        utils = self._environment.utils
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "add_job": self._environment.add_job,
            "add_spec": utils.add_spec,
            "add_jobs": utils.add_jobs,
        }
        try:
            with context_carrier.restored(call.context or {}):
                value = await methods[call.method](*call.arguments, **call.options)
        except Exception as error:  # noqa: BLE001 - it is raised in the task
            return MethodResult(call.number, None, pack_error(error))
        return MethodResult(call.number, value, None)

    def _log(self, packed: bytes) -> None:
        try:
            record, own = unpack_record(packed), self._logger()
            logger = own if record.name == own.name else logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        except BaseException as error:  # noqa: BLE001 - a failing log handler does not end the job
            report_lost_record(error)

    def _logger(self) -> logging.Logger:
        logger: Any = self._environment.logger
        while isinstance(logger, logging.LoggerAdapter):
            logger = logger.logger
        found: logging.Logger = logger
        return found


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _encode(job: Job) -> bytes:
    try:
        return encode_stored(job.payload)
    except Exception as error:
        raise TaskError(
            f"The payload cannot be sent to the process that runs {job.task_identifier!r}: {error}. If the "
            "task runs in a process, middleware must return payloads that can be encoded as JSON."
        ) from error


def _start_error(error: BaseException) -> TaskError:
    return TaskError(f"Cannot start a process for the job: {error}.")


async def _forward_stop(process: ChildProcess, stop_signal: StopSignal) -> None:
    """Wait for the stop signal, and pass it on to the process."""
    await stop_signal
    with suppress(OSError, TaskError):
        await process.send(Stop())


def _logger_levels() -> dict[str, int]:
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    levels = {name: logger.level for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
    return {name: level for name, level in levels.items() if level}
