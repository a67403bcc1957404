"""What PyTorch holds at the fullest moment of a training step that it runs operator by operator.

Formulas of activations (`memory`) count what backward reads at the least. Eager PyTorch holds more, and the fullest
moment need not be the one with all activations. Counted, per GPU, from PyTorch 2.15's own code:

    layers' results  what an operator saves: both halves of a gated product and what SiLU made of one (Inductor makes
                     that again), queries and keys before and after they are turned, where one product made them with
                     the values; the input that sequence parallelism gathered; FP32 residuals under autocast.
    loss             `cross_entropy` on FP32 logits saves their log-softmax (4 bytes a logit); its backward makes the
                     gradient of the log-softmax (4) and of the logits (4) while the saved one is there (one more where
                     tensor parallelism cuts the logits), and a job that keeps its logits in a variable has them too
                     (2). All activations are there, nothing is gathered.
    head             its gradient, the FP32 copy that is reduced, and what is gathered next to it.
    layers           of FSDP2 (`_fsdp_param_group.py`, `_fsdp_collectives.py`): the layer's whole parameters, the next
                     one's gather, its gradients, the reduction's input of this layer and of the unit before it, which
                     is held until its own is over; and what backward makes inside the layer.
    update           multi-tensor AdamW makes one temporary for all parameters of a group (4 bytes each).

The largest of them is the peak. cuBLAS's workspace is PyTorch's own memory, too. Not counted: the CUDA context and
NCCL's buffers, which are in no figure of PyTorch's; fragmentation, which `cached_bytes` estimates.
"""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.units import MIB
from lagom_overlap.workload.layer_kinds import LayerKind, Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import ParallelLayout, Recompute

MASTER_BYTES: Final = 4
"""Per parameter: FP32 weights."""
MOMENT_BYTES: Final = 8
"""Per parameter: AdamW's two moments, in FP32."""
WORKSPACE_BYTES: Final = 32 * MIB
"""cuBLAS's on Hopper (`CUDABlas.cpp`: 4096 KiB eight times); elsewhere it is 8 MiB, which changes nothing."""
NUM_JOBS: Final = 37
"""Jobs of `benchmarks/memory_accuracy.py`."""
WORST_ALLOCATED: Final = 0.06
"""The worst error of theirs, rounded up."""
WORST_RESERVED: Final = 0.08
"""The same of what the allocator reserved."""
_CACHED: Final = (10, 4, 4)
"""What PyTorch keeps beyond what is allocated, in bytes per parameter of a layer that FSDP2 gathers and reduces, per
logit, and per parameter that a GPU updates. Fitted on those 37 jobs (9.7, 3.7, 3.8; by left-out jobs 3.3 % in the mean,
worst 7.7 %) and rounded: buffers of other streams, what the loss gives back, the update's temporaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerStep:
    """What a framework holds, or does not, of what eager PyTorch would.

    `keeps_logits`: the job's own variable holds them during backward. `runs_blocks`: layers run operator by operator;
    compiled ones compute pointwise results again. `runs_loss`, `runs_update`: so do the loss and AdamW's update.
    `is_joint`: one product makes q, k and v. `keeps_gathered`: a product keeps the input that sequence parallelism
    gathered. `autocasts`: parameters and residuals are FP32 and products take copies, which live as long as a forward.
    `in_buckets`: gradients are copied into buckets (DDP) and parameters are whole.
    """

    keeps_logits: bool = True
    runs_blocks: bool = True
    runs_loss: bool = True
    runs_update: bool = True
    is_joint: bool = True
    keeps_gathered: bool = True
    autocasts: bool = False
    in_buckets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What the moments of a step are made of, on one GPU.

    `params` of them are whole or gathered, `own` are its share of each update. `kept_bytes` is what all layers keep
    until the loss, `layer_bytes` what one of them does, `again_bytes` what of one is made again. `layer`, `head` and
    `embedding` are the parameters that travel together, `layers` those of all `num_layers` layers. `made` are those of
    a layer whose gradients are there first, `copied` those of which autocast's copies are kept for backward. `logits`
    are elements, `rows` those of the head's input, `inside_bytes` what backward makes in a layer. `accumulates`:
    gradients of an earlier micro-batch are there.
    Unless `is_whole` says that all parameters are, they are gathered unit by unit, `ahead` units ahead in backward
    (told by a list: `has_list`) and `ahead_forward` in forward. They are freed after their forward, but for
    `kept_layers` of the last layers, `kept_head` and `kept_embedding`, and after their backward; those of the `root`, a
    tied table, stay until the end. `reduce_buffers` inputs of reductions may be in flight.
    """

    params: int
    own: int
    element_bytes: int
    reduced_bytes: int
    kept_bytes: int
    layer_bytes: int
    again_bytes: int
    layer: int
    layers: int
    num_layers: int
    made: int
    copied: int
    head: int
    embedding: int
    logits: int
    rows: int
    inside_bytes: int
    accumulates: bool
    is_whole: bool
    ahead: int
    has_list: bool
    ahead_forward: int
    kept_layers: int
    kept_head: int
    kept_embedding: int
    root: int
    reduce_buffers: int
    holds_gradients_whole: bool
    is_trained: bool
    is_loss_cut: bool

    def gathered(self, *, at_work: int, passed: int = 0) -> int:
        """Parameters of layers that are there in backward, which has passed so many layers and has `at_work` in hand.

        Without a list FSDP2 gathers the unit before, which may be a kept one; lists leave those out.
        """
        if self.is_whole:
            return 0
        kept, ahead = max(0, self.kept_layers - passed * self.layer), self.ahead * self.layer
        size = max(kept, at_work * self.layer) + ahead if self.has_list else max(kept, at_work * self.layer + ahead)
        return min(size, max(self.layer, self.layers - passed * self.layer))

    @property
    def gathered_last(self) -> int:
        """The same where backward is in the first layer: what is gathered ahead of it is counted as a layer."""
        if self.is_whole:
            return 0
        return self.layer if self.kept_layers >= self.layers else min((1 + self.ahead) * self.layer, self.layers)

    @property
    def gathered_forward(self) -> int:
        """The same in forward's last layer."""
        if self.is_whole:
            return 0
        return max(self.kept_layers, min((1 + self.ahead_forward) * self.layer, self.layers))

    def reducing(self, passed: int) -> int:
        """Gradients whose reduction may not have ended when backward has passed so many layers."""
        if passed >= self.reduce_buffers:
            return self.reduce_buffers * self.layer
        return passed * self.layer + (0 if self.root else self.head)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is there at one moment besides weights and the optimizer's moments."""

    gradients: int
    activations: int
    transient: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.gradients + self.activations + self.transient


def extra_layer_bytes(
    model: TransformerModel,
    layout: ParallelLayout,
    seq_len: int,
    kind: LayerKind,
    *,
    facts: EagerStep,
    recompute: Recompute,
) -> int:
    """What a layer keeps beyond `layer_activation_bytes` where PyTorch itself runs it."""
    tokens, t = layout.micro_batch * seq_len // layout.context, layout.tensor
    around = t if layout.sequence_parallel else 1
    cut = whole = 0
    if facts.autocasts:
        whole += 2 * model.hidden * (1 if recompute is Recompute.FULL else kind.num_parts)
    if recompute is Recompute.FULL:
        return tokens * whole // around
    if recompute is Recompute.PRODUCTS:
        # The first and every second product after it: of joint ones all of q, k and v, and of gate and up; of seven
        # apart the last one's result, too, though nothing is computed from it again.
        if facts.is_joint:
            cut += 2 * model.num_kv_heads * model.head_dim + 2 * model.dense_width * model.gated
        else:
            whole += 2 * model.hidden * model.gated
        return tokens * (cut + 4 * model.num_heads) // t + tokens * whole // around
    if facts.runs_blocks:
        if kind.mixer in (Mixer.ATTENTION, Mixer.WINDOW):
            cut += 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * (model.rotary and facts.is_joint)
            cut += 4 * model.num_heads * layout.flash_attention  # the softmax's sums, FP32
        if kind.mlp is Mlp.MLP and model.gated:
            cut += 2 * model.dense_width
    if facts.keeps_gathered:
        whole += 2 * kind.num_parts * model.hidden * (around - 1)
    return tokens * cut // t + tokens * whole // around


def loss_bytes(facts: EagerStep, *, is_cut: bool) -> int:
    """Bytes per logit that are there while the loss's backward runs.

    `is_cut`: over columns of logits that are not gathered (`loss_parallel`), which is written out in operators: exp of
    the log-softmax, its sum with the gradient.
    """
    if not facts.runs_loss:  # compiled, it reads the logits again and writes their gradient: nothing in FP32 is stored
        return 4
    return (16 if is_cut else 12) + (2 if facts.keeps_logits else 0)


def moments(sizes: StepSizes, facts: EagerStep) -> tuple[Moment, ...]:
    """The moments of which one is the fullest: forward, the loss, backward from the head to the embedding, the update.

    FSDP2 frees a unit's parameters behind its backward, whether they were kept or gathered again
    (`_fsdp_param_group.py`, `post_backward`), and then reduces its gradients. The root's stay until the end, and its
    gradients wait for that.
    """
    s, b = sizes, sizes.element_bytes
    logits = 2 * s.logits * facts.keeps_logits + WORKSPACE_BYTES
    update = 4 * s.own * facts.runs_update * s.is_trained
    always = 0
    whole, scatters, copies = b * (s.params if s.is_whole else s.root), s.reduced_bytes, b
    if facts.in_buckets:
        always = s.reduced_bytes * s.params
        # Copies for products live as long as autograd or the forward that made them.
        whole = always + (b * s.copied if facts.autocasts else 0)
        scatters = copies = 0
    shard = 4 * (s.params if facts.in_buckets or s.holds_gradients_whole else s.own) * s.is_trained
    early = shard if s.accumulates else 0
    normed = 2 * b * s.rows
    loss = loss_bytes(facts, is_cut=s.is_loss_cut) * s.logits + normed + WORKSPACE_BYTES
    gathered = whole + b * s.kept_embedding
    apart = 0 if s.root or s.is_whole else s.head  # the head's own parameters, kept or gathered again
    rooted = copies * s.root
    head = (
        max(2 * s.logits + b * apart, 0 if s.root else scatters * s.head)
        + copies * s.head
        + b * s.gathered(at_work=0)
        + normed
    )
    # A layer is fullest when the gradients of its MLP are made and what they were made of is not yet gone.
    inside = logits + copies * s.made + s.inside_bytes
    kept = s.kept_bytes + s.again_bytes

    return (
        Moment(early, s.kept_bytes - s.layer_bytes, gathered + b * s.gathered_forward),
        Moment(early, s.kept_bytes, gathered + b * (s.kept_layers + s.kept_head) + loss),
        Moment(early, s.kept_bytes, gathered + logits + head),
        *(
            Moment(
                early + (0 if s.accumulates or not passed else shard * (s.head + passed * s.layer) // max(1, s.params)),
                kept - passed * s.layer_bytes,
                gathered + rooted + inside + b * s.gathered(at_work=1, passed=passed) + scatters * s.reducing(passed),
            )
            for passed in range(1 + min(s.reduce_buffers, s.num_layers))
        ),
        Moment(
            shard,
            s.layer_bytes + s.again_bytes,
            gathered + rooted + inside + b * s.gathered_last + scatters * s.reduce_buffers * s.layer,
        ),
        Moment(shard, 0, whole + logits + (copies + scatters) * s.embedding + scatters * s.reduce_buffers * s.layer),
        Moment(4 * s.own * s.is_trained if not facts.in_buckets else shard, 0, always + update + WORKSPACE_BYTES),
    )


def cached_bytes(sizes: StepSizes, facts: EagerStep) -> int:
    """What PyTorch's allocator has reserved at the end of a step beyond the peak of what was allocated."""
    per_layer, per_logit, per_own = _CACHED
    sharded = 0 if facts.in_buckets else per_layer * sizes.layer + per_own * sizes.own * sizes.is_trained
    return sharded + per_logit * sizes.logits
