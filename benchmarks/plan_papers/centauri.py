"""Centauri's grid (ASPLOS 2024): figures 8 to 14, as far as the text states them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.planners.base import Planner, PlanProblem
from lagom_overlap.planners.centauri.model_tier import ModelCosts, launch
from lagom_overlap.planners.centauri.planner import Centauri
from lagom_overlap.planners.centauri.planner import paper as centauri_paper
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.megatron import baselines
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.workload import CommOp, CompOp, Op, Phase
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.steps import PartitionGroups, Rewrite, Split
from lagom_overlap.workload.step import Unit
from plan_papers.grid import Grid, sharded
from plan_papers.judged import predicted, table, verdict


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: cells of the table, gain over ZeRO-3, that without groups, and what is left of the bound of overlap."""

    cells: list[str]
    gain: float
    ungrouped: float
    left_of_bound: float

    @property
    def keeps_bound(self) -> bool:
        """Whether overlap alone gains no more than ZeRO-3 leaves of min(1 / a, 1 / (1 - a))."""
        return self.ungrouped <= self.left_of_bound * (1 + ROUNDING)


ROUNDING = 0.005


def _shortest(problems: Sequence[PlanProblem], planner: Planner) -> float:
    return min(predicted(problem, planner).overlap.makespan_s for problem in problems)


def centauri_row(grid: Grid) -> Row:
    """Baseline, Centauri as printed and simulated, with the share of communication and the bound of overlap.

    A group partition moves fewer bytes between nodes than a ring over all ranks: that part of a gain is no overlap, and
    ZeRO-3's bound does not hold for it. `ungrouped` has the baseline's bytes.
    """
    problems = (grid.problem(), grid.problem(Unit.MATRIX))
    overlap = predicted(problems[0], baselines.zero3()).overlap
    serial = overlap.communication_s + overlap.computation_s
    share = overlap.communication_s / serial
    cap = min(1 / share, 1 / (1 - share))
    makespan = overlap.makespan_s
    printed, simulated, ungrouped = (
        makespan / _shortest(problems, planner) for planner in (centauri_paper(), Centauri(), Centauri(group=False))
    )
    left = cap * makespan / serial
    numbers = (share, serial / makespan, cap, left, printed, simulated, ungrouped)
    return Row([f"{makespan * 1e3:.0f}", *(f"{number:.2f}" for number in numbers)], simulated, ungrouped, left)


_CENTAURI_HEAD = (
    "ZeRO-3, ms",
    "share of communication a",
    "ZeRO-3 over serial",
    "bound min(1/a, 1/(1-a))",
    "left of it over ZeRO-3",
    "Centauri (paper)",
    "Centauri (simulated)",
    "without groups",
)


def centauri(work: SearchBudget) -> Iterator[str]:
    """Figures 8 to 14, as far as the text states them."""
    models = {size: load_model(f"centauri-llama-{size}") for size in ("small", "medium", "big", "large")}
    models["big"] = replace(models["big"], num_layers=8)
    cluster = load_preset("a100_hdr1", 2)
    yield "## Centauri: FSDP, 16 GPUs of cluster A (Fig. 8)"
    yield ""
    rows, found = [], {}
    for size, model in models.items():
        for batch in (1, 4, 8):
            row = found[size, batch] = centauri_row(Grid(model, cluster, sharded(16, batch), work=work))
            rows.append([size, str(batch), *row.cells])
    yield from table(("LLaMA", "batch per GPU", *_CENTAURI_HEAD), rows)
    yield from _partitions(models["big"], cluster, work)
    yield from _hybrid(models, work)
    yield from _data_parallel(models, cluster, work)
    yield from _model_tier(models, work)
    yield from _scalability(models["big"], work, found)
    yield from _ablation(models["big"], cluster, work)


def _statements(found: dict[tuple[str, int], Row], on_b: Row) -> Iterator[str]:
    """What the text says of Figs 8 and 13."""
    yield "## Centauri: what the paper states"
    yield ""
    gains = {cell: row.gain for cell, row in found.items()}
    sizes = sorted({size for size, _ in gains})
    most, at_eight = max(gains.values()), [gains[size, 8] for size in sizes]
    grows = all(gains[size, 8] >= gains[size, 1] for size in sizes)
    kept = [row.keeps_bound for row in (*found.values(), on_b)]
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [
            ["largest gain over ZeRO-3 in FSDP, cluster A", "1.45", f"{most:.2f}", verdict(most - 1, 0.45)],
            [
                "gain at batch 8 over 1.4 for all sizes",
                "> 1.4",
                f"{min(at_eight):.2f} to {max(at_eight):.2f}",
                "reproduced" if min(at_eight) > 1.4 else "not",
            ],
            ["the gain grows with the batch", "yes", "yes" if grows else "no", "reproduced" if grows else "not"],
            [
                "gain on cluster B, 256 GPUs",
                "1.05",
                f"{on_b.gain:.2f}",
                verdict(on_b.gain - 1, 0.05),
            ],
            [
                "overlap gains no more than min(1/a, 1/(1-a)) over serial",
                "yes",
                f"{sum(kept)} of {len(kept)} cells with the baseline's bytes",
                "reproduced" if all(kept) else "not",
            ],
        ],
    )


def _partitions(model: TransformerModel, cluster: Cluster, work: SearchBudget) -> Iterator[str]:
    """Fig. 12: how the gathers of one forward layer are taken apart, by batch."""
    yield "## Centauri: partition of the gathers of a forward layer by matrix, FSDP on 16 GPUs, big (Fig. 12)"
    yield ""
    rows = []
    for batch in (1, 4, 8):
        problem = Grid(model, cluster, sharded(16, batch), work=work).problem(Unit.MATRIX)
        plan = Centauri().plan(problem)
        layer = model.num_layers // 2
        gathers = [
            op.name
            for op in problem.iteration.comms
            if op.collective.kind is CollectiveKind.ALL_GATHER
            and op.origin.layer == layer
            and op.origin.phase is Phase.FORWARD
        ]
        kinds = [
            ", ".join(_words(step) for step in plan.rewrites if _of(step) in (name, f"{name}#0")) or "whole"
            for name in gathers
        ]
        rows.append([str(batch), "; ".join(kinds), str(len(set(kinds)))])
    yield from table(("batch", "matrices in order", "kinds"), rows)
    yield "The paper: little at batch 1, diverse at 4, everything hidden at 8."
    yield ""


def _of(step: Rewrite) -> str:
    return step.comm if isinstance(step, PartitionGroups | Split) else ""


def _words(step: Rewrite) -> str:
    if isinstance(step, Split):
        return f"{step.num_chunks} chunks"
    assert isinstance(step, PartitionGroups)
    first = "between nodes" if step.order[0] == 0 else "in nodes"
    return f"{first} first" + (f" with {len(step.chain)} computations" if step.chain else "")


def _scalability(model: TransformerModel, work: SearchBudget, found: dict[tuple[str, int], Row]) -> Iterator[str]:
    """Figs 13 and 14: gains by number of GPUs on both clusters."""
    clusters = {"A": "a100_hdr1", "B": "a100_hdr4"}
    yield "## Centauri: FSDP by number of GPUs, big, batch 4 (Fig. 13)"
    yield ""
    rows, last = [], None
    for name, preset in clusters.items():
        for num in (16, 64, 256):
            last = centauri_row(Grid(model, load_preset(preset, num // 8), sharded(num, 4), work=work))
            rows.append([name, str(num), *last.cells])
    yield from table(("cluster", "GPUs", *_CENTAURI_HEAD), rows)
    yield "## Centauri: FSDP16 + DP by number of GPUs, big, batch 4 (Fig. 14)"
    yield ""
    rows, gains = [], {}
    for name, preset in clusters.items():
        for num in (32, 64, 128, 256):
            grid = Grid(model, load_preset(preset, num // 8), sharded(num, 4, replicate=num // 16), work=work)
            row = gains[name, num] = centauri_row(grid)
            rows.append([name, str(num), *row.cells])
    yield from table(("cluster", "GPUs", *_CENTAURI_HEAD), rows)
    on_a = [gains["A", num].gain for num in (32, 64, 128, 256)]
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [
            [
                "Centauri keeps a high speedup on A whatever the number of GPUs",
                "yes",
                f"{min(on_a):.2f} to {max(on_a):.2f}",
                "reproduced" if min(on_a) > 1.2 else "not",
            ]
        ],
    )
    assert last is not None
    yield from _statements(found, last)


def _ablation(model: TransformerModel, cluster: Cluster, work: SearchBudget) -> Iterator[str]:
    """Each dimension and tier left out (Table 1's columns): ms of a step."""
    yield "## Centauri: each dimension of the partition and each tier left out; ms, big, batch 4"
    yield ""
    cells = {
        "FSDP16": Grid(model, cluster, sharded(16, 4), work=work),
        "DP16, two micro-batches": Grid(model, cluster, sharded(16, 4, stage=1, batches=2), work=work),
        "DP3 + FSDP16": Grid(model, load_preset("a100_hdr1", 6), sharded(48, 4, replicate=3), work=work),
        "TP4 + FSDP4": Grid(
            model,
            cluster,
            ParallelLayout(tensor=4, data=4, zero_stage=3, micro_batch=4, global_batch=16),
            work=work,
        ),
    }
    left_out = {
        "all": Centauri(),
        "primitive": Centauri(primitive=False),
        "group": Centauri(group=False),
        "workload": Centauri(workload=False),
        "layer": Centauri(layer_tier=False),
        "model": Centauri(model_tier=False),
    }
    rows = []
    for name, grid in cells.items():
        problems = (grid.problem(), grid.problem(Unit.MATRIX))
        rows.append([name, *(f"{1e3 * _shortest(problems, planner):.0f}" for planner in left_out.values())])
    heads = [name if name == "all" else f"without {name}" for name in left_out]
    yield from table(("step", *heads), rows)


def _hybrid(models: dict[str, TransformerModel], work: SearchBudget) -> Iterator[str]:
    yield "## Centauri: FSDP + DP, 48 GPUs of cluster A (Fig. 10)"
    yield ""
    rows, gains = [], {}
    cluster = load_preset("a100_hdr1", 6)
    for shard in (16, 8, 4):
        grid = Grid(models["big"], cluster, sharded(48, 4, replicate=48 // shard), work=work)
        row = centauri_row(grid)
        gains[shard] = row.gain
        rows.append([f"DP{48 // shard} + FSDP{shard}", *row.cells])
    yield from table(("groups", *_CENTAURI_HEAD), rows)
    most = max(gains.values())
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [["largest gain of hybrid sharding", "1.49", f"{most:.2f}", verdict(most - 1, 0.49)]],
    )


def _data_parallel(models: dict[str, TransformerModel], cluster: Cluster, work: SearchBudget) -> Iterator[str]:
    """Fig. 9: Centauri's all-gather slides past the optimizer, which is the data flow of ZeRO stage 1."""
    yield "## Centauri: DP, 16 GPUs of cluster A (Fig. 9); ms, two micro-batches of 4"
    yield ""
    memory = cluster.gpu.memory_bytes
    rows, overfull, fastest = [], [], []
    for size in ("small", "medium", "big", "large"):
        plain = Grid(models[size], cluster, sharded(16, 4, stage=0, batches=2), work=work).problem()
        shared = Grid(models[size], cluster, sharded(16, 4, stage=1, batches=2), work=work).problem()
        cells, seconds, over = [], [], []
        for problem, planner in (
            (plain, baselines.ddp()),
            (plain, baselines.OutOfOrder()),
            (shared, baselines.zero2()),
            (shared, Megatron()),
            (replace(shared, memory_limit_bytes=memory), Centauri()),
        ):
            found = predicted(problem, planner)
            over.append(found.peak_bytes > memory)
            seconds.append(found.overlap.makespan_s)
            cells.append(f"{found.overlap.makespan_s * 1e3:.0f}" + (" (out of memory)" if over[-1] else ""))
        rows.append([size, *cells])
        overfull.append(all(over[:2]) and not any(over[2:]))
        fastest.append(seconds[-1] < min(seconds[2:-1]))
    yield from table(("LLaMA", "DDP", "out of order", "ZeRO-2", "Megatron", "Centauri (simulated)"), rows)
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [
            [
                "DDP and out of order run out of memory, the others do not",
                "frequently",
                _of_all(overfull),
                _held(overfull),
            ],
            ["Centauri is ahead of what fits", "yes", _of_all(fastest), _held(fastest)],
        ],
    )


def _of_all(cases: Sequence[bool]) -> str:
    return f"{sum(cases)} of {len(cases)} sizes"


def _held(cases: Sequence[bool]) -> str:
    return "reproduced" if all(cases) else "not"


def _model_tier(models: dict[str, TransformerModel], work: SearchBudget) -> Iterator[str]:
    """Fig. 11: TP4 + PP3 + DP4 on 48 GPUs, six micro-batches; one stage's costs into Eq. 2."""
    yield "## Centauri: TP4 + PP3 + DP4, 48 GPUs of cluster A, 6 micro-batches (Fig. 11), equation 2"
    yield ""
    cluster = load_preset("a100_hdr1", 6)
    rows, launched, shares = [], {}, []
    for batch in (1, 4):
        stage = replace(models["medium"], num_layers=models["medium"].num_layers // 3)
        layout = ParallelLayout(
            tensor=4,
            data=4,
            zero_stage=1,
            sequence_parallel=True,
            micro_batch=batch,
            global_batch=4 * batch,
        )
        problem = Grid(stage, cluster, layout, work=work).problem()
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
        launched[batch] = (relaxed.forward, relaxed.backward)
        shares.append(6 * tensor / (step + 6 * tensor))
        rows.append(
            [
                str(batch),
                f"{costs.gather_s * 1e3:.0f} / {costs.scatter_s * 1e3:.0f}",
                f"{costs.forward_s * 1e3:.0f} / {costs.backward_s * 1e3:.0f}",
                f"{relaxed.forward} / {relaxed.backward}",
                stated,
                f"{shares[-1]:.1%}",
            ]
        )
    yield from table(
        (
            "batch",
            "gather / scatter, ms",
            "forward / backward, ms",
            "L1 / L2 (relaxed)",
            "paper",
            "TP share of the serial step",
        ),
        rows,
    )
    words = {batch: " / ".join(map(str, pair)) for batch, pair in launched.items()}
    yield from table(
        ("statement", "paper", "here", "verdict"),
        [
            ["micro-batches together, batch 1", "6", words[1], _held([launched[1] == (6, 6)])],
            ["micro-batches together, batch 4", "p = 3", words[4], _held([launched[4] == (3, 3)])],
            [
                "tensor parallelism is little",
                "< 5 %",
                " and ".join(f"{share:.1%}" for share in shares),
                _held([share < 0.05 for share in shares]),
            ],
        ],
    )


def _sum(seconds: Callable[[Op], float], ops: Sequence[Op], kind: CollectiveKind, group: str) -> float:
    found = [op for op in ops if isinstance(op, CommOp) and op.collective.kind is kind and op.communicator == group]
    return sum(seconds(op) for op in found)
