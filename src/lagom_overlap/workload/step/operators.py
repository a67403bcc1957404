"""Kinds of operator that a transformer's layers and tables are made of, on one rank and in one micro-batch.

Sources: Megatron-LM (arXiv 1909.08053, Fig. 3: two all-reduces forward, two backward; arXiv 2205.05198, Fig. 5: with
sequence parallelism each becomes a reduce-scatter and an all-gather, and what tensor parallelism leaves whole is cut
along the sequence). Experts: one all-to-all before and one after them (GShard, arXiv 2006.16668), tokens spread evenly.

Bytes of memory-bound kernels are counted by hand per element of a 2-byte activation: reads plus writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.ops import Access, Gemm, Issuer, MemoryBound, Origin, Phase
from lagom_overlap.workload.parallel.layout import GraphModule, ParallelLayout
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.step.axes import (
    elementwise_axes,
    moved_axes,
    product_axes,
    weight_gradient_axes,
)
from lagom_overlap.workload.step.graph import StepGraph
from lagom_overlap.workload.step.parameter_units import Unit, Weight
from lagom_overlap.workload.step.rank_groups import TENSOR, StepGroups
from lagom_overlap.workload.step.traffic import NVFP4_CASTS, Accumulation, Casts, Kernels, Mixture, RingSteps, Traffic
from lagom_overlap.workload.streams import COMPUTE

_GATHERED: Final = {
    Phase.FORWARD: ("qkv", "up", "mamba_in"), Phase.WEIGHT_GRAD: ("qkv", "up", "mamba_in"),
    Phase.BACKWARD: ("out", "down"),
}  # fmt: skip
"""Matrices whose operand sequence parallelism gathers: inputs of column-parallel, gradients of row-parallel ones."""
_GATHERED_BYTES: Final = {ProductFormat.MXFP8: 1.03125, ProductFormat.NVFP4: 0.5625}
"""Per element, with the scales of 32 and 16 elements; of the others, 1."""
_BY_COLUMNS_GATHERED: Final = (ProductFormat.MXFP8, ProductFormat.NVFP4)
"""Formats of which the copy by columns is gathered too, so that nothing is turned behind a gather."""
_SHARED_SCALES: Final = (ProductFormat.FP8_CURRENT, ProductFormat.NVFP4)
"""Formats with a scale per tensor that Transformer Engine finds over all ranks that a gathered operand comes from."""
_CAST_BEFORE: Final = (("expert_down", Phase.FORWARD), ("expert_up", Phase.BACKWARD))
"""What fused experts get cast from the product before; the matrix, which is cast once a step, is left out with it."""
_LOOPED: Final = ("expert_up", "expert_down")
"""Products and casts of these matrices are launched expert by expert in loops of Transformer Engine's C++
(`te_general_grouped_gemm`, `multi_tensor_quantize_impl`, v2.9 to v2.16)."""
_EAGER: Final = ("expert_bias", "expert_act_clamp", "expert_act_d_clamp")
"""What Megatron-LM leaves to PyTorch's operators: expert biases and clamps."""
_NVFP4_KERNELS: Final = 3
"""Greatest element, scales and cast are kernels of their own."""
_TURN_BYTES: Final = 2
"""Per FP8 element of a copy by columns."""

FORWARD, BACKWARD, WEIGHT = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What every operator of a step is sized by."""

    model: TransformerModel
    layout: ParallelLayout
    groups: StepGroups
    seq_len: int
    precision: Precision
    unit: Unit
    accumulation: Accumulation
    traffic: Traffic
    casts: Casts
    hides_tensor: bool
    sequence_first: bool
    mixture: Mixture
    joint_products: bool
    casts_before_gathers: bool
    stops_recompute: bool
    ring: RingSteps | None

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation and of a parameter that is computed with."""
        return self.precision.parameter.num_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank of a context group."""
        return self.layout.micro_batch * self.seq_len // self.layout.context

    @property
    def rows(self) -> int:
        """Tokens of which a rank holds whole activations: with sequence parallelism its share."""
        return self.tokens // self.layout.tensor if self.layout.sequence_parallel else self.tokens


class StepOps:
    """Adds operators of layer `layer` (None: of the tables around the layers) for micro-batch `batch`."""

    def __init__(
        self, graph: StepGraph, shape: StepShape, *, layer: int | None, batch: int, weights: dict[str, Weight]
    ) -> None:
        self._graph, self._shape, self._layer, self._batch, self._weights = graph, shape, layer, batch, weights
        self._model, self._layout = shape.model, shape.layout
        self._tokens, self._rows, self._element_bytes = shape.tokens, shape.rows, shape.element_bytes
        tensor = shape.layout.tensor
        self._heads = max(1, shape.model.num_heads // tensor)
        self._kv_heads = max(1, shape.model.num_kv_heads // tensor)
        self._again = False
        key, module = ("head", "head") if layer is None else (f"layer{layer}", f"layers.{layer}")
        self.name_within(f"mb{batch}.{key}.", f"mb{batch - 1}.{key}.", f"{module}.")
        self.made: dict[str, str] = {}
        self.on_gradient = _ignore
        self.silent: frozenset[str] = frozenset()
        self._graph_module: GraphModule | None = None

    def name_within(self, prefix: str, earlier: str, module: str) -> None:
        """What the names of operators begin with, here and in the micro-batch before, and their modules."""
        self._prefix, self._earlier, self._module = prefix, earlier, module

    def _name(self, part: str) -> str:
        return f"{self._prefix}{part}_again" if self._again else self._prefix + part

    def _origin(self, phase: Phase, part: str) -> Origin:
        if self._again and phase is FORWARD:
            phase = Phase.RECOMPUTE
        module, issuer = self._module + part, self._issuer(part)
        return Origin(phase=phase, layer=self._layer, microbatch=self._batch, module=module, issuer=issuer)

    def _issuer(self, part: str) -> Issuer:
        if self._graph_module in self._layout.graph_modules:
            return Issuer.GRAPH
        if part.startswith(_LOOPED) and self._shape.mixture.apart:
            return Issuer.LIBRARY
        is_unfused = part.startswith("rotary") and self._turns_unfused
        return Issuer.EAGER if is_unfused or part.startswith(_EAGER) else Issuer.PROGRAM

    @property
    def _turns_unfused(self) -> bool:
        """Whether rotary positions are PyTorch's operators because YaRN scales them."""
        return self._model.scaled_rotary and self._shape.traffic.scaled_rotary is not None

    def _parameters(self, name: str, phase: Phase) -> str:
        """What brings the parameters around matrix `name` in this phase, "" if nothing must."""
        phase = BACKWARD if self._again else phase
        return self._weights[name].gathered.get((phase, self._batch), "")

    def _around(self, name: str, phase: Phase) -> tuple[str, ...]:
        """The same for what is no matrix: with units of a matrix small parameters do not travel."""
        return () if self._shape.unit is Unit.MATRIX else (self._parameters(name, phase),)

    def _matrix(self, name: str, phase: Phase) -> tuple[str, tuple[str, ...]]:
        """What brings a matrix: as a tensor that can be cut, or as something to wait for."""
        gathered = self._parameters(name, phase)
        if self._shape.unit is Unit.MATRIX and self._weights[name].num_matrices == 1:
            return gathered, ()
        return "", (gathered,)

    def _gemm(self, weight: Weight, m: int, n: int, k: int, result_bytes: int | None = None) -> Gemm:
        width = 1 if self._casts(weight) else self._element_bytes
        if width != self._element_bytes and result_bytes is None:  # the operands are FP8, the result is not
            result_bytes = self._element_bytes
        form = self._format(weight)
        return _gemm(
            m, n, k, width, weight.num_matrices, self._kernels(weight), result_bytes,
            packed=form.packed, block_scaled=form is ProductFormat.MXFP8,
        )  # fmt: skip

    def _kernels(self, weight: Weight) -> int:
        """Launches of what every matrix of a weight or of one of its parts needs once: one, or one each."""
        return weight.num_matrices if self._shape.mixture.apart and not self._layout.fused_experts else 1

    def _casts_launched(self, weight: Weight, phase: Phase, matrix_bytes: int) -> int:
        """Launches of casts: of each part's matrix, if it is cast, and operand; forward, parts read the same one."""
        parts, kernels = max(1, len(weight.parts)), self._kernels(weight)
        operands = 1 if phase is FORWARD else parts
        if self._format(weight) is ProductFormat.NVFP4:  # greatest elements, by rows, by columns; experts' at once
            return _NVFP4_KERNELS * (operands + (kernels * parts if matrix_bytes else 0))
        return kernels * ((parts if matrix_bytes else 0) + operands)

    def _casts(self, weight: Weight) -> bool:
        """Whether the matrix's operands are cast: the router's and the tables' are not."""
        return self._format(weight).is_narrow

    def _format(self, weight: Weight) -> ProductFormat:
        """In which format the matrix multiplies."""
        precision = self._shape.precision
        if precision.is_wide(self._layer, self._model.num_layers):
            return ProductFormat.PARAMETER
        return precision.format_of(self._matrix_name(weight.name))

    def _matrix_name(self, name: str) -> str:
        """A matrix's name in a precision's exceptions."""
        return name

    def _cast(self, name: str, source: str, rows: int, phase: Phase) -> str:
        """The operand that meets matrix `name` in a phase and the matrix itself, scaled and cast to FP8."""
        weight = self._weights[name]
        if not self._casts(weight) or (self._layout.fused_experts and (name, phase) in _CAST_BEFORE):
            return source
        part, columns = (f"{name}_cast", weight.inputs) if phase is FORWARD else (f"{name}_cast_d", weight.outputs)
        if source == self.made.get(part):
            return source
        operand, matrix = self._cast_bytes(weight, phase)
        num_bytes = operand * rows * columns + matrix * weight.num_params
        turned = self._turned_bytes(weight, rows * columns, phase, matrix)
        # What the weight's gradient reads by columns comes after the gather, once.
        turns = self._format(weight) not in _BY_COLUMNS_GATHERED
        if self._is_cast_before_gather(name, phase) and turns and not self._again:
            num_bytes += _TURN_BYTES * (self._tokens - rows) * columns
            turned += _TURN_BYTES * (self._tokens - rows) * columns
        launches = self._casts_launched(weight, phase, matrix)
        source = self._scaled(part, source, phase, self._num_scales(name, launches, phase))
        shape, at_once = (rows, columns), not self._shape.casts.by_columns
        if at_once:
            return self._touch(part, (source,), num_bytes, shape, phase, access=Access.REARRANGE, num_launches=launches)
        cast = self._touch(part, (source,), num_bytes - turned, shape, phase, num_launches=launches)
        if turned:  # the launches of both are counted above
            self._touch(f"{part}_turn", (cast,), turned, shape, phase, access=Access.REARRANGE, num_launches=0)
        return cast

    def _num_scales(self, name: str, launches: int, phase: Phase) -> int:
        """Scales of a cast that all ranks of tensor parallelism find together."""
        weight = self._weights[name]
        if self._shape.casts.by_columns:  # torchao: of the matrix's part and of every operand
            return launches if phase is FORWARD else max(1, len(weight.parts))
        return int(self._is_cast_before_gather(name, phase) and self._format(weight) in _SHARED_SCALES)

    def _turned_bytes(self, weight: Weight, elements: int, phase: Phase, matrix: int) -> int:
        """Bytes of copies by columns that are kernels of their own: an operand's once, a matrix's in backward."""
        operand = 0 if self._again else elements
        return self._shape.casts.by_columns * (operand + (weight.num_params if matrix and phase is BACKWARD else 0))

    def _cast_bytes(self, weight: Weight, phase: Phase) -> tuple[int, int]:
        """Bytes per element of an operand and of a matrix in a phase."""
        casts = NVFP4_CASTS if self._format(weight) is ProductFormat.NVFP4 else self._shape.casts
        operand = casts.operand_again if self._again else casts.operand
        matrix = casts.weight[1 if self._again else 0 if phase is FORWARD else 2]
        return operand, 0 if casts.keeps_weights and self._batch else matrix

    def _scaled(self, part: str, source: str, phase: Phase, num_tensors: int) -> str:
        """What is cast once the scales of so many tensors are known; `source` where each rank finds its own."""
        if self._shape.casts_before_gathers and self._layout.tensor > 1:
            for number in range(num_tensors):
                source = self._scale(f"{part}_scale{number or ''}", source, phase)
        return source

    def _scale(self, part: str, source: str, phase: Phase) -> str:
        """The greatest element of a tensor that ranks hold in parts, by which all of them scale it."""
        call = self._shape.groups.collective(CollectiveKind.ALL_REDUCE, 4, TENSOR)
        name = self._name(part)
        scaled = self._graph.comm(name, call, TENSOR, origin=self._origin(phase, part), deps=(source,))
        self._graph.hold_back(COMPUTE, [scaled])
        return scaled

    def _is_cast_before_gather(self, name: str, phase: Phase) -> bool:
        return (
            self._shape.casts_before_gathers
            and self._layout.sequence_parallel
            and (name in _GATHERED[phase] and self._casts(self._weights[name]))
        )

    def _per_matrix(self, weight: Weight, rows: int) -> int:
        """Rows of one of the weight's matrices; `rows` in all."""
        return max(1, rows // weight.num_matrices)

    def _product(self, name: str, source: str, rows: int | None = None, outputs: int | None = None) -> str:
        """A matrix's product, or the part of it that makes `outputs` columns."""
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        matrix, also = self._matrix(name, FORWARD)
        each = self._per_matrix(weight, rows)
        if not self._is_cast_before_gather(name, FORWARD):
            source = self._cast(name, source, rows, FORWARD)
        products = [
            self._graph.comp(
                self._name(name + part),
                self._gemm(weight, each, columns, weight.inputs),
                self._origin(FORWARD, name),
                (source, matrix, *also),
                shards=self._cuttable(weight, product_axes(source, matrix, (each, weight.inputs, columns), (2, 1))),
            )
            for part, columns in _parts(weight, outputs)
        ]
        self.made[name] = self._graph.together(products)
        return self.made[name]

    def _data_gradient(self, name: str, gradient: str, rows: int | None = None) -> str:
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        matrix, also = self._matrix(name, BACKWARD)
        each = self._per_matrix(weight, rows)
        if not self._is_cast_before_gather(name, BACKWARD):
            gradient = self._cast(name, gradient, rows, BACKWARD)
        products = [
            self._graph.comp(
                self._name(f"{name}_d{part}"),
                self._gemm(weight, each, weight.inputs, columns),
                self._origin(BACKWARD, name),
                (gradient, matrix, *also),
                shards=self._cuttable(weight, product_axes(gradient, matrix, (each, columns, weight.inputs))),
            )
            for part, columns in _parts(weight)
        ]
        if len(products) == 1:
            return products[0]
        traffic, shape = self._shape.traffic, (rows, weight.inputs)
        num_bytes = traffic.sum_bytes(len(products)) * rows * weight.inputs
        launches = traffic.sum_launches(len(products))
        return self._touch(f"{name}_d_sum", products, num_bytes, shape, BACKWARD, both=True, num_launches=launches)

    def _weight_gradient(self, name: str, saved: str, gradient: str, rows: int | None = None) -> str:
        if self._layout.frozen:
            return ""
        weight, rows = self._weights[name], self._tokens if rows is None else rows
        before = self._before(weight)
        each = self._per_matrix(weight, rows)
        fused, added = (self._shape.accumulation is kind for kind in (Accumulation.FUSED, Accumulation.ADDED))
        main_bytes = 2 * self._shape.precision.reduction.num_bytes  # read and written by the product's epilogue
        products = [
            self._graph.comp(
                self._name(f"{name}_w{part}"),
                self._gemm(weight, columns, weight.inputs, each, main_bytes if fused else None),
                self._origin(WEIGHT, name),
                (saved, gradient, *(() if added else before)),
                shards=self._cuttable(weight, weight_gradient_axes(saved, gradient, (weight.inputs, each, columns))),
            )
            for part, columns in _parts(weight)
        ]
        gradient_op = self._graph.together(products)
        self._gradient(name, gradient_op, before)
        return gradient_op

    def _before(self, weight: Weight) -> tuple[str, ...]:
        """What has already been added to a weight's gradient, which the next one is added to."""
        partial, weight.partial = weight.partial, []
        return (*(() if self._layout.zero_stage == 3 else weight.gradients[-1:]), *partial)

    def _gradient(self, name: str, gradient: str, before: Sequence[str]) -> None:
        """Notes a weight's gradient, added to those before by a kernel of its own where no product does that."""
        weight = self._weights[name]
        if name in self.silent:
            weight.partial.append(gradient)
            return
        if self._shape.accumulation is Accumulation.ADDED:
            origin = self._origin(WEIGHT, name)
            # The new one and the sum read, the sum written.
            work = MemoryBound(3 * self._element_bytes * weight.num_params)
            gradient = self._graph.comp(self._name(f"{name}_sum"), work, origin, (gradient, *before))
        weight.gradients.append(gradient)
        self.on_gradient(weight, gradient)

    @staticmethod
    def _cuttable(weight: Weight, spec: ShardSpec) -> ShardSpec | None:
        return spec if weight.num_matrices == 1 and not weight.parts else None

    def _run(
        self,
        part: str,
        sources: Sequence[str],
        kernels: Kernels,
        shape: tuple[int, int],
        phase: Phase,
        *,
        both: bool = False,
        also: Sequence[str] = (),
    ) -> str:
        """A memory-bound operator by its kernels."""
        num_bytes = sum(kernels) * shape[0] * shape[1]
        return self._touch(part, sources, num_bytes, shape, phase, both=both, also=also, num_launches=len(kernels))

    def _touch(
        self,
        part: str,
        sources: Sequence[str],
        num_bytes: float,
        shape: tuple[int, int],
        phase: Phase,
        *,
        both: bool = False,
        also: Sequence[str] = (),
        access: Access = Access.STREAM,
        num_launches: int = 1,
    ) -> str:
        """A memory-bound operator over matrices of `shape`, elementwise along columns too if `both`.

        `num_bytes` are those of 2-byte activations.
        """
        rows, columns = shape
        moved = max(1, int(num_bytes * self._element_bytes) // 2)
        self.made[part] = self._graph.comp(
            self._name(part),
            memory_bound(moved, access, num_launches),
            self._origin(phase, part),
            also,
            shards=elementwise_axes(sources, rows, columns if both else None),
        )
        return self.made[part]

    def _tensor_comm(
        self,
        part: str,
        kind: CollectiveKind,
        source: str,
        phase: Phase,
        *,
        is_async: bool,
        element_bytes: float,
        columns: int = 0,
    ) -> str:
        if self._layout.tensor == 1:
            return source
        rows = self._tokens if kind is CollectiveKind.ALL_REDUCE else self._rows
        hidden = columns or self._model.hidden
        copies = not self._shape.sequence_first and kind is not CollectiveKind.ALL_REDUCE
        if copies and kind is CollectiveKind.REDUCE_SCATTER:
            source = self._moved_axis(part, source, phase, element_bytes, columns)
        name = self._graph.comm(
            self._name(part),
            self._shape.groups.collective(kind, int(self._tokens * hidden * element_bytes), TENSOR),
            TENSOR,
            origin=self._origin(phase, part),
            deps=(source,),
            shards=moved_axes(source, rows, hidden),
        )
        if not is_async:
            self._graph.hold_back(COMPUTE, [name])
            if copies and kind is CollectiveKind.ALL_GATHER:
                return self._moved_axis(part, name, phase, element_bytes, columns)
        return name

    def _moved_axis(self, part: str, source: str, phase: Phase, element_bytes: float, columns: int = 0) -> str:
        """The copy of a gathered or scattered tensor whose sequence axis is not the first."""
        shape = (self._tokens, columns or self._model.hidden)
        num_bytes = 4 * shape[0] * shape[1] * element_bytes / self._element_bytes
        return self._touch(f"{part}_move", (source,), num_bytes, shape, phase)

    def _enter(
        self, part: str, source: str, phase: Phase, *, is_async: bool = False, of: str = "", columns: int = 0
    ) -> str:
        """Before a column-parallel product: with sequence parallelism the rows are gathered, in the format of `of`.

        They have the hidden size, or `columns`.
        """
        if not self._layout.sequence_parallel:
            return source
        element_bytes = self._gathered_bytes(of, phase)
        return self._tensor_comm(
            part,
            CollectiveKind.ALL_GATHER,
            source,
            phase,
            is_async=is_async,
            element_bytes=element_bytes,
            columns=columns,
        )

    def _gathered_bytes(self, name: str, phase: Phase) -> float:
        if not name or not self._is_cast_before_gather(name, phase):
            return self._element_bytes
        return _GATHERED_BYTES.get(self._format(self._weights[name]), 1)

    def _own_rows(self, name: str, source: str, phase: Phase) -> str:
        """What matrix `name` will meet, on this rank's rows: cast where that is done before the gather."""
        return self._cast(name, source, self._rows, phase) if self._is_cast_before_gather(name, phase) else source

    def _leave(self, part: str, source: str, phase: Phase, *, is_async: bool = False, columns: int = 0) -> str:
        """After a row-parallel product: the partial sums are added."""
        kind = CollectiveKind.REDUCE_SCATTER if self._layout.sequence_parallel else CollectiveKind.ALL_REDUCE
        wide = self._element_bytes
        return self._tensor_comm(part, kind, source, phase, is_async=is_async, element_bytes=wide, columns=columns)

    def _entering(self, part: str, name: str, source: str) -> str:
        """A column-parallel product of what is gathered; in parts, the two run at once."""
        parts = self._layout.overlap_tensor
        source = self._own_rows(name, source, FORWARD)
        gathered = self._enter(part, source, FORWARD, is_async=parts, of=name)
        product = self._product(name, source if parts else gathered)
        if parts:
            self._in_parts(part, gathered, FORWARD, of=name)
        return product

    def _in_parts(self, part: str, gathered: str, phase: Phase, *, of: str) -> None:
        """What comes after a product that ran with its gather waits for both."""
        self._graph.hold_back(COMPUTE, [gathered])
        if not self._shape.sequence_first:
            self._moved_axis(part, gathered, phase, self._gathered_bytes(of, phase))

    def _leaving(self, part: str, name: str, source: str) -> str:
        """A row-parallel product whose sums are scattered or added; in parts, the two run at once."""
        if not self._layout.overlap_tensor:
            return self._leave(part, self._product(name, source), FORWARD)
        source = self._cast(name, source, self._tokens, FORWARD)
        reduced = self._leave(part, source, FORWARD, is_async=True)
        product = self._product(name, source)
        self._graph.hold_back(COMPUTE, [reduced])
        return product


# Layers and micro-batches repeat their works: each is checked and built once.
_gemm = lru_cache(maxsize=4096)(Gemm)
memory_bound = lru_cache(maxsize=4096)(MemoryBound)


def _parts(weight: Weight, outputs: int | None = None) -> list[tuple[str, int]]:
    """Suffix and columns of each of a weight's products; `outputs`: of one product that makes so many columns."""
    if outputs is None and weight.parts:
        return [(f"_{part}", columns) for part, columns in weight.parts]
    return [("", weight.outputs if outputs is None else outputs)]


def _ignore(weight: Weight, gradient: str) -> None:
    """Nobody asked when a gradient is ready."""
