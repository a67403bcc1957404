"""Megatron-LM's overlap as a rewriting of one step: which mechanisms issue the collectives, and what excludes what.

A job's switches, as a launch has them, are `settings`.

Source: "Communication Overlap in Megatron-LM" (notes, December 2025), corrected against Megatron-LM at d98e8a6
(2026-08-22) as the specification says (planners, section 3). What the notes print wrong and we do right:

- Bulk pairs: the gather of the saved input, which the weight's gradient needs, runs under the product for the input's
  gradient (`bulk_dgrad`); the scatter of that gradient runs under the product for the weight's (`bulk_wgrad`). The
  notes have them the other way round, where each would wait for its own result.
- `--tp-comm-bulk-wgrad`, `--tp-comm-overlap-ag` and so on do not exist: `--tp-comm-overlap` turns all but
  `--tp-comm-overlap-rs-dgrad` on, `--disable-...` turns them off.
- `--overlap-p2p-comm` and `--batch-p2p-comm` do not exist: overlap is the default of the interleaved schedule
  (`--no-overlap-p2p-communication` turns it off), and the schedule without interleaving has none.
"""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.errors import JobError
from lagom_overlap.workload.step.rules import load_rules

USERBUFFER_SPLITS = 4
"""Pieces of a pipelined gather or scatter (Transformer Engine's default)."""


class TensorOverlap(StrEnum):
    """How tensor-parallel collectives run: everything waited for, overlapped with backward products, also in pieces."""

    NONE = "none"
    BULK = "bulk"
    PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlags:
    """One setting of the switches.

    `tensor_overlap` BULK is what Megatron does by itself (with sequence parallelism both bulk pairs, without it the
    all-reduce of input gradients under the weight's product), and no switch of Megatron 0.17 or later turns it off:
    NONE is a baseline. PIPELINED is `--tp-comm-overlap`, which needs sequence
    parallelism. `rs_dgrad` pipelines the scatter with the product for the input's gradient instead of the bulk pair.
    `bucket_elements` None is Megatron's rule. `is_first_stage`: other pipeline ranks have one bucket.
    """

    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    bucket_elements: int | None = None
    is_first_stage: bool = True
    tensor_overlap: TensorOverlap = TensorOverlap.BULK
    rs_dgrad: bool = False
    tensor_splits: int = USERBUFFER_SPLITS
    overlap_experts: bool = False
    delay_weight_grad: bool = False

    def __post_init__(self) -> None:
        if self.bucket_elements is not None and self.bucket_elements < 1:
            raise JobError(f"megatron: bucket_elements is {self.bucket_elements}, must be at least 1")
        if self.tensor_splits < 2:
            raise JobError(f"megatron: tensor_splits is {self.tensor_splits}, must be at least 2")
        if self.rs_dgrad and self.tensor_overlap is not TensorOverlap.PIPELINED:
            raise JobError("megatron: rs_dgrad needs tensor_overlap 'pipelined'")
        if self.delay_weight_grad and not self.overlap_experts:
            raise JobError("megatron: delay_weight_grad needs overlap_experts: Megatron-LM refuses it alone")


def default_bucket_elements(num_data_ranks: int) -> int:
    """Megatron's rule: the larger of 40 million elements and one million per data-parallel rank."""
    elements = load_rules("megatron").default_bucket_elements(num_data_ranks)
    assert elements is not None, "frameworks/megatron.toml has bucket_elements"
    return elements
