"""A plan in words; the same in the page and in the terminal."""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.simulated import Simulation
from lagom_overlap.results.plan import PlanExecution, PlannedIteration, PlanResult
from lagom_overlap.results.plan_decisions import PlanDecision
from lagom_overlap.units import format_percent, format_seconds


def summary(result: PlanResult) -> str:
    """What was predicted or measured, what the plan decides, and the caveats."""
    decided = decisions_headline(result.decisions)
    settings = [f"{framework}: {line}" for framework, lines in result.advice.items() for line in lines]
    said = settings or [f"{decided[:1].upper()}{decided[1:]}."]
    return "\n".join((f"{result.job}: {headline(result)}", *said, *result.notes))


_CARRIERS: Final = {
    Carrier.FSDP2: "applied as settings of FSDP2",
    Carrier.MEGATRON: "applied as switches of Megatron-LM",
    Carrier.PROGRAM: "run as a rewritten program",
    Carrier.INDUCTOR: "applied as a pass of torch.compile",
}


def solved_text(result: PlanResult) -> str:
    """How long planning took; nothing was planned where a file was applied."""
    return f"planned in {format_seconds(result.solve_s)}" if result.solve_s else "read from a file"


def carrier_text(result: PlanResult) -> str:
    """Who runs the plan."""
    if result.carrier is None:
        return "nothing that runs today can apply it"
    return _CARRIERS[result.carrier]


def command_lines(result: PlanResult) -> tuple[str, ...]:
    """What to type or paste to use the plan; empty where nothing can apply it, or it changes nothing."""
    if result.megatron is not None:
        return (" ".join(result.megatron.arguments),) if result.megatron.arguments else ()
    match result.carrier:
        case Carrier.FSDP2:
            if result.fsdp2 is None or result.fsdp2.settings is None:
                return ()
            return (
                "# in the script, behind fully_shard, before the first forward",
                "from pathlib import Path",
                "from lagom_overlap import apply_fsdp2",
                'apply_fsdp2(model, Path("plan.toml"))',
            )
        case Carrier.PROGRAM:
            return ("lagom plan JOB.toml --execute    # JOB.toml: the job file of this plan",)
        case _:
            return ()


def headline(result: PlanResult) -> str:
    """One sentence: what was measured, where it ran; the step before and after, how that is known, and the bound."""
    times = result.iteration_s
    gain = times.before / times.after
    unpriced = " (contention left out)" if result.simulation != Simulation.ALONE else ""
    run, measured = result.execution, ""
    if run is not None:
        ratio = run.speedup
        measured = (
            f"measured {ratio.median:.3f}x (quartiles {ratio.q25:.3f} to {ratio.q75:.3f}) on real ranks, "
            f"by the sequential test the plan is {run.judgement.sentence()}; "
        )
    return (
        f"{result.planner}: {measured}{format_seconds(times.before)} -> {format_seconds(times.after)} ({gain:.3f}x) "
        f"against {result.baseline}, simulated {result.simulation}{_bound_text(times, unpriced)}"
    )


def _bound_text(times: PlannedIteration, unpriced: str) -> str:
    """How far the step after the plan is from the bound; "" where there is none."""
    if times.lower_bound is None:
        return ", whole iteration"
    over = times.after / times.lower_bound - 1 if times.lower_bound else 0.0
    far, bound = format_percent(abs(over), 2), format_seconds(times.lower_bound)
    if over >= 0:
        return f"; at most {far} longer than any order must take, {bound}{unpriced}"
    return f"; {far} shorter than any order of the step before must take, {bound}{unpriced}"


def run_rows(run: PlanExecution) -> list[tuple[str, ...]]:
    """What was measured before and after, and what was predicted; of a framework's step only its length is known."""
    return [
        (
            name,
            *(format_seconds(measured[arm].median) for arm in ("before", "after")),
            *(format_seconds(value) for value in (predicted.before, predicted.after)),
        )
        for name, measured, predicted in (
            ("iteration", run.iteration_s, run.predicted_iteration_s),
            ("exposed", run.exposed_comm_s, run.predicted_exposed_comm_s),
        )
        if measured
    ]


def decision_text(decision: PlanDecision) -> str:
    """What is done with a collective, in words."""
    said = []
    if decision.substitution is not None:
        said.append(f"as {decision.substitution.replace('_', ' ')}")
    if decision.groups is not None:
        mesh = " x ".join(map(str, decision.groups.mesh))
        said.append(f"over {mesh} ranks, axes {', '.join(map(str, decision.groups.order))}")
    if decision.num_chunks > 1:
        along = "that are summed" if decision.split_dim is None else f"along {decision.split_dim}"
        said.append(f"in {decision.num_chunks} pieces {along}")
    if decision.fused_with:
        said.append(f"fused with {len(decision.fused_with)} more")
    said.append(
        "a computation"
        if decision.is_computation
        else f"{decision.prefetch} computation{'s' if decision.prefetch != 1 else ''} ahead"
    )
    return "; ".join(said)


def decisions_headline(decisions: Sequence[PlanDecision]) -> str:
    """How many collectives are changed, and how many computations are split on their own."""
    num_comps = sum(decision.is_computation for decision in decisions)
    alone = f", {num_comps} computation{'s'[: num_comps > 1]} cut alone" if num_comps else ""
    return f"{len(decisions) - num_comps} collectives changed{alone}"
