"""Data files of GPUs and frameworks: every preset's GPU has one, and what is derived says so."""

from dataclasses import replace

import pytest

from lagom_overlap.cost.operators import OperatorTimes, load_framework, load_operators
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload import Attention, Gemm, MemoryBound


@pytest.mark.parametrize(
    ("preset", "name"), [("a100_dgx", "A100"), ("a40_pcie", "A40"), ("h100_dgx", "H100"), ("h200", "H200")]
)
def test_every_gpu_of_a_preset_finds_its_own_file(preset: str, name: str) -> None:
    assert load_operators(load_preset(preset).gpu).name == name


def test_a_gpu_without_a_file_follows_the_a100_by_its_rates_and_says_so() -> None:
    known = load_preset("a100_dgx").gpu
    unknown = replace(known, name="X1", gemm_flops=2 * known.gemm_flops, hbm_bytes_per_s=3 * known.hbm_bytes_per_s)
    base, derived = load_operators(known), load_operators(unknown)
    assert derived.fitted_on.startswith("nothing: X1 has no file")
    assert derived.gemm.tile_flops[0] == pytest.approx(2 * base.gemm.tile_flops[0])
    assert derived.stream_bytes_per_s == pytest.approx(3 * base.stream_bytes_per_s)


def test_an_unknown_framework_names_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown framework 'megatrn'.*did you mean 'megatron'"):
        load_framework("megatrn")


def test_memory_bound_work_takes_its_bytes_and_a_share_where_the_framework_is_slow() -> None:
    gpu = load_preset("a100_dgx").gpu
    constants = load_operators(gpu)
    work = MemoryBound(10**9)
    fast, slow = OperatorTimes(gpu, constants), OperatorTimes(gpu, constants, memory_efficiency=0.5)
    moving = 1e9 / constants.stream_bytes_per_s
    assert fast.seconds(work) == pytest.approx(constants.touch_s + moving)
    assert slow.seconds(work) == pytest.approx(constants.touch_s + 2 * moving)
    assert fast.seconds(replace(work, num_launches=3)) == pytest.approx(3 * constants.touch_s + moving)
    assert fast.seconds(replace(work, num_launches=0)) == pytest.approx(moving)  # a part of another kernel


@pytest.mark.parametrize(
    "work",
    [
        Gemm(4096, 4096, 4096),
        MemoryBound(10**9),
        Attention(batch=8, num_heads=32, seq_len=2048, head_dim=128),
    ],
)
def test_the_contention_model_runs_a_step_alone_in_the_same_time(work: Gemm | MemoryBound | Attention) -> None:
    from lagom_overlap.cost import ContentionModel, load_profile

    cluster, profile = load_preset("a100_dgx"), load_profile("plausible")
    times = OperatorTimes(cluster.gpu, load_operators(cluster.gpu))
    kernel = times.kernel(work, profile)
    alone = ContentionModel(cluster, profile).running_times([kernel], []).kernel_s[0]
    # Its traffic at the preset's copy bandwidth may take a little longer than the fitted time allows.
    assert alone == pytest.approx(times.seconds(work), rel=0.05)


@pytest.mark.parametrize(("preset", "measured"), [("gb200", 0.66)])
def test_narrow_heads_are_held_back_by_exponentials(preset: str, measured: float) -> None:
    # cuDNN 9.19 on a GB200, 4,096 tokens, 64 heads, forward and backward: 0.696 ms for heads of 64 columns and a window
    # of 1,024 (9 of 32 tiles in each direction), 1,184 TFLOP/s for causal heads of 128.
    constants = load_operators(load_preset(preset).gpu)
    assert constants.attention_rate(128) == constants.attention_rate(192) == constants.attention_flops
    share = constants.attention_rate(64) / constants.attention_flops
    assert share == pytest.approx(measured, rel=0.15)
    h100 = load_operators(load_preset("h100_dgx").gpu)
    assert share < h100.attention_rate(64) / h100.attention_flops < 1.0  # half the products per exponential


@pytest.mark.parametrize(("preset", "forward_ms", "backward_ms"), [("gb200", 0.210, 0.465), ("gb300", 0.202, 0.442)])
def test_a_narrow_window_is_no_faster_than_kernels_make_it(preset: str, forward_ms: float, backward_ms: float) -> None:
    # cuDNN 9.22, 128 heads of 64, 4,096 tokens, a window of 128 (NVIDIA/cudnn-frontend @fb682ce): two tiles of keys, of
    # which the products alone would take a third of that. Rates in training are lower than in the benchmark.
    gpu = load_preset(preset).gpu
    times = OperatorTimes(gpu, load_operators(gpu))
    of_tiles = 2 * 256 / 4096
    whole = Attention(batch=1, num_heads=128, seq_len=4096, head_dim=64)
    narrow = [replace(whole, window=128, passes=passes * of_tiles) for passes in (1.0, 2.5)]
    found = [times.seconds(work) for work in narrow]
    assert found == pytest.approx([forward_ms / 1e3, backward_ms / 1e3], rel=0.35)
    assert sum(found) == pytest.approx((forward_ms + backward_ms) / 1e3, rel=0.2)
    wide = replace(whole, window=1024, passes=2 * 9 * 128 / 4096)
    assert found[0] == times.seconds(wide)
    hopper = load_preset("h100_dgx").gpu  # of which no such time is known
    seconds = OperatorTimes(hopper, load_operators(hopper)).seconds
    assert seconds(narrow[0]) < 0.3 * seconds(wide)


@pytest.mark.parametrize(
    ("preset", "head_dim", "gain"), [("gb200", 128, 1.0), ("gb200", 160, 1.3), ("gb300", 160, 1.4)]
)
def test_attention_in_mxfp8_gains_where_heads_are_wide(preset: str, head_dim: int, gain: float) -> None:
    constants = load_operators(load_preset(preset).gpu)
    found = constants.attention_rate(head_dim, narrow=True) / constants.attention_rate(head_dim)
    assert found == pytest.approx(gain, abs=0.01)


def test_products_of_two_bytes_stay_below_what_was_measured_of_them_alone() -> None:
    # cuBLAS on a GB300, 8192 x 8192 x 8192 in BF16: 1.717 PFLOP/s (facebookexperimental/triton, pull 740).
    gpu = load_preset("gb300").gpu
    constants = load_operators(gpu)
    seconds = OperatorTimes(gpu, constants.in_training()).seconds(Gemm(8192, 8192, 8192))
    assert 2 * 8192**3 / seconds == pytest.approx(1.717e15, rel=0.05)
    narrow = OperatorTimes(gpu, constants.in_training()).seconds(Gemm(8192, 8192, 8192, 1, result_bytes=2))
    assert 2 * 8192**3 / narrow > 1.9 * 1.757e15
    assert load_operators(load_preset("gb200").gpu).wide_gemm == load_operators(load_preset("gb200").gpu).gemm


@pytest.mark.parametrize(("preset", "gain"), [("gb200", 4.0), ("gb300", 6.0)])
def test_half_a_byte_multiplies_at_the_data_sheets_rate(preset: str, gain: float) -> None:
    # Dense PFLOP/s in BF16 and FP4: GB200 2.5 and 10, GB300 2.5 and 15.
    gpu = load_preset(preset).gpu
    times = OperatorTimes(gpu, load_operators(gpu))
    wide, packed = Gemm(16384, 16384, 16384), Gemm(16384, 16384, 16384, 1, result_bytes=2, packed=2)
    assert times.seconds(wide) / times.seconds(packed) == pytest.approx(gain, rel=0.2)
