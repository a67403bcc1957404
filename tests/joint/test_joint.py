"""Joint planning on steps small enough to try every order and every setting."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest

pytest.importorskip("ortools")

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.joint import Joint
from lagom_overlap.joint.bound import _Option, _solved, contended_bound_s
from lagom_overlap.joint.contended import Contended, class_of
from lagom_overlap.joint.settings import choices_of, tuned_settings
from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.times import ModelTimes, ShapeTimes
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder

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
        contended.makespan_s(order, dict(zip(choices, configs, strict=True)))
        for order in orders(step())
        for configs in product(*choices.values())
    )
    bound_s = contended_bound_s(contended, choices)
    found = Joint().solve(problem())
    assert bound_s <= best_s
    assert found.bound_s <= bound_s  # more settings to choose from
    assert found.bound_s <= found.makespan_s <= best_s * 1.01
    assert found.makespan_s < found.default_s


def test_what_is_returned_is_what_it_is_said_to_take() -> None:
    found = Joint().solve(problem())
    contended = Contended(step(), MODEL)
    assert contended.makespan_s(found.plan.iteration, found.settings) == pytest.approx(found.makespan_s)
    assert contended.makespan_s(step(), {}) == pytest.approx(found.default_s)
    assert list(found.rounds_s) == sorted(found.rounds_s, reverse=True)


def test_settings_are_at_least_as_good_as_each_single_change_of_them() -> None:
    contended = Contended(step(), MODEL)
    choices = choices_of(contended)
    settings, best_s = tuned_settings(contended, step(), choices, {}, Deadline(60.0))
    for kind, configs in choices.items():
        assert all(
            contended.makespan_s(step(), {**settings, kind: config}) >= best_s * (1 - 2e-6) for config in configs
        )


def test_pieces_run_with_the_setting_of_the_whole() -> None:
    contended = Contended(step(), MODEL)
    kind = class_of(step().comms[0])
    slow = choices_of(contended)[kind][1]
    whole = contended.timeline(step(), {kind: slow})
    stretched = contended.stretched_s(step(), {kind: slow})
    assert stretched["ag0"] == pytest.approx(whole.spans[0].end_s - whole.spans[0].start_s)
    assert set(stretched) == {"ag0", "mm0", "ag1", "mm1", "free"}


def test_as_a_planner_its_notes_say_settings_and_gain() -> None:
    plan = Joint().plan(problem())
    assert plan.planner == "joint"
    assert any("under contention" in note for note in plan.notes)
    assert any("fsdp all_gather of 64 MiB" in note and "channels" in note for note in plan.notes)


def test_measured_times_say_nothing_of_contention_and_are_refused() -> None:
    with pytest.raises(JobError, match="cost model's times"):
        Joint().solve(problem(times=ShapeTimes({}, ModelTimes(MODEL))))


def test_the_bound_mixes_settings_until_link_and_computation_are_equally_long() -> None:
    link = CLUSTER.intra.kind
    gentle, fast = _Option(link, 10.0, 1.0), _Option(link, 4.0, 4.0)
    # shares 1 - s and s: 10 - 6 s = 6 + 1 + 3 s at s = 1/3
    assert _solved(6.0, [[gentle, fast]]) == pytest.approx(8.0)
    assert _solved(0.5, [[gentle, fast]]) == pytest.approx(13 / 3)  # 10 - 6 s = 1.5 + 3 s at s = 17/18
    assert _solved(100.0, [[gentle, fast]]) == pytest.approx(101.0)
    assert _solved(3.0, [[gentle], [gentle]]) == pytest.approx(20.0)
    assert _solved(3.0, []) == 3.0


def test_one_collective_beside_one_product_is_bounded_in_closed_form() -> None:
    comm = CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8), communicator="fsdp")
    work = Gemm(4096, 4096, 4096)
    contended = Contended(Iteration("one", (comm, CompOp(name="mm", work=work)), is_dataflow=True), MODEL)
    config = MODEL.default_config(comm.collective)
    cost, kernel = MODEL.collective(comm.collective, config), MODEL.kernel(work)
    x_s, alone_s = MODEL.collective_seconds([cost], 0.0)[0], MODEL.kernel_seconds(kernel)
    tax = 1 - alone_s / MODEL.running_times([kernel], [cost]).kernel_s[0]
    assert tax > 0
    bound_s = contended_bound_s(contended, {class_of(comm): [config]})
    assert bound_s == pytest.approx(max(x_s, alone_s + x_s * tax))
