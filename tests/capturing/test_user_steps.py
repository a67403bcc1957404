"""Steps as users have them: DDP, routed experts, compiled blocks, own configurations, and what a capture says."""

import json
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lagom_overlap.capturing.data_parallel import bucket_sizes
from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.units import MIB
from lagom_overlap.verbs.capture import CaptureRequest, run_capture
from lagom_overlap.workload import Iteration, MemoryBound, Phase
from lagom_overlap.workload.issued import IssuedStep

pytestmark = pytest.mark.torch
RANKS, WIDTH = 4, 512


def blocks(num: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num)))


def step_of(model: nn.Module, *, is_fused: bool = True, **more: object) -> TrainingStep:
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    inputs = (torch.randn(16, WIDTH),)
    return TrainingStep(
        model=model, inputs=inputs, loss=lambda out: out.square().mean(), optimizers=(optimizer,), **more
    )


def captured(build: object) -> IssuedStep:
    return capture_step(build, num_ranks=RANKS)  # type: ignore[arg-type]


def test_ddps_buckets_are_reduced_during_backward_and_hold_every_gradient_once():
    capture = captured(lambda: step_of(nn.parallel.DistributedDataParallel(blocks(), bucket_cap_mb=1)))
    comms = capture.iteration.comms
    assert {op.collective.kind for op in comms} == {CollectiveKind.ALL_REDUCE}
    assert sum(op.collective.num_bytes for op in comms) == 4 * 3 * (WIDTH + 1) * WIDTH
    names = [op.name for op in capture.iteration.ops]
    products = [op.name for op in capture.iteration.computations if op.origin.phase is Phase.WEIGHT_GRAD]
    assert names.index(comms[0].name) < names.index(products[-1])
    updates = [op for op in capture.iteration.ops if op.origin.phase is Phase.OPTIMIZER]
    assert all(names.index(op.name) > names.index(comms[-1].name) for op in updates)


def test_ddp_without_synchronisation_reduces_nothing():
    def build() -> TrainingStep:
        model = nn.parallel.DistributedDataParallel(blocks())
        return step_of(model, context=model.no_sync)

    assert captured(build).iteration.comms == ()


EXACTLY = MIB // 4
"""Numbers of four bytes that fill the first bucket, and half of each other one."""


@pytest.mark.parametrize("half", [(), (1,), (0, 3, 4)], ids=["one type", "one of another type", "two types"])
@pytest.mark.parametrize(
    "sizes",
    [
        [3, 200_000, 70_000, 300_000, 5],
        [400_000, 10],
        [1, 2, 3],
        [EXACTLY, 2 * EXACTLY, EXACTLY, EXACTLY, 7],
        [EXACTLY - 1, 1, EXACTLY, EXACTLY - 1, 5, 2 * EXACTLY],
    ],
)
def test_buckets_are_those_of_pytorchs_reducer(sizes: list[int], half: tuple[int, ...]):
    """A bucket is full when it holds its limit to the byte; each type of number fills its own, its first one sooner."""
    types = [torch.bfloat16 if place in half else torch.float32 for place in range(len(sizes))]
    parameters = [nn.Parameter(torch.zeros(size, dtype=kind)) for size, kind in zip(sizes, types, strict=True)]
    place = {id(one): number for number, one in enumerate(parameters)}
    mine = [[place[id(one)] for one in held] for held in bucket_sizes(parameters, MIB, 2 * MIB)]
    # Told in which order the gradients come, as when it makes the buckets again after the first step.
    ready = list(range(len(sizes)))
    theirs, _ = dist._compute_bucket_assignment_by_size(parameters, [MIB, 2 * MIB], [], ready)
    assert sorted(mine) == sorted(theirs)
    open_ones = len(set(types)) if half else 0  # one a type, which PyTorch leaves in the order of a hash table
    assert mine[: len(mine) - open_ones] == theirs[: len(theirs) - open_ones]


class Routed(nn.Module):
    """Top-2 routing to experts on all ranks; tokens travel by counts that the router decides."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, RANKS)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        _, chosen = self.router(x).softmax(-1).topk(2, -1)
        counts = torch.histc(chosen.float(), bins=RANKS, min=0, max=RANKS).long()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = counts.tolist(), arriving.tolist()
        order = torch.argsort(chosen.flatten()) // 2
        moved = self.expert(all_to_all_single_autograd(x[order], received, sent, dist.group.WORLD))
        back = all_to_all_single_autograd(moved, sent, received, dist.group.WORLD)
        return torch.zeros_like(x).index_add(0, order, back)


def test_routed_tokens_travel_by_the_load_that_is_given():
    read = []

    def load(tensor: torch.Tensor) -> int:
        read.append(tensor.dtype)
        return 16 * 2 // RANKS

    capture = captured(lambda: step_of(Routed(), read_value=load))
    exchanges = [op.collective for op in capture.iteration.comms if op.collective.kind is CollectiveKind.ALL_TO_ALL]
    assert Counter(one.num_bytes for one in exchanges)[16 * 2 * WIDTH * 4] == 4  # there and back, forward and backward
    assert len(read) == 2 * RANKS


def _ancestors(step: Iteration) -> dict[str, set[str]]:
    """By name what an operator waits for, on any path: the closure, by brute force."""
    found: dict[str, set[str]] = {}
    for op in step.ops:
        found[op.name] = set(op.deps).union(*(found[dep] for dep in op.deps))
    return found


def test_everything_that_the_host_issues_behind_a_read_waits_for_it():
    """The tokens' exchange needs split sizes that `tolist` brings: it follows the counts' exchange."""
    step = captured(lambda: step_of(Routed(), read_value=lambda _: 16 * 2 // RANKS)).iteration
    behind = _ancestors(step)
    (read,) = [op for op in step.computations if op.is_host_read]  # two lists, value by value, with nothing between
    assert read.work == MemoryBound(2 * RANKS * 2 * 8)
    counts, *tokens = [op.name for op in step.comms if op.collective.kind is CollectiveKind.ALL_TO_ALL]
    assert counts in read.deps
    place = [op.name for op in step.ops].index(read.name)
    assert all(read.name in behind[op.name] for op in step.ops[place + 1 :])
    assert all(counts in behind[name] for name in tokens)


class Found(nn.Linear):
    """Works on the rows that a mask finds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = super().forward(x)
        return before * 2 + super().forward(x[torch.nonzero(before[:, 0] > 0)[:, 0]]).sum()


def test_how_many_entries_nonzero_finds_is_a_read():
    step = captured(lambda: step_of(Found(WIDTH, WIDTH), read_value=lambda _: 5)).iteration
    (read,) = [op for op in step.computations if op.is_host_read]
    assert read.origin.kernel == "aten.nonzero"
    behind = _ancestors(step)
    place = [op.name for op in step.ops].index(read.name)
    assert all(read.name in behind[op.name] for op in step.ops[place + 1 :])


def test_scalars_that_never_were_on_the_device_are_no_reads():
    """Adam asks its count of steps for its value, which is a number of the CPU."""
    step = captured(lambda: step_of(blocks(), is_fused=False)).iteration
    assert not any(op.is_host_read for op in step.computations)


def test_a_step_that_reads_values_is_told_how_to_give_them():
    with pytest.raises(JobError, match=r"values of a tensor; give TrainingStep\(read_value=...\)"):
        run_capture(CaptureRequest(target=lambda: step_of(Routed()), num_ranks=RANKS))  # type: ignore[arg-type]


def test_a_model_that_is_not_sharded_is_told_how():
    (note,) = captured(lambda: step_of(blocks())).notes
    assert "not sharded over the 4 ranks" in note
    assert "fully_shard" in note
    assert "--parallel fsdp=4" in note


def test_compiled_blocks_are_captured_as_they_run_without_it_and_said_so():
    def build() -> TrainingStep:
        model, mesh = blocks(), init_device_mesh("cpu", (RANKS,))
        for block in model:
            block.compile(backend="eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return step_of(model)

    (note,) = captured(build).notes
    assert note.startswith("torch.compile: 3 modules are compiled")


def test_any_configuration_that_transformers_builds_is_captured(tmp_path):
    pytest.importorskip("transformers")
    fields = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    for target in (path, tmp_path):
        found = run_capture(CaptureRequest(target=f"hf:{target}", parallel="fsdp=4", seq_len=32))
        gathers = [op for op in found.capture.iteration.comms if op.collective.kind is CollectiveKind.ALL_GATHER]
        assert sum(op.origin.phase is Phase.FORWARD for op in gathers) == 3 + 1  # its layers, and the root
    path.write_text(json.dumps({**fields, "model_type": "no-such-model"}))
    with pytest.raises(JobError, match="knows no such configuration"):
        run_capture(CaptureRequest(target=f"hf:{path}", parallel="fsdp=4"))


class Scaled(torch.optim.SGD):
    """Skips a step whose gradients are not finite, as a gradient scaler does."""

    def step(self, closure=None):
        gradients = [one.grad for group in self.param_groups for one in group["params"]]
        return super().step(closure) if torch.stack([one.isfinite().all() for one in gradients]).all().item() else None


def test_an_optimizer_that_reads_values_is_captured_and_its_updates_follow_the_read():
    def build() -> TrainingStep:
        model = blocks()
        step = step_of(model, read_value=lambda _: 1)
        return replace(step, optimizers=(Scaled(model.parameters(), lr=0.1, momentum=0.9, foreach=True),))

    step = captured(build).iteration
    (read,) = [op for op in step.computations if op.is_host_read]
    place = [op.name for op in step.ops].index(read.name)
    behind = _ancestors(step)
    assert place < len(step.ops) - 1
    assert all(read.name in behind[op.name] for op in step.ops[place + 1 :])
