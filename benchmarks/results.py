"""The results of a benchmark run, as they are written to JSON and read back."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run."""

    system: str
    processor: str
    cores: int
    memory: int
    """The memory in bytes."""


class Series(msgspec.Struct, frozen=True):
    """The figures of one contender in one case, one for each round."""

    contender: str
    values: list[float]
    note: str = ""
    """Why there are no values, or a remark on them."""

    def best(self, *, higher_is_better: bool) -> float:
        """Return the figure of the best round."""
        return max(self.values) if higher_is_better else min(self.values)

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)


class Measurement(msgspec.Struct, frozen=True):
    """One figure of one case, for all contenders."""

    group: str
    """The heading, for example `throughput`."""
    case: str
    """The name of the case, for example `20,000 trivial jobs, concurrency 24`."""
    unit: str
    """`jobs/s`, `ms`, `s`, `MB`, `connections` and so on."""
    higher_is_better: bool
    series: list[Series]
    goal: float | None = None
    """The required ratio of `python` to `against`, or None without a goal."""
    against: str | None = None
    subject: str | None = None
    """The contender that the goal is about, if it is not `python`."""
    is_difference: bool = False
    """Whether the goal is a limit on the difference to `against`, and not on the ratio."""

    def of(self, contender: str) -> Series | None:
        """Return the figures of a contender, if it has any."""
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
    """A chart that shows how a figure changes with size."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log_x: bool = True
    log_y: bool = False


class Report(msgspec.Struct, frozen=True):
    """The whole run."""

    when: str
    command: str
    seconds: float
    machine: Machine
    versions: dict[str, str]
    """The versions of Python, PostgreSQL, Node and each contender."""
    remarks: list[str]
    """Sentences on the setup, and on what was missing or failed."""
    measurements: list[Measurement] = msgspec.field(default_factory=list)
    curves: list[Curve] = msgspec.field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report from JSON."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
