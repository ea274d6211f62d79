"""Whether anything grew with the number of jobs."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.charts import number
from benchmarks.soak.course import FEW_DEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.soak.course import Course, Pair, Sample, TableState

_WARM_UP = 0.05
"""The share of the jobs that goes by before anything is compared."""
_FEWEST = 3
_MEMORY_GROWTH, _MEMORY_MARGIN = 1.1, 10e6
_SIZE_GROWTH, _SIZE_MARGIN = 1.5, 16 * 2**20
_IDLE_GROWTH, _IDLE_MARGIN = 1.5, 1.0
_LOADED_GROWTH, _LOADED_MARGIN = 1.5, 3.0
_LEAST_RATE = 0.6
_TURNS = 2.5
"""Dead rows may be as old as so many turns of autovacuum: it comes, works, and is done before the next."""


class Finding(NamedTuple):
    """One thing that is asked of a run."""

    what: str
    bound: str
    found: str
    good: bool | None
    """None if that cannot be said, or is not asked."""

    @property
    def mark(self) -> str:
        """For a cell of a table."""
        return {True: "✓", False: "✗", None: "?"}[self.good]


def judge(course: Course) -> list[Finding]:
    """Everything that is asked."""
    first, last = thirds(course)
    growing = [
        _memory(first, last),
        *(_if_long_enough(course, _size(name, table, first, last)) for name, table in TABLES.items()),
        *(_if_long_enough(course, _dead(course, name, table)) for name, table in TABLES.items()),
        _if_long_enough(course, _loaded(first, last)),
        _idle(course),
        _if_long_enough(course, _rate(first, last)),
    ]
    if not course.judged:
        growing = [growing[0], *(finding._replace(good=None) for finding in growing[1:])]
    return [_once(course), _recorded(course), _left(course), *growing]


TABLES: dict[str, Callable[[Sample], TableState]] = {
    "jobs": lambda sample: sample.jobs,
    "queues": lambda sample: sample.queues,
}


def thirds(course: Course) -> tuple[list[Sample], list[Sample]]:
    """The samples of the first and of the last third of the jobs, after those that warm up.

    Once all jobs are added the worker waits for the last retries, which is no load any more.
    """
    jobs = course.tally.jobs
    warm = [one for one in course.samples if one.done >= _WARM_UP * jobs and one.done + one.waiting < jobs]
    third = (1 - _WARM_UP) * jobs / 3
    first = [sample for sample in warm if sample.done <= _WARM_UP * jobs + third]
    last = [sample for sample in warm if sample.done > jobs - third]
    return first, last


def oldest_dead(samples: Sequence[Sample], table: Callable[[Sample], TableState]) -> float:
    """For how many seconds dead rows were there, at most.

    Autovacuum removes what died before it came, so the dead rows of a moment are those that died last. Few of
    them do not count.
    """
    oldest = 0.0
    for place, sample in enumerate(samples):
        state = table(sample)
        if state.dead <= FEW_DEAD:
            continue
        # What had died by then is gone.
        gone = state.died - state.dead
        since = [earlier.seconds for earlier in samples[:place] if table(earlier).died <= gone]
        oldest = max(oldest, sample.seconds - max(since, default=samples[0].seconds))
    return oldest


def _once(course: Course) -> Finding:
    tally = course.tally
    good = tally.once == tally.jobs and tally.runs == tally.jobs + tally.failures
    found = (
        f"{number(tally.once)} once, {number(tally.never)} never, {number(tally.more)} more often; "
        f"{number(tally.runs)} runs"
    )
    bound = f"{number(tally.jobs)} once, after {number(tally.failures)} failures"
    return Finding("every job succeeded once", bound, found, good)


def _recorded(course: Course) -> Finding:
    jobs, left = course.tally.jobs + course.probes, course.left
    runs = course.tally.runs + course.probes
    good = left.inserted - course.scheduled == left.deleted == jobs and course.tally.recorded == runs
    found = (
        f"{number(left.inserted)} rows inserted, {number(left.deleted)} deleted, "
        f"{number(course.tally.recorded)} runs recorded"
    )
    bound = f"{number(jobs)} rows, with {number(course.probes)} probes; {number(runs)} runs"
    return Finding("the server counted the same", bound, found, good)


def _left(course: Course) -> Finding:
    left = course.left
    found = f"{left.jobs} jobs, {left.locked_jobs} of them locked, {left.locked_queues} locked queues"
    return Finding(
        "nothing is left, nothing is locked",
        "none",
        found,
        left.jobs == left.locked_jobs == left.locked_queues == 0,
    )


def _memory(first: list[Sample], last: list[Sample]) -> Finding:
    bound = f"≤ {_MEMORY_GROWTH:g} times the first third + {_MEMORY_MARGIN / 1e6:.0f} MB"
    what = "the worker's memory, median"
    if _too_few(first, last):
        return _unknown(what, bound)
    before, after = (statistics.median(sample.memory for sample in part) for part in (first, last))
    good = after <= _MEMORY_GROWTH * before + _MEMORY_MARGIN
    return Finding(what, bound, f"{before / 1e6:.1f} → {after / 1e6:.1f} MB", good)


def _size(
    name: str, table: Callable[[Sample], TableState], first: list[Sample], last: list[Sample]
) -> Finding:
    bound = f"≤ {_SIZE_GROWTH:g} times the first third + {_SIZE_MARGIN >> 20} MiB"
    what = f"the table of {name} with its indexes, largest"
    if _too_few(first, last):
        return _unknown(what, bound)
    before, after = (max(table(sample).size for sample in part) for part in (first, last))
    found = f"{before / 2**20:.1f} → {after / 2**20:.1f} MiB"
    good = after <= _SIZE_GROWTH * before + _SIZE_MARGIN
    return Finding(what, bound, found, good)


def _dead(course: Course, name: str, table: Callable[[Sample], TableState]) -> Finding:
    what = f"dead rows of {name}, oldest"
    bound = f"≤ {_TURNS * course.naptime:.0f} s, {_TURNS:g} turns of autovacuum"
    oldest = oldest_dead(course.samples, table)
    most = max(table(sample).dead for sample in course.samples)
    found = f"{oldest:.0f} s; {number(most)} at most"
    return Finding(what, bound, found, oldest <= _TURNS * course.naptime)


def _if_long_enough(course: Course, finding: Finding) -> Finding:
    """Until autovacuum has come some times dead rows must grow, and a moment's stall weighs much."""
    if course.long_enough:
        return finding
    return finding._replace(found=f"{finding.found}; the run was too short to tell", good=None)


def _loaded(first: list[Sample], last: list[Sample]) -> Finding:
    what = "latency under load, median"
    bound = f"≤ {_LOADED_GROWTH:g} times the first third + {_LOADED_MARGIN:g} ms"
    before, after = ([value for one in part for value in one.latencies] for part in (first, last))
    if _too_few(before, after):
        return _unknown(what, bound)
    medians = statistics.median(before), statistics.median(after)
    good = medians[1] <= _LOADED_GROWTH * medians[0] + _LOADED_MARGIN
    return Finding(what, bound, f"{medians[0]:.1f} → {medians[1]:.1f} ms", good)


def _idle(course: Course) -> Finding:
    what = "latency when idle, median"
    bound = f"≤ {_IDLE_GROWTH:g} times that of a new worker and database + {_IDLE_MARGIN:g} ms"
    # Dead rows that autovacuum has not seen yet cost something, which is to be gone with them.
    soaked, fresh = _medians(course.idle_settled or course.idle_after)
    found = f"{statistics.median(course.idle_before):.1f} ms before; "
    if course.idle_settled:
        both = "{:.1f} and new {:.1f}".format(*_medians(course.idle_after))
        found += f"{both} with {number(course.samples[-1].jobs.dead)} dead rows; then "
    found += f"{soaked:.1f} and new {fresh:.1f}"
    return Finding(what, bound, found, soaked <= _IDLE_GROWTH * fresh + _IDLE_MARGIN)


def _medians(pair: Pair) -> tuple[float, float]:
    return statistics.median(pair.soaked), statistics.median(pair.fresh)


def _rate(first: list[Sample], last: list[Sample]) -> Finding:
    what, bound = "jobs per second", f"≥ {_LEAST_RATE:g} times the first third"
    if _too_few(first, last):
        return _unknown(what, bound)
    before, after = (
        (part[-1].done - part[0].done) / (part[-1].seconds - part[0].seconds) for part in (first, last)
    )
    return Finding(what, bound, f"{number(before)} → {number(after)}", after >= _LEAST_RATE * before)


def _too_few(*parts: Sequence[object]) -> bool:
    return any(len(part) < _FEWEST for part in parts)


def _unknown(what: str, bound: str) -> Finding:
    return Finding(what, bound, "too few samples", None)
