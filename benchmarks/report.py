"""What a run measured, for people: tables on the terminal, and pages of Markdown with charts."""

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

_FIRST = ("ours", "ours tuned", "node", "node tuned")
_PAIRS = (("ours", "node"), ("ours", "node tuned"), ("ours tuned", "node tuned"))
_MEASURED, _SCALING, _NOTES = "README.md", "scaling.md", "notes.md"
_LINKS = {
    _MEASURED: "How it scales is told in [scaling.md](scaling.md).",
    _SCALING: "The comparison with others is in [README.md](README.md).",
}
_NOTHING = "-"
_HOW_TO_READ = """\
Rounds are interleaved: every contender runs once, then every contender again, so that a slow moment of the
machine meets all of them. A cell tells `best / median` of the rounds. ↑ means that more is better, ↓ that
less is.

Absolute figures mean little: the machine is shared with other work, and yours is another one. Ratios within
one run mean more. A ratio column `a : b` is a's figure divided by b's, for the best rounds and for the
medians; where less is better, a ratio below 1 is in favour of a. A goal is a bound on the ratio of the
medians.
"""
_HOW_TO_READ_CURVES = """\
A curve shows how a figure changes with size. Look at its shape: a flat line does not care about size. The
heights come from a machine that is shared with other work and mean little elsewhere. On an axis whose ticks
are 1, 10, 100 the same distance is the same factor.
"""


class Verdict(NamedTuple):
    """What was promised, and what came out."""

    bound: str
    """For example `≥ 1.5 times node`."""
    ratio: float | None
    """Of the medians; None if one of the two was not measured."""
    reached: bool

    def __str__(self) -> str:
        """For a cell of a table."""
        if self.ratio is None:
            return f"{self.bound}: not measured"
        # A digit more than elsewhere: a goal missed by a little must not look like one reached.
        return f"{self.bound}: {'✓' if self.reached else '✗'} {self.ratio:.3f}"


def ratios(measurement: Measurement, pair: tuple[str, str]) -> tuple[float, float] | None:
    """The first of the pair to the second, best and median; None where that makes no sense."""
    ours, other = (measurement.of(contender) for contender in pair)
    if ours is None or other is None:
        return None
    better = measurement.higher_is_better
    divisors = other.best(higher_is_better=better), other.median
    if min(divisors) <= 0:
        return None
    return ours.best(higher_is_better=better) / divisors[0], ours.median / divisors[1]


def verdict_of(measurement: Measurement) -> Verdict | None:
    """The promise of a measurement, if there is one."""
    pair = _goal_pair(measurement)
    if pair is None or measurement.goal is None:
        return None
    found = ratios(measurement, pair)
    ratio = None if found is None else found[1]
    better = measurement.higher_is_better
    reached = ratio is not None and (ratio >= measurement.goal if better else ratio <= measurement.goal)
    return Verdict(f"{'≥' if better else '≤'} {measurement.goal:g} times {pair[1]}", ratio, reached)


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
    """Write README.md for measurements and scaling.md for curves: each only if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    if report.measurements:
        _write(folder / _MEASURED, _measured_page(report, folder))
    if report.curves:
        _write(folder / _SCALING, _scaling_page(report, folder))
    _link(folder)


def about(report: Report) -> str:
    """When, where and how it was measured."""
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
    """Let the pages name each other, whichever of them was written first."""
    if all((folder / page).exists() for page in _LINKS):
        for page, link in _LINKS.items():
            text = (folder / page).read_text(encoding="utf-8")
            if link not in text:
                _write(folder / page, f"{text}\n{link}\n")


def _measured_page(report: Report, folder: Path) -> str:
    parts = ["# Benchmarks\n", about(report), "## How to read it\n", _HOW_TO_READ]
    if (folder / _NOTES).exists():
        parts.append(f"What was tried for speed, and what it gave, is told in [{_NOTES}]({_NOTES}).\n")
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
    parts = ["# How it scales\n", about(report), "## How to read it\n", _HOW_TO_READ_CURVES]
    for curve in report.curves:
        name = f"scaling-{_slug(curve.name)}.svg"
        _write(folder / name, line_chart(curve))
        parts += [f"## {safe(curve.title)}\n", f"![{safe(curve.title)}]({name})\n"]
        parts += [f"Figures ({safe(curve.y_label)}):\n", markdown(_curve_table(curve))]
    return "\n".join(parts)


def _table(measurements: Sequence[Measurement]) -> Table:
    found = [one.contender for case in measurements for one in case.series if one.values]
    contenders = [*(name for name in _FIRST if name in found), *_unique(found, without=_FIRST)]
    asked = [pair for case in measurements if (pair := _goal_pair(case))]
    pairs = [
        pair
        for pair in [*_PAIRS, *_unique(asked, without=_PAIRS)]
        if any(ratios(case, pair) for case in measurements)
    ]
    header = ["case", "unit", *contenders, *(" : ".join(pair) for pair in pairs)]
    rows = [_row(case, contenders, pairs) for case in measurements]
    left = {0, 1}
    if asked:
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
    # Where only the tuned one ran, or where it is compared with the plain one, the promise is about it.
    plain = measurement.against != "ours" and measurement.of("ours") is not None
    return ("ours" if plain else "ours tuned", measurement.against)


def _goals_reached(report: Report) -> list[str]:
    goals = [goal for one in report.measurements if (goal := verdict_of(one))]
    reached = sum(goal.reached for goal in goals)
    return [f"Goals reached: {reached} of {len(goals)}."] if goals else []


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    """What to know about contenders; what holds in every case is said once."""
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
    """Those that make a chart: how many in a second, where there is something to compare."""
    found: list[Measurement] = []
    for case in measurements:
        compared = [one for one in case.series if one.values]
        # The same figures stand there once more if a second goal was set on them.
        again = any(all(one in earlier.series for one in compared) for earlier in found)
        if case.higher_is_better and case.unit.endswith("/s") and len(compared) > 1 and not again:
            found.append(case)
    return found


def _groups(report: Report) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for one in report.measurements:
        groups.setdefault(one.group, []).append(one)
    return groups


def _unique(found: Iterable[_T], *, without: Iterable[_T]) -> list[_T]:
    """In the order in which they were found."""
    left_out = set(without)
    return [one for one in dict.fromkeys(found) if one not in left_out]


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
