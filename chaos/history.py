"""The ledgers of a run, put together: which runs there were, of what, and what was broken meanwhile."""

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
    Answered,
    Asked,
    Begun,
    Ended,
    Exited,
    Fault,
    LeftJob,
    LeftLock,
    Line,
    Phase,
    Ready,
    Removed,
    Removing,
    Told,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIED = "died"
"""The outcome of a run whose process ended in the middle of it."""
_NUISANCES = {"hold gil", "fork"}
_FREEZING = {"freeze", "long freeze", "hold gil"}
_ECHO = 1.0
"""Seconds by which a pause may seem longer than what caused it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job."""

    begun: Begun
    ended: Ended | None
    end: float
    """When it ended, or its process did, or its worker told that it has."""
    outcome: str

    @property
    def at(self) -> float:
        """When it began."""
        return self.begun.at

    @property
    def lines(self) -> list[str]:
        """The evidence."""
        return [text_of(line) for line in (self.begun, self.ended) if line is not None]


def _without_echoes(faults: list[Fault]) -> Iterator[Fault]:
    """Without the pauses that we caused ourselves."""
    caused = [fault for fault in faults if fault.kind in _FREEZING]
    for fault in faults:
        if fault.kind != PAUSED or not any(
            set(fault.pids) & set(other.pids)
            and other.at - _ECHO <= fault.at
            and fault.until <= other.until + _ECHO
            for other in caused
        ):
            yield fault


@dataclass
class History:
    """All that is known of a run."""

    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """By token, in the order of time."""
    asked: dict[str, Asked] = field(default_factory=dict)
    added: dict[str, Answered] = field(default_factory=dict)
    """Those that were surely added."""
    removing: list[Removing] = field(default_factory=list)
    removed: dict[str, Removed] = field(default_factory=dict)
    """Those of which it is known what they came to."""
    faults: list[Fault] = field(default_factory=list)
    exits: list[Exited] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    left: list[LeftJob] = field(default_factory=list)
    locked_queues: list[LeftLock] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Iterable[Line]) -> History:
        """From all lines, in any order."""
        history, begun, ended = cls(), list[Begun](), dict[str, Ended]()
        for line in lines:
            match line:
                case Begun():
                    begun.append(line)
                case Ended():
                    ended[line.run] = line
                case Asked():
                    history.asked[line.token] = line
                case Answered(job=int()):
                    history.added[line.token] = line
                case _:
                    history._file(line)
        history._order()
        history._pair(begun, ended)
        located = list(map(history._located, history.faults))
        history.faults = sorted(_without_echoes(located), key=lambda fault: fault.at)
        return history

    def _file(self, line: Line) -> None:
        match line:
            case Fault():
                self.faults.append(line)
            case Exited():
                self.exits.append(line)
            case Ready():
                self.ready.append(line)
            case Told():
                self.told.append(line)
            case Phase():
                self.phases.append(line)
            case Removing():
                self.removing.append(line)
            case Removed():
                self.removed[line.token] = line
            case LeftJob():
                self.left.append(line)
            case LeftLock():
                self.locked_queues.append(line)

    def _order(self) -> None:
        for lines in (self.exits, self.ready, self.told, self.phases):
            lines.sort(key=lambda line: line.at)

    def _pair(self, begun: list[Begun], ended: dict[str, Ended]) -> None:
        told = defaultdict[tuple[int, int, int], list[Told]](list)
        for one in self.told:
            told[one.pid, one.job, one.attempt].append(one)
        for line in sorted(begun, key=lambda line: line.at):
            end = ended.get(line.run)
            if end is not None:
                run = Run(line, end, end.at, end.outcome)
            else:
                about = (one for one in told[line.pid, line.job, line.attempt] if one.at >= line.at)
                run = self._killed(line, next(about, None))
            self.runs[line.token].append(run)

    def _killed(self, begun: Begun, told: Told | None) -> Run:
        """A run whose process was killed: with its worker, or by its worker, which then told about it."""
        died = self._death_of(begun.pid, begun.at)
        if told is None or died < told.at:
            return Run(begun, None, died, DIED)
        return Run(begun, None, told.at, CANCELLED if told.name == "job:interrupted" else DIED)

    def _death_of(self, pid: int, after: float) -> float:
        """A number is given to another process some day, so the first one after that."""
        return next((exit_.at for exit_ in self.exits if exit_.pid == pid and exit_.at >= after), inf)

    def _located(self, fault: Fault) -> Fault:
        """A fault that is a job hit the worker that ran it, when that did."""
        if fault.kind not in _NUISANCES:
            return fault
        run = next(iter(self.runs.get(fault.note, [])), None)
        if run is None:
            return Fault(at=fault.at, until=fault.at, kind=fault.kind, pids=[-1], note="it never ran")
        until = run.end if fault.kind == "hold gil" else run.at + fault.seconds
        return Fault(at=run.at, until=until, kind=fault.kind, pids=[run.begun.pid], note=fault.note)

    @property
    def all_runs(self) -> Iterator[Run]:
        """Those of all jobs."""
        for runs in self.runs.values():
            yield from runs

    def reruns(self) -> Iterator[tuple[Run, Run]]:
        """Every run that is not the first, with the one before it."""
        for runs in self.runs.values():
            yield from pairwise(runs)

    def phase_at(self, moment: float) -> str:
        """In which part of the run it was."""
        place = bisect_right([phase.at for phase in self.phases], moment)
        return self.phases[place - 1].name if place else ""
