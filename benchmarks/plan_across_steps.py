"""What running parameter gathers into the next step is worth: steps closed and open, on two gloo ranks.

    python benchmarks/plan_across_steps.py [--rounds 21] [--link "1 Gbit/s"] [--json]

Arms of one graph, `examples/plan_across_steps.py` (several steps of two micro-batches, a sharded optimizer):

    program   as written: every collective awaited where it stands
    closed    our plan, each step by itself: no computation of a step before every gather of the one before
    in turn   our plan of all steps, no computation of a micro-batch before the last product of the one before
    open      our plan of all steps: gathers run into the next forward, micro-batches run together

`open` over `closed` is what the steps' overlap is worth, `open` over `in turn` what micro-batches launched together
are, everything else alike. Arms run in shuffled order in every
round; times are the slowest rank's; equal outputs are checked. Where time goes is read off rank 0's spans of the last
round:

    waits          a computation stood still for what it reads
    could compute  of it at most: the time of later computations that had all that they read when it began
    preempted      nothing was computed though the next one could have been: other processes, this rank's own streams
    tail           collectives after the last computation

`work of a collective` is the processor time of this rank per second of collectives alone: no order hides that on a core
that computes as well.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from gloo_ranks import Everyone, join, leave, spawn, times_alone
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.engines.fx.apply import apply_rewrites
from lagom_overlap.engines.fx.commands import ArmRuns
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import load_program
from lagom_overlap.engines.fx.program_session import PlannedSession, relative_error
from lagom_overlap.engines.fx.streams import StreamedStep
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.registry import make_planner
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.times import ModelTimes, NamedTimes
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.timeline import SpanKind
from lagom_overlap.tuners.verdict import compared
from lagom_overlap.workload import CommOp, Gemm, Iteration
from lagom_overlap.workload.rewrite.steps import Reorder, Rewrite
from lagom_overlap.workload.rewrite.tables import RewriteTable, rewrite_of, table_of

NUM_RANKS, REPEATS = 2, 7
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
C10D = torch.ops._c10d_functional


def closed_steps(iteration: Iteration, gathers_per_step: int) -> Iteration:
    """The iteration in which every operator of a step also waits for the gathers of the step before."""
    ops, open_gathers, before = [], [], ()
    for op in iteration.ops:
        ops.append(replace(op, deps=tuple(dict.fromkeys((*op.deps, *before)))))
        if isinstance(op, CommOp) and op.collective.kind is CollectiveKind.ALL_GATHER:
            open_gathers.append(op.name)
            if len(open_gathers) == gathers_per_step:
                before, open_gathers = tuple(open_gathers), []
    return replace(iteration, ops=tuple(ops))


def batches_in_turn(iteration: Iteration, num_batches: int) -> Iteration:
    """The iteration in which every product of a micro-batch also waits for the products of the one before."""
    products = [op.name for op in iteration.computations if isinstance(op.work, Gemm)]
    per_batch = len(products) // num_batches
    place = {name: number for number, name in enumerate(products)}
    ops = []
    for op in iteration.ops:
        batch = place.get(op.name, 0) // per_batch
        before = products[(batch - 1) * per_batch : batch * per_batch] if batch else []
        ops.append(replace(op, deps=tuple(dict.fromkeys((*op.deps, *before)))))
    return replace(iteration, ops=tuple(ops))


def plan_of(problem: PlanProblem, real: Iteration) -> tuple[list[Rewrite], float]:
    """Our plan, with the problem's additional waits, and its predicted seconds."""
    plan = make_planner("ours", {"split": False}).plan(problem)
    known = {op.name: op.deps for op in real.ops}
    extra = tuple((op.name, dep) for op in problem.iteration.ops for dep in op.deps if dep not in known[op.name])
    rewrites = [
        replace(step, waits=(*step.waits, *extra)) if isinstance(step, Reorder) else step for step in plan.rewrites
    ]
    return rewrites, predict(problem, plan.iteration).overlap.makespan_s


def waits_of(run: ArmRuns, iteration: Iteration) -> dict[str, Any]:
    """Where the last round's computation stood still."""
    ends = {span.name: span.end_s for span in run.spans}
    deps = {op.name: op.deps for op in iteration.ops}
    computed = sorted((span for span in run.spans if span.kind is SpanKind.COMP), key=lambda span: span.start_s)
    waits_s, could_s, preempted_s, at = 0.0, 0.0, 0.0, 0.0
    for number, span in enumerate(computed):
        ready = [max((ends[dep] for dep in deps[later.name]), default=0.0) for later in computed[number:]]
        waited_until = min(max(at, ready[0]), span.start_s)
        waits_s += waited_until - at
        others = zip(computed[number:], ready, strict=True)
        could_s += min(waited_until - at, sum(later.duration_s for later, when in others if when <= at))
        preempted_s += span.start_s - waited_until
        at = span.end_s
    return {
        "waits_s": waits_s,
        "could_compute_s": could_s,
        "preempted_s": preempted_s,
        "tail_s": max(span.end_s for span in run.spans) - at,
    }


def work_of_collectives(iteration: Iteration) -> float:
    """Processor seconds of this rank per second of the step's collectives alone."""
    group = dist.group.WORLD.group_name
    spent, passed = 0.0, 0.0
    for op in iteration.comms * REPEATS:
        elements = op.collective.num_bytes // 4
        whole, shard = torch.zeros(elements), torch.zeros(elements // NUM_RANKS)
        dist.barrier()
        start, used = perf_counter(), process_time()
        if op.collective.kind is CollectiveKind.ALL_GATHER:
            C10D.wait_tensor(C10D.all_gather_into_tensor(shard, NUM_RANKS, group))
        else:
            C10D.wait_tensor(C10D.reduce_scatter_tensor(whole, "sum", NUM_RANKS, group))
        spent, passed = spent + process_time() - used, passed + perf_counter() - start
    return spent / passed


def rank_main(arguments: argparse.Namespace) -> None:
    """One rank's life; rank 0 plans and prints."""
    join(arguments.rank, NUM_RANKS)
    program = load_program(arguments.program, "step")
    captured = program.captured("steps")
    real, groups = captured.iteration, ProcessGroups()
    seconds = times_alone(captured, program.inputs, REPEATS)
    gathers = sum(op.collective.kind is CollectiveKind.ALL_GATHER for op in real.comms) // arguments.steps
    store = distributed_c10d._get_default_store()
    predicted: dict[str, float] = {}
    if arguments.rank == 0:
        cluster = replace(load_preset("a40_nvlink"), num_nodes=1, gpus_per_node=NUM_RANKS)
        times = NamedTimes(seconds, real, ModelTimes(ContentionModel(cluster, load_profile("plausible"))))
        problem = PlanProblem(
            iteration=real,
            cluster=cluster,
            times=times,
            groups=captured.groups,
            prefetch=None,
            budget_s=arguments.budget,
        )
        predicted["program"] = predict(problem, replace(captured.capture.issued, is_dataflow=True)).overlap.makespan_s
        in_turn = batches_in_turn(real, arguments.steps * arguments.batches)
        for arm, iteration in (("closed", closed_steps(real, gathers)), ("in turn", in_turn), ("open", real)):
            rewrites, predicted[arm] = plan_of(replace(problem, iteration=iteration), real)
            store.set(arm, msgspec.json.encode([table_of(step) for step in rewrites]).decode())
    steps = {"program": StreamedStep(captured.graph_module, groups, as_written=True)}
    for arm in ("closed", "in turn", "open"):
        tables = msgspec.json.decode(store.get(arm), type=list[RewriteTable])
        planned = apply_rewrites(captured.graph_module, real, [rewrite_of(table) for table in tables], groups)
        steps[arm] = StreamedStep(planned, groups)
    outputs = {arm: step.run(program.inputs).outputs for arm, step in steps.items()}
    errors = {
        arm: max(relative_error(*pair) for pair in zip(outputs["program"], found, strict=True))
        for arm, found in outputs.items()
    }
    runs = PlannedSession(Everyone()).rounds(steps, program.inputs, arguments.rounds, seed=0)
    work = work_of_collectives(real)
    for step in steps.values():
        step.close()
    if arguments.rank == 0:
        record = _record(runs, predicted, errors, real) | {"work_of_a_collective": work}
        print(json.dumps(record, indent=1) if arguments.json else _shown(record))
    leave()


def _record(
    runs: Mapping[str, ArmRuns], predicted: Mapping[str, float], errors: Mapping[str, float], iteration: Iteration
) -> dict[str, Any]:
    pairs = {"closed over program": ("program", "closed"), "open over program": ("program", "open")}
    pairs |= {"open over closed": ("closed", "open"), "open over in turn": ("in turn", "open")}
    return {
        "arms": {
            arm: {
                "predicted_s": predicted[arm],
                "measured_s": median(run.makespan_s),
                "exposed_s": median(run.exposed_s),
                "max_error": errors[arm],
                **waits_of(run, iteration),
            }
            for arm, run in runs.items()
        },
        "ratios": {name: str(compared(runs[a].makespan_s, runs[b].makespan_s)) for name, (a, b) in pairs.items()},
        "predicted": {name: predicted[a] / predicted[b] for name, (a, b) in pairs.items()},
        "load": os.getloadavg()[0],
        "machine": describe_machine(),
        "versions": package_versions(),
        "date": utc_now(),
    }


def _shown(record: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        "| arm | predicted | measured | exposed | waits | could compute | preempted | tail | outputs |",
        "|---" * 9 + "|",
    ]
    keys = ("predicted_s", "measured_s", "exposed_s", "waits_s", "could_compute_s", "preempted_s", "tail_s")
    for arm, row in record["arms"].items():
        cells = [f"{1e3 * row[key]:.0f} ms" for key in keys]
        equal = "equal bit for bit" if not row["max_error"] else f"within {row['max_error']:.0e}"
        lines.append("| " + " | ".join([arm, *cells, equal]) + " |")
    predicted = record["predicted"]
    lines += ["", *(f"- {name}: {text}; predicted {predicted[name]:.3f}" for name, text in record["ratios"].items())]
    lines.append(f"- work of a collective: {record['work_of_a_collective']:.2f} of its time is this rank's processor")
    lines.append(f"- load {record['load']:.1f}, {record['date']}, {record['machine']}, {record['versions']}")
    return "\n".join(lines)


def main() -> int:
    """Parses; spawns the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=EXAMPLES / "plan_across_steps.py")
    parser.add_argument("--steps", type=int, default=3, help="steps that the program holds")
    parser.add_argument("--batches", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--link", default="1 Gbit/s")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of our planner, per plan")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None:
        return spawn(NUM_RANKS, arguments.link)
    rank_main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
