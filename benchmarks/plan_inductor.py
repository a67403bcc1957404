"""Our planner as a pass of Inductor against Inductor's own overlap scheduling and bucketing: one graph, two gloo ranks.

    python benchmarks/plan_inductor.py examples/plan_zero.py --rounds 21 [--json]

Arms, each compiled by Inductor for the CPU:

    plain                            as Inductor is: its scheduler reorders for less memory after all passes
    order kept                       the same without `reorder_for_peak_memory`
    inductor overlap [and bucketing] its own scheduling, order kept
    ours                             `PlanPass` with our planner, order kept

They run in shuffled order in every round; a ratio is of two arms in one round, with an interval (`paired.py`) and what
follows from it: faster, slower, or not separable. `issued` is what the generated code does, not what a pass left:
collectives that are awaited before anything else is called, of all. Exposed time is predicted by our simulator from
the graph that the passes leave, with operators timed alone on these ranks; not for `plain`, whose order is another.

Inductor's scheduler gets the same times as ours (`custom_runtime_estimation`); its own need a GPU.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import fx
from torch._inductor import compile_fx, config
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.utils import run_and_get_code

from gloo_ranks import join, leave, spawn, times_alone
from lagom_overlap.capturing.fx import capture_graph
from lagom_overlap.engines.fx.inductor_pass import PlanPass
from lagom_overlap.engines.fx.nodes import is_collective
from lagom_overlap.engines.fx.program import load_program
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.registry import make_planner
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.planners.times import ShapeTimes
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.tuners.verdict import compared
from lagom_overlap.verbs.plan_times import ProportionalTimes
from lagom_overlap.workload import CommOp

NUM_RANKS, REPEATS = 2, 5
ARMS = ("plain", "order kept", "inductor overlap", "inductor overlap and bucketing", "ours")
CALL = re.compile(r"\s*(?:\w+ = )?(?:torch\.ops\._c10d_functional|extern_kernels)\.(\w+)[.(]|\s*\w*cpp_fused")


def main() -> int:
    """Parses; spawns the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--function", default="step")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--link", default="2 Gbit/s")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of our planner")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None:
        return spawn(NUM_RANKS, arguments.link)
    run_rank(arguments)
    return 0


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank's life."""
    rank = arguments.rank
    join(rank, NUM_RANKS)
    program = load_program(arguments.program, arguments.function)
    bench = Bench(program, arguments)
    rows = bench.rows()
    if rank == 0:
        record = {
            "rows": rows,
            "load": os.getloadavg()[0],
            "machine": describe_machine(),
            "versions": package_versions(),
            "date": utc_now(),
        }
        print(
            json.dumps(record, indent=1)
            if arguments.json
            else shown(rows)
            + f"\n\nload {record['load']:.1f}, {record['date']}, {record['machine']}, {record['versions']}"
        )
    leave()


class Bench:
    """The arms, compiled and measured on this rank."""

    def __init__(self, program: Any, arguments: argparse.Namespace) -> None:
        self._program = program
        self._arguments = arguments
        self._seconds = self._profile()
        self._graphs: dict[str, Any] = {}
        self._of_graph: Any = None
        self._by_name: dict[str, float] = {}

    def _profile(self) -> Any:
        """Times by shape of the program's operators alone, the slower rank's."""
        captured = self._program.captured("program")
        measured = times_alone(captured, self._program.inputs, REPEATS)
        table: dict[Any, float] = {}
        for op in captured.iteration.ops:
            shape = op.collective if isinstance(op, CommOp) else op.work
            table[shape] = max(table.get(shape, 0.0), measured[op.name])
        return ShapeTimes(table, ProportionalTimes.of(captured.iteration, measured))

    def _problem(self, capture: Any, iteration: Any | None = None) -> Any:
        cluster = replace(load_preset("a40_nvlink"), gpus_per_node=2, num_nodes=1)
        return PlanProblem(
            iteration=iteration or capture.iteration,
            cluster=cluster,
            times=self._seconds,
            groups=capture.groups,
            prefetch=None,
            budget_s=self._arguments.budget,
        )

    def _decide(self, capture: Any, _: Any) -> Any:
        return make_planner("ours", {"split": False}).plan(self._problem(capture)).rewrites

    @contextlib.contextmanager
    def _arm(self, name: str) -> Iterator[None]:
        """Inductor as the arm has it; notes the last graph before it is lowered."""
        overlap_scheduling.estimate_roofline_runtime_ms = lambda node: 1e-3  # the stock one asks the GPU
        settings: dict[str, Any] = {"fx_graph_cache": False, "reorder_for_peak_memory": name == "plain"}
        keep = _Keep(self._graphs, name)
        if name == "ours":
            settings["post_grad_custom_post_pass"] = PlanPass(self._decide)
        if name.startswith("inductor overlap"):
            settings |= {
                f"aten_distributed_optimizations.{key}": value
                for key, value in {
                    "enable_overlap_scheduling": True,
                    "collective_bucketing": name.endswith("bucketing"),
                    "pre_bucketing_fsdp_collectives": name.endswith("bucketing"),
                    "enable_fusion_regions": False,  # its costs ask the GPU
                    "bucket_mode": "default",
                    "compute_estimator": "analytical",
                    "collective_estimator": "analytical",
                    "custom_runtime_estimation": self._estimate,
                }.items()
            }
        with config.patch(settings), keep:
            yield

    def _estimate(self, node: Any, override_size: int | None = None) -> float | None:
        """Milliseconds of a node, as Inductor asks for them."""
        known = getattr(self, "_by_name", None)
        if known is None or node.graph is not self._of_graph:
            self._of_graph = node.graph
            capture = capture_graph(_holder(node.graph), num_ranks=dist.get_world_size())
            known = self._by_name = {op.name: self._seconds.seconds(op) for op in capture.iteration.ops}
        if is_collective(node) and override_size is not None:
            value = node.meta["val"]
            whole = value.numel() * value.element_size()
            return 1e3 * known.get(node.name, 1e-6) * override_size / max(1, whole)
        return 1e3 * known[node.name] if node.name in known else None

    def rows(self) -> list[dict[str, Any]]:
        """One row per arm."""
        expected = self._program.step(*self._program.inputs)
        compiled: dict[str, Callable[..., Any]] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name in ARMS:
            torch._dynamo.reset()
            with self._arm(name):
                compiled[name] = torch.compile(_own_copy(self._program.step), dynamic=False)
                found, codes = run_and_get_code(compiled[name], *self._program.inputs)
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
            rows[name] = {"arm": name, "max_error": error, **_issued(codes[0])}
            if name != "plain":
                rows[name] |= self._predicted(self._graphs[name])
        times: dict[str, list[float]] = {name: [] for name in compiled}
        rng = random.Random(0)
        order = list(compiled)
        for number in range(self._arguments.rounds + 1):
            rng.shuffle(order)
            for name in order:
                dist.barrier()
                start = perf_counter()
                compiled[name](*self._program.inputs)
                slowest = torch.tensor([perf_counter() - start], dtype=torch.float64)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if number:
                    times[name].append(float(slowest))
        for name, row in rows.items():
            row["measured_s"] = median(times[name])
            row["over"] = {other: str(compared(times[other], times[name])) for other in ARMS if other != name}
            row["measured_all_s"] = times[name]
        return list(rows.values())

    def _predicted(self, graph: Any) -> dict[str, float]:
        """Iteration and exposed time of a final graph as it is issued, and the bound of its data flow."""
        capture = capture_graph(_holder(graph), num_ranks=dist.get_world_size())
        problem = self._problem(capture)
        predicted = predict(problem, replace(capture.issued, is_dataflow=True))
        bound = task_graph(problem)
        return {
            "predicted_s": predicted.overlap.makespan_s,
            "predicted_exposed_s": predicted.overlap.exposed_s,
            "bound_s": bound.seconds(lower_bound(bound)),
        }


def _issued(code: str) -> dict[str, int]:
    """Collectives that the generated code calls, and those that it awaits before it calls anything else."""
    matches = [CALL.match(line) for line in code.splitlines()]
    calls = [match.group(1) or "fused" for match in matches if match]
    starts = [number for number, call in enumerate(calls) if call.startswith(("all_gather", "reduce_scatter"))]
    return {
        "num_comms": len(starts),
        "awaited_at_once": sum(calls[number + 1 : number + 2] == ["wait_tensor"] for number in starts),
    }


class _Keep:
    """Keeps a copy of the last graph that Inductor's passes leave, while it is entered."""

    def __init__(self, graphs: dict[str, Any], name: str) -> None:
        self._graphs, self._name = graphs, name

    def __enter__(self) -> None:

        self._real = compile_fx._recursive_post_grad_passes

        def passes(module: Any, is_inference: bool = False) -> None:
            self._real(module, is_inference)
            self._graphs[self._name] = _without_control_deps(module)

        compile_fx._recursive_post_grad_passes = passes

    def __exit__(self, *_: object) -> None:

        compile_fx._recursive_post_grad_passes = self._real


def _without_control_deps(module: Any) -> fx.Graph:
    """A copy of the graph; operators that Inductor wrapped to pin their order are plain again, in that order."""
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or "control_deps" not in str(node.target):
            continue
        inner = getattr(module, str(node.args[1].target)).graph
        values = dict(zip((n for n in inner.nodes if n.op == "placeholder"), node.args[2:], strict=True))
        with graph.inserting_before(node):
            for wrapped in inner.nodes:
                if wrapped.op == "call_function":
                    args, kwargs = fx.map_arg((wrapped.args, wrapped.kwargs), values.__getitem__)
                    values[wrapped] = graph.call_function(wrapped.target, args, kwargs)
                    values[wrapped].meta = dict(wrapped.meta) | {"val": wrapped.meta.get("val", node.meta.get("val"))}
        made = values[next(n for n in inner.nodes if n.op == "output").args[0]]
        made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return graph


def _holder(graph: Any) -> Any:
    """A graph as something that has it, which is all that a capture needs."""
    return SimpleNamespace(graph=graph)


def _own_copy(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as another function, so that arms do not share compiled code."""

    def arm(*inputs: Any) -> Any:
        return step(*inputs)

    return arm


def shown(rows: list[dict[str, Any]]) -> str:
    """The tables."""
    heads = ["arm", "collectives", "awaited at once", "predicted", "exposed", "bound", "measured", "largest error"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["arm"], row["num_comms"], row["awaited_at_once"]]
        keys = ("predicted_s", "predicted_exposed_s", "bound_s", "measured_s")
        cells += [f"{1e3 * row[key]:.0f} ms" if key in row else "" for key in keys]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['max_error']:.0e}"])) + " |")
    lines.append("")
    lines += [f"- ours over {other}: {text}" for other, text in rows[-1]["over"].items()]
    lines += [f"- {row['arm']} over plain: {row['over']['plain']}" for row in rows[1:-1]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
