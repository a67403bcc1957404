"""The benchmark on rows of our own, and on the measured files where they are."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import contention_points

MEASURED = Path(os.environ.get("LAGOM_MEASURED", Path(__file__).parents[3] / "shared" / "data" / "measured"))
NO_DATA = "no measured data: put them beside the project in shared/data/measured, or name the folder in LAGOM_MEASURED"

AMD = (
    "gpu,gemm_kernel,m,n,k,grid_or_active_cus,tiles,collective,comm_bytes,channels,gemm_alone_ms,gemm_rotating_ms,"
    "comm_alone_ms,overlap_gemm_ms,overlap_comm_ms,overlap_wall_ms,series,note"
)
GOOD = "MI300X,torch.matmul,8192,8192,8192,,,all_reduce,134217728,32,1.6,1.7,1.0,2.0,1.5,2.1,made_up,"


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert contention_points.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_bad_rows_are_named_with_file_line_and_reason_and_the_rest_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        3: (GOOD.replace("MI300X", "MI999"), "unknown GPU 'MI999'"),
        4: (GOOD.replace("134217728", "-1"), "comm_bytes is -1, must be positive and finite"),
        5: (GOOD.replace(",2.0,", ",nan,"), "overlap_gemm_ms is nan, must be positive and finite"),
        6: (GOOD.replace("8192,8192,8192", "8192,8192,x"), "k is 'x', must be a number"),
        7: (GOOD.removesuffix(","), "17 cells, the header has 18"),
        8: (GOOD.replace("all_reduce", "all_to_none"), "unknown collective 'all_to_none'"),
        9: (GOOD.replace(",32,", ",2000,"), "channels is 2000, must lie in 1..1024"),
        # 2 x 8192^3 operations at twice an MI300X's rate, and an all-reduce at twice NVLink 5's.
        10: (
            GOOD.replace(",1.6,", ",0.01,").replace("made_up", "mi350_grid"),
            "gemm_alone_ms says 1e-05 s, impossible",
        ),
        11: (GOOD.replace(",1.0,", ",0.001,"), "comm_alone_ms says 1e-06 s, impossible"),
        12: (GOOD.replace(",2.0,", ",0.5,"), "overlap_gemm_ms is 0.29 of the time alone, must be at least 0.5"),
        13: (GOOD.replace(",2.1,", ",1e18,"), "overlap_wall_ms is 1e18, beyond what any machine has (0.0001 to 1e+06)"),
    }
    file = write(tmp_path / "rows.csv", AMD, GOOD, *(row for row, _ in bad.values()))
    found = report(capsys, file)
    whys = {one["line"]: one["why"].split(";")[0].split(":")[0] for one in found["bad_rows"]}
    assert whys == {line: why for line, (_, why) in bad.items()}
    assert {one["file"] for one in found["bad_rows"]} == {file}
    assert found["num_rows"] == 12
    assert {name: row["num_rows"] for name, row in found["by_quantity"].items()} == {
        "computation_slowdown": 1,
        "communication_slowdown": 1,
        "makespan": 1,
    }


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((AMD.replace(",series", ""), "1"), "lacks the columns series"),
        (("",), "is empty"),
        ((AMD,), "has no rows"),
        ((AMD, GOOD.replace("MI300X", "MI999")), "rows.csv:2: unknown GPU 'MI999'"),
    ],
)
def test_an_unusable_file_ends_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: tuple[str, ...], why: str
) -> None:
    assert contention_points.main([write(tmp_path / "rows.csv", *lines)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_a_missing_file_ends_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert contention_points.main(["/nowhere.csv"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_static_grid_beyond_the_compute_units_takes_a_second_pass_and_a_stealing_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MI350: 16 channels on four dies leave 28 of their 32 units."""
    head = "MI350,grouped GEMM {},267424,2560,1280,{},,all_gather,536870912,16,2.3,,43.7,2.5,,,mi350_grid,"
    rows = [head.format(kernel, grid) for kernel in ("CK static", "Triton work-stealing") for grid in (224, 228)]
    found = report(capsys, write(tmp_path / "rows.csv", AMD, *rows), "--rows")
    static, beyond, stealing, more = (one["predicted"] for one in found["rows"])
    assert beyond > 1.5 * static
    assert more < 1.1 * stealing


def test_plain_text_says_what_is_not_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.csv", AMD, GOOD, GOOD.replace("1.6,1.7", ","))
    assert contention_points.main([file]) == 0
    text = capsys.readouterr().out
    assert "not modelled (1): no time of the product alone [lines 3]" in text
    assert "computation_slowdown" in text


def test_a_curve_whose_whole_gpu_is_wrong_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "gpu,m,n,k,kernel,cus,med_ms"
    rows = [f"MI300X,{size},{size},{size},ws,{cus},{time}" for size, cus, time in (
        (2048, 304, "1e18"), (2048, 152, "0.1"), (4096, 304, "0.3"), (4096, 152, "0.5"),
    )]  # fmt: skip
    found = report(capsys, write(tmp_path / "rows.csv", header, *rows))
    assert [(one["line"], one["why"][:52]) for one in found["bad_rows"]] == [
        (2, "med_ms is 1e18, beyond what any machine has (0.0001 "),
        (3, "its time on all compute units, line 2, is wrong: med"),
    ]
    assert found["num_values_claimed"] == 1


@pytest.mark.parametrize(
    ("name", "quantity", "num_rows", "limit_pct"),
    [
        ("overlap_points_amd_shown.csv", "computation_slowdown", 186, 6.0),
        ("overlap_points_amd_shown.csv", "makespan", 102, 6.0),
        ("overlap_points_amd_shown.csv", "communication_slowdown", 50, 9.0),
        ("amd_gemm_vs_cus_shown.csv", "product_on_fewer_cus", 228, 10.0),
    ],
)
def test_the_reached_errors_hold(
    capsys: pytest.CaptureFixture[str], name: str, quantity: str, num_rows: int, limit_pct: float
) -> None:
    if not (MEASURED / name).exists():
        pytest.skip(NO_DATA)
    found = report(capsys, str(MEASURED / name))["by_quantity"][quantity]
    assert found["num_rows"] == num_rows
    assert found["mean_abs_error_pct"] <= limit_pct


def test_the_steady_part_of_the_a100_surface_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    file = MEASURED / "overlap_surface_nvidia_shown.csv"
    if not file.exists():
        pytest.skip(NO_DATA)
    rows = report(capsys, str(file), "--rows")["rows"]
    steady = [one for one in rows if "steady" in one["series"]]
    assert len(steady) == 8
    assert all(abs(one["predicted"] / one["measured"] - 1) <= 0.05 for one in steady)
    assert not any(one["claimed"] for one in rows if "fails" in one["series"])


OWN = Path(__file__).parents[2] / "benchmarks" / "results" / "h100_2026-11-22"


def test_our_own_surface_of_an_h100_is_predicted_within_the_errors_of_the_results_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, str(OWN / "surface.csv"))
    assert (found["num_rows"], found["num_values_claimed"], len(found["bad_rows"])) == (764, 754, 0)
    assert found["mean_abs_error_pct"] < 3.5
    kinds = {(row["series"], row["kind"]): row["mean_abs_error_pct"] for row in found["by_kind"]}
    assert kinds["spin", "persistent GEMM"] < 3.0
    assert all(error < 9.0 for error in kinds.values())


def test_products_that_were_measured_after_the_rule_was_written_down_are_predicted_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, str(OWN / "surface_held_out.csv"))
    assert (found["num_values_claimed"], len(found["bad_rows"])) == (84, 0)
    assert found["mean_abs_error_pct"] < 3.0
    assert found["max_abs_error_pct"] < 12.0


def test_wrong_rows_of_our_own_format_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, good = (OWN / "surface.csv").read_text(encoding="utf-8").splitlines()[:2]
    bad = {
        good.replace("H100-SXM5-80GB", "H1"): "unknown GPU 'H1'",
        good.replace("2x66x1", "2x66"): "grid is '2x66', must be XxYxZ",
        good.replace("2x66x1", "2x0x1"): "grid is '2x0x1', must be positive",
        good.replace(",spin,1,1,1,1,", ",magic,1,1,1,1,"): "injector_bytes_per_s is 0, must be positive and finite",
        good.replace(",spin,1,1,1,1,", ",spin,1,1,132,1,"): "num_blocks is '132', must lie in 1..131",
    }
    found = report(capsys, write(tmp_path / "rows.csv", header, good, *bad))
    assert [one["why"].split(";")[0] for one in found["bad_rows"]] == list(bad.values())
    assert found["num_values_claimed"] == 1
