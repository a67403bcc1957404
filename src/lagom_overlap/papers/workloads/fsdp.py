"""The paper's fully sharded step: forward and backward of one micro-batch under FSDP1, everything in bf16.

The paper's PyTorch 2.3 gathers in place, one unit ahead, and reduces on the same stream (arXiv 2602.20656, section
4.3, Fig. 8: pattern 1 is an all-gather during a forward layer, pattern 2 a reduce-scatter and an all-gather during a
backward layer). The optimizer is left out: it overlaps nothing.
"""

from dataclasses import replace

from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Phase
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.step import build_step, load_rules


def fsdp_iteration(model: TransformerModel, *, num_ranks: int, micro_batch: int, seq_len: int) -> Iteration:
    """Forward and backward of one micro-batch over `num_ranks` ranks.

    Raises:
        JobError: if the layout does not fit the model.
    """
    layout = ParallelLayout(data=num_ranks, zero_stage=3, micro_batch=micro_batch, global_batch=micro_batch * num_ranks)
    issued = build_step(model, layout, seq_len=seq_len, rules=load_rules("fsdp1")).issued
    ops = tuple(op for op in issued.ops if op.origin.phase is not Phase.OPTIMIZER)
    return replace(issued, ops=ops, buffers=())
