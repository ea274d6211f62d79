"""Reports of the benchmarks: tables, pages, charts and comparisons of invented figures."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from benchmarks.charts import bar_chart, line_chart, number
from benchmarks.compare import compare, main, only_in
from benchmarks.report import print_table, ratios, verdict_of, write_markdown
from benchmarks.results import Curve, Line, Machine, Measurement, Point, Report, Series

from support.postgres import ROOT

RATE = Measurement(
    "throughput",
    "many <small> jobs",
    "jobs/s",
    higher_is_better=True,
    series=[
        Series("node", [1000, 900, 1100]),
        Series("python", [3000, 2000, 2500]),
        Series("slowpoke", [10.5, 11, 12]),
        Series("absent", [], note="is not installed"),
    ],
    goal=2.0,
    against="node",
)
DELAY = Measurement(
    "latency",
    "from adding to running",
    "ms",
    higher_is_better=False,
    series=[Series("python", [4, 3, 5]), Series("node tuned", [5, 6, 4])],
    goal=0.5,
    against="node tuned",
)
CURVE = Curve(
    "waiting jobs",
    "Speed & size",
    "jobs waiting",
    "jobs/s",
    [
        Line("python", [Point(1000, 900), Point(1_000_000, 800)]),
        Line("node", [Point(1000, 400), Point(10_000, 100)]),
    ],
)


TABLES = """
throughput (best / median)

case               unit             python           node  slowpoke  python : node  goal
─────────────────  ────────  ─────────────  ─────────────  ────────  ─────────────  ───────────────────────
many <small> jobs  jobs/s ↑  3,000 / 2,500  1,100 / 1,000   12 / 11    2.73 / 2.50  ≥ 2 times node: ✓ 2.500
  absent: is not installed

latency (best / median)

case                    unit  python  node tuned  python : node tuned  goal
──────────────────────  ────  ──────  ──────────  ───────────────────  ───────────────────────────────
from adding to running  ms ↓   3 / 4       4 / 5        0.750 / 0.800  ≤ 0.5 times node tuned: ✗ 0.800

Goals reached: 1 of 2.
Node 20 was missing."""


def report(
    *measurements: Measurement, curves: list[Curve] | None = None, remarks: list[str] | None = None
) -> Report:
    return Report(
        when="2030-01-02 03:04 UTC",
        command="python benchmarks/run.py --rounds 3",
        seconds=83.4,
        machine=Machine("Linux 6", "A processor", 2, 4 * 2**30),
        versions={"Python": "3.13.1", "PostgreSQL": "17.2"},
        remarks=remarks or [],
        measurements=list(measurements),
        curves=curves or [],
    )


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def print_report(report: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(report)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (7.0, "7"),
        (12345.6, "12,346"),
        (12.34, "12.3"),
        (1.5, "1.50"),
        (0.43, "0.430"),
        (0.01234, "0.0123"),
    ],
)
def test_numbers_have_few_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_ratios_compare_best_rounds_and_medians() -> None:
    assert ratios(RATE, ("python", "node")) == (3000 / 1100, 2500 / 1000)
    assert ratios(DELAY, ("python", "node tuned")) == (3 / 4, 4 / 5)
    assert ratios(RATE, ("python", "absent")) is None


def test_ratio_to_zero_is_undefined() -> None:
    free = Measurement("cost", "idle", "s", False, [Series("python", [1]), Series("node", [0])])
    assert ratios(free, ("python", "node")) is None


@pytest.mark.parametrize(
    ("higher_is_better", "python", "shown"),
    [
        (True, [20.0], "≥ 2 times node: ✓ 2.000"),
        (True, [19.99], "≥ 2 times node: ✗ 1.999"),
        (False, [20.0], "≤ 2 times node: ✓ 2.000"),
        (False, [20.01], "≤ 2 times node: ✗ 2.001"),
        (True, [], "≥ 2 times node: not measured"),
    ],
)
def test_goal_limits_the_ratio_of_the_medians(
    higher_is_better: bool, python: list[float], shown: str
) -> None:
    measurement = Measurement(
        "group", "case", "unit", higher_is_better, [Series("python", python), Series("node", [10])], 2, "node"
    )
    goal = verdict_of(measurement)
    assert goal is not None
    assert str(goal) == shown
    assert goal.reached == ("✓" in shown)


def test_measurement_without_a_goal_has_no_verdict() -> None:
    assert verdict_of(Measurement("group", "case", "unit", True, [Series("python", [1])])) is None


def test_goal_against_python_applies_to_the_tuned_worker() -> None:
    both = [Series("python", [1]), Series("python tuned", [3])]
    goal = verdict_of(Measurement("group", "case", "unit", True, both, 2, "python"))
    assert goal is not None
    assert goal.ratio == 3


def test_report_is_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    lines = print_report(report(RATE, DELAY, remarks=["Node 20 was\nmissing."]), capsys)

    assert "\n".join(lines) == TABLES


def test_note_names_its_cases_unless_it_applies_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    other = Measurement("throughput", "other", "jobs/s", True, [Series("python", [1], note="one round")])
    lines = print_report(report(RATE, other), capsys)
    assert "  absent (many <small> jobs): is not installed" in lines
    assert "  python (other): one round" in lines


@pytest.mark.parametrize(
    ("is_difference", "shown"),
    [(False, "≤ 15 times python: ✓ 1.500"), (True, "≤ 15 ms more than python: ✗ 20.000")],
)
def test_goal_of_another_contender_limits_its_ratio_or_difference(*, is_difference: bool, shown: str) -> None:
    both = [Series("python", [40]), Series("python, all kept", [60])]
    measurement = Measurement(
        "group", "case", "ms", False, both, 15, "python", "python, all kept", is_difference
    )
    assert str(verdict_of(measurement)) == shown


def test_ratio_to_the_contender_of_the_goal_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    series = [Series("python", [20]), Series("node", [10]), Series("slowpoke", [5])]
    lines = print_report(
        report(Measurement("throughput", "case", "jobs/s", True, series, 3, "slowpoke")), capsys
    )
    header = lines[3].split("  ")
    assert [cell.strip() for cell in header if ":" in cell] == ["python : node", "python : slowpoke"]


def test_curves_are_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    lines = print_report(report(curves=[CURVE]), capsys)
    assert lines[1] == "Speed & size (jobs/s)"
    assert lines[3:] == [
        "jobs waiting  python  node",
        "────────────  ──────  ────",
        "       1,000     900   400",
        "      10,000       -   100",
        "   1,000,000     800     -",
        "",
    ]


def test_measurements_are_written_as_a_markdown_page(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    write_markdown(report(RATE, DELAY, remarks=["a | b"]), folder)

    page = (folder / "index.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["index.md", "throughput.svg"]
    for expected in (
        "- When: 2030-01-02 03:04 UTC, in 1 min 23 s\n",
        "- Machine: A processor, 2 cores, 4.0 GiB of memory, Linux 6\n",
        "- Versions: Python 3.13.1, PostgreSQL 17.2\n",
        "```sh\npython benchmarks/run.py --rounds 3\n```\n",
        "\n- a \\| b\n",
        "Rounds are interleaved",
        "**Goals reached: 1 of 2.**",
        "\n\n| case | unit | python | node | slowpoke | python : node | goal |\n| --- | --- | --: | --: |",
        "\n| many &lt;small> jobs | jobs/s ↑ | 3,000 / 2,500 |",
        "\n- absent: is not installed\n",
        "(throughput.svg)\n",
        "## Latency\n",
    ):
        assert expected in page
    assert "scaling.md" not in page
    assert "many <small> jobs" in texts((folder / "throughput.svg").read_text(encoding="utf-8"))


def test_figures_with_a_second_goal_are_charted_once(tmp_path: Path) -> None:
    python, other = RATE.series[1:3]
    again = Measurement("throughput", "slowpoke's", "jobs/s", True, [python, other], 9, "slowpoke")
    write_markdown(report(RATE, again), tmp_path)
    assert "| slowpoke's |" in (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "slowpoke's" not in texts((tmp_path / "throughput.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scaling_first", [False, True])
def test_measurement_and_scaling_runs_keep_each_others_pages(tmp_path: Path, scaling_first: bool) -> None:
    runs = [report(RATE), report(curves=[CURVE])]
    for run in reversed(runs) if scaling_first else runs:
        write_markdown(run, tmp_path)
    # The same run again: it must not add a second link.
    write_markdown(runs[1], tmp_path)

    measured = (tmp_path / "index.md").read_text(encoding="utf-8")
    scaling = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "## Throughput" in measured
    assert measured.count("](scaling.md)") == 1
    assert scaling.count("](index.md)") == 1
    assert "![Speed & size](scaling-waiting-jobs.svg)" in scaling
    assert "| 10,000 | - | 100 |" in scaling
    assert "Speed & size" in texts((tmp_path / "scaling-waiting-jobs.svg").read_text(encoding="utf-8"))


def test_bar_chart_has_a_bar_for_each_contender_with_figures() -> None:
    found = texts(bar_chart("Throughput", [RATE]))
    assert found[0] == "Throughput"
    assert found[2:] == [
        "many <small> jobs",
        *("node", "1,000 jobs/s"),
        *("python", "2,500 jobs/s"),
        *("slowpoke", "11 jobs/s"),
    ]


def test_charts_are_deterministic() -> None:
    assert line_chart(CURVE) == line_chart(CURVE)
    assert bar_chart("Throughput", [RATE]) == bar_chart("Throughput", [RATE])


def test_line_chart_has_ticks_a_legend_and_labels() -> None:
    found = texts(line_chart(CURVE))
    assert found[:3] == ["Speed & size", "python", "node"]
    assert found[-2:] == ["jobs waiting", "jobs/s"]
    for tick in ("0", "200", "1k", "10k", "1M"):
        assert tick in found


def test_logarithmic_axis_has_equal_distances_for_equal_factors() -> None:
    line = Line("python", [Point(x, x) for x in (1, 10, 100)])
    circles = ET.fromstring(line_chart(Curve("c", "t", "x", "y", [line], log_y=True))).iter(
        "{http://www.w3.org/2000/svg}circle"
    )
    positions = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]
    (x1, y1), (x2, y2), (x3, y3) = positions
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2)
    assert y3 - y2 == pytest.approx(y2 - y1, abs=0.2)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point(0, 0)],
        [Point(0, 5), Point(10, 0.001)],
        [Point(3, 3)],
        [Point(1, -2), Point(2, 4)],
        [Point(1e-3, 1e9), Point(1e7, 1)],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_unusual_points_are_drawn_within_the_chart(points: list[Point], log: bool) -> None:
    curve = Curve("c", "t", "x", "y", [Line("python", points)], log_x=log, log_y=log)
    svg = ET.fromstring(line_chart(curve))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    circles = list(svg.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == len(points)
    assert all(0 <= float(one.attrib["cx"]) <= width for one in circles)
    assert all(0 <= float(one.attrib["cy"]) <= height for one in circles)


def report_of(*, higher_is_better: bool = True, **contenders: list[float]) -> Report:
    series = [Series(name.replace("_", " "), values) for name, values in contenders.items()]
    return report(Measurement("group", "case", "unit", higher_is_better, series))


@pytest.mark.parametrize(
    ("before", "after", "higher_is_better", "verdict"),
    [
        ([100, 101, 102], [80, 81, 82], True, "slower"),
        ([100, 101, 102], [120, 121, 122], True, "faster"),
        ([100, 101, 102], [120, 121, 122], False, "slower"),
        ([100, 101, 102], [80, 81, 82], False, "faster"),
        ([100, 100, 100], [91, 91, 91], True, "unchanged"),
        ([100, 101, 102], [65, 80, 95], True, "unchanged"),
        ([80, 101, 122], [75, 75, 75], True, "unchanged"),
        ([0, 0, 0], [0, 0, 0], False, "unchanged"),
        ([0, 0, 0], [1, 1, 1], False, "slower"),
    ],
)
def test_only_changes_beyond_noise_are_slower_or_faster(
    before: list[float], after: list[float], higher_is_better: bool, verdict: str
) -> None:
    (change,) = compare(
        report_of(python=before, higher_is_better=higher_is_better),
        report_of(python=after, higher_is_better=higher_is_better),
    )
    assert (change.slower, change.faster) == (verdict == "slower", verdict == "faster")
    assert change.reference is None


def test_slower_machine_is_not_reported_as_a_regression() -> None:
    old = report_of(python=[100, 100], python_tuned=[200, 200], node=[50, 50], other=[9, 9])
    new = report_of(python=[50, 60], python_tuned=[70, 84], node=[25, 30], other=[9, 9])
    plain, tuned = compare(old, new)
    assert (plain.reference, plain.before, plain.after) == ("node", 2, 2)
    assert not plain.slower
    assert tuned.slower
    assert str(tuned) == "group: case (python tuned, unit): 4 → 2.8 times node, -30.0% (noise 10.0%)"


def test_another_contender_is_the_reference_without_node() -> None:
    (change,) = compare(report_of(python=[10], node=[5], other=[5]), report_of(python=[20], other=[10]))
    assert change.reference == "other"
    assert not change.faster


def test_unequal_numbers_of_rounds_are_compared_by_the_median() -> None:
    (change,) = compare(report_of(python=[10], node=[4, 5, 6]), report_of(python=[10], node=[5]))
    assert (change.before, change.after) == (2, 2)


def test_figures_of_only_one_run_are_listed() -> None:
    old, new = report_of(python=[1], python_tuned=[1], node=[1]), report_of(python=[1])
    assert [str(key) for key in only_in(old, new)] == ["group: case (python tuned, unit)"]
    assert only_in(new, old) == []


def write_reports(folder: Path, old: Report, new: Report) -> list[str]:
    old.write(folder / "old.json")
    new.write(folder / "new.json")
    return [str(folder / "old.json"), str(folder / "new.json")]


def test_comparison_prints_slower_and_missing_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = report_of(python=[100], python_tuned=[1]), report_of(python=[50])
    assert main(write_reports(tmp_path, old, new)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Slower:",
        "  group: case (python, unit): 100 → 50 unit, -50.0% (noise 10.0%)",
        "",
        "Only in the old run:",
        "  group: case (python tuned, unit)",
        "",
        "Remarks:",
        "  no other contender is in both runs, so these figures are absolute and depend on the load:",
        "    group: case (python, unit)",
        "",
        "1 slower, 0 faster, 0 unchanged",
    ]


def test_comparing_a_run_with_itself_finds_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(write_reports(tmp_path, report(RATE, DELAY), report(RATE, DELAY))) == 0
    assert capsys.readouterr().out == "0 slower, 0 faster, 2 unchanged\n"


def test_runs_without_common_figures_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(write_reports(tmp_path, report(RATE), report(DELAY))) == 2
    assert "no Python figure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b'{"when": "\xff"}', "can't decode byte 0xff"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        (b'{"when": 1}', "Expected `str`, got `int` - at `$.when`"),
    ],
)
def test_unreadable_results_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    report(RATE).write(good)
    if content is not None:
        bad.write_bytes(content)
    for arguments in ([good, bad], [bad, good]):
        assert main([str(path) for path in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("compare.py: ")
        assert str(bad) in error
        assert message in error


def test_compare_runs_as_a_script(tmp_path: Path) -> None:
    arguments = write_reports(tmp_path, report(RATE), report(RATE))
    script = [sys.executable, str(ROOT / "benchmarks" / "compare.py")]
    done = subprocess.run([*script, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "0 slower, 0 faster, 1 unchanged\n"
    shown = subprocess.run([*script, "--help"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "OLD" in shown.stdout
