"""Who gets SMs first, against a simulation of every single block; and what a persistent kernel is known to lose."""

from dataclasses import dataclass, replace
from math import inf
from random import Random

import pytest
from block_dispatch import DispatchSimulator

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    Collective,
    CollectiveKind,
    CommConfig,
    LaunchConfig,
    LaunchOrder,
    StreamPriority,
)
from lagom_overlap.cost import ContentionModel
from lagom_overlap.cost.persistent import as_persistent
from lagom_overlap.errors import JobError
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.sim.group import share_before_collective
from lagom_overlap.units import MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, Kernel, OverlapGroup

NUM_SMS = 84
LAUNCHES = [
    LaunchConfig(order=order, priority=priority)
    for order in (None, *LaunchOrder)
    for priority in (None, *StreamPriority)
]
FIRST, NORMAL = LaunchOrder.COMPUTATION_FIRST, StreamPriority.NORMAL


def pure(num_blocks: int, wave_s: float = 1e-3) -> Kernel:
    return Kernel(num_blocks=num_blocks, blocks_per_sm=1, wave_s=wave_s, block_bytes=0.0)


def group_of(kernels: list[Kernel], sizes: list[int], starts: tuple[int, ...] = ()) -> OverlapGroup:
    return OverlapGroup(
        name="g",
        computations=tuple(CompOp(name=f"k{i}", work=kernel) for i, kernel in enumerate(kernels)),
        comms=tuple(
            CommOp(name=f"c{j}", collective=Collective(CollectiveKind.ALL_GATHER, size, 8))
            for j, size in enumerate(sizes)
        ),
        starts_after=starts,
    )


@dataclass(slots=True)
class Grid:
    """Blocks that wait, of a kernel (`length_s` each) or a collective (held until `length_s` after the last came)."""

    waiting: int
    length_s: float
    is_comm: bool
    launched_s: float
    running: int = 0
    ends_s: float = inf


def every_block(
    kernels: list[Kernel], comms: list[tuple[int, float, int]], launch: LaunchConfig
) -> tuple[float, list[float]]:
    """Compute end and each collective's time, block by block on 84 SMs of one block each; no memory traffic.

    `comms`: (channels, seconds, computations before it). Written apart from the package: queues of grids, a list of
    running blocks, the rules of `launch` as conditions on who was launched when.
    """
    now, free, done, comm_end = 0.0, NUM_SMS, 0, 0.0
    running: list[tuple[float, Grid]] = []
    kernel = Grid(kernels[0].num_blocks, kernels[0].wave_s, False, 0.0)
    held: list[Grid] = []
    times, issued = [inf] * len(comms), -1
    while done < len(kernels) or issued < len(comms) - 1 or held:
        if not held and issued + 1 < len(comms) and comms[issued + 1][2] <= done:
            issued += 1
            channels, seconds, _ = comms[issued]
            held = [Grid(channels, seconds, True, now)]
        queue = [grid for grid in (kernel, *held) if grid.waiting]

        def comes_first(grid: Grid) -> tuple[float, int]:
            if launch.priority is NORMAL:
                tie = grid.is_comm if launch.order is FIRST else not grid.is_comm
                return grid.launched_s, int(tie)
            same = bool(held) and kernel.launched_s == held[0].launched_s == now  # noqa: B023  used at once
            behind = same and launch.order is FIRST
            return 0.0, int(grid.is_comm if behind else not grid.is_comm)

        for grid in sorted(queue, key=comes_first):
            taken = min(free, grid.waiting)
            grid.waiting -= taken
            grid.running += taken
            free -= taken
            if grid.is_comm and not grid.waiting and taken:
                grid.ends_s = now + grid.length_s
            elif not grid.is_comm:
                running += [(now + grid.length_s, grid)] * taken
        ends = [end for end, _ in running] + [grid.ends_s for grid in held]
        if not ends or min(ends) == inf:
            break
        now = min(ends)
        over = [entry for entry in running if entry[0] <= now + 1e-12]
        running = [entry for entry in running if entry[0] > now + 1e-12]
        kernel.running -= len(over)
        free += len(over)
        if held and held[0].ends_s <= now + 1e-12:
            times[issued] = now - held[0].launched_s
            free += held[0].running
            held = []
        if done < len(kernels) and not kernel.waiting and not kernel.running:
            done, comm_end = done + 1, now
            if done < len(kernels):
                kernel = Grid(kernels[done].num_blocks, kernels[done].wave_s, False, now)
    return comm_end, times


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_blocks_go_where_a_simulation_of_every_single_block_puts_them(
    launch: LaunchConfig, model: ContentionModel
) -> None:
    random = Random(7)
    for _ in range(40):
        kernels = [
            pure(random.choice([60, 76, 84, random.randint(1, 400)]), random.uniform(1e-4, 3e-3))
            for _ in range(random.randint(1, 4))
        ]
        starts = tuple(sorted(random.randint(0, len(kernels) - 1) for _ in range(random.randint(1, 3))))
        group = group_of(kernels, [random.randint(1, 64) * MIB for _ in starts], starts)
        configs = tuple(CommConfig(num_channels=random.randint(1, 40)) for _ in starts)
        alone = [
            model.collective(op.collective, config).seconds() for op, config in zip(group.comms, configs, strict=True)
        ]
        comms = [(config.num_channels or 1, x, s) for config, x, s in zip(configs, alone, starts, strict=True)]
        comp_s, comm_s = every_block(kernels, comms, launch)
        found = DispatchSimulator(group, model, launch).evaluate(configs)
        assert found.comp_s == pytest.approx(comp_s, rel=1e-9)
        assert found.comm_s == pytest.approx(comm_s, rel=1e-9)


@pytest.mark.parametrize("priority", StreamPriority)
@pytest.mark.parametrize("channels", [1, 8, 40])
@pytest.mark.parametrize("num_blocks", [40, 76, 84, 85, 160, 168, 500])
def test_a_collective_behind_a_kernel_waits_for_the_share_that_the_closed_form_names(
    num_blocks: int, channels: int, priority: StreamPriority, model: ContentionModel
) -> None:
    kernel, launch = pure(num_blocks), LaunchConfig(order=FIRST, priority=priority)
    group, config = group_of([kernel], [64 * MIB]), (CommConfig(num_channels=channels),)
    x = model.collective(group.comms[0].collective, config[0]).seconds()
    whole_s = -(-num_blocks // NUM_SMS) * 1e-3
    share = share_before_collective(kernel, channels, num_sms=NUM_SMS, priority=priority)
    for kind in (GroupSimulator, DispatchSimulator):
        assert kind(group, model, launch).evaluate(config).comm_s[0] - x == pytest.approx(share * whole_s, abs=1e-12)


def test_behind_a_persistent_kernel_a_collective_waits_for_all_of_it_unless_it_has_a_carve_out(
    model: ContentionModel,
) -> None:
    plain, launch = pure(840, 1e-4), LaunchConfig(order=FIRST)
    config = (CommConfig(num_channels=8),)
    for kind in (GroupSimulator, DispatchSimulator):
        whole, carved = (
            kind(group_of([as_persistent(plain, 84, free)], [16 * MIB]), model, launch).evaluate(config)
            for free in (0, 8)
        )
        assert whole.makespan_s == pytest.approx(1e-3 + carved.comm_s[0])
        assert whole.comp_s == pytest.approx(1e-3)  # undisturbed
        assert carved.makespan_s == pytest.approx(max(12 * 1e-4, carved.comm_s[0]))  # 840 blocks on 76 SMs: 12 rounds


def test_a_kernel_launched_later_waits_for_a_collective_of_equal_priority(model: ContentionModel) -> None:
    """The first kernel is undisturbed, the second finds the collective resident."""
    kernels, launch = [pure(84), pure(84)], LaunchConfig(order=FIRST, priority=NORMAL)
    group, config = group_of(kernels, [4096 * MIB]), (CommConfig(num_channels=4),)
    for kind in (GroupSimulator, DispatchSimulator):
        assert kind(group, model, launch).evaluate(config).comp_s == pytest.approx(1e-3 + 2e-3)


def test_a_collective_issued_beside_a_running_kernel_waits_for_its_last_wave_at_equal_priority(
    model: ContentionModel,
) -> None:
    """300 blocks: the fourth wave, from 3 ms on, has 48 of them and leaves room for the second collective."""
    group, configs = group_of([pure(300)], [MIB, 16 * MIB]), (CommConfig(num_channels=8),) * 2
    first_s, second_s = (model.collective(op.collective, configs[0]).seconds() for op in group.comms)
    for kind in (GroupSimulator, DispatchSimulator):
        normal, high = (
            kind(group, model, LaunchConfig(priority=priority)).evaluate(configs).comm_s[1]
            for priority in (NORMAL, StreamPriority.HIGH)
        )
        assert normal == pytest.approx(3e-3 - first_s + second_s)
        assert high == pytest.approx(second_s)


def test_untouched_is_collective_first_on_a_stream_of_high_priority(model: ContentionModel) -> None:
    group, config = group_of([pure(300), pure(84)], [32 * MIB] * 2, (0, 1)), (CommConfig(num_channels=8),) * 2
    spelled = LaunchConfig(order=LaunchOrder.COLLECTIVE_FIRST, priority=StreamPriority.HIGH)
    for kind in (GroupSimulator, DispatchSimulator):
        one, other = (kind(group, model, launch).evaluate(config) for launch in (UNTOUCHED_LAUNCH, spelled))
        assert one == other
        assert kind(group, model).evaluate(config) == one


def test_the_carve_out_reaches_persistent_products_and_nothing_else(model: ContentionModel) -> None:
    product, eight = Gemm(4096, 10240, 2560), LaunchConfig(sm_carveout=8)
    persistent = replace(model, persistent_carve_out_sms=0)
    assert persistent.launched(eight).kernel(product).num_blocks == 76
    assert persistent.launched(UNTOUCHED_LAUNCH) is persistent
    assert model.launched(eight) is model  # plain products: blocks go wherever there is room
    with pytest.raises(JobError, match="84"):
        persistent.launched(LaunchConfig(sm_carveout=84))


def test_the_reported_two_times_and_the_few_percent_with_a_carve_out(model: ContentionModel) -> None:
    """pytorch/pytorch#143988: NCCL on about 10 % of an H100's SMs made persistent matmuls take 2x as long.

    Its author expects about 10 % where those SMs are left free: 132 / 119 = 1.109 for 13 of 132.
    """
    hopper = replace(model, cluster=replace(model.cluster, gpu=replace(model.cluster.gpu, num_sms=132)))
    plain = pure(132 * 119, 1e-6)  # whole rounds either way
    config = (CommConfig(num_channels=13),)
    for kind in (GroupSimulator, DispatchSimulator):
        alone_s = 119e-6
        slower = [
            kind(group_of([as_persistent(plain, 132, free)], [4096 * MIB]), hopper).evaluate(config).comp_s / alone_s
            for free in (0, 13)
        ]
        assert slower == pytest.approx([2.0, 132 / 119])
