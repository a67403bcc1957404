from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.cost import ContentionModel, Profile
from lagom_overlap.cost.kernels import product_of_time
from lagom_overlap.cost.operators.gemm import wide_tiles
from lagom_overlap.hardware import Cluster, load_gpu, load_preset
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound, Work


def alone_s(model: ContentionModel, work: Work) -> float:
    return model.running_times([model.kernel(work)], []).kernel_s[0]


@pytest.mark.parametrize(
    ("n", "k", "measured_s"),
    [(7680, 2560, 1.434e-3), (2560, 2560, 0.480e-3), (10240, 2560, 1.889e-3), (2560, 10240, 1.813e-3)],
)
def test_the_products_of_a_phi2_layer_take_about_the_measured_times(
    nvlink_model: ContentionModel, n: int, k: int, measured_s: float
) -> None:
    """microsoft/vidur @513ddc1, A40, 4096 tokens; the tile model's mean error is 6 to 8 %."""
    assert alone_s(nvlink_model, Gemm(4096, n, k)) == pytest.approx(measured_s, rel=0.09)


def test_a_product_of_one_full_wave_takes_two_beside_a_single_channel(nvlink_model: ContentionModel) -> None:
    kernel = replace(nvlink_model.kernel(Gemm(42 * 128, 256, 4096)), block_bytes=0.0)
    assert kernel.num_blocks == 84
    alone, beside = (nvlink_model.kernel_seconds(kernel, num_channels=n) for n in (0, 1))
    assert beside == 2 * alone


def test_a_wave_of_tiles_reloads_the_panels_of_its_super_tile(nvlink_model: ContentionModel) -> None:
    """By hand: 84 tiles of 128 x 128 form a square of 1173 elements a side; each wave reads two panels of it."""
    m, n, k = 84 * 128, 84 * 128, 4096
    kernel = nvlink_model.kernel(Gemm(m, n, k))
    assert kernel.num_blocks == 84 * 84
    side = (84 * 128 * 128) ** 0.5
    assert kernel.num_blocks * kernel.block_bytes == pytest.approx(2 * (84 * 2 * side * k + m * n))


def test_a_large_product_runs_near_the_rate_of_the_gpu(nvlink_model: ContentionModel) -> None:
    product = Gemm(16384, 16384, 16384)
    assert product.flops / alone_s(nvlink_model, product) == pytest.approx(115e12, rel=0.03)


def test_single_precision_takes_twice_as_long(nvlink_model: ContentionModel) -> None:
    half, single = (alone_s(nvlink_model, Gemm(8192, 8192, 8192, size)) for size in (2, 4))
    assert single == pytest.approx(2 * half, rel=0.01)


def test_an_elementwise_operator_takes_the_time_of_its_bytes(nvlink_model: ContentionModel) -> None:
    """Vidur, A40: GELU on 168 MB takes .295 ms (569 GB/s)."""
    assert alone_s(nvlink_model, MemoryBound(4096 * 10240 * 4)) == pytest.approx(0.295e-3, rel=0.07)


def test_attention_runs_at_its_share_of_the_rate(nvlink_model: ContentionModel) -> None:
    attention = Attention(batch=2, num_heads=32, seq_len=2048, head_dim=128)
    assert attention.flops / alone_s(nvlink_model, attention) == pytest.approx(0.6 * 115e12, rel=0.02)
    backward = replace(attention, passes=2.5)
    assert alone_s(nvlink_model, backward) == pytest.approx(2.5 * alone_s(nvlink_model, attention), rel=0.02)


def test_attention_too_small_for_the_gpu_leaves_sms_idle(nvlink_model: ContentionModel) -> None:
    """21 blocks occupy a quarter of 84 SMs: as long as 84 blocks, where arithmetic bounds them."""
    small, full = (
        replace(
            nvlink_model.kernel(Attention(batch=1, num_heads=heads, seq_len=128, head_dim=128, passes=100.0)),
            block_bytes=0.0,
        )
        for heads in (21, 84)
    )
    assert (small.num_blocks, full.num_blocks) == (21, 84)
    assert small.wave_s > 0.8 * full.wave_s


def test_a_kernel_passes_through(nvlink_model: ContentionModel) -> None:
    kernel = Kernel(num_blocks=100, blocks_per_sm=2, wave_s=1e-4, block_bytes=1e6)
    assert nvlink_model.kernel(kernel) is kernel


@given(
    work=st.one_of(
        st.builds(Gemm, st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000)),
        st.builds(MemoryBound, st.integers(1, 10**10)),
    ),
    norm=st.sampled_from([1.0, 4.0, inf]),
    quantisation=st.sampled_from([0.0, 1.0]),
)
def test_no_kernel_beats_the_memory_or_the_arithmetic(
    nvlink: Cluster, plausible: Profile, work: Work, norm: float, quantisation: float
) -> None:
    model = ContentionModel(nvlink, replace(plausible, overlap_norm=norm, quantisation=quantisation))
    kernel = model.kernel(work)
    time_s = model.running_times([kernel], []).kernel_s[0]
    assert time_s * (1 + 1e-9) >= kernel.num_blocks * kernel.block_bytes / 600e9
    if isinstance(work, Gemm):
        assert time_s * (1 + 1e-9) >= work.flops / (84 * 1.409e12)  # the fastest tile's rate on every SM
        assert (
            kernel.num_blocks * kernel.block_bytes >= 2 * (work.m * work.k + work.n * work.k + work.m * work.n) * 0.999
        )


@pytest.mark.parametrize("grid", [None, 240, 304])
@pytest.mark.parametrize("num_blocks", [196, 304, 1184])
def test_a_product_of_known_time_takes_it_alone(plausible: Profile, num_blocks: int, grid: int | None) -> None:
    model = ContentionModel(load_preset("mi300x"), plausible)
    kernel = product_of_time(
        model.cluster.gpu, plausible, alone_s=1.7e-3, flops=2 * 8192.0**3, num_blocks=num_blocks, grid=grid
    )
    assert model.kernel_seconds(kernel) == pytest.approx(1.7e-3, rel=1e-9)


def test_a_static_grid_of_every_cu_takes_twice_as_long_beside_one_channel(plausible: Profile) -> None:
    """Where its CUs are all that bounds it; what the GPU shares lets the few blocks of the second pass run faster."""
    model = ContentionModel(load_preset("mi350x"), plausible)
    gpu, own = model.cluster.gpu, plausible.for_gpu(load_gpu("mi350x"))
    assert own.sm_flops is not None
    bound = product_of_time(gpu, plausible, alone_s=1e-3, flops=256 * own.sm_flops * 1e-3, num_blocks=256)
    shared = product_of_time(gpu, plausible, alone_s=1e-3, flops=128 * own.sm_flops * 1e-3, num_blocks=256)
    assert model.kernel_seconds(bound, num_channels=1) == pytest.approx(2e-3 * own.overlap_factor)
    assert 1.3e-3 < model.kernel_seconds(shared, num_channels=1) < 1.7e-3


def test_a_product_needs_the_rate_of_an_sm(plausible: Profile) -> None:
    with pytest.raises(ValueError, match="no sm_flops for A100"):
        product_of_time(load_preset("a100_dgx").gpu, plausible, alone_s=1e-3, flops=1e12, num_blocks=1)


@pytest.mark.parametrize(("size", "tiles"), [(3584, 294), (3840, 300), (4096, 304), (8704, 1156)])
def test_hipblaslt_s_grids_are_those_that_its_users_print(size: int, tiles: int) -> None:
    """ROCm/tritonBLAS @70f74844, docs/overlap-analysis.md; others than printed for 4352, 8192 and 8448."""
    assert wide_tiles(size, size, 304) == tiles
