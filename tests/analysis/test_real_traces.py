"""The exact figures of every recorded trace against a plain count: json, Decimal, one sweep over sorted edges."""

import gzip
import json
import re
import tarfile
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze

FILES = ("hta/nccl_data.json.gz", "hta/v100_rank1of2_test.json.gz", "tracelens/b200_eager_trace.json.gz")
COMMUNICATES = re.compile("nccl|multimem_all_reduce")
"""NCCL's kernels, and PyTorch's symmetric memory in the B200 trace."""
DLRM = "param_dlrm_8xV100/dlrm_kineto.tar.gz"


def counted(data: bytes) -> dict[str, int]:
    """Lengths in ns, by walking from edge to edge and looking at what runs between two."""
    edges = []
    for event in json.loads(data, parse_float=Decimal, strict=False)["traceEvents"]:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        sort = "memory" if event["cat"] != "kernel" else "comm" if COMMUNICATES.search(event["name"]) else "compute"
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        edges += [(start, 1, sort), (start + length, -1, sort)]
    edges.sort(key=lambda edge: edge[0])
    found: Counter[str] = Counter(span=edges[-1][0] - edges[0][0])
    running: Counter[str] = Counter()
    before = edges[0][0]
    for at, change, sort in edges:
        length, before = at - before, at
        for name in ("compute", "comm", "memory"):
            found[name] += length if running[name] else 0
        found["overlap"] += length if running["comm"] and running["compute"] else 0
        found["idle"] += length if not any(running.values()) else 0
        running[sort] += change
    return dict(found)


def assert_counted(data: bytes, rank) -> None:
    plain = counted(data)
    ours = {
        "span": rank.span_s,
        "compute": rank.compute_s,
        "comm": rank.comm_s,
        "memory": rank.memory_s,
        "overlap": rank.overlap_s,
        "idle": rank.idle_s,
    }
    assert {name: round(value * 1e9) for name, value in ours.items()} == plain
    assert round(rank.exposed_comm_s * 1e9) == plain["comm"] - plain["overlap"]


@pytest.mark.parametrize("file", FILES)
def test_a_recorded_trace_has_the_figures_of_a_plain_count(shared_traces, file):
    path = shared_traces / file
    (rank,) = run_analyze(AnalyzeRequest(traces=(path,))).ranks
    assert_counted(gzip.decompress(path.read_bytes()), rank)


def test_every_rank_of_an_archive_has_the_figures_of_a_plain_count(shared_traces):
    ranks = {
        Path(rank.file.partition(":")[2]).name: rank
        for rank in run_analyze(AnalyzeRequest(traces=(shared_traces / DLRM,))).ranks
    }
    with tarfile.open(shared_traces / DLRM) as archive:
        members = [member for member in archive if member.name.endswith(".json") and "/._" not in member.name]
        assert len(members) == len(ranks) == 8
        for member in members:
            file = archive.extractfile(member)
            assert file is not None
            assert_counted(file.read(), ranks[Path(member.name).name])
