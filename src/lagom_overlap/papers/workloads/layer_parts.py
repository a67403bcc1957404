"""The works of one half of a layer, forward and backward, for one part of a micro-batch under tensor parallelism.

A layer is cut where collectives sit: attention (norm, qkv, attention, out) and the MLP or the experts. Byte counts are
reads plus writes of activations. In backward the products for the inputs' gradients come first, those for the weights'
after them, so that a collective of the former can hide behind the latter.

Departures: sequences are packed and equally long; experts get equal shares of the tokens, and one product stands for a
grouped one; the residual addition belongs to the half that follows the collective; a router's top-k and the permutation
are one memory-bound operator; phi-2's side-by-side halves run one after the other.
"""

from dataclasses import dataclass

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import FLASH_BACKWARD_PASSES, Attention, Gemm, MemoryBound, Work

ELEMENT_BYTES = 2
"""bf16."""

Works = tuple[tuple[str, Work], ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward of a half: what the collective waits for, and what can run during it."""

    inputs: Works
    weights: Works


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The halves of one layer of `model` for `batch` sequences, matrices cut over `tensor` ranks."""

    model: TransformerModel
    batch: int
    seq_len: int
    tensor: int = 1

    @property
    def tokens(self) -> int:
        """Rows of every product."""
        return self.batch * self.seq_len

    @property
    def activation_bytes(self) -> int:
        """One activation of tokens x hidden."""
        return self.tokens * self.model.hidden * ELEMENT_BYTES

    @property
    def routed_bytes(self) -> int:
        """What one rank sends in an all-to-all: every token once per expert that it visits."""
        return self.activation_bytes * self.model.experts_per_token

    def _moved(self, tensors: float, columns: int) -> MemoryBound:
        return MemoryBound(int(tensors * self.tokens * columns * ELEMENT_BYTES))

    def _attention(self, *, backward: bool = False) -> Attention:
        return Attention(
            batch=self.batch,
            num_heads=self.model.num_heads // self.tensor,
            seq_len=self.seq_len,
            head_dim=self.model.head_dim,
            passes=FLASH_BACKWARD_PASSES if backward else 1.0,
            backward=backward,
        )

    def attention(self) -> Works:
        """Residual and norm, qkv, attention, out; a shared MLP with it where experts have one."""
        m, t = self.model, self.tokens
        return (
            ("norm", self._moved(5, m.hidden)),
            ("qkv", Gemm(t, m.qkv_columns // self.tensor, m.hidden)),
            ("attention", self._attention()),
            ("out", Gemm(t, m.hidden, m.attention_columns // self.tensor)),
            *self._shared(),
        )

    def attention_backward(self) -> Backward:
        """The same backward."""
        m, t = self.model, self.tokens
        qkv, columns = m.qkv_columns // self.tensor, m.attention_columns // self.tensor
        return Backward(
            inputs=(
                *self._shared_backward(),
                ("out_d", Gemm(t, columns, m.hidden)),
                ("attention_d", self._attention(backward=True)),
                ("qkv_d", Gemm(t, m.hidden, qkv)),
            ),
            weights=(
                ("out_w", Gemm(m.hidden, columns, t)),
                ("qkv_w", Gemm(qkv, m.hidden, t)),
                ("norm_d", self._moved(7, m.hidden)),
            ),
        )

    def mlp(self) -> Works:
        """Residual and norm, up, activation, down."""
        m, t = self.model, self.tokens
        return (
            ("norm2", self._moved(5, m.hidden)),
            ("up", Gemm(t, m.up_columns // self.tensor, m.hidden)),
            ("act", self._moved((3 if m.gated else 2) / self.tensor, m.ffn)),
            ("down", Gemm(t, m.hidden, m.ffn // self.tensor)),
        )

    def mlp_backward(self) -> Backward:
        """The same backward."""
        m, t = self.model, self.tokens
        up, ffn = m.up_columns // self.tensor, m.ffn // self.tensor
        return Backward(
            inputs=(
                ("down_d", Gemm(t, ffn, m.hidden)),
                ("act_d", self._moved((5 if m.gated else 3) / self.tensor, m.ffn)),
                ("up_d", Gemm(t, m.hidden, up)),
            ),
            weights=(
                ("down_w", Gemm(m.hidden, ffn, t)),
                ("up_w", Gemm(up, m.hidden, t)),
                ("norm2_d", self._moved(7, m.hidden)),
            ),
        )

    def experts(self) -> Works:
        """The experts of one rank: as many routed rows as it sends, for the exchange is balanced."""
        m, rows = self.model, self.tokens * self.model.experts_per_token
        return (
            ("permute", self._moved(2 * m.experts_per_token, m.hidden)),
            ("expert_up", Gemm(rows, m.up_columns, m.hidden)),
            ("expert_act", self._moved((3 if m.gated else 2) * m.experts_per_token, m.ffn)),
            ("expert_down", Gemm(rows, m.hidden, m.ffn)),
        )

    def experts_backward(self) -> Backward:
        """The same backward."""
        m, rows = self.model, self.tokens * self.model.experts_per_token
        return Backward(
            inputs=(
                ("expert_down_d", Gemm(rows, m.ffn, m.hidden)),
                ("expert_act_d", self._moved((5 if m.gated else 3) * m.experts_per_token, m.ffn)),
                ("expert_up_d", Gemm(rows, m.hidden, m.up_columns)),
            ),
            weights=(
                ("expert_down_w", Gemm(m.hidden, m.ffn, rows)),
                ("expert_up_w", Gemm(m.up_columns, m.hidden, rows)),
            ),
        )

    def head(self) -> Works:
        """The last norm, logits and loss."""
        m, columns = self.model, self.model.vocab // self.tensor
        return (
            ("norm", self._moved(2, m.hidden)),
            ("logits", Gemm(self.tokens, columns, m.hidden)),
            ("loss", self._moved(2, columns)),
        )

    def head_backward(self) -> Works:
        """The same backward."""
        m, columns = self.model, self.model.vocab // self.tensor
        return (
            ("logits_d", Gemm(self.tokens, m.hidden, columns)),
            ("logits_w", Gemm(columns, m.hidden, self.tokens)),
            ("norm_d", self._moved(4, m.hidden)),
        )

    def embedding(self) -> Works:
        """The lookup."""
        return (("lookup", self._moved(2, self.model.hidden)),)

    def _shared(self) -> Works:
        m, t = self.model, self.tokens
        if not m.num_experts:
            return ()
        router: Works = (("router", Gemm(t, m.num_experts, m.hidden)),)
        if not m.shared_ffn:
            return router
        up = m.shared_ffn * (2 if m.gated else 1)
        return (*router, ("shared_up", Gemm(t, up, m.hidden)), ("shared_down", Gemm(t, m.hidden, m.shared_ffn)))

    def _shared_backward(self) -> Works:
        m, t = self.model, self.tokens
        if not m.shared_ffn:
            return ()
        up = m.shared_ffn * (2 if m.gated else 1)
        return (
            ("shared_down_d", Gemm(t, m.shared_ffn, m.hidden)),
            ("shared_down_w", Gemm(m.hidden, m.shared_ffn, t)),
            ("shared_up_d", Gemm(t, m.hidden, up)),
            ("shared_up_w", Gemm(up, m.hidden, t)),
        )
