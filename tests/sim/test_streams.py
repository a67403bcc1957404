"""Two streams with waits both ways, against cases worked by hand."""

import pytest

from lagom_overlap.cost import CollectiveCost, ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import LinkKind, load_preset
from lagom_overlap.sim.streams import Fixed, QueuedComm, run_streams
from lagom_overlap.workload import Kernel

MODEL = ContentionModel(load_preset("a100_dgx"), load_profile("plausible"))


def cost(seconds: float, num_channels: int = 8, touches: float = 1.0) -> CollectiveCost:
    """A collective of a fixed time: latency only, no traffic unless asked for."""
    return CollectiveCost(
        num_channels=num_channels,
        wire_bytes=1.0,
        chunk_bytes=1e6,
        num_slices=1,
        slice_s=0.0,
        exposed_hop_s=0.0,
        channel_bytes_per_s=1e15,
        link=LinkKind.NVLINK,
        link_bytes_per_s=1e12,
        base_s=seconds,
        steps_s=0.0,
        hops_s=0.0,
        fill_bytes=0.0,
        fifo_bytes=0.0,
        touches=touches,
        link_sharpness=6.0,
        load_sensitivity=0.0,
    )


def test_pieces_that_nothing_stretches_add_up() -> None:
    run = run_streams([Fixed(1.0), Fixed(2.0)], [], MODEL)
    assert (run.makespan_s, run.comm_s, run.stretched_s) == (3.0, 0.0, 0.0)


def test_a_gather_that_starts_at_once_and_is_needed_later_is_exposed_by_what_is_left_of_it() -> None:
    # 5 s of gather from 0; piece 1 needs it, piece 0 takes 2 s: 3 s exposed.
    run = run_streams([Fixed(2.0), Fixed(1.0)], [QueuedComm(cost(5.0), 0, needed_by=1)], MODEL)
    assert run.makespan_s == pytest.approx(6.0)
    assert run.exposed_s == pytest.approx(3.0)


def test_a_reduction_after_the_last_piece_is_exposed_in_full() -> None:
    run = run_streams([Fixed(2.0)], [QueuedComm(cost(0.5), 1)], MODEL)
    assert (run.comp_end_s, run.makespan_s, run.exposed_s) == (2.0, pytest.approx(2.5), pytest.approx(0.5))


def test_collectives_keep_their_order() -> None:
    # The second waits for piece 0 (2 s) although it could start with the first's end at 1 s.
    comms = [QueuedComm(cost(1.0), 0), QueuedComm(cost(1.0), 1)]
    run = run_streams([Fixed(2.0), Fixed(2.0)], comms, MODEL)
    assert run.comm_end_s == pytest.approx(3.0)
    assert run.makespan_s == 4.0


def test_a_kernel_beside_a_collective_loses_its_channels() -> None:
    # 108 SMs, 1080 blocks one per SM: 10 waves alone, 11 on the 100 that eight channels leave.
    kernel = Kernel(num_blocks=1080, blocks_per_sm=1, wave_s=0.1, block_bytes=0.0)
    run = run_streams([kernel], [QueuedComm(cost(100.0), 0)], MODEL)
    assert run.comp_end_s == pytest.approx(1.1)
    assert run.stretched_s == pytest.approx(0.1)
    short = run_streams([kernel], [QueuedComm(cost(0.55), 0)], MODEL)
    assert short.comp_end_s == pytest.approx(0.55 + 0.5 * 1.0)


def test_a_collective_that_never_ends_is_refused_and_not_waited_for() -> None:
    with pytest.raises(JobError, match="cluster 'a100_dgx': kernel 1 or collective 0 takes inf s"):
        run_streams([Fixed(1.0)], [QueuedComm(cost(float("inf")), 0)], MODEL)


def test_a_circle_of_waits_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for it"):
        run_streams([Fixed(1.0)], [QueuedComm(cost(1.0), 1, needed_by=0)], MODEL)


def test_time_is_conserved_between_compute_exposed_and_stretched() -> None:
    kernel = Kernel(num_blocks=1000, blocks_per_sm=1, wave_s=0.01, block_bytes=1e6)
    comms = [QueuedComm(cost(0.05), place, needed_by=place + 3) for place in range(0, 12, 4)]
    run = run_streams([kernel] * 12, comms, MODEL)
    alone = 12 * MODEL.running_times([kernel], []).kernel_s[0]
    assert run.makespan_s == pytest.approx(alone + run.exposed_s + run.stretched_s)
