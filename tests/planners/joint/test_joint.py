"""Joint planning on steps small enough to try every order and every setting."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest

pytest.importorskip("ortools")

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.joint import Joint
from lagom_overlap.planners.joint.bound import Limit, _Pair, _solved, contention_bound, joint_bound
from lagom_overlap.planners.joint.contended import Contended, class_of
from lagom_overlap.planners.joint.planner import recut, variants_of
from lagom_overlap.planners.joint.settings import choices_of, tuned_calls, tuned_settings
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.times import ModelTimes, ShapeTimes
from lagom_overlap.sim import simulate_iteration
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder, Split
from lagom_overlap.workload.step import program_step

CLUSTER = load_preset("a40_nvlink", 1)
MODEL = ContentionModel(CLUSTER, load_profile("plausible"))


def step() -> Iteration:
    """Two gathers that two products wait for, and a product that waits for nothing, issued last."""
    gather = Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8)
    ops = (
        CommOp(name="ag0", collective=gather, communicator="fsdp"),
        CompOp(name="mm0", work=Gemm(4096, 4096, 4096), deps=("ag0",)),
        CommOp(name="ag1", collective=Collective(CollectiveKind.ALL_GATHER, 32 * MIB, 8), communicator="fsdp"),
        CompOp(name="mm1", work=Gemm(2048, 4096, 4096), deps=("mm0", "ag1")),
        CompOp(name="free", work=MemoryBound(256 * MIB)),
    )
    return Iteration("step", ops, is_dataflow=True)


def sharded_step(num_layers: int) -> Iteration:
    """A few layers of Phi-2, fully sharded: operators that can be cut, gathers that hold memory."""
    layout = ParallelLayout(data=8, zero_stage=3, micro_batch=1, global_batch=8)
    small = replace(load_model("phi-2"), num_layers=num_layers)
    return program_step(small, layout, seq_len=1024, gpus_per_node=8)


def orders(iteration: Iteration) -> Iterator[Iteration]:
    for names in permutations(op.name for op in iteration.ops):
        place = {name: number for number, name in enumerate(names)}
        if all(place[dep] < place[op.name] for op in iteration.ops for dep in op.deps):
            yield rewritten(iteration, (Reorder(names),))


def problem(**changes: object) -> PlanProblem:
    given = {"iteration": step(), "cluster": CLUSTER, "times": ModelTimes(MODEL), "budget_s": 20.0}
    return PlanProblem(**{**given, **changes})  # type: ignore[arg-type]


def test_the_bound_is_below_every_order_and_setting_and_joint_is_near_the_best_of_them() -> None:
    contended = Contended(step(), MODEL)
    choices = {kind: configs[::6] for kind, configs in choices_of(contended).items()}
    best_s = min(
        contended.issued(order).makespan_s(dict(zip(choices, configs, strict=True)))
        for order in orders(step())
        for configs in product(*choices.values())
    )
    bound = joint_bound(problem(), choices)
    found = Joint().solve(problem())
    assert bound.seconds <= bound.unchained_s <= best_s
    assert found.bound.seconds <= bound.seconds  # more settings to choose from
    assert found.bound.seconds <= found.makespan_s <= best_s * 1.01
    assert found.makespan_s < found.default_s


def test_what_is_returned_is_what_it_is_said_to_take() -> None:
    found = Joint().solve(problem())
    contended = Contended(step(), MODEL)
    assert contended.issued(found.plan.iteration).makespan_s(found.settings) == pytest.approx(found.makespan_s)
    assert contended.issued(step()).makespan_s({}) == pytest.approx(found.default_s)
    reached = [move.makespan_s for move in found.history]
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] == found.makespan_s


def test_settings_are_at_least_as_good_as_each_single_change_of_them() -> None:
    contended = Contended(step(), MODEL)
    choices = choices_of(contended)
    issued = contended.issued(step())
    settings, best_s = tuned_settings(issued, choices, {}, Deadline(3000.0))
    for kind, configs in choices.items():
        assert all(issued.makespan_s({**settings, kind: config}) >= best_s * (1 - 2e-6) for config in configs)


def test_pieces_run_with_the_setting_of_the_whole_or_of_its_own_call() -> None:
    whole = sharded_step(1)
    contended, gather = Contended(whole, MODEL), next(comm for comm in whole.comms if comm.shards is not None)
    slow, slower = choices_of(contended)[class_of(gather)][1:3]
    product = next(op for op in whole.computations if isinstance(op.work, Gemm) and op.shards is not None)
    issued = contended.issued(rewritten(whole, (Split(product.name, 0, 2), Split(gather.name, 0, 2))))
    pieces = [f"{gather.name}#0", f"{gather.name}#1"]
    for settings, meant in (
        ({class_of(gather): slow}, slow),
        ({class_of(gather): slow, gather.name: slower}, slower),
        ({gather.name: slower}, slower),
    ):
        alike = {comm.name: slow for comm in issued.iteration.comms if class_of(comm) == class_of(gather)}
        alike = {} if class_of(gather) not in settings else alike
        said = simulate_iteration(issued.iteration, {**alike, **dict.fromkeys(pieces, meant)}, MODEL)
        assert issued.timeline(settings) == said
    cut = [span.duration_s for span in issued.timeline({}).spans if span.name.startswith(f"{product.name}#")]
    assert issued.stretched_s({})[product.name] == pytest.approx(sum(cut))
    assert set(issued.stretched_s({})) == {op.name for op in whole.ops}


def test_nothing_ends_behind_a_plan_that_is_given_with_the_settings_found_for_it() -> None:
    given = Ours().plan(problem())
    contended = Contended(step(), MODEL)
    _, tuned_s = tuned_settings(contended.issued(given.iteration), choices_of(contended), {}, Deadline(3000.0))
    found = Joint().solve(problem(), (given,))
    assert found.history[0].makespan_s == pytest.approx(tuned_s)
    assert found.makespan_s <= tuned_s
    poor = Joint(planner=ProgramOrder()).solve(problem())
    assert poor.makespan_s <= poor.history[0].makespan_s <= poor.default_s


def test_calls_of_one_class_part_where_what_runs_beside_them_differs() -> None:
    gather = Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8)
    ops = (
        CommOp(name="ag0", collective=gather, communicator="fsdp"),
        CommOp(name="ag1", collective=gather, communicator="fsdp"),
        CompOp(name="mm", work=Gemm(8192, 8192, 4096), deps=("ag0",)),
        CompOp(name="end", work=MemoryBound(MIB), deps=("mm", "ag1")),
    )
    contended = Contended(Iteration("two calls", ops, is_dataflow=True), MODEL)
    issued, choices = contended.issued(contended.whole), choices_of(contended)
    kind = class_of(contended.whole.comms[0])
    settings, alike_s = tuned_settings(issued, choices, {}, Deadline(3000.0))
    apart, apart_s = tuned_calls(issued, choices, settings, Deadline(3000.0))
    best_s = min(issued.makespan_s({"ag0": a, "ag1": b}) for a, b in product(choices[kind], repeat=2))
    assert apart_s < alike_s  # nothing runs during the first: it may be as fast as it gets; the second hides
    assert apart_s == pytest.approx(best_s, rel=0.01)
    assert apart["ag0"] != apart.get("ag1", apart[kind])


def test_every_prefetch_depth_up_to_the_problems_is_planned_with_cuts_and_without() -> None:
    given = problem(iteration=sharded_step(9), prefetch=3)
    assert [(v.prefetch, v.planner.split) for v in variants_of(Ours(), given)] == [  # type: ignore[attr-defined]
        (depth, split) for depth in (3, 2, 1) for split in (True, False)
    ]
    assert [v.prefetch for v in variants_of(ProgramOrder(), replace(given, prefetch=None))] == [None, 8, 6, 4, 3, 2, 1]
    assert [v.prefetch for v in variants_of(ProgramOrder(), problem(prefetch=3))] == [3]  # its gathers hold nothing


def test_cuts_are_changed_one_type_at_a_time() -> None:
    given = problem(iteration=sharded_step(1))
    plain = Plan(planner="x", rewrites=(), iteration=given.iteration, lower_bound_s=0.0)
    changed = list(recut(given, plain))
    assert changed
    for plan in changed:
        cuts = [step for step in plan.rewrites if isinstance(step, Split)]
        assert len({cut.num_chunks for cut in cuts}) <= 1
        assert plan.iteration == rewritten(given.iteration, plan.rewrites)
    assert () in [plan.rewrites for plan in recut(given, changed[0])]  # the cut taken back


def test_as_a_planner_its_notes_say_settings_and_gain() -> None:
    plan = Joint().plan(problem())
    assert plan.planner == "joint"
    assert any("under contention" in note for note in plan.notes)
    assert any("fsdp all_gather of 64 MiB" in note and "channels" in note for note in plan.notes)


def test_measured_times_say_nothing_of_contention_and_are_refused() -> None:
    with pytest.raises(JobError, match="cost model's times"):
        Joint().solve(problem(times=ShapeTimes({}, ModelTimes(MODEL))))


def test_the_bound_mixes_settings_until_link_and_computation_are_equally_long() -> None:
    # one class of one call, two settings during the one kernel: 10 s at a loss of 0.1, or 4 s at a loss of 1
    gentle, fast = _Pair(0, 0, 10.0, 0.1, 0.5), _Pair(0, 0, 4.0, 1.0, 0.5)
    # shares 1 - s and s: 10 - 6 s = 6 + 1 + 3 s at s = 1/3
    assert _solved(6.0, 0.0, [gentle, fast], [1], [1]).seconds == pytest.approx(8.0)
    assert _solved(6.0, 0.0, [gentle, fast], [1], [1]).limit is Limit.BOTH
    assert _solved(0.5, 0.0, [gentle, fast], [1], [1]).seconds == pytest.approx(13 / 3)  # 10 - 6 s = 1.5 + 3 s
    assert _solved(100.0, 0.0, [gentle, fast], [1], [1]).seconds == pytest.approx(101.0)
    assert _solved(100.0, 2.0, [gentle, fast], [1], [1]).seconds == pytest.approx(103.0)
    assert _solved(100.0, 0.0, [gentle, fast], [1], [1]).limit is Limit.COMPUTATION
    assert _solved(3.0, 0.0, [gentle], [2], [1]).seconds == pytest.approx(20.0)
    assert _solved(3.0, 0.0, [gentle], [2], [1]).limit is Limit.LINK


def test_a_kernel_that_runs_once_hides_no_more_than_its_own_length() -> None:
    hidden, exposed = _Pair(0, 0, 4.0, 0.0, 2.0), _Pair(0, None, 4.0, 1.0, 0.0)
    # two kernels pass during a call, there are three: one and a half calls hide, half a call is lost whole
    assert _solved(10.0, 0.0, [hidden, exposed], [2], [3]).seconds == pytest.approx(12.0)
    assert _solved(10.0, 5.0, [hidden, exposed], [2], [3]).seconds == pytest.approx(15.0)  # idle anyhow


def test_one_collective_beside_one_product_is_bounded_in_closed_form() -> None:
    comm = CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8), communicator="fsdp")
    work = Gemm(4096, 4096, 4096)
    contended = Contended(Iteration("one", (comm, CompOp(name="mm", work=work)), is_dataflow=True), MODEL)
    config = MODEL.default_config(comm.collective)
    cost, kernel = MODEL.collective(comm.collective, config), MODEL.kernel(work)
    beside, alone_s = MODEL.running_times([kernel], [cost]), MODEL.kernel_seconds(kernel)
    x_s, stretched_s = beside.comm_s[0], beside.kernel_s[0]
    assert stretched_s > alone_s
    bound_s = contention_bound(contended, {class_of(comm): [config]}).seconds
    hidden = min(1.0, stretched_s / x_s)  # share of the call that the product lasts during it
    least_s = MODEL.collective_seconds([cost], 0.0)[0]
    taxed_s = alone_s + hidden * x_s * (1 - alone_s / stretched_s) + (1 - hidden) * least_s
    assert bound_s == pytest.approx(max(hidden * x_s + (1 - hidden) * least_s, taxed_s))
    assert bound_s <= contended.issued(contended.whole).makespan_s({}) * (1 + 1e-9)
