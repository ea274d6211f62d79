"""How benchmarks report what they measured, on made-up figures."""

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
        Series("ours", [3000, 2000, 2500]),
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
    series=[Series("ours", [4, 3, 5]), Series("node tuned", [5, 6, 4])],
    goal=0.5,
    against="node tuned",
)
CURVE = Curve(
    "waiting jobs",
    "Speed & size",
    "jobs waiting",
    "jobs/s",
    [
        Line("ours", [Point(1000, 900), Point(1_000_000, 800)]),
        Line("node", [Point(1000, 400), Point(10_000, 100)]),
    ],
)


TABLES = """
throughput (best / median)

case               unit               ours           node  slowpoke  ours : node  goal
─────────────────  ────────  ─────────────  ─────────────  ────────  ───────────  ───────────────────────
many <small> jobs  jobs/s ↑  3,000 / 2,500  1,100 / 1,000   12 / 11  2.73 / 2.50  ≥ 2 times node: ✓ 2.500
  absent: is not installed

latency (best / median)

case                    unit   ours  node tuned  ours : node tuned  goal
──────────────────────  ────  ─────  ──────────  ─────────────────  ───────────────────────────────
from adding to running  ms ↓  3 / 4       4 / 5      0.750 / 0.800  ≤ 0.5 times node tuned: ✗ 0.800

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


def printed(made: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(made)
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
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_ratio_is_of_best_rounds_and_of_medians() -> None:
    assert ratios(RATE, ("ours", "node")) == (3000 / 1100, 2500 / 1000)
    assert ratios(DELAY, ("ours", "node tuned")) == (3 / 4, 4 / 5)
    assert ratios(RATE, ("ours", "absent")) is None


def test_there_is_no_ratio_to_zero() -> None:
    free = Measurement("cost", "idle", "s", False, [Series("ours", [1]), Series("node", [0])])
    assert ratios(free, ("ours", "node")) is None


@pytest.mark.parametrize(
    ("higher_is_better", "ours", "shown"),
    [
        (True, [20.0], "≥ 2 times node: ✓ 2.000"),
        (True, [19.99], "≥ 2 times node: ✗ 1.999"),
        (False, [20.0], "≤ 2 times node: ✓ 2.000"),
        (False, [20.01], "≤ 2 times node: ✗ 2.001"),
        (True, [], "≥ 2 times node: not measured"),
    ],
)
def test_a_goal_is_a_bound_on_the_medians(higher_is_better: bool, ours: list[float], shown: str) -> None:
    made = Measurement(
        "group", "case", "unit", higher_is_better, [Series("ours", ours), Series("node", [10])], 2, "node"
    )
    goal = verdict_of(made)
    assert goal is not None
    assert str(goal) == shown
    assert goal.reached == ("✓" in shown)


def test_without_a_promise_there_is_no_goal() -> None:
    assert verdict_of(Measurement("group", "case", "unit", True, [Series("ours", [1])])) is None


def test_a_goal_against_ours_is_about_the_tuned_one() -> None:
    both = [Series("ours", [1]), Series("ours tuned", [3])]
    goal = verdict_of(Measurement("group", "case", "unit", True, both, 2, "ours"))
    assert goal is not None
    assert goal.ratio == 3


def test_the_table_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(report(RATE, DELAY, remarks=["Node 20 was\nmissing."]), capsys)

    assert "\n".join(lines) == TABLES


def test_a_note_names_its_cases_unless_it_holds_in_all(capsys: pytest.CaptureFixture[str]) -> None:
    other = Measurement("throughput", "other", "jobs/s", True, [Series("ours", [1], note="one round")])
    lines = printed(report(RATE, other), capsys)
    assert "  absent (many <small> jobs): is not installed" in lines
    assert "  ours (other): one round" in lines


def test_the_ratio_to_what_the_goal_is_against_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    series = [Series("ours", [20]), Series("node", [10]), Series("slowpoke", [5])]
    lines = printed(report(Measurement("throughput", "case", "jobs/s", True, series, 3, "slowpoke")), capsys)
    header = lines[3].split("  ")
    assert [cell.strip() for cell in header if ":" in cell] == ["ours : node", "ours : slowpoke"]


def test_curves_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(report(curves=[CURVE]), capsys)
    assert lines[1] == "Speed & size (jobs/s)"
    assert lines[3:] == [
        "jobs waiting  ours  node",
        "────────────  ────  ────",
        "       1,000   900   400",
        "      10,000     -   100",
        "   1,000,000   800     -",
        "",
    ]


def test_the_page_of_measurements(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    write_markdown(report(RATE, DELAY, remarks=["a | b"]), folder)

    page = (folder / "README.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "throughput.svg"]
    for expected in (
        "- When: 2030-01-02 03:04 UTC, in 1 min 23 s\n",
        "- Machine: A processor, 2 cores, 4.0 GiB of memory, Linux 6\n",
        "- Versions: Python 3.13.1, PostgreSQL 17.2\n",
        "```sh\npython benchmarks/run.py --rounds 3\n```\n",
        "\n- a \\| b\n",
        "Rounds are interleaved",
        "**Goals reached: 1 of 2.**",
        "\n\n| case | unit | ours | node | slowpoke | ours : node | goal |\n| --- | --- | --: | --: |",
        "\n| many &lt;small> jobs | jobs/s ↑ | 3,000 / 2,500 |",
        "\n- absent: is not installed\n",
        "(throughput.svg)\n",
        "## Latency\n",
    ):
        assert expected in page
    assert "scaling.md" not in page
    assert "many <small> jobs" in texts((folder / "throughput.svg").read_text(encoding="utf-8"))


def test_figures_with_a_second_goal_are_drawn_once(tmp_path: Path) -> None:
    ours, other = RATE.series[1:3]
    again = Measurement("throughput", "slowpoke's", "jobs/s", True, [ours, other], 9, "slowpoke")
    write_markdown(report(RATE, again), tmp_path)
    assert "| slowpoke's |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "slowpoke's" not in texts((tmp_path / "throughput.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scaling_first", [False, True])
def test_two_runs_keep_each_others_pages(tmp_path: Path, scaling_first: bool) -> None:
    runs = [report(RATE), report(curves=[CURVE])]
    for run in reversed(runs) if scaling_first else runs:
        write_markdown(run, tmp_path)
    # Once more: the links must not pile up.
    write_markdown(runs[1], tmp_path)

    measured = (tmp_path / "README.md").read_text(encoding="utf-8")
    scaling = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "## Throughput" in measured
    assert measured.count("](scaling.md)") == 1
    assert scaling.count("](README.md)") == 1
    assert "![Speed & size](scaling-waiting-jobs.svg)" in scaling
    assert "| 10,000 | - | 100 |" in scaling
    assert "Speed & size" in texts((tmp_path / "scaling-waiting-jobs.svg").read_text(encoding="utf-8"))


def test_a_bar_for_each_contender_with_figures() -> None:
    found = texts(bar_chart("Throughput", [RATE]))
    assert found[0] == "Throughput"
    assert found[2:] == [
        "many <small> jobs",
        *("node", "1,000 jobs/s"),
        *("ours", "2,500 jobs/s"),
        *("slowpoke", "11 jobs/s"),
    ]


def test_charts_are_the_same_each_time() -> None:
    assert line_chart(CURVE) == line_chart(CURVE)
    assert bar_chart("Throughput", [RATE]) == bar_chart("Throughput", [RATE])


def test_a_line_chart_has_ticks_a_legend_and_labels() -> None:
    found = texts(line_chart(CURVE))
    assert found[:3] == ["Speed & size", "ours", "node"]
    assert found[-2:] == ["jobs waiting", "jobs/s"]
    for tick in ("0", "200", "1k", "10k", "1M"):
        assert tick in found


def test_a_logarithmic_axis_has_the_same_distance_for_the_same_factor() -> None:
    line = Line("ours", [Point(x, x) for x in (1, 10, 100)])
    circles = ET.fromstring(line_chart(Curve("c", "t", "x", "y", [line], log_y=True))).iter(
        "{http://www.w3.org/2000/svg}circle"
    )
    places = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]
    (x1, y1), (x2, y2), (x3, y3) = places
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
def test_odd_points_can_be_drawn(points: list[Point], log: bool) -> None:
    curve = Curve("c", "t", "x", "y", [Line("ours", points)], log_x=log, log_y=log)
    svg = ET.fromstring(line_chart(curve))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    circles = list(svg.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == len(points)
    assert all(0 <= float(one.attrib["cx"]) <= width for one in circles)
    assert all(0 <= float(one.attrib["cy"]) <= height for one in circles)


def run_of(*, higher_is_better: bool = True, **contenders: list[float]) -> Report:
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
def test_slower_is_what_moved_beyond_noise(
    before: list[float], after: list[float], higher_is_better: bool, verdict: str
) -> None:
    (change,) = compare(
        run_of(ours=before, higher_is_better=higher_is_better),
        run_of(ours=after, higher_is_better=higher_is_better),
    )
    assert (change.slower, change.faster) == (verdict == "slower", verdict == "faster")
    assert change.reference is None


def test_a_slower_machine_is_not_our_doing() -> None:
    old = run_of(ours=[100, 100], ours_tuned=[200, 200], node=[50, 50], other=[9, 9])
    new = run_of(ours=[50, 60], ours_tuned=[70, 84], node=[25, 30], other=[9, 9])
    plain, tuned = compare(old, new)
    assert (plain.reference, plain.before, plain.after) == ("node", 2, 2)
    assert not plain.slower
    assert tuned.slower
    assert str(tuned) == "group: case (ours tuned, unit): 4 → 2.8 times node, -30.0% (noise 10.0%)"


def test_another_shared_contender_serves_without_node() -> None:
    (change,) = compare(run_of(ours=[10], node=[5], other=[5]), run_of(ours=[20], other=[10]))
    assert change.reference == "other"
    assert not change.faster


def test_rounds_that_do_not_pair_are_related_to_the_median() -> None:
    (change,) = compare(run_of(ours=[10], node=[4, 5, 6]), run_of(ours=[10], node=[5]))
    assert (change.before, change.after) == (2, 2)


def test_what_only_one_of_them_has_is_named() -> None:
    old, new = run_of(ours=[1], ours_tuned=[1], node=[1]), run_of(ours=[1])
    assert [str(key) for key in only_in(old, new)] == ["group: case (ours tuned, unit)"]
    assert only_in(new, old) == []


def files(folder: Path, old: Report, new: Report) -> list[str]:
    old.write(folder / "old.json")
    new.write(folder / "new.json")
    return [str(folder / "old.json"), str(folder / "new.json")]


def test_comparing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = run_of(ours=[100], ours_tuned=[1]), run_of(ours=[50])
    assert main(files(tmp_path, old, new)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Slower:",
        "  group: case (ours, unit): 100 → 50 unit, -50.0% (noise 10.0%)",
        "",
        "Only in the old run:",
        "  group: case (ours tuned, unit)",
        "",
        "Remarks:",
        "  no other contender in both runs, so absolute figures, which the machine's load moves:",
        "    group: case (ours, unit)",
        "",
        "1 slower, 0 faster, 0 unchanged",
    ]


def test_comparing_a_run_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(files(tmp_path, report(RATE, DELAY), report(RATE, DELAY))) == 0
    assert capsys.readouterr().out == "0 slower, 0 faster, 2 unchanged\n"


def test_nothing_in_common_cannot_pass_for_nothing_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(files(tmp_path, report(RATE), report(DELAY))) == 2
    assert "have no figure of ours in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read {path}: No such file or directory"),
        (b"", "{path} is not the results of a benchmark: "),
        (b"{", "{path} is not the results of a benchmark: "),
        (b"\xff\xfe", "{path} is not the results of a benchmark: "),
        (b'{"when": "\xff"}', "{path} is not the results of a benchmark: "),
        (b"[1, 2]", "{path} is not the results of a benchmark: Expected `object`, got `array`"),
        (b'{"when": 1}', "{path} is not the results of a benchmark: Expected `str`, got `int` - at `$.when`"),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    report(RATE).write(good)
    if content is not None:
        bad.write_bytes(content)
    for arguments in ([good, bad], [bad, good]):
        assert main([str(path) for path in arguments]) == 2
        assert capsys.readouterr().err.startswith(f"compare.py: {message.format(path=bad)}")


def test_compare_runs_as_a_script(tmp_path: Path) -> None:
    arguments = files(tmp_path, report(RATE), report(RATE))
    script = [sys.executable, str(ROOT / "benchmarks" / "compare.py")]
    done = subprocess.run([*script, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "0 slower, 0 faster, 1 unchanged\n"
    told = subprocess.run([*script, "--help"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "OLD" in told.stdout
