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
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import Deadline
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
_RESERVE: Final = 5.0
"""Simulations that take as long as a trial and what comes after the last one: the plan, its memory, its bound."""
_SIMULATION_STEPS: Final = 150
"""Per operator, of the step that switches mean and its simulation: what `OPERATOR_STEPS` is for a graph."""


class Trials:
    """One step under settings of Megatron's switches, each simulated once, within the problem's budget.

    With a contention model computations and collectives slow each other; without one they do not.
    """

    def __init__(
        self, problem: PlanProblem, price: FrameworkModel | None = None, deadline: Deadline | None = None
    ) -> None:
        self.problem, self.price = problem, price
        self._deadline = deadline or problem.deadline()
        self._known: dict[MegatronFlags, float] = {}
        self._longest_s = 0.0
        self.was_cut = False

    def may_try(self, flags: MegatronFlags) -> bool:
        """Whether the step of these switches is known, or there is budget to simulate it; `was_cut` notes a no."""
        if _of_one_step(flags) in self._known or self._deadline.left_s > _RESERVE * self._longest_s:
            return True
        self.was_cut = True
        return False

    def step_s(self, flags: MegatronFlags) -> float:
        """The predicted step (s) that the switches mean.

        Raises:
            JobError: if a switch does not suit the step.
        """
        key = _of_one_step(flags)
        if key not in self._known:
            begin_s = self._deadline.elapsed_s
            self._deadline.spend(_SIMULATION_STEPS * len(self.problem.iteration.ops))
            if self.price is not None:
                found = contended_s(self.problem, flags, self.price)
            else:
                found = predict(self.problem, Megatron(flags).step(self.problem)).overlap.makespan_s
            self._known[key] = found
            self._longest_s = max(self._longest_s, self._deadline.elapsed_s - begin_s)
        return self._known[key]


def _of_one_step(flags: MegatronFlags) -> MegatronFlags:
    """Without what is of another step than the one that is simulated."""
    return replace(
        flags,
        sequence_parallel=False,
        virtual_layers=None,
        micro_batch_group=None,
        interleaved=False,
        overlap_p2p=False,
    )


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


def advise(trials: Trials, flags: MegatronFlags) -> tuple[SwitchAdvice, ...]:
    """The effect of every switch that is on, largest first; switches that the step has no use for are left out.

    So are those that the budget left untried.
    """
    with_s = trials.step_s(flags)
    found: list[SwitchAdvice] = []
    for switch, without in _one_off(flags):
        if not trials.may_try(without):
            continue
        try:
            without_s = trials.step_s(without)
        except JobError:
            continue
        if without_s != with_s:
            found.append(SwitchAdvice(switch=switch, without_s=without_s, with_s=with_s))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def worthwhile(trials: Trials, wanted: MegatronFlags) -> tuple[MegatronFlags, tuple[SwitchAdvice, ...]]:
    """The wanted switches without those that do not pay, and what each of those would bring, worst first.

    The switch whose absence lengthens the step least is dropped, and again, until each that is left gains `MIN_GAIN`
    or the budget ends; then the switches that were not tried stay.
    """
    start = wanted
    if wanted.tensor_overlap is TensorOverlap.NONE:
        start = replace(wanted, tensor_overlap=TensorOverlap.BULK)  # Megatron's default: no switch turns it on
    flags, best_s, dropped = start, trials.step_s(start), []
    while found := _shortest_without_one(trials, flags, best_s):
        switch, flags, best_s = found
        dropped.append(switch)
    costs = [
        SwitchAdvice(switch=switch, without_s=best_s, with_s=trials.step_s(again))
        for switch in dropped
        if trials.may_try(again := _with(switch, flags, start))
    ]
    return flags, tuple(sorted(costs, key=lambda advice: advice.gain))


def _shortest_without_one(
    trials: Trials, flags: MegatronFlags, best_s: float
) -> tuple[str, MegatronFlags, float] | None:
    """(switch, the others, their step) of the switch to drop first; None if the step needs each of them."""
    tried = [
        (trials.step_s(without), switch, without)
        for switch, without in _one_off(flags)
        if without.tensor_overlap is not TensorOverlap.NONE
        and (without.overlap_grad_reduce or not without.overlap_param_gather)  # Megatron refuses one without the other
        and trials.may_try(without)
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
        case _Switch.DELAY | _Switch.EXPERTS_AND_DELAY:
            return replace(flags, overlap_experts=True, delay_weight_grad=True)
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
    EXPERTS_AND_DELAY = f"{EXPERTS} {DELAY}"
    REGISTERED = "--use-nccl-ub"


def _one_off(flags: MegatronFlags) -> Sequence[tuple[str, MegatronFlags]]:
    """The same switches with one of them off, and with it what needs it: its name then has both."""
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
        switch = _Switch.EXPERTS_AND_DELAY if flags.delay_weight_grad else _Switch.EXPERTS
        found.append((switch, replace(flags, overlap_experts=False, delay_weight_grad=False)))
    if flags.delay_weight_grad:
        found.append((_Switch.DELAY, replace(flags, delay_weight_grad=False)))
    if flags.bucket_elements is not None:
        found.append((f"--ddp-bucket-size {flags.bucket_elements}", replace(flags, bucket_elements=None)))
    if flags.nccl_userbuffers:
        found.append((_Switch.REGISTERED, replace(flags, nccl_userbuffers=False, double_buffer=False)))
    return found


def best_bucket(trials: Trials, flags: MegatronFlags) -> tuple[MegatronFlags, tuple[SwitchAdvice, ...]]:
    """The flags with the bucket size that gains most over Megatron's rule, and what the sizes not advised would bring.

    Gradients that are reduced after backward have no use for other buckets.
    """
    gradients = StepIndex(trials.problem.iteration).gradient_comms
    if not flags.overlap_grad_reduce or not gradients:
        return flags, ()
    rule = default_bucket_elements(max(op.collective.num_ranks for op in gradients))
    own_s = trials.step_s(flags)
    tried = []
    for factor in _BUCKET_FACTORS:
        sized = replace(flags, bucket_elements=int(rule * factor))
        if trials.may_try(sized):
            tried.append((trials.step_s(sized), sized))
    if not tried:
        return flags, ()
    best_s, best = min(tried, key=lambda one: one[0])
    if own_s > best_s * (1.0 + MIN_GAIN):
        return best, ()
    switch = f"--ddp-bucket-size {best.bucket_elements}"
    return flags, (SwitchAdvice(switch=switch, without_s=own_s, with_s=best_s),)


def without_overlap_s(trials: Trials, flags: MegatronFlags) -> float:
    """The predicted step with the same buckets and every switch off: each collective is waited for."""
    off = MegatronFlags(
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        tensor_overlap=TensorOverlap.NONE,
        bucket_elements=flags.bucket_elements,
    )
    return trials.step_s(off)
