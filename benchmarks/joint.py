"""Plan and settings together against one after the other, simulated with contention.

    python benchmarks/joint.py --seconds 20 --json

Per workload and cluster: the step as issued with NCCL's default settings; only planned; only tuned; planned, then
tuned; jointly. Seconds and ratios to the contended lower bound, which covers every order and setting (under the model,
collectives of one link one after the other). Every time is simulated; all methods get the same seconds.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.joint import Joint
from lagom_overlap.joint.bound import contended_bound_s
from lagom_overlap.joint.contended import Contended
from lagom_overlap.joint.settings import choices_of, tuned_settings
from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.ours import Ours
from lagom_overlap.plan.times import ModelTimes
from lagom_overlap.workload import load_model
from lagom_overlap.workload.dataflow import dataflow_iteration
from lagom_overlap.workload.parallel import ParallelLayout

METHODS = ("as issued", "planned", "tuned", "planned, then tuned", "jointly")


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a layout on a cluster."""

    model: str
    cluster: str
    num_nodes: int
    layout: ParallelLayout
    seq_len: int


def fsdp(model: str, cluster: str, num_nodes: int, micro_batch: int) -> Case:
    """Fully sharded over every GPU of the nodes."""
    ranks = 8 * num_nodes
    layout = ParallelLayout(data=ranks, zero_stage=3, micro_batch=micro_batch, global_batch=ranks * micro_batch)
    return Case(model, cluster, num_nodes, layout, 2048)


def tensor(model: str, cluster: str, micro_batch: int) -> Case:
    """Tensor parallel over a node, with sequence parallelism."""
    layout = ParallelLayout(data=1, tensor=8, sequence_parallel=True, micro_batch=micro_batch, global_batch=micro_batch)
    return Case(model, cluster, 1, layout, 2048)


CASES = tuple(
    case
    for cluster in ("a40_nvlink", "a40_pcie")
    for case in (
        fsdp("phi-2", cluster, 1, 2),
        fsdp("llama-3-8b", cluster, 1, 1),
        fsdp("mpt-7b", cluster, 2, 1),
        tensor("phi-2", cluster, 2),
    )
)


def times_of(case: Case, profile: str, seconds: float) -> dict[str, float]:
    """Simulated seconds by method, and the bound."""
    cluster = load_preset(case.cluster, case.num_nodes)
    model = ContentionModel(cluster, load_profile(profile))
    step = dataflow_iteration(load_model(case.model), case.layout, seq_len=case.seq_len, gpus_per_node=8)
    contended = Contended(step, model)
    choices = choices_of(contended)
    problem = PlanProblem(iteration=step, cluster=cluster, times=ModelTimes(model), budget_s=seconds / 2)
    planned = Ours().plan(problem).iteration
    joint = PlanProblem(iteration=step, cluster=cluster, times=ModelTimes(model), budget_s=seconds)
    return {
        "as issued": contended.makespan_s(step, {}),
        "planned": contended.makespan_s(planned, {}),
        "tuned": tuned_settings(contended, step, choices, {}, Deadline(seconds))[1],
        "planned, then tuned": tuned_settings(contended, planned, choices, {}, Deadline(seconds / 2))[1],
        "jointly": Joint().solve(joint).makespan_s,
        "bound": contended_bound_s(contended, choices),
    }


def rows_of(profile: str, seconds: float) -> Iterator[dict[str, object]]:
    """A row per case."""
    for case in CASES:
        ways = "tp8" if case.layout.tensor > 1 else f"fsdp{case.layout.data}"
        sys.stderr.write(f"{case.model} {ways} on {case.cluster}\n")
        yield {"model": case.model, "layout": ways, "cluster": case.cluster, **times_of(case, profile, seconds)}


def print_table(rows: list[dict[str, object]]) -> None:
    """Ratios to the bound."""
    table = Table(title="simulated step over the contended lower bound")
    for column in ("model", "layout", "cluster", *METHODS, "bound"):
        table.add_column(column)
    for row in rows:
        bound_s = float(str(row["bound"]))
        ratios = [f"{float(str(row[method])) / bound_s:.3f}" for method in METHODS]
        names = [str(row[key]) for key in ("model", "layout", "cluster")]
        table.add_row(*names, *ratios, f"{1e3 * bound_s:.0f} ms")
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each method on each case (default: 20)")
    parser.add_argument("--profile", default="plausible")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    if not args.seconds > 0:
        parser.error(f"--seconds is {args.seconds}, must be positive")
    rows = list(rows_of(args.profile, args.seconds))
    print(json.dumps({"rows": rows}, indent=1)) if args.json else print_table(rows)


if __name__ == "__main__":
    main()
