"""The GPU harness' dry run of launch order, priority and carve-out: every axis is there, and the files say dry run."""

import csv
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lagom_overlap.collective import StreamPriority
from lagom_overlap.cost.persistent import as_persistent
from lagom_overlap.sim.group import share_before_collective
from lagom_overlap.workload import Kernel

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    held = [name for name in ("bench", "points", "launch_order") if name in sys.modules]
    for name in held:
        monkeypatch.delitem(sys.modules, name)
    yield import_module("launch_order")
    for name in ("bench", "points", "launch_order"):
        sys.modules.pop(name, None)


def test_a_dry_run_covers_every_axis_and_says_what_it_is(script, tmp_path: Path, capsys) -> None:
    assert script.main(["--dry-run", "--num-repeats", "2", "--out", str(tmp_path), "--json"]) == 0
    num = len(script.ORDERS) * len(script.PRIORITIES) * len(script.CARVE_OUTS) * len(script.CHANNELS)
    assert json.loads(capsys.readouterr().out) == {"num_points": num, "num_failed": 0}
    content = json.loads((tmp_path / "launch_order.json").read_text())
    assert content["provenance"] == "dry run"
    with (tmp_path / "launch_order.csv").open() as file:
        rows = list(csv.DictReader(file))
    axes = {(row["order"], row["priority"], row["carve_out"], row["channels"]) for row in rows}
    assert len(axes) == len(rows) == num
    assert all(float(row["wait_s"]) == pytest.approx(float(row["predicted_wait_s"])) for row in rows)


@pytest.mark.parametrize("priority", StreamPriority)
def test_its_predictions_are_the_models(script, priority: StreamPriority) -> None:
    plain = Kernel(num_blocks=512, blocks_per_sm=1, wave_s=1e-4, block_bytes=0.0)
    for carve_out in script.CARVE_OUTS:
        kernel = as_persistent(plain, script.NUM_SMS, carve_out)
        for channels in script.CHANNELS:
            share = share_before_collective(kernel, channels, num_sms=script.NUM_SMS, priority=priority)
            assert script.predicted_wait_s("computation_first", carve_out, channels, 1.0) == share
            assert script.predicted_wait_s("collective_first", carve_out, channels, 1.0) == 0.0
