"""The benchmarks run, and tell what they cannot measure. How fast anything is, is not asked here."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks import binding, contenders, looks, middleware, schedules
from benchmarks.__main__ import main
from benchmarks.arena import Arena
from benchmarks.backlog import UNRUNNABLE, Backlog
from benchmarks.cases import CASES, selected
from benchmarks.contenders import CONTENDERS
from benchmarks.measure import (
    GaveUp,
    Load,
    costs,
    drain,
    enqueueing,
    idle_latency,
    loaded_latency,
    memory,
    percentile,
    punctuality,
    start_up,
    throughput,
)
from benchmarks.results import Curve, Line, Machine, Point, Report
from benchmarks.rounds import Case, Figure, Goal, run_case

from support import node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OURS, TUNED, FLOOR = CONTENDERS["ours"], CONTENDERS["ours tuned"], CONTENDERS["floor"]


@pytest.fixture
async def arena(graphile_worker_server: str) -> AsyncIterator[Arena]:
    async with Arena.open(graphile_worker_server) as arena:
        yield arena


async def test_everything_can_be_measured_of_ours(arena: Arena) -> None:
    spent = await costs(Load(), arena, OURS, 50)
    measured = [
        *[await enqueueing(how, arena, OURS, 50) for how in ("single", "ten", "bulk")],
        await throughput(Load(processes=2, queues=3), arena, TUNED, 50),
        await throughput(Load(task="sync"), arena, OURS, 10),
        await throughput(Load(task="fail"), arena, OURS, 10),
        await throughput(Load(task="sleep", seconds=0.001), arena, OURS, 10),
        await throughput(Load(), arena, FLOOR, 50),
        await idle_latency(arena, OURS, 5),
        await start_up(arena, OURS, 1),
        await memory(arena, TUNED, 100),
    ]

    assert all(value > 0 for figures in measured for value in figures.values())
    assert spent["connections"] >= 1
    assert spent["transactions"] > 0
    assert arena.remarks == []


async def test_jobs_that_others_send_are_heard(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure._FEEDING_SECONDS", 0.1)
    monkeypatch.setattr("benchmarks.measure._FIRST_DELAY", 0.1)
    monkeypatch.setattr("benchmarks.measure._LAST_DELAY", 0.2)

    loaded = await loaded_latency(("no such case", "node"), arena, OURS, 5)
    late = await punctuality(arena, OURS, 5)

    assert 0 < loaded["p50"] <= loaded["p99"]
    assert late["p99"] >= 0


async def test_node_is_measured_beside_ours(arena: Arena) -> None:
    node.command(contenders.NODE_VERSION)
    figure = Figure("rate", "group", "name", "jobs/s", higher_is_better=True, goals=(Goal(5, ("node",)),))
    counts = {"ours": 50, "ours tuned": 50, "node": 20, "node tuned": 50}
    case = Case("group", "name", partial(throughput, Load()), counts, (figure,))

    [measurement] = await run_case(arena, case, rounds=2)

    assert [len(one.values) for one in measurement.series] == [2, 2, 2, 2]
    assert [one.note for one in measurement.series] == ["", "", "with 20 of 50 jobs", ""]
    assert (measurement.goal, measurement.against) == (5, "node")
    assert ("name", "node") in arena.best


async def test_who_is_missing_is_named(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_PYTHON", Path("/nowhere/python/bin/python"))
    monkeypatch.setattr(contenders, "ROOT", Path("/nowhere"))
    contenders.version.cache_clear()
    figure = Figure("rate", "group", "name", "jobs/s", higher_is_better=True)
    counts = {"ours": 10, "pgqueuer": 10}
    case = Case("group", "name", partial(enqueueing, "bulk"), counts, (figure,))

    [measurement] = await run_case(arena, case, rounds=1)

    ours, pgqueuer = measurement.series
    assert len(ours.values) == 1
    assert (pgqueuer.values, pgqueuer.note) == ([], "missing: pgqueuer is not in python")
    assert arena.remarks == ["pgqueuer took no part: pgqueuer is not in python."]


async def test_what_takes_too_long_is_given_up_and_the_rest_goes_on(arena: Arena) -> None:
    load, patient = Load(task="sleep", seconds=8), arena.limit
    await arena.fill(OURS, task=load.task, count=1, seconds=load.seconds)
    drivers = await arena.drivers(OURS, 1)
    arena.limit = 0  # only now: whatever comes before may take its time
    with pytest.raises(GaveUp, match="gave up after 0 of 1 jobs in 0 s"):
        await drain(load, arena, OURS, drivers, 1)
    arena.limit = patient

    assert (await throughput(Load(), arena, OURS, 10))["rate"] > 0


async def test_a_driver_that_died_is_started_anew(arena: Arena) -> None:
    first = await arena.driver(OURS)
    await first.kill()

    second = await arena.driver(OURS)

    assert second is not first
    assert (await second.ask("completed")).value == [0, 0.0]


async def test_claiming_is_timed_past_all_that_cannot_run(arena: Arena) -> None:
    async with Backlog.open(arena) as backlog:
        for kind in UNRUNNABLE.values():
            await backlog.fill(20, kind)
            assert await backlog.claim_time(3) > 0
        await backlog.forget_statistics()
        await backlog.fill(20, analyse=False)
        assert await backlog.claim_time(3) > 0
        assert await backlog.connection.fetchval("select count(*) from graphile_worker.jobs") == 20


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = Report(
        when="now",
        command="python -m benchmarks",
        seconds=1.5,
        machine=Machine("Linux", "a processor", 2, 1024),
        versions={"Python": "3.11"},
        remarks=["All is well."],
        curves=[Curve("name", "title", "x", "y", [Line("ours", [Point(1, 2.5)])])],
    )

    report.write(tmp_path / "results.json")

    assert Report.read(tmp_path / "results.json") == report


def test_figures_have_names_of_their_own() -> None:
    names = [(figure.group, figure.case, figure.unit) for case in CASES for figure in case.figures]
    assert len(names) == len(set(names))


def test_cases_are_selected_by_what_their_names_contain() -> None:
    assert selected([], quick=False) == CASES
    assert {case.group for case in selected(["serial"], quick=True)} == {"serial queues"}
    assert len(selected([], quick=True)) < len(CASES)


def test_percentiles() -> None:
    assert [percentile([float(number) for number in range(1, 101)], share) for share in (0.5, 0.99)] == [
        50,
        99,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "no such thing"],
            "nothing has no such thing in its name; there are: enqueue, throughput",
        ),
        (["scaling", "--only", "no such thing"], "there are: backlog, "),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


async def test_a_worker_makes_up_for_what_it_missed(database: str) -> None:
    filled = await schedules.fill(database, 2, timedelta(hours=1))
    assert filled.jobs >= 2 * 60
    assert filled.seconds > 0


def test_the_cost_of_middleware_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    middleware.main(["--count", "10"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["0", "0"], ["1", "0"], ["10", "0"], ["0", "1"], ["0", "10"], ["10", "10"],
    ]  # fmt: skip


def test_the_cost_of_binding_is_printed_with_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    binding.main(["--count", "10"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        *("msgspec alone", "keywords", "with_context", "with_defaults", "struct", "by_position")
    ]
    assert lines[-1].startswith("goal: 5 µs at most; ")


async def test_a_look_of_top_is_measured(database: str) -> None:
    assert await looks.measure(database, 200) > 0
