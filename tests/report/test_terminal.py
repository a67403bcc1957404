import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from toy_tuning import changed

from lagom_overlap.report.compare import compare_table
from lagom_overlap.report.tune.overview import alike_groups
from lagom_overlap.report.tune.terminal import changes, config_table, verdict_panel
from lagom_overlap.results.compare import CompareRow
from lagom_overlap.workload import OverlapGroup


def lines_of(renderable, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(renderable)
    return console.export_text().splitlines()


def renamed(group: OverlapGroup, name: str) -> OverlapGroup:
    comms = tuple(replace(comm, name=f"{j}{name}") for j, comm in enumerate(group.comms))
    return replace(group, name=name, comms=comms)


def assert_fits(lines: list[str]) -> None:
    assert max(cell_len(line) for line in lines) <= 80


def test_the_panel_holds_the_verdict_within_80_columns(report):
    lines = lines_of(verdict_panel(report))
    assert_fits(lines)
    text = " ".join(line.strip("│ ") for line in lines)
    ratio = report.verdict.over_default
    assert f"Tuned is {ratio.median_ratio:.2f}× faster than the native PyTorch call" in text
    assert "Tuning alone:" in text


def test_the_table_has_one_line_per_knob_that_changes_and_no_broken_line(report):
    lines = lines_of(config_table(report))
    assert_fits(lines)
    row = next(line for line in lines if "all_gather.0" in line)
    assert "channels 8 → 4" in row
    assert row.rstrip().endswith("%")
    assert "chunk 4 MiB → 1 MiB" in lines[lines.index(row) + 1]
    assert any(line.startswith("  whole group (Z)") and line.rstrip().endswith("%") for line in lines)


@pytest.mark.parametrize("name", ["x" * 200, "漢字" * 60, "[bold red]markup[/bold red]", "\x1b[2J\x07\r\nclear"])
def test_long_and_hostile_names_fit_and_stay_text(make_report, make_group, name):
    report = changed(make_report((renamed(make_group(num_comms=3), name),)), job=name, backend_description=name)
    for renderable in (verdict_panel(report), config_table(report)):
        lines = lines_of(renderable)
        assert_fits(lines)
        assert not any("\x1b" in line or "\x07" in line or "\r" in line for line in lines)
    if name.startswith("["):
        assert any("[bold red]" in line for line in lines_of(verdict_panel(report)))


@pytest.mark.parametrize("width", [60, 80])
def test_thirty_groups_are_as_many_entries_as_they_differ_in_kind(make_report, make_group, width):
    groups = tuple(make_group(f"g/{i}", num_comms=1 + i % 2, num_comps=1 + i, count=2) for i in range(30))
    report = make_report(groups)
    lines = lines_of(changes(report, details=False), width)
    assert max(cell_len(line) for line in lines) <= width
    assert [line.split(" (")[0] for line in lines if line.startswith("30 ×")] == [
        "30 × all-gather",
        "30 × all-gather",
    ]
    assert len(lines) + len(lines_of(verdict_panel(report), width)) <= 24
    whole = lines_of(changes(report, details=True))
    assert sum(line.startswith("g/") for line in whole) == 30


def test_an_entry_sums_its_groups_and_names_the_range_of_what_changes(make_report, make_group):
    report = make_report(tuple(make_group(f"g/{i}", num_comms=2, count=3) for i in range(4)))
    (row,) = alike_groups(report)
    assert row.count == 12
    assert row.before_s == pytest.approx(report.default.makespan_s)
    assert row.after_s == pytest.approx(report.best.makespan_s)
    gathers = {config["all_gather.0"].num_channels for config in report.configs.values()}
    low, high = min(gathers), max(gathers)
    said = f"channels 8 → {low}" if low == high else f"channels 8 → {low}–{high}"
    assert any(text.startswith("all-gather: ") and said in text for text in row.changes)


def test_what_a_group_gains_stands_next_to_what_the_step_gains(make_report, make_group):
    groups = tuple(make_group(f"g/{i}", num_comms=1, count=3) for i in range(4))
    report = changed(make_report(groups), step_s=2.0, tuned_step_s=1.96, group_steps_s={"g/0": 1.98, "g/2": 1.99})
    panel = " ".join(line.strip("│ ") for line in lines_of(verdict_panel(report)))
    assert "Of the whole step, as lagom simulate predicts it: 2.00 s → 1.96 s (1.02×, -2.0 %)." in panel
    assert any(line.endswith("-1.5 % of the step") for line in lines_of(changes(report, details=False)))


def test_a_collective_that_keeps_its_knobs_is_unchanged(make_report):
    report = make_report(with_verdict=False)
    defaults = {problem.group.name: problem.default for problem in report.search.problems}
    lines = lines_of(config_table(changed(report, recommended=defaults)))
    assert sum("unchanged" in line for line in lines) == 2


def test_without_a_verdict_the_panel_still_prints(make_report):
    lines = lines_of(verdict_panel(make_report(with_verdict=False)))
    assert_fits(lines)
    assert any("No verdict" in line for line in lines)


def compare_row(tuner: str, **given: object) -> CompareRow:
    fields = {"num_measurements": 1, "makespan_s": 1.0, "speedup_over_default": 1.0, "regret_over_best": 0.0}
    return CompareRow(tuner=tuner, **{"speedup_interval": None, **fields, **given})


def test_the_comparison_has_a_row_per_tuner_in_order():
    rows = [
        compare_row("default", makespan_s=12.3e-3, regret_over_best=0.18),
        compare_row(
            "lagom",
            num_measurements=33,
            makespan_s=10.4e-3,
            speedup_over_default=1.183,
            speedup_interval=(1.1, 1.2504),
        ),
        compare_row("t" * 100, num_measurements=10**6, makespan_s=9.0, speedup_over_default=0.9, regret_over_best=9.0),
    ]
    lines = lines_of(compare_table(rows))
    assert_fits(lines)
    assert sum(line.strip().startswith("t" * 10) for line in lines) > 1  # a long name wraps and is shown whole
    assert "how much longer than the best tuner here (regret)" in " ".join(" ".join(lines).split())
    assert lines[0].split() == ["tuner", "meas.", "time", "speed", "95", "%", "behind"]
    assert lines[1].split() == ["default", "1", "12.3", "ms", "1.000×", "-", "18.0", "%"]
    assert lines[2].split() == ["lagom", "33", "10.4", "ms", "1.183×", "1.100–1.250", "0.0", "%"]


def test_seven_tuners_and_the_whole_step_are_a_table_in_80_columns():
    slow = compare_row("fixed_min", makespan_s=7.79, speedup_over_default=0.108, regret_over_best=8.691, step_s=7.87)
    fast = compare_row("ours", makespan_s=0.804, speedup_interval=(1.038, 1.056), step_s=0.913)
    lines = lines_of(compare_table([slow, fast], step_s=0.948))
    assert_fits(lines)
    assert lines[1].split() == ["fixed_min", "1", "7.79", "s", "0.108×", "-", "869.1", "%", "7.87", "s", "+730.2", "%"]
    assert lines[2].startswith("ours")
