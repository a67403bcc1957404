"""Traces of an H100 that we recorded ourselves, against the same products' slowdown in a sweep with CUDA events.

Products of 4096 x 4096 x 4096 in bf16 during collectives of NCCL 2.30.7 between two ranks of one GPU. The sweep timed
whole batches during the collective and without it (benchmarks/results/h100_2026-11-22, 20 repeats); the trace has the
same products partly covered, so its ratio lies a little lower.
"""

import gzip
from pathlib import Path

import pytest
from test_real_traces import assert_counted

from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze

TRACES = Path(__file__).parents[1] / "data" / "h100"
SWEPT = {"reduce_scatter_8ch": 1.451, "all_reduce_8ch": 1.457, "all_gather_16ch": 1.593}


@pytest.mark.parametrize("name", SWEPT)
def test_the_stretch_of_a_trace_is_that_of_the_sweep(name):
    found = run_analyze(AnalyzeRequest(traces=(TRACES / f"{name}.json.gz",)))
    total = found.contention.total
    assert SWEPT[name] * 0.93 < total.slowdown < SWEPT[name] * 1.01
    assert total.low < total.slowdown < total.high
    assert [row.count for row in found.collectives] == [12, 12]  # two ranks, four layers, three steps
    assert {row.channels for row in found.collectives} == {int(name.split("_")[-1].removesuffix("ch"))}


@pytest.mark.parametrize("name", SWEPT)
def test_a_recorded_trace_has_the_figures_of_a_plain_count(name):
    path = TRACES / f"{name}.json.gz"
    (rank,) = run_analyze(AnalyzeRequest(traces=(path,))).ranks
    assert_counted(gzip.decompress(path.read_bytes()), rank)
