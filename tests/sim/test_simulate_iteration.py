from dataclasses import replace

import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.sim import GroupSimulator, simulate_iteration
from lagom_overlap.timeline import Span, Timeline
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, Kernel, MemoryBound, OverlapGroup

AG = Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8)
RS = Collective(CollectiveKind.REDUCE_SCATTER, 64 * MIB, 8)
KERNEL = Kernel(num_blocks=840, blocks_per_sm=1, wave_s=1e-4, block_bytes=0.0)


def by_name(timeline: Timeline) -> dict[str, Span]:
    return {span.name: span for span in timeline.spans}


def as_iteration(group: OverlapGroup) -> Iteration:
    """The group's operators in an order in which a host could issue them."""
    ops: list[CompOp | CommOp] = list(group.computations)
    for comm, after in zip(group.comms, group.starts_after, strict=True):
        ops.append(replace(comm, deps=(group.computations[after - 1].name,) if after else ()))
    return Iteration(group.name, tuple(ops))


@pytest.mark.parametrize("num_channels", [1, 4, 16, 61])
def test_a_group_as_an_iteration_runs_the_same(layer: OverlapGroup, model: ContentionModel, num_channels: int) -> None:
    """Two event loops, written apart: one for two streams, one for any number."""
    config = CommConfig(num_channels=num_channels)
    alone = by_name(GroupSimulator(layer, model).timeline((config, CommConfig())))
    whole = by_name(simulate_iteration(as_iteration(layer), {"ag": config}, model))
    for name, span in alone.items():
        assert (whole[name].start_s, whole[name].end_s) == pytest.approx(
            (span.start_s, span.end_s), rel=1e-9, abs=1e-12
        )
        assert (whole[name].kind, whole[name].stream) == (span.kind, span.stream)


def test_what_waits_for_everything_before_it_runs_one_after_the_other(model: ContentionModel) -> None:
    ops = (
        CompOp(name="a", work=KERNEL),
        CommOp(name="x", collective=AG, deps=("a",)),
        CompOp(name="b", work=KERNEL, deps=("x",)),
    )
    spans = by_name(simulate_iteration(Iteration("serial", ops), {}, model))
    x = model.collective(AG, CommConfig()).seconds()
    assert [spans[n].end_s for n in "axb"] == pytest.approx([1e-3, 1e-3 + x, 2e-3 + x])


def test_a_stream_keeps_its_order_even_when_a_later_operator_could_go(model: ContentionModel) -> None:
    ops = (
        CompOp(name="a", work=KERNEL),
        CommOp(name="late", collective=AG, deps=("a",)),
        CommOp(name="free", collective=RS),
    )
    spans = by_name(simulate_iteration(Iteration("order", ops), {}, model))
    assert spans["free"].start_s == spans["late"].end_s


def test_two_streams_of_collectives_share_the_link(model: ContentionModel) -> None:
    """By hand: both at half the rate until the shorter ends, then the longer alone; the wire is never idle."""
    ops = (
        CommOp(name="x", collective=AG, stream="one"),
        CommOp(name="y", collective=replace(RS, num_bytes=128 * MIB), stream="two"),
    )
    spans = by_name(simulate_iteration(Iteration("two", ops), {}, model))
    alone = {op.name: model.collective(op.collective, CommConfig()).seconds() for op in ops}
    assert spans["x"].start_s == spans["y"].start_s == 0.0
    assert spans["x"].end_s == pytest.approx(2 * alone["x"], rel=0.05)
    assert spans["y"].end_s == pytest.approx(alone["x"] + alone["y"], rel=0.05)


def test_two_streams_of_computations_take_turns(model: ContentionModel) -> None:
    ops = (
        CompOp(name="a", work=KERNEL),
        CompOp(name="b", work=replace(KERNEL, num_blocks=1680), stream="side"),
    )
    spans = by_name(simulate_iteration(Iteration("turns", ops), {}, model))
    assert (spans["a"].end_s, spans["b"].end_s) == pytest.approx((2e-3, 3e-3))


def test_three_streams_give_what_a_ticking_clock_gives(model: ContentionModel) -> None:
    ops = (
        CompOp(name="a", work=Gemm(2048, 2560, 2560)),
        CommOp(name="x", collective=AG),
        CompOp(name="b", work=MemoryBound(10**8), deps=("x",)),
        CommOp(name="y", collective=RS, stream="other", deps=("a",)),
        CompOp(name="c", work=Gemm(2048, 7680, 2560)),
        CommOp(name="z", collective=replace(AG, num_ranks=16), stream="far", deps=("b",)),
        CompOp(name="d", work=Gemm(2048, 7680, 2560), stream="side"),
    )
    step_s = 2e-6
    order = {op.name: op for op in ops}
    before = {op.name: [o.name for o in ops[:i] if o.stream == op.stream][-1:] for i, op in enumerate(ops)}
    done = dict.fromkeys(order, 0.0)
    ended: dict[str, float] = {}
    now = 0
    while len(ended) < len(ops):
        running = [op for op in ops if op.name not in ended and all(n in ended for n in (*op.deps, *before[op.name]))]
        comps, comms = [o for o in running if isinstance(o, CompOp)], [o for o in running if isinstance(o, CommOp)]
        times = model.running_times(
            [model.kernel(o.work) for o in comps], [model.collective(o.collective, CommConfig()) for o in comms]
        )
        now += 1
        for op, whole_s in zip(comps + comms, times.kernel_s + times.comm_s, strict=True):
            done[op.name] += step_s / whole_s
            if done[op.name] >= 1:
                ended[op.name] = now * step_s
    spans = by_name(simulate_iteration(Iteration("three", ops), {}, model))
    assert {n: s.end_s for n, s in spans.items()} == pytest.approx(ended, abs=10 * step_s)


def test_the_same_iteration_gives_the_same_bits(layer: OverlapGroup, model: ContentionModel) -> None:
    iteration = as_iteration(layer)
    assert simulate_iteration(iteration, {}, model) == simulate_iteration(iteration, {}, model)


def test_an_empty_iteration_takes_no_time(model: ContentionModel) -> None:
    assert simulate_iteration(Iteration("empty", ()), {}, model).makespan_s == 0.0


def test_a_configuration_for_nobody_is_refused(model: ContentionModel) -> None:
    iteration = Iteration("one", (CompOp(name="a", work=KERNEL), CommOp(name="x", collective=AG)))
    with pytest.raises(ValueError, match="configs name 'a', no collective of iteration 'one'"):
        simulate_iteration(iteration, {"a": CommConfig()}, model)


def test_a_configuration_that_cannot_run_names_its_collective(model: ContentionModel) -> None:
    iteration = Iteration("one", (CommOp(name="x", collective=AG),))
    with pytest.raises(SpaceError, match="x: num_channels is 99"):
        simulate_iteration(iteration, {"x": CommConfig(num_channels=99)}, model)
