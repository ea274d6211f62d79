"""The benchmarks run, and report what they cannot measure. These tests do not check any speed."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest
from benchmarks import binding, contenders, middleware, schedules, top_view
from benchmarks.__main__ import main
from benchmarks.backlog import UNRUNNABLE, Backlog
from benchmarks.cases import CASES, selected
from benchmarks.contenders import CONTENDERS, NotInstalledError
from benchmarks.measure import (
    Load,
    MeasurementTimeoutError,
    call_latency,
    costs,
    drain,
    enqueueing,
    enqueueing_through_sqlalchemy,
    half_load_latency,
    idle_latency,
    loaded_latency,
    memory,
    own_latency,
    percentile,
    scheduled_latency,
    start_up,
    throughput,
)
from benchmarks.results import Curve, Line, Machine, Point, Report
from benchmarks.rounds import Case, Figure, Goal, run_case
from benchmarks.workbench import Workbench

from support import node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PYTHON, TUNED, FLOOR = CONTENDERS["python"], CONTENDERS["python tuned"], CONTENDERS["floor"]


@pytest.fixture
async def workbench(graphile_worker_server: str) -> AsyncIterator[Workbench]:
    async with Workbench.open(graphile_worker_server) as workbench:
        yield workbench


@pytest.mark.slow
async def test_every_figure_of_the_python_worker_is_measured(workbench: Workbench) -> None:
    spent = await costs(Load(), workbench, PYTHON, 50)
    measured = [
        *[await enqueueing(how, workbench, PYTHON, 50) for how in ("single", "ten", "bulk")],
        await throughput(Load(processes=2, queues=3), workbench, TUNED, 50),
        await throughput(Load(task="sync"), workbench, PYTHON, 10),
        await throughput(Load(task="fail"), workbench, PYTHON, 10),
        await throughput(Load(task="sleep", seconds=0.001), workbench, PYTHON, 10),
        await throughput(Load(), workbench, FLOOR, 50),
        await own_latency(workbench, PYTHON, 5),
        await enqueueing_through_sqlalchemy(workbench, PYTHON, 10),
        await enqueueing_through_sqlalchemy(workbench, CONTENDERS["by hand"], 10),
        await start_up(workbench, PYTHON, 1),
        await memory(workbench, TUNED, 100),
    ]

    assert all(value > 0 for figures in measured for value in figures.values())
    assert spent["connections"] >= 1
    assert spent["transactions"] > 0
    assert workbench.remarks == []


async def test_latency_of_jobs_from_another_process_is_measured(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.measure._FEEDING_SECONDS", 0.1)
    monkeypatch.setattr("benchmarks.measure._FIRST_DELAY", 0.1)
    monkeypatch.setattr("benchmarks.measure._LAST_DELAY", 0.2)

    idle = await idle_latency(workbench, PYTHON, 5)
    loaded = await loaded_latency(("no such case", "node"), workbench, PYTHON, 5)
    late = await scheduled_latency(workbench, PYTHON, 5)
    half_loaded = await half_load_latency(workbench, CONTENDERS["python, prefetch 0"], 5)

    assert 0 < idle["p50"] <= idle["p99"]
    assert 0 < loaded["p50"] <= loaded["p99"]
    assert 0 < half_loaded["p50"] <= half_loaded["p99"]
    assert late["p99"] >= 0


@pytest.mark.slow
async def test_node_is_measured_next_to_python(workbench: Workbench) -> None:
    node.command(contenders.NODE_VERSION)
    figure = Figure("rate", "group", "name", "jobs/s", higher_is_better=True, goals=(Goal(5, ("node",)),))
    counts = {"python": 50, "python tuned": 50, "node": 20, "node tuned": 50}
    case = Case("group", "name", partial(throughput, Load()), counts, (figure,))

    [measurement] = await run_case(workbench, case, rounds=2)

    assert [len(one.values) for one in measurement.series] == [2, 2, 2, 2]
    assert [one.note for one in measurement.series] == ["", "", "with 20 of 50 jobs", ""]
    assert (measurement.goal, measurement.against) == (5, "node")
    assert ("name", "node") in workbench.best


async def test_history_and_calls_are_measured(workbench: Workbench) -> None:
    kept = await costs(Load(), workbench, CONTENDERS["python, all kept"], 20)
    called = await call_latency(workbench, CONTENDERS["python, call"], 5)

    assert kept["cpu per job"] > 0
    assert kept["time per job"] > 0
    connection = await asyncpg.connect(workbench.dsn(PYTHON))
    assert await connection.fetchval("select count(*) from graphile_worker._private_python_runs") > 0
    await connection.close()
    assert 0 < called["p50"] <= called["p99"]


async def test_another_checkout_takes_part(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CONTENDERS["before"]
    with pytest.raises(NotInstalledError, match="make bench BEFORE="):
        await throughput(Load(), workbench, before, 5)
    monkeypatch.setenv(contenders.BEFORE, "/nowhere")
    with pytest.raises(NotInstalledError, match="BEFORE=/nowhere is not a checkout"):
        await throughput(Load(), workbench, before, 5)
    monkeypatch.setenv(contenders.BEFORE, str(contenders.ROOT))

    assert (await throughput(Load(), workbench, before, 5))["rate"] > 0


async def test_missing_contender_is_named(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_PYTHON", Path("/nowhere/python/bin/python"))
    monkeypatch.setattr(contenders, "ROOT", Path("/nowhere"))
    contenders.version.cache_clear()
    figure = Figure("rate", "group", "name", "jobs/s", higher_is_better=True)
    counts = {"python": 10, "pgqueuer": 10}
    case = Case("group", "name", partial(enqueueing, "bulk"), counts, (figure,))

    [measurement] = await run_case(workbench, case, rounds=1)

    python, pgqueuer = measurement.series
    assert len(python.values) == 1
    assert (pgqueuer.values, pgqueuer.note) == (
        [],
        "missing: pgqueuer is not installed in python; run: make bench-peers",
    )
    [remark] = workbench.remarks
    assert "pgqueuer is not installed" in remark


@pytest.mark.slow
async def test_slow_measurement_is_abandoned_and_the_next_one_succeeds(workbench: Workbench) -> None:
    load, usual_limit = Load(task="sleep", seconds=8), workbench.limit
    await workbench.fill(PYTHON, task=load.task, count=1, seconds=load.seconds)
    drivers = await workbench.drivers(PYTHON, 1)
    workbench.limit = 0  # only now, because the preparation may take longer
    with pytest.raises(MeasurementTimeoutError, match="0 of 1 jobs in 0 s"):
        await drain(load, workbench, PYTHON, drivers, 1)
    workbench.limit = usual_limit

    assert (await throughput(Load(), workbench, PYTHON, 10))["rate"] > 0


async def test_dead_driver_is_started_again(workbench: Workbench) -> None:
    first = await workbench.driver(PYTHON)
    await first.kill()

    second = await workbench.driver(PYTHON)

    assert second is not first
    assert (await second.request("completed")).value == [0, 0.0]


async def test_claims_are_timed_behind_every_kind_of_unrunnable_job(workbench: Workbench) -> None:
    async with Backlog.open(workbench) as backlog:
        for kind in UNRUNNABLE.values():
            await backlog.fill(20, kind)
            assert await backlog.claim_time(3) > 0
        await backlog.forget_statistics()
        await backlog.fill(20, analyse=False)
        assert await backlog.claim_time(3) > 0
        assert await backlog.connection.fetchval("select count(*) from graphile_worker.jobs") == 20


def test_report_survives_writing_and_reading(tmp_path: Path) -> None:
    report = Report(
        when="now",
        command="python -m benchmarks",
        seconds=1.5,
        machine=Machine("Linux", "a processor", 2, 1024),
        versions={"Python": "3.11"},
        remarks=["A remark."],
        curves=[Curve("name", "title", "x", "y", [Line("python", [Point(1, 2.5)])])],
    )

    report.write(tmp_path / "results.json")

    assert Report.read(tmp_path / "results.json") == report


def test_figures_have_unique_names() -> None:
    names = [(figure.group, figure.case, figure.unit) for case in CASES for figure in case.figures]
    assert len(names) == len(set(names))


def test_cases_are_selected_by_a_part_of_their_names() -> None:
    assert selected([], quick=False) == CASES
    assert {case.group for case in selected(["serial"], quick=True)} == {"serial queues"}
    assert len(selected([], quick=True)) < len(CASES)


def test_percentile_of_a_list() -> None:
    assert [percentile([float(number) for number in range(1, 101)], share) for share in (0.5, 0.99)] == [
        50,
        99,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "no such thing"],
            "enqueue, throughput",
        ),
        (["scaling", "--only", "no such thing"], "backlog, "),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_invalid_arguments_are_rejected_before_measuring(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


async def test_backfill_of_missed_schedules_is_measured(database: str) -> None:
    filled = await schedules.measure_backfill(database, 2, timedelta(hours=1))
    assert filled.jobs >= 2 * 60
    assert filled.seconds > 0


def test_cost_of_middleware_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    middleware.main(["--count", "10"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["0", "0"], ["1", "0"], ["10", "0"], ["0", "1"], ["0", "10"], ["10", "10"],
    ]  # fmt: skip


def test_cost_of_binding_is_printed_with_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    binding.main(["--count", "10"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        *("msgspec alone", "keywords", "with_context", "with_defaults", "struct", "by_position")
    ]
    assert lines[-1].startswith("goal: at most 5 µs; ")


async def test_refresh_of_top_is_measured(database: str) -> None:
    assert await top_view.measure(database, 200) > 0
