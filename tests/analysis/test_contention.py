import numpy as np
import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.collectives import key_of
from lagom_overlap.analysis.contention import Contention, contention_of
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.analysis.measures import occupation_of
from lagom_overlap.report.analyze.words import _too_few
from lagom_overlap.trace.gpu_trace import EventRole

COMM, COMP = EventRole.COMM, EventRole.COMPUTE


def found_in(trace) -> Contention:
    return contention_of([trace], [occupation_of(trace.events)])


def runs(durations, *, beside=(), gap=1_000_000):
    """One run of a GEMM every `gap`; those in `during` with a collective around them."""
    rows, names = [], []
    for index, length in enumerate(durations):
        at = index * gap
        rows.append((COMP, at, at + length))
        names.append("gemm_kernel")
        if index in beside:
            rows.append((COMM, at - 10, at + length + 10))
            names.append("ncclDevKernel_AllReduce")
    return rows, names


def test_twins_give_the_slowdown_that_was_put_in():
    # Base 10 us (median of 9, 10, 11), two runs of 15 us and 13 us during: 8 us stretched, 28 / 20.
    rows, names = runs([9_000, 10_000, 11_000, 15_000, 13_000], beside=(3, 4))
    found = found_in(gpu_trace(rows, names=names))
    assert found.total.stretched_ns == 8_000
    assert found.total.slowdown == pytest.approx(1.4)
    assert (found.total.num_overlapped, found.total.num_alone) == (2, 3)
    assert found.total.low is None
    assert found.of_rank == (8_000,)
    assert (found.covered_ns, found.uncovered_ns) == (28_000, 0)


def test_a_kernel_without_three_runs_alone_is_said_to_be_uncovered():
    rows, names = runs([10_000, 10_000, 15_000], beside=(2,))
    found = found_in(gpu_trace(rows, names=names))
    assert found.total.num_overlapped == 0
    assert (found.covered_ns, found.uncovered_ns) == (0, 15_000)


def test_another_grid_or_shape_is_another_kernel():
    rows, names = runs([10_000] * 6 + [20_000] * 2, beside=(6, 7))
    alike = found_in(gpu_trace(rows, names=names))
    assert alike.total.num_overlapped == 2
    grids = [(64, 1, 1)] * 6 + [(128, 1, 1)] * 4
    assert found_in(gpu_trace(rows, names=names, grids=grids)).total.num_overlapped == 0
    shapes = [0] * 6 + [1] * 4
    assert found_in(gpu_trace(rows, names=names, shapes=shapes)).total.num_overlapped == 0


def test_blame_is_shared_by_the_time_that_each_collective_lies_beside():
    rows = [(COMP, n * 100_000, n * 100_000 + 10_000) for n in range(3)]
    rows += [(COMP, 500_000, 516_000), (COMM, 490_000, 504_000), (COMM, 504_000, 530_000)]
    trace = gpu_trace(rows, calls=[{"num_bytes": 1}, {"num_bytes": 2}])
    found = found_in(trace)
    keys = {call.num_bytes: key_of(call) for call in trace.calls}
    # 6 us of stretch: 4 us of the run lie during the first, 12 us during the second.
    assert found.blame == {keys[2]: pytest.approx(4_500), keys[1]: pytest.approx(1_500)}
    assert sum(found.blame.values()) == pytest.approx(sum(found.of_rank))
    assert set(found.by_collective) == {keys[2]}


def test_a_run_that_shares_the_gpu_with_another_kernel_is_no_twin():
    rows, names = runs([10_000, 10_000, 10_000, 15_000], beside=(3,))
    rows.append((COMP, 2_000_000, 2_010_000))
    names.append("other")
    found = found_in(gpu_trace(rows, names=names))
    assert found.total.num_overlapped == 0


def test_runs_alone_that_differ_too_much_have_no_base_unless_their_shapes_are_known():
    durations = [10_000, 10_000, 40_000, 40_000, 10_000, 40_000, 45_000]
    rows, names = runs(durations, beside=(6,))
    assert found_in(gpu_trace(rows, names=names)).total.num_overlapped == 0
    assert found_in(gpu_trace(rows, names=names, shapes=[0] * len(rows))).total.num_overlapped == 1


def test_a_run_beside_that_must_be_another_problem_is_left_out():
    rows, names = runs([10_000] * 5 + [200_000, 14_000], beside=(5, 6))
    found = found_in(gpu_trace(rows, names=names))
    assert (found.total.num_overlapped, found.total.stretched_ns) == (1, 4_000)
    assert found.uncovered_ns == 200_000


def test_noise_alone_is_not_proven_to_be_contention_in_95_of_100_traces():
    rng = np.random.default_rng(7)
    proven = 0
    for seed in range(60):
        durations = rng.normal(100_000, 5_000, 60).round().astype(int).tolist()
        rows, names = runs(durations, beside=range(0, 60, 2))
        trace = gpu_trace(rows, names=names)
        proven += contention_of([trace], [occupation_of(trace.events)], seed=seed).total.is_proven
    # 2.5 % are expected to exceed a 95 % interval from below: 1.5 of 60; more than 6 has a chance below 0.1 %.
    assert proven <= 6


def test_a_slowdown_of_a_fifth_is_covered_by_the_interval():
    rng = np.random.default_rng(3)
    held = 0
    for seed in range(40):
        alone = rng.normal(100_000, 5_000, 30)
        beside = rng.normal(120_000, 6_000, 30)
        rows, names = runs(np.concatenate((alone, beside)).round().astype(int).tolist(), beside=range(30, 60))
        trace = gpu_trace(rows, names=names)
        total = contention_of([trace], [occupation_of(trace.events)], seed=seed).total
        held += total.low is not None and total.high is not None and total.low <= 1.2 <= total.high
    # Of 40 intervals of 95 %, fewer than 33 hold the truth with a chance below 0.2 %.
    assert held >= 33


def test_the_same_traces_and_seed_give_the_same_findings():
    rng = np.random.default_rng(1)
    rows, names = runs(rng.integers(9_000, 12_000, 40).tolist(), beside=range(20, 40))
    trace = gpu_trace(rows, names=names)
    first, second = found_in(trace), found_in(trace)
    assert (first.total, first.classes, first.kernels, first.blame) == (
        second.total,
        second.classes,
        second.kernels,
        second.blame,
    )


def test_twins_are_found_over_ranks_where_shapes_are_unknown():
    alone, names = runs([10_000] * 4)
    beside, more = runs([15_000] * 4, beside=range(4))
    traces = [gpu_trace(alone, names=names), gpu_trace(beside, names=more, rank=1)]
    found = contention_of(traces, [occupation_of(trace.events) for trace in traces])
    assert found.of_rank == (0, 20_000)


def test_nothing_beside_collectives_gives_empty_findings():
    found = found_in(gpu_trace([(COMP, 0, 10), (COMM, 20, 30)]))
    assert found.total.slowdown == 1.0
    assert (found.classes, found.kernels, found.blame) == ((), (), {})
    empty = found_in(gpu_trace([]))
    assert empty.covered_ns == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256", KernelClass.GEMM),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", KernelClass.GEMM),
        ("Cijk_Ailk_Bljk_BBS_BH_MT256x128x64", KernelClass.GEMM),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", KernelClass.ATTENTION),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", KernelClass.NORMALISATION),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native>", KernelClass.OPTIMIZER),
        ("void at::native::vectorized_elementwise_kernel<4>", KernelClass.ELEMENTWISE),
        ("mystery", KernelClass.OTHER),
    ],
)
def test_kernels_have_classes(name, expected):
    assert kernel_class(name) is expected


@pytest.mark.parametrize(
    ("num_alone", "num_during", "said"),
    [(3, 8, "Too few runs for advice: 3 alone at most"), (8, 3, "3 during one collective at most"), (5, 5, "")],
)
def test_the_words_say_where_runs_are_too_few_for_advice(num_alone, num_during, said):
    rows, names = runs([100_000] * (num_alone + num_during), beside=range(num_during))
    words = _too_few(found_in(gpu_trace(rows, names=names)))
    assert said in words
    assert bool(words) == bool(said)
