"""Bytes that memory-bound kernels move per element of a 2-byte activation, in fused kernels and in eager PyTorch.

Fused: each is one kernel that reads its inputs and writes its results once (Apex, Transformer Engine, what inductor
makes of the same lines). Eager counts the kernels that PyTorch launches for torchtitan's lines
(`models/llama/model.py`, Dec 2024) and their backward, reads plus writes, a float cast being 2 + 4:

- RMS norm, forward: cast 6, pow 8, mean 4, epsilon and root of one number per row, times that 8, cast back 6, times
  weight 4; backward: gradient times x 6 and times weight 4, the former's sum 2, cast 6, times x 12, times the root 8,
  sum 4, three of one number per row, mean 4, pow 8, twice 8, times the mean's 12, sum of the two 12, cast 6;
- latent attention's queries, keys and values, put together from their parts: 4 per element of each;
- rotary, forward and backward each: cast 6, complex product 8, cast back 6; inductor makes no complex product either
  (`unsupported_input_tensor` in its `lowering.py`), so that compiled blocks have these three, too;
- keys and values repeated for every head (`repeat_kv`): read 2, written 2 for each head that shares them; their
  gradients' sum in backward the same the other way;
- SwiGLU, per column of the product: silu 4, product 6; backward: two products 6 each, silu 6;
- cross entropy per logit: cast 6, log-softmax 16 (a row that does not fit into 48 KiB of shared memory is read for its
  maximum, its sum and its result: `SoftMax.cu`); backward: one hot 4, log-softmax 16 (the gradient's row twice),
  cast 6. Compiled: two passes over 2-byte logits forward, one read and one write backward;
- the same of logits that tensor parallelism cuts (`loss_parallel`, whose operators DTensor issues one by one): cast 6,
  maximum 4, subtraction 8, exponential 8, sum 4, subtraction 8; backward: zeros 4, exponential 8, sum 12, times the
  loss's gradient 8, cast 6. Compiled (torchtitan @820504e, PyTorch 2.15): maximum 2, sum of exponentials 2, zeros 4,
  the gradient in FP32 made of logits and zeros 10; backward: times the loss's gradient, cast 6.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from lagom_overlap.workload.parallel.layout import Dispatcher


class Accumulation(StrEnum):
    """How a weight's gradient gets into the buffer where those of all micro-batches meet.

    Nothing that costs; a kernel that adds it in its own format; the product that makes it, whose epilogue reads and
    writes FP32 (Megatron-LM since February 2022).
    """

    FREE = "free"
    ADDED = "added"
    FUSED = "fused"


Kernels = tuple[int, ...]
"""An operator's kernels, each by the bytes that it moves per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What kernels move forward and backward; `gated` per column of a gated activation, `loss` in all, per logit.

    `cut_loss` is `loss` where tensor parallelism cuts the vocabulary. `fuses_latent`: one kernel turns latent
    attention's queries in place and one makes its keys and values; otherwise all are turned and then copied.
    `scaled_rotary` is `rotary` of angles that YaRN scales, where the fused kernel cannot (None: it can): what
    streams, then what cuts rows into halves and joins them. `repeats_keys`: keys and values are repeated for every
    head before attention. `joins_sums` says that a sum of gradients is a part of the kernel that reads it, as
    inductor makes it: of the norm's backward, or of the copy before a reduction along the second axis.
    """

    norm: tuple[Kernels, Kernels]
    rotary: tuple[Kernels, Kernels]
    gated: tuple[Kernels, Kernels]
    loss: tuple[int, int]
    cut_loss: tuple[int, int]
    fuses_latent: bool = True
    scaled_rotary: tuple[tuple[Kernels, Kernels], tuple[Kernels, Kernels]] | None = None
    repeats_keys: bool = False
    joins_sums: bool = False

    def sum_bytes(self, num_addends: int) -> int:
        """Bytes per element of a sum of gradients: a kernel for each two, or one more read for each."""
        return (2 if self.joins_sums else 6) * (num_addends - 1)

    def sum_launches(self, num_addends: int) -> int:
        """Kernels of that sum."""
        return 0 if self.joins_sums else num_addends - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSteps:
    """Context parallelism as a ring of attentions: bytes per query element and further step, forward and backward.

    PyTorch's `_templated_ring_attention` (2.6 to 2.14): keys and values, repeated to all heads, are gathered once per
    pass; each step's result is merged into an FP32 one, of half the rows where only the second half of the queries
    met the keys; backward adds gradients in FP32 and sends those of keys and values to the next rank after every step.
    With `waits` collectives are waited for where they are issued, which tracing does (`_maybe_wrap_tensor`).

    Counted, half of the steps being of half the rows: forward eager (6 to FP32, 12, 12, 12; half of it and 8 to join)
    36, compiled (10; 5 and 8) 11; backward 11 for the queries, 23 and 16 to join for keys and values.
    """

    merge_bytes: tuple[int, int]
    waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """Bytes per element of scaling and casting to FP8.

    `operand`: an input in forward or a gradient in backward, with its copy by columns for the weight's gradient;
    `operand_again`: an input that is computed again. `weight`: a matrix in forward, again, and in backward;
    `keeps_weights`: that of a step's first micro-batch serves the others. `maximum`, a part of both that are done
    again, is what a saved greatest element spares. `by_columns` are those of the copy by columns
    where a kernel of its own makes it, which alone rearranges; 0: each cast writes both. `current_expert` is the read
    for its own greatest element that an expert's operand costs more with current scaling. `joined`: a compiler makes
    the casts of dense layers part of other kernels (`step/joined.py`).
    """

    operand: int
    operand_again: int
    weight: tuple[int, int, int]
    keeps_weights: bool = False
    maximum: int = 0
    by_columns: int = 0
    current_expert: int = 0
    joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How a framework runs a mixture of experts.

    `apart`: each expert's product and cast is a kernel of its own (Transformer Engine's `GroupedLinear`), not one for
    all (PyTorch's grouped product). `fuses_moves`: kernels of Megatron-LM's dispatchers take tokens to their experts
    (`step/experts.py`), not PyTorch's operators on indices. `router_launches` are the router's kernels after its
    product.
    """

    apart: bool = False
    fuses_moves: bool = False
    router_launches: int = 4

    def counting_launches(self, dispatcher: Dispatcher, num_ranks: int) -> int:
        """Kernels, copies to the host and small collectives that find out how many rows go where.

        All-to-all: four sums and casts of the map, the gather of all ranks' counts, four sums of those, four copies to
        the host, the probabilities' all-to-all. Merged: the map and the probabilities laid out for the kernel, its scan
        of them, the copy to the host. One rank has two of the sums and one copy. A capacity is known beforehand; its
        indices take a sort.
        """
        if not self.fuses_moves:
            return 0
        if num_ranks == 1 and dispatcher is Dispatcher.ALL_TO_ALL:
            return 3
        return {Dispatcher.ALL_TO_ALL: 14, Dispatcher.CAPACITY: 4, Dispatcher.MERGED: 6}[dispatcher]


PLAIN_MIXTURE: Final = Mixture()
MEGATRON_MIXTURE: Final = Mixture(apart=True, fuses_moves=True, router_launches=6)
TRANSFORMER_ENGINE_CASTS: Final = Casts(
    operand=4, operand_again=4, weight=(4, 0, 0), keeps_weights=True, current_expert=2
)
"""Transformer Engine: read 2, written by rows and by columns. A matrix is cast with its transpose in the forward of a
step's first micro-batch (`_Linear.forward`: `is_first_microbatch`, which Megatron-Core sets on its layers and clears
after their first forward), and backward, recomputation and the other micro-batches read those. `GroupedLinear`
quantizes expert by expert (`split_quantize`, v2.9): with current scaling each operand is read for its greatest element
first, by kernels that C++ launches right before the cast and that are not counted as launches."""
NVFP4_CASTS: Final = Casts(operand=7, operand_again=7, weight=(5, 0, 0), keeps_weights=True)
"""Transformer Engine's NVFP4 (`NVFP4Quantizer::quantize_impl`, v2.9 to v2.14, and its kernels for all experts at once):
an operand is read for its greatest elements, as it is and after its Hadamard transform, by rows, and by columns with
the transform, 2 each, and written twice with 4.5 bits; a matrix has no transform and is read twice. v2.16 reads an
operand once less."""
DYNAMIC_CASTS: Final = Casts(operand=8, operand_again=5, weight=(5, 5, 3), maximum=2, by_columns=3)
"""torchao with one scale per tensor (Dec 2024 to Jun 2025): maximum 2, cast 2 + 1, by columns 2 + 1. The FP8 matrix is
kept or computed again for backward, which reads it by columns."""
JOINED_CASTS: Final = replace(DYNAMIC_CASTS, joined=True)
RING_EAGER: Final = RingSteps(merge_bytes=(36, 50), waits=False)
RING_COMPILED: Final = RingSteps(merge_bytes=(11, 50), waits=True)
_HALVES_BYTES: Final = 8
"""Per column of a gated activation: the gradients of its two inputs, read and written next to each other."""
FUSED: Final = Traffic(norm=((4,), (6, 0)), rotary=((4,), (4,)), gated=((6,), (10,)), loss=(36, 22), cut_loss=(36, 22))
"""Megatron-LM's kernels. Its vocabulary-parallel cross entropy is not fused: cast to FP32 (6), maximum (4), subtraction
(8), exponential (8), sum (2), quotient (8); backward: minus one hot (8), times the loss's gradient (8), cast (6). A
norm's second backward kernel sums the few partial gradients of its scale."""
UNFUSED_ROTARY: Final = (((4, 4, 6), (2, 4, 4)), ((4, 4, 6, 2, 6), (2, 4)))
"""Megatron-LM's rotary kernels where YaRN scales the angles: Transformer Engine's fused kernel takes no scale, and
PyTorch's operators stand in (`_apply_rotary_pos_emb_bshd` in `rope_utils.py`, NVIDIA/Megatron-LM @0d8e0714 to
@cd4afffa, the commits of Megatron-Bridge 25.11 to 26.08). Forward: times cosines 4, times sines 4, their sum 6; half
negated 2, joined 4, and joined once more with the columns that are not turned, of which there are none, 4. Backward:
the two products 8, gradients added 6, zeros for those columns 2, added 6; half negated 2, joined 4. Queries and keys
apart."""
FUSED_LOSS: Final = ((2, 4), (4,))
"""Transformer Engine's cross entropy (`common/triton/cross_entropy.py`, v2.12), forward and backward: a pass for
maximum and sum, one that writes the gradient over the logits; that times the loss's gradient."""
LOSS_LAUNCHES: Final = (10, 4)
"""Of the cross entropy that is not fused."""
EAGER: Final = Traffic(
    norm=((6, 8, 4, 0, 0, 8, 6, 4), (6, 4, 2, 6, 12, 8, 4, 0, 0, 0, 4, 8, 8, 12, 12, 6)),
    rotary=((6, 8, 6), (6, 8, 6)),
    fuses_latent=False,
    repeats_keys=True,
    gated=((4, 6), (6, 6, 6)),
    loss=(22, 26),
    cut_loss=(38, 38),
)
COMPILED_BLOCKS: Final = replace(
    FUSED, rotary=EAGER.rotary, repeats_keys=True, loss=EAGER.loss, cut_loss=EAGER.cut_loss, joins_sums=True
)
COMPILED: Final = replace(COMPILED_BLOCKS, loss=(4, 4), cut_loss=(18, 6))
PLAIN: Final = replace(
    EAGER,
    norm=FUSED.norm,
    rotary=FUSED.rotary,
    repeats_keys=False,
    gated=(EAGER.gated[0], (*EAGER.gated[1], _HALVES_BYTES)),
)
"""Eager PyTorch where norms are one operator (`torch.nn.RMSNorm`, fused on GPUs since 2.9, and `LayerNorm`) and rotary
positions one kernel: both vary with the model's code. SwiGLU and cross entropy have no such operator. One product makes
gate and up, whose gradients are put together by a copy (`split`'s backward is `cat`)."""
