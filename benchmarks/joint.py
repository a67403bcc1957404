"""Plan and settings together against one after the other on the papers' grids, simulated with contention.

    python benchmarks/joint.py [lagom] [centauri] [concerto] [--layers 8] [--seconds 6] [--every N] [--seed S] [--json]

Per step and cluster: as issued with NCCL's default settings; only planned; only tuned; planned, then tuned; jointly;
the contended lower bound. "Planned, then tuned" is the joint search's first candidate, so it is never better; what each
further kind of move gains is shown too. Every time is simulated: nothing here was measured, on a GPU or elsewhere.

Models are cut to `--layers` (0: whole), which repeat. Three gathered parameter groups at most are held at once, by
every method; "any depth" may hold more, as far as GPU memory allows. `--seconds`, of this process's own processor time
so that a loaded machine gives nearly the same table, go to a step's plan (a third), to tuning it as issued, and to the
joint search, each.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import process_time

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.papers.workloads.table2 import TENSOR_DEGREE, PaperStrategy, PaperWorkload, load_table2
from lagom_overlap.planners import deadline
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.joint import Joint, JointPlan
from lagom_overlap.planners.joint.bound import Limit
from lagom_overlap.planners.joint.contended import Contended
from lagom_overlap.planners.joint.settings import choices_of, tuned_settings
from lagom_overlap.planners.memory import depth_arcs
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import HALF
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder
from lagom_overlap.workload.step import Unit, program_step
from plan_papers.concerto_tables import A800_NETWORK, A800_NVLINK, A800_PCIE, gpt
from plan_papers.grid import sharded

SEQ_LEN = 2048
GPUS_PER_NODE = 8
PREFETCH = 3
PLAN_SHARE = 1 / 3
METHODS = ("as issued", "planned", "tuned", "planned, then tuned", "jointly")
NEAR_BOUND, NEAR_PLAN, LEAST_GAIN = 1.01, 0.98, 0.002
WHY = {
    Limit.LINK: "link-bound: no computation to spare",
    Limit.COMPUTATION: "all hidden: only the tax of hiding is left",
    Limit.BOTH: "link and computation equally long",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A step on a cluster: who printed it, in words, and what it is."""

    paper: str
    name: str
    cluster: Cluster
    model: TransformerModel
    layout: ParallelLayout

    def cut_to(self, num_layers: int) -> "Case":
        """The case with as many layers at most; 0: all."""
        layers = min(num_layers or self.model.num_layers, self.model.num_layers)
        return replace(self, model=replace(self.model, num_layers=layers))

    def step(self) -> Iteration:
        """The step in program order; gradients travel in 2 bytes."""
        return program_step(
            self.model,
            self.layout,
            seq_len=SEQ_LEN,
            gpus_per_node=GPUS_PER_NODE,
            unit=Unit.LAYER,
            precision=HALF,
        )


def held_back(step: Iteration) -> Iteration:
    """The step as issued, a gather waiting until few enough groups are held, as FSDP's rate limiter does."""
    waits = tuple((maker, user) for user, maker in depth_arcs(step, PREFETCH))
    return rewritten(step, (Reorder(tuple(op.name for op in step.ops), (), waits),)) if waits else step


def lagom_cases() -> Iterator[Case]:
    """Table 2 of the Lagom paper; replicas of tensor parallelism do not change a step."""
    for row in load_table2():
        if row.strategy is PaperStrategy.TP and row.degree > 1:
            continue
        num_nodes = -(-row.degree // GPUS_PER_NODE) if row.strategy is not PaperStrategy.TP else 1
        cluster = load_preset(row.cluster, num_nodes)
        yield Case("Lagom", row.name, cluster, load_model(row.model), table2_layout(row))


def table2_layout(row: PaperWorkload) -> ParallelLayout:
    """One micro-batch; under tensor and expert parallelism its two halves, which overlap each other."""
    half = row.micro_batch // 2
    match row.strategy:
        case PaperStrategy.FSDP:
            return sharded(row.degree, row.micro_batch)
        case PaperStrategy.TP:
            return ParallelLayout(
                data=1, tensor=TENSOR_DEGREE, sequence_parallel=True, micro_batch=half, global_batch=2 * half
            )
        case PaperStrategy.EP:
            ranks = row.degree
            return ParallelLayout(data=ranks, expert=ranks, micro_batch=half, global_batch=2 * half * ranks)


def centauri_cases() -> Iterator[Case]:
    """LLaMA of four sizes: FSDP, FSDP + DP, DP, one stage of TP + PP + DP on cluster A; FSDP on cluster B."""
    models = {size: load_model(f"centauri-llama-{size}") for size in ("small", "medium", "big", "large")}
    models["big"] = replace(models["big"], num_layers=8)
    two, six, many = load_preset("a100_hdr1", 2), load_preset("a100_hdr1", 6), load_preset("a100_hdr4", 32)
    for size, batch in (("small", 1), ("small", 4), ("small", 8), ("medium", 4), ("big", 4), ("large", 4)):
        yield Case("Centauri", f"LLaMA {size} FSDP 16, batch {batch}", two, models[size], sharded(16, batch))
    for shard in (16, 8, 4):
        name = f"LLaMA big DP {48 // shard} x FSDP {shard}"
        yield Case("Centauri", name, six, models["big"], sharded(48, 4, replicate=48 // shard))
    for size in ("small", "large"):
        layout = sharded(16, 4, stage=1, batches=2)
        yield Case("Centauri", f"LLaMA {size} DP 16", two, models[size], layout)
    stage = replace(models["medium"], num_layers=models["medium"].num_layers // 3)
    for batch in (1, 4):
        layout = ParallelLayout(
            tensor=4,
            data=4,
            zero_stage=1,
            sequence_parallel=True,
            micro_batch=batch,
            global_batch=2 * 4 * batch,
        )
        yield Case("Centauri", f"LLaMA medium TP 4 x DP 4, a stage of PP 3, batch {batch}", six, stage, layout)
    yield Case("Centauri", "LLaMA big FSDP 256, batch 4", many, models["big"], sharded(256, 4))


def concerto_cases() -> Iterator[Case]:
    """Tables 3 and 4 in FP16 (the cost model's contention is of 2-byte kernels)."""
    for nvlink in (True, False):
        intra, link = (A800_NVLINK, "NVLink") if nvlink else (A800_PCIE, "PCIe")
        cluster = replace(load_preset("a100_dgx", 4), name=f"a800 {link}", intra=intra, inter=A800_NETWORK)
        for tensor, data in ((16, 1), (8, 2)):
            layout = ParallelLayout(tensor=tensor, data=data, micro_batch=8 // data, global_batch=8)
            name = f"GPT 14.5B TP {tensor} x DP {data}"
            yield Case("Concerto", name, cluster, gpt("gpt-14.5b", 8192, 32), layout)
        if nvlink:
            for ranks in (8, 16, 32):
                yield Case("Concerto", f"GPT 0.9B FSDP {ranks}", cluster, gpt("gpt-0.9b", 2048, 16), sharded(ranks, 2))


PAPERS = {"lagom": lagom_cases, "centauri": centauri_cases, "concerto": concerto_cases}


def row_of(case: Case, profile: str, seconds: float, seed: int) -> dict[str, object]:
    """Simulated seconds by method, the bound, what each kind of move reached."""
    model = ContentionModel(case.cluster, load_profile(profile))
    step = case.step()
    contended = Contended(step, model)
    choices = choices_of(contended)
    problem = PlanProblem(
        iteration=step, cluster=case.cluster, times=ModelTimes(model), prefetch=PREFETCH, budget_s=seconds, seed=seed
    )
    planned = Ours().plan(replace(problem, budget_s=PLAN_SHARE * seconds))
    issued = contended.issued(held_back(step))
    found = Joint().solve(problem, (planned,))
    row: dict[str, object] = {
        "paper": case.paper,
        "step": case.name,
        "cluster": case.cluster.name,
        "num_layers": case.model.num_layers,
        "num_ops": len(step.ops),
        "plan over its bound": predict(problem, planned.iteration).overlap.makespan_s / planned.lower_bound_s,
        "as issued": issued.makespan_s({}),
        "planned": contended.issued(planned.iteration).makespan_s({}),
        "tuned": tuned_settings(issued, choices, {}, Deadline(seconds))[1],
        "planned, then tuned": found.history[0].makespan_s,
        "jointly": found.makespan_s,
        "prefetch": found.prefetch,
        "bound": found.bound.seconds,
        "bound, chains uncut": found.bound.unchained_s,
        "limit": found.bound.limit,
        "moves": {step.name: step.makespan_s for step in found.history},
    }
    deeper = any_depth(problem, found)
    row["any depth"] = None if deeper is None else deeper.makespan_s
    row["any depth, prefetch"] = None if deeper is None else deeper.prefetch
    return row


def any_depth(problem: PlanProblem, found: JointPlan) -> JointPlan | None:
    """The joint search with prefetch limited by GPU memory only; None where nothing is gathered or it does not fit."""
    memory = problem.cluster.gpu.memory_bytes
    if not depth_arcs(problem.iteration, PREFETCH) or predict(problem, found.plan.iteration).peak_bytes > memory:
        return None
    try:
        return Joint().solve(replace(problem, prefetch=None, memory_limit_bytes=memory), (found.plan,))
    except JobError:
        return None


def why(row: dict[str, object]) -> str:
    """What the joint search gained by, or why not."""
    bound_s, before_s = float(str(row["bound"])), float(str(row["planned, then tuned"]))
    after_s = float(str(row["jointly"]))
    if after_s < before_s * (1 - LEAST_GAIN):
        gains, last_s = {}, before_s
        for name, reached_s in dict(row["moves"]).items():  # type: ignore[call-overload]
            gains[name], last_s = last_s - reached_s, reached_s
        return "gains: " + max(gains, key=lambda name: gains[name])
    uncut_s, limit = float(str(row["bound, chains uncut"])), WHY[Limit(str(row["limit"]))]
    if before_s <= NEAR_BOUND * bound_s:
        return f"at the bound before ({limit})"
    if before_s < uncut_s / NEAR_BOUND:
        return "none found (its cut chains are below the bound of uncut ones already)"
    if before_s <= NEAR_BOUND * uncut_s:
        return "at the bound of uncut chains before (waits)"
    loose = float(str(row["plan over its bound"])) - 1
    if loose > 1 - NEAR_PLAN:
        return f"none found (the order itself is {loose:.0%} above its bound without contention)"
    return f"none found ({limit})"


def markdown(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    """Ratios to the bound."""
    head = ("paper", "step", "cluster", *METHODS, "gain", "any depth", "chains uncut", "bound, ms", "why")
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        bound_s = float(str(row["bound"]))
        ratios = [f"{float(str(row[method])) / bound_s:.3f}" for method in METHODS]
        gain = 1 - float(str(row["jointly"])) / float(str(row["planned, then tuned"]))
        depth = row["any depth, prefetch"]
        deeper = "" if row["any depth"] is None else f"{float(str(row['any depth'])) / bound_s:.3f} ({depth or 'all'})"
        uncut = f"{float(str(row['bound, chains uncut'])) / bound_s:.3f}"
        cells = (str(row["paper"]), str(row["step"]), str(row["cluster"]), *ratios, f"{gain:.1%}", deeper, uncut)
        yield "| " + " | ".join((*cells, f"{1e3 * bound_s:.0f}", why(row))) + " |"


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)} (default: all)")
    parser.add_argument("--layers", type=int, default=8, help="of every model at most (default: 8; 0: all)")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the joint search on each step (default: 6)")
    parser.add_argument("--every", type=int, default=1, help="only every Nth step of a grid (default: 1, all)")
    parser.add_argument("--profile", default="plausible")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    unknown = [name for name in args.papers if name not in PAPERS]
    if unknown:
        parser.error(f"paper is {unknown[0]!r}, must be one of {', '.join(PAPERS)}")
    if not args.seconds > 0 or args.every < 1 or args.layers < 0:
        parser.error("--seconds and --every must be positive, --layers not negative")
    deadline.monotonic = process_time
    rows = []
    for paper in args.papers or PAPERS:
        for case in list(PAPERS[paper]())[:: args.every]:
            rows.append(row_of(case.cut_to(args.layers), args.profile, args.seconds, args.seed))
            sys.stderr.write(f"{list(markdown(rows[-1:]))[-1]}\n")
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if args.json else "\n".join(markdown(rows)) + "\n")


if __name__ == "__main__":
    main()
