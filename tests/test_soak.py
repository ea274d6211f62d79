"""The soak: its verdict on made-up courses, and a short one that is real."""

from __future__ import annotations

import re
from dataclasses import replace as with_
from pathlib import Path

import msgspec
import pytest
from benchmarks.arena import Arena
from benchmarks.measure import GaveUp
from benchmarks.results import Machine, Report
from benchmarks.soak.__main__ import main
from benchmarks.soak.course import Course, Left, Pair, Sample, Soaked, Spending, TableState, Tally
from benchmarks.soak.page import print_courses, remarks_of, write_page
from benchmarks.soak.run import soak
from benchmarks.soak.scenarios import SCENARIOS
from benchmarks.soak.verdict import TABLES, Finding, judge, oldest_dead, thirds

from support.postgres import ROOT

JOBS, SECONDS, RATE, NAPTIME = 1_000_000, 600, 1700, 60
ALL = {
    "every job succeeded once",
    "the server counted the same",
    "nothing is left, nothing is locked",
    "the worker's memory, median",
    "the table of jobs with its indexes, largest",
    "the table of queues with its indexes, largest",
    "dead rows of jobs, oldest",
    "dead rows of queues, oldest",
    "latency under load, median",
    "latency when idle, median",
    "jobs per second",
}
QUEUES = TableState(dead=100, died=100, table=8192, indexes=8192, vacuums=1)


def sample(second: int) -> Sample:
    """As a good run has them: autovacuum comes every minute and takes what died before."""
    done = min(JOBS, second * RATE)
    died = 2 * done
    vacuums = second // NAPTIME
    dead = died - 2 * RATE * NAPTIME * vacuums
    jobs = TableState(dead, died, table=30_000_000, indexes=40_000_000, vacuums=vacuums)
    waiting = min(5000, JOBS - done)
    return Sample(float(second), done, waiting, 40_000_000, jobs, QUEUES, [5.0, 6.0, 7.0])


def course() -> Course:
    return Course(
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
            JOBS, never=0, once=JOBS, more=0, runs=JOBS + 9, failures=9, recorded=JOBS + 509, complaints=[]
        ),
        left=Left(0, 0, 0, inserted=JOBS + 500, deleted=JOBS + 500, hot_queue_updates=1.0),
        spent=Spending(worker_cpu=100, server_cpu=200, wal=2**30),
    )


def changed(**changes: object) -> Course:
    return msgspec.structs.replace(course(), **changes)


def each_sample(change: object) -> Course:
    """With every sample as the function makes it."""
    assert callable(change)
    return changed(samples=[change(one) for one in course().samples])


def wrong(judged: Course) -> set[str]:
    return {finding.what for finding in judge(judged) if finding.good is False}


def found(judged: Course, what: str) -> Finding:
    [finding] = [one for one in judge(judged) if one.what == what]
    return finding


def test_a_run_in_which_nothing_grows_is_good() -> None:
    findings = judge(course())
    assert {one.what for one in findings} == ALL
    assert [one.mark for one in findings] == ["✓"] * len(ALL)


def test_growing_memory_is_reported() -> None:
    grown = each_sample(lambda one: msgspec.structs.replace(one, memory=40_000_000 + one.done * 50))
    assert wrong(grown) == {"the worker's memory, median"}
    assert found(grown, "the worker's memory, median").found == "50.4 → 81.9 MB"


def test_memory_that_grows_a_little_is_not() -> None:
    assert not wrong(each_sample(lambda one: msgspec.structs.replace(one, memory=40_000_000 + one.done * 5)))


def without_vacuum(one: Sample) -> Sample:
    jobs = msgspec.structs.replace(one.jobs, dead=one.jobs.died, vacuums=0)
    return msgspec.structs.replace(one, jobs=jobs)


def test_dead_rows_that_stay_are_reported() -> None:
    grown = each_sample(without_vacuum)
    assert wrong(grown) == {"dead rows of jobs, oldest"}
    assert found(grown, "dead rows of jobs, oldest").found == "598 s; 2,000,000 at most"


def test_of_a_run_that_autovacuum_could_not_see_nothing_is_said_about_dead_rows() -> None:
    short = [without_vacuum(sample(second)) for second in range(0, 2 * NAPTIME, 2)]
    finding = found(changed(samples=short, seconds=2 * NAPTIME), "dead rows of jobs, oldest")
    assert (finding.mark, finding.found) == ("?", "118 s; 401,200 at most; the run was too short to tell")


def test_the_age_of_dead_rows_is_the_time_between_two_vacuums() -> None:
    assert oldest_dead(course().samples, TABLES["jobs"]) == pytest.approx(NAPTIME, abs=2)
    assert oldest_dead(course().samples, TABLES["queues"]) == 0


@pytest.mark.parametrize("name", ["jobs", "queues"])
def test_a_table_that_grows_is_reported(name: str) -> None:
    def grown(one: Sample) -> Sample:
        state = msgspec.structs.replace(getattr(one, name), indexes=40_000_000 + one.done * 300)
        return msgspec.structs.replace(one, **{name: state})

    assert wrong(each_sample(grown)) == {f"the table of {name} with its indexes, largest"}


def test_a_slower_end_is_reported() -> None:
    slower = each_sample(
        lambda one: msgspec.structs.replace(one, latencies=[5.0 + one.done / 20_000 for _ in range(3)])
    )
    assert wrong(slower) == {"latency under load, median"}
    assert wrong(changed(idle_settled=Pair([4.1] * 200, [2.0] * 200))) == {"latency when idle, median"}
    assert wrong(changed(idle_settled=None)) == {"latency when idle, median"}
    # The second half takes four times as long.
    late = [
        msgspec.structs.replace(one, seconds=one.seconds if one.done < JOBS / 2 else 4 * one.seconds - 882)
        for one in course().samples
    ]
    assert "jobs per second" in wrong(changed(samples=late))


@pytest.mark.parametrize(
    ("tally", "left", "what"),
    [
        ({"once": JOBS - 1, "never": 1}, {}, "every job succeeded once"),
        ({"once": JOBS - 1, "more": 1}, {}, "every job succeeded once"),
        ({"runs": JOBS + 10, "recorded": JOBS + 510}, {}, "every job succeeded once"),
        ({"recorded": JOBS + 508}, {}, "the server counted the same"),
        ({}, {"deleted": JOBS + 499}, "the server counted the same"),
        ({}, {"inserted": JOBS + 501, "deleted": JOBS + 501}, "the server counted the same"),
        ({}, {"jobs": 1}, "nothing is left, nothing is locked"),
        ({}, {"locked_queues": 1}, "nothing is left, nothing is locked"),
    ],
)
def test_a_job_too_few_or_too_many_is_reported(
    tally: dict[str, int], left: dict[str, int], what: str
) -> None:
    good = course()
    bad = changed(
        tally=msgspec.structs.replace(good.tally, **tally), left=msgspec.structs.replace(good.left, **left)
    )
    assert wrong(bad) == {what}


def test_beside_an_old_transaction_only_jobs_locks_and_memory_count() -> None:
    beside = msgspec.structs.replace(each_sample(without_vacuum), judged=False, idle_settled=None)
    assert not wrong(beside)
    assert {one.what for one in judge(beside) if one.good} == {
        "every job succeeded once",
        "the server counted the same",
        "nothing is left, nothing is locked",
        "the worker's memory, median",
    }
    assert wrong(msgspec.structs.replace(beside, left=msgspec.structs.replace(beside.left, jobs=1)))


def test_thirds_begin_after_the_warm_up_and_end_with_the_last_add() -> None:
    first, last = thirds(course())
    assert [first[0].done, first[-1].done] == [51_000, 363_800]
    assert [last[0].done, last[-1].done] == [683_400, 992_800]


def soaked(*courses: Course) -> Soaked:
    report = Report(
        when="2030-01-02 03:04 UTC",
        command="python -m benchmarks.soak",
        seconds=83.4,
        machine=Machine("Linux 6", "A processor", 2, 4 * 2**30),
        versions={"Python": "3.13.1", "PostgreSQL": "17.2"},
        remarks=["It rained.", *(remark for one in courses for remark in remarks_of(one))],
    )
    return Soaked(report, list(courses))


def test_what_was_seen_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complaining = msgspec.structs.replace(course().tally, complaints=["Oops"])
    run = soaked(course(), msgspec.structs.replace(each_sample(without_vacuum), tally=complaining))
    run.write(tmp_path / "soak.json")
    assert Soaked.read(tmp_path / "soak.json") == run

    write_page(run, tmp_path)
    print_courses(run)

    page = (tmp_path / "soak.md").read_text()
    assert page.startswith("# 1,000,000 jobs at full speed\n")
    assert "| dead rows of jobs, oldest | ✓ 58 s; 197,200 at most | ✗ 598 s; 2,000,000 at most |" in page
    assert "```sql\nalter table a;\n```" in page
    assert "- made up: the worker logged 'Oops'." in page
    for chart in re.findall(r"\]\((.+?)\)", page):
        assert (tmp_path / chart).read_text().startswith("<svg")
    printed = capsys.readouterr().out
    assert "It rained." in printed
    assert re.search(r"jobs per second .* ✓\n", printed)


async def test_a_short_soak_counts_every_job(
    graphile_worker_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.soak.idle._TURNS", 2)
    scenario = with_(
        SCENARIOS["old-transaction"],
        tables=SCENARIOS["tuned"].tables,
        old_transaction=(0.3, 1.0),  # long enough for a sample in it, whoever is paused meanwhile
        scheduled=1000,
    )
    async with Arena.open(graphile_worker_server) as arena:
        seen = await soak(arena, scenario, 2000, interval=0.05)

    assert not wrong(seen)
    assert seen.tally.failures == 106
    assert seen.left.inserted == 3000 + seen.probes
    assert any(one.old_transaction for one in seen.samples)
    assert not seen.samples[-1].old_transaction
    assert sum(len(one.latencies) for one in seen.samples) == seen.probes - 90
    assert seen.samples[-1].jobs.died >= 4000


@pytest.mark.slow
def test_the_program_on_a_durable_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--jobs", "20000", "--interval", "0.25", "--output", str(tmp_path)])

    printed = capsys.readouterr().out
    assert "20,000 once, 0 never, 0 more often; 21,053 runs" in printed
    assert status == 0, printed
    [seen] = Soaked.read(tmp_path / "soak.json").courses
    assert len(seen.samples) > 10
    assert (tmp_path / "soak.md").exists()


def test_a_run_that_breaks_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gives_up(*_arguments: object) -> None:
        raise GaveUp("no job was done for 120 s")

    monkeypatch.setattr("benchmarks.soak.__main__._run", gives_up)

    assert main(["--output", str(tmp_path)]) == 1
    assert "Wrong: 1; not judged: 0.\ndefault: no job was done for 120 s\n" in capsys.readouterr().out


def test_the_advice_on_settings_is_what_was_measured() -> None:
    advice = (ROOT / "docs" / "operations.md").read_text()
    settings = SCENARIOS["tuned"].settings
    assert len(settings) == 2
    assert all(statement in advice for statement in settings)


def test_a_mistake_on_the_command_line_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--jobs", "0"])
    assert "--jobs is 0; it must be at least 1" in capsys.readouterr().err
