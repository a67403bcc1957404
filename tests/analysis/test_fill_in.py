import numpy as np
import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.concurrency_model import alone_ns, modelled_kernel, slowdown_during
from lagom_overlap.analysis.fill_in import fill_in
from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.trace_gpu import cluster_of_trace
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.trace.gpu_trace import EventRole

K, C = EventRole.COMPUTE, EventRole.COMM
US = 1000
H100 = {"gpu_name": "NVIDIA H100 80GB HBM3", "num_sms": 132}


def walked(alone, slowdown, spells, step=0.05):
    """How long a kernel takes that advances at 1/slowdown while a collective runs: in small steps of time."""
    now, left = 0.0, 1.0
    while left > 0:
        beside = any(start <= now < end for start, end in spells)
        left -= step / (alone * (slowdown if beside else 1.0))
        now += step
    return now


@pytest.mark.parametrize("spells", [[(0, 1e9)], [(0, 30)], [(20, 50)], [(10, 20), (60, 90)], []])
@pytest.mark.parametrize("slowdown", [1.0, 1.3, 2.5])
def test_the_time_alone_inverts_a_walk_in_small_steps(spells, slowdown):
    length = walked(80.0, slowdown, spells)
    beside = sum(max(0.0, min(end, length) - start) for start, end in spells)
    assert alone_ns(length, beside, slowdown) == pytest.approx(80.0, abs=0.2)


def findings_of(rows, **fields):
    names = ["gemm_128x128" if role is K else "nccl" for role, _, _ in rows]
    grids = [(1056, 1, 1) if role is K else (16, 1, 1) for role, _, _ in rows]
    return analyse([gpu_trace(rows, names=names, grids=grids, **(H100 | fields))])


def test_a_gemm_of_whole_waves_loses_the_sms_that_channels_hold():
    # 1056 blocks on 132 SMs are 8 waves, on the 116 that 16 channels leave 9.1: ten under the paper's ceiling.
    findings = findings_of([(K, 0, 100 * US), (C, 0, 100 * US)])
    cluster = cluster_of_trace(findings.ranks[0].trace)
    assert cluster is not None
    model = ContentionModel(cluster, load_profile("plausible"))
    key = KernelKey("gemm_128x128", (1056, 1, 1), (64, 1, 1))
    row = findings.rows[0]
    found = slowdown_during(key, 100 * US, model, key=row.key, kind=row.kind, comm_ns=row.median_ns)
    assert 1.15 < found < 10 / 8 + 0.1
    filled = fill_in(findings)
    assert (filled.num_runs, filled.run_ns, filled.left_ns) == (1, 100 * US, 0)
    assert filled.alone_ns == pytest.approx(100 * US / found)
    assert "no measurement" in filled.sentences[0]


def test_kernels_with_a_twin_are_left_to_the_measurement():
    rows = [(K, at * US, (at + 50) * US) for at in (0, 100, 200, 300)] + [(C, 290 * US, 360 * US)]
    filled = fill_in(findings_of(rows))
    assert filled.num_runs == 0
    assert filled.sentences == ()


def test_without_a_preset_of_the_gpu_nothing_is_estimated():
    filled = fill_in(findings_of([(K, 0, 100 * US), (C, 0, 100 * US)], gpu_name="NVIDIA RTX A4000"))
    assert (filled.num_runs, filled.left_ns) == (0, 100 * US)


def test_what_is_neither_measured_nor_estimated_is_left():
    # The second kernel runs while another one computes: no estimate, but it overlaps the collective.
    rows = [(K, 0, 100 * US), (C, 0, 400 * US), (K, 200 * US, 300 * US), (K, 210 * US, 290 * US)]
    findings = findings_of(rows)
    filled = fill_in(findings)
    assert (filled.num_runs, filled.run_ns, filled.left_ns) == (1, 100 * US, 180 * US)
    assert filled.run_ns + filled.left_ns == findings.contention.uncovered_ns


def test_the_longest_collective_beside_a_run_counts():
    rows = [(K, 0, 100 * US), (C, 0, 10 * US), (C, 10 * US, 90 * US)]
    few, many = ({"num_channels": channels} for channels in (1, 64))
    trace = gpu_trace(rows, names=["gemm", "a", "b"], grids=[(1056, 1, 1)] * 3, calls=[few, many], **H100)
    longer_has_many = fill_in(analyse([trace]))
    trace = gpu_trace(rows, names=["gemm", "a", "b"], grids=[(1056, 1, 1)] * 3, calls=[many, few], **H100)
    assert longer_has_many.stretched_ns > 3 * fill_in(analyse([trace])).stretched_ns


def test_an_estimate_never_makes_a_run_longer_alone():
    rng = np.random.default_rng(0)
    rows, at = [], 0
    for _ in range(30):
        length = int(rng.integers(5, 300)) * US
        rows += [(K, at, at + length), (C, at, at + length // 2)]
        at += length + 10
    rows.sort(key=lambda row: (row[1], row[2]))
    names = [f"kernel{i}" for i in range(len(rows))]
    filled = fill_in(analyse([gpu_trace(rows, names=names, **H100)]))
    assert filled.num_runs == 30
    assert 0 <= filled.stretched_ns < filled.run_ns


def test_gpus_are_known_by_whole_words_of_their_name():
    def cluster(name):
        return cluster_of_trace(gpu_trace([(K, 0, 1)], gpu_name=name, num_sms=108))

    assert cluster("NVIDIA A100-SXM4-80GB").gpu.name.startswith("A100")
    assert cluster("NVIDIA A100-SXM4-80GB").gpu.num_sms == 108
    assert cluster("NVIDIA H200").gpu.name.startswith("H200")
    sister = cluster("NVIDIA H100 PCIe").gpu  # whose GPCs are not those of the one that was measured
    assert (sister.num_sms, sister.gpc_sms) == (108, ())
    assert cluster("NVIDIA RTX A4000") is None
    assert cluster("") is None


@pytest.mark.parametrize("name", ["gemm", "vectorized_elementwise_kernel"])
def test_a_modelled_kernel_takes_its_time_alone(name):
    cluster, profile = load_preset("h200"), load_profile("plausible")
    kernel = modelled_kernel(KernelKey(name, (2000, 1, 1), (256, 1, 1)), 70 * US, cluster.gpu, profile)
    assert ContentionModel(cluster, profile).kernel_seconds(kernel) == pytest.approx(70e-6, rel=1e-6)
