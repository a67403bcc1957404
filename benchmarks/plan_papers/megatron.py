"""Megatron's notes on communication overlap: hidden shares, and their impossible table.

What each switch brings is `benchmarks/recipe_advice.py`'s, on whole iterations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import OpTimes, PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.megatron.mechanisms import MegatronFlags, TensorOverlap
from lagom_overlap.planners.megatron.planner import Megatron, MegatronRole, Roles
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import Op
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout
from plan_papers.grid import Grid
from plan_papers.judged import table
from plan_papers.notes_table import LLAMA_70B

SHARE_POINTS = 0.05
"""Slack of the notes' ranges of hidden shares."""
NOTES_HIDDEN = {
    MegatronRole.GRADIENT: (0.8, 0.9),
    MegatronRole.PARAMETER: (0.7, 0.8),
    MegatronRole.ACTIVATION: (0.6, 0.7),
}


def megatron(work: SearchBudget) -> Iterator[str]:
    """The notes' shares on their own model, and their impossible table."""
    cluster = load_preset("h100_dgx", 8)
    model = replace(load_model("llama-3-70b"), num_layers=20)
    layout = ParallelLayout(tensor=4, data=4, zero_stage=1, sequence_parallel=True, micro_batch=1, global_batch=4 * 8)
    problem = Grid(model, cluster, layout, work=work).problem()
    flags = MegatronFlags(tensor_overlap=TensorOverlap.PIPELINED)
    yield "## Megatron: hidden shares on a stage of LLaMA 3 70B, 64 H100, TP4 PP4 DP4, 8 micro-batches"
    yield ""
    rows = []
    for role, (low, high) in NOTES_HIDDEN.items():
        hidden, seconds = hidden_share(problem, flags, role)
        inside = low - SHARE_POINTS <= hidden <= high + SHARE_POINTS
        rows.append(
            [
                role,
                f"{seconds * 1e3:.0f}",
                f"{low:.0%} to {high:.0%}",
                f"{hidden:.0%}",
                "reproduced" if inside else "direction" if hidden >= (low + high) / 4 else "not",
            ]
        )
    yield from table(("communication", "alone, ms", "notes", "here", "verdict"), rows)
    yield "Refused: the notes' table of a step of 10.61 s; none is shorter than " + (
        f"{LLAMA_70B.least_s(links_run_together=True):.2f} s (one stream of communication: "
        f"{LLAMA_70B.least_s(links_run_together=False):.2f} s)."
    )


def hidden_share(problem: PlanProblem, flags: MegatronFlags, role: MegatronRole) -> tuple[float, float]:
    """The share of a role's communication that the step does not show, and its time alone (s)."""
    plan = Megatron(flags).plan(problem)
    index = StepIndex(plan.iteration)
    of = Roles.find(StepIndex(problem.iteration)).of
    names = {op.name for op in index.iteration.comms if of.get(_whole(op.name, of)) is role}
    alone = sum(problem.times.seconds(op) for op in index.iteration.comms if op.name in names)
    full = predict(problem, plan.iteration).overlap.makespan_s
    free = predict(replace(problem, times=_Free(problem.times, names)), plan.iteration).overlap.makespan_s
    return 1 - (full - free) / alone, alone


def _whole(name: str, known: dict[str, MegatronRole]) -> str:
    return next((name[:end] for end in range(len(name), 0, -1) if name[:end] in known), name)


@dataclass(frozen=True, slots=True)
class _Free:
    """The same times with some collectives for nothing."""

    times: OpTimes
    names: set[str]

    def seconds(self, op: Op) -> float:
        return 1e-9 if op.name in self.names else self.times.seconds(op)
