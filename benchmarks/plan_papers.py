"""The papers' overlap planners on the papers' grids, simulated, beside what the papers state: markdown to stdout.

    python benchmarks/plan_papers.py [algorithm1] [centauri] [concerto] [captured] [megatron] [--budget S]

Nothing here is measured: operators take what the contention model says of one alone (profile `plausible`), streams run
in order, links are one stream each (`lagom_overlap.plan.predict`). Every line gets a verdict: *reproduced* (within a
third of the paper's relative gain, or a percentage point), *direction* (a gain too), *not*.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import Cluster, Link, LinkKind, load_preset
from lagom_overlap.plan.base import OpTimes, Planner, PlanProblem
from lagom_overlap.plan.baselines import ProgramOrder
from lagom_overlap.plan.centauri.model_tier import ModelCosts, launch
from lagom_overlap.plan.centauri.operation import MAX_CHUNKS, CommPart, OperationCosts, Parts, algorithm_1, end_s
from lagom_overlap.plan.centauri.planner import Centauri
from lagom_overlap.plan.centauri.planner import paper as centauri_paper
from lagom_overlap.plan.concerto.fusion import FusionLimits, fused
from lagom_overlap.plan.concerto.planner import Concerto
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.megatron import baselines
from lagom_overlap.plan.megatron.advice import advise, recommended, scale_of, without_overlap_s
from lagom_overlap.plan.megatron.flags import MegatronFlags, TensorOverlap
from lagom_overlap.plan.megatron.notes_check import LLAMA_70B
from lagom_overlap.plan.megatron.planner import Megatron
from lagom_overlap.plan.megatron.roles import Role, Roles
from lagom_overlap.plan.predict import Prediction, predict
from lagom_overlap.plan.step_index import StepIndex
from lagom_overlap.plan.times import ModelTimes
from lagom_overlap.workload import CommOp, CompOp, Op, Phase, TransformerModel, load_model
from lagom_overlap.workload.dataflow import Unit, dataflow_iteration
from lagom_overlap.workload.parallel import ParallelLayout

POINT, THIRD = 0.01, 1 / 3
"""How near to the paper's a relative gain counts as reproduced: a percentage point, or a share of it."""
LEAST_GAIN = 5e-4
"""Less is none."""
SHARE_POINTS = 0.05
"""Slack of the notes' ranges of hidden shares."""
SEQ_LEN = 2048
LAYERS_AHEAD = 3
MATRICES = 5
"""Matrices of a gated layer: gathers of that many matrices are one layer's."""


def times_of(cluster: Cluster) -> ModelTimes:
    """The cost model's times."""
    return ModelTimes(ContentionModel(cluster, load_profile("plausible")))


def predicted(problem: PlanProblem, planner: Planner) -> Prediction:
    """The planner's plan, predicted."""
    return predict(problem, planner.plan(problem).iteration)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def verdict(found: float, stated: float) -> str:
    """Of a relative gain."""
    if found < LEAST_GAIN:
        return "not"
    return "reproduced" if abs(found - stated) <= max(POINT, THIRD * stated) else "direction"


# Centauri.


@dataclass(frozen=True, slots=True)
class Grid:
    """One cell of Centauri's figures."""

    model: TransformerModel
    cluster: Cluster
    layout: ParallelLayout
    shard: int | None = None
    budget_s: float = 10.0

    def problem(self, unit: Unit = Unit.LAYER) -> PlanProblem:
        """The step; gathers reach three layers ahead."""
        step = dataflow_iteration(
            self.model,
            self.layout,
            seq_len=SEQ_LEN,
            gpus_per_node=self.cluster.gpus_per_node,
            shard=self.shard,
            unit=unit,
        )
        depth = LAYERS_AHEAD * (MATRICES if unit is Unit.MATRIX else 1)
        times = times_of(self.cluster)
        return PlanProblem(iteration=step, cluster=self.cluster, times=times, prefetch=depth, budget_s=self.budget_s)


def sharded(data: int, micro_batch: int, *, stage: int = 3, batches: int = 1) -> ParallelLayout:
    """Data-parallel ranks with a ZeRO stage; gradients travel in 2 bytes."""
    return ParallelLayout(
        data=data,
        zero_stage=stage,
        micro_batch=micro_batch,
        global_batch=data * micro_batch * batches,
        gradient_bytes=2,
    )


def centauri_row(grid: Grid) -> tuple[list[str], float]:
    """Baseline, Centauri as printed and simulated, with the share of communication and the bound of overlap."""
    baseline = predicted(grid.problem(), baselines.zero3())
    overlap = baseline.overlap
    share = overlap.communication_s / (overlap.communication_s + overlap.computation_s)
    by_matrix = grid.problem(Unit.MATRIX)
    printed = min(predicted(p, centauri_paper()).overlap.makespan_s for p in (grid.problem(), by_matrix))
    ours = min(predicted(p, Centauri()).overlap.makespan_s for p in (grid.problem(), by_matrix))
    serial = overlap.communication_s + overlap.computation_s
    cap = min(1 / share, 1 / (1 - share))
    row = [
        f"{overlap.makespan_s * 1e3:.0f}",
        f"{share:.2f}",
        f"{serial / overlap.makespan_s:.2f}",
        f"{cap:.2f}",
        f"{overlap.makespan_s / printed:.2f}",
        f"{overlap.makespan_s / ours:.2f}",
    ]
    return row, overlap.makespan_s / ours


_CENTAURI_HEAD = (
    "ZeRO-3, ms",
    "share of communication a",
    "ZeRO-3 over serial",
    "bound min(1/a, 1/(1-a))",
    "Centauri (paper)",
    "Centauri (simulated)",
)


def centauri(budget_s: float) -> Iterator[str]:
    """Figures 8 to 14, as far as the text states them."""
    models = {size: load_model(f"centauri-llama-{size}") for size in ("small", "medium", "big", "large")}
    models["big"] = replace(models["big"], num_layers=8)
    cluster = load_preset("a100_hdr1", 2)
    yield "## Centauri: FSDP, 16 GPUs of cluster A (Fig. 8)"
    yield ""
    rows, gains = [], {}
    for size, model in models.items():
        for batch in (1, 4, 8):
            row, gains[size, batch] = centauri_row(Grid(model, cluster, sharded(16, batch), budget_s=budget_s))
            rows.append([size, str(batch), *row])
    yield from table(("LLaMA", "batch per GPU", *_CENTAURI_HEAD), rows)
    yield from _hybrid(models, budget_s)
    yield from _data_parallel(models, cluster, budget_s)
    yield from _model_tier(models)
    row_b, gain_b = centauri_row(Grid(models["big"], load_preset("a100_hdr4", 32), sharded(256, 4), budget_s=budget_s))
    yield "## Centauri: FSDP, 256 GPUs of cluster B (Fig. 13)"
    yield ""
    yield from table(("LLaMA", "batch per GPU", *_CENTAURI_HEAD), [["big", "4", *row_b]])
    yield "## Centauri: what the paper states"
    yield ""
    most = max(gains.values())
    grows = all(gains[size, 8] >= gains[size, 1] for size in models)
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [
            ["largest gain over ZeRO-3 in FSDP, cluster A", "1.45", f"{most:.2f}", verdict(most - 1, 0.45)],
            [
                "gain at batch 8 over 1.4 for all sizes",
                "> 1.4",
                f"{min(gains[s, 8] for s in models):.2f} to {max(gains[s, 8] for s in models):.2f}",
                "reproduced" if min(gains[s, 8] for s in models) > 1.4 else "not",
            ],
            ["the gain grows with the batch", "yes", "yes" if grows else "no", "reproduced" if grows else "not"],
            ["gain on cluster B, 256 GPUs", "1.05", f"{gain_b:.2f}", verdict(gain_b - 1, 0.05)],
        ],
    )


def _hybrid(models: dict[str, TransformerModel], budget_s: float) -> Iterator[str]:
    yield "## Centauri: FSDP + DP, 48 GPUs of cluster A (Fig. 10)"
    yield ""
    rows, gains = [], {}
    cluster = load_preset("a100_hdr1", 6)
    for shard in (16, 8, 4):
        grid = Grid(models["big"], cluster, sharded(48, 4), shard=shard, budget_s=budget_s)
        row, gains[shard] = centauri_row(grid)
        rows.append([f"DP{48 // shard} + FSDP{shard}", *row])
    yield from table(("groups", *_CENTAURI_HEAD), rows)
    most = max(gains.values())
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [["largest gain of hybrid sharding", "1.49", f"{most:.2f}", verdict(most - 1, 0.49)]],
    )


def _data_parallel(models: dict[str, TransformerModel], cluster: Cluster, budget_s: float) -> Iterator[str]:
    """Fig. 9: Centauri's all-gather slides past the optimizer, which is the data flow of ZeRO stage 1."""
    yield "## Centauri: DP, 16 GPUs of cluster A (Fig. 9); ms, two micro-batches of 4"
    yield ""
    memory = cluster.gpu.memory_bytes
    rows = []
    for size in ("small", "medium", "big", "large"):
        plain = Grid(models[size], cluster, sharded(16, 4, stage=0, batches=2), budget_s=budget_s).problem()
        shared = Grid(models[size], cluster, sharded(16, 4, stage=1, batches=2), budget_s=budget_s).problem()
        cells = []
        for problem, planner in (
            (plain, baselines.ddp()),
            (plain, baselines.OutOfOrder()),
            (shared, baselines.zero2()),
            (shared, Megatron()),
            (replace(shared, memory_limit_bytes=memory), Centauri()),
        ):
            found = predicted(problem, planner)
            over = found.peak_bytes > memory
            cells.append(f"{found.overlap.makespan_s * 1e3:.0f}" + (" (out of memory)" if over else ""))
        rows.append([size, *cells])
    yield from table(("LLaMA", "DDP", "out of order", "ZeRO-2", "Megatron", "Centauri (simulated)"), rows)


def _model_tier(models: dict[str, TransformerModel]) -> Iterator[str]:
    """Fig. 11: TP4 + PP3 + DP4 on 48 GPUs, six micro-batches; one stage's costs into Eq. 2."""
    yield "## Centauri: TP4 + PP3 + DP4, 48 GPUs of cluster A, 6 micro-batches (Fig. 11), equation 2"
    yield ""
    cluster = load_preset("a100_hdr1", 6)
    rows = []
    for batch in (1, 4):
        stage = replace(models["medium"], num_layers=models["medium"].num_layers // 3)
        layout = ParallelLayout(
            tensor=4,
            data=4,
            zero_stage=1,
            sequence_parallel=True,
            micro_batch=batch,
            global_batch=4 * batch,
            gradient_bytes=2,
        )
        problem = Grid(stage, cluster, layout).problem()
        seconds, ops = problem.times.seconds, problem.iteration.ops
        comps = [op for op in ops if isinstance(op, CompOp)]
        kept = sum(b.num_bytes for b in problem.iteration.buffers if not b.maker.endswith("gather"))
        costs = ModelCosts(
            gather_s=_sum(seconds, ops, CollectiveKind.ALL_GATHER, "fsdp"),
            scatter_s=_sum(seconds, ops, CollectiveKind.REDUCE_SCATTER, "fsdp"),
            forward_s=sum(seconds(op) for op in comps if op.origin.phase is Phase.FORWARD),
            backward_s=sum(seconds(op) for op in comps if op.origin.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)),
            activation_bytes=kept,
            memory_bytes=cluster.gpu.memory_bytes - problem.iteration.resident_bytes,
            num_micro_batches=6,
            pipeline=3,
        )
        relaxed = launch(costs)
        tensor = sum(seconds(op) for op in ops if isinstance(op, CommOp) and op.communicator == "tp")
        step = 6 * (costs.forward_s + costs.backward_s) + costs.gather_s + costs.scatter_s
        stated = "p = 3" if batch == 4 else "6"
        rows.append(
            [
                str(batch),
                f"{costs.gather_s * 1e3:.0f} / {costs.scatter_s * 1e3:.0f}",
                f"{costs.forward_s * 1e3:.0f} / {costs.backward_s * 1e3:.0f}",
                f"{relaxed.forward} / {relaxed.backward}",
                stated,
                f"{6 * tensor / (step + 6 * tensor):.1%}",
            ]
        )
    yield from table(
        (
            "batch",
            "gather / scatter, ms",
            "forward / backward, ms",
            "L1 / L2 (relaxed)",
            "paper",
            "TP share of the serial step (paper < 5 %)",
        ),
        rows,
    )


def _sum(seconds: object, ops: Sequence[Op], kind: CollectiveKind, group: str) -> float:
    found = [op for op in ops if isinstance(op, CommOp) and op.collective.kind is kind and op.communicator == group]
    return sum(seconds(op) for op in found)  # type: ignore[operator]


# Algorithm 1 against every option.

RIGS = (
    ("cluster A, 2 nodes", 300e9, 25e9 / 8, 2, 8, 0.94, 0.002),
    ("cluster B, 2 nodes", 300e9, 100e9 / 8, 2, 8, 0.65, 0.047),
    ("4 nodes of H100, 400 Gb/s per GPU", 450e9, 50e9, 4, 8, 0.18, 0.459),
)
"""Name, bytes per second inside a node and per GPU between nodes, nodes, GPUs of a node; the specification's share of
best options and mean regret of Algorithm 1."""
LATENCY_S, PIECE_S, CASES = 25e-6, 15e-6, 4000


def option_ends(size: float, chain_s: float, free_s: float, rig: tuple[float, float, int, int]) -> dict[str, float]:
    """When the chain ends under every option: even chunks, and the three ways over groups."""
    intra, inter, nodes, in_node = rig
    world = nodes * in_node
    shard = size / world

    def inside(shards: int) -> float:
        return (in_node - 1) * shards * shard / intra + LATENCY_S

    def between(shards: int) -> float:
        return shards * shard / inter + LATENCY_S

    whole_s = (world - 1) / world * size / (in_node * inter)
    ends = {}
    for count in range(1, MAX_CHUNKS + 1):
        parts = [CommPart(0, whole_s / count + LATENCY_S, 1 / count)] * count
        ends[f"even {count}"] = end_s(parts, chain_s, free_s, PIECE_S if count > 1 else 0.0)
    own, node = nodes / world, in_node / world
    groups = {
        Parts.INTER_FIRST: [(between(nodes - 1), own), (inside(nodes), 1 - own)],
        Parts.INTRA_FIRST: [(inside(1), node), (between(world - in_node), 1 - node)],
        Parts.INTRA_FIRST_FINER: [
            (inside(1), node),
            (between(nodes - 1), (nodes - 1) / world),
            (inside(nodes - 1), 1 - node - (nodes - 1) / world),
        ],
    }
    for parts_name, pairs in groups.items():
        ends[parts_name] = end_s([CommPart(0, s, share) for s, share in pairs], chain_s, free_s, PIECE_S)
    return ends


def algorithm_1_regret(
    rig: tuple[float, float, int, int], *, num_cases: int = CASES, seed: int = 0
) -> tuple[float, float, float]:
    """Share of cases in which Algorithm 1 takes the best option, its mean regret, and that of no partition."""
    random = Random(seed)
    _, inter, nodes, in_node = rig
    world = nodes * in_node
    best_count, regret, whole_regret = 0, 0.0, 0.0
    for _ in range(num_cases):
        size = 10 ** random.uniform(6.5, 9)
        comm_s = (world - 1) / world * size / (in_node * inter) + LATENCY_S
        chain_s = comm_s * 10 ** random.uniform(-1, 1)
        free_s = random.choice((0.0, comm_s * 10 ** random.uniform(-1.5, 0.3)))
        costs = OperationCosts(
            comm_s=comm_s,
            chain_s=chain_s,
            free_s=free_s,
            inter_s=(nodes - 1) * size / world / inter + LATENCY_S,
            num_nodes=nodes,
            in_node=in_node,
        )
        choice = algorithm_1(costs)
        ends = option_ends(size, chain_s, free_s, rig)
        taken = f"even {len(choice.shares)}" if choice.parts in (Parts.EVEN, Parts.WHOLE) else choice.parts
        best = min(ends.values())
        best_count += ends[taken] <= 1.001 * best
        regret += ends[taken] / best - 1
        whole_regret += ends["even 1"] / best - 1
    return best_count / num_cases, regret / num_cases, whole_regret / num_cases


def algorithm1(_: float) -> Iterator[str]:
    """How often the closed form of the operation tier is right."""
    yield f"## Centauri: Algorithm 1 against all options, {CASES} random gathers per rig, grouped"
    yield ""
    rows = []
    for name, intra, inter, nodes, in_node, stated_best, stated_regret in RIGS:
        best, regret, whole = algorithm_1_regret((intra, inter, nodes, in_node))
        rows.append(
            [name, f"{stated_best:.0%}", f"{best:.0%}", f"{stated_regret:.1%}", f"{regret:.1%}", f"{whole:.1%}"]
        )
    yield from table(
        (
            "rig",
            "best option (prototype)",
            "best option, here",
            "mean regret (prototype)",
            "mean regret, here",
            "no partition",
        ),
        rows,
    )


# Concerto.

A800_NVLINK = Link(kind=LinkKind.NVLINK, bytes_per_s=160e9, hop_s=1e-6)
"""A800: 400 GB/s both directions, 200 one, of which about 160 are reached."""
A800_PCIE = Link(kind=LinkKind.PCIE, bytes_per_s=20e9, hop_s=2e-6)
A800_NETWORK = Link(kind=LinkKind.NETWORK, bytes_per_s=90e9, hop_s=5e-6)
FP32_COMPUTATION = 1384.5 / 290.3
"""The paper's own computations of (D2, T4, P1): FP32 over FP16."""
FP32_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class InFp32:
    """Times of the same step in FP32: computations by the paper's own ratio, twice the bytes on the wire."""

    half: OpTimes

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        if isinstance(op, CommOp):
            doubled = replace(op.collective, num_bytes=2 * op.collective.num_bytes)
            return self.half.seconds(replace(op, collective=doubled))
        return FP32_COMPUTATION * self.half.seconds(op)


def gpt(name: str, hidden: int, heads: int) -> TransformerModel:
    """The paper's GPT: 18 layers, four times as wide in the MLP."""
    return TransformerModel(
        name=name,
        num_layers=18,
        hidden=hidden,
        ffn=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab=51200,
        gated=False,
        linear_bias=True,
        norm_bias=True,
    )


def concerto_problem(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    nvlink: bool,
    fp32: bool,
    budget_s: float,
    unit: Unit = Unit.LAYER,
) -> PlanProblem:
    """A step on the paper's rig: four nodes of eight A800."""
    intra = A800_NVLINK if nvlink else A800_PCIE
    cluster = replace(load_preset("a100_dgx", 4), name="a800", intra=intra, inter=A800_NETWORK)
    step = dataflow_iteration(model, layout, seq_len=SEQ_LEN, gpus_per_node=8, unit=unit)
    times: OpTimes = times_of(cluster)
    return PlanProblem(
        iteration=step,
        cluster=cluster,
        times=InFp32(times) if fp32 else times,
        budget_s=budget_s,
        prefetch=LAYERS_AHEAD * (MATRICES if unit is Unit.MATRIX else 1),
    )


TABLE_3 = [
    # tensor, data, NVLink, FP32, Megatron, S, S + AD (s)
    (16, 1, True, False, 0.974, 0.860, 0.817),
    (16, 1, True, True, 3.276, 3.252, 3.127),
    (16, 1, False, False, 3.793, 3.723, 3.584),
    (16, 1, False, True, 6.093, 5.544, 5.178),
    (8, 2, True, False, 0.907, 0.883, 0.866),
    (8, 2, True, True, 4.455, 4.446, 4.366),
    (8, 2, False, False, 2.996, 2.897, 2.788),
    (8, 2, False, True, 6.566, 6.295, 5.616),
]
TABLE_4 = [
    (8, False, 0.517, 0.505),
    (16, False, 0.531, 0.504),
    (32, False, 0.614, 0.468),
    (8, True, 2.732, 2.723),
    (16, True, 2.742, 2.722),
    (32, True, 2.801, 2.771),
]


def concerto(budget_s: float) -> Iterator[str]:
    """Tables 3 and 4."""
    yield "## Concerto: GPT on 16 GPUs (Table 3), relative to Megatron"
    yield ""
    model = gpt("gpt-14.5b", 8192, 32)
    rows = []
    for tensor, data, nvlink, fp32, stated, stated_s, stated_ad in TABLE_3:
        layout = ParallelLayout(tensor=tensor, data=data, micro_batch=8 // data, global_batch=8, gradient_bytes=2)
        problem = concerto_problem(model, layout, nvlink=nvlink, fp32=fp32, budget_s=budget_s)
        base, scheduled, cut = (
            predicted(problem, planner).overlap.makespan_s
            for planner in (Megatron(), Concerto(decompose=False, fuse=False), Concerto(fuse=False))
        )
        gain, gain_ad = 1 - scheduled / base, 1 - cut / base
        rows.append(
            [
                f"T{tensor} D{data}",
                "NVLink" if nvlink else "PCIe",
                "FP32" if fp32 else "FP16",
                f"{base:.3f}",
                f"{1 - stated_s / stated:.1%}",
                f"{gain:.1%}",
                f"{1 - stated_ad / stated:.1%}",
                f"{gain_ad:.1%}",
                verdict(gain_ad, 1 - stated_ad / stated),
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    yield from table(
        (
            "layout",
            "node",
            "type",
            "Megatron here, s",
            "S, paper",
            "S, here",
            "S + AD, paper",
            "S + AD, here",
            "verdict",
        ),
        rows,
    )
    yield "## Concerto: fusion under ZeRO-3 (Table 4)"
    yield ""
    rows = []
    small = gpt("gpt-0.9b", 2048, 16)
    for ranks, fp32, stated, stated_fused in TABLE_4:
        layout = sharded(ranks, 2)
        problem = concerto_problem(small, layout, nvlink=True, fp32=fp32, budget_s=budget_s, unit=Unit.MATRIX)
        scheduled = Concerto(decompose=False, fuse=False).plan(problem).iteration
        steps, merged = fused(problem, scheduled, FusionLimits(max_bytes=400 << 20), Deadline(10 * budget_s))
        plain, after = (predict(problem, step).overlap.makespan_s for step in (scheduled, merged))
        gain, stated_gain = 1 - after / plain, 1 - stated_fused / stated
        rows.append(
            [
                str(ranks),
                "FP32" if fp32 else "FP16",
                f"{plain:.3f}",
                str(len(steps)),
                f"{stated_gain:.1%}",
                f"{gain:.1%}",
                verdict(gain, stated_gain),
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    yield from table(("GPUs", "type", "before here, s", "fusions", "fusion, paper", "fusion, here", "verdict"), rows)


# Concerto on captured steps; needs the extra torch.

CAPTURED = [
    # model, degree, ranks, micro-batch, residues, the paper's mean and largest time saved
    ("evoformer", "axial", 2, 1, 256, "DAP: 12.5 or 15.6 %, at most 19.7 %"),
    ("evoformer", "axial", 4, 1, 256, "DAP: 12.5 or 15.6 %, at most 19.7 %"),
    ("vit-l-14", "fsdp", 8, 16, 1, "ZeRO-3: 15.1 %, at most 33.2 %"),
    ("vit-l-14", "fsdp", 16, 16, 1, "ZeRO-3: 15.1 %, at most 33.2 %"),
    ("wide-resnet-50-2", "fsdp", 8, 16, 1, "ZeRO-3: 15.1 %, at most 33.2 %"),
    ("wide-resnet-50-2", "fsdp", 16, 16, 1, "ZeRO-3: 15.1 %, at most 33.2 %"),
]


def captured(budget_s: float) -> Iterator[str]:
    """Concerto's other grids on our captures: DAP, and ZeRO-3 of vision models."""
    from lagom_overlap.capture.models.named import capture_named  # noqa: PLC0415  needs torch, the rest does not

    yield "## Concerto: captured steps on A800 (NVLink): time saved"
    yield ""
    cluster = replace(load_preset("a100_dgx", 4), name="a800", intra=A800_NVLINK, inter=A800_NETWORK)
    rows = []
    for name, degree, ranks, batch, length, stated in CAPTURED:
        step = capture_named(name, {degree: ranks}, micro_batch=batch, seq_len=length).iteration
        problem = PlanProblem(iteration=step, cluster=cluster, times=times_of(cluster), budget_s=budget_s)
        baseline: Planner = baselines.zero3() if degree == "fsdp" else ProgramOrder()
        before, scheduled, cut = (
            predicted(problem, planner).overlap
            for planner in (baseline, Concerto(decompose=False, fuse=False), Concerto())
        )
        share = before.communication_s / (before.communication_s + before.computation_s)
        rows.append(
            [
                name,
                f"{degree} {ranks}",
                str(len(step.ops)),
                f"{before.makespan_s * 1e3:.1f}",
                f"{share:.2f}",
                f"{1 - scheduled.makespan_s / before.makespan_s:.1%}",
                f"{1 - cut.makespan_s / before.makespan_s:.1%}",
                stated,
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    yield from table(
        ("model", "parallel", "operators", "before, ms", "share of communication", "S", "S + AD + fusion", "paper"),
        rows,
    )


# Megatron.

NOTES_HIDDEN = {Role.GRADIENT: (0.8, 0.9), Role.PARAMETER: (0.7, 0.8), Role.ACTIVATION: (0.6, 0.7)}


def megatron(budget_s: float) -> Iterator[str]:
    """The notes' shares and recommendations on their own model, and their impossible table."""
    cluster = load_preset("h100_dgx", 8)
    model = replace(load_model("llama-3-70b"), num_layers=20)
    layout = ParallelLayout(tensor=4, data=4, zero_stage=1, sequence_parallel=True, micro_batch=1, global_batch=4 * 8)
    problem = Grid(model, cluster, layout, budget_s=budget_s).problem()
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
                "reproduced" if inside else "direction" if hidden > 0 else "not",
            ]
        )
    yield from table(("communication", "alone, ms", "notes", "here", "verdict"), rows)
    yield "Refused: the notes' table of a step of 10.61 s; none is shorter than " + (
        f"{LLAMA_70B.least_s(links_run_together=True):.2f} s (one stream of communication: "
        f"{LLAMA_70B.least_s(links_run_together=False):.2f} s)."
    )
    yield ""
    yield "## Megatron: what each recommended switch brings"
    yield ""
    rows = []
    for num_gpus in (64, 256, 1024):
        scale = scale_of(num_gpus)
        chosen = recommended(scale)
        without = without_overlap_s(problem, chosen)
        for one in advise(problem, chosen):
            rows.append(
                [
                    scale,
                    one.switch,
                    f"{one.without_s * 1e3:.0f}",
                    f"{one.with_s * 1e3:.0f}",
                    f"{one.gain:.1%}",
                    f"{without * 1e3:.0f}",
                ]
            )
    yield from table(("scale", "switch", "without it, ms", "with it, ms", "gain", "everything off, ms"), rows)


def hidden_share(problem: PlanProblem, flags: MegatronFlags, role: Role) -> tuple[float, float]:
    """The share of a role's communication that the step does not show, and its time alone (s)."""
    plan = Megatron(flags).plan(problem)
    index = StepIndex(plan.iteration)
    of = Roles.find(StepIndex(problem.iteration)).of
    names = {op.name for op in index.iteration.comms if of.get(_whole(op.name, of)) is role}
    alone = sum(problem.times.seconds(op) for op in index.iteration.comms if op.name in names)
    full = predict(problem, plan.iteration).overlap.makespan_s
    free = predict(replace(problem, times=_Free(problem.times, names)), plan.iteration).overlap.makespan_s
    return 1 - (full - free) / alone, alone


def _whole(name: str, known: dict[str, Role]) -> str:
    return next((name[:end] for end in range(len(name), 0, -1) if name[:end] in known), name)


@dataclass(frozen=True, slots=True)
class _Free:
    """The same times with some collectives for nothing."""

    times: OpTimes
    names: set[str]

    def seconds(self, op: Op) -> float:
        return 1e-9 if op.name in self.names else self.times.seconds(op)


SECTIONS = {
    "algorithm1": algorithm1,
    "centauri": centauri,
    "concerto": concerto,
    "captured": captured,
    "megatron": megatron,
}


def main() -> None:
    """Prints the sections asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per plan")
    arguments = parser.parse_args()
    for name in arguments.sections or SECTIONS:
        for line in SECTIONS[name](arguments.budget):
            print(line, flush=True)


if __name__ == "__main__":
    main()
