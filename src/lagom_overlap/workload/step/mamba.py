"""A layer with a Mamba-2 mixer, as Megatron-Core runs it in training.

Sources: arXiv 2405.21060 (section 6: the scan in chunks); state-spaces/mamba e9594ce,
`mamba_ssm/ops/triton/ssd_combined.py` (`MambaSplitConv1dScanCombinedFn`, without its norm and output product);
Megatron-LM d98e8a64, `core/ssm/mamba_mixer.py` (`_ssm_training`).

Products are those of each chunk and head (C B^T: of each group), as batched products at a scan's rate. One projection
makes the gate z, what is convolved (x, B, C) and the heads' step sizes. Forward: convolution, cumulative steps, each
chunk's state, the states handed on, C B^T, the scan gated by z, a norm by groups. Backward does again all but the scan,
then the gradients of the gate, of states, x, B, C, C B^T and steps. Batches of several sequences are transposed before
and after. Bytes of an element:

- convolution, forward 4; backward read twice, written 2: 6;
- steps and their cumulative sums, per head: read 2, written in FP32 4 + 4; backward 4 + 4 + 4 read, 2 + 4 written;
- a state (columns x state size per chunk): read in FP32 4, written 2; backward read 4 + 2, written 2 + 2;
- the scan's gate, read, and its result before it, written: 4, in the product's kernel; backward x, z, result and
  gradient read, two gradients written: 12.

Departure: nothing of it is cut by planners.
"""

from lagom_overlap.workload.layer_kinds import LayerKind
from lagom_overlap.workload.ops import Gemm, Phase
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.layer import LayerOps
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, StepShape
from lagom_overlap.workload.step.parameter_units import Weight


class MambaOps(LayerOps):
    """The operators of a layer with a Mamba-2 mixer."""

    def __init__(
        self, graph: StepGraph, shape: StepShape, *, layer: int, batch: int, weights: dict[str, Weight], kind: LayerKind
    ) -> None:
        super().__init__(graph, shape, layer=layer, batch=batch, weights=weights, kind=kind)
        assert shape.model.mamba is not None
        m, tensor = shape.model.mamba, shape.layout.tensor
        self._mamba = m
        self._inner, self._groups, self._mamba_heads = m.inner // tensor, m.num_groups // tensor, m.num_heads // tensor
        self._conv_columns = m.conv_columns // tensor
        self._chunks = shape.layout.micro_batch * -(-shape.seq_len // m.chunk)

    def _mixed(self, norm: str) -> str:
        projected, wide = self._entering("mamba_gather", "mamba_in", norm), self._weights["mamba_in"].outputs
        scanned = self._scan(self._turned("mamba_turn", projected, wide, FORWARD))
        out = self._turned("mamba_turn_out", scanned, self._inner, FORWARD)
        shape = (self._tokens, self._inner)
        normed = self._run("mamba_norm", (out,), self._shape.traffic.norm[0], shape, FORWARD)
        return self._leaving("mamba_reduce", "out", normed)

    def _matrix_name(self, name: str) -> str:
        return "mamba_out" if name == "out" else name

    def _turned(self, part: str, source: str, columns: int, phase: Phase) -> str:
        """The copy between [sequence, batch] and [batch, sequence]; of one sequence they are the same."""
        if self._layout.micro_batch == 1:
            return source
        return self._touch(part, (source,), 4 * self._tokens * columns, (self._tokens, columns), phase)

    def _scan(self, projected: str) -> str:
        tail = self._states(projected, "", FORWARD)
        m = self._mamba
        scanned = self._each("chunk_scan", (tail,), (m.chunk, m.head_dim, m.chunk + m.state_dim), FORWARD)
        # In the scan's own kernel: nothing is launched for it.
        return self._per_column("scan_gate", scanned, 4, FORWARD, num_launches=0)

    def _states(self, projected: str, tail: str, phase: Phase) -> str:
        """What leads to the scan, which backward does again."""
        m = self._mamba
        shape = (self._tokens, self._conv_columns)
        convolved = self._touch(f"conv{tail}", (projected,), 4 * shape[0] * shape[1], shape, phase)
        heads = (self._tokens, self._mamba_heads)
        steps = self._touch(f"steps{tail}", (projected,), 10 * heads[0] * heads[1], heads, phase)
        self._each(f"chunk_state{tail}", (convolved, steps), (m.head_dim, m.state_dim, m.chunk), phase)
        states = self._per_state(f"pass_states{tail}", self.made[f"chunk_state{tail}"], 6, phase)
        scores = self._each(f"chunk_scores{tail}", (convolved,), (m.chunk, m.chunk, m.state_dim), phase, self._groups)
        return self._graph.together((convolved, steps, states, scores))

    def _each(
        self, part: str, sources: tuple[str, ...], sizes: tuple[int, int, int], phase: Phase, count: int = 0
    ) -> str:
        """A product [m, k] x [k, n] of each chunk and head, or of each chunk and `count` groups."""
        work = Gemm(*sizes, self._element_bytes, self._chunks * (count or self._mamba_heads), chunked=True)
        self.made[part] = self._graph.comp(self._name(part), work, self._origin(phase, part), sources)
        return self.made[part]

    def _per_column(self, part: str, source: str, each: int, phase: Phase, num_launches: int = 1) -> str:
        shape = (self._tokens, self._inner)
        return self._touch(part, (source,), each * shape[0] * shape[1], shape, phase, num_launches=num_launches)

    def _per_state(self, part: str, source: str, each: int, phase: Phase) -> str:
        shape = (self._chunks, self._inner * self._mamba.state_dim)
        return self._touch(part, (source,), each * shape[0] * shape[1], shape, phase)

    def _mixed_backward(self, gradient: str) -> str:
        made, m = self.made, self._mamba
        entered, out_d = self._entering_d("mamba_gather_d", "out", gradient)
        self._weight_gradient("out", made["mamba_norm"], entered)
        shape, kernels = (self._tokens, self._inner), self._shape.traffic.norm[1]
        normed_d = self._run("mamba_norm_d", (out_d, made["scan_gate"]), kernels, shape, BACKWARD)
        turned = self._turned("mamba_turn_out_d", normed_d, self._inner, BACKWARD)
        again = self._states(made.get("mamba_turn", made["mamba_in"]), "_re", BACKWARD)
        gate_d = self._per_column("scan_gate_d", turned, 12, BACKWARD)
        sizes = (m.head_dim, m.state_dim, m.chunk)
        states_d = self._each("chunk_state_d", (gate_d, again), sizes, BACKWARD)
        passed = self._per_state("pass_states_d", states_d, 10, BACKWARD)
        sources = (gate_d, passed, again)
        x_d = self._each("chunk_scan_d", sources, (m.chunk, m.head_dim, m.chunk + m.state_dim), BACKWARD)
        b_d = self._each("chunk_b_d", sources, (m.chunk, m.state_dim, m.head_dim), BACKWARD)
        c_d = self._each("chunk_c_d", sources, (m.chunk, m.state_dim, m.head_dim), BACKWARD)
        scores_d = self._each("chunk_scores_d", sources, (m.chunk, m.chunk, m.head_dim), BACKWARD)
        wide = (m.chunk, m.state_dim, m.chunk)
        parts = [
            self._each(part, (scores_d, source), wide, BACKWARD, self._groups)
            for part, source in (("scores_b_d", b_d), ("scores_c_d", c_d))
        ]
        sums_d = self._each("chunk_steps_d", sources, (m.chunk, m.chunk, m.head_dim), BACKWARD)
        heads = (self._tokens, self._mamba_heads)
        steps_d = self._touch("steps_d", (sums_d,), 18 * heads[0] * heads[1], heads, BACKWARD)
        columns = (self._tokens, self._conv_columns)
        conv_d = self._touch("conv_d", (x_d, *parts, steps_d), 6 * columns[0] * columns[1], columns, BACKWARD)
        projected_d = self._turned("mamba_turn_d", conv_d, self._weights["mamba_in"].outputs, BACKWARD)
        return self._column_backward("mamba_in", projected_d, made["norm"])
