"""Programs of a few calls, and the machine they are searched for."""

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.sharding_search.clusters import sharding_problem
from lagom_overlap.planners.sharding_search.conversions import Conversions
from lagom_overlap.planners.sharding_search.mesh_layouts import SearchMesh
from lagom_overlap.planners.sharding_search.sharding_problem import ShardingProblem
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.workload import Gemm, MemoryBound, Origin, Phase
from lagom_overlap.workload.tensor_program import Operand, TensorCall, TensorProgram, Value, ValueKind


class Program:
    """Writes a program down call by call; tensors have 2 bytes per element."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.calls: list[TensorCall] = []

    def given(self, name: str, *shape: int, parameter: bool = True) -> str:
        kind = ValueKind.PARAMETER if parameter else ValueKind.INPUT
        self.values[name] = Value(name=name, shape=shape, element_bytes=2, kind=kind)
        return name

    def _made(self, name: str, *shape: int, base: str | None = None) -> str:
        self.values[name] = Value(name=name, shape=shape, element_bytes=2, base=base)
        return name

    def product(self, name: str, a: str, b: str, phase: Phase = Phase.FORWARD) -> str:
        """[m, k] x [k, n]."""
        (m, k), n = self.values[a].shape, self.values[b].shape[1]
        made = self._made(name, m, n)
        self.calls.append(
            TensorCall(
                name=name,
                inputs=(Operand(a, (0, 1)), Operand(b, (1, 2))),
                outputs=(Operand(made, (0, 2), frozenset({1})),),
                sizes=(m, k, n),
                work=Gemm(m, n, k),
                origin=Origin(phase=phase, kernel="aten.mm"),
            )
        )
        return made

    def turned(self, name: str, a: str, phase: Phase = Phase.FORWARD) -> str:
        """The transpose, a view."""
        rows, columns = self.values[a].shape
        made = self._made(name, columns, rows, base=a)
        self.calls.append(
            TensorCall(
                name=name,
                inputs=(Operand(a, (0, 1)),),
                outputs=(Operand(made, (1, 0)),),
                sizes=(rows, columns),
                is_linear=True,
                origin=Origin(phase=phase),
            )
        )
        return made

    def pointwise(self, name: str, *inputs: str, linear: bool = False, phase: Phase = Phase.FORWARD) -> str:
        shape = self.values[inputs[0]].shape
        axes = tuple(range(len(shape)))
        made = self._made(name, *shape)
        self.calls.append(
            TensorCall(
                name=name,
                inputs=tuple(Operand(value, axes) for value in inputs),
                outputs=(Operand(made, axes),),
                sizes=shape,
                is_linear=linear,
                work=MemoryBound((len(inputs) + 1) * self.values[inputs[0]].num_bytes),
                origin=Origin(phase=phase, kernel="aten.pointwise"),
            )
        )
        return made

    def done(self, *results: str, gradients: tuple[tuple[str, str], ...] = ()) -> TensorProgram:
        return TensorProgram(
            name="small", values=self.values, calls=tuple(self.calls), results=results, gradients=gradients
        )


def mlp_forward(tokens: int, hidden: int, *, wide: int = 4) -> TensorProgram:
    """Two products with something not linear between."""
    program = Program()
    x = program.given("x", tokens, hidden, parameter=False)
    up, down = program.given("up", hidden, wide * hidden), program.given("down", wide * hidden, hidden)
    inner = program.pointwise("gelu", program.product("first", x, up))
    return program.done(program.product("second", inner, down))


def mlp_training(tokens: int, hidden: int, *, wide: int = 4) -> TensorProgram:
    """The same with the products of the backward pass, and the optimizer."""
    program = Program()
    x = program.given("x", tokens, hidden, parameter=False)
    target = program.given("target", tokens, hidden, parameter=False)
    up, down = program.given("up", hidden, wide * hidden), program.given("down", wide * hidden, hidden)
    inner = program.pointwise("gelu", program.product("first", x, up))
    out = program.product("second", inner, down)
    b = Phase.BACKWARD
    grad = program.pointwise("grad", out, target, phase=b)
    grad_down = program.product("grad_down", program.turned("inner_t", inner, b), grad, b)
    back = program.product("back", grad, program.turned("down_t", down, b), b)
    back = program.pointwise("gelu_back", back, "first", phase=b)
    grad_up = program.product("grad_up", program.turned("x_t", x, b), back, b)
    return program.done(gradients=(("up", grad_up), ("down", grad_down))).with_updates()


def machine(num_nodes: int = 1) -> tuple[Cluster, OpTimes]:
    cluster = load_preset("a100_dgx", num_nodes)
    return cluster, ModelTimes(ContentionModel(cluster, load_profile("plausible")))


def problem_of(program: TensorProgram, *shape: int, merge: bool = True) -> ShardingProblem:
    mesh = SearchMesh(shape)
    cluster, times = machine()
    return sharding_problem(program, mesh, Conversions(mesh, cluster, times), times, merge=merge)
