"""What came out of a run, for people: printed, and as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measure import percentile
from benchmarks.tables import Table, bullets, duration, markdown, plain

from chaos.audit import crashes
from chaos.campaign import AFTER, BEFORE, DURING
from chaos.figures import promised, recoveries, throughput
from chaos.fleet import NODE, PYTHON
from chaos.ledger import NODE_FREED, OK, PAUSED, RAISED
from chaos.schedule import KINDS

if TYPE_CHECKING:
    from benchmarks.results import Machine

    from chaos.audit import Audit
    from chaos.campaign import Campaign
    from chaos.history import History
    from chaos.ledger import Removed

_RULES = """\
Workers run jobs while faults happen to them, to their connections and to the server, at moments that a seed
decides. Every task writes a line when it begins and one when it ends, to a file that a `kill -9` does not
harm. Afterwards it is checked that

- every job that was surely added ran to success, or failed for good if it was meant to; of a key the last,
  unless it was removed;
- what was removed by its key before it began did not run;
- every run too many has a fault that hit its worker, or the server, during or right after the earlier run;
- no two runs of a serial queue, or of a job, were going on at once, unless the process of the earlier one was
  frozen for longer than its lease: it may go on for a moment before it notices;
- nothing is locked at the end, and nothing is left but what failed for good;
- what a worker told to be complete did not run again;
- attempts grow by one from run to run, or stay when the attempt was given back;
- no worker was declared dead that lived and could say so, and none ended by itself;
- jobs of a lost worker began again within the time promised, if nothing else was broken meanwhile.
"""
_ABOUT_NODE = """\
One of npm's workers takes part. What such a worker holds when it dies is locked for four hours, whoever else
is there; so it is never hit by itself. If it ends or loses jobs because the server was restarted, its locks
are freed by hand (`force_unlock_workers`), as an operator would, and counted here.
"""
_ABOUT_MIXED = """\
As many of npm's workers take part as of ours, and are killed, stopped and frozen like these; one of each
kind claims ahead. What npm's held when one ended is freed by hand (`force_unlock_workers`), as an operator
would.
"""
_FOUR_HOURS = "4 hours"


class Outcome(NamedTuple):
    """A run, and what was found in it."""

    campaign: Campaign
    history: History
    audit: Audit


class Facts(NamedTuple):
    """Where, when and how."""

    when: str
    command: str
    seconds: float
    machine: Machine
    versions: dict[str, str]


def page(outcome: Outcome, facts: Facts, comparison: Outcome | None) -> str:
    """As Markdown."""
    about = [*_about_machine(facts), *_about_campaign(outcome.campaign)]
    parts = ["# Chaos\n", bullets(about), f"```sh\n{facts.command}\n```\n", _RULES]
    if outcome.campaign.mixed:
        parts.append(_ABOUT_MIXED)
    elif outcome.campaign.node:
        parts.append(_ABOUT_NODE)
    parts.append(f"**{verdict(outcome.audit)}**\n")
    if outcome.audit.violations:
        parts.append("```\n" + "\n".join(map(str, outcome.audit.violations)) + "\n```\n")
    for title, table in _sections(outcome, comparison).items():
        parts += [f"## {title}\n", markdown(table)]
    return "\n".join(parts)


def _about_machine(facts: Facts) -> list[str]:
    machine = facts.machine
    memory = f"{machine.memory / 2**30:.1f} GiB of memory"
    return [
        f"When: {facts.when}, in {duration(facts.seconds)}",
        f"Machine: {machine.processor}, {machine.cores} cores, {memory}, {machine.system}",
        f"Versions: {', '.join(f'{name} {version}' for name, version in facts.versions.items())}",
    ]


def _about_campaign(campaign: Campaign) -> list[str]:
    nodes = campaign.programs.count(NODE)
    leases, npm = campaign.leases, f", and {nodes} of npm's" if nodes else ""
    silence = f"{leases.lease:g} s, or {leases.fast_lease:g} s if the sessions are gone"
    return [
        f"Workers: {campaign.workers} of ours with {campaign.concurrency} slots each{npm}",
        f"Lease: {silence}; a beat every {leases.heartbeat_interval:g} s",
        f"Faults: {campaign.seconds:g} s of them, by the seed {campaign.seed}",
    ]


def print_outcome(outcome: Outcome, comparison: Outcome | None) -> None:
    """On standard output."""
    for title, table in _sections(outcome, comparison).items():
        print(f"\n{title}\n")
        print(plain(table))
    print(f"\n{verdict(outcome.audit)}")
    for violation in outcome.audit.violations:
        print(violation)


def verdict(audit: Audit) -> str:
    """In a line."""
    if not audit.violations:
        return "Nothing was violated."
    rules = Counter(violation.rule for violation in audit.violations)
    return "Violations: " + ", ".join(f"{count} {rule}" for rule, count in rules.most_common())


def _sections(outcome: Outcome, comparison: Outcome | None) -> dict[str, Table]:
    sections = {
        "What ran": _counts(outcome),
        "Faults, and what they cost": _faults(outcome),
        "Until jobs ran again": _recovery_times(outcome),
        "Throughput": _throughput(outcome),
    }
    if comparison is not None:
        sections["The same kinds of faults and npm's worker"] = _compared(outcome, comparison)
    return sections


def _counts(outcome: Outcome) -> Table:
    history, audit = outcome.history, outcome.audit
    runs = list(history.all_runs)
    outcomes = Counter(run.outcome for run in runs)
    freed = [fault for fault in history.faults if fault.kind == NODE_FREED]
    rows = {
        "jobs surely added": len(history.added),
        "jobs of which nobody knows whether they were added": len(history.asked) - len(history.added),
        "of these with a key": sum(history.asked[token].key is not None for token in history.added),
        "of these in a serial queue and with a key": sum(
            None not in {history.asked[token].key, history.asked[token].queue} for token in history.added
        ),
        "of these added in SQL": sum(history.asked[token].in_sql for token in history.added),
        "jobs removed by their key before they ran": sum(
            _was_waiting(one) for one in history.removed.values()
        ),
        "jobs whose key was removed while they ran": sum(one.running for one in history.removed.values()),
        "runs": len(runs),
        "runs that succeeded": outcomes[OK],
        "runs that failed as told": outcomes[RAISED],
        "runs too many, each with a cause": len(audit.causes),
        "of these after a fault that should not cost one": sum(not cause.expected for cause in audit.causes),
        "runs of a frozen process that went on for a moment after others took over": len(audit.frozen),
        "jobs left because their key was taken from them while they ran": audit.superseded,
        "worker processes": len(history.ready),
        "workers that ended because they could not stop what others may run": audit.gave_up,
        "npm's worker ended by itself": crashes(history, NODE),
        **(_of_mixed(history) if outcome.campaign.mixed else {}),
        "jobs held by Node's 4-hour rule": sum(len(jobs) for fault in freed for jobs in fault.locks.values()),
    }
    return Table(["", "count"], [[name, f"{count:,}"] for name, count in rows.items()], frozenset({0}))


def _was_waiting(removed: Removed) -> bool:
    return removed.job is not None and not removed.running


def _of_mixed(history: History) -> dict[str, int]:
    runs = list(history.all_runs)
    ended = Counter(exited.program for exited in history.exits if exited.wanted)
    return {
        "runs by our workers": sum(run.begun.worker.startswith(PYTHON) for run in runs),
        "runs by npm's workers": sum(not run.begun.worker.startswith(PYTHON) for run in runs),
        "runs in serial queues": sum(run.begun.queue is not None for run in runs),
        "our workers that were killed or stopped": ended[PYTHON],
        "npm's workers that were killed or stopped": ended[NODE],
    }


def _faults(outcome: Outcome) -> Table:
    times = Counter(fault.kind for fault in outcome.history.faults)
    costs = Counter(cause.kind for cause in outcome.audit.causes)
    unexpected = Counter(cause.kind for cause in outcome.audit.causes if not cause.expected)
    rows = [
        [kind.name, kind.about, f"{times[kind.name]}", f"{costs[kind.name]}", f"{unexpected[kind.name]}"]
        for kind in KINDS.values()
        if times[kind.name]
    ]
    header = ["fault", "what", "times", "runs too many", "not expected"]
    return Table(header, rows, frozenset({0, 1}))


def _recovery_times(outcome: Outcome) -> Table:
    history, leases = outcome.history, outcome.campaign.leases
    rows = []
    found = recoveries(history, leases)
    for kind in KINDS:
        of_kind = [one for one in found if one.fault.kind == kind and not one.repeated]
        if not of_kind:
            continue
        seconds = [one.seconds for one in of_kind]
        undisturbed = [one.seconds for one in of_kind if one.alone]
        in_time = sum(one.seconds <= promised(one, history, leases) for one in of_kind if one.alone)
        figures = [percentile(seconds, 0.5), percentile(seconds, 0.99), max(seconds)]
        rows.append(
            [
                kind,
                f"{len(of_kind)}",
                *(f"{figure:.1f} s" for figure in figures),
                f"{max(undisturbed):.1f} s" if undisturbed else "-",
                f"{in_time} of {len(undisturbed)}",
            ]
        )
    header = ["fault", "jobs", "p50", "p99", "max", "max if nothing else was broken", "of these in time"]
    return Table(header, rows, frozenset({0}))


def _throughput(outcome: Outcome) -> Table:
    rows = [
        [f"{one.phase} the faults", f"{one.seconds:.0f} s"]
        + [f"{rate:.1f}" for rate in (one.added, one.succeeded, one.failed)]
        for one in throughput(outcome.history)
        if one.phase in {BEFORE, DURING, AFTER}
    ]
    return Table(["", "", "added/s", "succeeded/s", "failed as told/s"], rows, frozenset({0}))


def _compared(ours: Outcome, node: Outcome) -> Table:
    columns = [_column(ours, PYTHON), _column(node, NODE)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", "ours", "npm's alone"], rows, frozenset({0}))


def _column(outcome: Outcome, program: str) -> dict[str, str]:
    history, violations = outcome.history, outcome.audit.violations
    rules = Counter(violation.rule for violation in violations)
    locked = sum(job.locked_by is not None for job in history.left)
    waiting = sum(job.locked_by is None and job.attempts < job.max_attempts for job in history.left)
    times = [one.seconds for one in recoveries(history, outcome.campaign.leases) if not one.repeated]
    longest = f"{max(times):.1f} s" if times else "-"
    return {
        "workers": f"{outcome.campaign.workers}",
        "seconds of faults": f"{outcome.campaign.seconds:.0f}",
        "faults": f"{sum(fault.kind != PAUSED for fault in history.faults)}",
        "jobs surely added": f"{len(history.added):,}",
        "jobs locked at the end": f"{locked}",
        "serial queues locked at the end": f"{len(history.locked_queues)}",
        "jobs that wait behind those": f"{waiting}",
        "a lost worker's jobs run again after, at most": _FOUR_HOURS if locked else longest,
        "runs at once that must not be": f"{rules['overlap']}",
        "worker processes that ended by themselves": f"{crashes(history, program)}",
    }
