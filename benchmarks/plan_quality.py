"""How near planners come to the lower bound on steps of 20,000 operators, per load of communication.

    python benchmarks/plan_quality.py --work 40
    python benchmarks/plan_quality.py --workloads fsdp,hybrid --loads 0.8,1.0 --planners ours,concerto --json

Steps are built from recorded captures (`plan_steps.py` says how; ../shared/data or $LAGOM_SHARED_DATA). The figure is
the makespan of in-order streams, by the one simulator that judges all planners, over the lower bound of the step before
any cut and without a prefetch limit. With --json: {"machine", "rows": [{"workload", "load", "planner", "num_ops",
"before", "after", "seconds", "cpu_s", "peak_groups", "num_cut", "notes"}]}.
"""

import argparse
import json
import os
import platform
import sys
from importlib import import_module
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import Planner, PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import check, lower_bound, task_graph
from lagom_overlap.planners.schedule.bounds import two_chain_bound
from lagom_overlap.workload.rewrite.steps import Split
from plan_steps import GROUPS, PARAMETER_BYTES, Strategy, build_step

LLAMA, OLMOE = "out_hf_llama3", "out_hf_olmoe"
WORKLOADS: dict[str, tuple[str, Strategy, int | None, float]] = {
    "tp": (LLAMA, Strategy(tp=True, microbatches=6), None, 0.1),
    "fsdp": (LLAMA, Strategy(fsdp=True, microbatches=6), None, 0.1),
    "fsdp, depth 3": (LLAMA, Strategy(fsdp=True, microbatches=6), 3, 0.1),
    "hybrid": (LLAMA, Strategy(fsdp=True, tp=True, microbatches=6), None, 0.1),
    "hybrid, depth 3": (LLAMA, Strategy(fsdp=True, tp=True, microbatches=6), 3, 0.1),
    "tp, dual batch": (LLAMA, Strategy(tp=True, microbatches=2, layers=90, in_turn=False), None, 0.0),
    "moe, dual batch": (OLMOE, Strategy(ep=True, microbatches=2, layers=54, in_turn=False), None, 0.0),
}
"""Name -> capture, strategy, prefetch depth, lognormal deviation of single times."""
PLANNERS = {
    "program_order": "lagom_overlap.planners.baselines:ProgramOrder",
    "ours": "lagom_overlap.planners.ours:Ours",
    "concerto": "lagom_overlap.planners.concerto.planner:from_options",
    "centauri": "lagom_overlap.planners.centauri.planner:from_options",
    "megatron": "lagom_overlap.planners.megatron.planner:from_options",
}


def planner_of(name: str) -> Planner:
    """A new planner of that name."""
    if name == "ours":  # without contention, by which it chooses among the other planners' plans
        return Ours(starts=False)
    module, _, factory = PLANNERS[name].partition(":")
    made: Planner = getattr(import_module(module), factory)()
    return made


def row_of(workload: str, load: float, planner: str, work: SearchBudget) -> dict[str, Any]:
    """One planner on one step."""
    capture, strategy, depth, jitter = WORKLOADS[workload]
    step, times = build_step(capture, strategy, load, jitter)
    problem = PlanProblem(
        iteration=step,
        cluster=load_preset("h100_dgx", 2),
        times=times,
        groups=GROUPS,
        prefetch=depth,
        work=work,
    )
    graph = task_graph(problem)
    bound = lower_bound(graph)
    before = predict(problem)
    begin, cpu = perf_counter(), process_time()
    plan = planner_of(planner).plan(problem)
    taken, cpu = perf_counter() - begin, process_time() - cpu
    after = predict(problem, plan.iteration)
    check(after.graph, after.schedule)
    return {
        "workload": workload,
        "load": load,
        "planner": planner,
        "num_ops": len(step.ops),
        "before": round(before.schedule.makespan / bound, 4),
        "after": round(after.schedule.makespan / bound, 4),
        "attainable": round(max(bound, two_chain_bound(graph)) / bound, 4),
        "seconds": round(taken, 2),
        "cpu_s": round(cpu, 2),
        "peak_groups": round(after.peak_bytes / PARAMETER_BYTES),
        "num_cut": sum(isinstance(step, Split) for step in plan.rewrites),
        "notes": list(plan.notes),
    }


def main() -> int:
    """Runs the benchmark; 2 if a name is unknown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=float, default=40.0, help="millions of steps for each plan (default 40)")
    parser.add_argument("--workloads", help=f"of {', '.join(w.replace(', ', '/') for w in WORKLOADS)}; commas between")
    parser.add_argument("--loads", default="0.6,0.8,1.0,1.3", help="communication over computation")
    parser.add_argument("--planners", default="ours", help=f"of {', '.join(PLANNERS)}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    workloads = [w.replace("/", ", ") for w in args.workloads.split(",")] if args.workloads else list(WORKLOADS)
    planners = args.planners.split(",")
    unknown = [name for name in workloads if name not in WORKLOADS] + [p for p in planners if p not in PLANNERS]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}")
    rows = []
    for workload in workloads:
        for load in map(float, args.loads.split(",")):
            for planner in planners:
                try:
                    rows.append(row_of(workload, load, planner, SearchBudget(args.work)))
                except JobError as error:
                    print(f"{workload} {load} {planner}: {error}", file=sys.stderr)
                    continue
                print(rows[-1], file=sys.stderr)
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()}
    if args.json:
        print(json.dumps({"machine": machine, "rows": rows}))
        return 0
    table = Table(
        "workload", "load", "planner", "operators", "before", "after", "attainable", "s", "CPU s", "groups held", "cut"
    )
    keys = ("workload", "load", "planner", "num_ops", "before", "after", "attainable", "seconds", "cpu_s")
    keys += ("peak_groups", "num_cut")
    for row in rows:
        table.add_row(*(str(row[key]) for key in keys))
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
