"""`python -m benchmarks`: measure, write it down, show it."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import scaling
from benchmarks.arena import Arena
from benchmarks.cases import selected
from benchmarks.contenders import ROOT, versions
from benchmarks.driver import Broken, Refused
from benchmarks.machine import this_machine
from benchmarks.measure import GaveUp
from benchmarks.progress import Progress
from benchmarks.report import print_table, write_markdown
from benchmarks.results import Curve, Measurement, Report
from benchmarks.rounds import run_case
from benchmarks.server import server

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = ROOT / ".cache" / "benchmarks"
_PUBLISHED = ROOT / "docs" / "benchmarks"
_ROUNDS = 3
_LIMIT, _QUICK_LIMIT = 60.0, 20.0
_CARELESS = """\
The server's data is in memory, with fsync and synchronous_commit off: a commit costs little, which favours
queues that commit more often. With --durable it is on disk, and they are on."""
_DURABLE = "The server's data is on disk, with fsync and synchronous_commit on."
_FILLED = """\
Before each throughput measurement the queue is emptied and filled, and the database is analysed, so that
nobody suffers from a table without statistics."""
_TIMED = """\
Time runs from the start of the workers, in processes that are up already, to the last completion: as the
queue reports it or, with procrastinate and pgqueuer, the end of the task. Node reports it before it is
recorded."""
_POOLS = """\
The pools of Node and procrastinate have a connection for each concurrent job and one more, 150 at most."""


class _Run:
    """What was measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begun = datetime.now(UTC)
        self.versions = versions()
        self.remarks = [_DURABLE if options.durable else _CARELESS]
        self.measurements: list[Measurement] = []
        self.curves: list[Curve] = []

    async def measure(self, dsn: str) -> None:
        """All of it."""
        limit = _QUICK_LIMIT if self.options.quick else _LIMIT
        async with Arena.open(dsn, limit=limit) as arena:
            self.versions["PostgreSQL"] = await arena.gauge.version()
            try:
                await (self._scaling(arena) if self.options.what == "scaling" else self._cases(arena))
            finally:
                self.remarks += arena.remarks

    async def _cases(self, arena: Arena) -> None:
        quick = self.options.quick
        self.remarks += [_FILLED, _TIMED, _POOLS]
        cases = selected(self.options.only, quick=quick)
        progress = Progress(len(cases))
        for case in cases:
            progress.step(f"{case.group}: {case.name}")
            rounds = self.options.rounds or (1 if quick else _ROUNDS)
            self.measurements += await run_case(arena, case, rounds=rounds, quick=quick)
        progress.end()

    async def _scaling(self, arena: Arena) -> None:
        drawings = scaling.selected(self.options.only)
        progress = Progress(len(drawings))
        for name, draw in drawings.items():
            progress.step(name)
            try:
                self.curves += await draw(arena, self.options.quick)
            except (Broken, GaveUp, Refused) as problem:
                self.remarks.append(f"There is no curve for {name}: {problem}.")
        progress.end()

    def report(self) -> Report:
        """As it is written."""
        return Report(
            when=self.begun.strftime("%Y-%m-%d %H:%M UTC"),
            command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            seconds=(datetime.now(UTC) - self.begun).total_seconds(),
            machine=this_machine(),
            versions=self.versions,
            remarks=[" ".join(remark.split()) for remark in self.remarks],
            measurements=self.measurements,
            curves=self.curves,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; what was measured before an interrupt is kept."""
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
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    if options.what == "scaling":
        found, names = bool(scaling.selected(options.only)), list(scaling.DRAWINGS)
    else:
        found = bool(selected(options.only, quick=options.quick))
        names = list(dict.fromkeys(case.group for case in selected([], quick=options.quick)))
    if not found:
        parser.error(f"nothing has {' or '.join(options.only)} in its name; there are: {', '.join(names)}")
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
        "what", nargs="?", choices=("cases", "scaling"), default="cases", help="by default cases"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer jobs, one round")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="what has it in its name")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"by default {_ROUNDS}, or 1 if quick")
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="FOLDER", help="for results.json")
    parser.add_argument(
        "--publish", action="store_true", help="write to docs/benchmarks, with pages and charts"
    )
    parser.add_argument("--durable", action="store_true", help="on disk, with fsync and synchronous_commit")
    return parser


if __name__ == "__main__":
    main()
