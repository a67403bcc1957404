"""What ranks do in the tests of planned execution; each function runs on every rank and returns plain values."""

import functools
from itertools import count
from pathlib import Path

import torch
from torch import distributed as dist

from lagom_overlap.engines.fx.agreement import check_able, check_agreement, signature
from lagom_overlap.engines.fx.apply import apply_rewrites
from lagom_overlap.engines.fx.commands import Refused, RunPlan, ScriptProgram
from lagom_overlap.engines.fx.nodes import OP_NAME
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import capture_step, load_program
from lagom_overlap.engines.fx.program_session import PlannedSession
from lagom_overlap.engines.fx.slide import check_replicated
from lagom_overlap.engines.fx.streams import Arrival, StreamedStep, settled
from lagom_overlap.errors import JobError
from lagom_overlap.planners.centauri.evolution import evolutions
from lagom_overlap.timeline import SpanKind
from lagom_overlap.verbs.plan_apply import DefaultGroupRanks
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import ChainLink, Reorder, Slide, Split
from lagom_overlap.workload.rewrite.tables import table_of

FC = torch.ops._c10d_functional
GROUPS = ProcessGroups()
RUNS = count()


def world():
    return dist.group.WORLD.group_name


def gather(x, size=4, group=None):
    return FC.wait_tensor(FC.all_gather_into_tensor(x, size, group or world()))


def scatter(x, size=4, group=None):
    return FC.wait_tensor(FC.reduce_scatter_tensor(x, "sum", size, group or world()))


def reduced(x, group=None):
    return FC.wait_tensor(FC.all_reduce(x, "sum", group or world()))


def exchanged(x, size=4, group=None):
    part = x.shape[0] // size
    return FC.wait_tensor(FC.all_to_all_single(x, [part] * size, [part] * size, group or world()))


def traced(function, inputs):
    return capture_step(function, inputs, name="case")


def seeded(*shapes):
    """The same tensors of small integers on every rank but for the rank, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    return [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]


def compare(case, rewrites):
    """Largest differences between the planned and the unplanned outputs, and the operators in order."""
    function, inputs = CASES[case]()
    captured = traced(function, inputs)
    planned = apply_rewrites(captured.graph_module, captured.iteration, rewrites, GROUPS)
    expected = function(*inputs)
    plain = planned(*inputs)
    step = StreamedStep(planned, GROUPS)
    streamed = step.run(inputs).outputs
    step.close()
    names = [node.meta[OP_NAME] for node in planned.graph.nodes if OP_NAME in node.meta]
    errors = [
        max(float((a - b).abs().max()) for a, b in zip(expected, outputs, strict=True)) for outputs in (plain, streamed)
    ]
    return errors, names


def compare_evolved(case):
    """As `compare`, of what Centauri lets slide."""
    function, inputs = CASES[case]()
    return compare(case, evolutions(traced(function, inputs).iteration))


def replicated(input_of_rank):
    """What is said of a slid sum whose other operand is that on each rank."""
    function = lambda x, y: (reduced(x) + y,)  # noqa: E731
    inputs = [torch.ones(8, 4), torch.full((8, 4), float(input_of_rank[dist.get_rank()]))]
    captured = traced(function, inputs)
    planned = apply_rewrites(captured.graph_module, captured.iteration, evolutions(captured.iteration), GROUPS)

    def gather(value):
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(found, torch.tensor([value]))
        return tuple(int(one) for one in found)

    try:
        check_replicated(planned, inputs, gather)
    except JobError as error:
        return str(error)
    return ""


@functools.cache
def session():
    """The one of this process: its checks are numbered, and a second one would read what was said in the first."""
    return PlannedSession(DefaultGroupRanks(torch.device("cpu")))


def slid_in_pairs(function):
    """What a session says of a program of pairs whose sum is slid: why not, or nothing if it ran."""
    program = ScriptProgram(str(Path(__file__).with_name("pairs_program.py")), function)
    step = Slide(("all_reduce",), (ChainLink("add", 0),))
    digest = graph_digest(load_program(Path(program.script), function).captured(function).iteration)
    answer = session().run(RunPlan(program, (table_of(step),), rounds=1, seed=0, graph=digest))
    return answer.reason if isinstance(answer, Refused) else ""


def names_of(case):
    function, inputs = CASES[case]()
    return [op.name for op in traced(function, inputs).iteration.ops]


def _gather_products():
    def function(x, w1, w2):
        h = gather(x) @ w1
        return (torch.relu(h) @ w2, h)

    return function, seeded((8, 12), (12, 16), (16, 8))


def _product_scatter():
    def function(x, w):
        return (scatter(torch.relu(x) @ w),)

    return function, seeded((32, 12), (12, 16))


def _product_reduce():
    def function(x, w, v):
        return (reduced(x @ w) @ v, reduced(x[:3, :3]))

    return function, seeded((8, 6), (6, 16), (16, 4))


def _tensor_parallel_blocks():
    """Two row-parallel products, each followed by a residual and a norm of rows: sequence parallelism."""

    def normed(x):
        return x - x.amax(-1, keepdim=True)  # whole numbers, so that the next sum is exact in any order

    def function(x, w1, v1, w2, v2):
        kept = x
        for up, down in ((w1, v1), (w2, v2)):
            kept = kept + reduced(torch.relu(normed(kept) @ up) @ down)
        return (kept, normed(kept).sum())

    return function, [torch.ones(8, 6), *seeded((6, 4), (4, 6), (6, 4), (4, 6))]


def _data_parallel_update():
    """Gradients reduced, then momentum and weights updated on every rank alike: ZeRO-1."""

    def function(x, w, momentum, bias):
        gradient = reduced(x.t() @ (x @ w))
        moved = 0.5 * momentum + gradient
        summed = reduced((x @ w).sum(0))
        return (w - 0.25 * moved, moved, bias - 0.25 * summed)

    x, w, momentum, bias = seeded((4, 8), (8, 12), (8, 12), (12,))
    same = [torch.ones_like(one) for one in (w, momentum, bias)]
    return function, [x, *same]


def _reduced_dropout():
    def function(x):
        y = reduced(x)
        return (y * torch.bernoulli(torch.sigmoid(y)),)

    return function, seeded((8, 6))


def _exchange():
    def function(x, w):
        return (exchanged(exchanged(x) @ w),)

    return function, seeded((16, 6), (6, 6))


def _two_gathers():
    def function(x, y, w):
        a = gather(x)
        b = gather(y)
        return (a @ w, (b @ w).sum(), scatter(a), scatter(torch.cat([b, b])))

    return function, seeded((2, 6), (4, 6), (6, 6))


def _unequal_exchange():
    """Rank r sends rank j as many rows as (r + 2 j) % 3 + 1: tokens of experts."""
    rank = dist.get_rank()
    sent = [(rank + 2 * j) % 3 + 1 for j in range(4)]
    come = [(j + 2 * rank) % 3 + 1 for j in range(4)]

    def function(x, w):
        tokens = FC.wait_tensor(FC.all_to_all_single(x, come, sent, world()))
        return (FC.wait_tensor(FC.all_to_all_single(torch.relu(tokens @ w), sent, come, world())),)

    x, w = seeded((sum(sent), 6), (6, 6))
    return function, [x, w]


def _there_and_back(rows):
    """Rank r sends rank j `rows[r][j]` rows and gets them back."""
    rank = dist.get_rank()
    sent, come = list(rows[rank]), [row[rank] for row in rows]

    def function(x, w):
        tokens = FC.wait_tensor(FC.all_to_all_single(x, come, sent, world()))
        return (FC.wait_tensor(FC.all_to_all_single(torch.relu(tokens @ w), sent, come, world())),)

    return function, seeded((sum(sent), 6), (6, 6))


def _exchange_equal_on_rank_0():
    return _there_and_back([(2, 2, 2, 2), (2, 4, 0, 6), (2, 2, 4, 0), (2, 0, 2, 2)])


def _exchange_of_one_row():
    """Rank 0 sends a row to itself and gets no other: there it has no axis."""
    return _there_and_back([(1, 0, 0, 0), (0, 4, 2, 6), (0, 2, 4, 1), (0, 3, 2, 2)])


def refusals(case, rewrites):
    """What each rank says where one of them cannot apply a plan; nothing is run."""
    function, inputs = CASES[case]()
    captured = traced(function, inputs)
    refused = ""
    try:
        apply_rewrites(captured.graph_module, captured.iteration, rewrites, GROUPS)
    except JobError as error:
        refused = str(error)
    store = dist.distributed_c10d._get_default_store()
    try:
        check_able(refused, store, rank=dist.get_rank(), num_ranks=4, step=f"test/able/{next(RUNS)}")
    except JobError as error:
        return str(error)
    return ""


def _several_at_once():
    def function(x, y, w):
        group = world()
        a, b = map(FC.wait_tensor, FC.all_gather_into_tensor_coalesced([x, y], 4, group))
        c, d = map(FC.wait_tensor, FC.reduce_scatter_tensor_coalesced([a @ w, b], "sum", 4, group))
        e, f = map(FC.wait_tensor, FC.all_reduce_coalesced([c[:1], d], "sum", group))
        return (a, b, c, d, e, f)

    return function, seeded((2, 6), (4, 5), (6, 4))


CASES = {
    "reduced_dropout": _reduced_dropout,
    "tensor_parallel_blocks": _tensor_parallel_blocks,
    "data_parallel_update": _data_parallel_update,
    "unequal_exchange": _unequal_exchange,
    "exchange_equal_on_rank_0": _exchange_equal_on_rank_0,
    "exchange_of_one_row": _exchange_of_one_row,
    "several_at_once": _several_at_once,
    "gather_products": _gather_products,
    "product_scatter": _product_scatter,
    "product_reduce": _product_reduce,
    "exchange": _exchange,
    "two_gathers": _two_gathers,
}


def steps_across(num_steps):
    """Parameters gathered at the end of a step and used in the next: unfinished gathers are handed on.

    Returns whether the outputs equal those of plain steps, and whether a gather was still on its way in between.
    """

    def step(x, whole, shard):
        gradient = x.t() @ (x @ whole)
        new = shard - 0.5 * scatter(gradient)
        return (gather(new), new)

    x, shard = seeded((6, 8), (2, 3))
    whole = gather(shard)
    captured = traced(step, [x, whole, shard])
    planned = apply_rewrites(captured.graph_module, captured.iteration, (), GROUPS)
    streamed = StreamedStep(planned, GROUPS)
    expected = found = (whole, shard)
    was_open = False
    for _ in range(num_steps):
        expected = step(x, *expected)
    for _ in range(num_steps):
        found = streamed.run([x, *found], defer=True).outputs
        was_open = was_open or any(isinstance(value, Arrival) for value in found)
    found = [settled(value) for value in found]
    streamed.close()
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), was_open


def micro_batches_together():
    """Two micro-batches whose gathers are launched together, in one step; differences from one after the other."""

    def step(a, b, w):
        out = []
        for x in (a, b):
            out.append(torch.relu(gather(x) @ w))
        return tuple(out)

    inputs = seeded((2, 6), (2, 6), (6, 4))
    captured = traced(step, inputs)
    names = [op.name for op in captured.iteration.ops]
    order = sorted(names, key=lambda name: (not name.startswith("all_gather"), names.index(name)))
    planned = apply_rewrites(captured.graph_module, captured.iteration, (Reorder(tuple(order)),), GROUPS)
    streamed = StreamedStep(planned, GROUPS)
    run = streamed.run(inputs)
    streamed.close()
    first = min(span.start_s for span in run.spans if span.kind is SpanKind.COMP)
    issued = [node.meta[OP_NAME] for node in planned.graph.nodes if OP_NAME in node.meta][:2]
    equal = all(torch.equal(a, b) for a, b in zip(step(*inputs), run.outputs, strict=True))
    return equal, issued, first >= 0


def orders(rank_with_another):
    """What the check of orders says where one rank would run two collectives the other way round."""
    captured = traced(*_two_gathers())
    names = [op.name for op in captured.iteration.ops]
    if dist.get_rank() == rank_with_another:
        names[0], names[1] = names[1], names[0]
    planned = apply_rewrites(captured.graph_module, captured.iteration, (Reorder(tuple(names)),), GROUPS)
    lines = signature(planned.graph, GROUPS.ranks)
    store = dist.distributed_c10d._get_default_store()
    return check_agreement(lines, store, rank=dist.get_rank(), num_ranks=4, step=f"test/{rank_with_another}")


def dropout_under_a_plan():
    """Outputs with a seed, as written and with both gathers first: the same numbers are drawn for the same dropouts."""

    def step(x, first, second):
        x = torch.dropout(torch.relu(x @ gather(first)), 0.5, True)
        return (torch.dropout(x @ gather(second), 0.5, True) + torch.rand_like(x),)

    inputs = seeded((8, 16), (4, 16), (4, 16))
    captured = traced(step, inputs)
    names = [op.name for op in captured.iteration.ops]
    comms = [op.name for op in captured.iteration.comms]
    order = Reorder((*comms, *(name for name in names if name not in comms)))
    planned = apply_rewrites(captured.graph_module, captured.iteration, (order,), GROUPS)
    streamed = StreamedStep(planned, GROUPS)
    torch.manual_seed(7)
    (expected,) = step(*inputs)
    torch.manual_seed(7)
    (found,) = streamed.run(inputs).outputs
    streamed.close()
    return bool((expected == found).all())


def failing_collective():
    """What is said of a collective that fails, by its own run and by the next on the same stream."""

    def step(x):
        return (gather(x) + 1,)

    inputs = seeded((2, 3))
    captured = traced(step, inputs)
    streamed = StreamedStep(captured.graph_module, GROUPS)
    said = []
    for given in ([3.0], inputs):  # no tensor: refused on the stream's thread, before anything is sent
        try:
            streamed.run(given)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    streamed.close()
    return said


def fsdp2_losses(settings):
    """Losses and last gradients of three steps of a small model under FSDP2, without settings and with them."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from lagom_overlap import apply_fsdp2

    def losses(given):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(5)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        if given is not None:
            apply_fsdp2(model, given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        found = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            gradients = [parameter.grad.to_local().tolist() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, gradients

    with torch.enable_grad():
        return losses(None), losses(settings)


def fsdp2_side_by_side(settings):
    """FSDP2 against itself with settings, in a step with dropout and two micro-batches; or why it was refused."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from lagom_overlap import TrainingStep
    from lagom_overlap.engines.fx.training_session import compared
    from lagom_overlap.verbs.plan_apply import DefaultGroupRanks

    def build():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = lambda y: y.square().mean()  # noqa: E731
        return TrainingStep(model=model, inputs=(x,), loss=loss, optimizers=(optimizer,), num_micro_batches=2)

    run = compared(build, settings, DefaultGroupRanks(torch.device("cpu")), rounds=3, seed=0)
    return getattr(run, "reason", None) or (run.max_error, len(run.before.makespan_s), run.after.makespan_s)


def fsdp2_settings_that_differ(settings, others):
    """What is said where rank 2 has other settings than the rest."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from lagom_overlap import apply_fsdp2

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    try:
        apply_fsdp2(model, others if dist.get_rank() == 2 else settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compiled_with(plan_pass, step, inputs):
    """What a step gives under the pass on its graph as torch.compile makes it, compiled by running it."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor import config
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    def backend(module, example):
        def compiled(graph_module, _):
            with config.patch(post_grad_custom_post_pass=plan_pass):
                post_grad_passes(graph_module, is_inference=True)
            return make_boxed_func(graph_module.forward)

        return aot_module_simplified(module, example, fw_compiler=compiled)

    torch._dynamo.reset()
    return torch.compile(step, backend=backend, dynamic=False)(*inputs)


def exchange_under_a_plan_file(folder, rewrites):
    """A plan of rank 0's graph applied by every rank to its own, which exchanges other numbers of rows."""
    from lagom_overlap.capturing.fx import capture_fx
    from lagom_overlap.verbs.plan_apply import planned_step
    from lagom_overlap.verbs.plan_file import rewrites_toml

    function, inputs = _exchange_equal_on_rank_0()
    path = Path(folder) / "plan.toml"
    if dist.get_rank() == 0:
        with torch.enable_grad():
            iteration = capture_fx(function, tuple(inputs), is_fake=True).iteration
        path.write_bytes(rewrites_toml("case", rewrites, iteration, 4, planner="test", carrier=None))
    dist.barrier()
    try:
        planned = planned_step(function, inputs, path)
    except JobError as error:
        return str(error)
    found = planned.run(inputs).outputs
    planned.close()
    return all(torch.equal(a, b) for a, b in zip(function(*inputs), found, strict=True))


def by_inductor(plan_pass, step, inputs):
    """What a step gives, compiled by Inductor with the pass in it."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False, reorder_for_peak_memory=False, post_grad_custom_post_pass=plan_pass):
        return torch.compile(step, dynamic=False)(*inputs)


def exchange_in_the_compiler_pass():
    """An exchange equal on rank 0 alone, cut by a plan of its axes as rank 0's planner sees them."""
    from lagom_overlap.engines.fx.inductor_pass import PlanPass

    seen = []

    def decide(capture, times_s):
        seen.extend([axis.dim for axis in op.shards.combine] for op in capture.iteration.comms)
        return [Split("all_to_all_single", 0, 2)]

    function, inputs = _exchange_equal_on_rank_0()
    plan_pass = PlanPass(decide)
    found = by_inductor(plan_pass, function, inputs)
    (one,) = plan_pass.seen
    names = [op.name for op in rewritten(one.capture.iteration, one.rewrites).ops]
    equal = all(torch.equal(a, b) for a, b in zip(function(*inputs), found, strict=True))
    return equal, seen or None, names


def planner_that_refuses():
    """What each rank raises where rank 0 finds no plan."""
    from lagom_overlap.engines.fx.inductor_pass import PlanPass

    def decide(capture, times_s):
        raise JobError("nothing fits")

    try:
        by_inductor(PlanPass(decide), *_two_gathers())
    except Exception as error:
        return next(line for line in str(error).splitlines() if line.startswith("JobError: "))
    return ""


def as_compiler_pass():
    """The pass on a graph as torch.compile gives it: outputs, orders, what was planned."""
    from lagom_overlap.engines.fx.inductor_pass import PlanPass

    def step(x, w, v):
        return (torch.relu(gather(x) @ w), gather(v) @ w)

    inputs = seeded((2, 6), (6, 6), (4, 6))
    plan_pass = PlanPass(lambda capture, times_s: _gathers_first(capture.iteration))
    found = compiled_with(plan_pass, step, inputs)
    expected = step(*inputs)
    (seen,) = plan_pass.seen
    names = [op.name for op in seen.capture.iteration.ops]
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), names, seen.order_digest


def planned_by_inductor():
    """A step compiled by Inductor with our planner in it: equal outputs, calls in the order of the code, the plan's."""
    import re

    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    from lagom_overlap.export.inductor import plan_compiled_graphs

    def step(x, *shards):
        sums = []
        for shard in shards:
            whole = gather(shard)
            x = x @ whole
            sums.append(scatter(x.t() @ x))
        return (x, *sums)

    inputs = seeded((128, 16), *[(4, 16)] * 4)
    inputs[1:] = [shard.sign() for shard in inputs[1:]]
    expected = step(*inputs)
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False, reorder_for_peak_memory=True, post_grad_custom_post_pass=None):
        plan_pass = plan_compiled_graphs(budget_s=0.5)
        found, codes = run_and_get_code(torch.compile(step, dynamic=False), *inputs)
    short = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "mm": "mm"}
    call = re.compile(r"\s*(?:\w+ = )?(?:torch\.ops\._c10d_functional|extern_kernels)\.(\w+)[.(]")
    matches = [call.match(line) for line in codes[0].splitlines()]
    calls = [short[match.group(1)] for match in matches if match and match.group(1) in short]
    (seen,) = plan_pass.seen
    order = seen.rewrites[-1].order if seen.rewrites else [op.name for op in seen.capture.iteration.ops]
    names = [name.rstrip("0123456789").rstrip("_") for name in order]
    equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return equal, calls, [short[name] for name in names if name in short], seen.order_digest


def _gathers_first(iteration):
    names = [op.name for op in iteration.ops]
    comms = [op.name for op in iteration.comms]
    return [Reorder((*comms, *(name for name in names if name not in comms)))]


def run_program(script, rewrites):
    """A program under a plan: the largest difference from the program relative to the largest value, the order."""
    program = load_program(Path(script), "step")
    captured = program.captured("block")
    planned = apply_rewrites(captured.graph_module, captured.iteration, rewrites, GROUPS)
    lines = signature(planned.graph, GROUPS.ranks)
    store = dist.distributed_c10d._get_default_store()
    step, num_ranks = f"test/program/{next(RUNS)}", dist.get_world_size()
    digest = check_agreement(lines, store, rank=dist.get_rank(), num_ranks=num_ranks, step=step)
    torch.manual_seed(dist.get_rank())
    with torch.enable_grad():
        expected = program.step(*program.inputs)
    streamed = StreamedStep(planned, GROUPS)
    torch.manual_seed(dist.get_rank())
    found = streamed.run(program.inputs).outputs
    streamed.close()
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found, strict=True))
    return worst, digest
