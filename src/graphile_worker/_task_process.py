"""The program of a task process, which runs jobs for a worker, one at a time.

The worker starts this program for tasks with ``executor="process"``. It sends requests over a socket, and
receives the replies. The main thread runs the tasks, because some libraries require that. Another thread
receives the requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker._base.payload import decode_payload, encode_payload
from graphile_worker._tasks.loader import load_tasks
from graphile_worker._tasks.task_reference import ImportState, import_reference
from graphile_worker._worker.execution.handlers import task_handler
from graphile_worker._worker.processes.context import (
    ProcessEnvironment,
    RemoteDeadline,
    RemoteProgress,
    WorkerProxy,
)
from graphile_worker._worker.processes.forks import ForkGuard
from graphile_worker._worker.processes.protocol import (
    Channel,
    Done,
    Load,
    Logged,
    MethodResult,
    Raised,
    Run,
    Setup,
    Stop,
)
from graphile_worker._worker.processes.remote_errors import pack_error, pack_record
from graphile_worker._worker.processes.shared_heartbeat import SharedHeartbeat
from graphile_worker.errors import GraphileWorkerError, TaskError
from graphile_worker.middleware.base import around_call, overriding
from graphile_worker.outcome import unwrap_control_flow
from graphile_worker.tasks import Task, task_of
from graphile_worker.workers import since_boot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from graphile_worker._tasks.task_reference import Reference
    from graphile_worker._worker.execution.handlers import Call, TaskHandler
    from graphile_worker._worker.processes.protocol import Request
    from graphile_worker.job import Job
    from graphile_worker.middleware import Middleware

_TIME_TO_END = 5.0
_CHECK_INTERVAL = 1.0
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2")
"""Signals that stop a worker. Service managers send them to all of its processes."""


def main() -> None:
    """Run jobs until the worker closes the connection."""
    ignore_worker_signals()
    connection, life_pipe, worker, heartbeat_file = map(int, sys.argv[1:])
    for file in (connection, life_pipe, heartbeat_file):
        os.set_inheritable(file, False)  # otherwise programs that tasks start would inherit them
    die_with(life_pipe)
    heartbeat = SharedHeartbeat(heartbeat_file)
    watch = Watch(worker, heartbeat)
    threading.Thread(target=watch.run, name="graphile-worker parent", daemon=True).start()
    channel = Channel(socket.socket(fileno=connection))
    forks = ForkGuard(channel.close, heartbeat.close, partial(os.close, life_pipe))
    setup = channel.receive()
    if isinstance(setup, Setup):
        TaskProcess(channel, setup, watch, forks).work()


class TaskProcess:
    """Receives requests from the worker, and runs their jobs.

    Args:
        channel: The connection to the worker.
        setup: What all jobs share.
        watch: Ends this process if its worker has died.
        forks: Ends children that tasks fork, when they leave the task.
    """

    def __init__(self, channel: Channel, setup: Setup, watch: Watch, forks: ForkGuard) -> None:
        self._channel = channel
        self._watch = watch
        self._forks = forks
        self._on_invalid_payload = setup.on_invalid_payload
        self._program = setup.program
        self._requests: SimpleQueue[tuple[Load | Run, RemoteDeadline | None] | None] = SimpleQueue()
        self._handlers: dict[Reference, TaskHandler] = {}
        self._call_layers: dict[Reference, Sequence[Middleware]] = {}
        self._busy = False
        self._worker = WorkerProxy(channel, setup.schema)
        self._progress = RemoteProgress(channel)
        self._environment = ProcessEnvironment(setup, self._worker, self._progress)
        Task._process_queue = self._worker
        sys.path[:] = setup.program.path
        sys.argv[:] = setup.program.arguments
        _log_through(channel, setup.levels)

    def work(self) -> None:
        """Run jobs until the worker closes the connection."""
        threading.Thread(target=self._receive_all, name="graphile-worker", daemon=True).start()
        while (item := self._requests.get()) is not None:
            request, deadline = item
            reply = copy_context().run(self._handle, request, deadline)
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()  # a process that is killed does not flush
            self._busy, self._watch.max_silence = False, None
            self._channel.send(reply)

    def _receive_all(self) -> None:
        while (message := self._receive()) is not None:
            match message:
                case Load():
                    self._busy = True
                    self._requests.put((message, None))
                case Run(timeout=timeout):
                    self._busy = True
                    deadline = None if timeout is None else RemoteDeadline(self._channel, timeout)
                    # Not on the main thread, because the next message may already be Stop.
                    self._environment.start_job(message.now, deadline)
                    self._watch.max_silence = message.max_silence
                    self._requests.put((message, deadline))
                case Stop():
                    self._environment.stop_job()
                case MethodResult():
                    self._worker.resolve(message)
        # The worker no longer needs this process, or has died. If it died, another worker may run the
        # job, so this process must not go on with it.
        if not self._busy:
            self._requests.put(None)
            threading.Event().wait(_TIME_TO_END)
        end_all()

    def _receive(self) -> Any:
        try:
            return self._channel.receive()
        except OSError:
            return None

    def _handle(self, request: Load | Run, deadline: RemoteDeadline | None) -> Done | Raised:
        try:
            if isinstance(request, Load):
                self._load(request.task)
                value = None
            else:
                value = self._run(request, deadline)
            self._forks.end_child()
            return Done(_reply_to(request), _as_json(value))
        except BaseException as error:  # noqa: BLE001 - sys.exit() too fails only the job
            self._forks.end_child(error)
            return Raised(_reply_to(request), pack_error(unwrap_control_flow(error)))
        finally:
            self._progress.flush()
            if deadline is not None:
                deadline.end()

    def _load(self, reference: Reference) -> None:
        task = self._find(reference)
        self._handlers[reference] = task_handler(task, on_invalid_payload=self._on_invalid_payload)
        # The module is not imported here, because it imports everything that a worker needs.
        app = sys.modules.get("graphile_worker.app")
        if app is not None and not task._is_unattached and isinstance(task.queue, app.App):
            task.queue._add_jobs_through(self._environment.utils)
            self._call_layers[reference] = overriding(task.queue.settings["middleware"] or (), "call")

    def _find(self, reference: Reference) -> Task[Any, Any, Any]:
        ImportState.is_importing = True
        try:
            self._program.import_first()
            if reference.folder is not None:
                found = load_tasks(reference.folder).get(reference.name)
            else:
                found = import_reference(reference, self._program)
        finally:
            ImportState.is_importing = False
        task = task_of(found)
        if task is None:
            raise TaskError(
                f"The process cannot find the task {reference.name!r}: it found {found!r} instead. Declare "
                "the task unconditionally, so that it also exists outside the worker."
            )
        return task

    def _run(self, run: Run, deadline: RemoteDeadline | None) -> Any:
        handler = self._handlers[run.task]
        job = msgspec.structs.replace(run.job, payload=decode_payload(run.payload))
        call = handler.call(job, self._environment, deadline)
        layers = () if handler.is_async else self._call_layers.get(run.task, ())
        function = around_call(layers, partial(handler.function, *call.args, **call.kwargs))
        return _call_function(function, handler, job, call, self._forks)


def _reply_to(message: Load | Run) -> Request:
    return message.request._replace(process=os.getpid())


def _call_function(
    function: Callable[[], Any], handler: TaskHandler, job: Job, call: Call, forks: ForkGuard
) -> Any:
    """Call the task's function and return its result. Await an awaitable on a new event loop."""
    # Without valid items, every item has the wrong type.
    value = None if call.batch is not None and not call.batch.valid_items else function()
    if call.batch is None and not inspect.isawaitable(value):
        return value

    async def settled() -> tuple[Any, BaseException | None]:
        try:
            found = await value if inspect.isawaitable(value) else value
            if call.batch is not None:
                await handler.check_result(job, call, found)
        except BaseException as error:  # noqa: BLE001 - raised below, without asyncio in its traceback
            forks.end_child(error)
            return None, error
        forks.end_child()  # before asyncio closes the event loop, whose files the parent shares
        return found if call.batch is None else None, None

    found, error = asyncio.run(settled())
    if error is not None:
        raise error
    return found


def _as_json(value: Any) -> bytes | None:
    """Encode the task's result. A result that is not JSON is dropped, because only middleware reads it."""
    if value is None:
        return None
    try:
        return encode_payload(value).encode()
    except GraphileWorkerError:
        return None


class _RemoteHandler(logging.Handler):
    """Sends log records to the worker."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._process = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if os.getpid() != self._process:  # a child that a task forked must not use the channel
                logging.StreamHandler().emit(record)
                return
            self._channel.send(Logged(pack_record(record)))
        except Exception:  # noqa: BLE001 - as all log handlers do
            self.handleError(record)


def _log_through(channel: Channel, levels: dict[str, int]) -> None:
    logging.getLogger().addHandler(_RemoteHandler(channel))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def ignore_worker_signals() -> None:
    """Ignore signals that stop workers: the worker decides when this process ends.

    Programs that a task starts, and children that it forks, have the usual signal handlers.
    """

    def ignore(_number: int, _frame: FrameType | None) -> None: ...

    previous = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in _STOP_SIGNALS}
    for number in previous:
        signal.signal(number, ignore)

    def restore() -> None:
        for number, handler in previous.items():
            if signal.getsignal(number) is ignore:
                signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def die_with(life_pipe: int) -> None:
    """Let the kernel kill this process when its worker ends, even in the middle of C code. Only on Linux."""
    with suppress(AttributeError, OSError):
        fcntl.fcntl(life_pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            if not os.read(life_pipe, 1):  # the worker has already ended
                end_all()


class Watch:
    """Ends this process when its worker has died, or has recorded no heartbeat for too long.

    The closed connection does not always show that: a program that a task has forked may keep it open. And a
    worker may be frozen for so long that other workers may run its job.

    Args:
        worker: The worker's process id.
        heartbeat: The time of the worker's last heartbeat.
    """

    def __init__(self, worker: int, heartbeat: SharedHeartbeat) -> None:
        self._worker = worker
        self._heartbeat = heartbeat
        self.max_silence: float | None = None
        """Seconds that the worker may be silent while a job runs; None while none runs."""

    def run(self) -> None:
        """Watch until the worker has died or been silent for too long. Then end this process."""
        while os.getppid() == self._worker and (left := self._seconds_left()) > 0:
            threading.Event().wait(min(left, _CHECK_INTERVAL))
        end_all()

    def _seconds_left(self) -> float:
        max_silence = self.max_silence
        return _CHECK_INTERVAL if max_silence is None else self._heartbeat.last + max_silence - since_boot()


def end_all() -> None:
    """Kill this process and the programs that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
