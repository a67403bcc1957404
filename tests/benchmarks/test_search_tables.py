"""The tables of every search: figures by hand, and the command on the smallest groups."""

import pytest

import search_tables
from search_quality import Run


def run(tuner: str, regret: float, **more: object) -> Run:
    found = {"num_comms": 8, "noise": 0.02, "num_measurements": 3, "worse_than_default": False, "right_kind_share": 1.0}
    return Run(tuner=tuner, regret=regret, **{**found, **more})  # type: ignore[arg-type]


def test_regret_is_the_median_of_the_seeds_with_the_error_of_all_groups() -> None:
    """Means of the seeds 1, 2 and 9 %; of six groups 4 +- 1.63."""
    runs = [run("ours", r, seed=s) for s, r in ((1, 0.0), (1, 0.02), (2, 0.02), (2, 0.02), (3, 0.09), (3, 0.09))]
    assert search_tables.regret(runs) == "2.00 ± 1.61"


def test_the_curve_goes_on_with_what_a_search_ended_with() -> None:
    ended = run("ours_anytime", 0.01, curve=(0.3, 0.2, 0.01))
    assert [search_tables.after(ended, at) for at in (1, 2, 3, 48)] == [0.3, 0.2, 0.01, 0.01]


def test_decisions_are_those_of_the_short_search_on_the_largest_groups() -> None:
    runs = [run("ours", 0.0, decisions_s=(0.01, 0.02, 0.03)), run("lagom", 0.0, decisions_s=(9.0, 9.0))]
    runs.append(run("ours", 0.0, num_comms=1, decisions_s=(9.0, 9.0)))
    assert "| formula | 20 | 28 | 3 |" in list(search_tables.decisions(runs))


def test_each_family_has_a_row_for_each_search_and_others_surfaces_follow() -> None:
    runs = [
        run(tuner, 0.01, num_comms=num, curve=(0.02, 0.01))
        for tuner in search_tables.TUNERS
        for num in search_tables.NUM_COMMS
    ]
    row = {"kind": "one node", "num_choices": 4, "tuner": "lagom, judged", "mean_regret": 0.0123}
    row |= {"mean_iterations": 77.0, "worse_beyond_null_share": 0.5}
    text = "\n".join(search_tables.document(runs, [row], ["words"]))
    for words in search_tables.TUNERS.values():
        assert text.count(f"| {words} | 1.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 | 3.0 / 3.0 / 3.0 | 0 / 0 / 0 |") == 1
    assert "| one node (4) | Lagom, judged | 1.23 | 77 | 50.0 |" in text


def test_one_file_of_two_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        search_tables.main(["--seed", "1", "--surface", "a.csv"])
    assert stopped.value.code == 2
    assert "--surface and --iterations belong together" in capsys.readouterr().err
