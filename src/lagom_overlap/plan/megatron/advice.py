"""Megatron's switches for a scale, and what each of them is predicted to bring on a given step.

Scales and switches as the notes recommend them (small up to 64 GPUs, medium up to 256, large beyond), written with the
switches that exist. A recommendation is not believed: `advise` plans the step with and without each switch and says
what changes; under a contention model also what registered buffers give back (`userbuffers`). What a plan of one stage
cannot show, interleaving and the overlap of transfers, is `pipeline_advice`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import JobError
from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.plan.megatron.flags import MegatronFlags, TensorOverlap
from lagom_overlap.plan.megatron.planner import Megatron
from lagom_overlap.plan.megatron.userbuffers import contended_s
from lagom_overlap.plan.predict import predict

SMALL_GPUS, MEDIUM_GPUS = 64, 256


class Scale(StrEnum):
    """How large a job is."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


def scale_of(num_gpus: int) -> Scale:
    """The notes' classes."""
    if num_gpus <= SMALL_GPUS:
        return Scale.SMALL
    return Scale.MEDIUM if num_gpus <= MEDIUM_GPUS else Scale.LARGE


def recommended(scale: Scale, *, has_experts: bool = False, fully_sharded: bool = False) -> MegatronFlags:
    """The notes' switches: gradients and parameters always, bulk from medium on, pieces when large, experts.

    `fully_sharded` is Megatron-FSDP with registered buffers, which forces its double buffer.
    """
    overlap = {Scale.SMALL: TensorOverlap.NONE, Scale.MEDIUM: TensorOverlap.BULK, Scale.LARGE: TensorOverlap.PIPELINED}
    flags = MegatronFlags(
        tensor_overlap=overlap[scale],
        megatron_fsdp=fully_sharded,
        double_buffer=fully_sharded,
        nccl_userbuffers=fully_sharded,
    )
    return replace(flags, overlap_experts=True, delay_weight_grad=True) if has_experts else flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One switch: the predicted step with all recommended switches but this one, and with this one too (s)."""

    switch: str
    without_s: float
    with_s: float

    @property
    def gain(self) -> float:
        """How much longer the step is without it, relative to the step with it."""
        return self.without_s / self.with_s - 1.0


def advise(problem: PlanProblem, flags: MegatronFlags, model: ContentionModel | None = None) -> tuple[Advice, ...]:
    """The effect of every switch that is on, largest first; switches that the step has no use for are left out.

    With a contention model computations and collectives slow each other; without one they do not.
    """
    with_s = step_s(problem, flags, model)
    found: list[Advice] = []
    for switch, without in _one_off(flags):
        try:
            without_s = step_s(problem, without, model)
        except JobError:
            continue
        if without_s != with_s:
            found.append(Advice(switch=switch, without_s=without_s, with_s=with_s))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def _one_off(flags: MegatronFlags) -> Sequence[tuple[str, MegatronFlags]]:
    """The same switches with one of them off."""
    found: list[tuple[str, MegatronFlags]] = []
    if flags.overlap_grad_reduce:
        found.append(("--overlap-grad-reduce", replace(flags, overlap_grad_reduce=False)))
    if flags.overlap_param_gather:
        found.append(("--overlap-param-gather", replace(flags, overlap_param_gather=False)))
    if flags.tensor_overlap is TensorOverlap.PIPELINED:
        bulk = replace(flags, tensor_overlap=TensorOverlap.BULK, rs_dgrad=False)
        found.append(("--tp-comm-overlap", bulk))
    if flags.tensor_overlap is TensorOverlap.BULK:
        found.append(("bulk overlap of tensor parallelism", replace(flags, tensor_overlap=TensorOverlap.NONE)))
    if flags.overlap_experts:
        found.append(("--overlap-moe-expert-parallel-comm", replace(flags, overlap_experts=False)))
    if flags.delay_weight_grad:
        found.append(("--delay-wgrad-compute", replace(flags, delay_weight_grad=False)))
    if flags.nccl_userbuffers:
        found.append(("--nccl-ub", replace(flags, nccl_userbuffers=False)))
    return found


def step_s(problem: PlanProblem, flags: MegatronFlags, model: ContentionModel | None = None) -> float:
    """The predicted step (s) that the switches mean, under a contention model if there is one."""
    if model is not None:
        return contended_s(problem, flags, model)
    plan = Megatron(flags).plan(problem)
    return predict(problem, plan.iteration).overlap.makespan_s


def without_overlap_s(problem: PlanProblem, flags: MegatronFlags, model: ContentionModel | None = None) -> float:
    """The predicted step with the same buckets and every switch off: each collective is waited for."""
    off = MegatronFlags(
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        tensor_overlap=TensorOverlap.NONE,
        bucket_elements=flags.bucket_elements,
    )
    return step_s(problem, off, model)
