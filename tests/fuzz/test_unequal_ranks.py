"""Jobs in which ranks do not all do the same, as stock PyTorch allows: with us they end the same, no minute later."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from fresh import FreshJob, compared
from fuzzing import Ranks
from programs import Program

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = ("call", "all_reduce", "float32", 1, "world", "sum", "now", "within")
"""A loss that is summed over the ranks and read: too small to be set, and no rank goes on without the others."""
NUM_STEPS = 20
"""Windows have four: one records, one is the default's, then settings change with each."""
MICRO = ("accumulate", 2, "last")


def job(family: str, *features: tuple[object, ...], mode: str = "launched", num_steps: int = NUM_STEPS) -> Program:
    return Program(seed=1, num_ranks=2, mode=mode, family=family, num_steps=num_steps, features=features)


UNEQUAL_STEPS = {
    "rank 1 skips an update": job("fsdp2", ("skips", 1, 5)),
    "rank 0 skips an update": job("ddp", ("skips", 0, 9)),
    "rank 0 makes an update twice": job("fsdp2", ("repeats", 0, 5)),
    "an update is skipped under saved settings": job("fsdp2", ("skips", 1, 5), mode="relaunched"),
    "the gradients of rank 1 overflow": job("ddp", ("scaler", 1, 4)),
    "rank 0 trains a model of its own between two batches": job("fsdp2", ("local", 0, "micro", 1, "plain"), MICRO),
    "rank 0 does so under saved settings": job("ddp", ("local", 0, "micro", 1, "plain"), MICRO, mode="relaunched"),
    "rank 1 trains a replicated model of its own first": job("fsdp2", ("local", 1, "before", 1, "ddp")),
    "rank 1 does so, and rank 0 skips an update": job("fsdp2", ("local", 1, "before", 5, "ddp"), ("skips", 0, 2)),
    "rank 0 skips an update and waits in a small call": job("ddp", SMALL, ("skips", 0, 9)),
    "rank 1 skips an update and waits in a small call": job("ddp", SMALL, ("skips", 1, 9)),
    "rank 0 makes two steps by itself": job("ddp", ("extra", 0, 3, 2)),
    "rank 0 makes two steps by itself, all said": job("ddp", ("extra", 0, 3, 2), mode="online"),
    "an update raises on rank 1": job("ddp", ("raise_alone", 1, 6, "optimizer", "ValueError", "inside", "goes on")),
    "a step raises on rank 1": job(
        "fsdp2", ("raise_alone", 1, 6, "between", "ValueError", "outside", "goes on"), mode="online"
    ),
    "rank 1 has more batches": job("ddp", ("join_all", 1, 9, True)),
    "rank 0 has more batches, all steps said": job("ddp", ("join_all", 0, 9, True), mode="online"),
    "rank 1 leaves": job("ddp", ("leaves", 1, 3)),
    "rank 0 leaves": job("ddp", ("leaves", 0, 6), mode="online"),
    "all ranks count collectives in every step": job("fsdp2", ("mode", "comm", -1, 0, NUM_STEPS)),
    "rank 1 looks at operators in some steps": job("ddp", ("mode", "dispatch", 1, 5, 15)),
}
UNLIKE_CALLS = {
    f"{what}, {kind}": job("calls", ("unlike", rank, what, kind, first), mode=mode, num_steps=7)
    for rank, what, kind, first, mode in (
        (1, "transposed", "all_reduce", 3, "route"),
        (0, "transposed", "all_gather", 5, "saved"),
        (1, "gaps", "reduce_scatter", 3, "route"),
        (0, "subclass", "all_reduce", 5, "saved"),
        (1, "subclass", "all_to_all", 3, "route"),
        (1, "inference", "all_gather", 3, "route"),
        (1, "uneven", "splits", 3, "route"),
    )
}
"""By name: what kind of tensor, or of split sizes, one rank has, and in which call."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", UNEQUAL_STEPS)
def test_ranks_whose_steps_differ_compute_what_they_compute_alone(pair: Ranks, name: str) -> None:
    result = pair.run(UNEQUAL_STEPS[name])
    assert not result.is_find, result.line()


@pytest.mark.parametrize("name", UNLIKE_CALLS)
def test_a_call_whose_arguments_are_others_on_one_rank_gives_what_torch_gives(pair: Ranks, name: str) -> None:
    result = pair.run(UNLIKE_CALLS[name])
    assert not result.is_find, result.line()


@pytest.mark.parametrize(
    "feature",
    [
        ("without", 1, "LAGOM_DISABLE"),
        ("without", 1, "observe"),
        ("without", 0, "stock"),
        ("leaves", 1, 3),
        ("dies", 1, 8),
        ("dies", 1, 12),
        ("again",),
    ],
    ids=lambda feature: " ".join(map(str, feature)),
)
def test_processes_that_are_gone_or_run_without_us_are_waited_for_by_nobody(feature: tuple[object, ...]) -> None:
    found = compared(job("ddp", feature))
    assert found["equal"], found


def states_of(folder: Path, rank: int) -> set[str]:
    lines = [json.loads(line) for line in (folder / f"events.{rank}.jsonl").read_text().splitlines()]
    return {line["state"] for line in lines if "state" in line}


@pytest.mark.parametrize("feature", [("no_backend",), ("accumulate", 1, "last")], ids=["none", "gloo"])
def test_a_job_is_tuned_whether_it_names_its_backend_or_not(feature: tuple[object, ...], tmp_path: Path) -> None:
    ended = FreshJob(job("fsdp2", feature), "online", tmp_path).ended(150)
    assert ended.codes == [0, 0], ended.errors
    assert "search" in states_of(tmp_path, 0)
