"""Real frameworks on real gloo ranks: tuning changes no bit of what they compute, and settles."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from gloo_job import GlooJob

from forked_python import run_ranks
from lagom_overlap.export.saved import read_saved
from small_messages import LEAST_BYTES, SLICE_BYTES

ENGINE = f"ProcessGroupGloo of torch {'.'.join(torch.__version__.split('.')[:2])}"
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(180)]


def run(folder: Path, name: str = "job", **what: object) -> list[dict[str, object]]:
    (folder / name).mkdir()
    return GlooJob(folder / name, **what).start().results()


@pytest.mark.parametrize(
    ("kind", "num_ranks", "adapters", "steps"),
    [
        ("fsdp2", 2, None, 84),
        ("fsdp2", 4, None, 24),
        ("fsdp2, gradients of two batches", 2, None, 16),
        ("fsdp2, bf16", 2, None, 16),
        ("fsdp2, compiled", 2, None, 16),
        ("ddp", 2, None, 84),
        ("calls", 3, ["calls"], 84),
    ],
)
def test_a_tuned_job_has_the_losses_of_the_stock_framework_bit_for_bit(
    tmp_path: Path, kind: str, num_ranks: int, adapters: list[str] | None, steps: int
) -> None:
    counts = (0, 1, 3) if kind == "calls" else (1,)  # optimizer steps of each rank: none of them is ever counted
    # The small calls of one of them may be hidden well enough that ours asks for nothing.
    tuner = {"adapters": adapters} | ({"tuner": "random"} if kind == "calls" else {})
    ranks = run(tmp_path, kind=kind, num_ranks=num_ranks, steps=steps, tuner=tuner, optimizer_steps=counts)
    for number, rank in enumerate(ranks):
        assert rank["losses"] == rank["stock"], f"rank {number}"
        assert rank["states"] == ranks[0]["states"]
    assert {"record", "search"} <= set(ranks[0]["states"])
    assert ranks[0]["graphs"][-1] == ranks[0]["graphs"][8], "a switch of settings made torch.compile compile again"
    if steps == 84:
        assert ranks[0]["states"][-1] == "watch", ranks[0]["reason"]
        assert " 3 pairs" in ranks[0]["reason"] or "no settings tried were faster" in ranks[0]["reason"]
        assert all(rank["used"] > 0 for rank in ranks), "no call was made under a setting"


def test_tuners_are_compared_on_a_real_job_and_change_no_bit_of_it(tmp_path: Path) -> None:
    tuner = {"tuner": "default", "compare": ["fixed_min"], "window_steps": 4, "max_slowdown": 1000}  # never given up
    ranks = run(tmp_path, steps=84, tuner=tuner)
    for rank in ranks:
        assert rank["losses"] == rank["stock"]
        assert rank["states"] == ranks[0]["states"]
    assert ranks[0]["states"][-1] == "watch", ranks[0]["reason"]
    own, smallest = ranks[0]["contest"]
    assert (own["tuner"], own["groups_set"], smallest["tuner"]) == ("default", 0, "fixed_min")
    assert smallest["measurements"] == 1
    assert smallest["groups_set"] > 0
    assert smallest["ratio"] > 0
    assert smallest["decision"] in {"faster", "slower", "no difference"}
    assert ranks[1]["contest"] is None, "rank 0 judges"


def test_a_job_of_varying_length_is_searched_by_classes_of_sizes(tmp_path: Path) -> None:
    """No two steps send the same number of bytes."""
    kind, adapters = "calls, of varying length", ["calls"]
    ranks = run(tmp_path, kind=kind, steps=40, tuner={"adapters": adapters})
    for rank in ranks:
        assert rank["losses"] == rank["stock"]
        assert rank["states"] == ranks[0]["states"]
    assert set(ranks[0]["states"]) >= {"record", "search"}


def test_saved_settings_of_a_class_hold_for_every_size_in_it(tmp_path: Path) -> None:
    path = settings_file(tmp_path / "lagom.json", kind="all_to_all", num_bytes=2 * LEAST_BYTES, size_octaves=1)
    tuner = {"config": str(path), "adapters": ["calls"]}
    ranks = run(tmp_path, kind="calls, of varying length", steps=12, tuner=tuner, save=str(tmp_path / "again.json"))
    for rank in ranks:
        assert rank["losses"] == rank["stock"]
        assert rank["states"] == ["record"] * 4 + ["watch"] * 8
        assert rank["settings"] == 1
        assert rank["used"] > 0
    again = read_saved(tmp_path / "again.json", world_size=2)
    assert (again.settings, again.size_octaves) == (read_saved(path).settings, 1)


def test_tensor_parallel_groups_beside_fsdp_are_left_to_themselves(tmp_path: Path) -> None:
    """Two tensor-parallel pairs and two data-parallel pairs: roles, not ranks, name what is tuned."""
    ranks = run(tmp_path, kind="tp", num_ranks=4, steps=16)
    assert all(rank["losses"] == rank["stock"] for rank in ranks)
    assert all(rank["states"] == ranks[0]["states"] for rank in ranks)


def settings_file(
    path: Path,
    world_size: int = 2,
    num_ranks: int = 2,
    *,
    kind: str = "all_gather",
    num_bytes: int = 4 * (2 * 4 * 32 * 32 + 5 * 32),
    size_octaves: int = 0,
) -> Path:
    """What `save` writes, for the two all-gathers of a layer, or one call of a class: two channels of a slice each."""
    call = {"description": "default_pg", "num_ranks": num_ranks, "creation_order": 0, "kind": kind}
    call["num_bytes"] = num_bytes
    config = {"num_channels": 2, "chunk_bytes": SLICE_BYTES}
    settings = [{"site": {"call": call, "occurrence": n}, "config": config} for n in range(1 if size_octaves else 2)]
    document = {"world_size": world_size, "route": "gloo", "is_adopted": True, "settings": settings}
    path.write_text(
        json.dumps(
            document
            | {
                "format": "lagom-online",
                "version": 3,
                "size_octaves": size_octaves,
                "engine": ENGINE,
                "verdict": "",
                "date": "",
            }
        )
    )
    return path


def test_saved_settings_are_in_force_in_the_next_run_once_its_calls_are_known(tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    tuner = {"config": str(settings_file(tmp_path / "lagom.json"))}
    ranks = run(tmp_path, steps=10, tuner=tuner, save=str(again))
    assert all(rank["losses"] == rank["stock"] for rank in ranks)
    assert ranks[1]["states"] == ["record"] * 4 + ["watch"] * 6
    assert ranks[1]["settings"] == 2
    assert [rank["used"] for rank in ranks] == [12, 12], "two gathers of six steps"
    assert again.stat().st_mode & 0o777 == 0o600
    assert read_saved(again, world_size=2).settings == read_saved(tmp_path / "lagom.json").settings


def test_an_example_refuses_a_config_that_is_missing_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_gpt_fsdp2.py"), "--config", str(tmp_path / "x.json")]
    child = subprocess.run(command, check=False, capture_output=True, text=True)
    assert child.returncode == 2
    assert child.stderr.splitlines()[-1].endswith("x.json' is no file; give one that --save wrote")
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize(
    ("script", "sizes"),
    [
        ("train_gpt_fsdp2.py", ["--width", "128", "--layers", "2", "--length", "16"]),
        ("train_moe_dual_batch.py", ["--width", "64", "--layers", "1", "--tokens", "256"]),
    ],
)
def test_the_examples_train_with_and_without_tuning(tmp_path: Path, script: str, sizes: list[str]) -> None:
    records = []
    for words in (["--no-tune"], []):
        record = tmp_path / f"{len(words)}.json"
        run_ranks(EXAMPLES / script, ["--steps", "8", *sizes, *words, "--record", str(record)], 2)
        records.append(json.loads(record.read_text()))
    assert records[0]["losses"] == records[1]["losses"]
    assert len(set(records[1]["losses"])) == 8
    assert set(records[0]["states"]) == {"off"}
    assert "record" in records[1]["states"]
