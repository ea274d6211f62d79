"""A process that runs jobs for a worker, one at a time: what is started for ``executor="process"``.

The worker says what to do over a socket, and hears what became of it. The main thread runs the tasks, for
some libraries insist on that; another one listens.
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

from graphile_worker._runtime.carried import carry, carry_record
from graphile_worker._runtime.forks import ForkGuard
from graphile_worker._runtime.handlers import OfTask
from graphile_worker._runtime.process_context import Limits, Shared, ThroughWorker
from graphile_worker._runtime.pulse import Pulse
from graphile_worker._runtime.references import Importing, follow
from graphile_worker._runtime.wire import Answer, Done, Line, Load, Logged, Raised, Run, Setup, Stop
from graphile_worker.errors import GraphileWorkerError, TaskError
from graphile_worker.liveness import since_boot
from graphile_worker.loader import load_tasks
from graphile_worker.outcome import unwrapped
from graphile_worker.payload import decode_payload, encode_payload
from graphile_worker.tasks import Task, task_of

if TYPE_CHECKING:
    from types import FrameType

    from graphile_worker._runtime.handlers import Call
    from graphile_worker._runtime.references import Reference
    from graphile_worker._runtime.wire import Request
    from graphile_worker.job import Job

_TIME_TO_END = 5.0
_BETWEEN_LOOKS = 1.0
_OF_THE_WORKER = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2")
"""Signals that tell a worker to stop; service managers send them to all of its processes."""


def main() -> None:
    """Do what the worker says until it says nothing more."""
    leave_signals_to_worker()
    end, lifeline, worker, shared = map(int, sys.argv[1:])
    for file in (end, lifeline, shared):
        os.set_inheritable(file, False)  # or programs that tasks start would have them
    die_with(lifeline)
    pulse = Pulse(shared)
    watch = Watch(worker, pulse)
    threading.Thread(target=watch.run, name="graphile-worker parent", daemon=True).start()
    line = Line(socket.socket(fileno=end))
    forks = ForkGuard(line.close, pulse.close, partial(os.close, lifeline))
    setup = line.receive()
    if isinstance(setup, Setup):
        ProcessMember(line, setup, watch, forks).work()


class ProcessMember:
    """What the process does.

    Args:
        line: To the worker.
        setup: What all jobs share.
        watch: Ends all if need be.
        forks: Ends children that tasks fork, when they leave the task.
    """

    def __init__(self, line: Line, setup: Setup, watch: Watch, forks: ForkGuard) -> None:
        self._line = line
        self._watch = watch
        self._forks = forks
        self._on_invalid_payload = setup.on_invalid_payload
        self._program = setup.program
        self._inbox: SimpleQueue[tuple[Load | Run, Limits | None] | None] = SimpleQueue()
        self._handlers: dict[Reference, OfTask] = {}
        self._busy = False
        self._worker = ThroughWorker(line, setup.schema)
        self._shared = Shared(setup, self._worker)
        Task.queue_of_process = self._worker
        sys.path[:], sys.argv[:] = setup.program.path, setup.program.arguments
        _log_through(line, setup.levels)

    def work(self) -> None:
        """Until there is no more to do."""
        threading.Thread(target=self._listen, name="graphile-worker", daemon=True).start()
        while (item := self._inbox.get()) is not None:
            reply = copy_context().run(self._do, *item)
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()  # what is killed does not
            self._busy, self._watch.patience = False, None
            self._line.send(reply)

    def _listen(self) -> None:
        while (message := self._heard()) is not None:
            match message:
                case Load():
                    self._busy = True
                    self._inbox.put((message, None))
                case Run(timeout=timeout):
                    self._busy = True
                    limits = None if timeout is None else Limits(self._line, timeout)
                    # Here, and not where it runs: that it is to stop may be what we read next.
                    self._shared.begin(message.now, limits)
                    self._watch.patience = message.patience
                    self._inbox.put((message, limits))
                case Stop():
                    self._shared.stop()
                case Answer():
                    self._worker.answered(message)
        # The worker wants this process no more, or has died: then nobody may go on with its job.
        if not self._busy:
            self._inbox.put(None)
            threading.Event().wait(_TIME_TO_END)
        end_all()

    def _heard(self) -> Any:
        try:
            return self._line.receive()
        except OSError:
            return None

    def _do(self, message: Load | Run, limits: Limits | None) -> Done | Raised:
        try:
            if isinstance(message, Load):
                self._load(message.task)
                value = None
            else:
                value = self._run(message, limits)
            self._forks.end_child()
            return Done(_replied(message), _as_json(value))
        except BaseException as error:  # noqa: BLE001 - sys.exit() included: it is the job that fails
            self._forks.end_child(error)
            return Raised(_replied(message), carry(unwrapped(error)))
        finally:
            if limits is not None:
                limits.end()

    def _load(self, reference: Reference) -> None:
        task = self._find(reference)
        self._handlers[reference] = OfTask(task, on_invalid_payload=self._on_invalid_payload)
        app = sys.modules.get("graphile_worker.app")  # not imported here: it brings all that a worker needs
        if app is not None and not task.is_loose and isinstance(task.queue, app.App):
            task.queue.add_jobs_through(self._shared.utils)

    def _find(self, reference: Reference) -> Task[Any, Any, Any]:
        Importing.now = True
        try:
            if reference.folder is not None:
                found = load_tasks(reference.folder).get(reference.name)
            else:
                found = follow(reference, self._program)
        finally:
            Importing.now = False
        task = task_of(found)
        if task is None:
            raise TaskError(
                f"The process that is to run it does not find the task {reference.name!r}: where it should "
                f"be is {found!r}. Was it declared under a condition that holds only in the worker?"
            )
        return task

    def _run(self, run: Run, limits: Limits | None) -> Any:
        handler = self._handlers[run.task]
        job = msgspec.structs.replace(run.job, payload=decode_payload(run.payload))
        call = handler.call(job, self._shared, limits)
        return _value(handler, job, call, self._forks)


def _replied(message: Load | Run) -> Request:
    return message.request._replace(process=os.getpid())


def _value(handler: OfTask, job: Job, call: Call, forks: ForkGuard) -> Any:
    """What the function returns; if there is something to await, on an event loop of its own."""
    if call.batch is not None and not call.batch.good:
        value = None  # none of its items can be run
    else:
        value = handler.function(*call.args, **call.kwargs)
    if call.batch is None and not inspect.isawaitable(value):
        return value

    async def settled() -> tuple[Any, BaseException | None]:
        try:
            found = await value if inspect.isawaitable(value) else value
            if call.batch is not None:
                await handler.conclude(job, call, found)
        except BaseException as error:  # noqa: BLE001 - the same; and without asyncio in its traceback
            forks.end_child(error)
            return None, error
        forks.end_child()  # before asyncio closes the event loop, whose files are also the parent's
        return found if call.batch is None else None, None

    found, error = asyncio.run(settled())
    if error is not None:
        raise error
    return found


def _as_json(value: Any) -> bytes | None:
    """What the task returned. Few read it, so what is no JSON is left out."""
    if value is None:
        return None
    try:
        return encode_payload(value).encode()
    except GraphileWorkerError:
        return None


class _Logging(logging.Handler):
    """Has the worker log."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self._process = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if os.getpid() != self._process:  # a task has forked: the line is not for two
                logging.StreamHandler().emit(record)
                return
            self._line.send(Logged(carry_record(record)))
        except Exception:  # noqa: BLE001 - as handlers do
            self.handleError(record)


def _log_through(line: Line, levels: dict[str, int]) -> None:
    logging.getLogger().addHandler(_Logging(line))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def leave_signals_to_worker() -> None:
    """The worker decides what becomes of its jobs. A program or a process that a task starts is as usual."""

    def ignore(_number: int, _frame: FrameType | None) -> None: ...

    previous = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in _OF_THE_WORKER}
    for number in previous:
        signal.signal(number, ignore)

    def restore() -> None:
        for number, handler in previous.items():
            if signal.getsignal(number) is ignore:
                signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def die_with(lifeline: int) -> None:
    """Have the kernel end this process with its worker, even in the middle of C code: only Linux does."""
    with suppress(AttributeError, OSError):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            if not os.read(lifeline, 1):  # it has died before we could ask
                end_all()


class Watch:
    """Ends this process if nobody wants it any more, and nothing else has told.

    Its worker is gone, but something that a task has forked keeps its lines open; or the worker has been
    frozen for so long that others may run the job.

    Args:
        worker: The worker's process.
        pulse: When it was last known to live.
    """

    def __init__(self, worker: int, pulse: Pulse) -> None:
        self._worker, self._pulse = worker, pulse
        self.patience: float | None = None
        """For how long the worker may be silent, while there is a job."""

    def run(self) -> None:
        """Look on for ever."""
        while os.getppid() == self._worker and (left := self._patience_left()) > 0:
            threading.Event().wait(min(left, _BETWEEN_LOOKS))
        end_all()

    def _patience_left(self) -> float:
        patience = self.patience
        return _BETWEEN_LOOKS if patience is None else self._pulse.last + patience - since_boot()


def end_all() -> None:
    """End this process and what it has started, now."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
