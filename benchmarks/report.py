"""The report on a run: tables on the terminal, and Markdown pages with charts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from benchmarks.charts import bar_chart, line_chart, number
from benchmarks.tables import Table, bullets, duration, markdown, one_line, plain, safe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.results import Curve, Measurement, Report

_T = TypeVar("_T")

_FIRST = ("python", "python tuned", "node", "node tuned")
_PAIRS = (("python", "node"), ("python", "node tuned"), ("python tuned", "node tuned"))
_MEASURED, _SCALING, _NOTES = "index.md", "scaling.md", "notes.md"
_LINKS = {
    _MEASURED: "See also: [scaling](scaling.md).",
    _SCALING: "See also: [the comparison with other queues](index.md).",
}
_NOTHING = "-"
_HOW_TO_READ = """\
Rounds are interleaved: every contender runs once, then every contender again, so that a slow moment of the
machine affects all of them. A cell shows `best / median` of the rounds. ↑ means that higher is better, ↓
that lower is better. The contender `python` is graphile-worker for Python, `node` is Graphile Worker for
Node.

Absolute figures mean little, because the machine is shared with other work and differs from yours. Ratios
within one run mean more. A ratio column `a : b` is a's figure divided by b's, for the best rounds and for
the medians. Where lower is better, a ratio below 1 is in favour of a. A goal is a limit on the ratio of the
medians, or on their difference.
"""
_HOW_TO_READ_CURVES = """\
A curve shows how a figure changes with size. Its shape matters: a flat line means that size has no effect.
The absolute figures come from a machine that is shared with other work and mean little elsewhere. An axis
with the ticks 1, 10, 100 is logarithmic. The line `python` is a worker with default settings, `python tuned`
is one with prefetch.
"""


class Verdict(NamedTuple):
    """A goal and its result."""

    bound: str
    """The goal, for example `≥ 1.5 times node`."""
    ratio: float | None
    """The ratio of the medians, or their difference; None if one of the two was not measured."""
    reached: bool

    def __str__(self) -> str:
        """Return the text of a table cell."""
        if self.ratio is None:
            return f"{self.bound}: not measured"
        # One digit more than elsewhere, so that a narrowly missed goal does not look reached.
        return f"{self.bound}: {'✓' if self.reached else '✗'} {self.ratio:.3f}"


def ratios(measurement: Measurement, pair: tuple[str, str]) -> tuple[float, float] | None:
    """Return the ratios of a pair, for best and median, or None if they are not defined."""
    one, other = (measurement.of(contender) for contender in pair)
    if one is None or other is None:
        return None
    better = measurement.higher_is_better
    divisors = other.best(higher_is_better=better), other.median
    if min(divisors) <= 0:
        return None
    return one.best(higher_is_better=better) / divisors[0], one.median / divisors[1]


def verdict_of(measurement: Measurement) -> Verdict | None:
    """Return the verdict on a measurement's goal, if it has one."""
    pair = _goal_pair(measurement)
    if pair is None or measurement.goal is None:
        return None
    better = measurement.higher_is_better
    bound = f"{'≥' if better else '≤'} {measurement.goal:g}"
    if measurement.is_difference:
        figure, bound = _difference(measurement, pair), f"{bound} {measurement.unit} more than {pair[1]}"
    else:
        found = ratios(measurement, pair)
        figure, bound = None if found is None else found[1], f"{bound} times {pair[1]}"
    reached = figure is not None and (figure >= measurement.goal if better else figure <= measurement.goal)
    return Verdict(bound, figure, reached)


def _difference(measurement: Measurement, pair: tuple[str, str]) -> float | None:
    one, other = (measurement.of(contender) for contender in pair)
    return None if one is None or other is None else one.median - other.median


def print_table(report: Report) -> None:
    """Print a table for each group, one for each curve, and the remarks."""
    for group, measurements in _groups(report).items():
        print(f"\n{group} (best / median)\n")
        print(plain(_table(measurements)))
        for note in _notes(measurements):
            print(f"  {note}")
    for curve in report.curves:
        print(f"\n{curve.title} ({curve.y_label})\n")
        print(plain(_curve_table(curve)))
    print()
    for line in [*_goals_reached(report), *map(one_line, report.remarks)]:
        print(line)


def write_markdown(report: Report, folder: Path) -> None:
    """Write index.md for measurements and scaling.md for curves, each only if the report has any."""
    folder.mkdir(parents=True, exist_ok=True)
    if report.measurements:
        _write(folder / _MEASURED, _measured_page(report, folder))
    if report.curves:
        _write(folder / _SCALING, _scaling_page(report, folder))
    _link(folder)


def about(report: Report) -> str:
    """Return when, where and how the run measured, as Markdown."""
    machine = report.machine
    memory = f"{machine.memory / 2**30:.1f} GiB of memory"
    facts = [
        f"When: {report.when}, in {duration(report.seconds)}",
        f"Machine: {machine.processor}, {machine.cores} cores, {memory}, {machine.system}",
        f"Versions: {', '.join(f'{name} {version}' for name, version in report.versions.items())}",
    ]
    text = f"{bullets(facts)}\n```sh\n{report.command}\n```\n"
    if report.remarks:
        text += f"\nRemarks:\n\n{bullets(report.remarks)}"
    return text


def _link(folder: Path) -> None:
    """Link the pages to each other, whichever of them was written first."""
    if all((folder / page).exists() for page in _LINKS):
        for page, link in _LINKS.items():
            text = (folder / page).read_text(encoding="utf-8")
            if link not in text:
                _write(folder / page, f"{text}\n{link}\n")


def _measured_page(report: Report, folder: Path) -> str:
    parts = ["# Benchmarks\n", about(report), "## How to read the tables\n", _HOW_TO_READ]
    if (folder / _NOTES).exists():
        parts.append(f"The [performance notes]({_NOTES}) list the optimizations that were tried.\n")
    parts += [f"**{line}**\n" for line in _goals_reached(report)]
    for group, measurements in _groups(report).items():
        parts += [f"## {_title(group)}\n", markdown(_table(measurements))]
        notes = _notes(measurements)
        if notes:
            parts.append(bullets(notes))
        if rates := _rates(measurements):
            name = f"{_slug(group)}.svg"
            _write(folder / name, bar_chart(_title(group), rates))
            parts.append(f"![{_title(group)}, a bar for each contender]({name})\n")
    return "\n".join(parts)


def _scaling_page(report: Report, folder: Path) -> str:
    parts = ["# Scaling\n", about(report), "## How to read the charts\n", _HOW_TO_READ_CURVES]
    for curve in report.curves:
        name = f"scaling-{_slug(curve.name)}.svg"
        _write(folder / name, line_chart(curve))
        parts += [f"## {safe(curve.title)}\n", f"![{safe(curve.title)}]({name})\n"]
        parts += [f"Figures ({safe(curve.y_label)}):\n", markdown(_curve_table(curve))]
    return "\n".join(parts)


def _table(measurements: Sequence[Measurement]) -> Table:
    found = [one.contender for case in measurements for one in case.series if one.values]
    contenders = [*(name for name in _FIRST if name in found), *_unique(found, without=_FIRST)]
    goal_pairs = [pair for case in measurements if (pair := _goal_pair(case))]
    pairs = [
        pair
        for pair in [*_PAIRS, *_unique(goal_pairs, without=_PAIRS)]
        if any(ratios(case, pair) for case in measurements)
    ]
    header = ["case", "unit", *contenders, *(" : ".join(pair) for pair in pairs)]
    rows = [_row(case, contenders, pairs) for case in measurements]
    left = {0, 1}
    if goal_pairs:
        left.add(len(header))
        header.append("goal")
        rows = [[*row, str(verdict_of(case) or "")] for row, case in zip(rows, measurements, strict=True)]
    return Table(header, rows, frozenset(left))


def _row(case: Measurement, contenders: list[str], pairs: list[tuple[str, str]]) -> list[str]:
    cells = [case.case, f"{case.unit} {'↑' if case.higher_is_better else '↓'}"]
    for name in contenders:
        one = case.of(name)
        cells.append(_both((one.best(higher_is_better=case.higher_is_better), one.median) if one else None))
    return cells + [_both(ratios(case, pair)) for pair in pairs]


def _both(figures: tuple[float, float] | None) -> str:
    return _NOTHING if figures is None else f"{number(figures[0])} / {number(figures[1])}"


def _goal_pair(measurement: Measurement) -> tuple[str, str] | None:
    if measurement.goal is None or measurement.against is None:
        return None
    if measurement.subject is not None:
        return measurement.subject, measurement.against
    # If only the tuned worker ran, or is compared with the untuned one, the goal is about the tuned worker.
    plain = measurement.against != "python" and measurement.of("python") is not None
    return ("python" if plain else "python tuned", measurement.against)


def _goals_reached(report: Report) -> list[str]:
    goals = [goal for one in report.measurements if (goal := verdict_of(one))]
    reached = sum(goal.reached for goal in goals)
    return [f"Goals reached: {reached} of {len(goals)}."] if goals else []


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    """Return the notes on contenders. A note that holds in every case appears once."""
    cases: dict[tuple[str, str], list[str]] = {}
    for case in measurements:
        for one in case.series:
            if one.note:
                cases.setdefault((one.contender, one_line(one.note)), []).append(case.case)
    return [
        f"{contender}: {note}"
        if len(where) == len(measurements)
        else f"{contender} ({'; '.join(where)}): {note}"
        for (contender, note), where in cases.items()
    ]


def _curve_table(curve: Curve) -> Table:
    figures = [{point.x: point.y for point in line.points} for line in curve.lines]
    rows = [
        [number(x), *(number(each[x]) if x in each else _NOTHING for each in figures)]
        for x in sorted({x for each in figures for x in each})
    ]
    return Table([curve.x_label, *(line.name for line in curve.lines)], rows, frozenset())


def _rates(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements for the chart: rates with more than one contender."""
    found: list[Measurement] = []
    for case in measurements:
        compared = [one for one in case.series if one.values]
        # The same figures appear again if a second goal was set on them.
        repeated = any(all(one in earlier.series for one in compared) for earlier in found)
        if case.higher_is_better and case.unit.endswith("/s") and len(compared) > 1 and not repeated:
            found.append(case)
    return found


def _groups(report: Report) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for one in report.measurements:
        groups.setdefault(one.group, []).append(one)
    return groups


def _unique(found: Iterable[_T], *, without: Iterable[_T]) -> list[_T]:
    """Return the distinct items in their order, without some."""
    excluded = set(without)
    return [one for one in dict.fromkeys(found) if one not in excluded]


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
