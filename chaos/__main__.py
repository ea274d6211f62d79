"""`python -m chaos`: break everything that can break under working workers, and audit what they did."""

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

from benchmarks.contenders import ROOT, Missing, version, versions
from benchmarks.machine import this_machine
from benchmarks.progress import Progress

from chaos.audit import Auditor
from chaos.campaign import Campaign, run_campaign
from chaos.history import History
from chaos.leases import Leases
from chaos.ledger import read_folder
from chaos.promises import late_recoveries
from chaos.report import Facts, Outcome, page, print_outcome
from chaos.schedule import KINDS, fitting

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = ROOT / ".cache" / "chaos"
_PUBLISHED = ROOT / "docs" / "chaos"
_MINUTES = 10.0
_COMPARISON = 80.0
_PHASES = 3
_INTERRUPTED = 130
_RATE, _MIXED_RATE = 40.0, 100.0
_MIXED_FAULTS = ["kill", "term", "freeze"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, audit, report; returns the exit status."""
    options = _options(arguments)
    # Whoever ends us lets us end what we started.
    # As Ctrl-C, which asyncio takes well; an exception in the middle of its work, or a driver's, it does not.
    usual = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _run(options)
    except KeyboardInterrupt:
        print(f"Interrupted. What was written is in {options.output}", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, usual)


def _run(options: argparse.Namespace) -> int:
    begun = datetime.now(UTC)
    folder: Path = options.output / f"{begun:%Y%m%d-%H%M%S}-seed-{options.seed}"
    campaign = _campaign(options)
    outcome, postgres = _perform(campaign, folder)
    alone = options.no_node or options.no_comparison or options.mixed
    comparison = None if alone else _compare(campaign, folder)
    facts = Facts(
        when=begun.strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(options),
        seconds=(datetime.now(UTC) - begun).total_seconds(),
        machine=this_machine(),
        versions=_versions(postgres),
    )
    print_outcome(outcome, comparison)
    _write(page(outcome, facts, comparison), folder, publish=options.publish)
    if outcome.audit.violations:
        print(f"\nThe ledgers are in {folder}. To repeat it: {facts.command}")
        return 1
    if not options.keep:
        for pattern in ("*.ledger", "*.log"):
            for path in folder.rglob(pattern):
                path.unlink()
    return 0


def _perform(campaign: Campaign, folder: Path) -> tuple[Outcome, str]:
    """One campaign with its ledgers in that folder, audited; and the server's version."""
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(len(campaign.planned) + _PHASES)
    postgres = asyncio.run(run_campaign(campaign, folder, progress.step))
    progress.end()
    history = History.of(read_folder(folder))
    audit = Auditor(history, campaign.leases).audit()
    audit.violations += late_recoveries(history, campaign.leases)
    return Outcome(campaign, history, audit), postgres


def _compare(campaign: Campaign, folder: Path) -> Outcome:
    """The faults that can be done to npm's worker, with npm's workers alone."""
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
    usual = _MIXED_FAULTS if options.mixed else list(KINDS)
    names = [name.strip() for name in options.faults.split(",")] if options.faults else usual
    if unknown := sorted(set(names) - set(KINDS)):
        parser.error(f"there is no fault {', '.join(unknown)}; there are: {', '.join(KINDS)}")
    options.faults = fitting(names, options.seconds, min(options.scale, 1.0))
    if not options.faults:
        parser.error(f"in {options.seconds:g} s none of these faults has room")
    try:
        version("node")
    except Missing as missing:
        if options.mixed:
            parser.error(f"{missing}")
        if not options.no_node:
            print(f"Without npm's worker: {missing}", file=sys.stderr)
        options.no_node = True
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=_MINUTES, help=f"of faults; by default {_MINUTES:g}")
    parser.add_argument("--seconds", type=float, help="the same, in place of it")
    parser.add_argument("--seed", type=int, help="what decides which fault happens when; by default any")
    parser.add_argument("--faults", metavar="A,B", help=f"only these of: {', '.join(KINDS)}")
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="of ours; by default 3")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="leases, and faults, X times as long"
    )
    parser.add_argument("--mixed", action="store_true", help="as many of npm's workers, and hit as well")
    parser.add_argument("--no-node", action="store_true", help="without npm's worker")
    parser.add_argument("--no-comparison", action="store_true", help="do not do the same to npm's alone")
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="FOLDER", help="for a folder a run")
    parser.add_argument("--keep", action="store_true", help="the ledgers, also if all is well")
    parser.add_argument("--publish", action="store_true", help="write the report to docs/chaos, too")
    return parser


def _command(options: argparse.Namespace) -> str:
    """What repeats the run, without what is of this machine alone."""
    command = ["python", "-m", "chaos", "--seconds", f"{options.seconds:g}", "--seed", f"{options.seed}"]
    command += ["--workers", f"{options.workers}", "--scale", f"{options.scale:g}"]
    if len(options.faults) < len(KINDS):
        command += ["--faults", ",".join(options.faults)]
    command += ["--mixed"] if options.mixed else []
    command += ["--no-node"] if options.no_node else []
    return shlex.join(command)


def _versions(postgres: str) -> dict[str, str]:
    wanted = {"Python": "Python", "ours": "graphile-worker", "node": "npm's graphile-worker", "Node": "Node"}
    found = versions()
    return {"PostgreSQL": postgres, **{wanted[name]: found[name] for name in wanted if name in found}}


def _write(text: str, folder: Path, *, publish: bool) -> None:
    for place in (folder, *([_PUBLISHED] if publish else [])):
        place.mkdir(parents=True, exist_ok=True)
        (place / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
