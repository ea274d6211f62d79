"""The report on a run: printed, and as a Markdown page."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measure import percentile
from benchmarks.tables import Table, bullets, duration, markdown, plain

from chaos.audit import crashes
from chaos.campaign import AFTER, BEFORE, DURING
from chaos.figures import recoveries, recovery_limit, throughput
from chaos.fleet import NODE, PYTHON
from chaos.ledger import NODE_LOCKS_RELEASED, OK, PAUSED, RAISED
from chaos.schedule import KINDS
from graphile_worker._base.text import pluralize

if TYPE_CHECKING:
    from benchmarks.results import Machine

    from chaos.audit import Audit
    from chaos.campaign import Campaign
    from chaos.history import History
    from chaos.ledger import JobRemoved

_RULES = """\
Workers run jobs while faults hit them, their connections and the server, at times that a seed determines.
Every task writes a line when it starts and a line when it ends, to a file that survives a `kill -9`. After
the run, an audit checks these rules:

- Every job that was added for certain succeeds, or fails permanently if it is meant to. Of the jobs with the
  same key, this holds for the last one, unless it was removed.
- A job that was removed by its key before it started does not run.
- Every extra run has a cause: a fault that hit its worker or the server, during or right after the earlier
  run.
- Two runs of a serial queue, or of a job, never overlap. The exception is a process that was frozen for
  longer than its lease: it may continue briefly before it notices.
- At the end nothing is locked, and only permanently failed jobs remain.
- A job that a worker reported as complete does not run again.
- Attempts grow by one from run to run, or stay the same if the attempt was returned.
- No worker is declared dead that is alive and can record heartbeats, and none exits by itself.
- The history has each attempt that ran to its end and was recorded exactly once, and no attempt that did not.
- The jobs of a lost worker start again within their recovery limit, if no other fault interferes.
"""
_ABOUT_NODE = """\
One Node worker takes part. The jobs that a Node worker holds when it dies stay locked for four hours,
whatever other workers there are, so no fault targets it. If it exits or loses jobs because the server was
restarted, the harness releases its locks with `force_unlock_workers`, as an operator would, and counts the
jobs below.
"""
_ABOUT_MIXED = """\
As many Node workers take part as Python workers, and faults kill, stop and freeze them too. One worker of
each program prefetches. When a Node worker exits, the harness releases its locks with
`force_unlock_workers`, as an operator would.
"""
_FOUR_HOURS = "4 hours"


class Outcome(NamedTuple):
    """A run and its audit."""

    campaign: Campaign
    history: History
    audit: Audit


class Facts(NamedTuple):
    """Where, when and how the run took place."""

    when: str
    command: str
    seconds: float
    machine: Machine
    versions: dict[str, str]


def page(outcome: Outcome, facts: Facts, comparison: Outcome | None) -> str:
    """Return the report as Markdown."""
    about = [*_about_machine(facts), *_about_campaign(outcome.campaign)]
    parts = ["# Chaos test\n", bullets(about), f"```sh\n{facts.command}\n```\n", _RULES]
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
    leases, with_nodes = campaign.leases, f", and {pluralize(nodes, 'Node worker')}" if nodes else ""
    silence = f"{leases.lease:g} s, or {leases.fast_lease:g} s if the sessions are gone"
    return [
        f"Workers: {campaign.workers} Python workers with {campaign.concurrency} slots each{with_nodes}",
        f"Lease: {silence}; heartbeat interval {leases.heartbeat_interval:g} s",
        f"Faults: for {campaign.seconds:g} s, with seed {campaign.seed}",
    ]


def print_outcome(outcome: Outcome, comparison: Outcome | None) -> None:
    """Print the report on standard output."""
    for title, table in _sections(outcome, comparison).items():
        print(f"\n{title}\n")
        print(plain(table))
    print(f"\n{verdict(outcome.audit)}")
    for violation in outcome.audit.violations:
        print(violation)


def verdict(audit: Audit) -> str:
    """Return the audit's result in one line."""
    if not audit.violations:
        return "No rule was violated."
    rules = Counter(violation.rule for violation in audit.violations)
    return "Violations: " + ", ".join(f"{count} {rule}" for rule, count in rules.most_common())


def _sections(outcome: Outcome, comparison: Outcome | None) -> dict[str, Table]:
    sections = {
        "Jobs and runs": _counts(outcome),
        "Faults and extra runs": _faults(outcome),
        "Recovery times": _recovery_times(outcome),
        "Throughput": _throughput(outcome),
    }
    if comparison is not None:
        sections["Comparison with Node workers"] = _compared(outcome, comparison)
    return sections


def _counts(outcome: Outcome) -> Table:
    history, audit = outcome.history, outcome.audit
    runs = list(history.all_runs)
    outcomes = Counter(run.outcome for run in runs)
    freed = [fault for fault in history.faults if fault.kind == NODE_LOCKS_RELEASED]
    rows = {
        "jobs added for certain": len(history.added),
        "jobs that may have been added": len(history.requests) - len(history.added),
        "jobs with a key": sum(history.requests[token].key is not None for token in history.added),
        "jobs with a key in a serial queue": sum(
            None not in {history.requests[token].key, history.requests[token].queue}
            for token in history.added
        ),
        "jobs added in SQL": sum(history.requests[token].in_sql for token in history.added),
        "jobs removed by their key before they ran": sum(
            _was_waiting(one) for one in history.removed.values()
        ),
        "jobs whose key was removed while they ran": sum(one.running for one in history.removed.values()),
        "runs": len(runs),
        "runs that succeeded": outcomes[OK],
        "runs that failed as intended": outcomes[RAISED],
        "extra runs, each with a cause": len(audit.causes),
        "extra runs after a fault that should not cost one": sum(
            not cause.expected for cause in audit.causes
        ),
        "runs of a frozen process that continued briefly after another worker took over": len(audit.frozen),
        "jobs left because a newer job took their key while they ran": audit.superseded,
        "worker processes": len(history.ready),
        "workers that exited because they could not stop a job that others may run": audit.gave_up,
        "exits of Node workers by themselves": crashes(history, NODE),
        **(_of_mixed(history) if outcome.campaign.mixed else {}),
        "jobs held by Node's 4-hour lock": sum(len(jobs) for fault in freed for jobs in fault.locks.values()),
    }
    return Table(["", "count"], [[name, f"{count:,}"] for name, count in rows.items()], frozenset({0}))


def _was_waiting(removed: JobRemoved) -> bool:
    return removed.job is not None and not removed.running


def _of_mixed(history: History) -> dict[str, int]:
    runs = list(history.all_runs)
    ended = Counter(exited.program for exited in history.exits if exited.intended)
    return {
        "runs by Python workers": sum(run.started.worker.startswith(PYTHON) for run in runs),
        "runs by Node workers": sum(not run.started.worker.startswith(PYTHON) for run in runs),
        "runs in serial queues": sum(run.started.queue is not None for run in runs),
        "Python workers killed or stopped": ended[PYTHON],
        "Node workers killed or stopped": ended[NODE],
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
    header = ["fault", "description", "times", "extra runs", "unexpected"]
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
        in_time = sum(one.seconds <= recovery_limit(one, history, leases) for one in of_kind if one.alone)
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
    header = ["fault", "jobs", "p50", "p99", "max", "max without other faults", "of these within the limit"]
    return Table(header, rows, frozenset({0}))


def _throughput(outcome: Outcome) -> Table:
    rows = [
        [f"{one.phase} the faults", f"{one.seconds:.0f} s"]
        + [f"{rate:.1f}" for rate in (one.added, one.succeeded, one.failed)]
        for one in throughput(outcome.history)
        if one.phase in {BEFORE, DURING, AFTER}
    ]
    return Table(["", "", "added/s", "succeeded/s", "failed as intended/s"], rows, frozenset({0}))


def _compared(python: Outcome, node: Outcome) -> Table:
    columns = [_column(python, PYTHON), _column(node, NODE)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", "Python workers", "Node workers alone"], rows, frozenset({0}))


def _column(outcome: Outcome, program: str) -> dict[str, str]:
    history, violations = outcome.history, outcome.audit.violations
    rules = Counter(violation.rule for violation in violations)
    locked = sum(job.locked_by is not None for job in history.remaining)
    waiting = sum(job.locked_by is None and job.attempts < job.max_attempts for job in history.remaining)
    times = [one.seconds for one in recoveries(history, outcome.campaign.leases) if not one.repeated]
    longest = f"{max(times):.1f} s" if times else "-"
    return {
        "workers": f"{outcome.campaign.workers}",
        "seconds of faults": f"{outcome.campaign.seconds:.0f}",
        "faults": f"{sum(fault.kind != PAUSED for fault in history.faults)}",
        "jobs added for certain": f"{len(history.added):,}",
        "jobs locked at the end": f"{locked}",
        "serial queues locked at the end": f"{len(history.locked_queues)}",
        "jobs waiting behind those": f"{waiting}",
        "longest time until a lost worker's jobs ran again": _FOUR_HOURS if locked else longest,
        "overlapping runs": f"{rules['overlap']}",
        "worker processes that exited by themselves": f"{crashes(history, program)}",
    }
