"""All rows of NCCL's golden files, and the fitted systems, where the data is at hand."""

import json
from pathlib import Path

import pytest

import collective_time
import nccl_choice


def test_at_least_95_percent_of_the_golden_rows_agree(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["nccl_choice.py", str(golden), "--json"])
        assert nccl_choice.main() == 0
    found = json.loads(capsys.readouterr().out)
    for part in ("per_size", "changes"):
        assert found[part]["num_rows"] > 400
        assert found[part]["share"] == 1.0
        assert found[part]["identical_with_threads"] == found[part]["num_rows"]
    assert found["per_size"]["max_time_error_pct"] < 0.7  # the files print one decimal of a microsecond
    assert found["tables"]["identical"] == found["tables"]["num_entries"]
    assert found["from_presets"]["share"] >= 0.95


@pytest.mark.long
def test_fitted_links_meet_five_percent_on_sizes_not_fitted(vidur: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["collective_time.py", str(vidur), "--json"])
        assert collective_time.main() == 0
    rows = {row["system"]: row for row in json.loads(capsys.readouterr().out)["systems"]}
    for name in collective_time.REQUIRED:
        assert rows[name]["mean_abs_error_pct"] <= 5.0


def test_without_data_the_benchmarks_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for script in (collective_time, nccl_choice):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["script", str(tmp_path)])
            assert script.main() == 2
        assert "LAGOM_DATA" in capsys.readouterr().err


def test_a_new_system_finds_its_topology_and_a_broken_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["time_stats.all_reduce.median,num_workers,devices_per_node,size"]
    for step in range(40):
        size = int(2**20 * 1.12**step)
        lines.append(f"{1e3 * (50e-6 + 1.5 * size / 24e9)},4,4,{size}")
    (tmp_path / "new_allreduce.csv").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "bad_allreduce.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["collective_time.py", str(tmp_path), "--json"])
        assert collective_time.main() == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["systems"]
    assert row["mean_abs_error_pct"] < 0.5
    assert row["topology_chosen_by_fit"]
    assert row["bytes_per_s"] == pytest.approx(24e9, rel=0.01)
    assert [entry["file"] for entry in found["not_read"]] == ["bad_allreduce.csv"]
