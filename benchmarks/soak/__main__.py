"""`python -m benchmarks.soak`: run many jobs, measure what grows, and fail if anything grows too much."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders import ROOT, versions
from benchmarks.driver import DriverBrokenError, RequestRejectedError
from benchmarks.machine import this_machine
from benchmarks.measure import MeasurementTimeoutError
from benchmarks.results import Report
from benchmarks.server import durable_server, find_binaries
from benchmarks.soak.page import print_results, remarks_of, write_page
from benchmarks.soak.result import SoakResult
from benchmarks.soak.run import soak
from benchmarks.soak.scenarios import SCENARIOS
from benchmarks.soak.verdict import judge
from benchmarks.workbench import Workbench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.soak.result import ScenarioResult
    from benchmarks.soak.scenarios import Scenario

_OUTPUT = ROOT / ".cache" / "benchmarks"
_PUBLISHED = ROOT / "docs" / "about" / "benchmarks"
_JOBS = 1_000_000
_FIRST = next(iter(SCENARIOS))
_INTERVAL = 2.0
_SHARED = "The machine is shared with other work, so small differences between scenarios mean nothing."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios. Return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    started = datetime.now(UTC)
    known = {name: version for name, version in versions().items() if name in {"Python", "graphile-worker"}}
    results: list[ScenarioResult] = []
    failed: list[str] = []
    for name in options.scenario or [_FIRST]:
        try:
            result, known["PostgreSQL"] = _run(SCENARIOS[name], options)
        except (DriverBrokenError, MeasurementTimeoutError, RequestRejectedError) as problem:
            failed.append(f"{name}: {problem}")
            continue
        results.append(result)
        failed += [f"{name}: {one.name}" for one in judge(result) if one.passed is False]
    report = Report(
        when=started.strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["python", "-m", "benchmarks.soak", *given]),
        seconds=(datetime.now(UTC) - started).total_seconds(),
        machine=this_machine(),
        versions=known,
        remarks=[_SHARED, *(remark for result in results for remark in remarks_of(result))],
    )
    if results:
        _write(SoakResult(report, results), _PUBLISHED if options.publish else options.output)
    unknown = sum(one.passed is None for result in results for one in judge(result))
    print(f"Failed: {len(failed)}; not judged: {unknown}.", *failed, sep="\n")
    return 1 if failed else 0


def _write(soaked: SoakResult, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    soaked.write(folder / "soak.json")
    write_page(soaked, folder)
    print_results(soaked)


def _run(scenario: Scenario, options: argparse.Namespace) -> tuple[ScenarioResult, str]:
    """Run a scenario on its own server, without leftovers of the one before."""

    async def run(dsn: str) -> tuple[ScenarioResult, str]:
        async with Workbench.open(dsn) as workbench:
            result = await soak(
                workbench, scenario, options.jobs, interval=options.interval, prefetch=options.prefetch
            )
            return result, await workbench.meter.version()

    with durable_server(scenario.server, find_binaries()) as dsn:
        return asyncio.run(run(dsn))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=_JOBS, metavar="N", help=f"number of jobs [{_JOBS}]")
    parser.add_argument(
        "--scenario",
        action="append",
        choices=list(SCENARIOS),
        help=f"the scenario to run; repeatable [{_FIRST}]",
    )
    parser.add_argument("--prefetch", action="store_true", help="let the worker prefetch 500 jobs")
    parser.add_argument(
        "--interval",
        type=float,
        default=_INTERVAL,
        metavar="SECONDS",
        help=f"time between two samples [{_INTERVAL:g}]",
    )
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, metavar="FOLDER", help="folder of soak.json and the page"
    )
    parser.add_argument("--publish", action="store_true", help="write to docs/about/benchmarks")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"invalid --jobs {options.jobs}: must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
