"""Rounds: every contender once, then every contender again, so that other load affects all alike."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.contenders import CONTENDERS, NotInstalledError
from benchmarks.driver import DriverBrokenError, RequestRejectedError
from benchmarks.measure import MeasurementTimeoutError
from benchmarks.results import Measurement, Series

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import TypeAlias

    from benchmarks.contenders import Contender
    from benchmarks.measure import Figures
    from benchmarks.workbench import Workbench

    Measure: TypeAlias = Callable[[Workbench, Contender, int], Awaitable[Figures]]

_FEWEST = 50
_SUBJECTS = ("python", "python tuned")


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on the ratio of `python` to another contender: a minimum, or a maximum if lower is better.

    With `is_difference` it is a limit on the difference.
    """

    ratio: float
    against: tuple[str, ...]
    """The other contenders. The best of them counts."""
    name: str = ""
    """The name of the measurement, if the figure already has another goal."""
    of: str = ""
    """The contender that the goal is about, if it is not `python`."""
    is_difference: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a measurement, and its label."""

    key: str
    group: str
    case: str
    unit: str
    higher_is_better: bool = False
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A case to measure."""

    group: str
    name: str
    measure: Measure
    counts: Mapping[str, int]
    """The number of jobs of each contender that takes part. Slow contenders get fewer."""
    figures: tuple[Figure, ...]
    quick: bool = False
    """Whether a quick run includes the case."""
    scaled: bool = True
    """Whether a quick run uses fewer jobs."""
    once: bool = False
    """Whether one round is enough."""

    def count(self, contender: str, *, quick: bool) -> int:
        """Return the number of jobs of a contender."""
        count = self.counts[contender]
        return max(min(_FEWEST, count), count // 10) if quick and self.scaled else count


@dataclass(slots=True)
class _Score:
    """The figures of one contender so far."""

    size: str
    """The number of jobs, if other contenders got more."""
    rounds: list[Figures] = field(default_factory=list)
    problem: str = ""
    """Why the contender dropped out."""


async def run_case(
    workbench: Workbench, case: Case, *, rounds: int, quick: bool = False
) -> list[Measurement]:
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
                await _measure(workbench, case, CONTENDERS[name], counts[name], score)
    for name, score in scores.items():
        if rates := [figures["rate"] for figures in score.rounds if "rate" in figures]:
            workbench.best[case.name, name] = max(rates)
    return [
        one
        for number, figure in enumerate(case.figures)
        for one in _measurements(
            figure,
            # Only the first figure mentions the number of jobs.
            [_series(figure, name, score, with_size=number == 0) for name, score in scores.items()],
        )
    ]


async def _measure(workbench: Workbench, case: Case, contender: Contender, count: int, score: _Score) -> None:
    try:
        score.rounds.append(await case.measure(workbench, contender, count))
    except NotInstalledError as missing:
        score.problem = f"missing: {missing}"
        remark = f"{contender.program} did not take part: {missing}."
        if remark not in workbench.remarks:
            workbench.remarks.append(remark)
    except (MeasurementTimeoutError, RequestRejectedError) as reason:
        score.problem = _first_line(reason)
    except (DriverBrokenError, subprocess.SubprocessError) as failure:
        score.problem = _first_line(failure)
        workbench.remarks.append(f"{contender.name} failed in {case.name!r}: {score.problem}.")


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _series(figure: Figure, name: str, score: _Score, *, with_size: bool) -> Series:
    values = [figures[figure.key] for figures in score.rounds if figure.key in figures]
    return Series(name, values, score.problem or (score.size if with_size else ""))


def _measurements(figure: Figure, series: list[Series]) -> list[Measurement]:
    """Return the figure for all contenders. Each further goal repeats it for the two contenders concerned."""
    plain = Measurement(figure.group, figure.case, figure.unit, figure.higher_is_better, series)
    if not figure.goals:
        return [plain]
    found = []
    for goal in figure.goals:
        against = _best(plain, goal.against)
        shown = [
            one
            for one in series
            if not goal.name or one.contender in {against, *([goal.of] if goal.of else _SUBJECTS)}
        ]
        found.append(
            Measurement(
                figure.group,
                goal.name or figure.case,
                figure.unit,
                figure.higher_is_better,
                shown,
                goal.ratio,
                against,
                goal.of or None,
                goal.is_difference,
            )
        )
    return found


def _best(measurement: Measurement, names: tuple[str, ...]) -> str:
    """Return the contender with the best median, or the first one if none has figures."""
    medians = {name: series.median for name in names if (series := measurement.of(name))}
    if not medians:
        return names[0]
    choose = max if measurement.higher_is_better else min
    return choose(medians, key=lambda name: medians[name])
