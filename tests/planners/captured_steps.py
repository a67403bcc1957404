"""Captured FSDP2 steps large enough to have something to hide, and their planning problems on eight A40."""

from dataclasses import replace
from functools import cache

from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.named import decoder_step
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.framework_waits import framework_of
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel

MODEL = TransformerModel(
    name="five-layers",
    num_layers=5,
    hidden=2048,
    ffn=8192,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    vocab=4096,
    gated=False,
)
RANKS = 8


@cache
def fsdp2_capture(prefetched: int = 0) -> IssuedStep:
    """The step on eight ranks; each layer prefetches this many of the next explicitly, 0 leaves FSDP2's default."""

    def step() -> TrainingStep:
        made = decoder_step(MODEL, Degrees(fsdp=RANKS), micro_batch=1, seq_len=2048)
        layers = list(made.model.layers.values())
        for number, layer in enumerate(layers):
            if prefetched:
                layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetched])
        return made

    return capture_step(step, num_ranks=RANKS, rank=0)


def problem_of(capture: IssuedStep, budget_s: float = 2.0) -> PlanProblem:
    """The planning problem of a capture under the cost model."""
    cluster = replace(load_preset("a40_nvlink"), gpus_per_node=RANKS, num_nodes=1)
    placed = capture.placed_on(cluster)
    return PlanProblem(
        iteration=placed.iteration,
        cluster=cluster,
        times=ModelTimes(ContentionModel(cluster, load_profile("plausible"))),
        groups=placed.groups,
        budget_s=budget_s,
        issued=replace(placed.issued, is_dataflow=True),
        framework=framework_of(placed.iteration),
    )
