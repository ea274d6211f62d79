"""``graphile-worker stats --since``: what Python workers did."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from graphile_worker._base.durations import format_duration
from graphile_worker.cli.flags import open_utils
from graphile_worker.cli.printing import Column, on_terminal, print_note, print_object, row_printer
from graphile_worker.stats import JobCounts, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from graphile_worker.cli.settings import Value
    from graphile_worker.stats import Activity

_POINTS = 30
_MINUTE = 60
_LEVELS = "▁▂▃▄▅▆▇█"
_LAST_SMALL = 0.001
_LAST_SHORT = 2.0
_TIMES = (
    Metric.RUN_MEAN, Metric.RUN_P50, Metric.RUN_P95, Metric.RUN_P99,
    Metric.WAIT_MEAN, Metric.WAIT_P50, Metric.WAIT_P95, Metric.WAIT_P99,
)  # fmt: skip
_COUNTS = (Metric.DONE, Metric.FAILED, Metric.SNOOZED, Metric.CANCELLED, Metric.INTERRUPTED)
NOTE = "Counted by Python workers. Jobs that Node or Rust workers ran are not included."


class _Row(NamedTuple):
    task: str
    total: JobCounts
    steps: Sequence[JobCounts]


def sparkline(values: Sequence[int]) -> str:
    """Draw values as bars. Zero is a space.

    >>> sparkline([0, 1, 4, 8])
    ' ▁▄█'
    """
    most = max(values, default=0)
    return "".join(_LEVELS[math.ceil(value * len(_LEVELS) / most) - 1] if value else " " for value in values)


def format_time(seconds: float | None) -> str:
    """Format a run or wait time.

    >>> [format_time(seconds) for seconds in (None, 0.0004, 0.0123, 1.26, 90)]
    ['', '<1 ms', '12 ms', '1.3 s', '90 s']
    """
    if seconds is None:
        return ""
    if seconds < _LAST_SMALL:
        return "<1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < _LAST_SHORT else format_duration(seconds)


def _time(title: str, metric: Metric, drop_order: int) -> Column[_Row]:
    return Column(
        title=title,
        value=lambda row: row.total.value(metric),
        terminal_value=lambda row: format_time(row.total.value(metric)),
        align_right=True,
        drop_order=drop_order,
    )


_COLUMNS: list[Column[_Row]] = [
    Column(title="TASK", value=lambda row: row.task, min_width=12),
    Column(title="DONE", value=lambda row: row.total.done, align_right=True),
    Column(
        title="FAILED",
        value=lambda row: row.total.failed,
        align_right=True,
        style=lambda row: "red" if row.total.failed else "dim",
    ),
    _time("RUN P50", Metric.RUN_P50, 3),
    _time("RUN P95", Metric.RUN_P95, 1),
    _time("WAIT P50", Metric.WAIT_P50, 4),
    _time("WAIT P95", Metric.WAIT_P95, 2),
    Column(
        title="DONE OVER TIME",
        value=lambda row: ",".join(str(counts.done) for counts in row.steps),
        terminal_value=lambda row: sparkline([counts.done for counts in row.steps]),
        drop_order=5,
    ),
]


async def print_activity(
    settings: Mapping[str, Value], since: timedelta, step: timedelta | None, *, as_json: bool
) -> None:
    """Print what Python workers did since then, by task."""
    async with open_utils(settings) as utils:
        activity = await utils.activity(since=since, step=step or _choose_step(since.total_seconds()))
    if as_json:
        print_object(_as_object(activity))
        return
    rows = [_Row(task, activity.total(task), steps) for task, steps in sorted(activity.tasks.items())]
    with row_printer(_COLUMNS, lambda _: {}, as_json=False) as printer:
        printer.add([*rows, _Row("(all)", activity.total(), activity.steps)])
    if on_terminal():
        print_note(NOTE)


def _choose_step(age: float) -> int:
    """Return the length of a step, in seconds, so that a line has about 30 of them."""
    unit = next((period for kept, period in ((86_400, _MINUTE), (604_800, 300)) if age <= kept), 3600)
    return max(unit, math.ceil(age / _POINTS / unit) * unit)


def _as_object(activity: Activity) -> dict[str, object]:
    return {
        "counted": NOTE,
        "step": activity.step,
        "times": list(activity.times),
        "all": _counts(activity.total(), activity.steps),
        "tasks": {task: _counts(activity.total(task), steps) for task, steps in activity.tasks.items()},
    }


def _counts(total: JobCounts, steps: Sequence[JobCounts]) -> dict[str, object]:
    return {
        **{metric.value: total.value(metric) for metric in (*_COUNTS, *_TIMES)},
        "steps": {
            metric.value: [counts.value(metric) for counts in steps]
            for metric in (Metric.DONE, Metric.FAILED, Metric.RUN_P95, Metric.WAIT_P95)
        },
    }
