from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_step import FFN, HIDDEN, Interpreter, small_step

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Buffer, CommOp, CompOp, Gemm, Iteration, MemoryBound
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.partition import granularity
from lagom_overlap.workload.rewrite.steps import (
    ChainLink,
    Fuse,
    PartitionGroups,
    Reorder,
    Rewrite,
    Split,
    Substitute,
    Substitution,
)

OUTPUTS = ("add", "opt")

AFTER = ("mm1", "act", "mm2")
WGRAD_SUMMED = ChainLink("wgrad", 1)


def _flops(iteration: Iteration) -> float:
    return sum(op.work.flops for op in iteration.computations if isinstance(op.work, Gemm))


def _touched(iteration: Iteration) -> int:
    ops = [op for op in iteration.computations if not op.name.endswith("#join")]
    return sum(op.work.num_bytes for op in ops if isinstance(op.work, MemoryBound))


def _same_results(num_ranks: int, rewrites: tuple[Rewrite, ...]) -> Iteration:
    """Runs the step before and after; both end with the same numbers. Returns what it became."""
    before = small_step(num_ranks)
    after = rewritten(before, rewrites)
    expected = Interpreter(num_ranks, ()).run(before)
    found = Interpreter(num_ranks, rewrites)
    found.run(after)
    for name in OUTPUTS:
        for rank in range(num_ranks):
            np.testing.assert_allclose(found.whole(name)[rank], expected[name][rank], rtol=1e-10, atol=1e-12)
    assert _flops(after) == _flops(before)
    assert _touched(after) == _touched(before)
    return after


def _links(names: tuple[str, ...]) -> tuple[ChainLink, ...]:
    return tuple(ChainLink(name, 0) for name in names)


@given(
    num_ranks=st.sampled_from((2, 3, 4)),
    chunks=st.sampled_from((2, 3, 4)),
    length=st.integers(0, 3),
    before=st.booleans(),
    axis=st.sampled_from((0, 1)),
)
@settings(max_examples=40, deadline=None)
def test_a_split_gather_with_any_chain_computes_the_same(
    num_ranks: int, chunks: int, length: int, before: bool, axis: int
) -> None:
    lead = _links(("norm",)) if before and axis == 0 else ()
    after = _links(AFTER[:length]) if axis == 0 else ()
    _same_results(num_ranks, (Split("ag", axis, chunks, lead, after),))


@given(num_ranks=st.sampled_from((2, 4)), chunks=st.sampled_from((2, 4)), length=st.integers(0, 3))
@settings(max_examples=24, deadline=None)
def test_a_split_scatter_with_any_chain_before_it_computes_the_same(num_ranks: int, chunks: int, length: int) -> None:
    _same_results(num_ranks, (Split("rs", 0, chunks, _links(AFTER[3 - length :]), _links(("add",))),))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_split_all_reduce_follows_the_gradient_along_either_axis(axis: int) -> None:
    wgrad_axis = 0 if axis == 0 else 2
    _same_results(3, (Split("ar", axis, 3, (ChainLink("wgrad", wgrad_axis),)),))


@pytest.mark.parametrize(("name", "axis"), [("mm1", 0), ("mm1", 1), ("mm1", 2), ("wgrad", 1), ("act", 1)])
def test_a_computation_can_be_cut_alone(name: str, axis: int) -> None:
    _same_results(2, (Split(name, axis, 4),))


def test_a_join_waits_until_it_is_needed() -> None:
    names = [op.name for op in rewritten(small_step(2), (Split("ag", 0, 2, (), _links(("mm1",))),)).ops]
    assert names.index("mm1#join") == names.index("act") - 1
    assert names.index("ag#join") == names.index("wgrad") - 1


def test_pieces_of_a_sum_are_added_where_they_are_needed_and_the_additions_have_their_price() -> None:
    """By hand: two additions of three pieces read two tensors as large as the gradient and write one."""
    step = Split("ag", 0, 3, (), (*_links(("mm1", "act")), WGRAD_SUMMED))
    after = _same_results(2, (step,))
    ops = {op.name: op for op in after.ops}
    assert ops["wgrad#join"].deps == ("wgrad#0", "wgrad#1", "wgrad#2")
    assert ops["wgrad#1"].deps == ("ag#1", "act#1")  # not the piece before: what is added is added by the join
    assert ops["ar"].deps == ("wgrad#join",)
    gradient = HIDDEN * FFN * 2
    join = ops["wgrad#join"]
    assert isinstance(join, CompOp)
    assert join.work == MemoryBound(2 * 3 * gradient)
    buffers = {buffer.name: buffer for buffer in after.buffers if buffer.maker.startswith("wgrad")}
    assert all(buffer.num_bytes == gradient for buffer in buffers.values())


def test_a_sum_that_nothing_waits_for_is_added_behind_its_last_piece() -> None:
    step = small_step(2)
    ops = tuple(op for op in step.ops if op.name not in {"ar", "opt"})
    alone = replace(step, ops=ops, buffers=())
    names = [op.name for op in rewritten(alone, (Split("wgrad", 1, 2),)).ops]
    assert names[names.index("wgrad#0") :][:3] == ["wgrad#0", "wgrad#1", "wgrad#join"]


def test_only_what_is_needed_whole_is_joined() -> None:
    names = {op.name for op in rewritten(small_step(2), (Split("ag", 0, 2, (), _links(AFTER)),)).ops}
    joins = {name for name in names if name.endswith("#join")}
    assert joins == {"ag#join", "act#join", "mm2#join"}  # wgrad needs ag and act, rs needs mm2


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_partitioned_gather_with_unequal_pieces_computes_the_same(
    mesh: tuple[int, int], order: tuple[int, ...], length: int
) -> None:
    _same_results(mesh[0] * mesh[1], (PartitionGroups("ag", mesh, order, 0, _links(AFTER[:length])),))


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)])
@pytest.mark.parametrize("length", [0, 2])
def test_a_partitioned_scatter_mirrors_the_gather(mesh: tuple[int, int], order: tuple[int, ...], length: int) -> None:
    links = _links(AFTER[3 - length :])
    after = _same_results(mesh[0] * mesh[1], (PartitionGroups("rs", mesh, order, 0, links),))
    steps = [op for op in after.comms if op.name.startswith("rs/")]
    gather = rewritten(small_step(mesh[0] * mesh[1]), (PartitionGroups("ag", mesh, order[::-1]),))
    mirrored = [op for op in gather.comms if op.name.startswith("ag/")]
    assert [s.collective.num_bytes for s in steps] == [s.collective.num_bytes for s in reversed(mirrored)]


def test_volumes_of_a_partitioned_gather_are_the_worked_ones() -> None:
    """Planners spec 2.2, per rank: outer (N1-1)S/W, then inner (N2-1)N1 S/W; or the other way."""
    step = small_step(8, num_nodes=2)
    call = step.comms[0].collective
    share = call.num_bytes / 8

    def sent(order: tuple[int, ...]) -> list[float]:
        ops = rewritten(step, (PartitionGroups("ag", (2, 4), order),)).comms
        return [op.collective.wire_bytes for op in ops if op.name.startswith("ag/")]

    assert sent((0, 1)) == [1 * share, 3 * 2 * share]
    assert sent((1, 0)) == [3 * share, 1 * 4 * share]
    assert sent((1, 0, 1)) == [3 * share, 1 * share, 3 * share]


@pytest.mark.parametrize(
    ("mesh", "nodes"), [((2, 4), [2, 1]), ((4, 2), [2, 1]), ((8, 1), None), ((2, 2, 2), [2, 1, 1])]
)
def test_sub_groups_know_their_nodes(mesh: tuple[int, ...], nodes: list[int] | None) -> None:
    if nodes is None:
        with pytest.raises(JobError, match="at least two axes of at least 2"):
            PartitionGroups("ag", mesh, (0, 1))
        return
    step = PartitionGroups("ag", mesh, tuple(range(len(mesh))))
    ops = rewritten(small_step(8, num_nodes=2), (step,)).comms
    assert [op.collective.num_nodes for op in ops if op.name.startswith("ag/")] == nodes


@given(outer=st.integers(2, 9), inner=st.integers(2, 9), order=st.sampled_from(((0, 1), (1, 0), (1, 0, 1))))
def test_granularity_sums_to_one_and_is_algorithm_1s(outer: int, inner: int, order: tuple[int, ...]) -> None:
    world = outer * inner
    shares = granularity(CollectiveKind.ALL_GATHER, (outer, inner), order)
    assert sum(shares) == 1
    printed = {
        (0, 1): [Fraction(outer, world), 1 - Fraction(outer, world)],
        (1, 0): [Fraction(inner, world), 1 - Fraction(inner, world)],
        (1, 0, 1): [Fraction(inner, world), Fraction(outer - 1, world), 1 - Fraction(outer + inner - 1, world)],
    }
    assert list(shares) == printed[order]


def test_an_all_reduce_becomes_scatter_and_gather() -> None:
    after = rewritten(small_step(4), (Substitute("ar", Substitution.REDUCE_SCATTER_ALL_GATHER),))
    names = [op.name for op in after.ops]
    assert names[-3:] == ["ar.rs", "ar.ag", "opt"]
    before = small_step(4).comms[2].collective.wire_bytes
    assert sum(op.collective.wire_bytes for op in after.comms if op.name.startswith("ar.")) == before
    interpreter = Interpreter(4, ())
    parts = interpreter.run(Iteration("s", tuple(op for op in after.ops if "ar" not in op.name and op.name != "opt")))
    scattered = np.split(sum(parts["wgrad"]), 4)
    np.testing.assert_allclose(np.concatenate(scattered), Interpreter(4, ()).run(small_step(4))["ar"][0])


@pytest.mark.parametrize(
    ("comm", "into", "kind"),
    [("rs", Substitution.REDUCES, CollectiveKind.REDUCE), ("ag", Substitution.BROADCASTS, CollectiveKind.BROADCAST)],
)
def test_rooted_collectives_hold_all_bytes(comm: str, into: Substitution, kind: CollectiveKind) -> None:
    before = small_step(3)
    after = rewritten(before, (Substitute(comm, into),))
    made = [op for op in after.comms if op.name.startswith(f"{comm}.")]
    assert [op.name for op in made] == [f"{comm}.{root}" for root in range(3)]
    assert {op.collective.kind for op in made} == {kind}
    whole = next(op for op in before.comms if op.name == comm).collective.num_bytes
    assert sum(op.collective.num_bytes for op in made) == whole
    follower = next(op for op in after.ops if op.name == {"rs": "add", "ag": "mm1"}[comm])
    assert {op.name for op in made} <= set(follower.deps)


def _gradients(deps_of_second: tuple[str, ...] = ("b",)) -> Iteration:
    def reduce(name: str, deps: tuple[str, ...], num_bytes: int) -> CommOp:
        return CommOp(name=name, collective=Collective(CollectiveKind.ALL_REDUCE, num_bytes, 2), deps=deps)

    work = MemoryBound(8)
    return Iteration(
        "gradients",
        (
            CompOp(name="a", work=work),
            reduce("r", ("a",), 10),
            CompOp(name="use", work=work, deps=("r",)),
            CompOp(name="b", work=work, deps=("a",)),
            reduce("s", deps_of_second, 30),
            CompOp(name="end", work=work, deps=("use", "s")),
        ),
        is_dataflow=True,
        buffers=(Buffer(name="g", num_bytes=4, maker="r", users=("use",)),),
    )


def test_fused_collectives_run_at_the_last_ones_place() -> None:
    after = rewritten(_gradients(), (Fuse(("r", "s")),))
    assert [op.name for op in after.ops] == ["a", "b", "r+1", "use", "end"]
    fused = after.comms[0]
    assert (fused.collective.num_bytes, set(fused.deps)) == (40, {"a", "b"})
    assert after.buffers[0].maker == "r+1"


def test_fusing_what_waits_for_each_other_is_refused() -> None:
    with pytest.raises(JobError, match="'s' waits for another"):
        rewritten(_gradients(("use",)), (Fuse(("r", "s")),))


def test_fusing_other_groups_is_refused() -> None:
    with pytest.raises(JobError, match="differ in kind, group or stream"):
        rewritten(small_step(2), (Fuse(("ag", "rs")),))


def test_a_piece_can_be_partitioned_in_its_turn() -> None:
    rewrites = (Split("ag", 0, 2, (), _links(AFTER[:1])), PartitionGroups("ag#1", (2, 2), (0, 1)))
    after = rewritten(small_step(4), rewrites)
    ops = {op.name: op for op in after.ops}
    assert ops["mm1#0"].deps == ("ag#0",)
    assert ops["mm1#1"].deps == ("ag#1/g1",)


def test_an_order_is_followed_and_streams_are_moved() -> None:
    step = _gradients()
    after = rewritten(step, (Reorder(("a", "b", "s", "r", "use", "end"), (("s", "second"),)),))
    assert [op.name for op in after.ops] == ["a", "b", "s", "r", "use", "end"]
    assert after.comms[0].stream == "second"


def test_a_plan_may_make_an_operator_wait_for_more() -> None:
    step = _gradients()
    after = rewritten(step, (Reorder(tuple(op.name for op in step.ops), (), (("b", "use"),)),))
    assert next(op for op in after.ops if op.name == "b").deps == ("a", "use")
    with pytest.raises(JobError, match="issues 'use' before 'b', which it waits for"):
        rewritten(step, (Reorder(tuple(op.name for op in step.ops), (), (("use", "b"),)),))


def test_pieces_live_until_the_join_which_makes_the_whole_for_who_needs_it() -> None:
    step = small_step(2)
    step = replace(step, buffers=(Buffer(name="gathered", num_bytes=4, maker="ag", users=("mm1", "wgrad")),))
    buffers = rewritten(step, (Split("ag", 0, 2, (), _links(("mm1",))),)).buffers
    assert [(b.num_bytes, b.maker, set(b.users)) for b in buffers] == [
        (2, "ag#0", {"mm1#0", "ag#join"}),
        (2, "ag#1", {"mm1#1", "ag#join"}),
        (4, "ag#join", {"wgrad"}),
    ]


REFUSED = [
    (Split("nothing", 0, 2), "a plan for another graph: iteration 'small' has no operator 'nothing'"),
    (Split("mm1", 0, 2, (), _links(("act",))), "'mm1' is a computation"),
    (Split("ag", 0, 5), "axis 0 has 24 elements, which cannot be cut in 5 equal parts"),
    (Split("ag", 7, 2), "shard axis is 7, must be 0 to 1"),
    (Split("ag", 0, 2, (), (ChainLink("mm1", 2),)), "along its axis 0, but is cut along axis 2"),
    (Split("ag", 0, 2, (), _links(("act",))), "'act' does not follow it in the chain"),
    (Split("ag", 0, 2, _links(("opt",))), "'opt' does not lead to it in the chain"),
    (Split("rs", 0, 2, (ChainLink("mm2", 1),)), "whose pieces are summed"),
    (Split("ag", 0, 2, (), _links(("mm1", "mm1"))), "occurs twice"),
    (Split("ag", 0, 2, (), (ChainLink("rs", 0),)), "is a collective, a chain holds computations"),
    (Split("ag", 0, 2, (), (ChainLink("mm1", 0), ChainLink("mm2", 0))), "'mm2' does not follow"),
    (PartitionGroups("ag", (2, 3), (0, 1)), "mesh [2, 3] has 6 ranks, the group 4"),
    (PartitionGroups("ar", (2, 2), (1, 0, 1)), "bring their result in parts"),
    (PartitionGroups("ag", (2, 2), (0, 1), 1, (ChainLink("mm1", 1),)), "axis 1 does not run over it"),
    (Substitute("ag", Substitution.REDUCE_SCATTER_ALL_GATHER), "only all_reduce can be replaced"),
    (Reorder(("ag",)), "leaves out 'act'"),
    (Reorder(("nothing",)), "no operator 'nothing'"),
    (Reorder(("ag", "norm", "mm1", "act", "mm2", "rs", "add", "wgrad", "ar", "opt")), "issues 'ag' before 'norm'"),
]


@pytest.mark.parametrize(("step", "message"), REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(step: Rewrite, message: str) -> None:
    with pytest.raises(JobError) as caught:
        rewritten(small_step(4), (step,))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chain_that_is_left_and_entered_again_is_refused() -> None:
    step = small_step(2)
    act = next(op for op in step.ops if op.name == "act")
    aside = CompOp(name="aside", work=MemoryBound(8), deps=("mm1",))
    ops = [op for op in step.ops if op.name != "act"]
    place = [op.name for op in ops].index("mm1") + 1
    ops[place:place] = [aside, replace(act, deps=("mm1", "aside"))]
    with pytest.raises(JobError, match="not convex: 'act' waits for 'aside'"):
        rewritten(replace(step, ops=tuple(ops)), (Split("ag", 0, 2, (), _links(("mm1", "act"))),))


def test_an_iteration_without_data_flow_is_refused() -> None:
    with pytest.raises(JobError, match="does not hold its data flow"):
        rewritten(replace(small_step(2), is_dataflow=False), ())


@pytest.mark.long
def test_twenty_thousand_operators_are_split_in_seconds() -> None:
    """Not a clock: every rewrite must touch its neighbourhood only, or this would not end within the test's time."""
    blocks = [small_step(2) for _ in range(2000)]
    ops = []
    for number, block in enumerate(blocks):
        for op in block.ops:
            assert op.shards is not None
            uses = tuple(
                replace(use, source=f"{use.source}.{number}" if use.source else "") for use in op.shards.inputs
            )
            shards = replace(op.shards, inputs=uses)
            deps = tuple(f"{dep}.{number}" for dep in op.deps)
            ops.append(replace(op, name=f"{op.name}.{number}", deps=deps, shards=shards))
    step = Iteration("many", tuple(ops), is_dataflow=True)
    cuts = [Split(f"ag.{n}", 0, 2, (), (ChainLink(f"mm1.{n}", 0),)) for n in range(2000)]
    assert len(rewritten(step, cuts).ops) == 20_000 + 2000 * 4
