"""Table 2 of the Lagom paper (arXiv 2602.20656v1): models, batches and degrees, as data, and one step of each row.

A step is one micro-batch's forward and backward; an iteration is `num_steps` of them and a `tail` that overlaps
nothing: the reduction of gradients over data-parallel ranks and the optimizer. FSDP reduces in every step, so its tail
is the optimizer alone.

Departures: the paper gives no sequence length and no recomputation (4096 and none, inferred in
`benchmarks/batch_fit.py`; full for DeepSeek-MoE, which does not fit otherwise), no precision (bf16, gradients too) and
no optimizer (Adam: 28 bytes per own parameter read and written); gradients of tensor and expert parallelism are reduced
after the last micro-batch, Megatron's default. Under expert parallelism all parameters but the experts' are reduced
over its ranks.
"""

import tomllib
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import resources

import msgspec

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.papers.workloads.halves import domino_iteration, dual_batch_iteration
from lagom_overlap.papers.workloads.layer_parts import ELEMENT_BYTES
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.ops import MemoryBound, Phase
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.step import build_step, load_rules

TENSOR_DEGREE = 8
"""The table's tensor parallelism."""
OPTIMIZER_BYTES = 28
"""Adam in mixed precision: fp32 weight and two moments read and written, gradient read, bf16 weight written."""


class PaperStrategy(StrEnum):
    """How the paper cuts a model: fully sharded, tensor parallel with two halves, expert parallel with two batches."""

    FSDP = "fsdp"
    TP = "tp"
    EP = "ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperWorkload:
    """One bar group of Fig. 7: a model under a strategy on one cluster; `data` ranks replicate or shard it."""

    model: str
    strategy: PaperStrategy
    cluster: str
    degree: int
    micro_batch: int
    global_batch: int
    seq_len: int
    recompute: Recompute = Recompute.NONE

    def __post_init__(self) -> None:
        if self.global_batch % (self.micro_batch * self.data):
            raise JobError(
                f"workload {self.name}: global_batch is {self.global_batch}, must be a multiple of micro_batch x data "
                f"= {self.micro_batch} x {self.data}"
            )
        if self.recompute is not Recompute.NONE and self.strategy is not PaperStrategy.EP:
            raise JobError(
                f"workload {self.name}: recompute is {self.recompute}, which only expert parallelism has here"
            )

    @property
    def name(self) -> str:
        """`phi-2 FSDP 16`, `phi-2 TP 8 x DP 2`, `olmoe-1b-7b EP 8`."""
        cut = {
            PaperStrategy.FSDP: f"FSDP {self.degree}",
            PaperStrategy.TP: f"TP {TENSOR_DEGREE} x DP {self.degree}",
            PaperStrategy.EP: f"EP {self.degree}",
        }
        return f"{self.model} {cut[self.strategy]}"

    @property
    def data(self) -> int:
        """Ranks that see different sequences."""
        return self.degree

    @property
    def num_steps(self) -> int:
        """Micro-batches of one rank in an iteration."""
        return self.global_batch // (self.micro_batch * self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperStep:
    """One step, how many make an iteration, and what follows the last: gradients to reduce (if any) and the optimizer.

    `spans_nodes` says that each rank's gradients cross the network, which all ranks of a node share.
    """

    iteration: Iteration
    num_steps: int
    optimizer: MemoryBound
    gradients: Collective | None = None
    spans_nodes: bool = False


class _Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    strategy: PaperStrategy
    micro_batch: int
    global_batch: list[int]
    degrees: list[int]
    recompute: Recompute = Recompute.NONE


class _Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    seq_len: int
    clusters: list[str]
    row: list[_Row]


def load_table2() -> tuple[PaperWorkload, ...]:
    """The rows of Table 2 on both clusters, in the table's order."""
    text = (resources.files(__package__) / "data" / "table2.toml").read_text(encoding="utf-8")
    table = msgspec.convert(tomllib.loads(text), _Table)
    return tuple(
        PaperWorkload(
            model=row.model,
            strategy=row.strategy,
            cluster=cluster,
            degree=degree,
            micro_batch=row.micro_batch,
            global_batch=global_batch,
            seq_len=table.seq_len,
            recompute=row.recompute,
        )
        for row in table.row
        for cluster in table.clusters
        for degree, global_batch in zip(row.degrees, row.global_batch, strict=True)
    )


def _dense_params(model: TransformerModel) -> int:
    return model.num_params - model.num_layers * model.expert_layer_params


def paper_step(workload: PaperWorkload) -> PaperStep:
    """One step of a row of Table 2.

    Raises:
        UnknownNameError: if there is no such model.
        JobError: if the degrees do not divide it.
    """
    model = load_model(workload.model)
    common = {"micro_batch": workload.micro_batch, "seq_len": workload.seq_len}
    match workload.strategy:
        case PaperStrategy.FSDP:
            return PaperStep(
                iteration=fsdp_iteration(model, num_ranks=workload.degree, **common),
                num_steps=workload.num_steps,
                optimizer=MemoryBound(OPTIMIZER_BYTES * model.num_params // workload.degree),
            )
        case PaperStrategy.TP:
            own = model.num_params // TENSOR_DEGREE
            gradients = None
            if workload.degree > 1:
                gradients = Collective(CollectiveKind.ALL_REDUCE, own * ELEMENT_BYTES, workload.degree)
            return PaperStep(
                iteration=domino_iteration(model, tensor=TENSOR_DEGREE, **common),
                num_steps=workload.num_steps,
                optimizer=MemoryBound(OPTIMIZER_BYTES * own),
                gradients=gradients,
                spans_nodes=True,
            )
        case PaperStrategy.EP:
            dense = _dense_params(model)
            experts = (model.num_params - dense) // workload.degree
            return PaperStep(
                iteration=dual_batch_iteration(
                    model, expert=workload.degree, recompute=workload.recompute is Recompute.FULL, **common
                ),
                num_steps=workload.num_steps,
                optimizer=MemoryBound(OPTIMIZER_BYTES * (experts + dense // workload.degree)),
                gradients=Collective(CollectiveKind.ALL_REDUCE, dense * ELEMENT_BYTES, workload.degree),
            )


def fsdp_iteration(model: TransformerModel, *, num_ranks: int, micro_batch: int, seq_len: int) -> Iteration:
    """Forward and backward of one fully sharded micro-batch over `num_ranks` ranks, everything in bf16.

    The paper's PyTorch 2.3 (FSDP1) gathers in place, one unit ahead, and reduces on the same stream (arXiv 2602.20656,
    section 4.3, Fig. 8: pattern 1 is an all-gather during a forward layer, pattern 2 a reduce-scatter and an all-gather
    during a backward layer). The optimizer is left out: it overlaps nothing.

    Raises:
        JobError: if the layout does not fit the model.
    """
    layout = ParallelLayout(data=num_ranks, zero_stage=3, micro_batch=micro_batch, global_batch=micro_batch * num_ranks)
    issued = build_step(model, layout, seq_len=seq_len, rules=load_rules("fsdp1")).issued
    ops = tuple(op for op in issued.ops if op.origin.phase is not Phase.OPTIMIZER)
    return replace(issued, ops=ops, buffers=())
