"""Blocks on SMs against closed forms and against the rates of Eqs 4 to 6 where both must agree."""

from dataclasses import replace

import pytest
from block_dispatch import DispatchSimulator

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.cost.persistent import as_persistent
from lagom_overlap.errors import SpaceError
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup

GATHER = CollectiveKind.ALL_GATHER


def group_of(kernels: list[Kernel], sizes: list[int], streams: list[str] | None = None) -> OverlapGroup:
    streams = streams or ["comm"] * len(sizes)
    return OverlapGroup(
        name="g",
        computations=tuple(CompOp(name=f"k{i}", work=kernel) for i, kernel in enumerate(kernels)),
        comms=tuple(
            CommOp(name=f"c{j}", collective=Collective(GATHER, size, 8), stream=stream)
            for j, (size, stream) in enumerate(zip(sizes, streams, strict=True))
        ),
    )


def pure(num_blocks: int, wave_s: float = 1e-3) -> Kernel:
    return Kernel(num_blocks=num_blocks, blocks_per_sm=1, wave_s=wave_s, block_bytes=0.0)


def alone_s(kernel: Kernel, model: ContentionModel) -> float:
    """Before a collective that waits for it."""
    group = replace(group_of([kernel], [1]), starts_after=(1,))
    return DispatchSimulator(group, model).evaluate((CommConfig(num_channels=1),)).comp_s


@pytest.mark.parametrize("num_blocks", [1, 84, 85, 500])
def test_alone_a_kernel_takes_its_whole_waves_and_its_transfer(num_blocks: int, model: ContentionModel) -> None:
    kernel = Kernel(num_blocks=num_blocks, blocks_per_sm=1, wave_s=1e-3, block_bytes=2e6)
    by_hand = -(-num_blocks // 84) * 1e-3 + num_blocks * 2e6 / 600e9
    assert alone_s(kernel, model) == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 8, 32, 61])
@pytest.mark.parametrize("num_blocks", [84, 500])
def test_covered_from_the_start_compute_alone_agrees_with_the_rates(
    channels: int, num_blocks: int, model: ContentionModel
) -> None:
    group = group_of([pure(num_blocks)], [4096 * MIB])
    config = (CommConfig(num_channels=channels),)
    blocks, rates = (kind(group, model).evaluate(config) for kind in (DispatchSimulator, GroupSimulator))
    assert blocks.comp_s == pytest.approx(rates.comp_s, rel=1e-9)
    assert blocks.comp_s == pytest.approx(-(-num_blocks // (84 - channels)) * 1e-3, rel=1e-9)


def test_a_displaced_block_waits_for_the_collective_and_then_runs(model: ContentionModel) -> None:
    """Specification, T3: x + theta, not two waves and not a share of the time."""
    group, config = group_of([pure(84, 50e-3)], [64 * MIB]), (CommConfig(num_channels=24),)
    blocks, rates = (kind(group, model).evaluate(config) for kind in (DispatchSimulator, GroupSimulator))
    assert 1e-3 < blocks.comm_s[0] < 10e-3
    assert blocks.comp_s == pytest.approx(blocks.comm_s[0] + 50e-3, rel=1e-9)
    assert rates.comp_s < blocks.comp_s < 100e-3


def test_a_collective_waits_for_blocks_that_run_and_holds_what_it_has(model: ContentionModel) -> None:
    """The second needs one SM more than the first gave back; it comes free when the first blocks end."""
    configs = (CommConfig(num_channels=4), CommConfig(num_channels=5))
    group = group_of([pure(80, 50e-3)], [16 * MIB, 16 * MIB])
    times = DispatchSimulator(group, model).evaluate(configs)
    own_s = model.collective(group.comms[1].collective, configs[1]).seconds()
    assert times.comp_s == pytest.approx(50e-3, rel=1e-9)  # 80 blocks fit next to the first
    assert times.comm_s[1] == pytest.approx(50e-3 - times.comm_s[0] + own_s, rel=1e-9)
    rates = GroupSimulator(group, model).evaluate(configs)
    assert rates.comm_s[1] == pytest.approx(own_s, rel=1e-9)


def test_collectives_on_two_streams_take_their_sms_together_and_share_the_link(model: ContentionModel) -> None:
    kernel = pure(84 - 16)
    config = (CommConfig(num_channels=16),) * 2
    serial, parallel = (
        DispatchSimulator(group_of([kernel] * 4, [512 * MIB] * 2, streams), model).evaluate(config)
        for streams in (["comm", "comm"], ["a", "b"])
    )
    assert serial.comp_s == pytest.approx(4e-3)  # 68 blocks on 68 SMs
    assert parallel.comp_s == pytest.approx(8e-3)  # on 52
    assert parallel.comm_s[0] == pytest.approx(2 * serial.comm_s[0], rel=0.1)


def test_a_gap_on_the_communication_stream_gives_the_sms_back(model: ContentionModel) -> None:
    group = replace(group_of([pure(84)] * 6, [1 * MIB, 1 * MIB]), starts_after=(0, 5))
    times = DispatchSimulator(group, model).evaluate((CommConfig(num_channels=16),) * 2)
    x = times.comm_s[0]
    assert times.comp_s == pytest.approx((1e-3 + x) + 4e-3 + (1e-3 + x), rel=1e-9)


def test_more_channels_than_sms_are_refused_and_counts_must_match(model: ContentionModel) -> None:
    simulator = DispatchSimulator(group_of([pure(84)], [MIB]), model)
    with pytest.raises(SpaceError):
        simulator.evaluate((CommConfig(num_channels=84),))
    with pytest.raises(ValueError, match="2 configurations for 1"):
        simulator.evaluate((CommConfig(), CommConfig()))


def test_both_simulators_agree_on_a_layer_whose_kernels_have_many_waves(
    layer: OverlapGroup, model: ContentionModel
) -> None:
    for channels in (1, 4, 8, 16):
        config = (CommConfig(num_channels=channels),) * 2
        blocks, rates = (kind(layer, model).evaluate(config) for kind in (DispatchSimulator, GroupSimulator))
        assert blocks.makespan_s == pytest.approx(rates.makespan_s, rel=0.03)
        assert blocks.makespan_s >= blocks.comp_s


def test_a_persistent_kernel_pays_a_whole_pass_for_one_channel(model: ContentionModel) -> None:
    """pytorch/pytorch#143988: "2x as long"; a plain kernel of as much work hardly notices."""
    plain = pure(840, 1e-4)
    persistent = as_persistent(plain, 84)
    assert (persistent.num_blocks, persistent.wave_s) == (84, pytest.approx(1e-3))
    config = (CommConfig(num_channels=1),)
    slower = [
        kind(group_of([kernel], [4096 * MIB]), model).evaluate(config).comp_s / 1e-3
        for kind in (GroupSimulator, DispatchSimulator)
        for kernel in (plain, persistent)
    ]
    assert slower == pytest.approx([1.1, 2.0, 1.1, 2.0])


def test_a_carve_out_costs_its_sms_alone_and_saves_the_second_pass(model: ContentionModel) -> None:
    plain = pure(84 * 76, 1e-5)  # divides both ways
    carved = as_persistent(plain, 84, carve_out_sms=8)
    assert alone_s(carved, model) / alone_s(as_persistent(plain, 84), model) == pytest.approx(84 / 76)
    group = group_of([carved], [4096 * MIB])
    for kind in (GroupSimulator, DispatchSimulator):
        eight, nine = (kind(group, model).evaluate((CommConfig(num_channels=n),)).comp_s for n in (8, 9))
        assert nine == pytest.approx(2 * eight)


def test_the_carve_out_is_a_knob_of_the_model_and_moves_no_bytes_away(
    model: ContentionModel, layer: OverlapGroup
) -> None:
    product = layer.computations[1].work
    plain = model.kernel(product)
    hopper = replace(model, persistent_carve_out_sms=8).kernel(product)
    assert hopper.num_blocks == 76
    assert hopper.num_blocks * hopper.block_bytes == pytest.approx(plain.num_blocks * plain.block_bytes)
    other = layer.computations[0].work
    assert replace(model, persistent_carve_out_sms=8).kernel(other) == model.kernel(other)
    with pytest.raises(ValueError, match=r"carve_out_sms is 84, must lie in 0\.\.83"):
        as_persistent(plain, 84, 84)
