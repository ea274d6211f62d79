"""The soak: its verdict on made-up results, and a short one that is real."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from benchmarks.measure import MeasurementTimeoutError
from benchmarks.results import Machine, Report
from benchmarks.soak.__main__ import main
from benchmarks.soak.page import print_results, remarks_of, write_page
from benchmarks.soak.result import (
    Pair,
    Remaining,
    Sample,
    ScenarioResult,
    SoakResult,
    Spending,
    TableState,
    Tally,
)
from benchmarks.soak.run import soak
from benchmarks.soak.scenarios import SCENARIOS
from benchmarks.soak.verdict import TABLES, Finding, judge, oldest_dead, thirds
from benchmarks.workbench import Workbench

from support.postgres import ROOT

JOBS, SECONDS, RATE, NAPTIME = 1_000_000, 600, 1700, 60
ALL = {
    "every job succeeded once",
    "the server's counts match",
    "no jobs or locks remain",
    "worker memory, median",
    "jobs table with indexes, largest",
    "queues table with indexes, largest",
    "dead rows of the jobs table, oldest",
    "dead rows of the queues table, oldest",
    "latency under load, median",
    "idle latency, median",
    "jobs per second",
}
QUEUES = TableState(dead=100, died=100, table=8192, indexes=8192, vacuums=1)


def sample(second: int) -> Sample:
    """Return samples of a healthy run, in which autovacuum runs every minute."""
    done = min(JOBS, second * RATE)
    died = 2 * done
    vacuums = second // NAPTIME
    dead = died - 2 * RATE * NAPTIME * vacuums
    jobs = TableState(dead, died, table=30_000_000, indexes=40_000_000, vacuums=vacuums)
    waiting = min(5000, JOBS - done)
    return Sample(float(second), done, waiting, 40_000_000, jobs, QUEUES, [5.0, 6.0, 7.0])


def result() -> ScenarioResult:
    return ScenarioResult(
        name="made up",
        settings=["alter table a;"],
        naptime=NAPTIME,
        judged=True,
        seconds=SECONDS,
        scheduled=0,
        probes=500,
        samples=[sample(second) for second in range(0, SECONDS, 2)],
        idle_before=[2.0] * 200,
        idle_after=Pair([5.0] * 200, [2.0] * 200),
        idle_settled=Pair([2.1] * 200, [2.0] * 200),
        tally=Tally(
            JOBS, never=0, once=JOBS, more=0, runs=JOBS + 9, failures=9, recorded=JOBS + 509, log_messages=[]
        ),
        left=Remaining(0, 0, 0, inserted=JOBS + 500, deleted=JOBS + 500, hot_queue_updates=1.0),
        spent=Spending(worker_cpu=100, server_cpu=200, wal=2**30),
    )


def changed(**changes: object) -> ScenarioResult:
    return msgspec.structs.replace(result(), **changes)


def each_sample(change: object) -> ScenarioResult:
    """Return a course in which the function has changed every sample."""
    assert callable(change)
    return changed(samples=[change(one) for one in result().samples])


def failed_checks(judged: ScenarioResult) -> set[str]:
    return {finding.name for finding in judge(judged) if finding.passed is False}


def finding_of(judged: ScenarioResult, what: str) -> Finding:
    [finding] = [one for one in judge(judged) if one.name == what]
    return finding


def test_run_without_growth_passes_every_check() -> None:
    findings = judge(result())
    assert {one.name for one in findings} == ALL
    assert [one.mark for one in findings] == ["✓"] * len(ALL)


def test_growing_memory_fails_the_check() -> None:
    grown = each_sample(lambda one: msgspec.structs.replace(one, memory=40_000_000 + one.done * 50))
    assert failed_checks(grown) == {"worker memory, median"}
    assert finding_of(grown, "worker memory, median").found == "50.4 → 81.9 MB"


def test_slightly_growing_memory_passes_the_check() -> None:
    assert not failed_checks(
        each_sample(lambda one: msgspec.structs.replace(one, memory=40_000_000 + one.done * 5))
    )


def without_vacuum(one: Sample) -> Sample:
    jobs = msgspec.structs.replace(one.jobs, dead=one.jobs.died, vacuums=0)
    return msgspec.structs.replace(one, jobs=jobs)


def test_dead_rows_that_stay_fail_the_check() -> None:
    grown = each_sample(without_vacuum)
    assert failed_checks(grown) == {"dead rows of the jobs table, oldest"}
    assert finding_of(grown, "dead rows of the jobs table, oldest").found == "598 s; 2,000,000 at most"


def test_dead_rows_of_a_run_too_short_for_autovacuum_are_not_judged() -> None:
    short = [without_vacuum(sample(second)) for second in range(0, 2 * NAPTIME, 2)]
    finding = finding_of(changed(samples=short, seconds=2 * NAPTIME), "dead rows of the jobs table, oldest")
    assert (finding.mark, finding.found) == (
        "?",
        "118 s; 401,200 at most; the run was too short to tell",
    )


def test_age_of_dead_rows_is_the_time_between_two_vacuums() -> None:
    assert oldest_dead(result().samples, TABLES["jobs"]) == pytest.approx(NAPTIME, abs=2)
    assert oldest_dead(result().samples, TABLES["queues"]) == 0


@pytest.mark.parametrize("name", ["jobs", "queues"])
def test_growing_table_fails_the_check(name: str) -> None:
    def grown(one: Sample) -> Sample:
        state = msgspec.structs.replace(getattr(one, name), indexes=40_000_000 + one.done * 300)
        return msgspec.structs.replace(one, **{name: state})

    assert failed_checks(each_sample(grown)) == {f"{name} table with indexes, largest"}


def test_latency_and_throughput_that_degrade_fail_the_check() -> None:
    slower = each_sample(
        lambda one: msgspec.structs.replace(one, latencies=[5.0 + one.done / 20_000 for _ in range(3)])
    )
    assert failed_checks(slower) == {"latency under load, median"}
    assert failed_checks(changed(idle_settled=Pair([4.1] * 200, [2.0] * 200))) == {"idle latency, median"}
    assert failed_checks(changed(idle_settled=None)) == {"idle latency, median"}
    # The second half takes four times as long.
    late = [
        msgspec.structs.replace(one, seconds=one.seconds if one.done < JOBS / 2 else 4 * one.seconds - 882)
        for one in result().samples
    ]
    assert "jobs per second" in failed_checks(changed(samples=late))


@pytest.mark.parametrize(
    ("tally", "left", "what"),
    [
        ({"once": JOBS - 1, "never": 1}, {}, "every job succeeded once"),
        ({"once": JOBS - 1, "more": 1}, {}, "every job succeeded once"),
        ({"runs": JOBS + 10, "recorded": JOBS + 510}, {}, "every job succeeded once"),
        ({"recorded": JOBS + 508}, {}, "the server's counts match"),
        ({}, {"deleted": JOBS + 499}, "the server's counts match"),
        ({}, {"inserted": JOBS + 501, "deleted": JOBS + 501}, "the server's counts match"),
        ({}, {"jobs": 1}, "no jobs or locks remain"),
        ({}, {"locked_queues": 1}, "no jobs or locks remain"),
    ],
)
def test_missing_or_extra_job_fails_the_check(tally: dict[str, int], left: dict[str, int], what: str) -> None:
    passed = result()
    bad = changed(
        tally=msgspec.structs.replace(passed.tally, **tally),
        left=msgspec.structs.replace(passed.left, **left),
    )
    assert failed_checks(bad) == {what}


def test_run_with_an_old_transaction_is_judged_by_jobs_locks_and_memory_only() -> None:
    unjudged = msgspec.structs.replace(each_sample(without_vacuum), judged=False, idle_settled=None)
    assert not failed_checks(unjudged)
    assert {one.name for one in judge(unjudged) if one.passed} == {
        "every job succeeded once",
        "the server's counts match",
        "no jobs or locks remain",
        "worker memory, median",
    }
    assert failed_checks(
        msgspec.structs.replace(unjudged, left=msgspec.structs.replace(unjudged.left, jobs=1))
    )


def test_thirds_exclude_the_warm_up_and_the_time_after_the_last_add() -> None:
    first, last = thirds(result())
    assert [first[0].done, first[-1].done] == [51_000, 363_800]
    assert [last[0].done, last[-1].done] == [683_400, 992_800]


def soak_of(*results: ScenarioResult) -> SoakResult:
    report = Report(
        when="2030-01-02 03:04 UTC",
        command="python -m benchmarks.soak",
        seconds=83.4,
        machine=Machine("Linux 6", "A processor", 2, 4 * 2**30),
        versions={"Python": "3.13.1", "PostgreSQL": "17.2"},
        remarks=["It rained.", *(remark for one in results for remark in remarks_of(one))],
    )
    return SoakResult(report, list(results))


def test_report_page_and_output_show_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tally_with_complaint = msgspec.structs.replace(result().tally, log_messages=["Oops"])
    run = soak_of(result(), msgspec.structs.replace(each_sample(without_vacuum), tally=tally_with_complaint))
    run.write(tmp_path / "soak.json")
    assert SoakResult.read(tmp_path / "soak.json") == run

    write_page(run, tmp_path)
    print_results(run)

    page = (tmp_path / "soak.md").read_text()
    assert page.startswith("# Soak test: 1,000,000 jobs\n")
    assert (
        "| dead rows of the jobs table, oldest | ✓ 58 s; 197,200 at most | ✗ 598 s; 2,000,000 at most |"
        in page
    )
    assert "```sql\nalter table a;\n```" in page
    assert "- made up: the worker logged 'Oops'." in page
    for chart in re.findall(r"\]\((.+?)\)", page):
        assert (tmp_path / chart).read_text().startswith("<svg")
    printed = capsys.readouterr().out
    assert "It rained." in printed
    assert re.search(r"jobs per second .* ✓\n", printed)


@pytest.mark.slow
async def test_short_soak_counts_every_job(
    graphile_worker_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.soak.idle._TURNS", 2)
    scenario = replace(
        SCENARIOS["old-transaction"],
        tables=SCENARIOS["tuned"].tables,
        old_transaction=(0.3, 1.0),  # Long enough for a sample in it, even on a machine that stalls.
        scheduled=1000,
    )
    async with Workbench.open(graphile_worker_server) as workbench:
        seen = await soak(workbench, scenario, 2000, interval=0.05)

    assert not failed_checks(seen)
    assert seen.tally.failures == 106
    assert seen.left.inserted == 3000 + seen.probes
    assert any(one.old_transaction for one in seen.samples)
    assert not seen.samples[-1].old_transaction
    assert sum(len(one.latencies) for one in seen.samples) == seen.probes - 90
    assert seen.samples[-1].jobs.died >= 4000


@pytest.mark.slow
@pytest.mark.alone
def test_soak_program_runs_on_a_durable_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--jobs", "20000", "--interval", "0.25", "--output", str(tmp_path)])

    printed = capsys.readouterr().out
    assert "20,000 once, 0 never, 0 more often; 21,053 runs" in printed
    assert status == 0, printed
    [seen] = SoakResult.read(tmp_path / "soak.json").scenarios
    assert len(seen.samples) > 10
    assert (tmp_path / "soak.md").exists()


def test_soak_program_fails_when_a_run_gives_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*_arguments: object) -> None:
        raise MeasurementTimeoutError("no job was done for 120 s")

    monkeypatch.setattr("benchmarks.soak.__main__._run", give_up)

    assert main(["--output", str(tmp_path)]) == 1
    assert "Failed: 1; not judged: 0.\ndefault: no job was done for 120 s\n" in capsys.readouterr().out


def test_documented_settings_are_those_measured() -> None:
    advice = (ROOT / "docs" / "production" / "maintenance.md").read_text()
    settings = SCENARIOS["tuned"].settings
    assert len(settings) == 2
    assert all(statement in advice for statement in settings)


def test_soak_program_rejects_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--jobs", "0"])
    assert "invalid --jobs 0: must be at least 1" in capsys.readouterr().err
