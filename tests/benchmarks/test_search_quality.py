import json
from importlib import import_module
from itertools import product

import pytest

import search_quality
from overlap_generator import draw_group
from search_quality import Run, all_tuners, main, percentile_95, run_tuner, summarise

numpy = import_module("numpy")


def rows_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    main([*argv, "--workers", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"rows"}
    rows: list[dict[str, object]] = found["rows"]
    return rows


def test_one_row_per_tuner_noise_and_number_of_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--groups", "2", "--noise", "0,0.05", "--num-comms", "1,2", "--tuners", "default,lagom+guard"]
    rows = rows_of(argv, capsys)
    cells = [(row["num_comms"], row["noise"], row["tuner"]) for row in rows]
    assert cells == list(product((1, 2), (0.0, 0.05), ("default", "lagom+guard")))
    assert set(rows[0]) == {
        "generator",
        "tuner",
        "num_comms",
        "noise",
        "mean_regret",
        "p95_regret",
        "mean_measurements",
        "worse_than_default_share",
        "right_kind_share",
    }


def test_the_same_seed_gives_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--groups", "3", "--noise", "0.05", "--num-comms", "2", "--tuners", "lagom,autoccl"]
    assert rows_of(argv, capsys) == rows_of(argv, capsys)


def test_the_default_is_measured_once_and_never_worse_than_itself(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(["--groups", "4", "--noise", "0", "--num-comms", "1", "--tuners", "default"], capsys)
    assert (row["mean_measurements"], row["worse_than_default_share"]) == (1.0, 0.0)


def test_without_noise_exhaustive_search_has_no_regret_and_a_guard_never_ends_worse() -> None:
    for index in range(4):
        group = draw_group(9, index, 1)
        oracle = group.oracle()
        exhaustive = run_tuner("exhaustive", group, oracle, seed=0, noise=0.0)
        assert exhaustive.regret == pytest.approx(0.0, abs=1e-12)
        assert exhaustive.right_kind_share == 1.0
        for name in ("lagom+guard", "autoccl+guard"):
            assert not run_tuner(name, group, oracle, seed=0, noise=0.0).worse_than_default


def test_exhaustive_is_left_out_of_large_spaces_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--groups",
            "1",
            "--noise",
            "0",
            "--num-comms",
            "2",
            "--tuners",
            "default,exhaustive",
            "--workers",
            "1",
            "--json",
        ]
    )
    out, err = capsys.readouterr()
    assert [row["tuner"] for row in json.loads(out)["rows"]] == ["default"]
    assert "exhaustive is left out for 2 collectives: 448^2 assignments" in err


def test_all_means_every_entry_point_the_variant_and_the_guarded_ones() -> None:
    papers = {"default", "fixed_min", "fixed_max", "exhaustive", "static_cap", "threads_only", "autoccl", "lagom"}
    assert papers | {"lagom_lr", "lagom+guard", "autoccl+guard"} <= set(all_tuners())


def test_entry_points_are_read_from_the_project_when_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_quality, "entry_points", lambda group: ())
    assert search_quality.tuner_paths()["lagom"] == "lagom_overlap.tuners.lagom:Lagom"


def test_a_row_is_mean_percentile_and_share_of_its_runs() -> None:
    runs = [
        Run(tuner="t", num_comms=1, noise=0.0, regret=r, num_measurements=m, worse_than_default=w, right_kind_share=1.0)
        for r, m, w in ((0.1, 3, False), (0.3, 5, True))
    ]
    (row,) = summarise(runs, ["t"])
    assert row["mean_regret"] == pytest.approx(0.2)
    assert row["p95_regret"] == pytest.approx(0.29)
    assert (row["mean_measurements"], row["worse_than_default_share"]) == (4.0, 0.5)


def test_the_percentile_is_numpys() -> None:
    values = [0.5, 0.1, 0.9, 0.4, 0.35, 0.0]
    assert percentile_95(values) == pytest.approx(numpy.percentile(values, 95))
    assert percentile_95([0.2]) == 0.2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--groups", "0"], "'0' must be at least 1"),
        (["--noise", "-0.1"], "each value must be at least 0"),
        (["--num-comms", "0"], "each value must be at least 1"),
        (["--tuners", "lagon"], "unknown tuner 'lagon'; allowed: default"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
