"""Data files of GPUs and frameworks: every preset's GPU has one, and what is derived says so."""

from dataclasses import replace

import pytest

from lagom_overlap.cost.operators import (
    FrameworkConstants,
    OperatorConstants,
    OperatorTimes,
    load_framework,
    load_operators,
)
from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload import Attention, Gemm, MemoryBound
from lagom_overlap.workload.parallel import AttentionKernel


def framework_of(*kernels: str) -> FrameworkConstants:
    """A framework that runs these kernels of attention."""
    return replace(load_framework("megatron"), attention_kernels=tuple(map(AttentionKernel, kernels)))


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
    for kernels in ((), ("flash_attention_2",)):
        rates = [constants.running(framework_of(*kernels)).attention_rate(128, 4096) for constants in (derived, base)]
        assert rates[0] == pytest.approx(2 * rates[1])


def test_an_unknown_framework_names_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown framework 'megatrn'.*did you mean 'megatron'"):
        load_framework("megatrn")


def test_memory_bound_work_takes_its_bytes_and_a_share_where_the_framework_is_slow() -> None:
    gpu = load_preset("a100_dgx").gpu
    constants = load_operators(gpu)
    work = MemoryBound(10**9)
    half = replace(load_framework("megatron"), memory_efficiency=0.5)
    fast, slow = OperatorTimes(gpu, constants), OperatorTimes(gpu, constants.running(half))
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


PUBLISHED = (
    # GPU, kernel, pass, TFLOP/s by causal length with heads of 128 columns: what the authors' own benchmarks print.
    # Dao-AILab/flash-attention @0251105a, assets/flash2_h100_fwd_bwd_benchmark.png, flash2_a100_fwd_bwd_benchmark.png.
    ("h100_dgx", "flash_attention_2", "both", {512: 163, 2048: 265, 4096: 294, 16384: 328}),
    ("a100_dgx", "flash_attention_2", "both", {512: 99, 2048: 155, 4096: 173, 16384: 189}),
    # NVIDIA/cudnn-frontend @61100c8, benchmark/benchmark_results.csv: PyTorch's kernel on an H200.
    ("h200", "sdpa_flash", "forward", {4096: 296.5, 16384: 327.2, 65536: 338.9}),
    ("h200", "sdpa_flash", "backward", {4096: 245.2, 16384: 305.2, 65536: 324.0}),
    # The same @3929da2e, benchmark/sdpa_benchmark_training/results: cuDNN 9.19 on an H200, 9.22 on GB200 and GB300.
    ("h200", "cudnn", "forward", {2048: 484, 8192: 644, 32768: 688}),
    ("h200", "cudnn", "backward", {2048: 370, 8192: 541, 32768: 581}),
    ("gb200", "cudnn", "forward", {2048: 1097, 8192: 1574, 32768: 1622}),
    ("gb200", "cudnn", "backward", {2048: 885, 8192: 1332, 32768: 1226}),
    ("gb300", "cudnn", "forward", {2048: 1373, 8192: 1856, 32768: 1953}),
    ("gb300", "cudnn", "backward", {2048: 967, 8192: 1435, 32768: 1490}),
)


def attention_s(operators: OperatorConstants, work: Attention) -> float:
    """Without the launch, which the benchmarks' kernels hide."""
    gpu = load_preset("h100_dgx").gpu
    return OperatorTimes(gpu, operators).seconds(work) - operators.gemm.launch_s


def causal(length: int, *, backward: bool) -> Attention:
    # Enough heads for any GPU's SMs at 512 tokens.
    passes = 2.5 if backward else 1.0
    return Attention(batch=8, num_heads=32, seq_len=length, head_dim=128, passes=passes, backward=backward)


@pytest.mark.parametrize(("preset", "kernel", "which", "table"), PUBLISHED)
def test_attention_reaches_what_its_authors_measured(
    preset: str, kernel: str, which: str, table: dict[int, float]
) -> None:
    operators = load_operators(load_preset(preset).gpu).running(framework_of(kernel))
    works = {"forward": (False,), "backward": (True,), "both": (False, True)}[which]
    for length, tflops in table.items():
        calls = [causal(length, backward=backward) for backward in works]
        reached = sum(call.flops for call in calls) / sum(attention_s(operators, call) for call in calls)
        # The last row of cuDNN on Blackwell is slower than the one before: its clock falls. Elsewhere 5 %.
        assert reached / 1e12 == pytest.approx(tflops, rel=0.11 if "gb" in preset else 0.05), (length, reached)


def test_a_window_has_the_rate_of_a_short_sequence() -> None:
    # cuDNN 9.19 on an H200, heads of 64, 4,096 tokens, a window of 1,024: 336 and 289 TFLOP/s of its 3,670,016 pairs of
    # a query and a key (NVIDIA/cudnn-frontend @3929da2e, results/h200_919_only_cudnn); kernels run 9 whole tiles.
    operators = load_operators(load_preset("h200").gpu).running(framework_of("cudnn"))
    share = 2 * 9 * 128 / 4096
    for backward, tflops in ((False, 336), (True, 289)):
        passes = 2.5 if backward else 1.0
        work = Attention(
            batch=2,
            num_heads=64,
            seq_len=4096,
            head_dim=64,
            passes=passes * share,
            backward=backward,
            reach=4096 * share,
        )
        useful = 4.0 * 2 * 64 * 64 * passes * (4096 * 1024 - 1024**2 / 2)
        assert useful / attention_s(operators, work) / 1e12 == pytest.approx(tflops, rel=0.16)


def test_the_framework_chooses_among_the_kernels_that_a_gpu_has() -> None:
    def chosen(framework: str, preset: str) -> AttentionKernel | None:
        operators = load_operators(load_preset(preset).gpu)
        return operators.running(load_framework(framework)).attention_kernel

    # Transformer Engine takes cuDNN from compute capability 9.0 on; PyTorch FlashAttention, torchtitan cuDNN on 10.0.
    assert chosen("megatron", "h100_dgx") is AttentionKernel.CUDNN
    assert chosen("megatron", "a100_dgx") is AttentionKernel.FLASH_2
    assert chosen("torchtitan_compiled", "h100_dgx") is AttentionKernel.SDPA_FLASH
    assert chosen("torchtitan_compiled", "b200") is AttentionKernel.CUDNN
    assert chosen("megatron", "a40_pcie") is None
    # Megatron-DeepSpeed calls the flash-attn package, and nothing else.
    assert chosen("megatron_deepspeed", "h100_dgx") is AttentionKernel.FLASH_2
    h100 = load_operators(load_preset("h100_dgx").gpu)
    megatron = load_framework("megatron")
    assert h100.running(megatron, AttentionKernel.FLASH_2).attention_kernel is AttentionKernel.FLASH_2
    with pytest.raises(JobError, match=r"parallel.attention_kernel is 'cudnn', whose rates on A100 are not known"):
        load_operators(load_preset("a100_dgx").gpu).running(megatron, AttentionKernel.CUDNN)
    with pytest.raises(
        JobError, match=r"is 'sdpa_flash', which framework megatron does not run; it runs: cudnn, flash"
    ):
        h100.running(megatron, AttentionKernel.SDPA_FLASH)


def test_an_attention_without_a_kernel_has_one_rate() -> None:
    operators = load_operators(load_preset("h100_dgx").gpu)
    assert operators.attention_rate(128, 512) == operators.attention_rate(128, 65536) == operators.attention_flops


def test_steps_keep_a_share_of_the_published_rates() -> None:
    operators = load_operators(load_preset("b200").gpu).running(framework_of("cudnn"))
    in_step = operators.in_training()
    ratio = in_step.attention_rate(128, 8192) / operators.attention_rate(128, 8192)
    assert ratio == pytest.approx(operators.attention_share)
    assert in_step.in_training().attention_rate(128, 8192) == in_step.attention_rate(128, 8192)


@pytest.mark.parametrize(("field", "value"), [("forward_flops", 0.0), ("backward_half", -1.0)])
def test_rates_of_attention_are_refused_where_they_mean_nothing(field: str, value: float) -> None:
    rates = load_operators(load_preset("h100_dgx").gpu).attention[0]
    with pytest.raises(ValueError, match=field):
        replace(rates, **{field: value})


@pytest.mark.parametrize(("preset", "forward_ms", "backward_ms"), [("gb200", 0.210, 0.465), ("gb300", 0.202, 0.442)])
def test_a_narrow_window_is_no_faster_than_kernels_make_it(preset: str, forward_ms: float, backward_ms: float) -> None:
    # cuDNN 9.22, 128 heads of 64, 4,096 tokens, a window of 128 (NVIDIA/cudnn-frontend @fb682ce): two tiles of keys,
    # whose products alone would take half of that.
    operators = load_operators(load_preset(preset).gpu).running(framework_of("cudnn"))
    share = 2 * 256 / 4096
    whole = Attention(batch=1, num_heads=128, seq_len=4096, head_dim=64)
    forward = attention_s(operators, replace(whole, passes=share, reach=4096 * share, window=128))
    backward = attention_s(operators, replace(whole, passes=2.5 * share, reach=4096 * share, window=128, backward=True))
    assert backward == pytest.approx(backward_ms / 1e3, rel=0.2)
    assert forward + backward == pytest.approx((forward_ms + backward_ms) / 1e3, rel=0.12)


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
