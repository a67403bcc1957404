from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.sim import GroupSimulator, GroupTimes
from lagom_overlap.timeline import Span, SpanKind
from lagom_overlap.timeline.metrics import overlap_metrics
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup

CONFIGS = st.builds(
    CommConfig, num_channels=st.integers(1, 61), chunk_bytes=st.sampled_from([32 * KIB, 128 * KIB, 684 * KIB, 2 * MIB])
)


def fluid(model: ContentionModel) -> ContentionModel:
    return replace(model, profile=replace(model.profile, quantisation=0.0))


def fixed_steps(
    group: OverlapGroup, assignment: Sequence[CommConfig], model: ContentionModel, step_s: float
) -> GroupTimes:
    """The same physics with a clock that ticks; an operator that ends inside a tick wastes the rest of it."""
    kernels = [model.kernel(op.work) for op in group.computations]
    costs = [model.collective(op.collective, config) for op, config in zip(group.comms, assignment, strict=True)]
    comp = comm = ticks = 0
    done_comp = done_comm = 0.0
    comp_ticks, comm_ticks = 0, [0] * len(costs)
    while comp < len(kernels) or comm < len(costs):
        may_comm = comm < len(costs) and group.starts_after[comm] <= comp
        running = [kernels[comp]] if comp < len(kernels) else []
        times = model.running_times(running, [costs[comm]] if may_comm else [])
        ticks += 1
        if may_comm:
            comm_ticks[comm] += 1
            done_comm += step_s / times.comm_s[0]
        if running:
            comp_ticks += 1
            done_comp += step_s / times.kernel_s[0]
        if done_comp >= 1:
            comp, done_comp = comp + 1, 0.0
        if done_comm >= 1:
            comm, done_comm = comm + 1, 0.0
    return GroupTimes(ticks * step_s, comp_ticks * step_s, tuple(n * step_s for n in comm_ticks))


@pytest.mark.parametrize(
    ("first", "second"),
    [((8, 2 * MIB), (8, 2 * MIB)), ((1, 32 * KIB), (61, 2 * MIB)), ((32, 128 * KIB), (2, 64 * KIB))],
)
def test_events_give_what_a_ticking_clock_gives(
    layer: OverlapGroup, model: ContentionModel, first: tuple[int, int], second: tuple[int, int]
) -> None:
    assignment = tuple(CommConfig(num_channels=n, chunk_bytes=c) for n, c in (first, second))
    step_s = 2e-6
    events, ticks = GroupSimulator(layer, model).evaluate(assignment), fixed_steps(layer, assignment, model, step_s)
    slack = (len(layer.computations) + len(layer.comms)) * step_s  # what the ticks waste at most
    assert events.makespan_s == pytest.approx(ticks.makespan_s, abs=slack)
    assert events.comp_s == pytest.approx(ticks.comp_s, abs=slack)
    assert events.comm_s == pytest.approx(ticks.comm_s, abs=slack)


def test_pure_sm_loss_from_16_to_32_channels_costs_68_to_52(model: ContentionModel) -> None:
    """No quantisation, no memory traffic, the computation fully covered: 1.3077 exactly (published: 30.2 %)."""
    kernel = Kernel(num_blocks=10_000, blocks_per_sm=1, wave_s=1e-5, block_bytes=0.0)
    group = OverlapGroup(
        name="covered",
        computations=(CompOp(name="comp", work=kernel),),
        comms=(CommOp(name="ar", collective=Collective(CollectiveKind.ALL_REDUCE, 1024 * MIB, 8)),),
    )
    simulator = GroupSimulator(group, fluid(model))
    few, many = (simulator.evaluate((CommConfig(num_channels=n),)) for n in (16, 32))
    assert min(few.comm_s + many.comm_s) > many.comp_s
    assert many.comp_s / few.comp_s == pytest.approx(68 / 52, rel=1e-12)


def test_a_collective_that_ends_early_slows_only_its_share(model: ContentionModel) -> None:
    """By hand: NC = 42 halves the rate for x, then the kernel runs alone: y = y0 + x / 2."""
    kernel = Kernel(num_blocks=84_000, blocks_per_sm=1, wave_s=1e-5, block_bytes=0.0)
    group = OverlapGroup(
        name="partly",
        computations=(CompOp(name="comp", work=kernel),),
        comms=(CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 16 * MIB, 8)),),
    )
    times = GroupSimulator(group, fluid(model)).evaluate((CommConfig(num_channels=42),))
    assert times.comp_s == pytest.approx(1e-2 + times.comm_s[0] / 2, rel=1e-12)


@given(first=CONFIGS, second=CONFIGS)
def test_nothing_gets_faster_by_overlap(
    layer: OverlapGroup, model: ContentionModel, first: CommConfig, second: CommConfig
) -> None:
    simulator = GroupSimulator(layer, model)
    times = simulator.evaluate((first, second))
    comm_alone = [
        model.collective(op.collective, c).seconds() for op, c in zip(layer.comms, (first, second), strict=True)
    ]
    assert times.makespan_s >= max(simulator.comp_alone_s, sum(comm_alone)) * (1 - 1e-12)
    assert times.makespan_s >= max(times.comp_s, sum(times.comm_s)) * (1 - 1e-12)
    assert all(x >= alone * (1 - 1e-12) for x, alone in zip(times.comm_s, comm_alone, strict=True))


@given(first=CONFIGS, second=CONFIGS)
def test_every_kernel_and_every_collective_does_all_of_its_work(
    layer: OverlapGroup, model: ContentionModel, first: CommConfig, second: CommConfig
) -> None:
    """Each operator's rate 1 / (whole time), integrated over its span, is 1."""
    spans = GroupSimulator(layer, model).timeline((first, second)).spans
    kernels = {op.name: model.kernel(op.work) for op in layer.computations}
    costs = {
        op.name: model.collective(op.collective, config)
        for op, config in zip(layer.comms, (first, second), strict=True)
    }
    edges = sorted({edge for span in spans for edge in (span.start_s, span.end_s)})
    work = dict.fromkeys([*kernels, *costs], 0.0)
    for begin, end in pairwise(edges):
        running = [span.name for span in spans if span.start_s <= begin and end <= span.end_s]
        comps, comms = [n for n in running if n in kernels], [n for n in running if n in costs]
        times = model.running_times([kernels[n] for n in comps], [costs[n] for n in comms])
        for name, whole_s in zip(comps + comms, times.kernel_s + times.comm_s, strict=True):
            work[name] += (end - begin) / whole_s
    assert list(work.values()) == pytest.approx([1.0] * len(work), rel=1e-9)


def test_the_same_call_gives_the_same_bits(layer: OverlapGroup, model: ContentionModel) -> None:
    assignment = (CommConfig(num_channels=3), CommConfig(num_channels=5, chunk_bytes=96 * KIB))
    used, fresh = GroupSimulator(layer, model), GroupSimulator(layer, model)
    used.evaluate((CommConfig(), CommConfig()))
    assert used.timeline(assignment) == fresh.timeline(assignment) == used.timeline(assignment)
    assert used.evaluate(assignment) == fresh.evaluate(assignment)


def test_the_timeline_shows_what_was_evaluated(layer: OverlapGroup, model: ContentionModel) -> None:
    simulator = GroupSimulator(layer, model)
    assignment = (CommConfig(num_channels=2), CommConfig())
    times, timeline = simulator.evaluate(assignment), simulator.timeline(assignment)
    metrics = overlap_metrics(timeline)
    assert timeline.makespan_s == times.makespan_s
    assert metrics.comp_s == pytest.approx(times.comp_s, rel=1e-12)
    assert tuple(span.duration_s for span in timeline.of(SpanKind.COMM)) == times.comm_s


def test_collectives_run_in_order_and_wait_for_their_computations(layer: OverlapGroup, model: ContentionModel) -> None:
    spans = {span.name: span for span in GroupSimulator(layer, model).timeline((CommConfig(), CommConfig())).spans}
    assert spans["ag"].start_s == spans["comp0"].start_s == 0.0
    assert spans["rs"].start_s == max(spans["ag"].end_s, spans["comp2"].end_s)


def test_a_collective_held_back_to_the_end_runs_alone(layer: OverlapGroup, model: ContentionModel) -> None:
    last = replace(layer, starts_after=(7, 7))
    simulator = GroupSimulator(last, model)
    times = simulator.evaluate((CommConfig(), CommConfig()))
    alone = tuple(model.collective(op.collective, CommConfig()).seconds() for op in last.comms)
    assert times.comp_s == pytest.approx(simulator.comp_alone_s, rel=1e-12)
    assert times.comm_s == pytest.approx(alone, rel=1e-12)
    assert times.makespan_s == pytest.approx(simulator.comp_alone_s + sum(alone), rel=1e-12)


def test_untouched_is_the_default_spelled_out(layer: OverlapGroup, model: ContentionModel) -> None:
    simulator = GroupSimulator(layer, model)
    spelled = tuple(model.default_config(op.collective) for op in layer.comms)
    assert simulator.evaluate((CommConfig(), CommConfig())) == simulator.evaluate(spelled)


def test_equal_works_and_equal_collectives_are_priced_once(layer: OverlapGroup, model: ContentionModel) -> None:
    twice = OverlapGroup(
        name="twice",
        computations=tuple(replace(op, name=f"{op.name}-{i}") for i in range(2) for op in layer.computations),
        comms=tuple(replace(layer.comms[0], name=f"ag{i}") for i in range(2)),
    )
    times = GroupSimulator(twice, model).evaluate((CommConfig(), CommConfig()))
    one_by_one = fixed_steps(twice, (CommConfig(), CommConfig()), model, 2e-6)
    assert times.makespan_s == pytest.approx(one_by_one.makespan_s, abs=4e-5)


def test_ends_that_fall_together_end_together(model: ContentionModel) -> None:
    kernel = Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0)
    collective = Collective(CollectiveKind.ALL_GATHER, MIB, 8)
    exact = replace(kernel, wave_s=model.collective(collective, CommConfig()).seconds())
    group = OverlapGroup(
        name="tie",
        computations=(CompOp(name="a", work=exact), CompOp(name="b", work=exact)),
        comms=(CommOp(name="x", collective=collective), CommOp(name="y", collective=collective)),
    )
    spans: dict[str, Span] = {
        s.name: s for s in GroupSimulator(group, model).timeline((CommConfig(), CommConfig())).spans
    }
    assert spans["a"].end_s == spans["x"].end_s == spans["b"].start_s == spans["y"].start_s
    assert spans["b"].end_s == spans["y"].end_s


def test_a_configuration_that_cannot_run_names_its_collective(layer: OverlapGroup, model: ContentionModel) -> None:
    with pytest.raises(SpaceError, match="rs: num_channels is 84, but A40 has 84 SMs"):
        GroupSimulator(layer, model).evaluate((CommConfig(), CommConfig(num_channels=84)))


def test_an_assignment_of_the_wrong_length_is_refused(layer: OverlapGroup, model: ContentionModel) -> None:
    with pytest.raises(ValueError, match="1 configurations for 2 collectives"):
        GroupSimulator(layer, model).evaluate((CommConfig(),))
