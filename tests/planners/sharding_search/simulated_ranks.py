"""A sharded program executed: every rank's share of every call, and every conversion, on slices in one process."""

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import fx

from lagom_overlap.capturing.tensor_program import TracedProgram
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.planners.sharding_search.call_strategies import ShardingStrategy
from lagom_overlap.planners.sharding_search.conversions import ConversionStep
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, SearchMesh
from lagom_overlap.planners.sharding_search.sharding_problem import ShardingProblem, made_layouts
from lagom_overlap.workload.tensor_program import Operand, TensorCall, Value

Ranks = list[torch.Tensor]
_RESHAPES = {"view", "_unsafe_view", "reshape"}
_BIAS = {"addmm": 0, "convolution": 2}
"""Where the bias is among the arguments."""


def cut(whole: torch.Tensor, layout: Layout, mesh: SearchMesh, rank: int) -> torch.Tensor:
    """The part of a rank."""
    for place, at, size in zip(layout, coordinates(mesh)[rank], mesh.shape, strict=True):
        if isinstance(place, int):
            whole = whole.chunk(size, dim=place)[at]
    return whole


def coordinates(mesh: SearchMesh) -> list[tuple[int, ...]]:
    return list(product(*(range(n) for n in mesh.shape)))


def converted(ranks: Ranks, steps: Sequence[ConversionStep], mesh: SearchMesh) -> Ranks:
    """What every rank has after the collectives."""
    for step in steps:
        before, after = step.before[step.dims[0]], step.after[step.dims[0]]
        size = torch.tensor([mesh.shape[dim] for dim in step.dims]).prod().item()
        fresh = list(ranks)
        for group in groups(mesh, step.dims):
            parts = [ranks[rank] for rank in group]
            assert len(parts) == size
            assert step.collective is None or step.collective.num_ranks == size
            if before is Held.PARTIAL:
                whole = [torch.stack(parts).sum(0)] * len(parts)
            elif isinstance(before, int):
                whole = [torch.cat(parts, dim=before)] * len(parts)
            else:
                whole = parts
            for place, rank in enumerate(group):
                fresh[rank] = (
                    whole[place].chunk(len(group), dim=after)[place] if isinstance(after, int) else whole[place]
                )
            if step.collective is not None:  # what is announced is what moves
                moved = fresh[group[0]] if step.collective.kind is CollectiveKind.ALL_GATHER else parts[0]
                assert step.collective.num_bytes == moved.numel() * moved.element_size()
        ranks = fresh
    return ranks


def groups(mesh: SearchMesh, dims: tuple[int, ...]) -> list[list[int]]:
    """Ranks that differ along these mesh dimensions only."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(coordinates(mesh)):
        found.setdefault(tuple(a for dim, a in enumerate(at) if dim not in dims), []).append(rank)
    return list(found.values())


class Simulated:
    """Executes one combination of a problem on whole parameters and inputs."""

    def __init__(
        self, problem: ShardingProblem, choice: Sequence[int], traced: TracedProgram, given: Mapping[str, torch.Tensor]
    ) -> None:
        self._problem, self._mesh, self._given = problem, problem.mesh, given
        options = [node.options[number] for node, number in zip(problem.nodes, choice, strict=True)]
        self._made = made_layouts(options)
        self._nodes = {node.name: node for node in traced.graph_module.graph.nodes}
        self._ranks: dict[str, Ranks] = {}
        self._strategy: dict[str, ShardingStrategy] = {}
        for node, option in zip(problem.nodes, options, strict=True):
            self._strategy.update(zip((call.name for call in node.calls), option.strategies, strict=True))

    def results(self) -> list[list[torch.Tensor]]:
        """Each result on every rank, whole."""
        program = self._problem.program
        for call in program.calls:
            if call.name in self._strategy:
                self._run(call, self._strategy[call.name])
        return [self._shown(name, self._mesh.whole) for name in program.results]

    def _shown(self, value: str, layout: Layout) -> Ranks:
        """A value on every rank in a layout, views applied to what lies behind."""
        root, behind = self._problem.views.behind(value, layout)
        whole = self._problem.program.values[root]
        if root in self._given:
            made = self._made.get(root, behind)
            ranks = [cut(self._given[root], made, self._mesh, rank) for rank in range(self._mesh.num_ranks)]
        else:
            made, ranks = self._made[root], self._ranks[root]
        found = self._problem.conversions.between(whole, made, behind)
        assert found is not None
        ranks, at = converted(ranks, found.steps, self._mesh), behind
        for call, output in self._problem.views.chain(value)[1]:
            at = tuple(p if isinstance(p, Held) else output.axes.index(call.inputs[0].axes[p]) for p in at)
            ranks = [self._viewed(call, output, tensor, at) for tensor in ranks]
        hidden = tuple(want if want != have else Held.WHOLE for want, have in zip(layout, at, strict=True))
        return [cut(tensor, hidden, self._mesh, rank) for rank, tensor in enumerate(ranks)]

    def _viewed(self, call: TensorCall, output: Operand, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        node = self._nodes[call.name]
        shape = local_shape(self._problem.program.values[output.value], layout, self._mesh)
        short = node.target._schema.name.rpartition("::")[2]
        if short in _RESHAPES:
            return tensor.reshape(shape)
        if short == "expand":
            return tensor.expand(shape)
        made = node.target(tensor, *node.args[1:], **node.kwargs)
        return made if isinstance(made, torch.Tensor) else made[call.outputs.index(output)]

    def _run(self, call: TensorCall, strategy: ShardingStrategy) -> None:
        node = self._nodes[call.name]
        shown = {operand.value: self._shown(operand.value, strategy.layout(operand)) for operand in call.inputs}
        short = node.target._schema.name.rpartition("::")[2]
        summing = [
            dim for dim, choice in enumerate(strategy.choices) if not isinstance(choice, Held)
            and choice in call.outputs[0].summed
        ]  # fmt: skip
        for rank, at in enumerate(coordinates(self._mesh)):

            def local(other: fx.Node, rank: int = rank) -> torch.Tensor:
                return shown[_value(other)][rank].contiguous()  # the CPU's norms read means as if they were

            args, kwargs = fx.map_arg((node.args, node.kwargs), local)
            if short in _BIAS and any(at[dim] for dim in summing):  # only the first rank adds it
                args = tuple(torch.zeros_like(arg) if n == _BIAS[short] else arg for n, arg in enumerate(args))
            made = node.target(*args, **kwargs)
            outputs = [made] if isinstance(made, torch.Tensor) else [t for t in made if isinstance(t, torch.Tensor)]
            if short in ("mean", "nll_loss_forward"):  # of a share of the rows
                for dim in summing:
                    outputs[0] = outputs[0] / self._mesh.shape[dim]
            for operand, tensor in zip(call.outputs, outputs, strict=True):
                expected = local_shape(
                    self._problem.program.values[operand.value], strategy.layout(operand), self._mesh
                )
                assert tuple(tensor.shape) == expected, (call.name, strategy)
                self._ranks.setdefault(operand.value, []).append(tensor)


def _value(node: fx.Node) -> str:
    """The name of the value that a node is; `getitem` of a call is one of its outputs."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return f"{node.args[0].name}:{node.args[1]}"
    return NAMES.get(node.name, node.name)


NAMES: dict[str, str] = {}
"""Values of placeholders: parameters go by their own names."""


def local_shape(value: Value, layout: Layout, mesh: SearchMesh) -> tuple[int, ...]:
    shape = list(value.shape)
    for place, size in zip(layout, mesh.shape, strict=True):
        if isinstance(place, int):
            shape[place] //= size
    return tuple(shape)
