"""What `make bench` measures, and what we promise."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.measure import (
    Load,
    costs,
    enqueueing,
    idle_latency,
    loaded_latency,
    memory,
    punctuality,
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
    ("worker cpu", "s/1,000 jobs", "worker's processor time"),
    ("server cpu", "s/1,000 jobs", "server's processor time"),
    ("transactions", "per 1,000 jobs", "transactions"),
    ("statements", "per 1,000 jobs", "statements"),
    ("wal", "kB/1,000 jobs", "write-ahead log"),
    ("connections", "connections", "connections"),
)


def _jobs(ours: int, node: int, procrastinate: int, pgqueuer: int) -> dict[str, int]:
    """How many for whom: a measurement is to take a second or two, so whoever is slow gets fewer."""
    return {"ours": ours, "node": node, "procrastinate": procrastinate, "pgqueuer": pgqueuer}


def _tuned_jobs(ours: int, node: int, procrastinate: int, pgqueuer: int) -> dict[str, int]:
    return {f"{name} tuned": count for name, count in _jobs(ours, node, procrastinate, pgqueuer).items()}


def _rate(group: str, case: str, *goals: Goal) -> tuple[Figure, ...]:
    return (Figure("rate", group, case, "jobs/s", higher_is_better=True, goals=goals),)


def _cost(group: str) -> tuple[Figure, ...]:
    return tuple(Figure(key, group, name, unit) for key, unit, name in _COSTS)


def _enqueue() -> list[Case]:
    group = "enqueue"
    table = (
        ("single", "one at a time", _jobs(2_000, 2_000, 500, 2_000)),
        ("ten", "ten at a time", _jobs(4_000, 4_000, 1_000, 4_000)),
        ("bulk", "all at once", _jobs(100_000, 100_000, 10_000, 50_000)),
    )
    return [
        Case(group, name, partial(enqueueing, how), counts, _rate(group, name), quick=True)
        for how, name, counts in table
    ]


def _throughput() -> list[Case]:
    group, goals = "throughput", {1: 1.2, 10: 4.0, 24: 5.0}
    cases = []
    for concurrency in (1, 10, 24, 100, 1_000):
        name, promised = _TRIVIAL.format(concurrency), concurrency in goals
        figures = _rate(group, name, *([Goal(goals[concurrency], _NODE)] if promised else []))
        measure = partial(throughput, Load(concurrency))
        if name == _REFERENCE:
            measure, figures = partial(costs, Load(concurrency)), figures + _cost("resources")
        counts = _jobs(5_000, 2_000, 500, 5_000) if concurrency == 1 else _jobs(20_000, 4_000, 600, 6_000)
        cases.append(Case(group, name, measure, counts, figures, quick=promised))
    name = f"{_REFERENCE}, 2 processes"
    return [*cases, Case(group, name, partial(throughput, Load(processes=2)), counts, _rate(group, name))]


def _tuned() -> list[Case]:
    group = "throughput when tuned"
    goals = (Goal(1.5, ("node tuned",)), Goal(0.8, ("floor",), f"{_REFERENCE}, beside the bare loop"))
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
    # Node takes the next job of a queue, mostly, only when it polls.
    one = {"ours": 3_000, "ours tuned": 10_000, "node": 40, "node tuned": 4}
    peers = {"procrastinate tuned": 500, "pgqueuer": 1_000}
    several = {"ours": 10_000, "node": 2_000, **peers}
    table: tuple[tuple[int, str, Goal, Mapping[str, int]], ...] = (
        (1, "1 queue", Goal(5, ("node", "node tuned")), {**one, "procrastinate tuned": 100, "pgqueuer": 200}),
        (10, "10 queues", Goal(5, _NODE), several),
        (1_000, "1,000 queues", Goal(10, _NODE), {**several, "node": 1_500}),
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
    for task, title in (("sync", "plain functions"), ("fail", "jobs that fail")):
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

    goal = Goal(0.8, _NODE)
    idle, loaded, due = "idle worker", "at half of Node's load", "jobs that are due later"
    under_load = partial(loaded_latency, (_REFERENCE, "node"))
    fed = dict.fromkeys(("ours", "node", "pgqueuer"), 0)  # procrastinate cannot keep up
    lateness = (Figure("p99", "punctuality", f"{due}, p99", "ms"),)
    return [
        Case("latency", idle, idle_latency, _jobs(500, 500, 100, 500), figures(idle, goal), quick=True),
        Case("latency", loaded, under_load, fed, figures(loaded, goal), quick=True),
        Case("punctuality", due, punctuality, _jobs(100, 100, 100, 100), lateness, quick=True, once=True),
    ]


def _process() -> list[Case]:
    started = "start, find no jobs, end"
    figure = Figure("seconds", "start-up", started, "s", goals=(Goal(2.0, _NODE),))
    filled = "a worker's memory"
    figures = (
        Figure("first", "memory", f"{filled} after 100,000 jobs", "MB"),
        Figure("last", "memory", f"{filled} after 1,000,000 jobs", "MB"),
    )
    million = dict.fromkeys(("ours tuned", "node tuned"), 1_000_000)
    return [
        Case("start-up", started, start_up, {"ours": 5, "node": 5}, (figure,), quick=True, scaled=False),
        Case("memory", filled, memory, million, figures, once=True),
    ]


def _perf_test() -> list[Case]:
    """The three figures of the benchmark that Graphile Worker's repository has, in its shape."""
    group = "Graphile Worker's perfTest"
    started, late = "start-up and shutdown", "average latency"
    name, load = "20,000 jobs, 4 processes of concurrency 10", Load(concurrency=10, processes=4)
    counts = dict.fromkeys(("ours", "ours tuned", "node", "node tuned"), 20_000)
    seconds, mean = Figure("seconds", group, started, "s"), Figure("mean", group, late, "ms")
    return [
        Case(group, started, start_up, {"ours": 5, "node": 5}, (seconds,), scaled=False, once=True),
        Case(group, name, partial(throughput, load), counts, _rate(group, name)),
        Case(group, late, idle_latency, {"ours": 500, "node": 500}, (mean,), once=True),
    ]


CASES = [
    *_enqueue(),
    *_throughput(),
    *_tuned(),
    *_queues(),
    *_tasks(),
    *_latency(),
    *_process(),
    *_perf_test(),
]


def selected(texts: list[str], *, quick: bool) -> list[Case]:
    """The cases whose group or name contains one of the texts, or all."""
    return [
        case
        for case in CASES
        if (case.quick or not quick)
        if not texts or any(text in case.group or text in case.name for text in texts)
    ]
