"""The cases that `make bench` measures, and their goals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.measure import (
    Load,
    call_latency,
    costs,
    enqueueing,
    enqueueing_through_sqlalchemy,
    half_load_latency,
    idle_latency,
    loaded_latency,
    memory,
    own_latency,
    scheduled_latency,
    start_up,
    throughput,
)
from benchmarks.rounds import Case, Figure, Goal

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRIVIAL = "trivial jobs, concurrency {:,}"
_REFERENCE = _TRIVIAL.format(24)
_NODE = ("node",)
_COSTS = (
    ("worker cpu", "s/1,000 jobs", "worker CPU time"),
    ("server cpu", "s/1,000 jobs", "server CPU time"),
    ("transactions", "per 1,000 jobs", "transactions"),
    ("statements", "per 1,000 jobs", "statements"),
    ("wal", "kB/1,000 jobs", "write-ahead log"),
    ("connections", "connections", "connections"),
)


def _jobs(python: int, node: int, procrastinate: int, pgqueuer: int) -> dict[str, int]:
    """Return the number of jobs per contender. Slow contenders get fewer, to take a second or two."""
    return {"python": python, "node": node, "procrastinate": procrastinate, "pgqueuer": pgqueuer}


def _tuned_jobs(python: int, node: int, procrastinate: int, pgqueuer: int) -> dict[str, int]:
    return {f"{name} tuned": count for name, count in _jobs(python, node, procrastinate, pgqueuer).items()}


def _rate(group: str, case: str, *goals: Goal) -> tuple[Figure, ...]:
    return (Figure("rate", group, case, "jobs/s", higher_is_better=True, goals=goals),)


def _cost(group: str) -> tuple[Figure, ...]:
    return tuple(Figure(key, group, name, unit) for key, unit, name in _COSTS)


def _enqueue() -> list[Case]:
    group = "enqueue"
    table = (
        ("single", "one at a time", _jobs(2_000, 2_000, 500, 2_000)),
        ("ten", "ten in parallel", _jobs(4_000, 4_000, 1_000, 4_000)),
        ("bulk", "in bulk", _jobs(100_000, 100_000, 10_000, 50_000)),
    )
    through = "in the transactions of a SQLAlchemy session"
    goal = Goal(0.67, ("by hand",))  # at most 1.5 times as long
    return [
        *(
            Case(group, name, partial(enqueueing, how), counts, _rate(group, name), quick=True)
            for how, name, counts in table
        ),
        Case(
            group,
            through,
            enqueueing_through_sqlalchemy,
            {"python": 2_000, "by hand": 2_000},
            _rate(group, through, goal),
            quick=True,
        ),
    ]


def _throughput() -> list[Case]:
    group, goals = "throughput", {1: 4.0, 10: 5.0, 24: 8.0, 100: 10.0}
    cases = []
    for concurrency in (1, 10, 24, 100, 1_000):
        name, has_goal = _TRIVIAL.format(concurrency), concurrency in goals
        figures = _rate(group, name, *([Goal(goals[concurrency], _NODE)] if has_goal else []))
        measure = partial(throughput, Load(concurrency))
        if name == _REFERENCE:
            measure, figures = partial(costs, Load(concurrency)), figures + _cost("resources")
        counts = _jobs(5_000, 2_000, 500, 5_000) if concurrency == 1 else _jobs(20_000, 4_000, 600, 6_000)
        cases.append(Case(group, name, measure, counts, figures, quick=has_goal))
    name = f"{_REFERENCE}, 2 processes"
    return [*cases, Case(group, name, partial(throughput, Load(processes=2)), counts, _rate(group, name))]


def _tuned() -> list[Case]:
    group = "throughput when tuned"
    goals = (Goal(1.2, ("node tuned",)), Goal(0.75, ("floor",), f"{_REFERENCE}, compared with the bare loop"))
    figures = _rate(group, _REFERENCE, *goals) + _cost("resources when tuned")
    counts = {**_tuned_jobs(100_000, 100_000, 1_000, 10_000), "floor": 100_000}
    cases = [Case(group, _REFERENCE, partial(costs, Load()), counts, figures, quick=True)]
    counts = _tuned_jobs(50_000, 50_000, 500, 5_000)
    others = {
        _TRIVIAL.format(100): Load(concurrency=100),
        f"{_REFERENCE}, 2 processes": Load(processes=2),
    }
    for name, load in others.items():
        cases.append(Case(group, name, partial(throughput, load), counts, _rate(group, name)))
    return cases


def _queues() -> list[Case]:
    group = "serial queues"
    # Node mostly claims the next job of a queue only when it polls.
    one = {"python": 3_000, "python tuned": 10_000, "node": 40, "node tuned": 4}
    peers = {"procrastinate tuned": 500, "pgqueuer": 1_000}
    several = {"python": 10_000, "node": 2_000, **peers}
    table: tuple[tuple[int, str, Goal, Mapping[str, int]], ...] = (
        (1, "1 queue", Goal(5, ("node", "node tuned")), {**one, "procrastinate tuned": 100, "pgqueuer": 200}),
        (10, "10 queues", Goal(6, _NODE), several),
        (1_000, "1,000 queues", Goal(12, _NODE), {**several, "node": 1_500}),
    )
    return [
        Case(
            group,
            name,
            partial(throughput, Load(queues=queues)),
            counts,
            _rate(group, name, goal),
            quick=True,
        )
        for queues, name, goal, counts in table
    ]


def _tasks() -> list[Case]:
    group = "other tasks"
    counts = _jobs(6_000, 2_500, 500, 4_000)
    cases = []
    for concurrency in (24, 100):
        name = f"jobs that sleep 5 ms, concurrency {concurrency}"
        load = Load(concurrency, task="sleep", seconds=0.005)
        quick = concurrency == Load().concurrency
        cases.append(Case(group, name, partial(throughput, load), counts, _rate(group, name), quick=quick))
    for task, title in (("sync", "synchronous functions"), ("fail", "jobs that fail")):
        name = f"{title}, concurrency 24"
        measure = partial(throughput, Load(task=task))
        cases.append(Case(group, name, measure, counts, _rate(group, name), quick=True))
    name = "1,000 jobs that sleep 1 s, concurrency 1,000"
    figures = (Figure("seconds", group, name, "s"), Figure("connections", group, name, "connections"))
    measure = partial(costs, Load(1_000, task="sleep", seconds=1.0))
    counts = _jobs(1_000, 1_000, 1_000, 1_000)
    return [*cases, Case(group, name, measure, counts, figures, scaled=False, once=True)]


def _latency() -> list[Case]:
    def figures(name: str, *goals: Goal) -> tuple[Figure, ...]:
        return tuple(Figure(key, "latency", f"{name}, {key}", "ms", goals=goals) for key in ("p50", "p99"))

    goal, idle_goal = Goal(0.8, _NODE), Goal(1.0, _NODE)
    idle, loaded, due = "idle worker", "at half of Node's throughput", "start after the due time"
    half = "jobs of 5 ms, half of what the slots can run"
    no_worse = Goal(1.0, ("python, prefetch 0",))
    waits = dict.fromkeys(("python", "python, prefetch 0"), 0)
    under_load = partial(loaded_latency, (_REFERENCE, "node"))
    fed = dict.fromkeys(("python", "node", "pgqueuer"), 0)  # procrastinate cannot keep up
    lateness = (Figure("p99", "scheduled jobs", f"{due}, p99", "ms"),)
    return [
        Case("latency", idle, idle_latency, _jobs(500, 500, 100, 500), figures(idle, idle_goal), quick=True),
        Case("latency", loaded, under_load, fed, figures(loaded, goal), quick=True),
        Case("latency", half, half_load_latency, waits, figures(half, no_worse), quick=True),
        Case(
            "scheduled jobs",
            due,
            scheduled_latency,
            _jobs(100, 100, 100, 100),
            lateness,
            quick=True,
            once=True,
        ),
    ]


def _history() -> list[Case]:
    """Return what history costs, and what waiting for results costs."""
    group, tuned = "history", f"{_REFERENCE}, when tuned"
    off, failures, everything = "python", "python, failures kept", "python, all kept"
    counts = dict.fromkeys((off, failures, everything, "before"), 20_000)
    tuned_counts = dict.fromkeys(("python tuned", "python tuned, all kept", "before tuned"), 100_000)
    # Goals for CPU time, because the time of the clock depends on what else the machine does. A difference of
    # less than 5 % is noise.
    free = tuple(
        Goal(1.05, (against,), f"{_REFERENCE}, {what}", of)
        for what, against, of in (("history off", "before", off), ("failures kept", off, failures))
    )
    most = Goal(15.0, (off,), f"{_REFERENCE}, all kept", everything, is_difference=True)
    share = Goal(1.25, ("python tuned",), f"{tuned}, all kept", "python tuned, all kept")
    free_tuned = Goal(1.05, ("before tuned",), f"{tuned}, history off", "python tuned")
    called = "call of a task, idle worker"
    limit = Goal(1.5, (off,), of="python, call")
    figures = (
        Figure("p50", "results", f"{called}, p50", "ms", goals=(limit,)),
        Figure("p99", "results", f"{called}, p99", "ms"),
    )
    measure = partial(costs, Load())
    time, cpu = ("time per job", "µs/job"), ("cpu per job", "µs/job, CPU time")
    per_job = (
        Figure(time[0], group, _REFERENCE, time[1]),
        Figure(cpu[0], group, _REFERENCE, cpu[1], goals=(*free, most)),
    )
    per_tuned_job = (
        Figure(time[0], group, tuned, time[1]),
        Figure(cpu[0], group, tuned, cpu[1], goals=(free_tuned, share)),
    )
    return [
        Case(group, _REFERENCE, measure, counts, per_job, quick=True),
        Case(group, tuned, measure, tuned_counts, per_tuned_job, quick=True),
        Case("results", called, call_latency, {off: 500, "python, call": 500}, figures, quick=True),
    ]


def _process() -> list[Case]:
    started = "start, find no jobs, exit"
    figure = Figure("seconds", "start-up", started, "s", goals=(Goal(2.0, _NODE),))
    filled = "a worker's memory"
    figures = (
        Figure("first", "memory", f"{filled} after 100,000 jobs", "MB"),
        Figure("last", "memory", f"{filled} after 1,000,000 jobs", "MB"),
    )
    million = dict.fromkeys(("python tuned", "node tuned"), 1_000_000)
    return [
        Case("start-up", started, start_up, {"python": 5, "node": 5}, (figure,), quick=True, scaled=False),
        Case("memory", filled, memory, million, figures, once=True),
    ]


def _perf_test() -> list[Case]:
    """Return the three figures of the perfTest in Graphile Worker's repository, with its parameters."""
    group = "Graphile Worker's perfTest"
    started, late = "start-up and shutdown", "average latency"
    name, load = "20,000 jobs, 4 processes of concurrency 10", Load(concurrency=10, processes=4)
    counts = dict.fromkeys(("python", "python tuned", "node", "node tuned"), 20_000)
    seconds, mean = Figure("seconds", group, started, "s"), Figure("mean", group, late, "ms")
    return [
        Case(group, started, start_up, {"python": 5, "node": 5}, (seconds,), scaled=False, once=True),
        Case(group, name, partial(throughput, load), counts, _rate(group, name)),
        Case(group, late, own_latency, {"python": 500, "node": 500}, (mean,), once=True),
    ]


CASES = [
    *_enqueue(),
    *_throughput(),
    *_tuned(),
    *_queues(),
    *_tasks(),
    *_latency(),
    *_history(),
    *_process(),
    *_perf_test(),
]


def selected(texts: list[str], *, quick: bool) -> list[Case]:
    """Return the cases whose group or name contains one of the texts, or all cases."""
    return [
        case
        for case in CASES
        if (case.quick or not quick)
        if not texts or any(text in case.group or text in case.name for text in texts)
    ]
