"""Which sequence length and recomputation explain the micro-batches of the Lagom paper's Table 2.

Section 4.1: "the micro-batch size was set to the maximum value that could fit within GPU memory" (48 GB), and the paper
gives neither. A setting explains a row if its micro-batch fits and twice as much does not (all are powers of two). Of
five lengths and five ways to keep activations, 4096 tokens with flash attention and no recomputation explain most rows;
`table2.toml` takes them, and the least recomputation that fits where that does not.

Memory is `workload.parallel.memory`'s: gradients of 2 bytes, Adam's 12, the experts' share, logits with their softmax;
sharded optimizer states under FSDP and expert parallelism. The CUDA context, NCCL's buffers and the allocator's
fragmentation are left out, some gigabytes in all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from lagom_overlap.papers.workloads.table2 import TENSOR_DEGREE, PaperStrategy, PaperWorkload
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute, plan_stages, stage_memory
from lagom_overlap.workload.precision import HALF

A40_BYTES: Final = 48_000_000_000
_ZERO_STAGES: Final = {PaperStrategy.FSDP: 3, PaperStrategy.TP: 0, PaperStrategy.EP: 1}
LENGTHS: Final = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class BatchSetting:
    """What the paper leaves open about memory."""

    seq_len: int
    recompute: Recompute
    flash_attention: bool


def settings() -> Iterator[BatchSetting]:
    """All that are looked at: selective recomputation is what a plain attention has, flash attention needs none."""
    ways = (
        (Recompute.NONE, True),
        (Recompute.NONE, False),
        (Recompute.SELECTIVE, False),
        (Recompute.FULL, True),
        (Recompute.FULL, False),
    )
    for seq_len, (recompute, flash) in product(LENGTHS, ways):
        yield BatchSetting(seq_len, recompute, flash)


def peak_bytes(workload: PaperWorkload, setting: BatchSetting, micro_batch: int) -> int:
    """Bytes of one GPU with that micro-batch."""
    model, data = load_model(workload.model), workload.data
    tensor = TENSOR_DEGREE if workload.strategy is PaperStrategy.TP else 1
    layout = ParallelLayout(
        tensor=tensor,
        data=data,
        expert=data if workload.strategy is PaperStrategy.EP else 1,
        zero_stage=_ZERO_STAGES[workload.strategy],
        micro_batch=micro_batch,
        global_batch=micro_batch * data,
        recompute=setting.recompute,
        flash_attention=setting.flash_attention,
    )
    (stage,) = plan_stages(model, layout)
    return stage_memory(model, layout, stage, setting.seq_len, HALF).total_bytes


def explains(workload: PaperWorkload, setting: BatchSetting, memory_bytes: int = A40_BYTES) -> bool:
    """Whether the row's micro-batch is the largest power of two that fits."""
    fits, twice = (peak_bytes(workload, setting, n * workload.micro_batch) <= memory_bytes for n in (1, 2))
    return fits and not twice


def inferred(workloads: Iterable[PaperWorkload]) -> tuple[BatchSetting, tuple[str, ...]]:
    """The setting that explains most rows (the first of equals), and the rows that it leaves open."""
    rows = {workload.name: workload for workload in workloads}
    best = max(settings(), key=lambda setting: sum(explains(row, setting) for row in rows.values()))
    return best, tuple(name for name, row in rows.items() if not explains(row, best))
