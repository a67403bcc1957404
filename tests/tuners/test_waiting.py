"""Streams whose collectives wait for kernels: cases worked by hand, and a world that is played step by step."""

from random import Random

import numpy as np
import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.curves import Curves, Setting
from lagom_overlap.tuners.ours import MOST_MEASURED, OurSearch
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.waiting import Stream, drawn_starts, makespans, replay
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup

CHANNELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SETTINGS = [Setting(CommConfig(num_channels=n), n, 512 * KIB) for n in CHANNELS]
KERNELS_S = (1.0, 0.5, 2.0, 1.5, 1.0)
SIZES = (3, 1, 2, 1)


def group(num_comms: int = len(SIZES)) -> OverlapGroup:
    """Kernels of one wave each, so that their times are the same on any GPU."""
    kernels = [Kernel(num_blocks=50, blocks_per_sm=1, wave_s=wave_s, block_bytes=0.0) for wave_s in KERNELS_S]
    return OverlapGroup(
        name="g",
        computations=tuple(CompOp(name=f"k{i}", work=kernel) for i, kernel in enumerate(kernels)),
        comms=tuple(
            CommOp(name=f"c{j}", collective=Collective(CollectiveKind.ALL_REDUCE, SIZES[j % 4] * MIB, 8))
            for j in range(num_comms)
        ),
    )


def played(assignment: Assignment, waits: bool, noise: Random | None = None) -> Measurement:
    """In steps of a thousandth: 16 channels fill the link; a channel takes 1 % of a kernel's speed."""
    step, now, i, done, comp_s = 0.001, 0.0, 0, 0.0, 0.0
    took, moved, behind = [0.0] * len(assignment), 0.0, 0
    j, is_moving = 0, not waits
    while i < len(KERNELS_S) or j < len(assignment):
        now += step
        lost = 0.0
        if j < len(assignment):
            took[j] += step
            num_channels = assignment[j].num_channels or 0
            if is_moving or i > behind or i == len(KERNELS_S):
                is_moving, lost = True, 0.01 * num_channels
                moved += step
            if moved >= 0.5 * SIZES[j] * max(1.0, 16 / max(1, num_channels)):
                j, moved, is_moving, behind = j + 1, 0.0, not waits, i
        if i < len(KERNELS_S):
            done, comp_s = done + step * (1 - lost), now
            if done >= KERNELS_S[i]:
                i, done = i + 1, 0.0
    factors = [1 + noise.gauss(0, 0.01) if noise else 1.0 for _ in range(len(took) + 2)]
    return Measurement(
        makespan_s=max(now * factors[0], comp_s * factors[1]),
        comp_s=comp_s * factors[1],
        comm_s=tuple(each * factor for each, factor in zip(took, factors[2:], strict=True)),
    )


def at(*channels: int) -> Assignment:
    return tuple(CommConfig(num_channels=n) for n in channels)


@pytest.mark.parametrize(
    ("lost", "alone", "nearby", "end"),
    [
        ((0.0,), (0.5,), 1.0, 3.0),  # moves from 1 to 1.5, hidden
        ((0.0,), (3.0,), 1.0, 4.0),  # from 1 to 4
        ((0.5,), (3.0,), 1.0, 4.5),  # the second kernel from 1 to 3, half of the third by 4
        ((0.0, 0.0), (0.5, 0.5), 1.0, 3.0),  # the second waits from 1.5 to 2
        ((0.0, 0.0), (1.5, 1.0), 1.0, 4.0),  # from 1 to 2.5; from 3 to 4
        ((0.0,), (1.5,), 2.0, 3.5),  # two seconds next to kernels are one of its own
    ],
)
def test_collectives_begin_where_kernels_end(
    lost: tuple[float, ...], alone: tuple[float, ...], nearby: float, end: float
) -> None:
    kernels = np.ones((3, 1))
    found = makespans(kernels, np.array([lost])[..., None], np.array([alone])[..., None], np.array([nearby]))
    assert found[0, 0] == pytest.approx(end)


def test_every_draw_of_every_assignment_is_played_alone() -> None:
    """Against the plain loop over events, one stream after the other."""
    random = np.random.default_rng(1)
    kernels, slower = random.uniform(0.1, 1, (5, 3)), random.uniform(1, 1.4, 3)
    lost, alone = random.uniform(0, 0.8, (40, 4, 3)), random.uniform(0.01, 1.5, (40, 4, 3))
    found = makespans(kernels, lost, alone, slower)
    for a, d in np.ndindex(40, 3):
        now, i, left = 0.0, 0, float(kernels[0, d])
        for moving_s, share in zip(alone[a, :, d], lost[a, :, d], strict=True):
            if i < 5:
                now, i = now + left, i + 1  # behind the kernel that runs
                left = float(kernels[i, d]) if i < 5 else 0.0
            work = moving_s * slower[d]
            while i < 5 and work > 1e-12:
                step = min(work, left / (1 - share))
                now, work, left = now + step, work - step, left - step * (1 - share)
                if left <= 1e-12:
                    i += 1
                    left = float(kernels[i, d]) if i < 5 else 0.0
            now += work / slower[d]
        now += left + float(kernels[i + 1 :, d].sum()) if i < 5 else 0.0
        assert found[a, d] == pytest.approx(now)


def test_of_measured_times_what_was_waited_for_is_found() -> None:
    """Kernels of 1 s; 1.5 s of which the first kernel took 1; then 0.5 + 0.7; then exposed."""
    found = replay(np.ones(3), np.zeros((1, 3)), np.array([[1.5, 1.2, 2.0]]))
    assert found.moved[0].tolist() == pytest.approx([0.5, 0.7, 1.7])
    assert found.beside[0].tolist() == pytest.approx([0.5, 0.7, 0.0])
    assert found.error[0, 0] < 0.1


def test_what_is_played_kernel_by_kernel_is_predicted_and_how_collectives_start_is_found() -> None:
    for waits in (True, False):
        noise = Random(1)
        asked = [at(8, 8, 8, 8), at(4, 4, 4, 4), at(16, 16, 16, 16), at(2, 8, 8, 16), at(12, 3, 6, 24)]
        told = [(one, played(one, waits, noise)) for one in asked]
        curves = Curves(SETTINGS, told, 0.01, stream=Stream.of(group()))
        assert curves.waits == waits
        unit_s = min(each.makespan_s for _, each in told)
        for one in (at(6, 6, 6, 6), at(8, 4, 8, 16), at(16, 16, 4, 4)):
            expected = float(curves.draws(curves.places([one]))[0, 0]) * unit_s
            assert expected == pytest.approx(played(one, waits).makespan_s, rel=0.06)


def test_where_collectives_wait_the_search_gives_each_its_own_setting() -> None:
    space = ConfigSpace((Subspace(num_channels=CHANNELS),))
    default = at(8, 8, 8, 8)
    problem = GroupProblem(group=group(), spaces=(space,) * 4, default=default)
    tuner, noise, num = OurSearch((problem,)), Random(3), 0
    while (trial := tuner.ask()) is not None:
        tuner.tell(trial, {"g": played(trial.assignments["g"], True, noise)})
        num += 1
    found = played(tuner.recommend()["g"], True).makespan_s
    equal = min(played(at(n, n, n, n), True).makespan_s for n in CHANNELS)
    assert num <= MOST_MEASURED
    assert found <= 1.005 * equal
    assert found < 0.97 * played(default, True).makespan_s


def test_streams_that_are_not_known_or_too_long_are_none() -> None:
    known = group()
    assert Stream.of(known) is not None
    assert Stream.of(group(17)) is None
    held = OverlapGroup(name="g", computations=known.computations, comms=known.comms, starts_after=(0, 1, 1, 2))
    told = Stream.of(held)
    assert told is not None
    assert told.launches == (None,)


def test_who_waits_is_found_from_makespans_and_taken_as_told() -> None:
    """A computation of 10 s; the second collective begins at half of it: the stream ends at 5 + x_2."""
    comm = np.array([[1.0, 7.0], [2.0, 9.0], [1.0, 6.5], [1.5, 8.0]])
    comp, makespan = np.full(4, 10.0), np.maximum(10.0, 5.0 + comm[:, 1])
    found = drawn_starts(comm, comp, makespan, sigma=0.01, gap=0.0, told=None, num=32)
    assert found.shares[1] == pytest.approx(0.5, abs=0.1)
    assert found.end(np.array([1.0, 8.5]), 10.0) == pytest.approx(13.5, rel=0.02)
    told = drawn_starts(comm, comp, makespan, sigma=0.01, gap=0.0, told=np.array([[0.0, 0.5], [0.0, 0.9]]), num=32)
    assert told.shares[1].tolist() == [0.5] * 32
    alone = drawn_starts(comm, comp, np.maximum(10.0, comm.sum(axis=1)), sigma=0.01, gap=0.0, told=None, num=32)
    assert alone.end(np.array([3.0, 9.0]), 10.0) == pytest.approx(12.0, rel=0.02)


def test_a_stream_that_is_told_who_waits_is_played_with_the_wait() -> None:
    """Three kernels of 1 s, as each is one wave on any GPU; a collective that waits for the second."""
    kernels = tuple(
        CompOp(name=f"k{i}", work=Kernel(num_blocks=8, blocks_per_sm=1, wave_s=1.0, block_bytes=1.0)) for i in range(3)
    )
    comms = (CommOp(name="c", collective=Collective(CollectiveKind.ALL_GATHER, 2**20, 4)),)
    stream = Stream.of(OverlapGroup(name="g", computations=kernels, comms=comms, starts_after=(2,)))
    assert stream is not None
    assert stream.told == ((pytest.approx(2 / 3),),)
    settings = [Setting(CommConfig(num_channels=n), n, 512 * KIB) for n in (8, 16)]
    asked = [(at(8), Measurement(makespan_s=4.0, comp_s=3.0, comm_s=(2.0,)))]
    asked.append((at(16), Measurement(makespan_s=3.5, comp_s=3.0, comm_s=(1.5,))))
    curves = Curves(settings, asked, 0.002, stream=stream)
    found = curves.draws(curves.places([at(8), at(16)]))[:, 0] * 3.5
    assert found == pytest.approx([4.0, 3.5], rel=0.02), "at once they would end after 3 s"
