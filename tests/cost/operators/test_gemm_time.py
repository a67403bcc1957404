"""The time of a product against hand-worked cases and published measurements."""

from dataclasses import replace
from math import inf

import pytest

from lagom_overlap.cost.operators import OperatorTimes, load_operators
from lagom_overlap.cost.operators.gemm import GemmConstants, gemm_time
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload import Gemm

# 100 SMs at 1 TFLOP/s each for every tile, so fast a memory that it does not count, no overheads to speak of.
BARE = GemmConstants(
    tile_flops=(1e12, 1e12, 1e12),
    launch_s=1e-12,
    split_s=1.0,
    bytes_per_s=1e30,
    norm=10.0,
    quantisation=1.0,
    l2_share=1e-9,
    l2_speedup=1.0,
)


def alone_s(m: int, n: int, k: int, constants: GemmConstants = BARE, batch: int = 1) -> float:
    time = gemm_time((m, n, k), batch=batch, num_sms=100, l2_bytes=1, constants=constants)
    return time.alone_s


def test_whole_waves_of_the_best_tile_take_flops_over_rate() -> None:
    # 12800 x 1280: 1000 tiles of 128 x 128 are ten waves of 100.
    assert alone_s(12800, 1280, 1024) == pytest.approx(2 * 12800 * 1280 * 1024 / 100e12)


def test_one_tile_more_costs_a_wave_of_the_smallest_tile_that_takes_it() -> None:
    # One row more: 101 x 10 tiles. In 64 x 64 tiles 201 x 20 = 4020 are 41 waves of a quarter's work: 10.25 waves.
    whole = 2 * 128 * 128 * 1024 / 1e12
    assert alone_s(12801, 1280, 1024) == pytest.approx(41 * whole / 4)


def test_without_quantisation_time_is_proportional_to_tiles() -> None:
    fluid = replace(BARE, quantisation=0.0)
    assert alone_s(12800 + 128, 1280, 1024, fluid) == pytest.approx(1.01 * alone_s(12800, 1280, 1024, fluid))


def test_a_deep_narrow_product_is_split_where_splitting_is_cheap() -> None:
    # Four tiles of 64 x 64 on 100 SMs: split eight ways, 32 of them work.
    cheap = replace(BARE, split_s=1e-12)
    unsplit, split = alone_s(128, 128, 65536), alone_s(128, 128, 65536, cheap)
    assert split == pytest.approx(unsplit / 8, rel=1e-3)


def test_a_small_batch_is_bound_by_reading_the_weights() -> None:
    slow = replace(BARE, bytes_per_s=1e12)
    num_bytes = 2 * (8 * 4096 + 4096 * 4096 + 8 * 4096)
    assert alone_s(8, 4096, 4096, slow) == pytest.approx(num_bytes / 1e12, rel=0.1)


def test_what_the_l2_holds_is_read_faster() -> None:
    constants = replace(BARE, bytes_per_s=1e11, l2_speedup=4.0, l2_share=0.5)
    cold = gemm_time((8, 4096, 4096), num_sms=100, l2_bytes=1, constants=constants)
    warm = gemm_time((8, 4096, 4096), num_sms=100, l2_bytes=1 << 30, constants=constants)
    assert warm.alone_s < 0.5 * cold.alone_s


def test_a_batch_of_products_is_one_grid() -> None:
    assert alone_s(1280, 1280, 64, batch=10) == pytest.approx(alone_s(12800, 1280, 64))


@pytest.mark.parametrize(
    ("gpu", "m", "n", "k", "measured_us"),
    [
        # microsoft/vidur @513ddc1, Llama-2-7B at tensor parallelism 1: not the model that the constants were fitted on.
        ("a100_dgx", 2016, 12288, 4096, 980.0),
        ("a100_dgx", 3488, 22016, 4096, 2946.5),
        ("a40_nvlink", 2720, 4096, 11008, 2164.0),
        ("a40_nvlink", 3488, 12288, 4096, 3189.5),
    ],
)
def test_products_of_another_model_are_near_their_measured_times(
    gpu: str, m: int, n: int, k: int, measured_us: float
) -> None:
    machine = load_preset(gpu).gpu
    times = OperatorTimes(machine, load_operators(machine))
    assert times.seconds(Gemm(m, n, k)) * 1e6 == pytest.approx(measured_us, rel=0.08)
    assert times.seconds(Gemm(m, n, k, batch=2)) <= 2 * times.seconds(Gemm(m, n, k))


def test_constants_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gemm: launch_s is -1\.0, must be positive and finite"):
        replace(BARE, launch_s=-1.0)
    with pytest.raises(ValueError, match="norm is"):
        replace(BARE, norm=0.5)


def test_a_product_that_adds_to_an_fp32_buffer_moves_eight_bytes_per_element_of_its_result() -> None:
    # Bound by memory alone: the operands once in 2 bytes, the result in 8 (read and written) in place of 2 (written).
    slow = replace(BARE, bytes_per_s=1e9, l2_speedup=1e15)
    shape, shared = (256, 512, 128), {"num_sms": 100, "l2_bytes": 1, "constants": slow}
    plain = gemm_time(shape, **shared)  # type: ignore[arg-type]
    adding = gemm_time(shape, result_bytes=8, **shared)  # type: ignore[arg-type]
    operands = 2 * (256 * 128 + 512 * 128)
    assert plain.alone_s == pytest.approx((operands + 2 * 256 * 512) / 1e9, rel=1e-2)
    assert adding.alone_s == pytest.approx((operands + 8 * 256 * 512) / 1e9, rel=1e-2)
    assert adding.total_bytes - plain.total_bytes == 6 * 256 * 512


def test_a_scans_products_take_what_an_sm_does_in_them() -> None:
    gpu = load_preset("h200").gpu
    constants = load_operators(gpu)
    scan = Gemm(256, 64, 384, batch=4096)
    held = OperatorTimes(gpu, replace(constants, chunk_flops=0.1e12))
    expected_s = 2 * 256 * 64 * 384 * 4096 / (0.1e12 * 132)
    assert held.seconds(replace(scan, chunked=True)) == pytest.approx(expected_s, rel=0.01)
    free = OperatorTimes(gpu, replace(constants, chunk_flops=inf))
    assert free.seconds(replace(scan, chunked=True)) == held.seconds(scan)
