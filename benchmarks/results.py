"""What a run of the benchmarks measured, as it is written to JSON and read back."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Machine(msgspec.Struct, frozen=True):
    """Where it ran."""

    system: str
    processor: str
    cores: int
    memory: int
    """Bytes."""


class Series(msgspec.Struct, frozen=True):
    """What one contender showed in one case: a figure for each round."""

    contender: str
    values: list[float]
    note: str = ""
    """Why there are no values, or what to know about them."""

    def best(self, *, higher_is_better: bool) -> float:
        """The best round."""
        return max(self.values) if higher_is_better else min(self.values)

    @property
    def median(self) -> float:
        """The round in the middle."""
        return statistics.median(self.values)


class Measurement(msgspec.Struct, frozen=True):
    """One figure of one case, for all contenders."""

    group: str
    """The heading it stands under, for example `throughput`."""
    case: str
    """What was done, for example `20,000 trivial jobs, concurrency 24`."""
    unit: str
    """`jobs/s`, `ms`, `s`, `MB`, `connections` and so on."""
    higher_is_better: bool
    series: list[Series]
    goal: float | None = None
    """The ratio of ours to `against` that we promise; None if nothing is promised."""
    against: str | None = None

    def of(self, contender: str) -> Series | None:
        """That contender's figures, if it has any."""
        return next((one for one in self.series if one.contender == contender and one.values), None)


class Point(msgspec.Struct, frozen=True):
    """One point of a curve."""

    x: float
    y: float


class Line(msgspec.Struct, frozen=True):
    """One line of a chart."""

    name: str
    points: list[Point]


class Curve(msgspec.Struct, frozen=True):
    """A chart: how something changes with size."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log_x: bool = True
    log_y: bool = False


class Report(msgspec.Struct, frozen=True):
    """All of a run."""

    when: str
    command: str
    seconds: float
    machine: Machine
    versions: dict[str, str]
    """Of Python, PostgreSQL, Node and each contender."""
    remarks: list[str]
    """What was missing or failed, a sentence each."""
    measurements: list[Measurement] = msgspec.field(default_factory=list)
    curves: list[Curve] = msgspec.field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """From JSON."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
