"""A layer's mixture of experts: the router, what takes tokens to their experts and back, the experts' products.

Megatron-LM's dispatchers (core_v0.15.0 and v0.16.0, `transformer/moe/token_dispatcher.py`, `moe_utils.py`, with
`moe_permute_fusion`), per element of a row, reads and writes:

- `all_to_all`: tokens are permuted into rows (each read once, its rows written), sent, and where a rank has several
  experts sorted by expert (read 2, written 2); for products in FP8 padded to multiples of 16 or 32 rows per expert, and
  back (Transformer Engine's `Fp8Padding` and `Fp8Unpadding`: 4 each). The way back is the same in reverse, and so is
  backward.
- `capacity` (token dropping, padded): rows are taken by index and put together by atomic additions (read 2, added to
  4), sorted by a transposing copy; capacities need no padding, and nobody has to be told how many rows come.
- `merged` (DeepEP, HybridEP): the sending kernel permutes; a rank gets a token once, copies it to the rows of its
  experts, padded, and adds those up on the way back.

Transformer Engine's fused grouped MLP (`fused_experts`; CuTe DSL kernels, Megatron-Bridge's recipes from 26.06) makes
the activation, its gradient and their casts in the epilogues of the products before them, of all experts at once.

Experts with biases and clamped activations (gpt-oss) cost eager PyTorch's kernels around the fused ones, unless experts
are fused (`TEGroupedMLP._apply_bias`, `weighted_bias_quick_geglu_impl`, core_v0.16.0): gate and up, halves of each row,
are cut and put together again, by kernels that rearrange; each expert's second bias, times each row's probability, is
added and the results are put together, in FP32 where probabilities are, which DeepEP and HybridEP ask for. Other biases
are part of the products.

Where tensor parallelism cuts experts, its ranks gather their rows before them and scatter the sums after them.
Without sequence parallelism tensor-parallel ranks have the same tokens. Megatron-LM refuses to train so (`moe_layer.py`
since 28c8dd71, May 2024). Others do as DeepSpeed does (deepspeedai/DeepSpeed @0c691a52, `moe/sharded_moe.py`,
`moe/mappings.py`): each rank sends its share of the rows, the sums of experts that are cut are all-reduced, and what
came back is gathered; in backward the gradients of the shares are.

Departures: rows are spread evenly; the probabilities that travel next to the rows (4 bytes each) are left out.
"""

from collections.abc import Sequence
from typing import Final

from lagom_overlap.collective import CollectiveKind, distinct
from lagom_overlap.workload.ops import Access, Phase
from lagom_overlap.workload.parallel.layout import Dispatcher, GraphModule
from lagom_overlap.workload.step.axes import moved_axes
from lagom_overlap.workload.step.operators import BACKWARD, FORWARD, WEIGHT, StepOps
from lagom_overlap.workload.step.rank_groups import EXPERTS, TENSOR
from lagom_overlap.workload.streams import COMPUTE

_COPY_BYTES: Final = 4
"""Per element of a row that is copied: read 2, written 2."""
_ADDED_BYTES: Final = 6
"""Per element of a row that is added to its token by atomics: read 2, the sum read and written."""
_CLAMP_BYTES: Final = ((16, 3), (30, 7))
"""Per gated column, and kernels, forward and backward: two cuts of half the columns 4 each, joined 8; back: three
masks 3 each, what they combine to 3, two selections 5 each, joined 8."""
_BIAS_BYTES: Final = {Dispatcher.MERGED: (28, 40)}
_BIAS_BYTES_HALF: Final = (12, 16)
"""Per element of a row. Probabilities in FP32: bias times probability 4, sum 10, joined 8, cast 6; back cast 6, cast 6,
twice product 8 and sum 4, joined 4. In 2 bytes: 2, 6, 4; back twice 4 and 2, joined 4."""


class ExpertOps(StepOps):
    """The operators of a mixture of experts."""

    @property
    def _own_tokens(self) -> int:
        """Tokens that this rank routes: with tensor parallelism its share."""
        return self._tokens // self._layout.tensor

    @property
    def _routed(self) -> int:
        """Rows that this rank sends to experts, and gets."""
        return self._tokens * self._model.experts_per_token // self._layout.tensor

    @property
    def _has_copies(self) -> bool:
        """Whether tensor-parallel ranks have the same tokens, of which each sends its share to experts."""
        return self._layout.tensor > 1 and not self._layout.sequence_parallel

    @property
    def _moved(self) -> int:
        """Rows that this rank makes of its tokens and adds up: also those of which others send their share."""
        return self._routed * (self._layout.tensor if self._has_copies else 1)

    @property
    def _met(self) -> int:
        """Rows that this rank's experts see: where tensor parallelism cuts experts, those of all its ranks."""
        return self._routed * self._layout.expert_tensor

    @property
    def _visits(self) -> float:
        """Rows that this rank sends where a token goes once to each rank that has one of its experts."""
        return self._own_tokens * distinct(self._layout.expert, self._model.experts_per_token)

    @property
    def _merges(self) -> bool:
        return self._layout.dispatcher is Dispatcher.MERGED

    def _exchange(self, part: str, source: str, phase: Phase) -> str:
        if self._layout.expert == 1:
            return source
        rows, hidden = self._routed, self._model.expert_width
        num_rows = self._visits if self._merges else rows
        call = self._shape.groups.collective(
            CollectiveKind.ALL_TO_ALL,
            round(num_rows * hidden * self._element_bytes),
            EXPERTS,
            copies=self._model.experts_per_token if self._merges else 0,
        )
        name = self._graph.comm(
            self._name(part),
            call,
            EXPERTS,
            origin=self._origin(phase, part),
            deps=(source,),
            shards=moved_axes(source, rows, hidden),
        )
        if not self._layout.overlap_experts:
            self._graph.hold_back(COMPUTE, [name])
            return name
        # Two micro-batches take turns: who reads this comes one turn later, with the other one's computations between.
        if self._batch:
            self._graph.hold_back(COMPUTE, [self._earlier + name.removeprefix(self._prefix)])
        return source

    def _over_tensor(self, part: str, kind: CollectiveKind, source: str, phase: Phase) -> str:
        """Before experts that are cut the rows of all tensor-parallel ranks; after them the sums, scattered."""
        if self._layout.expert_tensor == 1:
            return source
        if kind is CollectiveKind.REDUCE_SCATTER and self._has_copies:
            part, kind = part.replace("scatter", "reduce"), CollectiveKind.ALL_REDUCE
        return self._tensor_rows(part, kind, source, phase, self._met)

    def _tensor_rows(self, part: str, kind: CollectiveKind, source: str, phase: Phase, rows: int) -> str:
        """A collective of tensor-parallel ranks over so many rows in all, which the computations wait for."""
        num_bytes = rows * self._model.expert_width * self._element_bytes
        call = self._shape.groups.collective(kind, num_bytes, TENSOR)
        name = self._graph.comm(self._name(part), call, TENSOR, origin=self._origin(phase, part), deps=(source,))
        self._graph.hold_back(COMPUTE, [name])
        return name

    def _arrived(self, part: str, source: str, phase: Phase) -> str:
        """Rows after their all-to-all, at the experts that they are meant for."""
        arrived = self._exchange(part, source, phase)
        return self._over_tensor(f"{part}_gather", CollectiveKind.ALL_GATHER, arrived, phase)

    def _returned(self, part: str, source: str, phase: Phase) -> str:
        """Rows after their all-to-all, at the ranks that they came from; where all have the same tokens, all rows."""
        back = self._exchange(
            part, self._over_tensor(f"{part}_scatter", CollectiveKind.REDUCE_SCATTER, source, phase), phase
        )
        if not self._has_copies:
            return back
        return self._tensor_rows(f"{part}_gather", CollectiveKind.ALL_GATHER, back, phase, self._moved)

    def _act(self, part: str, sources: Sequence[str], rows: int, width: int, phase: Phase) -> str:
        gated = self._model.gated
        kernels = (self._shape.traffic.gated if gated else ((4,), (6,)))[phase is not FORWARD]
        return self._run(part, sources, kernels, (rows, width), phase, both=not gated)

    def _bias_gradient(self, part: str, gradient: str, columns: int, rows: int | None = None) -> None:
        if self._model.linear_bias and not self._layout.frozen:
            rows = self._tokens if rows is None else rows
            shape, reduction = (rows, columns), Access.REDUCTION
            self._touch(f"{part}_b", (gradient,), 2 * rows * columns, shape, WEIGHT, access=reduction)

    @property
    def _is_eager_around(self) -> bool:
        """Whether biases and clamps of experts are kernels of their own."""
        return self._shape.mixture.fuses_moves and not self._layout.fused_experts

    def _expert_act(self, part: str, sources: Sequence[str], phase: Phase) -> str:
        """The experts' activation, its inputs cut to a range before it where the model does that."""
        width, clamps = self._weights["expert_down"].inputs, self._model.clamped and self._is_eager_around
        num_bytes, launches = _CLAMP_BYTES[phase is not FORWARD]
        shape = (self._met, width)
        if clamps and phase is FORWARD:
            num_bytes *= self._met * width
            sources = (
                self._touch(
                    f"{part}_clamp", sources, num_bytes, shape, phase, access=Access.REARRANGE, num_launches=launches
                ),
            )
        act = self._act(part, sources, self._met, width, phase)
        if clamps and phase is not FORWARD:
            num_bytes *= self._met * width
            act = self._touch(
                f"{part}_clamp", (act,), num_bytes, shape, phase, access=Access.REARRANGE, num_launches=launches
            )
        return act

    def _expert_bias(self, source: str, phase: Phase) -> str:
        """The bias after the experts' second product, times each row's probability; in backward its gradients."""
        if not (self._model.linear_bias and self._is_eager_around):
            return source
        shape, is_back = (self._met, self._model.expert_width), phase is not FORWARD
        num_bytes = _BIAS_BYTES.get(self._layout.dispatcher, _BIAS_BYTES_HALF)[is_back] * shape[0] * shape[1]
        launches = (4 if is_back else 2) * self._weights["expert_down"].num_matrices + 2
        part = "expert_bias_d" if is_back else "expert_bias"
        return self._touch(part, (source,), num_bytes, shape, phase, num_launches=launches)

    def _moved_rows(self, part: str, sources: Sequence[str], num_bytes: float, phase: Phase, num_launches: int) -> str:
        """Tokens made into rows, rows put into another order, or made into tokens: `num_bytes` per column in all."""
        h = self._model.expert_width
        return self._touch(
            part, sources, num_bytes * h, (self._rows, h), phase, access=Access.REARRANGE, num_launches=num_launches
        )

    def _permuted(self, part: str, sources: Sequence[str], phase: Phase) -> str:
        """Tokens made into rows before they are sent; in backward their gradients."""
        mixture, dispatcher = self._shape.mixture, self._layout.dispatcher
        if not mixture.fuses_moves:
            return self._moved_rows(part, sources, (4 if phase is FORWARD else 6) * self._moved, phase, 1)
        counting = mixture.counting_launches(dispatcher, self._layout.expert) if phase is FORWARD else 0
        if self._merges:
            return self._moved_rows(part, sources, self._own_tokens, phase, counting) if counting else sources[0]
        if dispatcher is Dispatcher.CAPACITY:
            return self._moved_rows(part, sources, _COPY_BYTES * self._routed, phase, 1 + counting)
        launches = (4 if phase is FORWARD else 1) + counting
        return self._moved_rows(part, sources, 2 * (self._own_tokens + self._routed), phase, launches)

    def _unpermuted(self, part: str, sources: Sequence[str], phase: Phase) -> str:
        """Rows added up to tokens when they are back; in backward the gradients of what was sent."""
        if not self._shape.mixture.fuses_moves:
            return self._moved_rows(part, sources, (4 if phase is FORWARD else 6) * self._moved, phase, 1)
        if self._merges:
            return sources[0]
        if self._layout.dispatcher is Dispatcher.CAPACITY:
            return self._moved_rows(part, sources, _ADDED_BYTES * self._routed, phase, 2)
        return self._moved_rows(part, sources, 2 * (self._own_tokens + self._routed), phase, 1)

    def _sorted(self, part: str, source: str, phase: Phase) -> str:
        """What arrived, in the order of experts, or what leaves, in the order of ranks."""
        if not self._shape.mixture.fuses_moves or self._model.num_experts == self._layout.expert:
            return source
        if self._merges:
            return self._moved_rows(
                part, (source,), 2 * (self._visits * self._layout.expert_tensor + self._met), phase, 2
            )
        launches = 2 if phase is FORWARD and self._layout.dispatcher is Dispatcher.ALL_TO_ALL else 1
        return self._moved_rows(part, (source,), _COPY_BYTES * self._met, phase, launches)

    def _padded(self, part: str, source: str, phase: Phase) -> str:
        """Rows of each expert padded to what products in FP8 need, or the padding taken away."""
        pads = self._shape.mixture.fuses_moves and self._layout.dispatcher is Dispatcher.ALL_TO_ALL
        if not pads or not self._shape.precision.products.is_narrow:
            return source
        return self._moved_rows(part, (source,), _COPY_BYTES * self._met, phase, 2)

    def _top_k(self, part: str, source: str, phase: Phase) -> str:
        experts = self._model.num_experts
        num_bytes = 12 * self._rows * experts
        launches = self._shape.mixture.router_launches
        return self._touch(part, (source,), num_bytes, (self._rows, experts), phase, num_launches=launches)

    def _narrowed(self, norm2: str) -> str:
        """The rows that experts read: of the hidden size, or projected to fewer columns."""
        return self._product("expert_enter", norm2, self._rows) if self._model.expert_hidden else norm2

    def _widened(self, merged: str) -> str:
        """What experts made, of the hidden size again."""
        self.made["merged"] = merged
        return self._product("expert_leave", merged, self._rows) if self._model.expert_hidden else merged

    def _widened_backward(self, gradient: str) -> str:
        if not self._model.expert_hidden:
            return gradient
        widened = self._data_gradient("expert_leave", gradient, self._rows)
        self._weight_gradient("expert_leave", self.made["merged"], gradient, self._rows)
        return widened

    def _narrowed_backward(self, gradient: str, norm2: str) -> str:
        if not self._model.expert_hidden:
            return gradient
        narrowed = self._data_gradient("expert_enter", gradient, self._rows)
        self._weight_gradient("expert_enter", norm2, gradient, self._rows)
        return narrowed

    def _experts(self, norm2: str) -> str:
        """What the experts make of the tokens."""
        met = self._met
        router = self._top_k("top_k", self._product("router", norm2, self._rows), FORWARD)
        outside, narrowed = self._graph_module, self._narrowed(norm2)
        self._graph_module = GraphModule.MOE_PREPROCESS
        rows = self._permuted("permute", (narrowed, router), FORWARD)
        self._graph_module = None
        arrived = self._arrived("dispatch", rows, FORWARD)
        sent = self._padded("pad", self._sorted("sort", arrived, FORWARD), FORWARD)
        up = self._product("expert_up", sent, met)
        act = up if self._layout.fused_experts else self._expert_act("expert_act", (up,), FORWARD)
        self.made["expert_act"] = act
        down = self._padded("unpad", self._expert_bias(self._product("expert_down", act, met), FORWARD), FORWARD)
        back = self._returned("combine", self._sorted("unsort", down, FORWARD), FORWARD)
        self.made["sent"] = sent
        whole = self._widened(self._unpermuted("unpermute", (back, router), FORWARD))
        self._graph_module = outside
        return whole

    def _experts_backward(self, gradient: str) -> tuple[str, str]:
        """The gradients of the experts' and of the router's input."""
        made, met = self.made, self._met
        norm2, outside = made.get("norm2") or made["norm"], self._graph_module
        self._graph_module = None
        spread = self._unpermuted("unpermute_d", (self._widened_backward(gradient), made["top_k"]), BACKWARD)
        arrived = self._arrived("combine_d", spread, BACKWARD)
        padded = self._padded("unpad_d", self._sorted("unsort_d", arrived, BACKWARD), BACKWARD)
        sent = self._expert_bias(padded, BACKWARD)
        down_d = self._data_gradient("expert_down", sent, met)
        act_d = down_d
        if not self._layout.fused_experts:
            act_d = self._expert_act("expert_act_d", (down_d, made["expert_up"]), BACKWARD)
        up_d = self._data_gradient("expert_up", act_d, met)
        if not self._shape.mixture.fuses_moves:
            self._bias_gradient("expert_down", sent, self._model.expert_width, met)
            self._bias_gradient("expert_up", act_d, self._weights["expert_up"].outputs, met)
        self._weight_gradient("expert_down", made["expert_act"], sent, met)
        self._weight_gradient("expert_up", made["sent"], act_d, met)
        leaving = self._sorted("sort_d", self._padded("pad_d", up_d, BACKWARD), BACKWARD)
        back = self._returned("dispatch_d", leaving, BACKWARD)
        self._graph_module = GraphModule.MOE_PREPROCESS
        permuted = self._permuted("permute_d", (back,), BACKWARD)
        self._graph_module = outside
        merged = self._narrowed_backward(permuted, norm2)
        scores = self._top_k("top_k_d", spread, BACKWARD)
        router_d = self._data_gradient("router", scores, self._rows)
        self._weight_gradient("router", norm2, scores, self._rows)
        return merged, router_d
