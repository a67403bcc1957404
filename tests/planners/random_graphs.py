"""Random task graphs and steps, and the shortest schedule by enumeration of all orders."""

from dataclasses import dataclass
from random import Random

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.schedule import TaskGraph
from lagom_overlap.planners.times import origin_name
from lagom_overlap.workload import Buffer, CommOp, CompOp, Gather, Gemm, Iteration, Op, Origin, Phase, Reduce
from lagom_overlap.workload.sharding import ShardSpec, TensorUse

RESOURCES = ("compute", "intra_link", "inter_link")


def random_graph(random: Random, num: int, num_resources: int = 2, longest: int = 9) -> TaskGraph:
    """A graph whose arcs go forward, each task with up to two predecessors."""
    preds = [tuple(sorted(set(random.sample(range(task), min(task, random.randint(0, 2)))))) for task in range(num)]
    return TaskGraph(
        names=tuple(f"t{task}" for task in range(num)),
        ticks=tuple(random.randint(1, longest) for _ in range(num)),
        resource=tuple(random.randrange(num_resources) for _ in range(num)),
        preds=tuple(preds),
        resources=RESOURCES[:num_resources],
        tick_s=1e-6,
    )


def shortest_by_enumeration(graph: TaskGraph) -> int:
    """The least makespan over all topological orders, each run as early as it goes: some optimum is among them."""
    best = sum(graph.ticks) + 1

    def extend(ends: dict[int, int], free: tuple[int, ...], longest: int) -> None:
        nonlocal best
        if longest >= best:
            return
        if len(ends) == len(graph):
            best = longest
            return
        for task in range(len(graph)):
            if task in ends or any(pred not in ends for pred in graph.preds[task]):
                continue
            on = graph.resource[task]
            end = max([free[on], *(ends[pred] for pred in graph.preds[task])]) + graph.ticks[task]
            freed = tuple(end if r == on else value for r, value in enumerate(free))
            extend({**ends, task: end}, freed, max(longest, end))

    extend({}, (0,) * len(graph.resources), 0)
    return best


@dataclass(frozen=True)
class NamedSeconds:
    """Times by name; a piece takes its share of the whole and 2 % more, so does what becomes of a collective."""

    table: dict[str, float]

    def seconds(self, op: Op) -> float:
        if op.name in self.table:
            return self.table[op.name]
        whole = self.table[origin_name(op.name, self.table)]
        if op.name.endswith(("#join", "/join")):
            return 1e-6
        if isinstance(op, CommOp):
            return whole * op.collective.num_bytes / GATHER.num_bytes * 1.02 + 1e-6
        size = op.work.flops if isinstance(op, CompOp) and isinstance(op.work, Gemm) else 0.0
        return whole * size / FLOPS * 1.02 + 1e-6


GEMM = Gemm(256, 256, 256)
FLOPS = GEMM.flops
SHARDS = ShardSpec(
    (TensorUse("", (0, 1)), TensorUse("", (1, 2))), (Gather(0), Reduce(), Gather(1)), (GEMM.m, GEMM.k, GEMM.n)
)
GATHER = Collective(CollectiveKind.ALL_GATHER, 1 << 20, 16)
SCATTER = Collective(CollectiveKind.REDUCE_SCATTER, 1 << 20, 16)


def fsdp_step(num_layers: int, random: Random, *, comm_s: float = 200e-6) -> tuple[Iteration, NamedSeconds]:
    """Layers whose parameters are gathered, used and released, forward and backward; gradients are scattered."""
    ops: list[Op] = []
    buffers: list[Buffer] = []
    times: dict[str, float] = {}
    last: list[str] = []
    runs = [(Phase.FORWARD, layer) for layer in range(num_layers)]
    runs += [(Phase.BACKWARD, layer) for layer in reversed(range(num_layers))]
    for phase, layer in runs:
        origin = Origin(phase=phase, layer=layer, module=f"layers.{layer}", kernel="mm")
        tag = f"{phase}.{layer}"
        ops.append(CommOp(name=f"{tag}.ag", collective=GATHER, communicator="fsdp", origin=origin))
        ops.append(CompOp(name=tag, work=GEMM, deps=(*last, f"{tag}.ag"), origin=origin))
        times |= {f"{tag}.ag": comm_s * random.uniform(0.8, 1.2), tag: random.uniform(100e-6, 300e-6)}
        buffers.append(Buffer(name=f"{tag}.params", num_bytes=random.randint(1, 5), maker=f"{tag}.ag", users=(tag,)))
        if phase is Phase.BACKWARD:
            grad = f"{tag}.wgrad"
            own = Origin(phase=Phase.WEIGHT_GRAD, layer=layer, module=f"layers.{layer}", kernel="mm")
            ops.append(CompOp(name=grad, work=GEMM, deps=(*last, tag), origin=own, shards=SHARDS))
            ops.append(CommOp(name=f"{tag}.rs", collective=SCATTER, communicator="fsdp", deps=(grad,), origin=origin))
            times |= {grad: random.uniform(200e-6, 400e-6), f"{tag}.rs": comm_s}
            buffers.append(Buffer(name=f"{tag}.grad", num_bytes=random.randint(1, 5), maker=grad, users=(f"{tag}.rs",)))
        last = [tag]
    return Iteration("step", tuple(ops), True, tuple(buffers), 10), NamedSeconds(times)


def fsdp_problem(num_layers: int = 6, seed: int = 0, **fields: object) -> PlanProblem:
    """The step on two nodes of eight GPUs, planned within a second."""
    step, times = fsdp_step(num_layers, Random(seed))
    given: dict[str, object] = {"budget_s": 1.0, **fields}
    return PlanProblem(iteration=step, cluster=load_preset("h100_dgx", 2), times=times, **given)  # type: ignore[arg-type]
