"""Every planner's plan of captured programs against dependences found by brute force on the traced graph.

The oracle shares nothing with the recorder: it compares every pair of nodes by the storages that they read and write,
by values, and by whether they draw random numbers.
"""

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest

pytest.importorskip("torch")

import torch
from graph_memory import held_in_order, predicted_peak, storages
from torch import distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.fake_tensor import capture_step as capture_training
from lagom_overlap.capturing.fake_world import fake_world
from lagom_overlap.capturing.fx import FxCapture, capture_graph
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.engines.fx.apply import apply_rewrites, name_operators
from lagom_overlap.engines.fx.nodes import OP_NAME, op_name
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import capture_step
from lagom_overlap.engines.fx.streams import StreamedStep
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.registry import make_planner, planner_names
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.centauri.evolution import evolutions
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.framework_waits import framework_of
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.planners.times import ModelTimes, origin_name
from lagom_overlap.workload import Phase
from lagom_overlap.workload.fsdp2.reissue import reissued
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.slide import gather_name, part_name, scatter_name
from lagom_overlap.workload.rewrite.steps import ChainLink, Fuse, Reorder, Slide

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

C10D = torch.ops._c10d_functional
RANKS, WIDTH = 4, 256
REWRITING = sorted(set(planner_names()) - {"fsdp2"})


def _gather(shard):
    return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, RANKS, dist.group.WORLD.group_name))


def _scatter(gradient):
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(gradient, "sum", RANKS, dist.group.WORLD.group_name))


def sharded_step(x, *shards):
    """Sharded layers with dropout, the first weight used twice (tied), clipping by the global norm, then updates."""
    whole = [_gather(shard).requires_grad_() for shard in shards]
    out = x
    for weight in (*whole, whole[0]):
        out = out + torch.dropout(torch.relu(out @ weight), 0.25, True)
    gradients = torch.autograd.grad(out.float().square().mean(), whole)
    mine = [_scatter(gradient) for gradient in gradients]
    square = torch.stack([gradient.float().square().sum() for gradient in mine]).sum()
    norm = C10D.wait_tensor(C10D.all_reduce(square, "sum", dist.group.WORLD.group_name)).sqrt()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    noise = torch.rand_like(mine[0])
    return (*(shard - 0.1 * scale * gradient for shard, gradient in zip(shards, mine, strict=True)), noise)


@cache
def program() -> tuple[FxCapture, PlanProblem]:
    with fake_world(RANKS):
        shards = [torch.zeros(WIDTH // RANKS, WIDTH) for _ in range(3)]
        with torch.enable_grad():
            captured = capture_step(sharded_step, (torch.zeros(512, WIDTH), *shards), name="sharded")
    name_operators(captured.graph_module.graph, captured.iteration)
    return captured, problem_of(captured.capture)


def problem_of(capture: IssuedStep) -> PlanProblem:
    cluster = replace(load_preset("a40_pcie", 2), gpus_per_node=RANKS // 2)
    placed = capture.placed_on(cluster)
    return PlanProblem(
        iteration=placed.iteration,
        cluster=cluster,
        times=ModelTimes(ContentionModel(cluster, load_profile("plausible"))),
        groups=placed.groups,
        work=SearchBudget(0.5),
        issued=replace(placed.issued, is_dataflow=True),
        framework=framework_of(placed.iteration),
    )


def plan_of(planner: str, problem: PlanProblem) -> Plan:
    if planner == "joint":  # counts no work
        problem = replace(problem, work=None, budget_s=0.3)
    return make_planner(planner, {}).plan(problem)


def dependences(graph: fx.Graph) -> set[tuple[str, str]]:
    """(earlier, later) for every two operators of which the later must wait for the earlier."""
    reads: dict[fx.Node, set[int]] = {}
    writes: dict[fx.Node, set[int]] = {}
    behind: dict[fx.Node, set[str]] = {}  # operators whose value a node carries on, seen through views and waits
    pairs: set[tuple[str, str]] = set()
    operators = []
    for node in graph.nodes:
        carried = {name for used in node.all_input_nodes for name in behind[used]}
        if OP_NAME not in node.meta:
            behind[node] = carried
            continue
        name = op_name(node)
        behind[node] = {name}
        pairs |= {(earlier, name) for earlier in carried}
        operators.append(node)
        schema = node.target._schema
        mutated = [
            argument
            for declared, argument in zip(schema.arguments, node.args, strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
        reads[node] = set().union(*(storages(used) for used in node.all_input_nodes), set())
        writes[node] = storages(node) | {one for used in mutated for one in storages(used)}
    for earlier, later in combinations(operators, 2):
        clash = writes[earlier] & (reads[later] | writes[later]) or reads[earlier] & writes[later]
        drawn = all(torch.Tag.nondeterministic_seeded in node.target.tags for node in (earlier, later))
        if clash or drawn:
            pairs.add((op_name(earlier), op_name(later)))
    return pairs


def parts_of(plan: Plan, known: dict[str, object]) -> dict[str, list[str]]:
    """Each operator's parts in the plan: itself, its pieces, what it was fused into."""
    members = {f"{step.comms[0]}+{len(step.comms) - 1}": step.comms for step in plan.rewrites if isinstance(step, Fuse)}

    def wholes(name: str) -> set[str]:
        inside = members.get(name)
        return {origin_name(name, known)} if inside is None else {one for part in inside for one in wholes(part)}

    found: dict[str, list[str]] = {}
    for op in plan.iteration.ops:
        for whole in wholes(op.name):
            found.setdefault(whole, []).append(op.name)
    return found


@pytest.mark.parametrize("planner", REWRITING)
def test_no_operator_starts_before_what_it_depends_on(planner: str) -> None:
    captured, problem = program()
    plan = plan_of(planner, problem)
    spans = {span.name: span for span in simulated(problem, plan.iteration, plan.configs).timeline.spans}
    parts = parts_of(plan, dict.fromkeys(op.name for op in problem.iteration.ops))
    pairs = dependences(captured.graph_module.graph)
    assert len(pairs) > len(problem.iteration.ops)
    for earlier, later in pairs:
        ended = [spans[name].end_s for name in parts[earlier]]
        started = [spans[name].start_s for name in parts[later]]
        if len(ended) == 1 or len(started) == 1:
            assert max(ended) <= min(started) + 1e-12, (earlier, later)
        else:  # piece by piece
            assert min(ended) <= min(started) + 1e-12, (earlier, later)


@pytest.mark.parametrize("planner", REWRITING)
def test_the_engine_takes_every_plan(planner: str) -> None:
    """What is predicted can be executed: prediction and engine agree on what needs what."""
    captured, problem = program()
    with fake_world(RANKS):
        apply_rewrites(captured.graph_module, captured.iteration, plan_of(planner, problem).rewrites, ProcessGroups())


def _reduced(x):
    return C10D.wait_tensor(C10D.all_reduce(x, "sum", dist.group.WORLD.group_name))


def tensor_parallel(x, *weights):
    """Row-parallel products with residual and norm behind; what is kept of rows is read by products later."""
    saved = []
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        hidden = torch.relu(normed @ up)
        saved.append((normed, hidden))
        x = x + _reduced(hidden @ down)
    return (x, *(normed.t() @ hidden for normed, hidden in saved))


def data_parallel(x, w, momentum, variance):
    """A gradient reduced, then an Adam-like update on every rank alike."""
    gradient = _reduced(x.t() @ (x @ w))
    momentum = 0.9 * momentum + 0.1 * gradient
    variance = 0.99 * variance + 0.01 * gradient * gradient
    return (w - 0.1 * momentum / (variance.sqrt() + 1e-6), momentum, variance)


EVOLVED = {
    "sequence parallel": (tensor_parallel, [(64, 32), *([(32, 128), (128, 32)] * 3)]),
    "ZeRO-1": (data_parallel, [(64, 128), (128, 128), (128, 128), (128, 128)]),
}


@pytest.mark.parametrize("name", EVOLVED)
def test_parts_and_gathers_of_an_evolved_step_wait_for_what_brute_force_finds(name: str) -> None:
    function, shapes = EVOLVED[name]
    with fake_world(RANKS):
        captured = capture_step(function, tuple(torch.zeros(shape) for shape in shapes), name=name)
        name_operators(captured.graph_module.graph, captured.iteration)
        problem = problem_of(captured.capture)
        (step,) = evolutions(problem.iteration)
        iteration = rewritten(problem.iteration, (step,))
        made = apply_rewrites(captured.graph_module, captured.iteration, (step,), ProcessGroups())
    assert {op_name(node) for node in made.graph.nodes if OP_NAME in node.meta} == {op.name for op in iteration.ops}
    members = {link.op for link in step.ops} | set(step.comms)
    spans = {span.name: span for span in simulated(problem, iteration).timeline.spans}

    def on_part(one: str) -> str:
        return one if one not in members else scatter_name(one) if one in step.comms else part_name(one)

    for earlier, later in dependences(captured.graph_module.graph):
        is_whole = earlier in members and later not in members
        needed = gather_name(step, earlier) if is_whole else on_part(earlier)
        assert spans[needed].end_s <= spans[on_part(later)].start_s + 1e-12, (needed, later)
    whole = sum(op.collective.num_bytes for op in problem.iteration.comms)
    scattered = [op for op in iteration.comms if op.name.endswith(".rs")]
    assert sum(op.collective.num_bytes for op in scattered) == whole
    parts = sum(op.work.num_bytes for op in iteration.computations if op.name.endswith("/part"))
    wholes = sum(op.work.num_bytes for op in problem.iteration.computations if op.name in members)
    assert parts == pytest.approx(wholes / RANKS, rel=1e-3)


@pytest.mark.parametrize("name", EVOLVED)
def test_an_evolved_step_holds_what_its_graph_holds(name: str) -> None:
    """Parts and the wholes that are gathered of them at one time, as the storages of the engine's graph."""
    function, shapes = EVOLVED[name]
    with fake_world(RANKS):
        captured = capture_step(function, tuple(torch.zeros(shape) for shape in shapes), name=name)
        name_operators(captured.graph_module.graph, captured.iteration)
        assert predicted_peak(captured.iteration, captured.graph_module.graph) == held_in_order(
            captured.graph_module.graph
        )
        (step,) = evolutions(captured.iteration)
        made = apply_rewrites(captured.graph_module, captured.iteration, (step,), ProcessGroups())
    assert predicted_peak(rewritten(captured.iteration, (step,)), made.graph) == held_in_order(made.graph)


def test_nothing_slides_by_what_ranks_drew_or_scattered() -> None:
    def drawn(x, y):
        return (_reduced(x) + torch.rand_like(y),)

    def scattered(x, y):
        return (_reduced(x) + _scatter(y),)

    for function, shape in ((drawn, (64, 8)), (scattered, (64 * RANKS, 8))):
        with fake_world(RANKS):
            captured = capture_step(function, (torch.zeros(64, 8), torch.zeros(shape)), name="differs")
            step = Slide(("all_reduce",), (ChainLink("add", 0),))
            with pytest.raises(JobError, match="nothing slides by it"):
                apply_rewrites(captured.graph_module, captured.iteration, (step,), ProcessGroups())


class _Clipped(torch.optim.AdamW):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1.0)
        return super().step(closure)


@cache
def clipped_fsdp2() -> PlanProblem:
    def build() -> TrainingStep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.Linear(128, 64)) for _ in range(3)]
        model = nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = _Clipped(model.parameters(), foreach=True)
        inputs = (torch.randn(32, 64),)
        return TrainingStep(model=model, inputs=inputs, loss=lambda out: out.square().mean(), optimizers=(optimizer,))

    return problem_of(capture_training(build, num_ranks=RANKS, name="clipped"))


@pytest.mark.parametrize("planner", planner_names())
def test_updates_follow_clipping_and_dropouts_keep_their_order(planner: str) -> None:
    problem = clipped_fsdp2()
    plan = plan_of(planner, problem)
    spans = {span.name: span for span in simulated(problem, plan.iteration, plan.configs).timeline.spans}
    last = [op.name for op in problem.iteration.ops if op.origin.phase is Phase.OPTIMIZER]
    clip = max(number for number, name in enumerate(last) if "all_reduce" in name) + 1
    while "foreach_mul" not in last[clip]:
        clip += 1
    for name in last[clip + 1 :]:
        assert spans[last[clip]].end_s <= spans[name].start_s + 1e-12, (last[clip], name)
    drawn = [op.name for op in problem.iteration.ops if "bernoulli" in op.name]
    assert len(drawn) == 3
    assert all(spans[one].end_s <= spans[other].start_s for one, other in pairwise(drawn))


@cache
def replicated(*, gradients_are_views: bool) -> PlanProblem:
    def build() -> TrainingStep:
        blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)]
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*blocks), bucket_cap_mb=1, gradient_as_bucket_view=gradients_are_views
        )
        optimizer = torch.optim.SGD(model.parameters(), foreach=False)
        inputs = (torch.randn(64, 512),)
        return TrainingStep(model=model, inputs=inputs, loss=lambda out: out.square().mean(), optimizers=(optimizer,))

    return problem_of(capture_training(build, num_ranks=RANKS, name="replicated"))


@pytest.mark.parametrize("gradients_are_views", [False, True])
@pytest.mark.parametrize("planner", ["as issued", *REWRITING])
def test_ddp_reduces_its_buckets_in_order_then_copies_them_out_then_steps(
    planner: str, gradients_are_views: bool
) -> None:
    """As `reducer.cpp` does: `optimizer.step()` comes when `finalize_backward` has awaited every bucket."""
    problem = replicated(gradients_are_views=gradients_are_views)
    assert problem.framework == "DDP"
    plan = None if planner == "as issued" else plan_of(planner, problem)
    iteration, configs = (problem.unplanned, {}) if plan is None else (plan.iteration, plan.configs)
    spans = {span.name: span for span in simulated(problem, iteration, configs).timeline.spans}
    known = dict.fromkeys(op.name for op in problem.iteration.ops)
    parts = {name: [name] for name in known} if plan is None else parts_of(plan, known)

    def start_s(names: list[str]) -> float:
        return min(spans[part].start_s for name in names for part in parts[name])

    def end_s(names: list[str]) -> float:
        return max(spans[part].end_s for name in names for part in parts[name])

    buckets = [op.name for op in problem.iteration.comms]
    assert len(buckets) == 4
    backward = [op for op in problem.iteration.computations if op.origin.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)]
    copies = [op.name for op in backward if op.deps and set(op.deps) <= set(buckets)]
    assert len(copies) == (0 if gradients_are_views else 8)
    updates = [op.name for op in problem.iteration.ops if op.origin.phase is Phase.OPTIMIZER]
    assert len(updates) == 8
    for earlier, later in pairwise(buckets):
        assert start_s([earlier]) <= start_s([later])
        assert end_s([earlier]) <= end_s([later]) + 1e-12
    assert end_s([*buckets, *copies]) <= start_s(updates) + 1e-12
    if copies:
        assert end_s([op.name for op in backward if op.name not in copies]) <= start_s(copies) + 1e-12


class _Routed(nn.Module):
    """Tokens travel to experts on all ranks by counts that are exchanged, and read, first."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert, self.shared = nn.Linear(256, RANKS), nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        counts = torch.zeros(RANKS, dtype=torch.long).scatter_add(0, chosen, torch.ones_like(chosen))
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = counts.tolist(), arriving.tolist()
        moved = self.expert(all_to_all_single_autograd(x[torch.argsort(chosen)], received, sent, dist.group.WORLD))
        return self.shared(x) + all_to_all_single_autograd(moved, sent, received, dist.group.WORLD)


@cache
def routed(*, sharded: bool = False) -> PlanProblem:
    def build() -> TrainingStep:
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(_Routed(), _Routed(), _Routed())
        if sharded:
            for block in (*model, model):
                fully_shard(block)
        optimizer = torch.optim.SGD(model.parameters(), foreach=True)
        inputs = (torch.randn(512, 256),)
        return TrainingStep(
            model=model,
            inputs=inputs,
            loss=lambda out: out.square().mean(),
            optimizers=(optimizer,),
            read_value=lambda _: 512 // RANKS,
        )

    return problem_of(capture_training(build, num_ranks=RANKS, name="routed"))


def assert_reads_hold_back(problem: PlanProblem, plan: Plan) -> None:
    """Nothing that the host issues behind a read starts before the read has ended."""
    spans = {span.name: span for span in simulated(problem, plan.iteration, plan.configs).timeline.spans}
    parts = parts_of(plan, dict.fromkeys(op.name for op in problem.iteration.ops))
    reads = [op.name for op in problem.iteration.computations if op.is_host_read]
    assert len(reads) == 3
    for read in reads:
        behind = problem.iteration.ops[[op.name for op in problem.iteration.ops].index(read) + 1 :]
        for op in behind:
            assert all(spans[read].end_s <= spans[part].start_s + 1e-12 for part in parts[op.name]), (read, op.name)


@pytest.mark.parametrize("planner", REWRITING)
def test_tokens_follow_the_exchange_of_their_counts(planner: str) -> None:
    assert_reads_hold_back(routed(), plan_of(planner, routed()))


def test_fsdp2_is_told_to_gather_ahead_of_a_read_and_not_to_send_tokens_ahead_of_it() -> None:
    """A prefetched gather is issued where an earlier module's hook is: before a read that its own place is behind."""
    problem = routed(sharded=True)
    visits = visits_of(problem.iteration)
    units = units_of(visits)
    assert len(units) == 3
    own = reissued(problem.iteration, problem.unplanned, Fsdp2Settings(units=units))
    assert [op.name for op in own.ops] == [op.name for op in problem.unplanned.ops]
    assert simulated(problem, own).makespan_s == pytest.approx(simulated(problem, problem.unplanned).makespan_s)
    ahead = reissued(problem.iteration, problem.unplanned, Fsdp2Settings(units=units, forward_prefetch=2))
    place = {op.name: number for number, op in enumerate(ahead.ops)}
    (read, *_) = (op.name for op in problem.iteration.computations if op.is_host_read)
    gathers = [visit.gather for visit in visits if visit.is_forward and visit.unit]
    assert [place[gather] < place[read] for gather in gathers] == [True, True, True]
    exchanges = [op.name for op in problem.iteration.comms if op.collective.kind is CollectiveKind.ALL_TO_ALL]
    assert place[exchanges[0]] < place[read] < place[exchanges[1]]


def read_step(x, counts, weight):
    """A factor that is exchanged and read; a product and its sum follow in the program."""
    group = dist.group.WORLD.group_name
    arriving = C10D.wait_tensor(C10D.all_to_all_single(counts, [1] * RANKS, [1] * RANKS, group))
    factor = arriving.sum().item()
    return C10D.wait_tensor(C10D.all_reduce(x @ weight, "sum", group)) * factor, (x @ weight).relu()


def test_a_read_in_a_graph_holds_back_plans_and_the_engine() -> None:
    """As Dynamo leaves it in its graphs: a node whose value the host needs."""
    with fake_world(RANKS):
        shapes = ShapeEnv(allow_scalar_outputs=True)
        with FakeTensorMode(shape_env=shapes, static_shapes=True):
            inputs = (torch.zeros(64, 64), torch.zeros(RANKS, dtype=torch.long), torch.zeros(64, 64))
            module = make_fx(read_step)(*inputs)
        capture = capture_graph(module, num_ranks=RANKS, name="read")
        order = [op.name for op in capture.iteration.ops]
        read = order.index("_local_scalar_dense")
        early = [*order[:read], "mm", "all_reduce", *(one for one in order[read:] if one not in ("mm", "all_reduce"))]
        with pytest.raises(JobError, match=r"issues 'mm' before '_local_scalar_dense', which it waits for"):
            apply_rewrites(module, capture.iteration, (Reorder(tuple(early)),), ProcessGroups())
        plan = plan_of("ours", problem_of(capture))
        made = apply_rewrites(module, capture.iteration, plan.rewrites, ProcessGroups())
        given = (torch.randn(64, 64), torch.full((RANKS,), 3), torch.randn(64, 64))
        step = StreamedStep(made, ProcessGroups())
        found = step.run(given)
        step.close()
    names = [span.name for span in sorted(found.spans, key=lambda span: span.start_s)]
    assert names.index("_local_scalar_dense") < names.index("mm")
    assert torch.equal(found.outputs[1], (given[0] @ given[2]).relu())
