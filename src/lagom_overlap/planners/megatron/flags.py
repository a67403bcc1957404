"""Megatron-LM's overlap switches, the rules between them, and how they are written on the command line.

Source: "Communication Overlap in Megatron-LM" (notes, December 2025), corrected against Megatron-LM at d98e8a6
(2026-08-22) as the specification says (planners, section 3). What the notes print wrong and we do right:

- Bulk pairs: the gather of the saved input, which the weight's gradient needs, runs under the product for the input's
  gradient (`bulk_dgrad`); the scatter of that gradient runs under the product for the weight's (`bulk_wgrad`). The
  notes have them the other way round, where each would wait for its own result.
- `--tp-comm-bulk-wgrad`, `--tp-comm-overlap-ag` and so on do not exist: `--tp-comm-overlap` turns all but
  `--tp-comm-overlap-rs-dgrad` on, `--disable-...` turns them off.
- `--overlap-p2p-comm` and `--batch-p2p-comm` do not exist: overlap is the default of the interleaved schedule
  (`--no-overlap-p2p-communication` turns it off), and the schedule without interleaving has none.

Every switch that is written here is parsed by Megatron-LM 0.14 to 0.19 and at d98e8a6.
"""

from dataclasses import dataclass
from enum import StrEnum

from lagom_overlap.errors import JobError

MIN_BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000
USERBUFFER_SPLITS = 4
"""Pieces of a pipelined gather or scatter (Transformer Engine's default)."""


_FULLY_SHARDED = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--ckpt-format fsdp_dtensor",
)
"""Megatron-FSDP on parameters, gradients and states: no default of every release, and it refuses another checkpoint."""


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
    `bucket_elements` None is Megatron's rule. `sequence_parallel` shards norms and dropouts along the sequence, and
    `virtual_layers` is how many layers a chunk of the interleaved schedule has (None: no interleaving), and
    `micro_batch_group` how many micro-batches go through a chunk together (None: as many as there are stages): all are
    of another step than the one that is planned, so they are chosen before. `is_first_stage`: other pipeline
    ranks have one bucket.
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
    overlap_p2p: bool = False
    batch_p2p: bool = False
    interleaved: bool = False
    nccl_userbuffers: bool = False
    megatron_fsdp: bool = False
    double_buffer: bool = False
    sequence_parallel: bool = False
    virtual_layers: int | None = None
    micro_batch_group: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_elements is not None and self.bucket_elements < 1:
            raise JobError(f"megatron: bucket_elements is {self.bucket_elements}, must be at least 1")
        if self.tensor_splits < 2:
            raise JobError(f"megatron: tensor_splits is {self.tensor_splits}, must be at least 2")
        if self.overlap_p2p and self.batch_p2p:
            raise JobError("megatron: overlap_p2p and batch_p2p exclude each other, one of them must be off")
        if self.overlap_p2p and not self.interleaved:
            raise JobError("megatron: overlap_p2p needs the interleaved schedule; 1F1B without interleaving forbids it")
        if self.rs_dgrad and self.tensor_overlap is not TensorOverlap.PIPELINED:
            raise JobError("megatron: rs_dgrad needs tensor_overlap 'pipelined'")
        if self.delay_weight_grad and not self.overlap_experts:
            raise JobError("megatron: delay_weight_grad needs overlap_experts: Megatron-LM refuses it alone")
        if self.nccl_userbuffers and not (self.megatron_fsdp and self.double_buffer):
            raise JobError(
                "megatron: nccl_userbuffers needs megatron_fsdp and double_buffer: its buffers are registered"
            )

    def arguments(self) -> tuple[str, ...]:
        """The switches as Megatron's command line has them."""
        found: list[str] = []
        if self.overlap_grad_reduce:
            found.append("--overlap-grad-reduce")
        if self.overlap_param_gather or self.megatron_fsdp:
            found.append("--use-distributed-optimizer")
        if self.overlap_param_gather:
            found.append("--overlap-param-gather")
        if self.bucket_elements is not None:
            found.append(f"--ddp-bucket-size {self.bucket_elements}")
        if self.sequence_parallel:
            found.append("--sequence-parallel")
        found += self._tensor_arguments()
        if self.virtual_layers is not None:
            found.append(f"--num-layers-per-virtual-pipeline-stage {self.virtual_layers}")
        if self.micro_batch_group is not None:
            found.append(f"--microbatch-group-size-per-virtual-pipeline-stage {self.micro_batch_group}")
        if self.interleaved and not self.overlap_p2p:
            found.append("--no-overlap-p2p-communication")
        if self.overlap_experts:
            found.append("--overlap-moe-expert-parallel-comm")
        if self.delay_weight_grad:
            found.append("--delay-wgrad-compute")
        return (*found, *self._fully_sharded_arguments())

    def environment(self, *, has_tensor: bool, is_blackwell: bool) -> dict[str, str]:
        """CUDA_DEVICE_MAX_CONNECTIONS as these switches want it; nothing where they do not care.

        Before Blackwell Megatron's tensor parallelism relies on kernels that start in launch order: one connection.
        Megatron-FSDP refuses one, and the combined 1F1B of experts needs several.
        """
        if self.overlap_experts and not self.megatron_fsdp:
            return {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        if has_tensor and not self.megatron_fsdp and not is_blackwell:
            return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return {}

    def _fully_sharded_arguments(self) -> list[str]:
        return [
            *(_FULLY_SHARDED if self.megatron_fsdp else ()),
            *(["--use-nccl-ub"] if self.nccl_userbuffers else []),
            *(["--fsdp-double-buffer"] if self.double_buffer else []),
        ]

    def _tensor_arguments(self) -> list[str]:
        if self.tensor_overlap is TensorOverlap.PIPELINED:
            return ["--tp-comm-overlap", *(["--tp-comm-overlap-rs-dgrad"] if self.rs_dgrad else [])]
        return []


def default_bucket_elements(num_data_ranks: int) -> int:
    """Megatron's rule: the larger of 40 million elements and one million per data-parallel rank."""
    return max(MIN_BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * num_data_ranks)
