from dataclasses import replace

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, OverlapGroup, find_overlap_groups
from lagom_overlap.workload.ops import Op

GEMM, OTHER = Gemm(8, 8, 8), Gemm(16, 8, 8)
GATHER = Collective(CollectiveKind.ALL_GATHER, 1024, 8)
SCATTER = Collective(CollectiveKind.REDUCE_SCATTER, 2048, 8)


def comp(name: str, *deps: str, work: Gemm = GEMM) -> CompOp:
    return CompOp(name=name, work=work, deps=deps)


def comm(name: str, *deps: str, collective: Collective = GATHER) -> CommOp:
    return CommOp(name=name, collective=collective, deps=deps)


def groups_of(*ops: Op) -> list[tuple[list[str], list[str], int]]:
    found = find_overlap_groups(Iteration("it", ops))
    return [([op.name for op in g.computations], list(g.comm_names), g.count) for g in found]


def test_streams_that_never_wait_are_one_group() -> None:
    assert groups_of(comp("a"), comm("x"), comp("b"), comm("y")) == [(["a", "b"], ["x", "y"], 1)]


def test_streams_that_always_wait_for_each_other_have_none() -> None:
    assert groups_of(comp("a"), comm("x", "a"), comp("b", "x"), comm("y", "b")) == []


def test_computation_alone_and_communication_alone_have_none() -> None:
    assert groups_of(comp("a"), comp("b")) == []
    assert groups_of(comm("x"), comm("y")) == []


def test_a_wait_in_the_middle_ends_a_window_on_both_sides() -> None:
    # a runs during x; b waits for x and runs during y, which waits for a.
    ops = (comp("a"), comm("x"), comm("y", "a", collective=SCATTER), comp("b", "x"))
    assert groups_of(*ops) == [(["a"], ["x"], 1), (["b"], ["y"], 1)]


def test_a_chain_of_equal_layers_is_one_group_with_a_count_and_its_call_sites() -> None:
    # Layer i during the gather of layer i + 1, for six layers: gathers g1..g5 run during layers 0..4.
    ops: list[Op] = [comp("start"), comm("g0")]
    previous = "start"
    for i in range(6):
        if i < 5:
            ops.append(comm(f"g{i + 1}", previous))
        ops.append(comp(f"layer{i}", f"g{i}", work=OTHER))
        previous = f"layer{i}"
    first, layers = find_overlap_groups(Iteration("it", tuple(ops)))
    assert (first.count, first.comm_names) == (1, ("g0",))
    assert (layers.count, layers.comm_names) == (5, ("g1",))
    assert layers.occurrences == ((1, 2, 3, 4, 5),)


def test_call_sites_count_calls_of_the_same_communicator_kind_and_size() -> None:
    ops = (
        comm("x", collective=GATHER),
        comm("r", collective=SCATTER),
        comm("y", collective=GATHER),
        replace(comm("z", collective=GATHER), communicator="tp"),
        comp("a"),
    )
    (group,) = find_overlap_groups(Iteration("it", ops))
    assert dict(zip(group.comm_names, group.occurrences, strict=True)) == {"x": (0,), "r": (0,), "y": (1,), "z": (0,)}


def test_a_collective_that_waits_for_a_computation_of_its_own_window_starts_after_it() -> None:
    ops = (comp("a"), comm("x"), comp("b", "x"), comp("c"), comm("y", "a"), comm("z", "b"))
    (first, second) = find_overlap_groups(Iteration("it", ops))
    assert (first.comm_names, second.comm_names) == (("x",), ("y", "z"))
    assert second.starts_after == (0, 1)


def test_gathering_several_layers_ahead_keeps_each_layer_beside_the_gather_issued_with_it() -> None:
    # Gathers of layers 0, 1, 2 first; then layer i is issued with the gather of layer i + 3, freed by layer i - 1.
    ops: list[Op] = [comp("start"), *(comm(f"g{i}") for i in range(3))]
    previous = "start"
    for i in range(6):
        if i + 3 < 6:
            ops.append(comm(f"g{i + 3}", previous))
        ops.append(comp(f"layer{i}", f"g{i}", work=OTHER))
        previous = f"layer{i}"
    assert groups_of(*ops) == [
        (["start"], ["g0"], 1),
        (["layer0"], ["g1", "g2", "g3"], 1),
        (["layer1"], ["g4"], 2),
    ]


def test_groups_that_differ_in_work_size_or_communicator_stay_apart() -> None:
    base: tuple[Op, ...] = (comp("a"), comm("x"), comp("b", "x"), comm("y", "a"))
    assert [count for *_, count in groups_of(*base)] == [2]
    for changed in (
        (comp("b", "x", work=OTHER), base[3]),
        (base[2], comm("y", "a", collective=SCATTER)),
        (base[2], replace(comm("y", "a"), communicator="tp")),
    ):
        assert [count for *_, count in groups_of(*base[:2], *changed)] == [1, 1]


def test_a_group_fills_in_starts_and_call_sites() -> None:
    group = OverlapGroup(name="g", computations=(comp("a"),), comms=(comm("x"), comm("y")))
    assert (group.starts_after, group.occurrences) == ((0, 0), ((0,), (0,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"computations": ()}, "at least one computation"),
        ({"comms": ()}, "at least one computation and one collective"),
        ({"starts_after": (0, 0)}, "one entry per collective"),
        ({"occurrences": ((0,), (0,))}, "one entry per collective"),
        ({"starts_after": (2,)}, "outside 0..1"),
        ({"starts_after": (-1,)}, "outside 0..1"),
        ({"count": 0}, "count is 0"),
        ({"comms": (comm("a"),)}, "names repeat"),
    ],
)
def test_an_impossible_group_is_refused(changes: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"name": "g", "computations": (comp("a"),), "comms": (comm("x"),)}
    with pytest.raises(JobError, match=message):
        OverlapGroup(**(good | changes))  # type: ignore[arg-type]
