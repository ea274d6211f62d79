"""The report on a run: on the terminal, and as a page with charts."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.charts import line_chart, number
from benchmarks.measure import percentile
from benchmarks.report import about
from benchmarks.results import Curve, Line, Point
from benchmarks.soak.verdict import judge
from benchmarks.tables import Table, markdown, one_line, plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.soak.result import Sample, ScenarioResult, SoakResult

_PAGE = "soak.md"
_ROWS = 12
_POINTS = 50
_INTRODUCTION = """\
This test runs many jobs to see whether anything grows with their number. One worker with 24 slots runs jobs
as fast as it can, while another process adds them. At most 5,000 jobs wait at any time. A fifth of the jobs
is spread over 50 serial queues, and one job in 19 fails once and is retried.

Probes measure the latency. Under load, a probe is added ahead of the backlog every 0.2 s. With an idle
worker, 200 probes run one after the other: before the first job, after the last job, and again after an
autovacuum run. The probes after the last job alternate with probes to a new worker on a new database of the
same server, so that other load on the machine affects both.

PostgreSQL has the settings of `initdb`, except for those shown below. Its data is on disk, with `fsync`,
`synchronous_commit` and autovacuum on. Without `fsync` the worker would commit faster than in production,
and autovacuum would not have to wait for the disk.
"""
_HOW_TO_READ = """\
✓ means within the limit, ✗ means outside the limit, ? means unknown or without a limit. Thirds are thirds of
the jobs, after the first twentieth. A dead row is a row version that no transaction needs any more. Each job
leaves two in its table, because it is claimed and then deleted. Their age is the age of the oldest one at
any moment. In the tables of figures, `dead` is the highest number since the row above, and * marks the time
of an old transaction.
"""


def print_results(soaked: SoakResult) -> None:
    """Print the figures and the verdict of each scenario."""
    for result in soaked.scenarios:
        print(f"\n{result.name}: {_summary(result)}\n")
        print(plain(_series(result)))
        print()
        print(plain(_verdict(result)))
    print()
    for remark in soaked.report.remarks:
        print(one_line(remark))


def write_page(soaked: SoakResult, folder: Path) -> None:
    """Write soak.md and its charts."""
    parts = [
        f"# {_title(soaked)}\n",
        _INTRODUCTION,
        about(soaked.report),
        "## How to read the tables\n",
        _HOW_TO_READ,
    ]
    for name, curve in _curves(soaked.scenarios).items():
        (folder / f"soak-{name}.svg").write_text(line_chart(curve), encoding="utf-8")
    parts += ["## Comparison\n", markdown(_side_by_side(soaked.scenarios))]
    parts += [f"![{curve.title}](soak-{name}.svg)\n" for name, curve in _curves(soaked.scenarios).items()]
    for result in soaked.scenarios:
        parts += [f"## {result.name.replace('-', ' ').capitalize()}\n", f"{_summary(result)}\n"]
        if result.settings:
            parts.append("```sql\n" + "\n".join(result.settings) + "\n```\n")
        parts += [markdown(_verdict(result)), markdown(_series(result))]
    (folder / _PAGE).write_text("\n".join(parts), encoding="utf-8")


def _title(soaked: SoakResult) -> str:
    return f"Soak test: {number(max(result.tally.jobs for result in soaked.scenarios))} jobs"


def _summary(result: ScenarioResult) -> str:
    jobs = result.tally.jobs
    spent = result.spent
    return (
        f"{number(jobs)} jobs in {result.seconds:.0f} s, {number(result.rate)} per second. Per 1,000 jobs: "
        f"{spent.worker_cpu / jobs * 1000:.3f} s of CPU time in the worker, "
        f"{spent.server_cpu / jobs * 1000:.3f} s in the server, {number(spent.wal / jobs * 1000 / 1024)} KiB "
        f"of write-ahead log. Queue updates without new index entries: {result.left.hot_queue_updates:.1%}."
    )


def _verdict(result: ScenarioResult) -> Table:
    rows = [[one.name, one.limit, one.found, one.mark] for one in judge(result)]
    return Table(["check", "limit", "found", ""], rows, frozenset({0, 1, 2, 3}))


def _side_by_side(results: list[ScenarioResult]) -> Table:
    rows = [["jobs per second", *(number(result.rate) for result in results)]]
    findings = [judge(result) for result in results]
    rows += [
        [alike[0].name, *(f"{one.mark} {one.found}" for one in alike)]
        for alike in zip(*findings, strict=True)
    ]
    return Table(["", *(result.name for result in results)], rows, frozenset(range(len(results) + 1)))


def _series(result: ScenarioResult) -> Table:
    """Return a table of some rows. Dead rows, rate and latency cover the time since the row before."""
    header = ["s", "done", "jobs/s", "worker MB", "dead jobs", "dead queues", "jobs MiB", "job indexes MiB"]
    header += ["queues MiB", "vacuums", "latency ms", "p99 ms"]
    size = max(1, len(result.samples) // _ROWS)
    parts = [result.samples[place : place + size + 1] for place in range(0, len(result.samples) - 1, size)]
    return Table(header, [_row(part) for part in parts], frozenset())


def _row(part: list[Sample]) -> list[str]:
    first, last = part[0], part[-1]
    latencies = [value for sample in part[1:] for value in sample.latencies]
    return [
        f"{last.seconds:.0f}{'*' if last.old_transaction else ''}",
        number(last.done),
        number((last.done - first.done) // (last.seconds - first.seconds)),
        f"{last.memory / 1e6:.1f}",
        number(max(sample.jobs.dead for sample in part[1:])),
        number(max(sample.queues.dead for sample in part[1:])),
        f"{last.jobs.table / 2**20:.1f}",
        f"{last.jobs.indexes / 2**20:.1f}",
        f"{last.queues.size / 2**20:.1f}",
        number(last.jobs.vacuums),
        f"{statistics.median(latencies):.1f}" if latencies else "",
        f"{percentile(latencies, 0.99):.1f}" if latencies else "",
    ]


def _curves(results: list[ScenarioResult]) -> dict[str, Curve]:
    drawn: dict[str, tuple[str, str, Callable[[list[Sample]], float | None]]] = {
        "dead": ("Dead rows of the jobs table", "dead rows", lambda part: max(one.jobs.dead for one in part)),
        "size": (
            "Size of the jobs table with indexes",
            "MiB",
            lambda part: max(one.jobs.size for one in part) / 2**20,
        ),
        "latency": ("Latency under load", "ms", _median_latency),
        "memory": ("Worker memory", "MB", lambda part: max(one.memory for one in part) / 1e6),
    }
    return {
        name: Curve(name, title, "jobs done", label, [_line(one, figure) for one in results], log_x=False)
        for name, (title, label, figure) in drawn.items()
    }


def _median_latency(part: list[Sample]) -> float | None:
    latencies = [value for sample in part for value in sample.latencies]
    return statistics.median(latencies) if latencies else None


def _line(result: ScenarioResult, figure: Callable[[list[Sample]], float | None]) -> Line:
    """Return a line with one point for several samples, so that the chart stays small."""
    size = max(1, len(result.samples) // _POINTS)
    parts = [result.samples[place : place + size] for place in range(0, len(result.samples), size)]
    found = [(part[-1].done, figure(part)) for part in parts]
    return Line(result.name, [Point(done, value) for done, value in found if value is not None])


def remarks_of(result: ScenarioResult) -> list[str]:
    """Return a remark on the warnings and errors that the worker logged."""
    if not result.tally.log_messages:
        return []
    return [f"{result.name}: the worker logged {', '.join(map(repr, result.tally.log_messages))}."]
