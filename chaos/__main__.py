"""`python -m chaos`: inject faults while workers run jobs, and audit the outcome of every job."""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders import ROOT, NotInstalledError, version, versions
from benchmarks.machine import this_machine
from benchmarks.progress import Progress

from chaos.audit import Auditor
from chaos.campaign import Campaign, run_campaign
from chaos.history import History
from chaos.leases import Leases
from chaos.ledger import read_folder
from chaos.recovery_limits import late_recoveries
from chaos.report import Facts, Outcome, page, print_outcome
from chaos.schedule import KINDS, kinds_that_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = ROOT / ".cache" / "chaos"
_PUBLISHED = ROOT / "docs" / "about" / "chaos"
_MINUTES = 10.0
_COMPARISON = 80.0
_PHASES = 3
_INTERRUPTED = 130
_RATE, _MIXED_RATE = 40.0, 100.0
_MIXED_FAULTS = ["kill", "term", "freeze"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, audit it and report on it. Return the exit status."""
    options = _options(arguments)
    # SIGTERM becomes SIGINT, so that the campaign ends the processes it started. asyncio handles SIGINT
    # cleanly, but not an exception that a signal handler raises inside asyncio's own or a driver's code.
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _run(options)
    except KeyboardInterrupt:
        print(f"Interrupted. The ledgers so far are in {options.output}", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _run(options: argparse.Namespace) -> int:
    started = datetime.now(UTC)
    folder: Path = options.output / f"{started:%Y%m%d-%H%M%S}-seed-{options.seed}"
    campaign = _campaign(options)
    outcome, postgres = _perform(campaign, folder)
    alone = options.no_node or options.no_comparison or options.mixed
    comparison = None if alone else _compare(campaign, folder)
    facts = Facts(
        when=started.strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(options),
        seconds=(datetime.now(UTC) - started).total_seconds(),
        machine=this_machine(),
        versions=_versions(postgres),
    )
    print_outcome(outcome, comparison)
    _write(page(outcome, facts, comparison), folder, publish=options.publish)
    if outcome.audit.violations:
        print(f"\nThe ledgers are in {folder}. To repeat the run: {facts.command}")
        return 1
    if not options.keep:
        for pattern in ("*.ledger", "*.log"):
            for path in folder.rglob(pattern):
                path.unlink()
    return 0


def _perform(campaign: Campaign, folder: Path) -> tuple[Outcome, str]:
    """Run and audit one campaign, with its ledgers in the folder. Return also the server's version."""
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(len(campaign.planned) + _PHASES)
    postgres = asyncio.run(run_campaign(campaign, folder, progress.step))
    progress.end()
    history = History.of(read_folder(folder))
    audit = Auditor(history, campaign.leases).audit()
    audit.violations += late_recoveries(history, campaign.leases)
    return Outcome(campaign, history, audit), postgres


def _compare(campaign: Campaign, folder: Path) -> Outcome:
    """Run the faults that apply to Node workers, with Node workers alone."""
    seconds = min(_COMPARISON, campaign.seconds)
    alone = replace(campaign, seconds=seconds, node=False, only_node=True)
    return _perform(alone, folder / "node")[0]


def _campaign(options: argparse.Namespace) -> Campaign:
    return Campaign(
        seed=options.seed,
        seconds=options.seconds,
        kinds=options.faults,
        leases=Leases.scaled(options.scale),
        workers=options.workers,
        node=not options.no_node,
        mixed=options.mixed,
        history=not options.no_history,
        rate=_MIXED_RATE if options.mixed else _RATE,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or options.minutes * 60
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    if options.workers < 1 or options.seconds <= 0 or options.scale <= 0:
        parser.error("--workers, --seconds, --minutes and --scale must be more than 0")
    default = _MIXED_FAULTS if options.mixed else list(KINDS)
    names = [name.strip() for name in options.faults.split(",")] if options.faults else default
    if unknown := sorted(set(names) - set(KINDS)):
        parser.error(f"unknown fault {', '.join(unknown)}; choose from: {', '.join(KINDS)}")
    options.faults = kinds_that_fit(names, options.seconds, min(options.scale, 1.0))
    if not options.faults:
        parser.error(f"none of these faults fits into {options.seconds:g} s; give more --seconds")
    try:
        version("node")
    except NotInstalledError as missing:
        if options.mixed:
            parser.error(f"{missing}")
        if not options.no_node:
            print(f"Running without the Node worker: {missing}", file=sys.stderr)
        options.no_node = True
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=_MINUTES, help=f"minutes of faults [{_MINUTES:g}]")
    parser.add_argument("--seconds", type=float, help="seconds of faults, instead of --minutes")
    parser.add_argument("--seed", type=int, help="seed of the fault schedule [random]")
    parser.add_argument(
        "--faults", metavar="A,B", help=f"kinds of faults to inject, from: {', '.join(KINDS)} [all that fit]"
    )
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="number of Python workers [3]")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiply leases and fault durations by X [1]"
    )
    parser.add_argument(
        "--mixed", action="store_true", help="add as many Node workers, and inject faults into them too"
    )
    parser.add_argument("--no-node", action="store_true", help="run without a Node worker")
    parser.add_argument(
        "--no-history", action="store_true", help="keep no history, so that exchanges are plain statements"
    )
    parser.add_argument("--no-comparison", action="store_true", help="skip the run with Node workers alone")
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, metavar="FOLDER", help="parent folder of the runs' folders"
    )
    parser.add_argument("--keep", action="store_true", help="keep the ledgers even if no rule was violated")
    parser.add_argument("--publish", action="store_true", help="also write the report to docs/about/chaos")
    return parser


def _command(options: argparse.Namespace) -> str:
    """Return the command that repeats the run, without machine-specific options."""
    command = ["python", "-m", "chaos", "--seconds", f"{options.seconds:g}", "--seed", f"{options.seed}"]
    command += ["--workers", f"{options.workers}", "--scale", f"{options.scale:g}"]
    if len(options.faults) < len(KINDS):
        command += ["--faults", ",".join(options.faults)]
    command += ["--mixed"] if options.mixed else []
    command += ["--no-node"] if options.no_node else []
    command += ["--no-history"] if options.no_history else []
    return shlex.join(command)


def _versions(postgres: str) -> dict[str, str]:
    labels = {
        "Python": "Python",
        "graphile-worker": "graphile-worker",
        "node": "npm's graphile-worker",
        "Node": "Node",
    }
    found = versions()
    return {"PostgreSQL": postgres, **{labels[name]: found[name] for name in labels if name in found}}


def _write(text: str, folder: Path, *, publish: bool) -> None:
    for path in (folder / "README.md", *([_PUBLISHED / "index.md"] if publish else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
