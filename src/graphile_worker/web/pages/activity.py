"""Charts of what workers did, for the overview and for the page of a task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from graphile_worker.web import charts
from graphile_worker.web.pages import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from graphile_worker.web.data import QueueData
    from graphile_worker.web.models import Series

WINDOWS = (("1h", "1 hour"), ("24h", "24 hours"), ("7d", "7 days"))
_SECONDS = {"1h": 3600.0, "24h": 86_400.0, "7d": 7 * 86_400.0}
_STEPS = {"1h": 60.0, "24h": 900.0, "7d": 10_800.0}
_STEP_TEXTS = {"1h": "minute", "24h": "15 minutes", "7d": "3 hours"}
_METRICS = ("done", "failed", "run_p50", "run_p95", "wait_p50", "wait_p95")


async def draw_activity(
    data: QueueData,
    window: str,
    *,
    task: str | None = None,
    marks: Sequence[tuple[datetime, str]] = (),
) -> dict[str, Any]:
    """Return the charts of a period, and the texts beside them.

    Args:
        data: The queue.
        window: ``1h``, ``24h`` or ``7d``.
        task: Identifier of a task; None for all tasks.
        marks: Moments to mark, and their texts.
    """
    found = await asyncio.gather(
        *(data.series(metric, task=task, since=_SECONDS[window], step=_STEPS[window]) for metric in _METRICS)
    )
    by_metric = dict(zip(_METRICS, found, strict=True))
    times = [point.at for point in by_metric["done"].points]
    format_time = _short_time if window != "7d" else formatting.day_and_time
    throughput = charts.bar_chart(
        f"Completed and failed jobs in the last {dict(WINDOWS)[window]}",
        times,
        [
            charts.Line(name="Completed", values=_values(by_metric["done"]), colour="blue"),
            charts.Line(name="Failed attempts", values=_values(by_metric["failed"]), colour="orange"),
        ],
        format_value=formatting.count,
        format_time=format_time,
        marks=marks,
    )
    return {
        "throughput": throughput,
        "run_chart": _percentiles("Run time", "run", by_metric, times, format_time),
        "wait_chart": _percentiles("Wait until start", "wait", by_metric, times, format_time),
        "time_texts": _time_texts(times, format_time),
        "step_text": _STEP_TEXTS[window],
        "window": window,
        "windows": WINDOWS,
    }


def _percentiles(
    title: str,
    kind: str,
    series: dict[str, Series],
    times: Sequence[datetime],
    format_time: Callable[[datetime], str],
) -> charts.Chart:
    return charts.line_chart(
        title,
        times,
        [
            charts.Line(name="p95", values=_values(series[f"{kind}_p95"]), colour="line"),
            charts.Line(name="p50", values=_values(series[f"{kind}_p50"]), colour="line second"),
        ],
        format_value=formatting.duration,
        format_time=format_time,
    )


def _values(series: Series) -> list[float | None]:
    return [point.value for point in series.points]


def _time_texts(times: Sequence[datetime], format_time: Callable[[datetime], str]) -> list[str]:
    if not times:
        return []
    return [format_time(times[0]), format_time(times[len(times) // 2]), "now"]


def _short_time(moment: datetime) -> str:
    return formatting.time_of_day(moment)[:5]
