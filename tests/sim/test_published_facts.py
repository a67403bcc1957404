"""What the Lagom paper reports, where a physical model gives it; tolerances from specification section 2."""

from dataclasses import replace
from statistics import median

import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import Collectives, ContentionModel, load_profile
from lagom_overlap.hardware import Cluster, Link, LinkKind
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, OverlapGroup


def times(simulator: GroupSimulator, **knobs: int) -> tuple[float, float]:
    """x in ms and the slowdown of the computation in per cent."""
    result = simulator.evaluate((CommConfig(**knobs),))
    return result.comm_s[0] * 1e3, 100 * (result.comp_s / simulator.comp_alone_s - 1)


def test_figure_3b_channels_at_16_kib(ffn: OverlapGroup, model: ContentionModel) -> None:
    """Fact (c1), to the digits of the specification's table: ceilings, PCIe, 128 threads."""
    simulator = GroupSimulator(ffn, model)
    rows = [
        times(simulator, num_channels=n, chunk_bytes=16 * KIB, num_threads=128) for n in (1, 2, 4, 8, 12, 16, 24, 32)
    ]
    assert [x for x, _ in rows] == pytest.approx([23.0, 11.6, 5.9, 3.2, 2.65, 2.56, 2.55, 2.55], rel=0.01)
    assert [slower for _, slower in rows] == pytest.approx([0, 0, 1, 25, 25, 26, 29, 42], abs=1.0)


def test_figure_3b_without_ceilings(ffn: OverlapGroup, model: ContentionModel) -> None:
    fluid = replace(model, profile=replace(model.profile, quantisation=0.0))
    refitted = tuple(
        replace(op, work=replace(op.work, wave_s=op.work.wave_s * waves / (op.work.num_blocks / 84 / tb)))
        for op, waves, tb in zip(ffn.computations, (8, 8, 2), (1, 16, 1), strict=True)
    )
    simulator = GroupSimulator(replace(ffn, computations=refitted), fluid)
    slower = [
        times(simulator, num_channels=n, chunk_bytes=16 * KIB, num_threads=128)[1] for n in (1, 2, 4, 8, 12, 16, 24, 32)
    ]
    assert slower == pytest.approx([1, 2, 4, 9, 14, 19, 27, 36], abs=1.0)


def test_figure_3c_the_chunk_saves_communication_but_hardly_costs_computation(
    ffn: OverlapGroup, model: ContentionModel
) -> None:
    """Fact (c2) is weak in this model: C 8K -> 2M at NC = 4 gives x 10.8 -> 2.6 ms, Y +0 -> +4 %."""
    simulator = GroupSimulator(ffn, model)
    small, large = (times(simulator, num_channels=4, chunk_bytes=c, num_threads=128) for c in (8 * KIB, 2 * MIB))
    assert (small[0], large[0]) == pytest.approx((10.8, 2.6), rel=0.01)
    assert (small[1], large[1]) == pytest.approx((0, 4), abs=1.0)


def test_threads_are_negligible(ffn: OverlapGroup, model: ContentionModel) -> None:
    """Fact (c3): NT 64..512 gives x 3.04 -> 2.80 ms and the same computation."""
    simulator = GroupSimulator(ffn, model)
    few, many = (times(simulator, num_channels=4, chunk_bytes=64 * KIB, num_threads=n) for n in (64, 512))
    assert (few[0], many[0]) == pytest.approx((3.04, 2.80), rel=0.01)
    assert few[1] == pytest.approx(many[1], abs=0.5)


def covered(m: int, hidden: int, inner: int, num_comms: int) -> OverlapGroup:
    works = (Gemm(m, inner, hidden), MemoryBound(m * inner * 4), Gemm(m, hidden, inner))
    collective = Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 8)
    return OverlapGroup(
        name="ffn",
        computations=tuple(CompOp(name=f"comp{i}", work=work) for i, work in enumerate(works)),
        comms=tuple(CommOp(name=f"ar{j}", collective=collective) for j in range(num_comms)),
    )


def test_from_16_to_32_channels_communication_stays_and_computation_does_not(model: ContentionModel) -> None:
    """Fact (a), published 30.2 %, by shape, communication covering all computation.

    The specification's fixed tiles give 1.115..1.298 (p = 1, ceilings); the fastest tiles here 1.07..1.24.
    """
    ratios, slower = [], []
    for m in (1024, 2048, 4096, 8192):
        for hidden, inner in ((2560, 10240), (4096, 16384), (4096, 14336), (5120, 20480)):
            group = covered(m, hidden, inner, 40)
            simulator = GroupSimulator(group, model)
            few, many = (
                simulator.evaluate((CommConfig(num_channels=n, chunk_bytes=128 * KIB),) * 40) for n in (16, 32)
            )
            ratios.append(many.comp_s / few.comp_s)
            slower.append(many.comp_s / simulator.comp_alone_s)
            assert sum(many.comm_s) > many.comp_s
            assert many.comm_s[0] == pytest.approx(few.comm_s[0], rel=0.02)
    assert min(ratios) > 1.05
    assert max(ratios) < 1.31
    assert 1.15 < median(ratios) < 1.25
    assert 1.29 <= median(slower) <= 1.63  # fact (b): NC = 32 slows by 29..63 %


def test_without_ceilings_and_with_hidden_transfers_the_published_ratio_appears(model: ContentionModel) -> None:
    """Fact (a): p = 4 and fluid waves give 1.289..1.299 by shape; published 1.302."""
    hidden = replace(model, profile=replace(model.profile, quantisation=0.0, overlap_norm=4.0))
    for m, width, inner in ((2048, 2560, 10240), (4096, 4096, 14336), (8192, 5120, 20480)):
        simulator = GroupSimulator(covered(m, width, inner, 40), hidden)
        few, many = (simulator.evaluate((CommConfig(num_channels=n, chunk_bytes=128 * KIB),) * 40) for n in (16, 32))
        assert many.comp_s / few.comp_s == pytest.approx(1.295, abs=0.015)


def phi2_layer(num_ranks: int) -> OverlapGroup:
    """Four Phi-2 layers forward at 4096 tokens during the all-gathers of the next layers' bf16 weights."""
    layer = (
        MemoryBound(4096 * 2560 * 4),
        Gemm(4096, 7680, 2560),
        Gemm(4096, 2560, 2560),
        MemoryBound(4096 * 2560 * 6),
        Gemm(4096, 10240, 2560),
        MemoryBound(4096 * 10240 * 4),
        Gemm(4096, 2560, 10240),
    )
    weights = Collective(CollectiveKind.ALL_GATHER, 12 * 2560**2 * 2, num_ranks)
    return OverlapGroup(
        name="phi2",
        computations=tuple(CompOp(name=f"comp{i}", work=work) for i, work in enumerate(layer * 4)),
        comms=tuple(CommOp(name=f"ag{j}", collective=weights) for j in range(4)),
        starts_after=(0, 7, 14, 21),
    )


@pytest.mark.parametrize("profile", ["plausible", "paper_scale"])
def test_the_published_configurations_order_as_published(pcie: Cluster, profile: str) -> None:
    """Figure 8, pattern 1, by direction only: NC = 61 loses to the default, NC = 2 with 684 KiB slices beats it.

    Published 0.87x and 1.35x. Plausible physics reach the first, not the second (specification, facts d1 and d2).
    """
    link = Link(kind=LinkKind.NVLINK, bytes_per_s=44e9, hop_s=1e-6)
    paper = replace(load_profile(profile), collectives=Collectives.PAPER)
    model = ContentionModel(replace(pcie, intra=link), paper)
    simulator = GroupSimulator(phi2_layer(8), model)

    def z(num_channels: int, chunk_bytes: int) -> float:
        config = CommConfig(algorithm=Algorithm.RING, num_channels=num_channels, chunk_bytes=chunk_bytes)
        return simulator.evaluate((config,) * 4).makespan_s

    default = z(8, 2 * MIB)
    assert 0.6 < default / z(61, 1024 * KIB) < 1.0
    assert 1.0 < default / z(2, 1368 * KIB) < 1.45
