"""The checks whether anything grew with the number of jobs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.charts import number
from benchmarks.soak.result import FEW_DEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.soak.result import Pair, Sample, ScenarioResult, TableState

_WARM_UP = 0.05
"""The share of the jobs before the comparison starts."""
_FEWEST = 3
_MEMORY_GROWTH, _MEMORY_MARGIN = 1.1, 10e6
_SIZE_GROWTH, _SIZE_MARGIN = 1.5, 16 * 2**20
_IDLE_GROWTH, _IDLE_MARGIN = 1.5, 1.0
_LOADED_GROWTH, _LOADED_MARGIN = 1.5, 3.0
_LEAST_RATE = 0.6
_CYCLES = 2.5
"""The highest age of dead rows, in autovacuum cycles: autovacuum starts, works, and ends before the next."""


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    limit: str
    found: str
    passed: bool | None
    """Whether the value is within the limit, or None if that is unknown or not required."""

    @property
    def mark(self) -> str:
        """The mark in a table cell."""
        return {True: "✓", False: "✗", None: "?"}[self.passed]


def judge(result: ScenarioResult) -> list[Finding]:
    """Run all checks."""
    first, last = thirds(result)
    growing = [
        _memory(first, last),
        *(_if_long_enough(result, _size(name, table, first, last)) for name, table in TABLES.items()),
        *(_if_long_enough(result, _dead(result, name, table)) for name, table in TABLES.items()),
        _if_long_enough(result, _loaded(first, last)),
        _idle(result),
        _if_long_enough(result, _rate(first, last)),
    ]
    if not result.judged:
        growing = [growing[0], *(finding._replace(passed=None) for finding in growing[1:])]
    return [_once(result), _recorded(result), _left(result), *growing]


TABLES: dict[str, Callable[[Sample], TableState]] = {
    "jobs": lambda sample: sample.jobs,
    "queues": lambda sample: sample.queues,
}


def thirds(result: ScenarioResult) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of the first and of the last third of the jobs, without the warm-up.

    Samples after the last added job do not count: then the worker only waits for the last retries.
    """
    jobs = result.tally.jobs
    warm = [one for one in result.samples if one.done >= _WARM_UP * jobs and one.done + one.waiting < jobs]
    third = (1 - _WARM_UP) * jobs / 3
    first = [sample for sample in warm if sample.done <= _WARM_UP * jobs + third]
    last = [sample for sample in warm if sample.done > jobs - third]
    return first, last


def oldest_dead(samples: Sequence[Sample], table: Callable[[Sample], TableState]) -> float:
    """Return the highest age of dead rows, in seconds.

    Autovacuum removes the rows that died before it started. So the dead rows of a moment are the ones that
    died last. A few of them do not count.
    """
    oldest = 0.0
    for place, sample in enumerate(samples):
        state = table(sample)
        if state.dead <= FEW_DEAD:
            continue
        # The rows that had died by then have been removed.
        gone = state.died - state.dead
        since = [earlier.seconds for earlier in samples[:place] if table(earlier).died <= gone]
        oldest = max(oldest, sample.seconds - max(since, default=samples[0].seconds))
    return oldest


def _once(result: ScenarioResult) -> Finding:
    tally = result.tally
    passed = tally.once == tally.jobs and tally.runs == tally.jobs + tally.failures
    found = (
        f"{number(tally.once)} once, {number(tally.never)} never, {number(tally.more)} more often; "
        f"{number(tally.runs)} runs"
    )
    limit = f"{number(tally.jobs)} once, after {number(tally.failures)} failures"
    return Finding("every job succeeded once", limit, found, passed)


def _recorded(result: ScenarioResult) -> Finding:
    jobs, left = result.tally.jobs + result.probes, result.left
    runs = result.tally.runs + result.probes
    passed = left.inserted - result.scheduled == left.deleted == jobs and result.tally.recorded == runs
    found = (
        f"{number(left.inserted)} rows inserted, {number(left.deleted)} deleted, "
        f"{number(result.tally.recorded)} runs recorded"
    )
    limit = f"{number(jobs)} rows, with {number(result.probes)} probes; {number(runs)} runs"
    return Finding("the server's counts match", limit, found, passed)


def _left(result: ScenarioResult) -> Finding:
    left = result.left
    found = f"{left.jobs} jobs, {left.locked_jobs} of them locked, {left.locked_queues} locked queues"
    return Finding(
        "no jobs or locks remain",
        "none",
        found,
        left.jobs == left.locked_jobs == left.locked_queues == 0,
    )


def _memory(first: list[Sample], last: list[Sample]) -> Finding:
    limit = f"≤ {_MEMORY_GROWTH:g} times the first third + {_MEMORY_MARGIN / 1e6:.0f} MB"
    name = "worker memory, median"
    if _too_few(first, last):
        return _unknown(name, limit)
    before, after = (statistics.median(sample.memory for sample in part) for part in (first, last))
    passed = after <= _MEMORY_GROWTH * before + _MEMORY_MARGIN
    return Finding(name, limit, f"{before / 1e6:.1f} → {after / 1e6:.1f} MB", passed)


def _size(
    table_name: str, table: Callable[[Sample], TableState], first: list[Sample], last: list[Sample]
) -> Finding:
    limit = f"≤ {_SIZE_GROWTH:g} times the first third + {_SIZE_MARGIN >> 20} MiB"
    name = f"{table_name} table with indexes, largest"
    if _too_few(first, last):
        return _unknown(name, limit)
    before, after = (max(table(sample).size for sample in part) for part in (first, last))
    found = f"{before / 2**20:.1f} → {after / 2**20:.1f} MiB"
    passed = after <= _SIZE_GROWTH * before + _SIZE_MARGIN
    return Finding(name, limit, found, passed)


def _dead(result: ScenarioResult, table_name: str, table: Callable[[Sample], TableState]) -> Finding:
    name = f"dead rows of the {table_name} table, oldest"
    limit = f"≤ {_CYCLES * result.naptime:.0f} s, {_CYCLES:g} autovacuum cycles"
    oldest = oldest_dead(result.samples, table)
    most = max(table(sample).dead for sample in result.samples)
    found = f"{oldest:.0f} s; {number(most)} at most"
    return Finding(name, limit, found, oldest <= _CYCLES * result.naptime)


def _if_long_enough(result: ScenarioResult, finding: Finding) -> Finding:
    """Return the finding as unknown if the run was short.

    Before a few autovacuum cycles dead rows must grow, and a short stall has a large effect.
    """
    if result.long_enough:
        return finding
    return finding._replace(found=f"{finding.found}; the run was too short to tell", passed=None)


def _loaded(first: list[Sample], last: list[Sample]) -> Finding:
    name = "latency under load, median"
    limit = f"≤ {_LOADED_GROWTH:g} times the first third + {_LOADED_MARGIN:g} ms"
    before, after = ([value for one in part for value in one.latencies] for part in (first, last))
    if _too_few(before, after):
        return _unknown(name, limit)
    medians = statistics.median(before), statistics.median(after)
    passed = medians[1] <= _LOADED_GROWTH * medians[0] + _LOADED_MARGIN
    return Finding(name, limit, f"{medians[0]:.1f} → {medians[1]:.1f} ms", passed)


def _idle(result: ScenarioResult) -> Finding:
    name = "idle latency, median"
    limit = f"≤ {_IDLE_GROWTH:g} times a new worker and database + {_IDLE_MARGIN:g} ms"
    # Dead rows cost time until autovacuum removes them. So the check uses the latency after autovacuum.
    soaked, fresh = _medians(result.idle_settled or result.idle_after)
    found = f"{statistics.median(result.idle_before):.1f} ms before; "
    if result.idle_settled:
        both = "{:.1f} (new: {:.1f})".format(*_medians(result.idle_after))
        found += f"{both} with {number(result.samples[-1].jobs.dead)} dead rows; then "
    found += f"{soaked:.1f} (new: {fresh:.1f})"
    return Finding(name, limit, found, soaked <= _IDLE_GROWTH * fresh + _IDLE_MARGIN)


def _medians(pair: Pair) -> tuple[float, float]:
    return statistics.median(pair.soaked), statistics.median(pair.fresh)


def _rate(first: list[Sample], last: list[Sample]) -> Finding:
    name, limit = "jobs per second", f"≥ {_LEAST_RATE:g} times the first third"
    if _too_few(first, last):
        return _unknown(name, limit)
    before, after = (
        (part[-1].done - part[0].done) / (part[-1].seconds - part[0].seconds) for part in (first, last)
    )
    return Finding(name, limit, f"{number(before)} → {number(after)}", after >= _LEAST_RATE * before)


def _too_few(*parts: Sequence[object]) -> bool:
    return any(len(part) < _FEWEST for part in parts)


def _unknown(name: str, limit: str) -> Finding:
    return Finding(name, limit, "too few samples", None)
