"""Megatron's switches for a scale, and what each of them is predicted to bring on a given step.

Scales and switches as the notes recommend them (small up to 64 GPUs, medium up to 256, large beyond), written with the
switches that exist. A recommendation is not believed: `worthwhile` drops every switch without which the step is
predicted to be less than `MIN_GAIN` longer, and never turns off what Megatron overlaps by default; `best_bucket` tries
other sizes of buckets. `advise` plans the step with
and without each switch and says what changes; under a contention model also what registered buffers give back
(`userbuffers`). What a plan of one stage cannot show (interleaving, overlapped transfers) is `pipeline_advice`'s.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.effects import MIN_GAIN, SwitchAdvice
from lagom_overlap.planners.megatron.flags import MegatronFlags, TensorOverlap, default_bucket_elements
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.megatron.userbuffers import contended_s
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.sim.framework import FrameworkModel

SMALL_GPUS, MEDIUM_GPUS = 64, 256
_BUCKET_FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Of Megatron's rule: smaller buckets start earlier, larger ones waste less latency."""


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


def advise(problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel | None = None) -> tuple[SwitchAdvice, ...]:
    """The effect of every switch that is on, largest first; switches that the step has no use for are left out.

    With a contention model computations and collectives slow each other; without one they do not.
    """
    with_s = step_s(problem, flags, price)
    found: list[SwitchAdvice] = []
    for switch, without in _one_off(flags):
        try:
            without_s = step_s(problem, without, price)
        except JobError:
            continue
        if without_s != with_s:
            found.append(SwitchAdvice(switch=switch, without_s=without_s, with_s=with_s))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def worthwhile(
    problem: PlanProblem, wanted: MegatronFlags, price: FrameworkModel | None = None
) -> tuple[MegatronFlags, tuple[SwitchAdvice, ...]]:
    """The wanted switches without those that do not pay, and what each of those would bring, worst first.

    The switch whose absence lengthens the step least is dropped, and again, until each that is left gains `MIN_GAIN`.
    """
    start = wanted
    if wanted.tensor_overlap is TensorOverlap.NONE:
        start = replace(wanted, tensor_overlap=TensorOverlap.BULK)  # Megatron's default: no switch turns it on
    flags, best_s, dropped = start, step_s(problem, start, price), []
    while found := _shortest_without_one(problem, flags, price, best_s):
        switch, flags, best_s = found
        dropped.append(switch)
    costs = [
        SwitchAdvice(switch=switch, without_s=best_s, with_s=step_s(problem, _with(switch, flags, start), price))
        for switch in dropped
    ]
    return flags, tuple(sorted(costs, key=lambda advice: advice.gain))


def _shortest_without_one(
    problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel | None, best_s: float
) -> tuple[str, MegatronFlags, float] | None:
    """(switch, the others, their step) of the switch to drop first; None if the step needs each of them."""
    tried = [
        (step_s(problem, without, price), switch, without)
        for switch, without in _one_off(flags)
        if without.tensor_overlap is not TensorOverlap.NONE
        and (without.overlap_grad_reduce or not without.overlap_param_gather)  # Megatron refuses one without the other
    ]
    found = min(tried, key=lambda one: one[0], default=None)
    return None if found is None or found[0] > best_s * (1.0 + MIN_GAIN) else (found[1], found[2], found[0])


def _with(switch: str, flags: MegatronFlags, start: MegatronFlags) -> MegatronFlags:
    """The flags with a switch that was dropped from `start`, and with what it needs."""
    match switch:
        case _Switch.GRADIENTS:
            return replace(flags, overlap_grad_reduce=True)
        case _Switch.PARAMETERS:
            return replace(flags, overlap_grad_reduce=True, overlap_param_gather=True)
        case _Switch.USERBUFFERS_OF_TENSOR:
            return replace(flags, tensor_overlap=TensorOverlap.PIPELINED, rs_dgrad=start.rs_dgrad)
        case _Switch.EXPERTS:
            return replace(flags, overlap_experts=True)
        case _Switch.DELAY:
            return replace(flags, delay_weight_grad=True)
        case _:
            return replace(flags, megatron_fsdp=True, double_buffer=True, nccl_userbuffers=True)


class _Switch(StrEnum):
    """The switches that are advised one by one."""

    GRADIENTS = "--overlap-grad-reduce"
    PARAMETERS = "--overlap-param-gather"
    USERBUFFERS_OF_TENSOR = "--tp-comm-overlap"
    BULK = "bulk overlap of tensor parallelism (Megatron's default)"
    EXPERTS = "--overlap-moe-expert-parallel-comm"
    DELAY = "--delay-wgrad-compute"
    REGISTERED = "--nccl-ub"


def _one_off(flags: MegatronFlags) -> Sequence[tuple[str, MegatronFlags]]:
    """The same switches with one of them off."""
    found: list[tuple[str, MegatronFlags]] = []
    if flags.overlap_grad_reduce:
        found.append((_Switch.GRADIENTS, replace(flags, overlap_grad_reduce=False)))
    if flags.overlap_param_gather:
        found.append((_Switch.PARAMETERS, replace(flags, overlap_param_gather=False)))
    if flags.tensor_overlap is TensorOverlap.PIPELINED:
        bulk = replace(flags, tensor_overlap=TensorOverlap.BULK, rs_dgrad=False)
        found.append((_Switch.USERBUFFERS_OF_TENSOR, bulk))
    if flags.tensor_overlap is TensorOverlap.BULK:
        found.append((_Switch.BULK, replace(flags, tensor_overlap=TensorOverlap.NONE)))
    if flags.overlap_experts:
        found.append((_Switch.EXPERTS, replace(flags, overlap_experts=False)))
    if flags.delay_weight_grad:
        found.append((_Switch.DELAY, replace(flags, delay_weight_grad=False)))
    if flags.bucket_elements is not None:
        found.append((f"--ddp-bucket-size {flags.bucket_elements}", replace(flags, bucket_elements=None)))
    if flags.nccl_userbuffers:
        found.append((_Switch.REGISTERED, replace(flags, nccl_userbuffers=False, double_buffer=False)))
    return found


def step_s(problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel | None = None) -> float:
    """The predicted step (s) that the switches mean, under a contention model if there is one."""
    if price is not None:
        return contended_s(problem, flags, price)
    plan = Megatron(flags).plan(problem)
    return predict(problem, plan.iteration).overlap.makespan_s


def best_bucket(
    problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel | None = None
) -> tuple[MegatronFlags, tuple[SwitchAdvice, ...]]:
    """The flags with the bucket size that gains most over Megatron's rule, and what the sizes not advised would bring.

    Gradients that are reduced after backward have no use for other buckets.
    """
    gradients = StepIndex(problem.iteration).gradient_comms
    if not flags.overlap_grad_reduce or not gradients:
        return flags, ()
    rule = default_bucket_elements(max(op.collective.num_ranks for op in gradients))
    own_s = step_s(problem, flags, price)
    tried = []
    for factor in _BUCKET_FACTORS:
        sized = replace(flags, bucket_elements=int(rule * factor))
        tried.append((step_s(problem, sized, price), sized))
    best_s, best = min(tried, key=lambda one: one[0])
    if own_s > best_s * (1.0 + MIN_GAIN):
        return best, ()
    switch = f"--ddp-bucket-size {best.bucket_elements}"
    return flags, (SwitchAdvice(switch=switch, without_s=own_s, with_s=best_s),)


def without_overlap_s(problem: PlanProblem, flags: MegatronFlags, price: FrameworkModel | None = None) -> float:
    """The predicted step with the same buckets and every switch off: each collective is waited for."""
    off = MegatronFlags(
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        tensor_overlap=TensorOverlap.NONE,
        bucket_elements=flags.bucket_elements,
    )
    return step_s(problem, off, price)
