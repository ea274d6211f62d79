"""Rounds: each contender once, then each again, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.contenders import CONTENDERS, Missing
from benchmarks.driver import Broken, Refused
from benchmarks.measure import GaveUp
from benchmarks.results import Measurement, Series

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import TypeAlias

    from benchmarks.arena import Arena
    from benchmarks.contenders import Contender
    from benchmarks.measure import Figures

    Measure: TypeAlias = Callable[[Arena, Contender, int], Awaitable[Figures]]

_FEWEST = 50


@dataclass(frozen=True, slots=True)
class Goal:
    """What ours is to be of another: at least, or at most where less is better."""

    ratio: float
    against: tuple[str, ...]
    """Whoever of these does best."""
    name: str = ""
    """Of the measurement, if the figure has another goal already."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the figures that measuring gives, and how it is called."""

    key: str
    group: str
    case: str
    unit: str
    higher_is_better: bool = False
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure."""

    group: str
    name: str
    measure: Measure
    counts: Mapping[str, int]
    """Who takes part, and with how many jobs: those that are slow get fewer."""
    figures: tuple[Figure, ...]
    quick: bool = False
    """Whether a quick run has it."""
    scaled: bool = True
    """Whether a quick run has fewer jobs."""
    once: bool = False
    """Whether one round is enough."""

    def count(self, contender: str, *, quick: bool) -> int:
        """How many jobs it gets."""
        count = self.counts[contender]
        return max(min(_FEWEST, count), count // 10) if quick and self.scaled else count


@dataclass(slots=True)
class _Score:
    """What one contender showed so far."""

    size: str
    """How many jobs it got, if others got more."""
    rounds: list[Figures] = field(default_factory=list)
    problem: str = ""
    """Why it is out."""


async def run_case(arena: Arena, case: Case, *, rounds: int, quick: bool = False) -> list[Measurement]:
    """Measure all contenders in turn, in each round."""
    counts = {name: case.count(name, quick=quick) for name in case.counts}
    most = max(counts.values())
    scores = {
        name: _Score(f"with {count:,} of {most:,} jobs" if count < most else "")
        for name, count in counts.items()
    }
    for _ in range(1 if case.once else rounds):
        for name, score in scores.items():
            if not score.problem:
                await _measure(arena, case, CONTENDERS[name], counts[name], score)
    for name, score in scores.items():
        if rates := [figures["rate"] for figures in score.rounds if "rate" in figures]:
            arena.best[case.name, name] = max(rates)
    return [
        one
        for number, figure in enumerate(case.figures)
        for one in _measurements(
            figure,
            # How many jobs there were is said once.
            [_series(figure, name, score, with_size=number == 0) for name, score in scores.items()],
        )
    ]


async def _measure(arena: Arena, case: Case, contender: Contender, count: int, score: _Score) -> None:
    try:
        score.rounds.append(await case.measure(arena, contender, count))
    except Missing as missing:
        score.problem = f"missing: {missing}"
        remark = f"{contender.program} took no part: {missing}."
        if remark not in arena.remarks:
            arena.remarks.append(remark)
    except (GaveUp, Refused) as reason:
        score.problem = _first_line(reason)
    except (Broken, subprocess.SubprocessError) as failure:
        score.problem = _first_line(failure)
        arena.remarks.append(f"{contender.name} failed in {case.name!r}: {score.problem}.")


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _series(figure: Figure, name: str, score: _Score, *, with_size: bool) -> Series:
    values = [figures[figure.key] for figures in score.rounds if figure.key in figures]
    return Series(name, values, score.problem or (score.size if with_size else ""))


def _measurements(figure: Figure, series: list[Series]) -> list[Measurement]:
    """The figure for all contenders; and once more for each further goal, for the two concerned."""
    plain = Measurement(figure.group, figure.case, figure.unit, figure.higher_is_better, series)
    if not figure.goals:
        return [plain]
    found = []
    for goal in figure.goals:
        against = _best(plain, goal.against)
        shown = [one for one in series if not goal.name or one.contender in {against, "ours", "ours tuned"}]
        found.append(
            Measurement(
                figure.group,
                goal.name or figure.case,
                figure.unit,
                figure.higher_is_better,
                shown,
                goal.ratio,
                against,
            )
        )
    return found


def _best(measurement: Measurement, names: tuple[str, ...]) -> str:
    """Who of these did best; the first if none did anything."""
    medians = {name: series.median for name in names if (series := measurement.of(name))}
    if not medians:
        return names[0]
    choose = max if measurement.higher_is_better else min
    return choose(medians, key=lambda name: medians[name])
