"""HTA 0.5.0 (pandas 2.3) was run on these traces; its figures are in the data folder's README."""

import math

import pytest
from kineto_traces import NCCL, KinetoFile

from lagom_overlap.analysis.hta import hta_figures
from lagom_overlap.analysis.measures import occupation_of, whole
from lagom_overlap.trace.reader import read_traces

DLRM = {
    0: (4.50, 6419, 1034, 5556, 13009),
    1: (2.47, 6428, 1246, 11075, 18749),
    2: (7.88, 7046, 1068, 3236, 11350),
    3: (3.31, 8145, 1240, 9468, 18853),
    4: (0.56, 8887, 1126, 6576, 16589),
    5: (0.64, 9121, 1041, 6230, 16392),
    6: (7.56, 7051, 1051, 3308, 11410),
    7: (9.51, 8308, 1059, 1600, 10967),
}


def figures(trace, **options):
    found = hta_figures(trace, **options)
    return (round(found.overlap_pct, 2), found.idle_us, found.compute_us, found.non_compute_us, found.span_us)


def test_all_eight_ranks_of_dlrm_equal_hta_to_the_digit(shared_traces):
    traces = read_traces([shared_traces / "param_dlrm_8xV100" / "dlrm_kineto.tar.gz"])
    assert {trace.rank: figures(trace) for trace in traces} == DLRM


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("hta/nccl_data.json.gz", (14.31, 338781, 75169, 21636, 435586)),
        ("hta/v100_rank1of2_test.json.gz", (68.80, 46910, 429216, 152245, 628371)),
        ("tracelens/b200_eager_trace.json.gz", (0.00, 73669, 10153, 664, 84486)),
    ],
)
def test_the_other_traces_equal_hta_to_the_digit(shared_traces, file, expected):
    (trace,) = read_traces([shared_traces / file])
    assert figures(trace) == expected


def test_without_rounding_the_figures_are_hta_s_own_unrounded_ones(shared_traces):
    (trace,) = read_traces([shared_traces / "hta" / "nccl_data.json.gz"])
    overlap, *times = figures(trace, rounded=False)
    assert overlap == 14.76
    # HTA adds up float64 microseconds of 4.5e12 and is off by some 0.05 us itself.
    assert times == pytest.approx([336419.67, 76935.83, 22232.02, 435587.56], abs=0.1)


def test_the_exact_figures_equal_tracelens_s(shared_traces):
    """TraceLens counts a memset as computation, so its computation and exposed communication differ; these do not."""
    (trace,) = read_traces([shared_traces / "hta" / "nccl_data.json.gz"])
    found = whole(trace.events, occupation_of(trace.events))
    assert found.comm_ns / 1e6 == pytest.approx(46.876492, abs=2e-6)
    assert found.idle_ns / 1e6 == pytest.approx(503.050928, abs=1e-4)
    assert found.span_ns / 1e6 == pytest.approx(660.551006, abs=1e-6)


def test_hta_rounds_an_event_inwards_and_we_do_not(tmp_path):
    file = KinetoFile()
    file.kernel("gemm", 10.4, 10.0)  # 10.4 .. 20.4 -> 11 .. 20
    file.kernel(NCCL.format("AllReduce_Sum_f32_RING_LL"), 15.5, 10.0, stream=20)  # 15.5 .. 25.5 -> 16 .. 25
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    found = hta_figures(trace)
    assert (found.compute_us, found.comm_us, found.overlap_us, found.span_us) == (9, 9, 4, 14)
    exact = whole(trace.events, occupation_of(trace.events))
    assert (exact.compute_ns, exact.comm_ns, exact.overlap_ns, exact.span_ns) == (10_000, 10_000, 4_900, 15_100)


def test_hta_leaves_out_the_last_step_and_what_has_no_launch(tmp_path):
    file = KinetoFile()
    file.step(1, 0, 100)
    file.step(2, 100, 100)
    file.kernel("a", 20, 30)
    file.kernel("b", 60, 10, launch=None)
    file.kernel("c", 150, 30)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert hta_figures(trace).span_us == 30
    assert math.isclose(whole(trace.events, occupation_of(trace.events)).span_ns, 160_000)


def test_hta_counts_foreign_communication_as_computation(tmp_path):
    file = KinetoFile()
    file.kernel("void deep_ep::intranode::dispatch<8>(int*)", 0, 10)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert (hta_figures(trace).compute_us, hta_figures(trace).overlap_pct) == (10, None)
    assert whole(trace.events, occupation_of(trace.events)).comm_ns == 10_000


def test_hta_counts_a_cpu_operator_that_carries_a_stream(tmp_path):
    file = KinetoFile()
    file.kernel("a", 0, 10)
    file.add(ph="X", cat="cpu_op", name="triton_poi_fused", pid=1, tid=1, ts=20, dur=5, args={"stream": 0})
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    assert (hta_figures(trace).compute_us, hta_figures(trace).span_us) == (15, 25)


def test_hta_takes_off_a_microsecond_for_an_event_within_one_that_runs_alone(tmp_path):
    # What HTA 0.5.0 says of this file.
    file = KinetoFile()
    file.kernel("gemm", 100.0, 120.0)
    file.kernel("Memcpy DtoH (Device -> Pageable)", 230, 5, cat="gpu_memcpy", bytes=4)
    file.kernel("Memset (Device)", 250.25, 0.5, cat="gpu_memset", bytes=4)
    file.kernel("gemm", 299.5, 0.75)
    (trace,) = read_traces([file.write(tmp_path / "t.json")])
    figures = hta_figures(trace)
    assert (figures.span_us, figures.idle_us, figures.compute_us, figures.non_compute_us) == (200, 76, 120, 4)
