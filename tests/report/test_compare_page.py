"""The page of `lagom compare`: every row, the words, no network."""

import re

import pytest

from lagom_overlap.report.compare import render_comparison, summary
from lagom_overlap.results.compare import ComparePlannersResult, CompareResult, CompareRow, PlannerRow


def tuner(name: str, makespan_s: float | None, ratio: float | None) -> CompareRow:
    interval = None if ratio is None else (ratio - 0.01, ratio + 0.01)
    regret = None if makespan_s is None else makespan_s / 0.1 - 1
    return CompareRow(
        tuner=name,
        num_measurements=7,
        makespan_s=makespan_s,
        speedup_over_default=ratio,
        speedup_interval=interval,
        regret_over_best=regret,
    )


def comparison(*rows: CompareRow, interrupted: bool = False) -> CompareResult:
    return CompareResult(
        job="<job>", backend="simulated", seed=1, rows=rows, interrupted=interrupted, notes=("It is simulated.",)
    )


def test_the_page_of_tuners_has_every_row_and_the_caveats() -> None:
    page = render_comparison(comparison(tuner("lagom", 0.1, 1.25), tuner("autoccl", 0.125, 1.0)))
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", page)
    for text in ("lagom", "100 ms", "1.250×", "1.240×", "1.260×", "0.0 %", "autoccl", "125 ms", "25.0 %"):
        assert text in cells
    assert "lagom is the fastest of 2" in page
    assert "It is simulated." in page
    assert "&lt;job&gt;" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page.split("<script>")[0])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_fastest_is_named_wherever_its_row_stands_and_unmeasured_ones_do_not_count(place: int) -> None:
    rows = [tuner("autoccl", 0.125, 1.0), tuner("random", None, None), tuner("default", 0.125, 1.0)]
    rows.insert(place, tuner("lagom", 0.1, 1.25))
    assert summary(comparison(*rows)).startswith(
        "<job>: lagom is the fastest of 3: 100 ms, 1.250× the default's speed (95 % interval 1.240 to 1.260), after 7"
    )


def test_a_comparison_that_ended_before_a_measurement_has_a_page_without_a_figure() -> None:
    page = render_comparison(comparison(tuner("lagom", None, None), interrupted=True))
    assert "<figure>" not in page
    even = render_comparison(comparison(tuner("lagom", 0.1, 1.005)))
    assert "lagom has the shortest time of 1" in even
    assert "not measurably different from the default" in even
    assert "1 searches were done" in page


def test_the_page_of_planners_names_who_found_none() -> None:
    rows = (
        PlannerRow(planner="ours", before_s=1.0, after_s=0.5, solve_s=2.0),
        PlannerRow(planner="x", before_s=1.0, failure="no plan"),
    )
    page = render_comparison(
        ComparePlannersResult(
            job="job", baseline="FSDP2's own order", simulation="with contention", rows=rows, times=None
        )
    )
    assert "ours plans the shortest step of 1" in page
    assert page.count("no plan") >= 2
    assert "500 ms" in page
