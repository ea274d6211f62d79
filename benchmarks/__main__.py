"""`python -m benchmarks`: measure, write the results and print them."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import scaling
from benchmarks.cases import selected
from benchmarks.contenders import ROOT, versions
from benchmarks.driver import DriverBrokenError, RequestRejectedError
from benchmarks.machine import this_machine
from benchmarks.measure import MeasurementTimeoutError
from benchmarks.progress import Progress
from benchmarks.report import print_table, write_markdown
from benchmarks.results import Curve, Measurement, Report
from benchmarks.rounds import run_case
from benchmarks.server import server
from benchmarks.workbench import Workbench

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = ROOT / ".cache" / "benchmarks"
_PUBLISHED = ROOT / "docs" / "about" / "benchmarks"
_ROUNDS = 3
_LIMIT, _QUICK_LIMIT = 60.0, 20.0
_IN_MEMORY = """\
The server's data is in memory, with fsync and synchronous_commit off. Commits are cheap, which favours queues
that commit often. With --durable the data is on disk, with both settings on."""
_DURABLE = "The server's data is on disk, with fsync and synchronous_commit on."
_FILLED = """\
Before each throughput measurement the queue is emptied and filled, and the database is analysed, so that no
contender runs on a table without statistics."""
_TIMED = """\
The time runs from the start of the workers, in processes that already run, to the last completion. Completion
is what the queue reports or, for procrastinate and pgqueuer, the end of the task. Node reports a completion
before it is recorded."""
_POOLS = """\
The pools of Node and procrastinate have one connection per concurrent job plus one, and at most 150."""


class _Run:
    """The measurements so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = datetime.now(UTC)
        self.versions = versions()
        self.remarks = [_DURABLE if options.durable else _IN_MEMORY]
        self.measurements: list[Measurement] = []
        self.curves: list[Curve] = []

    async def measure(self, dsn: str) -> None:
        """Run all measurements."""
        limit = _QUICK_LIMIT if self.options.quick else _LIMIT
        async with Workbench.open(dsn, limit=limit) as workbench:
            self.versions["PostgreSQL"] = await workbench.meter.version()
            try:
                await (self._scaling(workbench) if self.options.what == "scaling" else self._cases(workbench))
            finally:
                self.remarks += workbench.remarks

    async def _cases(self, workbench: Workbench) -> None:
        quick = self.options.quick
        self.remarks += [_FILLED, _TIMED, _POOLS]
        cases = selected(self.options.only, quick=quick)
        progress = Progress(len(cases))
        for case in cases:
            progress.step(f"{case.group}: {case.name}")
            rounds = self.options.rounds or (1 if quick else _ROUNDS)
            self.measurements += await run_case(workbench, case, rounds=rounds, quick=quick)
        progress.end()

    async def _scaling(self, workbench: Workbench) -> None:
        curves = scaling.selected(self.options.only)
        progress = Progress(len(curves))
        for name, draw in curves.items():
            progress.step(name)
            try:
                self.curves += await draw(workbench, self.options.quick)
            except (DriverBrokenError, MeasurementTimeoutError, RequestRejectedError) as problem:
                self.remarks.append(f"The curve for {name} failed: {problem}.")
        progress.end()

    def report(self) -> Report:
        """Return the report to write."""
        return Report(
            when=self.started.strftime("%Y-%m-%d %H:%M UTC"),
            command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            seconds=(datetime.now(UTC) - self.started).total_seconds(),
            machine=this_machine(),
            versions=self.versions,
            remarks=[" ".join(remark.split()) for remark in self.remarks],
            measurements=self.measurements,
            curves=self.curves,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report. An interrupt keeps the measurements so far."""
    run = _Run(_options(arguments))
    try:
        with server(durable=run.options.durable) as dsn:
            asyncio.run(run.measure(dsn))
    except KeyboardInterrupt:
        run.remarks.append("The run was interrupted.")
    finally:
        _write(run.report(), run.options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"invalid --rounds {options.rounds}: must be at least 1")
    if options.what == "scaling":
        found, names = bool(scaling.selected(options.only)), list(scaling.CURVES)
    else:
        found = bool(selected(options.only, quick=options.quick))
        names = list(dict.fromkeys(case.group for case in selected([], quick=options.quick)))
    if not found:
        parser.error(f"no name contains {' or '.join(options.only)}; choose from: {', '.join(names)}")
    return options


def _write(report: Report, options: argparse.Namespace) -> None:
    folder: Path = _PUBLISHED if options.publish else options.output
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder / ("scaling.json" if options.what == "scaling" else "results.json"))
    if options.publish:
        write_markdown(report, folder)
    print_table(report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("cases", "scaling"), default="cases", help="the benchmarks to run [cases]"
    )
    parser.add_argument("--quick", action="store_true", help="run fewer cases with fewer jobs, in one round")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="run what has TEXT in its name; repeatable",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"number of rounds [{_ROUNDS}, quick: 1]")
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, metavar="FOLDER", help="folder of results.json"
    )
    parser.add_argument(
        "--publish", action="store_true", help="write pages and charts to docs/about/benchmarks"
    )
    parser.add_argument("--durable", action="store_true", help="use a disk, fsync and synchronous_commit")
    return parser


if __name__ == "__main__":
    main()
