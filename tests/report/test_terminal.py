import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from toy_tuning import changed

from lagom_overlap.report.compare.terminal import compare_table
from lagom_overlap.report.tune.terminal import config_table, verdict_panel
from lagom_overlap.results.compare import CompareRow
from lagom_overlap.workload import OverlapGroup


def lines_of(renderable) -> list[str]:
    console = Console(width=80, file=io.StringIO(), record=True, force_terminal=True)
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
    assert any(line.startswith("  makespan Z") and line.rstrip().endswith("%") for line in lines)


@pytest.mark.parametrize("name", ["x" * 200, "漢字" * 60, "[bold red]markup[/bold red]", "\x1b[2J\x07\r\nclear"])
def test_long_and_hostile_names_fit_and_stay_text(make_report, make_group, name):
    report = changed(make_report((renamed(make_group(num_comms=3), name),)), job=name, backend_description=name)
    for renderable in (verdict_panel(report), config_table(report)):
        lines = lines_of(renderable)
        assert_fits(lines)
        assert not any("\x1b" in line or "\x07" in line or "\r" in line for line in lines)
    if name.startswith("["):
        assert any("[bold red]" in line for line in lines_of(verdict_panel(report)))


def test_thirty_groups_are_cut_and_said_to_be(make_report, make_group):
    report = make_report(tuple(make_group(f"g/{i}", num_comms=1, num_comps=1) for i in range(30)))
    lines = lines_of(config_table(report))
    assert_fits(lines)
    assert lines[-1].strip() == "and 18 more groups"


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
    assert lines[-1].startswith("Regret: ")
    assert lines[0].split() == ["tuner", "meas.", "makespan", "over", "default", "95", "%", "interval", "regret"]
    assert lines[1].split() == ["default", "1", "12.3", "ms", "1.000×", "-", "18.0", "%"]
    assert lines[2].split() == ["lagom", "33", "10.4", "ms", "1.183×", "1.100", "to", "1.250", "0.0", "%"]
