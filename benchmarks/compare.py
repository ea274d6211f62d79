"""Compare two benchmark runs, and list what got slower beyond noise."""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if not __package__:
    # Run as a script: only this file's folder is on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import Measurement, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

_PYTHON_CONTENDERS = ("python", "python tuned")
_FIRST_REFERENCES = ("node", "node tuned")
_LEAST_NOISE = 0.10
_DESCRIPTION = """\
List what got slower from one benchmark run to another. Figures are relative to a contender that both runs
measured, Node's worker if possible, because absolute figures of a shared machine depend on its load. Slower
means that the median got worse by more than 10 %, and by more than the spread of the rounds in either run.
The exit status is 0 if nothing got slower, 1 if something did, and 2 if the files cannot be compared.
"""


class Key(NamedTuple):
    """The identity of a compared figure of graphile-worker for Python."""

    group: str
    case: str
    unit: str
    contender: str

    def __str__(self) -> str:
        """Return a readable form."""
        return f"{self.group}: {self.case} ({self.contender}, {self.unit})"


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a figure between two runs."""

    key: Key
    before: float
    after: float
    noise: float
    """The fraction of the median below which a change is noise."""
    reference: str | None
    """The contender that the figures are relative to, or None if they are absolute."""
    higher_is_better: bool

    @property
    def moved(self) -> float:
        """The change as a fraction of the earlier median."""
        if self.before == 0:
            return float("inf") if self.after else 0.0
        return self.after / self.before - 1

    @property
    def slower(self) -> bool:
        """Whether the figure got worse beyond noise."""
        return (-self.moved if self.higher_is_better else self.moved) > self.noise

    @property
    def faster(self) -> bool:
        """Whether the figure got better beyond noise."""
        return (self.moved if self.higher_is_better else -self.moved) > self.noise

    def __str__(self) -> str:
        """Return a readable form."""
        unit = f"times {self.reference}" if self.reference else self.key.unit
        figures = f"{self.before:,.4g} → {self.after:,.4g} {unit}"
        return f"{self.key}: {figures}, {self.moved:+.1%} (noise {self.noise:.1%})"


def compare(old: Report, new: Report) -> list[Change]:
    """Return the changes of the figures that both runs have."""
    before, after = _figures(old), _figures(new)
    return [_change(key, before[key], after[key]) for key in before if key in after]


def only_in(one: Report, other: Report) -> list[Key]:
    """Return the figures that the other run lacks."""
    missing = _figures(other)
    return [key for key in _figures(one) if key not in missing]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files. Return the exit status."""
    parser = argparse.ArgumentParser(prog="compare.py", description=_DESCRIPTION)
    parser.add_argument("old", metavar="OLD", type=Path, help="results.json of the earlier run")
    parser.add_argument("new", metavar="NEW", type=Path, help="results.json of the later run")
    options = parser.parse_args(arguments)
    try:
        old, new = _read(options.old), _read(options.new)
    except _BadFileError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    changes = compare(old, new)
    if not changes:
        print(f"compare.py: {options.old} and {options.new} have no Python figure in common", file=sys.stderr)
        return 2
    _print(old, new, changes)
    return 1 if any(change.slower for change in changes) else 0


class _BadFileError(Exception):
    pass


def _read(path: Path) -> Report:
    try:
        return Report.read(path)
    except OSError as error:
        raise _BadFileError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _BadFileError(f"{path} does not contain benchmark results: {error}") from error


def _print(old: Report, new: Report, changes: list[Change]) -> None:
    slower = [change for change in changes if change.slower]
    faster = [change for change in changes if change.faster]
    _print_list("Slower", slower)
    _print_list("Faster", faster)
    _print_list("Only in the old run", only_in(old, new))
    _print_list("Only in the new run", only_in(new, old))
    _print_list("Remarks", _remarks(old, new, changes))
    unchanged = len(changes) - len(slower) - len(faster)
    print(f"{len(slower)} slower, {len(faster)} faster, {unchanged} unchanged")


def _print_list(heading: str, lines: Sequence[object]) -> None:
    if lines:
        print(f"{heading}:", *(f"  {line}" for line in lines), "", sep="\n")


def _remarks(old: Report, new: Report, changes: list[Change]) -> list[str]:
    remarks = [
        f"{name} was {version} and is {new.versions[name]}"
        for name, version in old.versions.items()
        if new.versions.get(name, version) != version
    ]
    if old.machine != new.machine:
        remarks.append("the runs are from different machines")
    absolute = [change for change in changes if change.reference is None]
    if absolute:
        remarks.append(
            "no other contender is in both runs, so these figures are absolute and depend on the load:"
        )
        remarks += [f"  {change.key}" for change in absolute]
    return remarks


def _figures(report: Report) -> dict[Key, Measurement]:
    return {
        Key(one.group, one.case, one.unit, contender): one
        for one in report.measurements
        for contender in _PYTHON_CONTENDERS
        if one.of(contender)
    }


def _change(key: Key, old: Measurement, new: Measurement) -> Change:
    reference = _reference(old, new)
    before, after = (_rounds(one, key.contender, reference) for one in (old, new))
    noise = max(_LEAST_NOISE, _spread(before), _spread(after))
    medians = statistics.median(before), statistics.median(after)
    return Change(key, *medians, noise, reference, new.higher_is_better)


def _reference(old: Measurement, new: Measurement) -> str | None:
    shared = [
        one.contender
        for one in old.series
        if one.contender not in _PYTHON_CONTENDERS
        and all(_can_divide(run, one.contender) for run in (old, new))
    ]
    preferred = [name for name in _FIRST_REFERENCES if name in shared]
    return next(iter(preferred + shared), None)


def _can_divide(measurement: Measurement, contender: str) -> bool:
    series = measurement.of(contender)
    return series is not None and min(series.values) > 0


def _rounds(measurement: Measurement, contender: str, reference: str | None) -> list[float]:
    series = measurement.of(contender)
    values = series.values if series else []
    other = measurement.of(reference) if reference else None
    if other is None:
        return values
    if len(other.values) == len(values):
        # Rounds are interleaved, so a slow moment of the machine affects both contenders and cancels out.
        return [value / divisor for value, divisor in zip(values, other.values, strict=True)]
    return [value / other.median for value in values]


def _spread(values: list[float]) -> float:
    median = statistics.median(values)
    difference = max(values) - min(values)
    if difference == 0:
        return 0.0
    return difference / median if median else float("inf")


if __name__ == "__main__":
    sys.exit(main())
