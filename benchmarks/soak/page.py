"""What a run showed, for people: on the terminal, and as a page with charts."""

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

    from benchmarks.soak.course import Course, Sample, Soaked

_PAGE = "soak.md"
_ROWS = 12
_POINTS = 50
_INTRODUCTION = """\
One worker with 24 slots runs jobs as fast as it can, while another process adds them: at most 5,000 wait at
any time. A fifth of the jobs is spread over 50 serial queues, and one in 19 fails once and is tried again.
Every 0.2 s a probe is added ahead of the backlog, which tells the latency under load; before the first job
and after the last one 200 probes run alone, one after the other, and once more when autovacuum has been
there. Those after the last job take turns with probes of a new worker on a new database of the same server,
because other work on the machine meets both. Question: does anything grow with the number of jobs?

PostgreSQL is as `initdb` makes it, but for what is said below: its data is on disk, `fsync` and
`synchronous_commit` are on, and so is autovacuum with its usual settings. A careless server would let the
worker commit faster than any in production does, and would spare autovacuum the disk.
"""
_HOW_TO_READ = """\
✓ is as it should be, ✗ is not, ? cannot be said or is not asked. Thirds are those of the jobs, after the
first twentieth. A dead row is a version of a row that nobody needs any more; each job leaves two in its
table, because it is claimed and then deleted. Their age is that of the oldest one at any moment. In the
tables of figures `dead` is the most since the row above, and * marks the time of an old transaction.
"""


def print_courses(soaked: Soaked) -> None:
    """Print a course and its verdict for each scenario."""
    for course in soaked.courses:
        print(f"\n{course.name}: {_summary(course)}\n")
        print(plain(_series(course)))
        print()
        print(plain(_verdict(course)))
    print()
    for remark in soaked.report.remarks:
        print(one_line(remark))


def write_page(soaked: Soaked, folder: Path) -> None:
    """Write soak.md and its charts."""
    parts = [
        f"# {_title(soaked)}\n",
        _INTRODUCTION,
        about(soaked.report),
        "## How to read it\n",
        _HOW_TO_READ,
    ]
    for name, curve in _curves(soaked.courses).items():
        (folder / f"soak-{name}.svg").write_text(line_chart(curve), encoding="utf-8")
    parts += ["## Side by side\n", markdown(_side_by_side(soaked.courses))]
    parts += [f"![{curve.title}](soak-{name}.svg)\n" for name, curve in _curves(soaked.courses).items()]
    for course in soaked.courses:
        parts += [f"## {course.name.replace('-', ' ').capitalize()}\n", f"{_summary(course)}\n"]
        if course.settings:
            parts.append("```sql\n" + "\n".join(course.settings) + "\n```\n")
        parts += [markdown(_verdict(course)), markdown(_series(course))]
    (folder / _PAGE).write_text("\n".join(parts), encoding="utf-8")


def _title(soaked: Soaked) -> str:
    return f"{number(max(course.tally.jobs for course in soaked.courses))} jobs at full speed"


def _summary(course: Course) -> str:
    jobs = course.tally.jobs
    spent = course.spent
    return (
        f"{number(jobs)} jobs in {course.seconds:.0f} s, {number(course.rate)} per second. For 1,000 jobs: "
        f"{spent.worker_cpu / jobs * 1000:.3f} s of processor time in the worker, "
        f"{spent.server_cpu / jobs * 1000:.3f} s in the server, {number(spent.wal / jobs * 1000 / 1024)} KiB "
        f"of log. Updates of queues that needed no index: {course.left.hot_queue_updates:.1%}."
    )


def _verdict(course: Course) -> Table:
    rows = [[one.what, one.bound, one.found, one.mark] for one in judge(course)]
    return Table(["what", "asked", "found", ""], rows, frozenset({0, 1, 2, 3}))


def _side_by_side(courses: list[Course]) -> Table:
    rows = [["jobs per second", *(number(course.rate) for course in courses)]]
    findings = [judge(course) for course in courses]
    rows += [
        [alike[0].what, *(f"{one.mark} {one.found}" for one in alike)]
        for alike in zip(*findings, strict=True)
    ]
    return Table(["", *(course.name for course in courses)], rows, frozenset(range(len(courses) + 1)))


def _series(course: Course) -> Table:
    """Some rows; of dead rows, the rate and latency each tells for the time since the one before."""
    header = ["s", "done", "jobs/s", "worker MB", "dead jobs", "dead queues", "jobs MiB", "its indexes MiB"]
    header += ["queues MiB", "vacuums", "latency ms", "99 %"]
    size = max(1, len(course.samples) // _ROWS)
    parts = [course.samples[place : place + size + 1] for place in range(0, len(course.samples) - 1, size)]
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


def _curves(courses: list[Course]) -> dict[str, Curve]:
    drawn: dict[str, tuple[str, str, Callable[[list[Sample]], float | None]]] = {
        "dead": ("Dead rows of jobs", "dead rows", lambda part: max(one.jobs.dead for one in part)),
        "size": (
            "The table of jobs with its indexes",
            "MiB",
            lambda part: max(one.jobs.size for one in part) / 2**20,
        ),
        "latency": ("Latency under load", "ms", _median_latency),
        "memory": ("Memory of the worker", "MB", lambda part: max(one.memory for one in part) / 1e6),
    }
    return {
        name: Curve(name, title, "jobs done", label, [_line(one, figure) for one in courses], log_x=False)
        for name, (title, label, figure) in drawn.items()
    }


def _median_latency(part: list[Sample]) -> float | None:
    latencies = [value for sample in part for value in sample.latencies]
    return statistics.median(latencies) if latencies else None


def _line(course: Course, figure: Callable[[list[Sample]], float | None]) -> Line:
    """A point for some samples at a time, so that a chart stays small."""
    size = max(1, len(course.samples) // _POINTS)
    parts = [course.samples[place : place + size] for place in range(0, len(course.samples), size)]
    found = [(part[-1].done, figure(part)) for part in parts]
    return Line(course.name, [Point(done, value) for done, value in found if value is not None])


def remarks_of(course: Course) -> list[str]:
    """What the worker complained of."""
    if not course.tally.complaints:
        return []
    return [f"{course.name}: the worker logged {', '.join(map(repr, course.tally.complaints))}."]
