"""Which traced operator is which of a step, and the scaled model where the trace is silent."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.planners.times import NamedTimes
from lagom_overlap.planners.traced_times import SHAPED, ScaledTimes, kernels_of, match_trace
from lagom_overlap.trace.operators import TracedCollective, TracedOperator, TracedOperators, read_operators
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Iteration, MemoryBound, Op, Origin, Phase

MiB = 1 << 20


def product(name: str, m: int, phase: Phase | None = None, kernel: str = "aten.mm") -> CompOp:
    return CompOp(name=name, work=Gemm(m, 8, 16), origin=Origin(kernel=kernel, phase=phase))


def moved(name: str, num_bytes: int, kernel: str = "aten.add") -> CompOp:
    return CompOp(name=name, work=MemoryBound(num_bytes), origin=Origin(kernel=kernel))


def gather(name: str, num_bytes: int = MiB, ranks: int = 2) -> CommOp:
    return CommOp(name=name, collective=Collective(CollectiveKind.ALL_GATHER, num_bytes, ranks))


def step(*ops: Op) -> Iteration:
    return Iteration("step", ops)


def ran(m: int, seconds: float, phase: Phase | None = None) -> TracedOperator:
    return TracedOperator(
        kernel="aten.mm", seconds=seconds, shapes=((m, 16), (16, 8)), element_bytes=(4, 4), phase=phase
    )


def added(elements: int, seconds: float) -> TracedOperator:
    shapes = ((elements,), (elements,))
    return TracedOperator(kernel="aten.add", seconds=seconds, shapes=shapes, element_bytes=(4, 4))


def sent(num_bytes: int, seconds: float, ranks: int = 2) -> TracedCollective:
    return TracedCollective(kind=CollectiveKind.ALL_GATHER, seconds=seconds, num_bytes=num_bytes, num_ranks=ranks)


def trace(
    *operators: TracedOperator, collectives: Sequence[TracedCollective] = (), num_steps: int = 0
) -> TracedOperators:
    return TracedOperators(
        file="t", operators=operators, collectives=tuple(collectives), num_steps=num_steps, is_gpu=True
    )


def test_operators_of_a_kernel_are_matched_in_order_and_take_the_median_over_steps():
    held = step(product("a", 4), product("b", 4), gather("c"))
    times = [1.0, 10.0, 2.0, 30.0, 6.0, 20.0]
    collectives = [sent(MiB, seconds) for seconds in (5.0, 9.0, 7.0)]
    match = match_trace(held, trace(*(ran(4, s) for s in times), collectives=collectives, num_steps=3))
    assert (match.measured_s, match.num_in_order) == ({"a": 2.0, "b": 20.0, "c": 7.0}, 3)


def test_a_trace_without_steps_may_hold_any_whole_number_of_them():
    held = step(product("a", 4), product("b", 4))
    assert match_trace(held, trace(*(ran(4, s) for s in (1.0, 2.0, 3.0, 4.0)))).measured_s == {"a": 2.0, "b": 3.0}
    assert match_trace(held, trace(*(ran(4, s) for s in (1.0, 2.0, 9.0)))).num_in_order == 0


def test_where_numbers_or_shapes_disagree_shapes_decide():
    held = step(product("a", 4), product("b", 5), product("c", 6))
    found = match_trace(held, trace(ran(5, 7.0), ran(4, 1.0), ran(5, 9.0), num_steps=1))
    assert (found.measured_s, found.num_in_order) == ({"a": 1.0, "b": 8.0}, 0)  # as many, but in another order


def test_a_trace_whose_steps_hold_twice_as_many_is_not_matched_in_order():
    held = step(product("a", 4), product("b", 4))
    found = match_trace(held, trace(*(ran(4, s) for s in (1.0, 2.0, 3.0, 4.0)), num_steps=1))
    assert (found.measured_s, found.num_in_order) == ({"a": 2.5, "b": 2.5}, 0)


def test_collectives_in_another_order_of_sizes_are_matched_by_size():
    held = step(gather("a"), gather("b", 2 * MiB))
    found = match_trace(held, trace(collectives=[sent(2 * MiB, 2.0), sent(MiB, 1.0)], num_steps=1))
    assert (found.measured_s, found.num_in_order) == ({"a": 1.0, "b": 2.0}, 0)


def test_by_shape_the_same_phase_comes_first():
    held = step(product("f", 4, Phase.FORWARD), product("w", 4, Phase.WEIGHT_GRAD), product("o", 4, Phase.OPTIMIZER))
    times = [ran(4, 1.0, Phase.FORWARD), ran(4, 3.0, Phase.FORWARD), ran(4, 7.0, Phase.BACKWARD), ran(4, 8.0)]
    assert match_trace(held, trace(*times)).measured_s == {"f": 2.0, "w": 7.0, "o": 5.0}


def test_what_moves_memory_is_known_by_its_bytes():
    held = step(moved("small", 3 * 4 * 10), moved("large", 3 * 4 * 100), moved("other", 99))
    match = match_trace(held, trace(added(100, 5.0), added(10, 1.0), added(100, 5.0), added(100, 6.0)))
    assert match.measured_s == {"small": 1.0, "large": 5.0}


def test_a_comparison_writes_bytes_not_numbers():
    held = step(moved("gt", 10 * 4 + 10, "aten.gt"), moved("gt_1", 99, "aten.gt"))
    traced = TracedOperator(kernel="aten.gt", seconds=2.0, shapes=((10,),), element_bytes=(4,))
    assert match_trace(held, trace(traced, traced, traced)).measured_s == {"gt": 2.0}


def test_a_step_without_kernels_is_matched_by_the_shapes_of_products_and_attentions():
    attention = Attention(batch=2, num_heads=4, seq_len=64, head_dim=8)
    held = step(
        CompOp(name="p", work=Gemm(2 * 3, 5, 7)),
        CompOp(name="q", work=attention),
        CompOp(name="m", work=MemoryBound(4096)),
    )
    assert kernels_of(held) == SHAPED
    query = ((2, 4, 64, 8),) * 3
    flash = "aten._scaled_dot_product_flash_attention"
    traced = [
        TracedOperator(kernel="aten.bmm", seconds=1.0, shapes=((2, 3, 7), (2, 7, 5)), element_bytes=(2, 2)),
        TracedOperator(kernel=flash, seconds=2.0, shapes=query, element_bytes=(2,) * 3),
        TracedOperator(kernel=f"{flash}_backward", seconds=9.0, shapes=(*query, *query), element_bytes=(2,) * 6),
    ]
    assert match_trace(held, trace(*traced)).measured_s == {"p": 1.0, "q": 2.0}
    backward = step(CompOp(name="q", work=Attention(batch=2, num_heads=4, seq_len=64, head_dim=8, passes=2.5)))
    assert match_trace(backward, trace(*traced)).measured_s == {"q": 9.0}


def test_collectives_are_known_by_kind_bytes_and_ranks():
    held = step(gather("a"), gather("b", 2 * MiB), gather("c", MiB, 4), gather("d", 3 * MiB))
    traced = [sent(2 * MiB, 2.0), sent(MiB, 1.0), sent(MiB, 4.0, 4), sent(2 * MiB, 2.0), sent(3 * MiB, 9.0, 0)]
    assert match_trace(held, trace(collectives=traced)).measured_s == {"a": 1.0, "b": 2.0, "c": 4.0, "d": 9.0}


class UnitTimes:
    """A product takes its rows in seconds, all else 1 s."""

    def seconds(self, op: Op) -> float:
        return float(op.work.m) if isinstance(op, CompOp) and isinstance(op.work, Gemm) else 1.0


def test_what_was_not_measured_is_scaled_with_its_sort_or_with_all_of_its_kind():
    held = step(product("a", 4), product("b", 6), moved("m", 64), gather("c"), gather("d", 2 * MiB))
    scaled = ScaledTimes.fitted(UnitTimes(), held, {"a": 8.0, "c": 5.0})
    assert scaled.factors == {"Gemm": 2.0, "computations": 2.0, "all_gather": 5.0, "collectives": 5.0}
    times = NamedTimes({"a": 8.0, "c": 5.0}, held, scaled)
    assert [times.seconds(op) for op in held.ops] == [8.0, 12.0, 2.0, 5.0, 5.0]
    apart = ScaledTimes.fitted(UnitTimes(), held, {"a": 8.0, "m": 6.0})
    assert [apart.seconds(op) for op in held.ops[:3]] == [8.0, 12.0, 6.0]
    scatter = CommOp(name="r", collective=Collective(CollectiveKind.REDUCE_SCATTER, 64, 2))
    assert scaled.seconds(scatter) == 5.0
    assert ScaledTimes.fitted(UnitTimes(), held, {}).seconds(held.ops[1]) == 6.0


def test_the_order_of_a_recorded_run_tells_first_uses_from_later_ones():
    """Three steps of examples/plan_zero.py: the first product of a step is not the median of all of its shape."""
    ours = read_operators(Path(__file__).parents[1] / "data" / "zero_step_gloo_trace.json.gz", ["aten.mm"])
    products = [CompOp(name=f"mm_{n}", work=Gemm(1, 1, 1), origin=Origin(kernel="aten.mm")) for n in range(36)]
    assert match_trace(step(*products), ours).measured_s == {}  # of other shapes
    shapes = [held.shapes for held in ours.operators[:36]]
    works = [Gemm(left[0], right[1], left[1], 4) for left, right in shapes]
    named = [CompOp(name=f"mm_{n}", work=work, origin=Origin(kernel="aten.mm")) for n, work in enumerate(works)]
    match = match_trace(step(*named), ours)
    assert match.num_in_order == 36
    first = sorted(held.seconds for held in ours.operators[::36])
    assert match.measured_s["mm_0"] == pytest.approx(first[1])
