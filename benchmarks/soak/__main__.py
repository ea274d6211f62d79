"""`python -m benchmarks.soak`: run many jobs, see what grows, and fail if anything does."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.arena import Arena
from benchmarks.contenders import ROOT, versions
from benchmarks.driver import Broken, Refused
from benchmarks.machine import this_machine
from benchmarks.measure import GaveUp
from benchmarks.results import Report
from benchmarks.server import durable_server, find_binaries
from benchmarks.soak.course import Soaked
from benchmarks.soak.page import print_courses, remarks_of, write_page
from benchmarks.soak.run import soak
from benchmarks.soak.scenarios import SCENARIOS
from benchmarks.soak.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.soak.course import Course
    from benchmarks.soak.scenarios import Scenario

_OUTPUT = ROOT / ".cache" / "benchmarks"
_PUBLISHED = ROOT / "docs" / "benchmarks"
_JOBS = 1_000_000
_FIRST = next(iter(SCENARIOS))
_INTERVAL = 2.0
_SHARED = "The machine is shared with other work, so small differences between scenarios mean nothing."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    begun = datetime.now(UTC)
    known = {name: version for name, version in versions().items() if name in {"Python", "ours"}}
    courses: list[Course] = []
    wrong: list[str] = []
    for name in options.scenario or [_FIRST]:
        try:
            course, known["PostgreSQL"] = _run(SCENARIOS[name], options)
        except (Broken, GaveUp, Refused) as problem:
            wrong.append(f"{name}: {problem}")
            continue
        courses.append(course)
        wrong += [f"{name}: {one.what}" for one in judge(course) if one.good is False]
    report = Report(
        when=begun.strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["python", "-m", "benchmarks.soak", *given]),
        seconds=(datetime.now(UTC) - begun).total_seconds(),
        machine=this_machine(),
        versions=known,
        remarks=[_SHARED, *(remark for course in courses for remark in remarks_of(course))],
    )
    if courses:
        _write(Soaked(report, courses), _PUBLISHED if options.publish else options.output)
    unknown = sum(one.good is None for course in courses for one in judge(course))
    print(f"Wrong: {len(wrong)}; not judged: {unknown}.", *wrong, sep="\n")
    return 1 if wrong else 0


def _write(soaked: Soaked, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    soaked.write(folder / "soak.json")
    write_page(soaked, folder)
    print_courses(soaked)


def _run(scenario: Scenario, options: argparse.Namespace) -> tuple[Course, str]:
    """On a server of its own: nothing is left over from the one before."""

    async def run(dsn: str) -> tuple[Course, str]:
        async with Arena.open(dsn) as arena:
            course = await soak(
                arena, scenario, options.jobs, interval=options.interval, prefetch=options.prefetch
            )
            return course, await arena.gauge.version()

    with durable_server(scenario.server, find_binaries()) as dsn:
        return asyncio.run(run(dsn))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=_JOBS, metavar="N", help=f"by default {_JOBS:,}")
    parser.add_argument(
        "--scenario", action="append", choices=list(SCENARIOS), help=f"by default {_FIRST}; repeatable"
    )
    parser.add_argument("--prefetch", action="store_true", help="the worker claims 500 jobs ahead")
    parser.add_argument(
        "--interval", type=float, default=_INTERVAL, metavar="SECONDS", help="between two samples"
    )
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, metavar="FOLDER", help="for soak.json and page"
    )
    parser.add_argument("--publish", action="store_true", help="write to docs/benchmarks")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
