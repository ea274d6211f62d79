"""The ledgers of a run, combined: the runs of each job, and the faults that were active meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from chaos.ledger import (
    CANCELLED,
    PAUSED,
    AddRequest,
    AddResult,
    Fault,
    HistoryRead,
    JobRemoved,
    KeptAttempt,
    Line,
    LockedQueue,
    Phase,
    ProcessExited,
    RemainingJob,
    RemoveRequest,
    RunEnded,
    RunStarted,
    WorkerEvent,
    WorkerReady,
    encode_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIED = "died"
"""The outcome of a run whose process ended in the middle of it."""
_DISRUPTIVE_KINDS = {"hold gil", "fork"}
_FREEZING = {"freeze", "long freeze", "hold gil"}
_PAUSE_TOLERANCE = 1.0
"""Seconds by which a recorded pause may exceed the fault that caused it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job."""

    started: RunStarted
    ended: RunEnded | None
    end: float
    """When the run or its process ended, or when its worker reported the end."""
    outcome: str

    @property
    def at(self) -> float:
        """When the run started."""
        return self.started.at

    @property
    def lines(self) -> list[str]:
        """The run's ledger lines, as evidence."""
        return [encode_line(line) for line in (self.started, self.ended) if line is not None]


def _without_caused_pauses(faults: list[Fault]) -> Iterator[Fault]:
    """Yield the faults, without the pauses that an injected fault caused."""
    caused = [fault for fault in faults if fault.kind in _FREEZING]
    for fault in faults:
        if fault.kind != PAUSED or not any(
            set(fault.pids) & set(other.pids)
            and other.at - _PAUSE_TOLERANCE <= fault.at
            and fault.until <= other.until + _PAUSE_TOLERANCE
            for other in caused
        ):
            yield fault


@dataclass
class History:
    """Everything that the ledgers of a run record."""

    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """The runs by token, in the order of time."""
    requests: dict[str, AddRequest] = field(default_factory=dict)
    added: dict[str, AddResult] = field(default_factory=dict)
    """The jobs that were added for certain."""
    removing: list[RemoveRequest] = field(default_factory=list)
    removed: dict[str, JobRemoved] = field(default_factory=dict)
    """The removals whose outcome is known."""
    faults: list[Fault] = field(default_factory=list)
    exits: list[ProcessExited] = field(default_factory=list)
    ready: list[WorkerReady] = field(default_factory=list)
    events: list[WorkerEvent] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    remaining: list[RemainingJob] = field(default_factory=list)
    locked_queues: list[LockedQueue] = field(default_factory=list)
    kept: list[KeptAttempt] | None = None
    """The attempts in the workers' history; None if it was not read."""

    @classmethod
    def of(cls, lines: Iterable[Line]) -> History:
        """Build a history from all ledger lines, in any order."""
        history, started, ended = cls(), list[RunStarted](), dict[str, RunEnded]()
        lines = list(lines)
        if any(isinstance(line, HistoryRead) for line in lines):
            history.kept = [line for line in lines if isinstance(line, KeptAttempt)]
        for line in lines:
            match line:
                case RunStarted():
                    started.append(line)
                case RunEnded():
                    ended[line.run] = line
                case AddRequest():
                    history.requests[line.token] = line
                case AddResult(job=int()):
                    history.added[line.token] = line
                case _:
                    history._store(line)
        history._order()
        history._pair(started, ended)
        located = list(map(history._located, history.faults))
        history.faults = sorted(_without_caused_pauses(located), key=lambda fault: fault.at)
        return history

    def _store(self, line: Line) -> None:
        match line:
            case Fault():
                self.faults.append(line)
            case ProcessExited():
                self.exits.append(line)
            case WorkerReady():
                self.ready.append(line)
            case WorkerEvent():
                self.events.append(line)
            case Phase():
                self.phases.append(line)
            case RemoveRequest():
                self.removing.append(line)
            case JobRemoved():
                self.removed[line.token] = line
            case RemainingJob():
                self.remaining.append(line)
            case LockedQueue():
                self.locked_queues.append(line)

    def _order(self) -> None:
        for lines in (self.exits, self.ready, self.events, self.phases):
            lines.sort(key=lambda line: line.at)

    def _pair(self, started: list[RunStarted], ended: dict[str, RunEnded]) -> None:
        events = defaultdict[tuple[int, int, int], list[WorkerEvent]](list)
        for event in self.events:
            events[event.pid, event.job, event.attempt].append(event)
        for line in sorted(started, key=lambda line: line.at):
            end = ended.get(line.run)
            if end is not None:
                run = Run(line, end, end.at, end.outcome)
            else:
                of_run = (event for event in events[line.pid, line.job, line.attempt] if event.at >= line.at)
                run = self._killed(line, next(of_run, None))
            self.runs[line.token].append(run)

    def _killed(self, started: RunStarted, event: WorkerEvent | None) -> Run:
        """Return a run whose process was killed with its worker, or by its worker, which emitted an event."""
        died = self._exit_time(started.pid, started.at)
        if event is None or died < event.at:
            return Run(started, None, died, DIED)
        return Run(started, None, event.at, CANCELLED if event.name == "job:interrupted" else DIED)

    def _exit_time(self, pid: int, after: float) -> float:
        """Return the first exit of a process id after a moment, because process ids are reused."""
        return next((exit_.at for exit_ in self.exits if exit_.pid == pid and exit_.at >= after), inf)

    def _located(self, fault: Fault) -> Fault:
        """Return a disruptive job's fault with the worker that ran it, and the time at which it did."""
        if fault.kind not in _DISRUPTIVE_KINDS:
            return fault
        run = next(iter(self.runs.get(fault.note, [])), None)
        if run is None:
            return Fault(at=fault.at, until=fault.at, kind=fault.kind, pids=[-1], note="the job never ran")
        until = run.end if fault.kind == "hold gil" else run.at + fault.seconds
        return Fault(at=run.at, until=until, kind=fault.kind, pids=[run.started.pid], note=fault.note)

    @property
    def all_runs(self) -> Iterator[Run]:
        """The runs of all jobs."""
        for runs in self.runs.values():
            yield from runs

    def reruns(self) -> Iterator[tuple[Run, Run]]:
        """Yield each run except the first of its job, after the run before it."""
        for runs in self.runs.values():
            yield from pairwise(runs)

    def phase_at(self, moment: float) -> str:
        """Return the phase of a moment."""
        place = bisect_right([phase.at for phase in self.phases], moment)
        return self.phases[place - 1].name if place else ""
